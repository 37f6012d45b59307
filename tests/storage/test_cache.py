"""storage.cache: copies of a bucket's tars in a folder of this machine."""

import hashlib
import io
import os
import sys
import time
from pathlib import Path

import pytest
from read import STAGE, identity, samples_of
from stores import Recorded
from tiny import commit_samples, tiny_sample, with_bytes

from storage.cache import ShardCache
from storage.object_store import ObjectStore, open_store
from storage.reading import ShardSamples

PER_SHARD, SHARDS = 4, 5
SIZE = 100 * 1024  # bytes of a tar, nearly


@pytest.fixture
def written(tmp_path) -> list[tuple]:
    """What the samples in the bucket tmp_path/root are."""
    samples = [tiny_sample(i) for i in range(PER_SHARD * SHARDS)]
    samples = [with_bytes(one, os.urandom(1) * (SIZE // PER_SHARD - 4000 - len(one.image))) for one in samples]
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
    os.truncate(copies(tmp_path)[next(iter(first))], 512)
    assert [identity(one) for one in samples.samples(range(len(written)))] == written


def test_a_tar_that_is_damaged_in_the_bucket_is_named_and_not_fetched_again(tmp_path, written):
    store = remote(tmp_path)
    cache, samples = cache_of(store, tmp_path)
    damaged = samples.index.tars[1]
    with (tmp_path / "root" / damaged).open("r+b") as stream:
        stream.seek(20_000)
        stream.write(b"\xff\x00\xff")
    with pytest.raises(ValueError, match=r"00001-\w+\.tar is damaged: its sha256 is .*; delete its manifest and run"):
        cache.fill()
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
    cache_of(remote(tmp_path), tmp_path, limit=SHARDS * SIZE)[0].fill()
    assert len(copies(tmp_path)) == SHARDS + 2 + 2, "no room is needed for what is there"
    assert all((folder / name).exists() for name in strangers)


@pytest.mark.parametrize("place", ["root", "root/captions/cache", "."])
def test_a_folder_that_overlaps_the_root_is_refused(tmp_path, place):
    store = open_store(str(tmp_path / "root"))
    with pytest.raises(ValueError, match=rf"data\.cache={tmp_path}\S* is inside or above the root"):
        ShardCache(store, tmp_path / place, 1)


def test_the_background_fills_the_folder_or_says_why_not(tmp_path, written, monkeypatch):
    store, said = remote(tmp_path), io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)  # pytest's capture loses what is written while it is read
    (tmp_path / "cache").write_bytes(b"in the way")
    cache, samples = cache_of(store, tmp_path)
    cache.fill_in_background(pause=3600)
    deadline = time.monotonic() + 30
    while "cannot fill the shard cache" not in said.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.monotonic() < deadline
    (tmp_path / "cache").unlink()
    cache.fill_in_background(pause=3600)
    while len(copies(tmp_path)) < SHARDS and time.monotonic() < deadline:
        time.sleep(0.01)
    store.ranges.clear()
    assert [identity(samples.sample(i)) for i in range(len(written))] == written
    assert store.ranges == []
