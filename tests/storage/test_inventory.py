"""`vlbert catalog`: status, verify and gc."""

import dataclasses
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from seeded import REGIONS, commit, detect, put_checkpoint, shard_of

from storage.catalog import Catalog
from storage.catalog.command import main
from storage.catalog.commit import commit_shard
from storage.garbage import collect_garbage, find_garbage
from storage.inventory import Inventory, status
from storage.manifests import Row
from storage.object_store import LocalStore, ObjectInfo, ObjectStore
from storage.verify import verify

HOUR = 3600.0


def commit_again(catalog: Catalog, number: int) -> None:
    """Delete the manifest of a shard of images, and commit other samples in its place."""
    catalog.store.delete(f"captions/images/{number:05d}.parquet")
    samples, rows = shard_of(number)
    samples = [dataclasses.replace(sample, caption="another") for sample in samples]
    assert commit_shard(catalog, "images", f"{number:05d}", samples, rows, {})


def revise(catalog: Catalog) -> None:
    samples, rows = shard_of(0)
    samples = [dataclasses.replace(sample, flags=("made again",)) for sample in samples]
    assert commit_shard(catalog, "images", "00000", samples, rows, {}, catalog.manifest("images", "00000"))


def checkpoint(store: ObjectStore, run: str, step: int, data: object, held_out: Sequence[dict] = ()) -> None:
    put_checkpoint(store, f"runs/{run}/step-{step:07d}", {"data": data, "held_out": [*held_out]}, {"m": b"weights"})


def data_of(*snapshots: str, stage: str = "images") -> list[dict]:
    entries = [{"epoch": 3 * i, "consumed": 12 * i, "examples": 4, "snapshot": s} for i, s in enumerate(snapshots)]
    return [{"dataset": "captions", "stage": stage, "random_init": False, "weight": 4.0, "snapshots": entries}]


def set_age(store: ObjectStore, path: str, hours: float) -> None:
    """As if it had been written so many hours ago."""
    moment = time.time() - hours * HOUR
    os.utime(store.local_path(path), (moment, moment))


def faults_of(catalog: Catalog) -> list[str]:
    return list(verify(Inventory(catalog.store)))


def test_status_counts_rows_and_marks_snapshots_of_runs(local, capsys):
    for number in range(2):
        commit(local, number)
    detect(local, 0)
    old = local.pin(REGIONS)
    detect(local, 1)
    new = local.pin(REGIONS)
    samples, rows = shard_of(0)
    samples[1] = dataclasses.replace(samples[1], image=samples[1].image + bytes(700_000))
    commit_shard(Catalog(local.store, "refcoco+"), "images", "00000", samples, rows, {})
    local.store.put("runs/first/metrics.parquet", b"not ours")
    checkpoint(local.store, "first", 200, data_of(old.id, stage=REGIONS))
    checkpoint(local.store, "detector", 5, "0123456789ab")  # of annotations: detectors/train.py
    lines = [" ".join(line.split()) for line in status(local.store)]
    for stage in ("images", REGIONS):
        assert any(re.fullmatch(rf"captions {stage} 2 12 \S+ http_404 4, ok 8", line) for line in lines)
    assert "refcoco+ images 1 6 0.72 http_404 2, ok 4" in lines
    assert [(line.split()[3:5], line.split()[-1]) for line in lines if old.id in line or new.id in line] == [
        (["1", "4"], "yes"),
        (["2", "8"], "no"),
    ]
    main(["status", local.store.root])
    assert capsys.readouterr().out.splitlines() == status(local.store)


def test_pins_skip_checkpoints_that_a_training_removes_meanwhile(local):
    for step in (1, 2):
        checkpoint(local.store, "first", step, data_of("old"))
    checkpoint(local.store, "first/of", 9, data_of("other"))
    inventory = Inventory(local.store)
    for step in (1, 2):
        local.store.delete(f"runs/first/step-{step:07d}/state.json")
    for step in (3, 4):
        checkpoint(local.store, "first", step, data_of("old", "new"))
    assert inventory.pins() == {("captions", "images", name) for name in ("old", "new", "other")}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["status", "ROOT/typo"], "cannot read the folder ROOT/typo: "),
        (["verify", "ROOT", "typo"], "typo has no committed shard"),
        (["verify", "ROOT"], "nothing is committed under ROOT"),
        (["gc", "ROOT", "--grace=nan"], "--grace is nan"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, capsys, arguments, named):
    with pytest.raises(SystemExit, match="[^0]") as ended:
        main([argument.replace("ROOT", str(tmp_path)) for argument in arguments])
    assert named.replace("ROOT", str(tmp_path)) in f"{ended.value.code} {capsys.readouterr().err}"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def three(local) -> Catalog:
    """Three shards of images, regions of two of them, and snapshots."""
    for number in range(2):
        commit(local, number)
        detect(local, number)
    for stage in ("images", REGIONS):
        local.pin(stage)
    commit(local, 2)
    return local


def test_an_undamaged_root_has_no_fault(three, capsys):
    assert commit_shard(three, "images", "00009", [], [Row(54, "k", "timeout")], {})
    three.pin("images")
    with pytest.raises(SystemExit) as ended:
        main(["verify", three.store.root, "captions"])
    assert not ended.value.code
    assert "OK: no problems found (checked: shards 6, snapshots 3, checkpoints 0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "other"),  # and another of its kind
    [
        (r"images/00000-\w+\.tar", r"images/00001-\w+\.tar"),
        (r"images/00001\.parquet", r"images/00000\.parquet"),
        (r"images/snapshots/.*", r"regions/\w+/snapshots/.*"),
    ],
)
def test_verify_names_every_damaged_file(three, kind, other):
    store = three.store
    paths = [info.path for info in store.list("captions/")]
    path, other = (next(p for p in paths if re.fullmatch(f"captions/{name}", p)) for name in (kind, other))
    data = store.get(path)
    for changed in (
        *(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :] for place in (0, 500, len(data) - 1)),
        *(b"", data[: len(data) // 2], data + b"\0", store.get(other)),
    ):
        store.put(path, changed)
        assert any(fault.startswith(store.uri(path)) for fault in faults_of(three))
        if "parquet" in kind:
            for use in (status, lambda store: collect_garbage(store, 0, True)):
                with pytest.raises(ValueError, match=re.escape(store.uri(path))):
                    use(store)
    store.delete(path)
    if "snapshots" not in kind:  # one that is gone may never have been written
        assert any(fault.startswith(store.uri(path)) for fault in faults_of(three))


def test_verify_reports_every_fault_and_goes_on(three):
    store = three.store
    unreadable, gone = (three.manifest("images", shard).tar for shard in ("00000", "00002"))
    store.local_path(unreadable).unlink()
    store.local_path(unreadable).symlink_to("/proc/self/mem")  # its first byte gives EIO
    store.delete(gone)
    changed = three.manifest(REGIONS, "00001").tar
    for path in ("captions/images/00001.parquet", changed):  # and the tar that was made from that source
        store.put(path, store.get(path)[:-1])
    expected = [
        f"{unreadable} cannot be read ([Errno 5]",
        "images/00001.parquet is damaged",
        f"{gone} is missing;",
        f"{changed} is damaged",
    ]
    for fault, part in zip(faults_of(three), expected, strict=True):
        assert part in fault


def test_a_snapshot_without_its_tars_is_a_fault(local, capsys):
    commit(local, 0)
    tar = local.manifest("images", "00000").tar
    detect(local, 0)
    local.pin("images")
    local.store.delete(tar)
    commit_again(local, 0)
    source, snapshot = faults_of(local)
    assert f"{REGIONS}/00000.parquet was made from another" in source
    assert ".tar is missing;" in snapshot
    with pytest.raises(SystemExit, match="^1$"):
        main(["verify", local.store.root])
    result = "2 faults (checked: shards 2, snapshots 1, checkpoints 0)"
    assert capsys.readouterr().out.splitlines() == [source, snapshot, result]


def test_gc_deletes_what_nothing_names_and_is_old(local, capsys):
    store = local.store
    commit(local, 0)
    named = local.manifest("images", "00000").tar
    old = local.pin("images")
    commit(local, 1)
    again = local.manifest("images", "00001").tar
    pinned = local.pin("images")
    commit(local, 2)
    newest = local.pin("images")
    validation = {"dataset": "captions", "stage": "images", "snapshot": pinned.id}
    checkpoint(store, "first", 7, None, [validation])
    commit_again(local, 1)  # the pinned snapshot names its first tar, no manifest does
    orphan, young = (f"captions/images/{number:05d}-0123456789ab.tar" for number in (0, 5))
    for path in (orphan, young):
        store.put(path, b"left behind")
    store.put("captions/images/notes-0123456789ab.tar", b"not ours")
    hidden = store.local_path("captions/images/x").with_name(".00000.parquet.17-0123abcd")
    hidden.write_bytes(b"half")
    for info in list(store.list()):
        set_age(store, info.path, 30 if info.path.endswith(f"{newest.id}.parquet") else 31)
    set_age(store, young, 23)
    os.utime(hidden, (0, 0))
    expected = {orphan, f"captions/images/snapshots/{old.id}.parquet"}
    before = {info.path for info in store.list()}
    assert {info.path for _, info in find_garbage(store, 24 * HOUR)} == {str(hidden), *expected}
    main(["gc", store.root])
    assert capsys.readouterr().out.splitlines()[-1] == "3 files, 0.00 MB to delete: run again with --delete"
    assert ({info.path for info in store.list()}, hidden.exists()) == (before, True)
    main(["gc", store.root, "--delete"])
    assert before - {info.path for info in store.list()} == expected
    assert not hidden.exists()
    assert {named, again} < {info.path for info in store.list()}
    assert faults_of(local) == []
    assert [info.path for _, info in find_garbage(store, 22 * HOUR)] == [young]
    assert find_garbage(store, 24 * HOUR) == []


def test_gc_deletes_nothing_where_a_state_cannot_be_read(local):
    commit(local, 0)
    local.store.put("runs/torn/step-0000001/state.json", b"{")
    with pytest.raises(ValueError, match=r"runs/torn/step-0000001/state\.json is damaged"):
        collect_garbage(local.store, 0, True)


class Taken(LocalStore):
    """A folder in which a writer puts an object just before the last check of each tar."""

    def __init__(self, root: str, path: str, data: bytes):
        super().__init__(root)
        self.late = path, data

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix.endswith(".tar"):
            self.put(*self.late)
        return super().list(prefix)


def test_a_tar_that_is_put_again_or_named_meanwhile_stays(local):
    commit(local, 0)
    tar, path = local.manifest("images", "00000").tar, "captions/images/00000.parquet"
    manifest = local.store.get(path)
    local.store.delete(path)
    for late in ((tar, local.store.get(tar)), (path, manifest)):  # of a writer that had put its tar two days before
        set_age(local.store, tar, 48)
        assert collect_garbage(Taken(local.store.root, *late), 24 * HOUR, delete=True) == ["nothing to delete"]
        assert local.store.exists(tar)
    local.store.delete(path)
    assert "deleted" in collect_garbage(local.store, 24 * HOUR, delete=True)[-1]
    assert not local.store.exists(tar)


def test_the_tar_of_the_revision_before_goes_once_nobody_can_be_about_to_pin_it(local, monkeypatch):
    commit(local, 0)
    before, pins = local.manifest("images", "00000"), Inventory.pins
    set_age(local.store, before.tar, 48)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Inventory, "pins", lambda inventory: revise(local) or pins(inventory))
        assert find_garbage(local.store, 24 * HOUR) == []
    assert local.manifest("images", "00000").revision == 2
    assert find_garbage(local.store, 24 * HOUR) == []
    set_age(local.store, "captions/images/00000.r2.parquet", 25)
    assert [(what, info.path) for what, info in find_garbage(local.store, 24 * HOUR)] == [("orphan tar", before.tar)]


class Hasty(LocalStore):
    """A folder in which `gc` deletes the first tar as soon as it is put."""

    def put(self, path: str, data: bytes | Path, *, if_absent: bool = False) -> bool:
        put = super().put(path, data, if_absent=if_absent)
        if path.endswith(".tar") and not vars(self).setdefault("been", False):
            self.been = True
            self.delete(path)
        return put


def test_a_tar_that_gc_deletes_before_its_manifest_is_put_again(local):
    assert commit_shard(Catalog(Hasty(local.store.root), "captions"), "images", "00000", *shard_of(0), {})
    assert faults_of(local) == []
