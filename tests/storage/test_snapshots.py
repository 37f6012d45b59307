"""A snapshot is one file: the same shards give the same bytes, and from it alone every sample is found."""

import hashlib
import io
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from seeded import DETECTOR, as_dict, shard_of

from storage.catalog import Catalog
from storage.manifests import Header
from storage.object_store import LocalStore, ObjectInfo, open_store
from storage.shards import read_span
from storage.snapshots import SNAPSHOT_SCHEMA, read_columns, read_index, read_snapshot, write_snapshot

REGIONS = f"regions/{DETECTOR}"


def commit(catalog: Catalog, number: int, stage: str = "images", **meta) -> None:
    assert catalog.commit(stage, f"{number:05d}", *shard_of(number, regions=stage != "images"), meta)


def file_of(snapshot_id: str, stage: str = "images") -> str:
    return f"captions/{stage}/snapshots/{snapshot_id}.parquet"


def test_a_snapshot_is_named_by_the_content_of_its_manifests(catalog, tmp_path):
    empty = catalog.pin("images")
    commit(catalog, 0)
    one = catalog.pin("images")
    commit(catalog, 1)
    two = catalog.pin("images")
    assert (two.stage, two.shards, two.ok_rows) == ("images", ("00000", "00001"), 8)
    assert len({empty.id, one.id, two.id}) == 3
    assert catalog.pin("images") == catalog.snapshot("images") == two
    other = Catalog(open_store(str(tmp_path / "other")), "captions")
    commit(other, 1)
    commit(other, 0)
    assert other.pin("images") == two
    assert other.store.get(file_of(two.id)) == catalog.store.get(file_of(two.id))
    other.store.delete("captions/images/00001.parquet")
    commit(other, 1, config="another")
    assert other.pin("images").id != two.id


def test_the_index_finds_every_sample_with_one_ranged_read(catalog):
    for number in (2, 0, 1):
        commit(catalog, number)
    index = catalog.pinned("images", catalog.pin("images").id)
    assert (index.shard.dtype, index.offset.dtype, index.length.dtype) == (np.uint16, np.int64, np.int32)
    expected = [sample for number in range(3) for sample in shard_of(number)[0]]
    assert (len(index), index.snapshot.ok_rows) == (12, 12)
    assert index.snapshot == catalog.snapshot("images")
    for i, sample in enumerate(expected):
        data = catalog.store.get_range(index.tars[index.shard[i]], int(index.offset[i]), int(index.length[i]))
        assert as_dict(read_span(data)) == as_dict(sample)
    assert index.keys() == [sample.key for sample in expected]
    assert index.urls() == [sample.url for sample in expected]
    for i, tar in enumerate(index.tars):
        data = catalog.store.get(tar)
        assert (index.tar_sha256[i], index.tar_bytes[i]) == (hashlib.sha256(data).hexdigest(), len(data))


def test_a_snapshot_holds_what_the_manifests_say_of_the_ok_rows(local):
    for number in (3, 1):
        commit(local, number, REGIONS, random_init=number == 1)
    snapshot = local.pin(REGIONS)
    assert snapshot.random_init is True
    (table,) = read_columns(local.store, file_of(snapshot.id, REGIONS), SNAPSHOT_SCHEMA.names)
    expected = []
    for shard in ("00001", "00003"):
        for line in local.manifest(REGIONS, shard).table.to_pylist():
            if line.pop("status") == "ok":
                assert line.pop("detail") == ""
                expected.append({"shard": int(shard), **line})
    assert table.to_pylist() == [{name: line[name] for name in SNAPSHOT_SCHEMA.names} for line in expected]
    again, shards = read_snapshot(local.store, file_of(snapshot.id, REGIONS))
    assert again == snapshot
    headers = local.headers(REGIONS)
    assert [shard["manifest_sha256"] for shard in shards] == [header.sha256 for header in headers.values()]


def test_a_snapshot_says_random_init_where_a_manifest_does(local):
    commit(local, 0)
    assert local.pin("images").random_init is None
    commit(local, 1, random_init=False)
    assert local.pin("images").random_init is False
    assert local.pinned("images", local.pin("images").id).snapshot.random_init is False


def test_a_shard_without_an_ok_row_is_in_the_snapshot_and_has_no_tar_in_the_index(local):
    rows = shard_of(0)[1][1:2]
    assert local.commit("images", "00000", [], rows, {})
    commit(local, 1)
    index = local.pinned("images", local.pin("images").id)
    assert (len(index), set(index.shard.tolist()), len(index.tars)) == (4, {0}, 1)
    assert index.snapshot.shards == ("00000", "00001")


class CountingStore(LocalStore):
    """A folder that notes what was asked of it and, as a bucket, has no files of this machine."""

    def __init__(self, root: str):
        super().__init__(root)
        self.asked, self.bytes = [], 0

    def put(self, path: str, data: bytes | Path, *, if_absent: bool = False) -> bool:
        self.asked.append(f"put {path}")
        return super().put(path, data, if_absent=if_absent)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.asked.append(f"list {prefix}")
        return super().list(prefix)

    def get(self, path: str) -> bytes:
        self.asked.append(f"get {path}")
        return super().get(path)

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        self.asked.append(f"range {path}")
        self.bytes += length
        return super().get_range(path, offset, length)

    def local_path(self, path: str) -> None:
        return None


def test_a_pinned_snapshot_needs_its_file_alone_whatever_became_of_the_manifests(local):
    for number in (0, 2):
        commit(local, number)
    earlier = local.pinned("images", local.pin("images").id)
    commit(local, 1)
    for shard in ("00000", "00001", "00002"):
        local.store.delete(f"captions/images/{shard}.parquet")
    counting = CountingStore(local.store.root)
    again = Catalog(counting, "captions").pinned("images", earlier.snapshot.id)
    path = file_of(earlier.snapshot.id)
    assert set(counting.asked) == {f"list {path}", f"range {path}"}
    assert again.snapshot == earlier.snapshot
    assert (again.tars, again.keys()) == (earlier.tars, earlier.keys())
    assert np.array_equal(again.offset, earlier.offset)


def test_pinning_again_changes_the_date_alone_and_of_many_at_once_one_file_stays(local):
    commit(local, 0)
    with ThreadPoolExecutor(4) as pool:
        pinned = list(pool.map(lambda _: Catalog(LocalStore(local.store.root), "captions").pin("images"), range(4)))
    assert len(set(pinned)) == 1
    assert [info.path for info in local.store.list("captions/images/snapshots/")] == [file_of(pinned[0].id)]
    path = file_of(pinned[0].id)
    before = local.store.get(path)
    os.utime(local.store.local_path(path), (0, 0))
    counting = CountingStore(local.store.root)
    assert Catalog(counting, "captions").pin("images") == pinned[0]
    assert counting.asked == [
        "list captions/images/",
        "get captions/images/00000.parquet",
        f"get {path}",
        f"put {path}",
    ]
    assert local.store.get(path) == before
    (found,) = local.store.list(path)
    assert abs(found.modified - time.time()) < 60  # `gc` counts its grace time from now on


def large(file: Path, sizes: list[int]) -> list[np.ndarray]:
    """A snapshot of made-up shards with so many rows each; the offsets of each."""
    offsets = [np.arange(rows, dtype=np.int64) * 512 + number for number, rows in enumerate(sizes)]
    chance = random.Random(0)

    def made() -> Iterator[tuple[Header, pa.Table]]:
        for number, (rows, offset) in enumerate(zip(sizes, offsets, strict=True)):
            name = hashlib.sha256(b"%d" % number).hexdigest()
            tar = f"captions/images/{number:05d}-{name[:12]}.tar"
            columns = {
                "row": np.arange(rows),
                "offset": offset,
                "length": np.full(rows, 512 + number, np.int32),
                "width": np.ones(rows, np.int32),
                "height": np.ones(rows, np.int32),
                "num_regions": pa.nulls(rows, pa.int32()),
                "key": [chance.randbytes(10).hex() for _ in range(rows)],
                "url": [f"http://example.org/{chance.randbytes(10).hex()}" for _ in range(rows)],
            }
            yield Header(f"{number:05d}", "images", tar, name, 10240, {"ok": rows}, {}, name), pa.table(columns)

    snapshot = write_snapshot(file, "images", made())
    folder = file.parent / "captions" / "images" / "snapshots"
    folder.mkdir(parents=True)
    file.rename(folder / f"{snapshot.id}.parquet")
    return offsets


def test_a_snapshot_of_several_row_groups_is_read_whole_and_only_where_it_is_needed(tmp_path):
    sizes = [20_000 + 7 * number for number in range(7)]
    offsets = large(tmp_path / "snapshot", sizes)
    (file,) = (tmp_path / "captions/images/snapshots").iterdir()
    assert pq.read_metadata(file).num_row_groups == 2
    counting = CountingStore(str(tmp_path))
    for store in (LocalStore(str(tmp_path)), counting):
        index = read_index(store, file_of(file.stem))
        assert np.array_equal(index.offset, np.concatenate(offsets))
        assert np.array_equal(index.shard, np.repeat(np.arange(7), sizes))
        assert np.array_equal(index.length, index.shard + 512)
    assert counting.asked.count(f"range {file_of(file.stem)}") <= 4
    assert counting.bytes < file.stat().st_size / 10 + 65536  # keys and URLs are most of it; 64 KiB are the footer
    bytes_each = sum(array.dtype.itemsize for array in (index.shard, index.offset, index.length))
    assert bytes_each * 3_300_000 < 64e6


def sums(index, answer) -> None:
    answer.put((int(index.offset.sum()), index.offset.flags.writeable))


def test_the_index_is_shared_with_forks_and_cannot_be_written(local):
    commit(local, 0)
    index = local.pinned("images", local.pin("images").id)
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=sums, args=(index, answer))
    child.start()
    assert answer.get() == (int(index.offset.sum()), False)
    child.join()
    for array in (index.shard, index.offset, index.length):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_snapshot_that_is_gone_or_elsewhere_or_of_another_version_is_named(catalog):
    commit(catalog, 0)
    snapshot = catalog.pin("images")
    path = file_of(snapshot.id)
    data = catalog.store.get(path)
    moved = file_of("0" * 16)
    catalog.store.put(moved, data)
    with pytest.raises(ValueError, match=rf"{moved} is snapshot {snapshot.id} of images: move it back"):
        catalog.pinned("images", "0" * 16)
    catalog.store.delete(path)
    with pytest.raises(ValueError, match=rf"{path} is gone; put it back"):
        catalog.pinned("images", snapshot.id)
    table = pq.read_table(io.BytesIO(data))
    metadata = json.loads(pq.read_metadata(io.BytesIO(data)).metadata[b"snapshot"])
    for change, message in [
        ({"version": 1}, "is of version 1, this code reads 3"),
        ({"random_init": True}, None),
        ({"stage": "regions/x"}, f"is snapshot {snapshot.id} of regions/x"),
        ({"shards": [metadata["shards"][0] | {"rows": 3}]}, "is damaged: 4 rows for 3"),
        ({"shards": [metadata["shards"][0] | {"manifest_sha256": "0" * 64}]}, "is snapshot"),
    ]:
        text = json.dumps({**metadata, **change})
        sink = io.BytesIO()
        hashed = {"snapshot": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        pq.write_table(table.replace_schema_metadata(hashed), sink)
        catalog.store.put(path, sink.getvalue())
        if message is None:
            assert catalog.pinned("images", snapshot.id).snapshot.random_init is True
        else:
            with pytest.raises(ValueError, match=rf"{path} {message}"):
                catalog.pinned("images", snapshot.id)
    for name in ("", "../x", "0" * 15, "0" * 16 + "\n"):
        with pytest.raises(ValueError, match="is not a snapshot"):
            catalog.pinned("images", name)


def test_a_snapshot_with_a_byte_flipped_or_an_end_cut_off_is_never_read_as_another(local):
    for number in range(2):
        commit(local, number)
    snapshot = local.pin("images")
    path = file_of(snapshot.id)
    whole = local.pinned("images", snapshot.id)
    keys = whole.keys()
    file, data = local.store.local_path(path), local.store.get(path)
    refused = 0
    for place in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            index = local.pinned("images", snapshot.id)
            assert index.keys() == keys, place
        except ValueError as error:
            assert str(file) in str(error)  # noqa: PT017
            refused += 1
        else:
            assert (index.tars, index.tar_sha256) == (whole.tars, whole.tar_sha256)
            assert np.array_equal(index.offset, whole.offset), place
            assert np.array_equal(index.length, whole.length), place
    assert refused > len(data) / 3 / 4
    for length in range(0, len(data), 97):
        file.write_bytes(data[:length])
        with pytest.raises(ValueError, match="is damaged"):
            local.pinned("images", snapshot.id)
