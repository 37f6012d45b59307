"""storage.snapshots: one file from which every sample of a stage is found."""

import hashlib
import io
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from seeded import as_dict, commit, shard_of
from stores import Recorded

from storage.catalog import Catalog
from storage.manifests import Header
from storage.object_store import LocalStore, open_store
from storage.shards import read_span
from storage.snapshots import read_index, write_snapshot


def file_of(snapshot_id: str, stage: str = "images") -> str:
    return f"captions/{stage}/snapshots/{snapshot_id}.parquet"


def test_the_id_of_a_snapshot_is_a_hash_of_its_manifests(catalog, tmp_path):
    empty = catalog.pin("images")
    commit(catalog, 0)
    one = catalog.pin("images")
    commit(catalog, 1)
    two = catalog.pin("images")
    assert (two.stage, two.shards, two.ok_rows) == ("images", ("00000", "00001"), 8)
    assert len({empty.id, one.id, two.id}) == 3
    assert catalog.pin("images") == two
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
    assert (index.shard.dtype, index.offset.dtype, index.length.dtype) == (np.uint32, np.int64, np.int32)
    expected = [sample for number in range(3) for sample in shard_of(number)[0]]
    assert (len(index), index.snapshot.ok_rows) == (12, 12)
    assert index.snapshot == catalog.pin("images")
    for i, sample in enumerate(expected):
        data = catalog.store.get_range(index.tars[index.shard[i]], int(index.offset[i]), int(index.length[i]))
        assert as_dict(read_span(data)) == as_dict(sample)
    assert index.urls() == [sample.url for sample in expected]
    for i, tar in enumerate(index.tars):
        data = catalog.store.get(tar)
        assert (index.tar_sha256[i], index.tar_bytes[i]) == (hashlib.sha256(data).hexdigest(), len(data))


def test_a_pinned_snapshot_is_read_from_its_file_alone(local):
    for number in (0, 2):
        commit(local, number)
    earlier = local.pinned("images", local.pin("images").id)
    commit(local, 1)
    for shard in ("00000", "00001", "00002"):
        local.store.delete(f"captions/images/{shard}.parquet")
    recorded = Recorded(local.store, remote=True)
    again = Catalog(recorded, "captions").pinned("images", earlier.snapshot.id)
    path = file_of(earlier.snapshot.id)
    assert set(recorded.requests) == {f"list {path}", f"range {path}"}
    assert again.snapshot == earlier.snapshot
    assert (again.tars, again.urls()) == (earlier.tars, earlier.urls())
    assert np.array_equal(again.offset, earlier.offset)


def test_pinning_again_changes_the_date_alone(local):
    commit(local, 0)
    with ThreadPoolExecutor(4) as pool:
        pinned = list(pool.map(lambda _: Catalog(LocalStore(local.store.root), "captions").pin("images"), range(4)))
    assert len(set(pinned)) == 1
    assert [info.path for info in local.store.list("captions/images/snapshots/")] == [file_of(pinned[0].id)]
    path = file_of(pinned[0].id)
    before = local.store.get(path)
    os.utime(local.store.local_path(path), (0, 0))
    assert local.pin("images") == pinned[0]
    assert local.store.get(path) == before
    (found,) = local.store.list(path)
    assert abs(found.modified - time.time()) < 60  # `gc` counts its grace time from now on


def test_the_index_of_a_large_snapshot_takes_few_requests_and_little_memory(tmp_path):
    """Made-up shards, of which one lies across two row groups."""
    chance = random.Random(0)

    def made(number: int, rows: int) -> tuple[Header, pa.Table]:
        name, ones, nulls = hashlib.sha256(b"%d" % number).hexdigest(), np.ones(rows, np.int32), pa.nulls(rows)
        columns = {"row": np.arange(rows), "width": ones, "height": ones, "num_regions": nulls, "license": nulls}
        columns |= {"offset": np.arange(rows, dtype=np.int64) * 512 + number, "length": ones * (512 + number)}
        columns |= {
            name: [chance.randbytes(size).hex() for _ in range(rows)] for name, size in (("key", 10), ("url", 20))
        }
        tar = f"captions/images/{number:05d}-{name[:12]}.tar"
        return Header(f"{number:05d}", "images", tar, name, 10240, name, {"ok": rows}, {}, name), pa.table(columns)

    shards = [made(number, 70_000 + number) for number in range(2)]
    path = file_of(write_snapshot(tmp_path / "snapshot", "images", shards).id)
    store = LocalStore(str(tmp_path))
    store.put(path, tmp_path / "snapshot")
    assert pq.read_metadata(tmp_path / "snapshot").num_row_groups == 2
    recorded = Recorded(store, remote=True)
    for each in (store, recorded):
        index = read_index(each, path)
        assert np.array_equal(index.offset, np.concatenate([table["offset"].to_numpy() for _, table in shards]))
        assert np.array_equal(index.shard, np.repeat(np.arange(2), [70_000, 70_001]))
        assert np.array_equal(index.length, index.shard + 512)
    assert recorded.requests.count(f"range {path}") <= 4
    # Keys and URLs are most of the file; 64 KiB are its footer.
    assert sum(length for _, _, length in recorded.ranges) < (tmp_path / "snapshot").stat().st_size / 10 + 65536
    assert sum(array.dtype.itemsize for array in (index.shard, index.offset, index.length)) == 16


def test_invalid_snapshots_are_named(catalog):
    commit(catalog, 0)
    snapshot = catalog.pin("images")
    path = file_of(snapshot.id)
    data = catalog.store.get(path)
    moved = file_of("0" * 16)
    catalog.store.put(moved, data)
    with pytest.raises(ValueError, match=rf"{moved} is snapshot {snapshot.id} of images: move it back"):
        catalog.pinned("images", "0" * 16)
    catalog.store.delete(path)
    with pytest.raises(ValueError, match=rf"{path} is missing; put it back"):
        catalog.pinned("images", snapshot.id)
    table = pq.read_table(io.BytesIO(data))
    metadata = json.loads(pq.read_metadata(io.BytesIO(data)).metadata[b"snapshot"])
    for change, message in [
        ({"version": 1}, "has version 1, but this code reads 5"),
        ({"random_init": True}, None),
        ({"stage": "regions/x"}, f"is snapshot {snapshot.id} of regions/x"),
        ({"shards": [metadata["shards"][0] | {"rows": 3}]}, "is damaged: 4 rows for 3"),
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


def test_a_damaged_snapshot_is_never_read_as_another(local):
    for number in range(2):
        commit(local, number)
    snapshot = local.pin("images")
    path = file_of(snapshot.id)
    whole = local.pinned("images", snapshot.id)
    urls = whole.urls()
    file, data = local.store.local_path(path), local.store.get(path)
    refused = 0
    for place in range(0, len(data), 11):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            index = local.pinned("images", snapshot.id)
            assert index.urls() == urls, place
        except ValueError as error:
            assert str(file) in str(error)  # noqa: PT017
            refused += 1
        else:
            assert (index.tars, index.tar_sha256) == (whole.tars, whole.tar_sha256)
            assert np.array_equal(index.offset, whole.offset), place
            assert np.array_equal(index.length, whole.length), place
    assert refused > len(data) / 11 / 4
