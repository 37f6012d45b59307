"""A state machine that starts, kills and restores a data loader, and compares it with a run that nobody stopped."""

import functools
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch._dynamo  # which torch imports later, in each process, and takes longer than all else
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

BATCH, EPOCH = 12, 6  # samples of a step, over all ranks; steps of an epoch
WORLDS, WORKERS = (1, 2, 3), (0, 1, 2)
CHANGES = ("nothing", "workers", "ranks", "new shards", "withdrawn sample")  # what may change before a restore
PATIENCE = 60  # seconds that a loader may take for a step
FORK: Any = multiprocessing.get_context("fork")  # so that libraries are imported once


class Loader:
    """One rank of a data loader. A sample is a text: its id, and perhaps ':' and what it became.

    An adapter has `open`, which returns the library's loader, and `write(folder, shard, texts)`, which adds a shard.
    Where withdrawal is offered, `withdraw(folder, number)` returns the id of the withdrawn sample.
    """

    loader: Any
    shards, per_shard = 12, 6  # that every combination of ranks and workers can share evenly

    def __init__(self: Any, folder: Path, rank: int, world: int, workers: int, states: Sequence[Any]):
        if world > 1:
            torch.distributed.init_process_group("gloo")
        self.loader = self.open(folder, rank, world, workers)
        if states:  # what `save` returned on each rank of the world before
            self.loader.load_state_dict(states[rank % len(states)])
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.loader))  # of all epochs

    def take(self) -> list[str]:
        """Return this rank's samples of the next step."""
        batch = next(self.batches)
        return list(batch["text"] if isinstance(batch, dict) else batch)

    def save(self) -> Any:
        return self.loader.state_dict()

    @classmethod
    def add(cls: Any, folder: Path, shard: int) -> None:
        numbers = range(shard * cls.per_shard, (shard + 1) * cls.per_shard)
        cls.write(folder, shard, [f"{number:06d}" for number in numbers])


@functools.cache
def data_of(loader: type[Loader]) -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="resume-")
    for shard in range(loader.shards):
        loader.add(Path(folder.name), shard)
    return folder


class Run:
    """A loader on a copy of its data. After a refusal (an error, or no answer) it returns no samples."""

    def __init__(self, loader: Any, world: int, workers: int):
        self.loader, self.copy = loader, tempfile.TemporaryDirectory(prefix="resume-")
        self.folder, self.refusal = Path(self.copy.name), None
        shutil.copytree(data_of(loader).name, self.folder, dirs_exist_ok=True)
        self.launch(world, workers, [])

    def launch(self, world: int, workers: int, states: Sequence[bytes]) -> None:
        """Start a process for each rank, from nothing or from what `answers("save")` returned."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks = []
        for rank in range(world):
            pipe, theirs = FORK.Pipe()
            place = self.folder, rank, world, workers
            self.ranks.append((FORK.Process(target=serve, args=(theirs, port, states, self.loader, place)), pipe))
            self.ranks[-1][0].start()

    def answers(self, job: str) -> list[Any]:
        if self.refusal:
            return []
        for _, pipe in self.ranks:
            pipe.send(job)
        received = [pipe.recv() if pipe.poll(PATIENCE) else f"no answer in {PATIENCE} s" for _, pipe in self.ranks]
        self.refusal = next((answer for answer in received if isinstance(answer, str)), None)
        return [] if self.refusal else received

    def take(self) -> list[str]:
        return [sample for samples in self.answers("take") for sample in samples]

    def kill(self, seconds: float = 0) -> None:
        """Kill all processes so many seconds after another step was asked for."""
        for _, pipe in self.ranks:
            pipe.send("take")
        time.sleep(seconds)
        for process, _ in self.ranks:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()


def count_reads() -> int:
    """Return the number of read calls of this process and its workers so far."""
    processes = "self", *(worker.pid for worker in multiprocessing.active_children())
    return sum(int(Path(f"/proc/{process}/io").read_text().split()[5]) for process in processes)


def serve(pipe: Any, port: int, states: Sequence[bytes], loader: Any, place: tuple[Path, int, int, int]) -> None:
    """Answer a `Run`, in a process of its own."""
    os.setpgid(0, 0)
    _, rank, world, _ = place
    variables: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        data = loader(*place, [*map(pickle.loads, states)])
        jobs = {"take": data.take, "save": lambda: pickle.dumps(data.save()), "reads": count_reads}
        while True:
            pipe.send(jobs[pipe.recv()]())
    except BaseException as error:  # noqa: BLE001  of any library
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
        signal.pause()


@functools.cache
def uninterrupted(loader: type[Loader], world: int, workers: int, events: tuple, count: int) -> list[list[str]]:
    """Return the steps of a run that nobody stopped, with these changes of its data: (step, method, argument)."""
    run, steps, gone = Run(loader, world, workers), [], set()  # its workers may have loaded samples that are gone
    for step in range(count):
        gone |= {getattr(loader, method)(run.folder, argument) for at, method, argument in events if at == step}
        steps.append([sample for sample in run.take() if sample.partition(":")[0] not in gone])
    run.kill()
    return steps


class History(RuleBasedStateMachine):
    """A history of a loader. `found` takes what was seen."""

    loader: ClassVar[Any]
    changes: ClassVar[Collection[str]]  # all of them happen before each restore
    found: ClassVar[list[dict[str, Any]]]

    @initialize(world=st.sampled_from(WORLDS), workers=st.sampled_from(WORKERS))
    def start(self, world: int, workers: int) -> None:
        self.run, self.events, self.saved = Run(self.loader, world, workers), [], ()
        self.starts: list[dict[str, Any]] = [{"ranks": world, "workers": workers}]
        self.steps = [self.run.take()]

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        self.steps += [self.run.take() for _ in range(count)]

    @rule(save=st.booleans(), lost=st.integers(0, 3), milliseconds=st.integers(0, 30), choice=st.integers(0, 11))
    def kill_and_restore(self, save: bool, lost: int, milliseconds: int, choice: int) -> None:
        """Save or not, lose some steps in a kill, change something, and restore what was saved last."""
        if save or not self.saved:
            self.saved = len(self.steps), self.run.answers("save")
        self.take(lost)
        if self.run.refusal:
            return
        self.run.kill(milliseconds / 1000)
        (done, states), start = self.saved, self.starts[-1]
        world, workers = start["ranks"], start["workers"]
        if "ranks" in self.changes:
            world = [other for other in WORLDS if other != world][choice % 2]
        if "workers" in self.changes:
            workers = [other for other in WORKERS if other != workers][choice // 2 % 2]
        shard = self.loader.shards + len(self.events)
        for change, method, argument in (("new shards", "add", shard), ("withdrawn sample", "withdraw", choice)):
            if change in self.changes:
                getattr(self.loader, method)(self.run.folder, argument)
                self.events.append((done, method, argument))
        begin = time.perf_counter()
        self.run.launch(world, workers, states)
        self.steps[done:] = [self.run.take()]
        seconds, reads = time.perf_counter() - begin, sum(self.run.answers("reads"))
        start = {"ranks": world, "workers": workers, "step": done, "seconds": round(seconds, 2), "reads": reads}
        self.starts.append(start | {"bytes": sum(map(len, states))})

    def teardown(self) -> None:
        """Interrupt a history that was not yet, go on to the end of an epoch, and compare."""
        if not hasattr(self, "run"):
            return
        if len(self.starts) == 1:
            self.kill_and_restore(True, 2, 0, 1)
        self.take(-len(self.steps) % EPOCH)
        self.run.kill()
        promised = uninterrupted(self.loader, *self.starts[0].values(), tuple(self.events), len(self.steps))
        same = [*map(sorted, promised)] == [*map(sorted, self.steps)]
        total, came = (Counter(sample for step in steps for sample in step) for steps in (promised, self.steps))
        result: dict[str, Any] = {"exact": same and not self.run.refusal, "refused": self.run.refusal}
        result |= {"lost": (total - came).total(), "repeated": (came - total).total()}
        self.found.append(result | {"starts": self.starts})


def run_histories(loader: type[Loader], changes: Collection[str], count: int) -> list[dict[str, Any]]:
    """Run `count` histories, and return what was seen in each."""
    machine = type("History", (History,), {"loader": loader, "changes": changes, "found": []})
    repeatable = settings(derandomize=True, deadline=None, suppress_health_check=HealthCheck, phases=[Phase.generate])
    run_state_machine_as_test(machine, settings=settings(repeatable, max_examples=count, stateful_step_count=4))
    return machine.found
