"""storage.cache: copies of a bucket's tars in a folder of this machine."""

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
from loaded import ALONE
from places import PROJECT
from read import STAGE, identity, samples_of
from stores import Recorded
from tiny import TINY_MODEL, commit_samples, tiny_recipe, tiny_root, tiny_sample, with_bytes

from storage.cache import ShardCache
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import Row
from storage.object_store import ObjectStore, open_store
from storage.reading import ShardSamples
from vlbert.data.loading import TrainingData, TrainingDataset
from vlbert.data.samples import open_samples
from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks import make_task

PER_SHARD, SHARDS = 4, 5
SIZE = 100 * 1024  # bytes of a tar, nearly


def sample(number: int):
    sample = tiny_sample(number)
    return with_bytes(sample, os.urandom(1) * (SIZE // PER_SHARD - 4000 - len(sample.image)))


@pytest.fixture
def written(tmp_path) -> list[tuple]:
    """What the samples in the bucket tmp_path/root are."""
    samples = [sample(i) for i in range(PER_SHARD * SHARDS)]
    commit_samples(tmp_path / "root", "captions", samples, per_shard=PER_SHARD)
    return [identity(one) for one in samples]


def remote(tmp_path: Path) -> Recorded:
    return Recorded(open_store(str(tmp_path / "root")), remote=True)


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


def test_the_folder_is_filled_to_its_limit_and_the_rest_is_read_from_the_bucket(tmp_path, written):
    store = remote(tmp_path)
    cache, samples = cache_of(store, tmp_path, limit=3 * SIZE)
    assert cache.fill()
    first = {name: file.stat().st_ino for name, file in tars(tmp_path).items()}
    assert len(first) == 3
    store.ranges.clear()
    assert [identity(samples.sample(i)) for i in range(len(written))] == written
    assert len(store.ranges) == 2 * PER_SHARD
    assert {path.rpartition("/")[2] for path, _, _ in store.ranges}.isdisjoint(first)
    del cache, samples  # the next run
    cache = cache_of(store, tmp_path, limit=3 * SIZE)[0]
    store.ranges.clear()
    assert cache.fill()
    assert {name: file.stat().st_ino for name, file in tars(tmp_path).items()} == first
    assert store.ranges == []


def test_a_full_cache_needs_no_bucket(tmp_path, written):
    cache, samples = cache_of(remote(tmp_path), tmp_path)
    assert cache.fill()
    for tar in samples.index.tars:
        (tmp_path / "root" / tar).unlink()
    assert [identity(one) for one in samples.samples(range(len(written)))] == written


def test_a_tar_that_does_not_fit_does_not_block_a_smaller_one(tmp_path):
    commit_samples(tmp_path / "root", "captions", [sample(i) for i in range(5)], per_shard=4)
    cache, samples = cache_of(remote(tmp_path), tmp_path, limit=SIZE // 2)
    assert samples.index.tar_bytes[1] < SIZE // 2 < samples.index.tar_bytes[0]
    cache.fill()
    assert list(tars(tmp_path)) == [Path(samples.index.tars[1]).name]


@pytest.mark.parametrize("at", [0, SIZE // 2, -1])
def test_the_next_run_finds_a_flipped_byte_and_fetches_the_tar_again(tmp_path, written, at):
    store = remote(tmp_path)
    assert cache_of(store, tmp_path)[0].fill()
    files = list(tars(tmp_path).values())
    whole = [file.read_bytes() for file in files]
    damaged = bytearray(whole[2])
    damaged[at] ^= 1
    files[2].write_bytes(damaged)
    cache = cache_of(store, tmp_path)[0]
    store.ranges.clear()
    assert cache.fill()
    assert [file.read_bytes() for file in files] == whole
    assert {path.rpartition("/")[2] for path, _, _ in store.ranges} == {files[2].name}


@pytest.mark.parametrize("size", [0, 512, -1])
def test_a_truncated_copy_is_removed_by_its_reader(tmp_path, written, size):
    cache, samples = cache_of(remote(tmp_path), tmp_path)
    assert cache.fill()
    file = list(tars(tmp_path).values())[1]
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    assert [identity(one) for one in samples.samples(range(len(written)))] == written
    assert not file.exists()
    assert cache.fill()
    assert file.read_bytes() == whole


def test_a_copy_that_is_damaged_while_it_is_read_is_removed(tmp_path, written):
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


def test_a_sample_that_is_damaged_in_the_bucket_removes_no_copy(tmp_path, written):
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


def test_a_tar_that_is_damaged_in_the_bucket_is_named_and_not_fetched_again(tmp_path, written):
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


def test_two_roots_with_one_dataset_name_may_share_a_folder(tmp_path, written):
    others = [sample(i) for i in range(PER_SHARD * SHARDS)]  # of the same rows, with other images
    commit_samples(tmp_path / "other" / "root", "captions", others, per_shard=PER_SHARD)
    stores = remote(tmp_path), remote(tmp_path / "other")
    for _ in range(2):
        for store, expected in zip(stores, (written, [identity(one) for one in others]), strict=True):
            cache, samples = cache_of(store, tmp_path)
            assert cache.fill()
            store.ranges.clear()
            assert [identity(samples.sample(i)) for i in range(len(expected))] == expected
            assert store.ranges == []
            del cache, samples  # the next run
    assert len(tars(tmp_path)) == 2 * SHARDS


def test_unused_tars_of_other_snapshots_are_removed_for_space(tmp_path, written):
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
    assert len(tars(tmp_path)) == SHARDS + 2
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
def test_other_folders_are_refused(tmp_path, place):
    store = open_store(str(tmp_path / "root"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "photograph.jpg").touch()
    why = "holds other files than a cache's" if place == "cache" else "is in the root .*root or above it"
    with pytest.raises(ValueError, match=rf"data\.cache={tmp_path}\S* {why}; name an empty folder"):
        ShardCache(store, tmp_path / place, 1)
    ShardCache(store, tmp_path / "new", 1)


def test_images_that_are_damaged_in_a_copy_are_read_from_the_bucket(tmp_path):
    """Two in one batch: what was read with the first before its copy was given up, too."""
    root = tiny_root(tmp_path, samples=8)
    store = Recorded(open_store(str(root)), remote=True)
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
    examples = task.examples(samples, None)
    (batch,) = TrainingData([TrainingDataset(samples, examples)], task, config, TINY_MODEL.regions, ALONE)[0]
    assert batch.unreadable == ()
    assert len(batch) == 8
    assert not copy.exists(), "it is fetched again"


def test_the_tars_of_several_datasets_are_wanted_together(tmp_path):
    tiny_root(tmp_path, samples=16, held_out=8)
    store = remote(tmp_path)
    cache = ShardCache(store, tmp_path / "cache", 1 << 30)
    opened = [open_samples(store, name, None, None, ALONE, cache)[0] for name in ("captions", "held-out")]
    assert cache.fill()
    assert all((tmp_path / "cache" / tar).exists() for samples in opened for tar in samples.index.tars)


START = """
import sys, time
from storage.cache import ShardCache
from storage.catalog import Catalog
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


def test_of_several_processes_one_fetches_and_another_replaces_it(tmp_path, written):
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


def test_an_interrupted_filler_leaves_no_incomplete_tar(tmp_path, written, monkeypatch):
    store = remote(tmp_path)
    cache, samples = cache_of(store, tmp_path)
    incomplete = tmp_path / "cache" / samples.index.tars[0]
    incomplete = incomplete.with_name(f".coming-{incomplete.name}.0123abcd")  # of a filler that was killed
    incomplete.parent.mkdir(parents=True)
    incomplete.write_bytes(b"half")
    monkeypatch.setattr("storage.cache._PIECE", SIZE // 2)
    read, pieces = store.get_range, iter(range(3))

    def interrupted(path: str, offset: int, length: int) -> bytes:
        if next(pieces, None) is None:
            raise KeyboardInterrupt
        return read(path, offset, length)

    monkeypatch.setattr(store, "get_range", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.fill()
    assert list(tars(tmp_path)) == [Path(samples.index.tars[0]).name]
    assert list((tmp_path / "cache").rglob(".coming-*")) == []
    monkeypatch.setattr(store, "get_range", read)
    assert cache.fill()
    for tar, sha256 in zip(samples.index.tars, samples.index.tar_sha256, strict=True):
        assert hashlib.sha256((tmp_path / "cache" / tar).read_bytes()).hexdigest() == sha256


def test_a_process_ends_without_waiting_for_its_filler(tmp_path, written):
    with filler(tmp_path, HANG) as process:
        assert process.stdout.readline() == "asked\n"
        start = time.monotonic()
        process.stdin.close()
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - start < 10


def test_the_background_fetches_new_snapshots_without_a_pause(tmp_path, written):
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
        commit_shard(Catalog(store, "captions"), STAGE, "00099", [more], rows, {"random_init": False})


def test_a_failure_in_the_background_is_logged_once(tmp_path, written):
    (tmp_path / "cache").write_text("a file where the folder should be")
    store, logged = remote(tmp_path), []
    cache, samples = cache_of(store, tmp_path)
    cache.fill_in_background(logged.append, pause=0.005)
    assert [identity(one) for one in samples.samples(range(len(written)))] == written
    time.sleep(0.2)
    assert len(logged) == 1
    assert f"{tmp_path / 'cache'} is not filled, and reads go to the bucket: " in logged[0]
    (tmp_path / "cache").unlink()
    (tmp_path / "cache" / ".filler").mkdir(parents=True)
    deadline = time.monotonic() + 30
    while len(logged) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "Is a directory" in logged[1]
