"""A state machine that starts, kills and restores a data loader, and compares it with an uninterrupted run."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch._dynamo  # noqa: F401  which torch imports later, in each process, and takes longer than all else
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

BATCH = 24  # samples of a step, over all ranks
WORLDS, WORKERS = (1, 2, 3, 4), (0, 1, 2)
SCENARIOS = ("nothing", "workers", "ranks", "new shards", "withdrawn sample")  # what changes before a restore
PATIENCE = 60.0  # seconds that a loader may take for a step
FORK: Any = multiprocessing.get_context("fork")  # so that libraries are imported once


class Loader:
    """One rank of a data loader. A sample is a text: its id, and perhaps ':' and what it became.

    An adapter has `open`, which returns the library's loader, and `write(folder, shards)`, which adds shards with the
    samples `texts`. Where withdrawal is offered, `withdraw(folder, number)` returns the id of the withdrawn sample.
    """

    requires: ClassVar[tuple[str, ...]] = ()  # pinned packages
    docs: ClassVar[str]  # page that documents how to resume
    promises: ClassVar[dict[str, str]]  # scenario -> `exact`, or `complete`: each sample once, in any order
    shards, per_shard = 24, 12  # that every combination of ranks and workers can share evenly

    def __init__(self, folder: Path, rank: int, world: int, workers: int, states: Sequence[Any] | None):
        self.loader: Any = self.open(folder, rank, world, workers)
        if states:  # what `save` returned on each rank of the world before
            self.loader.load_state_dict(states[rank % len(states)])
        self.batches = self.epochs()

    def open(self, folder: Path, rank: int, world: int, workers: int) -> Any:
        raise NotImplementedError

    def epochs(self):
        while True:
            yield from self.loader

    def take(self) -> list[str]:
        """Return this rank's samples of the next step."""
        batch = next(self.batches)
        return list(batch["text"] if isinstance(batch, dict) else batch)

    def save(self) -> Any:
        return self.loader.state_dict()

    @classmethod
    def texts(cls, shard: int) -> list[str]:
        return [f"{shard * cls.per_shard + number:06d}" for number in range(cls.per_shard)]


@functools.cache
def data_of(loader: Any) -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="resume-")
    loader.write(Path(folder.name, "data"), range(loader.shards))
    return folder


class Ranks:
    """The processes of a loader on `world` ranks. After a refusal (an error, or no answer) they return no samples."""

    def __init__(self, loader: type[Loader], folder: Path, world: int, workers: int, states: Sequence[bytes] | None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        restored, self.ranks, self.refusal = states and [pickle.loads(state) for state in states], [], None
        for rank in range(world):
            pipe, theirs = FORK.Pipe()
            variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = loader, theirs, variables, folder, rank, world, workers, restored
            self.ranks.append((FORK.Process(target=serve, args=arguments), pipe))
            self.ranks[-1][0].start()
            theirs.close()

    def ask(self, job: str) -> None:
        for _, pipe in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # its error is received as an answer
                pipe.send(job)

    def answers(self, job: str) -> list[Any]:
        received = []
        if not self.refusal:
            self.ask(job)
            for _, pipe in self.ranks:
                try:
                    received.append(pipe.recv() if pipe.poll(PATIENCE) else f"no answer in {PATIENCE:g} s")
                except EOFError:
                    received.append("a process died")
            self.refusal = next((answer for answer in received if isinstance(answer, str)), None)
        return [] if self.refusal else received

    def take(self) -> list[str]:
        return [sample for samples in self.answers("take") for sample in samples]

    def kill(self) -> None:
        for process, pipe in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            pipe.close()


def serve(loader: type[Loader], pipe: Any, variables: dict[str, str], *arguments: Any) -> None:
    """Answer a `Ranks`, in a process of its own."""
    os.setpgid(0, 0)
    os.environ.update(variables)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        data = loader(*arguments)
        while True:
            pipe.send(data.take() if pipe.recv() == "take" else pickle.dumps(data.save()))
    except BaseException as error:  # noqa: BLE001  of any library
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")


def count_reads(process: int) -> int:
    """Return the number of read calls of a process and its children."""
    with contextlib.suppress(OSError):
        folder = Path(f"/proc/{process}")
        children = [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
        return int((folder / "io").read_text().split()[5]) + sum(count_reads(int(child)) for child in children)
    return 0


@functools.cache
def uninterrupted(loader: type[Loader], world: int, workers: int, events: tuple, count: int) -> list[list[str]]:
    """Return the steps of a run that nobody stopped, with these changes of its data: (step, method, argument)."""
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        shutil.copytree(data_of(loader).name, folder, dirs_exist_ok=True)
        ranks, steps = Ranks(loader, Path(folder, "data"), world, workers, None), []
        for step in range(count):
            for _, method, argument in [event for event in events if event[0] == step]:
                getattr(loader, method)(Path(folder, "data"), argument)
            steps.append(ranks.take())
        ranks.kill()
    return steps


def count_samples(steps: list[list[str]], withdrawn: Mapping[str, int], until: Mapping[str, int]) -> list[Counter]:
    """Count the samples of each step, without those that were withdrawn before it, except from the step in `until`."""
    ids = [[sample.partition(":")[0] for sample in samples] for samples in steps]
    gone = [
        {key for key in withdrawn if withdrawn[key] <= step < until.get(key, step + 1)} for step in range(len(steps))
    ]
    return [
        Counter(sample for sample, key in zip(samples, keys, strict=True) if key not in without)
        for samples, keys, without in zip(steps, ids, gone, strict=True)
    ]


class History(RuleBasedStateMachine):
    """A history of a loader. `found` takes what was seen; with `strict`, a history that is not exact is an error."""

    loader: ClassVar[type[Loader]]
    scenario: ClassVar[str]  # of SCENARIOS, or `all`
    strict: ClassVar[bool]
    found: ClassVar[list[dict[str, Any]]]

    @initialize(world=st.sampled_from(WORLDS), workers=st.sampled_from(WORKERS))
    def start(self, world: int, workers: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="resume-"))
        shutil.copytree(data_of(self.loader).name, self.folder, dirs_exist_ok=True)
        self.world, self.workers, self.happened = world, workers, [f"start {world} x {workers}"]
        self.first = (1, 0) if self.scenario == "all" else (world, workers)
        self.steps, self.saved, self.starts = [], None, []
        self.events, self.withdrawn, self.gone = [], {}, {}
        self.launch(None)

    def launch(self, states: list[bytes] | None) -> None:
        begin = time.perf_counter()
        self.ranks = Ranks(self.loader, self.folder / "data", self.world, self.workers, states)
        self.take(1)
        measured = {"seconds": time.perf_counter() - begin, "bytes": sum(map(len, states or ()))}
        measured["reads"] = sum(count_reads(process.pid) for process, _ in self.ranks.ranks)
        self.starts.append(measured | {"restored": bool(states)})

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        self.steps += [self.ranks.take() for _ in range(count)]

    @precondition(lambda self: not self.ranks.refusal)
    @rule(save=st.booleans(), lost=st.integers(0, 4), delay=st.none() | st.integers(0, 30), turn=st.integers(1, 12))
    def kill_and_restore(self, save: bool, lost: int, delay: int | None, turn: int) -> None:
        """Save, or use what was saved before; lose some steps, the last one `delay` ms after it was asked for."""
        if save or not self.saved:
            self.take(0 if self.strict else len(self.steps) % 2)  # what is left of an epoch can then be shared evenly
            self.saved = len(self.steps), self.ranks.answers("save")
        self.take(lost)
        if self.ranks.refusal:
            return
        if delay is not None:
            self.ranks.ask("take")
            time.sleep(delay / 1000)
        self.ranks.kill()
        self.world = self.other(WORLDS, self.world, turn, "ranks")
        self.workers = self.other(WORKERS, self.workers, turn, "workers")
        done, states = self.saved
        self.happened.append(f"save {done}, kill {len(self.steps)}, restore {self.world} x {self.workers}")
        self.events = [(min(step, done), *event) for step, *event in self.events]
        self.withdrawn = {sample: min(step, done) for sample, step in self.withdrawn.items()}
        self.gone = {sample: min(done, self.gone.get(sample, done)) for sample in self.withdrawn}
        del self.steps[done:]
        self.launch(states)

    def other(self, choices: Sequence[int], now: int, turn: int, scenario: str) -> int:
        """Return another choice if that is the scenario, any choice if all may change, or the same."""
        by = {"all": turn, scenario: 1 + turn % (len(choices) - 1)}.get(self.scenario, 0)
        return choices[(choices.index(now) + by) % len(choices)]

    @precondition(lambda self: self.scenario in ("new shards", "all") and len(self.events) < 3)
    @rule()
    def commit_shard(self) -> None:
        self.change("write", (self.loader.shards + len(self.events),))

    @precondition(lambda self: self.scenario in ("withdrawn sample", "all") and len(self.withdrawn) < 2)
    @rule(number=st.integers(0, 39))
    def withdraw(self, number: int) -> None:
        self.withdrawn.setdefault(self.change("withdraw", number), len(self.steps))

    def change(self, method: str, argument: Any) -> Any:
        self.happened.append(f"{method} {argument} at {len(self.steps)}")
        self.events.append((len(self.steps), method, argument))
        return getattr(self.loader, method)(self.folder / "data", argument)

    def teardown(self) -> None:
        """Interrupt a history that was not yet, go on to the end of an epoch, and compare."""
        if not hasattr(self, "starts"):
            return
        if self.scenario == "new shards" and not self.events:
            self.commit_shard()
        if self.scenario == "withdrawn sample" and not self.events:
            self.withdraw(7)
        if not self.ranks.refusal and (len(self.starts) < 2 or len(self.gone) < len(self.withdrawn)):
            self.kill_and_restore(True, 2, None, 1)
        self.take(-len(self.steps) % (self.loader.shards * self.loader.per_shard // BATCH) + 5 * self.strict)
        self.ranks.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        promised = uninterrupted(self.loader, *self.first, tuple(self.events), len(self.steps))
        promised = count_samples(promised, self.withdrawn, {})
        seen, refusal = count_samples(self.steps, self.withdrawn, self.gone), self.ranks.refusal
        total, came = sum(promised, Counter()), sum(seen, Counter())
        numbers = {"lost": 0 if refusal else (total - came).total(), "repeated": (came - total).total()}
        result = {"exact": promised == seen, "refused": refusal, "starts": self.starts, "history": self.happened}
        self.found.append(result | numbers | {"complete": not refusal and not any(numbers.values())})
        assert promised == seen or not self.strict, self.found[-1]


def run_histories(loader: type[Loader], scenario: str, count: int, strict: bool = False) -> list[dict[str, Any]]:
    """Run about `count` histories in which `scenario` changes before a restore. Return what was seen in each."""
    machine = type("History", (History,), {"loader": loader, "scenario": scenario, "strict": strict, "found": []})
    repeatable = settings(derandomize=True, database=None, deadline=None, suppress_health_check=HealthCheck)
    bounded = settings(repeatable, max_examples=count, stateful_step_count=8, phases=[Phase.generate])
    run_state_machine_as_test(machine, settings=bounded)
    return machine.found
