"""Tars of a bucket in a folder of this machine: whole or not there, bounded, fetched once, and never in the way."""

import contextlib
import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from loaded import ALONE, rows_in_order
from places import PROJECT
from read import STAGE, Counted, identity, samples_of
from s3 import s3_server
from tiny import TINY_MODEL, commit_samples, tiny_recipe, tiny_root, tiny_sample, with_bytes

from storage.cache import ShardCache
from storage.catalog import Catalog, Row
from storage.object_store import ObjectStore, open_store
from storage.reading import ShardSamples
from training.loop import batches
from vlbert.data.corpus import TextCorpus
from vlbert.data.loading import TrainingData
from vlbert.data.samples import open_cache, open_samples
from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks import make_task

PER_SHARD, SHARDS = 4, 5
SIZE = 100 * 1024  # bytes of a tar, nearly


class Remote(Counted):
    """Objects of a folder as a bucket shows them: not as files of this machine."""

    def local_path(self, path: str) -> Path | None:
        return None


def sample(number: int):
    sample = tiny_sample(number)
    return with_bytes(sample, os.urandom(1) * (SIZE // PER_SHARD - 4000 - len(sample.image)))


@pytest.fixture
def written(tmp_path) -> list:
    """What the samples in the bucket tmp_path/root are."""
    samples = [sample(i) for i in range(PER_SHARD * SHARDS)]
    commit_samples(tmp_path / "root", "captions", samples, per_shard=PER_SHARD)
    return [identity(one) for one in samples]


def remote(tmp_path: Path) -> Remote:
    return Remote(open_store(str(tmp_path / "root")))


def cache_of(store: ObjectStore, tmp_path: Path, limit: int = 1 << 30) -> tuple[ShardCache, ShardSamples]:
    cache = ShardCache(store, tmp_path / "cache", limit)
    return cache, samples_of(store, cache=cache)


def tars(tmp_path: Path) -> dict[str, Path]:
    """The visible tars of the cache, by name."""
    return {file.name: file for file in sorted((tmp_path / "cache").rglob("[0-9]*.tar"))}


def marked(tmp_path: Path) -> Path:
    """The folder of a cache that holds nothing yet."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".filler").touch()
    return tmp_path / "cache"


def all_bytes(tmp_path: Path) -> int:
    return sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())


def test_what_is_here_is_read_here_and_the_rest_from_the_bucket(tmp_path, written):
    store = remote(tmp_path)
    cache, samples = cache_of(store, tmp_path, limit=3 * SIZE)
    store.ranges.clear()
    assert [identity(one) for one in samples.samples(range(len(written)))] == written
    assert len(store.ranges) == SHARDS
    assert cache.fill()
    assert len(tars(tmp_path)) == 3
    store.ranges.clear()
    assert [identity(samples.sample(i)) for i in range(len(written))] == written
    assert len(store.ranges) == 2 * PER_SHARD
    assert {path.rpartition("/")[2] for path, _, _ in store.ranges}.isdisjoint(tars(tmp_path))


def test_a_full_cache_needs_no_bucket_and_holds_what_was_committed(tmp_path, written):
    with s3_server("cache"):
        local, store = open_store(str(tmp_path / "root")), open_store("s3://cache/root")
        for info in local.list():
            store.put(info.path, local.get(info.path))
        cache, samples = cache_of(store, tmp_path)
        assert cache.fill()
        for tar, sha256 in zip(samples.index.tars, samples.index.tar_sha256, strict=True):
            assert hashlib.sha256((tmp_path / "cache" / tar).read_bytes()).hexdigest() == sha256
        for tar in samples.index.tars:
            store.delete(tar)
        assert [identity(one) for one in samples.samples(range(len(written)))] == written


@pytest.mark.parametrize("place", [0, 5_000, SIZE // 2, -1])
def test_a_byte_that_flipped_on_the_disk_is_found_and_fetched_again(tmp_path, written, place):
    store = remote(tmp_path)
    assert cache_of(store, tmp_path)[0].fill()
    files = list(tars(tmp_path).values())
    whole = [file.read_bytes() for file in files]
    damaged = bytearray(whole[2])
    damaged[place] ^= 1
    files[2].write_bytes(damaged)
    store.ranges.clear()
    assert cache_of(store, tmp_path)[0].fill()  # as the next run on this machine does
    assert [file.read_bytes() for file in files] == whole
    assert {path.rpartition("/")[2] for path, _, _ in store.ranges} == {files[2].name}, "the others stay"


@pytest.mark.parametrize("size", [0, 512, -1])
def test_a_half_written_file_is_not_read_and_fetched_again(tmp_path, written, size):
    store = remote(tmp_path)
    cache, samples = cache_of(store, tmp_path)
    assert cache.fill()
    file = list(tars(tmp_path).values())[1]
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    assert [identity(one) for one in samples.samples(range(len(written)))] == written
    assert not file.exists()
    assert cache.fill()
    assert file.read_bytes() == whole


def test_a_copy_that_is_damaged_while_it_is_read_is_left_for_the_bucket(tmp_path, written):
    store = remote(tmp_path)
    cache, samples = cache_of(store, tmp_path)
    assert cache.fill()
    assert identity(samples.sample(0)) == written[0]
    file = list(tars(tmp_path).values())[0]
    with file.open("r+b") as stream:  # the same file that is open
        stream.seek(int(samples.index.offset[1]) + 5)
        stream.write(b"\xff")
    assert [identity(one) for one in samples.samples([0, 1, 2])] == written[:3]
    assert not file.exists()
    assert identity(samples.sample(2)) == written[2]
    assert cache.fill()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == samples.index.tar_sha256[0]


def test_a_sample_that_is_as_damaged_in_the_bucket_costs_no_copy(tmp_path, written):
    store = remote(tmp_path)
    cache, samples = cache_of(store, tmp_path)
    assert cache.fill()
    copy = tmp_path / "cache" / samples.index.tars[0]
    for file in (copy, tmp_path / "root" / samples.index.tars[0]):
        with file.open("r+b") as stream:
            stream.seek(int(samples.index.offset[1]) + 5)
            stream.write(b"\xff")
    assert [type(one) for one in samples.samples([1, 1])] == [ValueError] * 2
    assert copy.exists()


def test_a_tar_that_is_damaged_in_the_bucket_is_named_and_keeps_no_other_away(tmp_path, written):
    store = remote(tmp_path)
    cache, samples = cache_of(store, tmp_path)
    damaged = samples.index.tars[1]
    with (tmp_path / "root" / damaged).open("r+b") as stream:
        stream.seek(20_000)
        stream.write(b"\xff\x00\xff")
    with pytest.raises(ValueError, match=r"00001-\w+\.tar is damaged: its sha256 is .*; delete its manifest and run"):
        cache.fill()
    assert len(tars(tmp_path)) == SHARDS - 1
    assert not (tmp_path / "cache" / damaged).exists()
    store.ranges.clear()
    assert cache.fill()
    assert store.ranges == [], "it is not fetched again and again"


def test_the_folder_is_filled_to_its_limit_and_then_kept(tmp_path, written):
    store = remote(tmp_path)
    limit = int(2.5 * SIZE)
    assert cache_of(store, tmp_path, limit)[0].fill()
    first = {name: file.stat().st_ino for name, file in tars(tmp_path).items()}
    assert len(first) == 2
    assert all_bytes(tmp_path) <= limit
    store.ranges.clear()
    assert cache_of(store, tmp_path, limit)[0].fill()
    assert {name: file.stat().st_ino for name, file in tars(tmp_path).items()} == first
    assert store.ranges == []


def test_tars_of_other_snapshots_go_the_least_recently_used_first_and_only_for_need(tmp_path, written):
    others = []
    marked(tmp_path)
    for number, age in ((0, 300), (1, 100), (2, 200)):
        file = tmp_path / "cache" / "older" / STAGE / f"0000{number}-0123456789ab.tar"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(SIZE))
        os.utime(file, (time.time() - age,) * 2)
        others.append(file)
    store = remote(tmp_path)
    cache_of(store, tmp_path, limit=(SHARDS + 3) * SIZE)[0].fill()
    assert [file.exists() for file in others] == [True] * 3, "there is room for all"
    for file in list(tars(tmp_path).values())[:2]:
        if file not in others:
            file.unlink()
    cache_of(store, tmp_path, limit=(SHARDS + 2) * SIZE)[0].fill()
    assert [file.exists() for file in others] == [False, True, True]
    assert len([file for file in tars(tmp_path).values()]) == SHARDS + 2
    cache_of(store, tmp_path, limit=SIZE // 2)[0].fill()
    assert len(tars(tmp_path)) == SHARDS + 2, "nothing goes where nothing would fit then"


def test_only_files_of_a_cache_are_counted_and_removed(tmp_path, written):
    folder = marked(tmp_path)
    others = ["00000.tar", "photograph.jpg", "images/00001-0123456789ab.tar.part", ".coming-home", "x-0123456789ab.tar"]
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes(SIZE))
    cache_of(remote(tmp_path), tmp_path, limit=SIZE)[0].fill()
    assert all((folder / name).exists() for name in others)
    assert len(list(folder.rglob("[0-9]*-????????????.tar"))) == 1


@pytest.mark.parametrize("place", ["cache", "root", "root/captions/cache", "."])
def test_a_folder_that_is_not_a_caches_is_refused(tmp_path, place):
    store = open_store(str(tmp_path / "root"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "photograph.jpg").touch()
    why = "holds other files than a cache's" if place == "cache" else "is in the root .*root or above it"
    with pytest.raises(ValueError, match=rf"data\.cache={tmp_path}\S* {why}; name an empty folder"):
        ShardCache(store, tmp_path / place, 1)
    ShardCache(store, tmp_path / "new", 1)


def test_a_tar_that_does_not_fit_keeps_no_smaller_one_away(tmp_path):
    samples = [sample(i) for i in range(5)]
    commit_samples(tmp_path / "root", "captions", samples, per_shard=4)
    cache, found = cache_of(remote(tmp_path), tmp_path, limit=SIZE // 2)
    assert found.index.tar_bytes[1] < SIZE // 2 < found.index.tar_bytes[0]
    cache.fill()
    assert list(tars(tmp_path)) == [Path(found.index.tars[1]).name]


def test_a_picture_that_is_damaged_on_the_disk_and_unpacks_is_read_past_its_copy(tmp_path):
    """Two in one batch: what was read with the first before its copy was given up, too."""
    root = tiny_root(tmp_path, samples=8)
    store = Remote(open_store(str(root)))
    cache, samples = cache_of(store, tmp_path)
    assert cache.fill()
    copy = tmp_path / "cache" / samples.index.tars[0]
    with copy.open("r+b") as stream:
        for number in (1, 2):
            stream.seek(int(samples.index.offset[number]) + 512)  # the first bytes of the image
            stream.write(b"\xff" * 100)
    recipe = tiny_recipe(root)
    config = dataclasses.replace(recipe.data, batch=8, text_batch=0)
    vocabulary = Vocabulary.read(root / "text" / "vocab.txt")
    task = make_task(recipe.task, vocabulary, 8)
    questions = task.examples(samples, None)
    (batch,) = TrainingData(samples, questions, task, config, TINY_MODEL.regions, ALONE)[0]
    assert batch.unreadable == ()
    assert len(batch) == 8
    assert not copy.exists(), "it is fetched again"


START = """
import sys, time
from storage.cache import ShardCache
from storage.catalog import Catalog, Row
from storage.catalog import Catalog, Row
from storage.object_store import LocalStore

class Remote(LocalStore):
    def local_path(self, path):
        return None

folder, stage = sys.argv[1:]
objects = Remote(f"{folder}/root")
cache = ShardCache(objects, f"{folder}/cache", 1 << 30)
catalog = Catalog(objects, "captions")
cache.want(catalog.pinned(stage, catalog.pin(stage).id))
"""
FILL = """
print(cache.fill(), flush=True)
sys.stdin.read()
"""
SLOW = """
def slow(path, offset, length):
    time.sleep(0.02)
    return LocalStore.get_range(objects, path, offset, length)

objects.get_range = slow
"""
HANG = """
def hang(path, offset, length):
    print("asked", flush=True)
    time.sleep(3600)

objects.get_range = hang
cache.fill_in_background()
sys.stdin.read()
"""


@contextlib.contextmanager
def filler(tmp_path: Path, program: str = FILL) -> Iterator[subprocess.Popen]:
    """Another process of this machine, which ends when its input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", START + program, str(tmp_path), STAGE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    try:
        yield process
    finally:
        process.kill()
        with process:  # closes its pipes and waits
            pass


def test_of_several_processes_one_fetches_and_another_takes_its_place(tmp_path, written):
    with filler(tmp_path) as first:
        assert first.stdout.readline() == "True\n"
        store = remote(tmp_path)
        other, samples = cache_of(store, tmp_path)
        store.ranges.clear()
        assert not other.fill()
        assert store.ranges == []
        assert [identity(one) for one in samples.samples(range(len(written)))] == written
        assert store.ranges == [], "every process of the machine reads what one fetched"
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert other.fill()


@pytest.mark.slow
def test_kill_9_leaves_no_file_that_looks_whole_and_is_not(tmp_path):
    large = [with_bytes(tiny_sample(i), os.urandom(5 << 20)) for i in range(16)]
    commit_samples(tmp_path / "root", "captions", large, per_shard=4)
    store = remote(tmp_path)
    index = cache_of(store, tmp_path)[1].index
    sha256 = {tar.rpartition("/")[2]: digest for tar, digest in zip(index.tars, index.tar_sha256, strict=True)}
    halves = set()
    for wanted in (0, 1, 2):
        with filler(tmp_path, SLOW + FILL) as process:
            deadline = time.monotonic() + 60
            # One that is fetched now: not yet there after the kill before.
            while len(tars(tmp_path)) < wanted or not set((tmp_path / "cache").rglob(".coming-*")) - halves:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.wait()
        halves |= set((tmp_path / "cache").rglob(".coming-*"))
        for name, file in tars(tmp_path).items():
            assert hashlib.sha256(file.read_bytes()).hexdigest() == sha256[name]
    assert len(halves) == 3
    assert cache_of(store, tmp_path)[0].fill()
    assert tars(tmp_path).keys() == sha256.keys()
    assert not list((tmp_path / "cache").rglob(".coming-*")), "what killed ones left is gone"


def test_the_end_of_a_process_does_not_wait_for_its_filler(tmp_path, written):
    with filler(tmp_path, HANG) as process:
        assert process.stdout.readline() == "asked\n"
        start = time.monotonic()
        process.stdin.close()
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - start < 10


def test_the_background_fills_the_folder_and_mends_it(tmp_path, written):
    store, told = remote(tmp_path), []
    cache, samples = cache_of(store, tmp_path)
    cache.fill_in_background(told.append, pause=0.01)
    for _ in range(2):
        deadline = time.monotonic() + 30
        while len(tars(tmp_path)) < SHARDS:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        cache.remove(samples.index.tars[3])
    assert told == []


def test_the_background_fetches_what_is_wanted_now_without_a_pause(tmp_path, written):
    """A training opens its samples after the cache, and more of them where new shards enter it."""
    store = remote(tmp_path)
    cache = ShardCache(store, tmp_path / "cache", 1 << 30)
    cache.fill_in_background(pause=3600)
    for shards in (SHARDS, SHARDS + 1):
        samples = samples_of(store, cache=cache)
        deadline = time.monotonic() + 30
        while len(tars(tmp_path)) < shards:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store.ranges.clear()
        assert [identity(samples.sample(i)) for i in range(len(written))] == written
        assert store.ranges == []
        more = sample(99)
        rows = [Row(99, more.key, "ok", url=more.url)]
        Catalog(store, "captions").commit(STAGE, "00099", [more], rows, {"random_init": False})


def test_a_failure_in_the_background_is_told_once_and_reads_go_on(tmp_path, written):
    (tmp_path / "cache").write_text("a file where the folder should be")
    store, told = remote(tmp_path), []
    cache, samples = cache_of(store, tmp_path)
    cache.fill_in_background(told.append, pause=0.005)
    assert [identity(one) for one in samples.samples(range(len(written)))] == written
    time.sleep(0.2)
    assert len(told) == 1
    assert f"{tmp_path / 'cache'} is not filled, and reads go to the bucket: " in told[0]
    (tmp_path / "cache").unlink()
    (tmp_path / "cache" / ".filler").mkdir(parents=True)
    deadline = time.monotonic() + 30
    while len(told) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "Is a directory" in told[1]


@pytest.mark.slow
def test_a_training_gets_the_same_batches_from_folder_bucket_and_cache(tmp_path):
    """Read by forked workers, in chunks."""
    root = tiny_root(tmp_path, samples=20)
    with s3_server("cached"):
        local, bucket = open_store(str(root)), open_store("s3://cached/root")
        for info in local.list("captions/"):
            bucket.put(info.path, local.get(info.path))
        recipe = tiny_recipe(root)
        config = dataclasses.replace(recipe.data, chunk=4, cache=str(tmp_path / "cache"), cache_gb=0.01)
        seen = []
        for store, cache in ((local, None), (bucket, None), (bucket, open_cache(bucket, config))):
            samples, _ = open_samples(store, "captions", None, None, ALONE, cache)
            deadline = time.monotonic() + 30
            while cache is not None and len(tars(tmp_path)) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            vocabulary = Vocabulary.read(root / "text" / "vocab.txt")
            task = make_task(recipe.task, vocabulary, samples.sample(0).regions.num_classes)
            corpus, questions = TextCorpus(root / "text", vocabulary), task.examples(samples, None)
            data = TrainingData(samples, questions, task, config, TINY_MODEL.regions, ALONE, corpus)
            steps = batches(data, range(4), 2, ALONE.device)
            seen.append([rows_in_order(part) for parts in steps for part in parts])
        assert seen[0] == seen[1] == seen[2]
