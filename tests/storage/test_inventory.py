"""What the commands of storage.catalog say: what there is, since when, whether it is whole, and what may go."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from places import PROJECT
from seeded import DETECTOR, put_checkpoint, sealed_parquet, seeded_sample, shard_of

from storage.catalog import Catalog
from storage.catalog.__main__ import main
from storage.garbage import collect_garbage, find_garbage
from storage.inventory import Inventory, history, status
from storage.manifests import Manifest, Row, manifest_bytes
from storage.object_store import LocalStore, ObjectInfo, ObjectStore, open_store
from storage.shards import Span
from storage.verify import verify

REGIONS = f"regions/{DETECTOR}"
HOUR = 3600.0


def commit(catalog: Catalog, number: int, stage: str = "images", **meta) -> str:
    """Commit a shard; the path of its tar."""
    if stage != "images":
        meta["source"] = catalog.manifest("images", f"{number:05d}").as_source()
    assert catalog.commit(stage, f"{number:05d}", *shard_of(number, regions=stage != "images"), meta)
    return catalog.manifest(stage, f"{number:05d}").tar


def checkpoint(store: ObjectStore, run: str, step: int, data: dict | str | None, held_out: dict | None = None) -> None:
    put_checkpoint(store, f"runs/{run}/step-{step:07d}", {"data": data, "held_out": held_out}, {"m": b"weights"})


def data_of(*snapshots: str, stage: str = REGIONS) -> dict:
    entries = [{"epoch": 3 * i, "consumed": 12 * i, "examples": 4, "snapshot": s} for i, s in enumerate(snapshots)]
    return {"dataset": "captions", "stage": stage, "random_init": False, "snapshots": entries}


def at(store: ObjectStore, path: str, hours_ago: float) -> None:
    """As if it had been written so long ago."""
    moment = time.time() - hours_ago * HOUR
    os.utime(store.local_path(path), (moment, moment))


def words(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


def test_status_tells_stages_and_snapshots_and_what_each_run_pinned(local, tmp_path):
    for number in range(2):
        commit(local, number)
    commit(local, 0, REGIONS, random_init=False)
    old = local.pin(REGIONS)
    commit(local, 1, REGIONS, random_init=False)
    new = local.pin(REGIONS)
    samples, rows = shard_of(0)
    samples[1] = dataclasses.replace(samples[1], image=samples[1].image + bytes(700_000))
    Catalog(local.store, "refcoco+").commit("images", "00000", samples, rows, {})
    local.store.put("runs/first/metrics.parquet", b"not ours")
    checkpoint(local.store, "first", 10, data_of(old.id))
    checkpoint(local.store, "first", 200, data_of(old.id, new.id), {**data_of(), "snapshot": old.id})
    checkpoint(local.store, "features/of", 5, None)
    checkpoint(local.store, "detector", 5, "0123456789ab")  # of annotations: detectors/train.py
    lines = status(local.store)
    assert words(lines)[:4] == [
        ["dataset", "stage", "shards", "rows", "MB", "rows", "by", "status"],
        ["captions", "images", "2", "12", size(local, "images"), "http_404", "4,", "ok", "8"],
        ["captions", REGIONS, "2", "12", size(local, REGIONS), "http_404", "4,", "ok", "8"],
        ["refcoco+", "images", "1", "6", "0.7", "http_404", "2,", "ok", "4"],
    ]
    assert [line[:5] for line in words(lines)[6:8]] == [
        ["captions", REGIONS, snapshot.id, shards, samples]
        for snapshot, shards, samples in ((old, "1", "4"), (new, "2", "8"))
    ]
    assert words(lines)[9:] == [
        ["run", "step", "dataset", "stage", "snapshot", "for"],
        ["first", "200", "captions", REGIONS, old.id, "epoch", "0", "on"],
        ["first", "200", "captions", REGIONS, new.id, "epoch", "3", "on"],
        ["first", "200", "captions", REGIONS, old.id, "validation"],
    ]
    for block in (lines[:4], lines[5:8], lines[9:]):
        assert len({line.index(REGIONS) for line in block if REGIONS in line}) == 1  # aligned
    shown = command("status", local.store.root)
    assert (shown.returncode, shown.stdout.splitlines()) == (0, lines)
    typo = command("status", str(tmp_path / "typo"))
    assert (typo.returncode, typo.stderr.count("\n")) == (1, 1)
    assert typo.stderr.startswith(f"cannot read the folder {tmp_path}/typo: ")
    assert not (tmp_path / "typo").exists()


def size(catalog: Catalog, stage: str) -> str:
    found = (info for info in catalog.store.list(f"captions/{stage}/") if "/snapshots/" not in info.path)
    return f"{sum(info.size for info in found) / 1e6:.1f}"


def command(*arguments: str) -> subprocess.CompletedProcess:
    where = PROJECT
    return subprocess.run(
        [sys.executable, "-m", "storage.catalog", *arguments], cwd=where, capture_output=True, text=True
    )


def test_history_tells_what_was_committed_when_by_whom(local):
    for number, hours_ago in [(0, 50), (1, 49.5), (2, 10), (3, 9.5)]:
        commit(local, number, config_hash="aaaa" if number < 3 else "bbbb")
        at(local.store, f"captions/images/{number:05d}.parquet", hours_ago)
    commit(local, 0, REGIONS, config_hash=DETECTOR)
    at(local.store, f"captions/{REGIONS}/00000.parquet", 5)
    snapshot = local.pin("images")
    Catalog(local.store, "another").commit("images", "00000", *shard_of(0), {})
    lines = history(local.store, "captions")
    assert lines[0].split() == ["from", "(UTC)", "to", "dataset", "stage", "shards", "rows", "ok", "by"]
    times = [line.split()[:2] for line in lines[1:]]
    assert times == sorted(times)
    assert [line.split()[-7:] for line in lines[1:5]] == [
        ["captions", "images", "2", "12", "8", "config", "aaaa"],
        ["captions", "images", "1", "6", "4", "config", "aaaa"],
        ["captions", "images", "1", "6", "4", "config", "bbbb"],
        ["captions", REGIONS, "1", "6", "4", "detector", DETECTOR],
    ]
    assert lines[5].split()[2:] == ["captions", "images", "4", "16", "16", "snapshot", snapshot.id]
    assert len(history(local.store)) == len(lines) + 1
    with pytest.raises(ValueError, match="typo holds no committed shard"):
        history(local.store, "typo")


def test_a_state_that_cannot_be_read_is_named_and_keeps_everything(local):
    commit(local, 0)
    local.store.put("runs/torn/step-0000001/state.json", b"{")
    for use in (status, lambda store: collect_garbage(store, 0, True)):
        with pytest.raises(ValueError, match=r"runs/torn/step-0000001/state\.json is damaged"):
            use(local.store)


def test_a_mistyped_dataset_is_named(local):
    commit(local, 0)
    with pytest.raises(ValueError, match="typo holds no committed shard"):
        Inventory(local.store, "typo")


@pytest.fixture(params=["folder", "s3"])
def whole(request, tmp_path) -> Catalog:
    """Three shards of images, regions of two of them, a snapshot of both."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    root = {"folder": str(tmp_path / "root"), "s3": f"s3://bucket/{tmp_path.name}"}[request.param]
    catalog = Catalog(open_store(root), "captions")
    for number in range(3):
        commit(catalog, number)
    for number in range(2):
        commit(catalog, number, REGIONS)
    catalog.pin("images")
    catalog.pin(REGIONS)
    return catalog


def test_what_is_as_it_was_committed_has_no_fault(whole):
    assert list(verify(Inventory(whole.store))) == []
    assert list(verify(Inventory(whole.store, "captions"))) == []
    assert whole.commit("images", "00009", [], [Row(54, "k", "timeout")], {})
    whole.pin("images")
    assert list(verify(Inventory(whole.store))) == []


def test_verify_names_every_fault(whole):
    store = whole.store
    first, second, third = (whole.manifest("images", f"{number:05d}") for number in range(3))
    data = bytearray(store.get(first.tar))
    data[700] ^= 1
    store.put(first.tar, bytes(data))
    store.delete(second.tar)
    store.put(f"captions/{REGIONS}/00001.parquet", b"PAR1")
    store.put("captions/images/00002.parquet", shifted(whole, third))
    faults = list(verify(Inventory(store)))
    parts = [
        [first.tar, "is damaged"],
        [second.tar, "is gone, and", "captions/images/00001.parquet names it"],
        [
            "captions/images/00002.parquet: 4 rows are ok, its tar has 4",
            "row 15 is the first of 1 that differ",
        ],
        [f"{REGIONS}/00001.parquet is damaged or not a manifest"],
    ]
    for fault, expected in zip(faults, parts, strict=True):
        assert all(part in fault for part in expected), (fault, expected)


def flipped(place: float) -> Callable[[bytes, bytes], bytes]:
    """A bit flipped so far into the file."""

    def flip(data: bytes, other: bytes) -> bytes:
        at = min(int(place * len(data)), len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]

    return flip


DAMAGES = {f"a bit at {place}": flipped(place) for place in (0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1)} | {
    "nothing left": lambda data, other: b"",
    "half of it": lambda data, other: data[: len(data) // 2],
    "a byte more": lambda data, other: data + b"\0",
    "another's": lambda data, other: other,
    "gone": lambda data, other: None,
}
COMMITTED = {  # and another of its kind
    "tar": (r"images/00000-\w+\.tar", r"images/00001-\w+\.tar"),
    "manifest of images": (r"images/00001\.parquet", r"images/00000\.parquet"),
    "manifest of regions": (r"regions/\w+/00000\.parquet", r"regions/\w+/00001\.parquet"),
    "manifest that nothing names": (r"images/00002\.parquet", r"images/00000\.parquet"),
    "snapshot": (r"images/snapshots/.*", r"regions/\w+/snapshots/.*"),
}


# One that nothing names and that is gone is as if it had never been written.
NAMED_BY_NOTHING = ("snapshot", "manifest that nothing names")
DAMAGED = [
    (kind, damage) for kind in COMMITTED for damage in DAMAGES if damage != "gone" or kind not in NAMED_BY_NOTHING
]


@pytest.mark.parametrize(("kind", "damage"), DAMAGED)
def test_verify_names_each_committed_file_that_is_not_as_it_was_written(local, kind, damage):
    for number in range(2):
        commit(local, number)
        commit(local, number, REGIONS)
    local.pin("images")
    local.pin(REGIONS)
    commit(local, 2)
    paths = [info.path for info in local.store.list("captions/")]
    path, other = (next(p for p in paths if re.fullmatch(f"captions/{name}", p)) for name in COMMITTED[kind])
    changed = DAMAGES[damage](local.store.get(path), local.store.get(other))
    local.store.delete(path)
    if changed is not None:
        local.store.put(path, changed)
    faults = list(verify(Inventory(local.store)))
    assert any(fault.startswith(local.store.where(path)) for fault in faults), faults
    if "manifest" in kind and changed is not None:
        stage = path.removeprefix("captions/").rpartition("/")[0]
        for use in (status, lambda store: collect_garbage(store, 0, True), lambda _: local.counts(stage)):
            with pytest.raises(ValueError, match=re.escape(local.store.where(path))):
                use(local.store)


def shifted(catalog: Catalog, manifest: Manifest) -> bytes:
    """The manifest, its third ok row one block further on."""
    path = f"captions/{manifest.stage}/{manifest.shard}.parquet"
    table = pq.read_table(io.BytesIO(catalog.store.get(path)))
    kept = pq.read_metadata(io.BytesIO(catalog.store.get(path))).metadata[b"manifest"]
    offsets = table["offset"].to_pylist()
    place = [i for i, offset in enumerate(offsets) if offset is not None][2]
    offsets[place] += 512
    position = table.schema.get_field_index("offset")
    table = table.set_column(position, table.schema.field("offset"), pa.array(offsets, pa.int64()))
    return sealed_parquet(table, {"manifest": kept})


def test_verify_finds_a_manifest_whose_header_is_not_of_its_rows(local):
    for number in range(2):
        commit(local, number)
    for shard, change in [("00000", {"statuses": {"ok": 6}}), ("00001", {"tar": None})]:
        path = f"captions/images/{shard}.parquet"
        table = pq.read_table(io.BytesIO(local.store.get(path)))
        header = json.loads(pq.read_metadata(io.BytesIO(local.store.get(path))).metadata[b"manifest"])
        local.store.put(path, sealed_parquet(table, {"manifest": json.dumps({**header, **change})}))
    first, second = verify(Inventory(local.store))
    assert first.endswith("00000.parquet has rows {'http_404': 2, 'ok': 4}, but its header counts {'ok': 6}")
    assert second.endswith("00001.parquet names no tar for 4 rows that are ok")


def test_verify_finds_a_snapshot_without_its_tars_and_a_target_of_another_source(local):
    commit(local, 0)
    commit(local, 0, REGIONS)
    local.pin("images")
    local.store.delete("captions/images/00000.parquet")
    local.store.delete(next(info.path for info in local.store.list("captions/images/") if ".tar" in info.path))
    samples, rows = shard_of(0)
    samples = [dataclasses.replace(sample, caption="made again") for sample in samples]
    assert local.commit("images", "00000", samples, rows, {})
    source, snapshot = verify(Inventory(local.store))
    assert f"{REGIONS}/00000.parquet was made from another" in source
    assert ".tar is gone or damaged, and" in snapshot
    failed, told = command("verify", local.store.root), "2 faults (checked: shards 2, snapshots 1, checkpoints 0)"
    assert (failed.returncode, failed.stdout.splitlines()) == (1, [source, snapshot, told])


def test_verify_reads_the_tar_of_a_shard_whose_source_is_damaged_too(local):
    commit(local, 0)
    tar = commit(local, 0, REGIONS)
    for path in ("captions/images/00000.parquet", tar):
        data = bytearray(local.store.get(path))
        data[len(data) // 2] ^= 1
        local.store.put(path, bytes(data))
    faults = list(verify(Inventory(local.store)))
    assert sum("images/00000.parquet is damaged" in fault for fault in faults) == 1
    assert any(f"{tar} is damaged" in fault for fault in faults)


def test_verify_finds_a_snapshot_whose_rows_are_not_the_manifests(local, tmp_path):
    commit(local, 0)
    snapshot = local.pin("images")
    other = Catalog(open_store(str(tmp_path / "other")), "captions")
    samples, rows = shard_of(0)
    changed = dataclasses.replace(seeded_sample(0), url="elsewhere")
    rows = [dataclasses.replace(rows[0], url="elsewhere"), *rows[1:]]
    other.commit("images", "00000", [dataclasses.replace(changed, key=samples[0].key), *samples[1:]], rows, {})
    theirs = other.store.get(f"captions/images/snapshots/{other.pin('images').id}.parquet")
    ours = local.store.get(f"captions/images/snapshots/{snapshot.id}.parquet")
    local.store.put(f"captions/images/snapshots/{snapshot.id}.parquet", grafted(theirs, ours))
    (fault,) = verify(Inventory(local.store))
    assert f"{snapshot.id}.parquet: its rows of shard 00000 are not those of the manifest" in fault


def test_verify_deals_rows_to_the_shards_that_lie_across_the_row_groups_of_a_snapshot(local):
    start = 0
    for number, count in enumerate((131_070, 4, 3)):  # a row group ends after 131,072
        keys = [f"{row:020x}" for row in range(start, start + count)]
        rows = [Row(start + i, key, "ok") for i, key in enumerate(keys)]
        metadata = {"stage": "images", "shard": f"{number:05d}", "meta": {}}
        metadata |= {"tar": f"{number:05d}-{0:012}.tar", "tar_sha256": "0" * 64, "tar_bytes": 1}
        spans = [Span(key, 512 * i, 512) for i, key in enumerate(keys)]
        data = manifest_bytes(rows, spans, [(16, 8, None)] * count, metadata)
        local.store.put(f"captions/images/{number:05d}.parquet", data)
        start += count
    local.pin("images")
    faults = list(verify(Inventory(local.store)))
    assert [".tar is gone" in fault for fault in faults] == [True] * 3, faults


def test_verify_goes_on_after_a_tar_that_the_disk_does_not_give(local):
    broken, gone = commit(local, 0), commit(local, 1)
    file = local.store.local_path(broken)
    file.unlink()
    file.symlink_to("/proc/self/mem")  # opens, and says EIO when its beginning is read
    local.store.delete(gone)
    first, second = verify(Inventory(local.store))
    assert f"{broken} cannot be read ([Errno 5] Input/output error), and" in first
    assert f"{gone} is gone" in second


class Bucket(LocalStore):
    """A folder that has, as a bucket, no files of this machine; it notes what is asked for whole."""

    def local_path(self, path: str) -> None:
        return None

    def get(self, path: str) -> bytes:
        vars(self).setdefault("whole", set()).add(path)
        return super().get(path)


def test_verify_takes_no_tar_of_a_bucket_into_memory_whole(local):
    tar = commit(local, 0)
    bucket = Bucket(local.store.root)
    assert list(verify(Inventory(bucket))) == []
    assert bucket.whole == {"captions/images/00000.parquet"}
    local.store.put(tar, local.store.get(tar)[:-1])
    (fault,) = verify(Inventory(bucket))
    assert f"{tar} is damaged: {next(bucket.list(tar)).size} bytes" in fault


def grafted(rows: bytes, footer: bytes) -> bytes:
    """The rows of one snapshot under the footer of another."""
    footer_metadata = pq.read_metadata(io.BytesIO(footer)).metadata
    return sealed_parquet(pq.read_table(io.BytesIO(rows)), {k: footer_metadata[k] for k in (b"snapshot", b"sha256")})


def test_gc_finds_what_nothing_names_and_leaves_what_is_young_or_named(local):
    store = local.store
    named = commit(local, 0)
    old = local.pin("images")
    commit(local, 1)
    pinned = local.pin("images")
    commit(local, 2)
    newest = local.pin("images")
    checkpoint(store, "first", 7, data_of(pinned.id, stage="images"))
    # A shard that was made again: the pinned snapshots name its first tar, no manifest does.
    again = local.manifest("images", "00001").tar
    store.delete("captions/images/00001.parquet")
    samples, rows = shard_of(1)
    samples = [dataclasses.replace(sample, caption="made again") for sample in samples]
    assert local.commit("images", "00001", samples, rows, {})
    orphan, young = (f"captions/images/{number:05d}-0123456789ab.tar" for number in (0, 5))
    for path in (orphan, young):
        store.put(path, b"left behind")
    store.put("captions/images/notes-0123456789ab.tar", b"not ours")
    hidden = store.local_path("captions/images/x").with_name(".00000.parquet.17-0123abcd")
    hidden.write_bytes(b"half")
    for info in list(store.list()):
        at(store, info.path, 30 if info.path.endswith(f"{newest.id}.parquet") else 31)
    at(store, young, 23)
    os.utime(hidden, (0, 0))
    expected = {str(hidden), store.where(orphan), store.where(f"captions/images/snapshots/{old.id}.parquet")}
    assert {one.where for one in find_garbage(store, 24 * HOUR)} == expected
    before = {info.path for info in store.list()}
    listed = collect_garbage(store, 24 * HOUR, delete=False)
    assert (len(listed), {info.path for info in store.list()}, hidden.exists()) == (5, before, True)
    assert listed[-1] == "3 things, 0.0 MB to delete: run again with --delete"
    assert command("gc", store.root).stdout.splitlines() == listed
    assert command("gc", store.root, "--delete").returncode == 0
    gone = before - {info.path for info in store.list()}
    assert gone == {orphan, f"captions/images/snapshots/{old.id}.parquet"}
    assert not hidden.exists()
    assert {named, again} <= {info.path for info in store.list()}
    assert list(verify(Inventory(store))) == []
    assert [one.where for one in find_garbage(store, 22 * HOUR)] == [store.where(young)]
    assert [one.where for one in find_garbage(store, 24 * HOUR)] == []


def test_a_tar_that_only_an_unpinned_snapshot_names_goes_with_it(local):
    first = commit(local, 0)
    local.pin("images")
    local.store.delete("captions/images/00000.parquet")
    samples, rows = shard_of(0)
    local.commit("images", "00000", [dataclasses.replace(sample, caption="x") for sample in samples], rows, {})
    time.sleep(0.01)
    local.pin("images")
    assert [one.what for one in find_garbage(local.store, -1)] == ["unpinned snapshot", "orphan tar"]
    collect_garbage(local.store, -1, delete=True)
    assert not local.store.exists(first)
    assert list(verify(Inventory(local.store))) == []


def test_the_validation_of_a_checkpoint_pins_too_and_so_do_older_checkpoints(local):
    snapshots = []
    for number in range(4):
        commit(local, number)
        snapshots.append(local.pin("images").id)
        time.sleep(0.01)
    checkpoint(local.store, "first", 1, data_of(snapshots[0], stage="images"))
    checkpoint(local.store, "first", 2, None, {"dataset": "captions", "stage": "images", "snapshot": snapshots[1]})
    (found,) = find_garbage(local.store, -1)
    assert snapshots[2] in found.where


def test_a_tar_that_a_writer_takes_over_while_gc_looks_gets_a_new_date_and_stays(local):
    commit(local, 0)
    tar = local.manifest("images", "00000").tar
    local.store.delete("captions/images/00000.parquet")
    at(local.store, tar, 48)
    (found,) = find_garbage(local.store, 24 * HOUR)
    local.store.put(tar, local.store.get(tar))  # the first half of a commit
    assert find_garbage(local.store, 24 * HOUR) == []
    assert found.remove() is False
    assert local.store.exists(tar)


class Taken(LocalStore):
    """A folder in which a writer takes over each tar just before the last look at it."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix.endswith(".tar"):
            self.put(prefix, self.get(prefix))
        return super().list(prefix)


def test_what_stays_is_not_told_to_be_deleted(local):
    tar = "captions/images/00000-0123456789ab.tar"
    local.store.put(tar, b"left behind")
    at(local.store, tar, 48)
    assert collect_garbage(local.store, 24 * HOUR, delete=False)[-1].startswith("1 thing, ")
    assert collect_garbage(Taken(local.store.root), 24 * HOUR, delete=True) == ["nothing to delete"]
    assert local.store.exists(tar)


def test_a_tar_that_is_named_since_gc_looked_stays(local):
    tar, path = commit(local, 0), "captions/images/00000.parquet"
    manifest = local.store.get(path)
    local.store.delete(path)
    at(local.store, tar, 48)
    (found,) = find_garbage(local.store, 24 * HOUR)
    local.store.put(path, manifest)  # by a writer that had put its tar two days before
    assert found.remove() is False
    assert local.store.exists(tar)
    local.store.delete(path)
    assert found.remove() is True
    assert not local.store.exists(tar)


def test_the_tar_of_a_shard_that_is_replaced_while_gc_looks_stays(local, monkeypatch):
    tar = commit(local, 0)
    at(local.store, tar, 48)
    pins = Inventory.pins

    def replaced_meanwhile(inventory: Inventory) -> list:
        samples, rows = shard_of(0)
        samples = [dataclasses.replace(sample, flags=("made again",)) for sample in samples]
        assert local.commit("images", "00000", samples, rows, {}, local.manifest("images", "00000"))
        return pins(inventory)

    monkeypatch.setattr(Inventory, "pins", replaced_meanwhile)
    assert [one.where for one in find_garbage(local.store, 24 * HOUR)] == []
    assert local.store.exists(tar)


@pytest.mark.parametrize("newest_only", [False, True])
def test_checkpoints_that_a_training_removes_meanwhile_are_passed_over_for_those_that_follow(local, newest_only):
    for step in (1, 2):
        checkpoint(local.store, "first", step, data_of("old", stage="images"))
    checkpoint(local.store, "first/of", 9, data_of("other", stage="images"))
    inventory = Inventory(local.store)
    for step in (1, 2):
        local.store.delete(f"runs/first/step-{step:07d}/state.json")
    for step in (3, 4):
        checkpoint(local.store, "first", step, data_of("old", "new", stage="images"))
    found = [(pin.run, pin.step, pin.snapshot) for pin in inventory.pins(newest_only)]
    steps = [4] if newest_only else [3, 4]
    expected = [("first", step, snapshot) for step in steps for snapshot in ("old", "new")]
    assert found == [*expected, ("first/of", 9, "other")]
    inventory = Inventory(local.store)
    for step in (3, 4):
        local.store.delete(f"runs/first/step-{step:07d}/state.json")
    assert [pin.run for pin in inventory.pins(newest_only)] == ["first/of"]


def test_gc_of_a_mistyped_root_makes_nothing_and_a_grace_time_is_a_number_of_hours(tmp_path, capsys):
    for arguments in ([], ["--delete"]):
        with pytest.raises(SystemExit, match=f"^cannot read the folder {tmp_path}/typo: "):
            main(["gc", str(tmp_path / "typo"), *arguments])
    assert list(tmp_path.iterdir()) == []
    for hours in ("nan", "inf", "-1", "day"):
        with pytest.raises(SystemExit):
            main(["gc", str(tmp_path), f"--grace={hours}"])
        assert f"'{hours}' is not a number of hours; give 0 or more" in capsys.readouterr().err
    main(["gc", str(tmp_path), "--grace=0.5", "--delete"])
    assert capsys.readouterr().out == "nothing to delete\n"


def test_commands_that_look_write_nothing_into_a_bucket(s3, tmp_path):
    root = f"s3://bucket/{tmp_path.name}"
    for command_line in (["status", root], ["gc", root]):
        main(command_line)
    with pytest.raises(SystemExit):
        main(["verify", root])
    client = boto3.session.Session().client("s3")
    assert client.list_objects_v2(Bucket="bucket", Prefix=tmp_path.name)["KeyCount"] == 0


class Hasty(LocalStore):
    """A folder whose tars vanish as soon as they are put, once."""

    def put(self, path: str, data: bytes | Path, *, if_absent: bool = False) -> bool:
        put = super().put(path, data, if_absent=if_absent)
        if path.endswith(".tar") and not vars(self).setdefault("been", False):
            self.been = True
            self.delete(path)
        return put


def test_a_tar_that_gc_took_before_its_manifest_is_put_again(local):
    assert Catalog(Hasty(local.store.root), "captions").commit("images", "00000", *shard_of(0), {})
    assert list(verify(Inventory(local.store))) == []


def test_a_root_without_anything_says_so(tmp_path, capsys):
    open_store(str(tmp_path / "root"))
    main(["status", str(tmp_path / "root")])
    assert capsys.readouterr().out == f"nothing is committed under {tmp_path}/root\n"
    main(["gc", str(tmp_path / "root")])
    assert capsys.readouterr().out == "nothing to delete\n"
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "root")])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"nothing is committed under {tmp_path}/root\n"
