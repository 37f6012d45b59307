"""A state machine that starts, kills and restores a data loader, and compares it with an uninterrupted run."""

import contextlib
import functools
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

BATCH = 24  # samples of a step, over all ranks
WORLDS, WORKERS = (1, 2, 3, 4), (0, 1, 2)
SCENARIOS = ("nothing", "workers", "ranks", "new shards", "withdrawn sample")  # what changes before a restore
PATIENCE = 60.0  # seconds that a loader may take for a step
_FORK: Any = multiprocessing.get_context("fork")  # so that libraries are imported once


class Loader:
    """One rank of a data loader. A sample is a text: its id, and perhaps ':' and what it became.

    `withdraw(folder, number)`, only where that is offered, withdraws a sample and returns its id.
    """

    requires: ClassVar[tuple[str, ...]] = ()  # pinned packages
    docs: ClassVar[str]  # page that documents how to resume
    promises: ClassVar[dict[str, str]]  # scenario -> `exact`, or `complete`: each sample once, in any order
    shards, per_shard = 24, 12  # that every combination of ranks and workers can share evenly
    batches: Iterator[Any]

    def __init__(self, folder: Path, rank: int, world: int, workers: int, states: Sequence[Any] | None):
        """Start a rank. `states` are what `save` returned on each rank; None in a new run."""

    def take(self) -> list[str]:
        """Return this rank's samples of the next step."""
        return list(next(self.batches))

    def save(self) -> Any: ...

    @staticmethod
    def write(folder: Path, shards: dict[int, range]) -> None:
        """Add shards with samples of these numbers."""

    @staticmethod
    def clean() -> None:
        """Remove what killed processes left behind."""


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def write_tars(folder: Path, shards: dict[int, range]) -> None:
    folder.mkdir(exist_ok=True)
    for shard, numbers in shards.items():
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for text in (f"{number:06d}" for number in numbers):
                member = tarfile.TarInfo(f"{text}.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))


class Refused(Exception):
    """A loader raised an error, or did not answer."""


def _serve(loader: type[Loader], pipe: Any, variables: dict[str, str], *arguments: Any) -> None:
    os.setpgid(0, 0)
    os.environ.update(variables)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        data = loader(*arguments)
        while True:
            pipe.send(data.take() if pipe.recv() == "take" else pickle.dumps(data.save()))
    except BaseException as error:  # noqa: BLE001  of any library
        pipe.send(Refused(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"))


class Ranks:
    """The processes of a loader on `world` ranks, with `workers` loading processes each."""

    def __init__(self, loader: type[Loader], folder: Path, world: int, workers: int, states: Sequence[bytes] | None):
        loader.clean()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        restored, self.ranks = states and [pickle.loads(state) for state in states], []
        for rank in range(world):
            ours, theirs = _FORK.Pipe()
            variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = loader, theirs, variables, folder, rank, world, workers, restored
            self.ranks.append((_FORK.Process(target=_serve, args=arguments), ours))
            self.ranks[-1][0].start()
            theirs.close()

    def ask(self, job: str) -> None:
        for _, pipe in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # its error is received as an answer
                pipe.send(job)

    def answers(self, job: str) -> list[Any]:
        self.ask(job)
        received = []
        for _, pipe in self.ranks:
            try:
                received.append(pipe.recv() if pipe.poll(PATIENCE) else Refused(f"no answer in {PATIENCE:g} s"))
            except EOFError:
                received.append(Refused("a process died"))
            if isinstance(received[-1], Refused):
                raise received[-1]
        return received

    def take(self) -> list[str]:
        return [sample for samples in self.answers("take") for sample in samples]

    def reads(self) -> int:
        """Return the number of read calls of all ranks and their loading processes."""
        return sum(_reads(process.pid) for process, _ in self.ranks)

    def kill(self) -> None:
        for process, pipe in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            pipe.close()


def _reads(process: int) -> int:
    with contextlib.suppress(OSError):
        folder = Path(f"/proc/{process}")
        children = [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
        return int((folder / "io").read_text().split()[5]) + sum(_reads(int(child)) for child in children)
    return 0


@functools.cache
def _written(loader: type[Loader]) -> tempfile.TemporaryDirectory:
    folder, size = tempfile.TemporaryDirectory(prefix="resume-"), loader.per_shard
    loader.write(Path(folder.name, "data"), {n: range(n * size, (n + 1) * size) for n in range(loader.shards)})
    return folder


class History(RuleBasedStateMachine):
    """A history of a loader. `found` takes what was seen; with `strict`, a history that is not exact is an error."""

    loader: ClassVar[type[Loader]]
    scenario: ClassVar[str]  # of SCENARIOS, or `all`
    strict: ClassVar[bool]
    found: ClassVar[list[dict[str, Any]]]
    references: ClassVar[dict[tuple, list[list[str]]]]  # of histories whose data did not change

    @initialize(world=st.sampled_from(WORLDS), workers=st.sampled_from(WORKERS))
    def start(self, world: int, workers: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="resume-"))
        shutil.copytree(Path(_written(self.loader).name, "data"), self.folder / "data")
        self.steps, self.saved, self.refused, self.again = [], None, None, 0
        self.events, self.withdrawn, self.gone = [], {}, set()
        self.world, self.workers = world, workers
        self.first = (1, 0) if self.scenario == "all" else (world, workers)
        self.happened, self.starts = [f"start {world} x {workers}"], []
        self._launch(None)

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        for _ in range(count):
            self._try(self._take)

    @rule(
        world=st.sampled_from(WORLDS),
        workers=st.sampled_from(WORKERS),
        save=st.booleans(),
        lost=st.integers(0, 4),
        delay=st.none() | st.integers(0, 30),
    )
    def kill_and_restore(self, world: int, workers: int, save: bool, lost: int, delay: int | None) -> None:
        """Save, or use what was saved before; lose some steps, the last one `delay` ms after it was asked for."""
        if save or not self.saved:
            self._try(self._save)
        self.take(lost)
        if self.refused:
            return
        if delay is not None:
            self.ranks.ask("take")
            time.sleep(delay / 1000)
        self.ranks.kill()
        if self.scenario in ("ranks", "all"):
            same = self.scenario == "ranks" and world == self.world
            self.world = WORLDS[WORLDS.index(world) - 1] if same else world
        if self.scenario in ("workers", "all"):
            same = self.scenario == "workers" and workers == self.workers
            self.workers = WORKERS[WORKERS.index(workers) - 1] if same else workers
        done, states = self.saved
        self.happened.append(f"save {done}, kill {len(self.steps)}, restore {self.world} x {self.workers}")
        self.events = [(min(step, done), *event) for step, *event in self.events]
        self.withdrawn = {sample: min(step, done) for sample, step in self.withdrawn.items()}
        self.gone = {*self.withdrawn}
        del self.steps[done:]
        self._launch(states)

    @precondition(lambda self: self.scenario in ("new shards", "all") and len(self.events) < 3)
    @rule()
    def commit_shard(self) -> None:
        shard, size = self.loader.shards + len(self.events), self.loader.per_shard
        self._change("write", {shard: range(shard * size, (shard + 1) * size)})

    @precondition(lambda self: self.scenario in ("withdrawn sample", "all") and len(self.withdrawn) < 2)
    @rule(number=st.integers(0, 39))
    def withdraw(self, number: int) -> None:
        if hasattr(self.loader, "withdraw"):
            self.withdrawn.setdefault(self._change("withdraw", number), len(self.steps))

    def _change(self, name: str, argument: Any) -> Any:
        self.happened.append(f"{name} {argument} at {len(self.steps)}")
        self.events.append((len(self.steps), name, argument))
        return getattr(self.loader, name)(self.folder / "data", argument)

    def _launch(self, states: list[bytes] | None) -> None:
        def launch() -> None:
            begin = time.perf_counter()
            self.ranks = Ranks(self.loader, self.folder / "data", self.world, self.workers, states)
            self._take()
            seconds, size = time.perf_counter() - begin, sum(map(len, states or ()))
            self.starts.append(
                {"seconds": seconds, "reads": self.ranks.reads(), "bytes": size, "restored": bool(states)}
            )

        self._try(launch)

    def _take(self) -> None:
        self.steps.append(self.ranks.take())
        self.again += sum(sample.partition(":")[0] in self.gone for sample in self.steps[-1])

    def _save(self) -> None:
        self.saved = len(self.steps), self.ranks.answers("save")

    def _try(self, job: Callable[[], None]) -> None:
        if not self.refused:
            try:
                job()
            except Refused as error:
                self.refused = str(error)

    def _complete(self) -> None:
        """Interrupt a history that was not yet, and go on to the end of an epoch."""
        if self.scenario == "new shards" and not self.events:
            self.commit_shard()
        if self.scenario == "withdrawn sample" and not self.events:
            self.withdraw(7)
        if not any(start["restored"] for start in self.starts) or len(self.gone) < len(self.withdrawn):
            self.kill_and_restore(self.world, self.workers, True, 2, None)
        self.take(-len(self.steps) % (self.loader.shards * self.loader.per_shard // BATCH))

    def _reference(self) -> list[list[str]]:
        """Return the steps of a run that nobody stopped, with the same changes of the data at the same steps."""
        known = [] if self.events else self.references.get(self.first, [])
        if len(known) < len(self.steps):
            folder = self.folder / "reference"
            shutil.copytree(Path(_written(self.loader).name, "data"), folder)
            ranks, known = Ranks(self.loader, folder, *self.first, None), []
            try:
                for step in range(len(self.steps)):
                    for _, name, argument in [event for event in self.events if event[0] == step]:
                        getattr(self.loader, name)(folder, argument)
                    known.append(ranks.take())
            finally:
                ranks.kill()
            if not self.events:
                self.references[self.first] = known
        return known[: len(self.steps)]

    def _count(self, steps: list[list[str]]) -> list[Counter]:
        """Count the samples of each step, without those that were withdrawn before it."""
        gone = [{sample for sample, since in self.withdrawn.items() if since <= step} for step in range(len(steps))]
        kept = zip(steps, gone, strict=True)
        return [Counter(one for one in samples if one.partition(":")[0] not in without) for samples, without in kept]

    def teardown(self) -> None:
        if not hasattr(self, "starts"):
            return
        try:
            self._complete()
            self.ranks.kill()
            promised, seen = self._count(self._reference()), self._count(self.steps)
            total, came = sum(promised, Counter()), sum(seen, Counter())
            numbers = {"lost": (total - came).total(), "repeated": (came - total).total(), "withdrawn": self.again}
            exact = promised == seen and not self.again and not self.refused
            self.found.append(
                numbers | {"exact": exact, "refused": self.refused, "starts": self.starts, "history": self.happened}
            )
            assert exact or not self.strict, self.found[-1]
        finally:
            self.ranks.kill()
            shutil.rmtree(self.folder, ignore_errors=True)


def run_histories(loader: type[Loader], scenario: str, count: int, strict: bool = False) -> list[dict[str, Any]]:
    """Run about `count` histories in which `scenario` changes before a restore. Return what was seen in each."""
    attributes = {"loader": loader, "scenario": scenario, "strict": strict, "found": [], "references": {}}
    machine, unbounded = type("History", (History,), attributes), {"deadline": None, "database": None}
    bounded = {"max_examples": count, "stateful_step_count": 8, "derandomize": True, "phases": [Phase.generate]}
    run_state_machine_as_test(machine, settings=settings(**bounded, **unbounded, suppress_health_check=HealthCheck))
    return machine.found
