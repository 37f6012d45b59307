"""Writers of shards, killed at seeded moments and started again: what is visible is whole, and in the end all is there.

Half of the kills come after a random time, spread over the whole life of a writer; half at a system call
(fsync, link, rename, unlink, a send or a receive), before or after it, because that is where half a commit would show.
A reader looks at everything visible while the writers work. `python -m tests.kill` runs it at full length.
"""

import dataclasses
import hashlib
import io
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from types import FrameType

import numpy as np
from PIL import Image

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.garbage import collect_garbage
from storage.inventory import Inventory
from storage.manifests import Row
from storage.object_store import LocalStore, ObjectMissing, ObjectStore, open_store
from storage.sample import Regions, Sample, sample_key
from storage.shards import read_span
from storage.verify import verify

SHARDS, ROWS = 4, 12
DETECTOR = "0123456789ab"
STAGES = ("images", f"regions/{DETECTOR}")
_CALLS = ["open", "write", "sendfile", "fsync", "link", "replace", "unlink", "mkdir", "close"]
_CALLS += ["sendall", "send", "recv_into"]
_LIFE = 0.7  # of the time or the system calls that all the work takes: what a writer lives at most


def made_sample(row: int, variant: int) -> Sample:
    """A sample whose key depends on the row alone, as that of a page which answers differently each time."""
    url, caption = f"http://example.org/{row}.jpg", f"caption {row}"
    pixels = np.random.default_rng([row, variant]).integers(0, 256, (24, 32, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    sha256 = hashlib.sha256(file.getvalue()).hexdigest()
    return Sample(sample_key(url, caption), file.getvalue(), f"{caption}, variant {variant}", url, 32, 24, sha256)


def made_rows(shard: int) -> list[Row]:
    """Every fifth row failed."""
    rows = []
    for row in range(shard * ROWS, (shard + 1) * ROWS):
        url = f"http://example.org/{row}.jpg"
        rows.append(Row(row, sample_key(url, f"caption {row}"), "http_404" if row % 5 == 4 else "ok", "", url))
    return rows


def with_regions(sample: Sample) -> Sample:
    boxes = np.array([[0, 0, 32, 24], [1, 2, 3, 4]], np.float32)
    regions = Regions(boxes, np.array([0.5, 0.25], np.float32), np.array([1, 2], np.int32), DETECTOR)
    return dataclasses.replace(sample, regions=regions)


def write_all(root: str, variant: int) -> None:
    """What is not there yet: images, then the regions of them, then a snapshot of each stage."""
    catalog = Catalog(open_store(root), "captions")
    done = set(catalog.shards(STAGES[0]))
    for number in range(SHARDS):
        if f"{number:05d}" not in done:
            rows = made_rows(number)
            samples = (made_sample(row.row, variant) for row in rows if row.status == "ok")
            commit_shard(catalog, STAGES[0], f"{number:05d}", samples, rows, {"variant": variant})
    for shard in catalog.pending(*STAGES):
        manifest = catalog.manifest(STAGES[0], shard)
        samples = map(with_regions, catalog.read(STAGES[0], shard))
        meta = {"source": manifest.as_source(), "random_init": False}
        commit_shard(catalog, STAGES[1], shard, samples, made_rows(int(shard)), meta)
    for stage in STAGES:
        catalog.pin(stage)


@dataclasses.dataclass(frozen=True)
class Fate:
    """When a writer begins, by the monotonic clock, and at which system call it kills itself: before it, or after."""

    start: float
    call: str | None
    number: int
    after: bool


def writer(root: str, variant: int, folder: str, environment: dict, fate: Fate, counts: Synchronized) -> None:
    """The process that is killed; `counts` says how many of _CALLS there were."""
    os.environ.update(environment)
    tempfile.tempdir = folder
    time.sleep(max(0.0, fate.start - time.monotonic()))  # two writers begin together, and so meet
    with monitored(fate, counts):
        write_all(root, variant)


@contextmanager
def monitored(fate: Fate, counts: Synchronized) -> Iterator[None]:
    """Count the system calls of this thread and of those that it starts; end the process where its fate says so."""
    counting = threading.Lock()  # tars are put on S3 by several threads

    def at_boundary(frame: FrameType, event: str, argument: object) -> None:
        name = getattr(argument, "__name__", "")
        if event != ("c_return" if fate.after else "c_call") or name not in _CALLS:
            return
        if isinstance(getattr(argument, "__self__", None), str | io.BytesIO):  # no call of the system
            return
        index = _CALLS.index(name)
        with counting:
            counts[index] += 1
            if name == fate.call and counts[index] == fate.number:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(at_boundary)
    sys.setprofile(at_boundary)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Reader:
    """Looks at all that is visible, again and again; remembers what it saw, for nothing may go or change.

    AssertionError, ValueError or ObjectMissing tells what is wrong.
    """

    def __init__(self, store: ObjectStore):
        self.store, self.catalog = store, Catalog(store, "captions")
        self.seen: dict[tuple[str, str], str] = {}
        self.looks = 0

    def look(self) -> None:
        """One look at every shard and snapshot."""
        self.looks += 1
        found = {}
        for stage in STAGES:
            for shard in self.catalog.shards(stage):
                found[stage, shard] = self._shard(stage, shard)
            prefix = f"captions/{stage}/snapshots/"
            for info in list(self.store.list(prefix)):
                index = self.catalog.pinned(stage, info.path.removeprefix(prefix).removesuffix(".parquet"))
                assert len(index.urls()) == len(index), (
                    f"{info.path} has {len(index.urls())} URLs for {len(index)} samples"
                )
        for shard, sha256 in self.seen.items():
            assert found.get(shard) == sha256, f"{shard} was visible and has {'changed' if shard in found else 'gone'}"
        self.seen |= found

    def _shard(self, stage: str, shard: str) -> str:
        """The hash of the manifest of a shard that is found to be whole."""
        manifest = self.catalog.manifest(stage, shard)
        table, samples = manifest.table.to_pylist(), list(self.catalog.read(stage, shard))
        assert [(line["row"], line["key"], line["status"]) for line in table] == [
            (row.row, row.key, row.status) for row in made_rows(int(shard))
        ], f"{manifest.tar}: its manifest has other rows than were given"
        ok = [line for line in table if line["status"] == "ok"]
        assert [sample.key for sample in samples] == [line["key"] for line in ok], f"{manifest.tar} has other samples"
        writers = {sample.caption.partition(", ")[2] for sample in samples}
        assert len(writers) == 1, f"{manifest.tar} mixes the samples of several writers"
        span = read_span(self.store.get_range(manifest.tar, ok[-1]["offset"], ok[-1]["length"]))
        assert (span.key, span.image) == (samples[-1].key, samples[-1].image), f"{manifest.tar}: another last sample"
        return manifest.sha256

    def check_files(self) -> None:
        """Every tar is what its name says; every file is an object or what a put leaves behind."""
        for info in list(self.store.list()):
            with suppress(ObjectMissing):
                if info.path.endswith(".tar"):
                    sha256 = hashlib.sha256(self.store.get(info.path)).hexdigest()
                    assert info.path.endswith(f"-{sha256[:12]}.tar"), f"{info.path} is torn: its sha256 is {sha256}"
        if isinstance(self.store, LocalStore):
            known = {self.store.uri(info.path) for info in self.store.list()}
            known |= {info.path for info in self.store.leftovers()}
            files = {str(file) for file in Path(self.store.uri()).rglob("*") if file.is_file()}
            assert files <= known, f"{files - known} are neither objects nor what a put leaves"

    def check_end(self) -> None:
        """Everything must be there once, and `gc` must leave nothing else."""
        self.look()
        for stage in STAGES:
            rows = [row for table in self.catalog.columns(stage, ["row"]) for row in table["row"].to_pylist()]
            assert rows == list(range(SHARDS * ROWS)), f"{stage} has rows {rows} in the end"
        assert not self.catalog.pending(*STAGES)
        collect_garbage(self.store, -60, delete=True)
        left, leftovers = [info.path for info in self.store.list()], list(self.store.leftovers())
        assert (len(left), leftovers) == (len(STAGES) * (2 * SHARDS + 1), []), f"gc left {left} and {leftovers}"
        assert list(verify(Inventory(self.store))) == []
        self.look()


def check(
    folder: Path, seed: int, kills: int, say: Callable[[str], None], roots: Sequence[str] = ("local", "s3")
) -> None:
    """Kill writers `kills` times, as often on each kind of root; errors as those of a Reader."""
    from tests.s3 import SETTINGS, s3_server  # not above: the fork server imports this file

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # which would print every request
    for number, kind in enumerate(roots):
        part = kills // len(roots) + (number < kills % len(roots))
        with s3_server("bucket") if kind == "s3" else nullcontext() as endpoint:
            environment = SETTINGS | {"AWS_ENDPOINT_URL": endpoint} if endpoint else {}
            say(_Killer(kind, folder, environment, random.Random(f"{seed} {kind}")).run(part))


class _Killer:
    """Kills writers on one kind of root."""

    def __init__(self, kind: str, folder: Path, environment: dict[str, str], chance: random.Random):
        self.kind, self.folder, self.environment, self.chance = kind, folder, environment, chance
        self.killed, self.duration, self.calls = 0, 1.0, {}
        self.most = 2 if kind == "local" else 1  # writers at a time: moto decides no races
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True, exist_ok=True)
        # Processes that are forked from a small, quiet one start at once, and inherit no lock of a thread of ours.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([__name__, "boto3"])

    def run(self, kills: int) -> str:
        """Kill so many; what was done."""
        for name in ("first", "second"):  # the very first has to wait for the fork server
            began = time.monotonic()
            counts = self._whole_life(self._root(name))
            self.duration = time.monotonic() - began
        self.calls = {name: count for name, count in zip(_CALLS, counts, strict=True) if count}
        roots = looks = 0
        while self.killed < kills:
            roots += 1
            root = self._root(str(roots))
            reader = Reader(open_store(root))
            while self.killed < kills and self._one_life(root, reader):
                reader.check_files()
            self._whole_life(root)
            reader.check_end()
            looks += reader.looks
        return f"{self.kind}: {self.killed} kills over {roots} roots, {looks} looks"

    def _root(self, name: str) -> str:
        return str(self.folder / f"root-{name}") if self.kind == "local" else f"s3://bucket/{self.folder.name}/{name}"

    def _start(
        self, root: str, start: float = 0, call: str | None = None
    ) -> tuple[multiprocessing.Process, Synchronized]:
        counts = self.context.Array("i", len(_CALLS), lock=False)
        number = 1 + int(self.chance.random() * _LIFE * self.calls.get(call, 0))
        fate = Fate(start, call, number, after=self.chance.random() < 0.5)
        arguments = root, self.chance.randrange(2), str(self.temporary), self.environment, fate, counts
        process = self.context.Process(target=writer, args=arguments)
        process.start()
        return process, counts

    def _whole_life(self, root: str) -> Synchronized:
        """Write all that is left; the system calls that it took."""
        process, counts = self._start(root)
        process.join()
        assert process.exitcode == 0, f"a writer that nobody killed ended with {process.exitcode}"
        return counts

    def _one_life(self, root: str, reader: Reader) -> bool:
        """Start writers and kill them; return whether a kill met one that was alive."""
        processes, at_calls, start = [], self.chance.random() < 0.5, time.monotonic() + 0.05
        for _ in range(self.chance.randint(1, self.most)):
            call = self.chance.choice(list(self.calls)) if at_calls else None  # each as often, however rare it is
            processes.append(self._start(root, start, call)[0])
        delay = start - time.monotonic() + self.chance.random() * self.duration * _LIFE
        timers = [] if at_calls else [threading.Timer(delay * self.chance.uniform(0.9, 1), p.kill) for p in processes]
        for timer in timers:
            timer.start()
        while any(process.is_alive() for process in processes):
            reader.look()
        for timer in timers:
            timer.cancel()
        for process in processes:
            process.join()
        ends = [process.exitcode for process in processes]
        assert {*ends} <= {0, -signal.SIGKILL}, f"writers ended with {ends}"
        self.killed += ends.count(-signal.SIGKILL)
        reader.look()
        return -signal.SIGKILL in ends
