"""storage.cache: copies of a bucket's tars in a folder of this machine."""

import dataclasses
import hashlib
import os
import time
from pathlib import Path

import pytest
from loaded import ALONE
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


def copies(tmp_path: Path) -> dict[str, Path]:
    """The complete copies in the cache, by name."""
    return {file.name: file for file in sorted((tmp_path / "cache").rglob("*.tar"))}


def test_the_folder_is_filled_to_its_limit_and_the_rest_is_read_from_the_bucket(tmp_path, written):
    store = remote(tmp_path)
    for _ in range(2):  # the next run finds the copies
        cache, samples = cache_of(store, tmp_path, limit=3 * SIZE)
        cache.fill()
        first = {name: file.stat().st_ino for name, file in copies(tmp_path).items()}
        assert len(first) == 3
        store.ranges.clear()
        cache.fill()
        assert store.ranges == []
        assert [identity(samples.sample(i)) for i in range(len(written))] == written
        assert len(store.ranges) == 2 * PER_SHARD
        assert {path.rpartition("/")[2] for path, _, _ in store.ranges}.isdisjoint(first)
    for tar, sha256 in zip(samples.index.tars, samples.index.tar_sha256, strict=True):
        if (name := Path(tar).name) in first:
            assert hashlib.sha256(copies(tmp_path)[name].read_bytes()).hexdigest() == sha256


@pytest.mark.parametrize("size", [0, 512, -1])
def test_a_truncated_copy_is_removed_by_its_reader(tmp_path, written, size):
    cache, samples = cache_of(remote(tmp_path), tmp_path)
    cache.fill()
    file = list(copies(tmp_path).values())[1]
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    assert [identity(one) for one in samples.samples(range(len(written)))] == written
    assert not file.exists()
    cache.fill()
    assert file.read_bytes() == whole


def test_a_copy_with_a_damaged_sample_is_removed_unless_the_bucket_has_the_same(tmp_path, written):
    cache, samples = cache_of(remote(tmp_path), tmp_path)
    cache.fill()
    assert identity(samples.sample(0)) == written[0]  # the file is open
    tar = samples.index.tars[0]
    copy = copies(tmp_path)[Path(tar).name]
    for file in (copy, tmp_path / "root" / tar):
        with file.open("r+b") as stream:
            stream.seek(int(samples.index.offset[1]) + 5)
            before = stream.read(1)
            stream.seek(int(samples.index.offset[1]) + 5)
            stream.write(b"\xff")
        if file == copy:
            assert [identity(one) for one in samples.samples([0, 1, 2])] == written[:3]
            assert not copy.exists()
            cache.fill()
            with copy.open("r+b") as stream:
                stream.seek(int(samples.index.offset[1]) + 5)
                assert stream.read(1) == before
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
    assert len(copies(tmp_path)) == SHARDS - 1
    assert Path(damaged).name not in copies(tmp_path)
    store.ranges.clear()
    cache.fill()
    assert store.ranges == []


def test_the_longest_unused_copies_make_room_and_no_other_files(tmp_path, written):
    folder = tmp_path / "cache" / "0123456789ab" / "older" / STAGE
    folder.mkdir(parents=True)
    days = {"00000-0123456789ab.tar": 3, "00001-0123456789ab.tar": 0, "00002-0123456789ab.tar": 2}
    strangers = dict.fromkeys(("00000.tar", "photograph.jpg", "00001-0123456789ab.tar.bak", "x-0123456789ab.tar"), 9)
    for name, age in (days | strangers).items():
        (folder / name).write_bytes(bytes(SIZE))
        os.utime(folder / name, (time.time() - age * 86400 - 9,) * 2)
    cache_of(remote(tmp_path), tmp_path, limit=(SHARDS + 2) * SIZE)[0].fill()
    assert [(folder / name).exists() for name in days] == [False, True, True]
    cache_of(remote(tmp_path), tmp_path, limit=SIZE // 2)[0].fill()
    assert [(folder / name).exists() for name in days] == [False, True, True], "nothing would fit then"
    cache_of(remote(tmp_path), tmp_path, limit=SHARDS * SIZE)[0].fill()
    assert len(copies(tmp_path)) == SHARDS + 2 + 2, "no room is needed for what is there"
    assert all((folder / name).exists() for name in strangers)


@pytest.mark.parametrize("place", ["root", "root/captions/cache", "."])
def test_a_folder_that_overlaps_the_root_is_refused(tmp_path, place):
    store = open_store(str(tmp_path / "root"))
    with pytest.raises(ValueError, match=rf"data\.cache={tmp_path}\S* is in the root .* or above it; name another"):
        ShardCache(store, tmp_path / place, 1)


def test_images_that_are_damaged_in_a_copy_are_read_from_the_bucket(tmp_path):
    """Two in one batch: what was read with the first before its copy was given up, too."""
    root = tiny_root(tmp_path, samples=8)
    cache, samples = cache_of(Recorded(open_store(str(root)), remote=True), tmp_path)
    cache.fill()
    copy = copies(tmp_path)[Path(samples.index.tars[0]).name]
    with copy.open("r+b") as stream:
        for number in (1, 2):
            stream.seek(int(samples.index.offset[number]) + 512)  # the first bytes of the image
            stream.write(b"\xff" * 100)
    recipe = tiny_recipe(root)
    config = dataclasses.replace(recipe.data, batch=8, text_batch=0)
    task = make_task(recipe.task, Vocabulary.read(root / "text" / "vocab.txt"), 8)
    examples = task.examples(samples, None)
    (batch,) = TrainingData([TrainingDataset(samples, examples)], task, config, TINY_MODEL.regions, ALONE)[0]
    assert (batch.unreadable, len(batch)) == ((), 8)
    assert not copy.exists(), "it is fetched again"


def test_the_background_fetches_new_snapshots_without_a_pause(tmp_path, written):
    """A training opens its samples after the cache, and more of them where new shards enter it."""
    store = remote(tmp_path)
    cache = ShardCache(store, tmp_path / "cache", 1 << 30)
    cache.fill_in_background(pause=3600)
    for shards in (SHARDS, SHARDS + 1):
        samples = samples_of(store, cache=cache)
        deadline = time.monotonic() + 30
        while len(copies(tmp_path)) < shards:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store.ranges.clear()
        assert [identity(samples.sample(i)) for i in range(len(written))] == written
        assert store.ranges == []
        more = sample(99)
        rows = [Row(99, more.key, "ok", url=more.url)]
        commit_shard(Catalog(store, "captions"), STAGE, "00099", [more], rows, {"random_init": False})
