"""Visible means whole: what a catalog commits, it commits once, with every row in it, or not at all."""

import dataclasses
import io
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from seeded import DETECTOR, as_dict, sealed_parquet, seeded_sample, shard_of

from storage.catalog import Catalog, Row, ShardIndex
from storage.inventory import Inventory
from storage.object_store import LocalStore, ObjectInfo, ObjectMissing, ObjectStore, StorageUnreachable, open_store
from storage.sample import Sample
from storage.shards import read_span
from storage.verify import verify

REGIONS = f"regions/{DETECTOR}"


def commit(catalog: Catalog, number: int, stage: str = "images", **meta) -> bool:
    samples, rows = shard_of(number, regions=stage != "images")
    return catalog.commit(stage, f"{number:05d}", samples, rows, meta)


def detect(catalog: Catalog, number: int) -> bool:
    return commit(catalog, number, REGIONS, source=catalog.manifest("images", f"{number:05d}").as_source())


def pinned(catalog: Catalog) -> ShardIndex:
    return catalog.pinned("images", catalog.pin("images").id)


def names(store: ObjectStore) -> list[str]:
    return [info.path for info in store.list()]


def test_a_committed_shard_says_what_became_of_every_row(catalog):
    samples, rows = shard_of(2, regions=True)
    meta = {"config": {"a": [1, 2.5, None]}, "random_init": True}
    assert catalog.commit(REGIONS, "00002", samples, rows, meta) is True
    manifest = catalog.manifest(REGIONS, "00002")
    assert (manifest.stage, manifest.shard, manifest.meta) == (REGIONS, "00002", meta)
    assert (manifest.statuses, manifest.ok_rows) == ({"http_404": 2, "ok": 4}, 4)
    assert manifest.tar == f"captions/{REGIONS}/00002-{manifest.tar_sha256[:12]}.tar"
    tar = catalog.store.get(manifest.tar)
    assert manifest.tar_bytes == len(tar)
    table = manifest.table.to_pylist()
    assert [Row(*(line[field.name] for field in dataclasses.fields(Row))) for line in table] == rows
    remaining = iter(samples)
    for line in table:
        place = [line[column] for column in ("offset", "length", "width", "height", "num_regions")]
        if line["status"] == "ok":
            sample = next(remaining)
            assert as_dict(read_span(tar[place[0] : place[0] + place[1]])) == as_dict(sample)
            assert place[2:] == [sample.width, sample.height, len(sample.regions)]
        else:
            assert place == [None] * 5
    assert [as_dict(sample) for sample in catalog.read(REGIONS, "00002")] == [as_dict(sample) for sample in samples]
    assert names(catalog.store) == sorted([manifest.tar, f"captions/{REGIONS}/00002.parquet"])


def test_a_stage_without_regions_counts_none(local):
    commit(local, 0)
    assert local.manifest("images", "00000").table["num_regions"].null_count == 6


def test_the_same_samples_give_the_same_objects_byte_for_byte(catalog, tmp_path):
    other = Catalog(open_store(str(tmp_path / "other")), "captions")
    for each in (catalog, other):
        commit(each, 0, config={"b": 1, "a": 2})
        time.sleep(1.1 - time.time() % 1)  # into another second, for a clock in the bytes
        detect(each, 0)
    assert len(names(catalog.store)) == 4
    assert names(catalog.store) == names(other.store)
    for name in names(other.store):
        assert catalog.store.get(name) == other.store.get(name)


def test_a_shard_without_an_ok_row_has_a_manifest_and_no_tar(catalog):
    rows = [Row(0, "a", "timeout"), Row(1, "b", "http_404", "gone")]
    assert catalog.commit("images", "00000", [], rows, {}) is True
    assert names(catalog.store) == ["captions/images/00000.parquet"]
    manifest = catalog.manifest("images", "00000")
    assert (manifest.tar, manifest.tar_sha256, manifest.tar_bytes, manifest.ok_rows) == (None, "", 0, 0)
    assert list(catalog.read("images", "00000")) == []
    assert catalog.commit("images", "00000", [], rows, {}) is False
    commit(catalog, 1)
    index = pinned(catalog)
    assert (len(index), set(index.shard.tolist()), len(index.tars)) == (4, {0}, 1)
    assert index.snapshot.shards == ("00000", "00001")


def test_a_second_commit_changes_nothing_and_asks_for_no_sample(catalog):
    assert commit(catalog, 0, attempt=1) is True
    before = {name: catalog.store.get(name) for name in names(catalog.store)}

    def never() -> Iterator[Sample]:
        raise AssertionError("the samples of a shard that is there are not needed")
        yield

    assert catalog.commit("images", "00000", never(), shard_of(0)[1], {"attempt": 2}) is False
    assert {name: catalog.store.get(name) for name in names(catalog.store)} == before


def revise(catalog: Catalog, number: int, ok: int, stage: str = "images", **meta) -> bool:
    """The next revision of a shard, with the first `ok` of its ok rows; the others are gone by now."""
    samples, rows = shard_of(number, regions=stage != "images")
    kept = {sample.key for sample in samples[:ok]}
    rows = [row if row.key in kept or row.status != "ok" else dataclasses.replace(row, status="gone") for row in rows]
    standing = catalog.headers(stage)[f"{number:05d}"]
    return catalog.commit(stage, f"{number:05d}", samples[:ok], rows, meta, standing)


def test_a_revision_stands_beside_what_it_replaces_and_readers_see_it(catalog):
    for number in range(2):
        commit(catalog, number)
    detect(catalog, 0)
    before = {name: catalog.store.get(name) for name in names(catalog.store)}
    first, index = catalog.manifest("images", "00000"), pinned(catalog)
    for revision, ok in [(number, 1 + number % 4) for number in range(2, 12)]:  # r10 follows r9
        assert revise(catalog, 0, ok) is True
        found = catalog.manifest("images", "00000")
        assert (found.revision, found.ok_rows, found.name) == (revision, ok, f"00000.r{revision}")
        assert len(list(catalog.read("images", "00000"))) == ok
        assert catalog.headers("images")["00000"].sha256 == found.sha256
        assert [
            len(table.filter(pc.equal(table["status"], "ok"))) for table in catalog.columns("images", ["status"])
        ] == [ok, 4]
    revisions = catalog.revisions("images", "00000")
    assert [one.revision for one in revisions] == list(range(1, 12))
    assert [one.meta.get("replaces") for one in revisions] == [None, *(one.sha256 for one in revisions[:-1])]
    assert catalog.manifest_of(revisions[0]).table == first.table
    assert catalog.shards("images") == ["00000", "00001"]
    assert all(catalog.store.get(name) == data for name, data in before.items())
    assert len(catalog.pinned("images", index.snapshot.id)) == 8
    assert pinned(catalog).snapshot.ok_rows == found.ok_rows + 4


def test_what_was_made_of_an_earlier_revision_with_other_samples_is_pending(catalog):
    for number in range(2):
        commit(catalog, number)
        detect(catalog, number)
    revise(catalog, 0, 4, asked="again")  # the same samples
    assert catalog.pending("images", REGIONS) == []
    revise(catalog, 0, 3)
    assert catalog.pending("images", REGIONS) == ["00000"]
    assert catalog.pending("images", REGIONS, ["00001"]) == []
    assert list(verify(Inventory(catalog.store))) == []
    revise(catalog, 0, 3, REGIONS, source=catalog.manifest("images", "00000").as_source())
    assert catalog.pending("images", REGIONS) == []
    catalog.store.delete("captions/images/00000.r3.parquet")
    with pytest.raises(ValueError, match=r"00000.r2.parquet was made from .* not from .*images/00000.r2.parquet as it"):
        catalog.pending("images", REGIONS)


def test_of_two_that_revise_a_shard_one_wins_and_a_tar_that_is_named_stays(catalog):
    commit(catalog, 0)
    samples, rows = shard_of(0)
    first = catalog.headers("images")["00000"]

    def overtaken(change: Callable[[Sample], Sample] = lambda sample: sample) -> Iterator[Sample]:
        assert catalog.commit(
            "images", "00000", [], [dataclasses.replace(row, status="gone") for row in rows], {}, first
        )
        yield from map(change, samples)

    assert catalog.commit("images", "00000", overtaken(), rows, {}, first) is False  # its tar is that of revision 1
    assert catalog.manifest("images", "00000").ok_rows == 0
    assert names(catalog.store) == sorted([first.tar, *(f"captions/images/00000{r}.parquet" for r in ("", ".r2"))])
    another = [dataclasses.replace(sample, caption="another") for sample in samples]
    assert catalog.commit("images", "00000", another, rows, {}, first) is False
    assert len(names(catalog.store)) == 3


def test_a_writer_that_dies_before_the_manifest_of_a_revision_leaves_the_one_before(local):
    commit(local, 0)
    before = local.manifest("images", "00000")

    class Dying(LocalStore):
        def put(self, path: str, data: object, *, if_absent: bool = False) -> bool:
            if path.endswith(".parquet"):
                raise KeyboardInterrupt
            return super().put(path, data, if_absent=if_absent)

    with pytest.raises(KeyboardInterrupt):
        revise(Catalog(Dying(local.store.root), "captions"), 0, 2)
    assert local.manifest("images", "00000").sha256 == before.sha256
    assert len(list(local.read("images", "00000"))) == 4


def test_a_writer_that_is_overtaken_leaves_quietly_and_takes_its_tar_along(catalog):
    samples, rows = shard_of(0)

    def overtaken(change: Callable[[Sample], Sample]) -> Iterator[Sample]:
        assert catalog.commit("images", "00000", samples, rows, {"winner": True}) is True
        yield from map(change, samples)

    assert (
        catalog.commit("images", "00000", overtaken(lambda s: dataclasses.replace(s, caption="x")), rows, {}) is False
    )
    manifest = catalog.manifest("images", "00000")
    assert manifest.meta == {"winner": True}
    assert names(catalog.store) == sorted(["captions/images/00000.parquet", manifest.tar])
    assert [as_dict(sample) for sample in catalog.read("images", "00000")] == [as_dict(sample) for sample in samples]


def test_an_overtaken_writer_of_the_same_bytes_leaves_the_winner_its_tar(catalog):
    samples, rows = shard_of(0)

    def overtaken() -> Iterator[Sample]:
        assert catalog.commit("images", "00000", samples, rows, {"winner": True}) is True
        yield from samples

    assert catalog.commit("images", "00000", overtaken(), rows, {}) is False
    assert len(list(catalog.read("images", "00000"))) == 4


@pytest.mark.parametrize("write", [lambda catalog: commit(catalog, 1), lambda catalog: catalog.pin("images")])
def test_a_full_folder_for_temporary_files_is_named_with_the_way_out(local, write):
    commit(local, 0)
    before, (soft, hard) = names(local.store), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # refuses to write, as a full disk does
    try:
        with pytest.raises(StorageUnreachable, match=rf"^no space in {tempfile.gettempdir()}.*Set TMPDIR"):
            write(local)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(local.store) == before


def test_of_many_writers_at_once_one_commits(local):
    def write(number: int) -> bool:
        samples, rows = shard_of(0)
        samples = [dataclasses.replace(sample, caption=f"writer {number}") for sample in samples]
        return Catalog(LocalStore(local.store.root), "captions").commit(
            "images", "00000", samples, rows, {"by": number}
        )

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(write, range(6)))
    assert won.count(True) == 1
    assert local.manifest("images", "00000").meta == {"by": won.index(True)}
    assert {sample.caption for sample in local.read("images", "00000")} == {f"writer {won.index(True)}"}
    assert len(names(local.store)) == 2


def test_rows_and_samples_must_match_one_to_one_in_order(local):
    samples, rows = shard_of(0)  # rows 0, 2, 3, 5 are ok
    ok = dataclasses.replace
    for given, listed, message in [
        (samples[:-1], rows, rf"row 5 \({samples[3].key}\) is ok, but there is no sample"),
        (samples[1:], rows, f"row 0 is ok with key {samples[0].key}, but its sample is {samples[1].key}"),
        ([samples[0], samples[2], samples[1], samples[3]], rows, "row 2 is ok with key"),
        ([*samples, seeded_sample(99)], rows, f"sample {seeded_sample(99).key} comes after the last ok row"),
        (samples, rows[:-1], f"sample {samples[3].key} comes after the last ok row"),
        (samples, [*rows, rows[-1]], "row 5 follows row 5; give each row once"),
        (samples, [rows[1], rows[0], *rows[2:]], "row 0 follows row 1"),
        (samples, [*rows, ok(rows[0], row=6)], "rows 0 and 6 are both ok with key"),
        (samples, [ok(rows[0], status=""), *rows[1:]], "row 0 has no status"),
        ([], [], "a shard without rows"),
    ]:
        with pytest.raises(ValueError, match=rf"captions/images/00000\.parquet: .*{message}"):
            local.commit("images", "00000", given, listed, {})
        assert names(local.store) == []


def test_regions_must_be_there_and_of_the_detector_of_the_stage(local):
    samples, rows = shard_of(0, regions=True)
    with pytest.raises(
        ValueError, match=f"row 0 .* has regions of detector {DETECTOR}, but the stage is regions/other"
    ):
        local.commit("regions/other", "00000", samples, rows, {})
    with pytest.raises(ValueError, match="row 0 .* has no regions"):
        local.commit(REGIONS, "00000", *shard_of(0), {})
    assert names(local.store) == []


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": b"x"}, {"a": {1, 2}}])
def test_meta_that_is_no_json_is_refused(local, meta):
    with pytest.raises(ValueError, match="00000.parquet: meta cannot be written as JSON"):
        local.commit("images", "00000", *shard_of(0), meta)


def test_names_that_do_not_belong_in_a_catalog_are_refused(local):
    for stage, shard in [
        ("image", "00000"),
        ("regions", "00000"),
        ("regions/a/b", "00000"),
        ("images", "0"),
        ("images", "000000"),
    ]:
        with pytest.raises(ValueError, match="is not a stage|is not a shard"):
            local.commit(stage, shard, *shard_of(0), {})
    for dataset in ("", "a/b", "runs"):
        with pytest.raises(ValueError, match="cannot be a dataset"):
            Catalog(local.store, dataset)


def test_pending_is_what_the_source_has_and_the_target_has_not(catalog):
    for number in (0, 1, 3):
        commit(catalog, number)
    assert catalog.pending("images", REGIONS) == ["00000", "00001", "00003"]
    detect(catalog, 1)
    assert catalog.pending("images", REGIONS) == ["00000", "00003"]
    assert catalog.pending("images", "regions/another") == ["00000", "00001", "00003"]
    detect(catalog, 0)
    detect(catalog, 3)
    assert catalog.pending("images", REGIONS) == []
    commit(catalog, 2)
    assert catalog.pending("images", REGIONS) == ["00002"]


def test_a_target_made_from_another_source_names_both(catalog):
    commit(catalog, 0)
    detect(catalog, 0)
    catalog.store.delete("captions/images/00000.parquet")
    commit(catalog, 0, config="another")
    with pytest.raises(
        ValueError, match=rf"{REGIONS}/00000\.parquet was made from .*images/00000\.parquet as it is now"
    ):
        catalog.pending("images", REGIONS)
    commit(catalog, 1)
    commit(catalog, 1, REGIONS)
    catalog.store.delete(f"captions/{REGIONS}/00000.parquet")
    with pytest.raises(ValueError, match=rf"{REGIONS}/00001\.parquet was made from None"):
        catalog.pending("images", REGIONS)


class CountingStore(LocalStore):
    """A folder that notes what was asked of it."""

    def __init__(self, root: str):
        super().__init__(root)
        self.lists, self.gets = [], []

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.lists.append(prefix)
        return super().list(prefix)

    def get(self, path: str) -> bytes:
        self.gets.append(path)
        return super().get(path)


def test_what_is_pending_is_asked_of_manifests_alone_with_one_listing_a_stage(local):
    for number in range(4):
        commit(local, number)
    detect(local, 2)
    counting = CountingStore(local.store.root)
    catalog = Catalog(counting, "captions")
    assert catalog.pending("images", REGIONS) == ["00000", "00001", "00003"]
    assert sorted(counting.lists) == ["captions/images/", f"captions/{REGIONS}/"]
    assert sorted(counting.gets) == ["captions/images/00002.parquet", f"captions/{REGIONS}/00002.parquet"]


def test_headers_are_the_manifests_without_their_tables(catalog):
    assert catalog.headers("images") == {}
    for number in (2, 0):
        commit(catalog, number)
    detect(catalog, 2)
    for stage, shards in (("images", ["00000", "00002"]), (REGIONS, ["00002"])):
        headers = catalog.headers(stage)
        assert list(headers) == shards
        for shard, header in headers.items():
            manifest = vars(catalog.manifest(stage, shard))
            assert vars(header) == {name: value for name, value in manifest.items() if name != "table"}
            assert (header.ok_rows, header.as_source()) == (4, catalog.manifest(stage, shard).as_source())
    assert list(catalog.headers("images", ["00002"])) == ["00002"]
    with pytest.raises(ObjectMissing, match="00001.parquet"):
        catalog.headers("images", ["00000", "00001"])


def test_columns_come_shard_by_shard(catalog):
    for number in (2, 0):
        commit(catalog, number)
    tables = list(catalog.columns("images", ["row", "status"]))
    expected = [catalog.manifest("images", shard).table.select(["row", "status"]) for shard in ("00000", "00002")]
    assert [table.to_pydict() for table in tables] == [table.to_pydict() for table in expected]
    assert [len(table) for table in catalog.columns("images", ["row"], ["00002"])] == [len(expected[1])]


def test_counts_are_rows_by_status(local):
    assert local.counts("images") == {}
    for number in range(3):
        commit(local, number)
    local.commit("images", "00009", [], [Row(54, "k", "timeout")], {})
    assert local.counts("images") == {"http_404": 6, "ok": 12, "timeout": 1}


def test_a_tar_that_changed_or_went_is_named_before_the_first_sample(catalog):
    commit(catalog, 0)
    tar = catalog.manifest("images", "00000").tar
    data = bytearray(catalog.store.get(tar))
    data[700] ^= 1
    catalog.store.put(tar, bytes(data))
    with pytest.raises(ValueError, match=rf"{tar} is damaged: .* delete .*00000\.parquet and run the stage"):
        catalog.read("images", "00000")
    catalog.store.delete(tar)
    with pytest.raises(ValueError, match=f"{tar} is gone"):
        catalog.read("images", "00000")


def test_a_manifest_that_is_none_or_lies_elsewhere_is_named(local):
    with pytest.raises(ObjectMissing, match="captions/images/00000.parquet"):
        local.manifest("images", "00000")
    commit(local, 0)
    data = local.store.get("captions/images/00000.parquet")
    local.store.put("captions/images/00001.parquet", data)
    with pytest.raises(ValueError, match=r"images/00001\.parquet is the manifest of shard 00000 of images"):
        local.counts("images")
    table = pq.read_table(io.BytesIO(data))
    header = {**json.loads(pq.read_metadata(io.BytesIO(data)).metadata[b"manifest"]), "shard": "00001"}
    for wrong, message in [
        (sealed_parquet(table, {}), "is not a manifest"),
        (rewritten(table, {**header, "version": 1}), "is of version 1, this code reads 3: use the code"),
        (unsealed(table, {**header, "version": 1}), "is of version 1, this code reads 3: use the code"),
        (unsealed(table, header), "is damaged or not a manifest"),
        (unsealed(table, {}), "is damaged or not a manifest"),
        (b'{"version": 1}', "is damaged or not a manifest"),
        (rewritten(table, {**header, "shard_version": 2}), "is of version 2, this code reads 1: use the code"),
        (rewritten(table.drop_columns(["detail"]), header), "has columns"),
    ]:
        local.store.put("captions/images/00001.parquet", wrong)
        with pytest.raises(ValueError, match=rf"images/00001\.parquet {message}") as error:
            local.manifest("images", "00001")
        assert "of version" not in message or "delete" not in str(error.value)


def test_a_snapshot_that_is_damaged_is_written_again_by_who_pins_it(local):
    commit(local, 0)
    path = f"captions/images/snapshots/{local.pin('images').id}.parquet"
    data = local.store.get(path)
    local.store.put(path, data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    local.pin("images")
    assert local.store.get(path) == data


def rewritten(table, header: dict) -> bytes:
    return sealed_parquet(table, {"manifest": json.dumps(header)})


def unsealed(table, header: dict) -> bytes:
    """A manifest as version 1 was written: without a digest of its own."""
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"manifest": json.dumps(header)} if header else {}), sink)
    return sink.getvalue()


def in_folder(folder: str, work: Callable, *arguments: object) -> None:
    """For a process that will be killed: its temporary files go where pytest clears up."""
    tempfile.tempdir = folder
    work(*arguments)


class DyingStore(LocalStore):
    """A folder whose owner is killed at the given put: before it, or when its temporary file is half written."""

    def __init__(self, root: str, puts: int, halfway: bool):
        super().__init__(root)
        self.puts, self.halfway = puts, halfway

    def put(self, path: str, data: bytes | Path, *, if_absent: bool = False) -> bool:
        self.puts -= 1
        if self.puts == 0:
            if self.halfway:
                file = Path(self.where(path))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.with_name(f".{file.name}.half").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().put(path, data, if_absent=if_absent)


@pytest.mark.parametrize("puts", [1, 2])
@pytest.mark.parametrize("halfway", [False, True])
def test_a_writer_killed_before_its_manifest_is_as_if_it_had_never_been(local, tmp_path, puts, halfway):
    dying = Catalog(DyingStore(local.store.root, puts, halfway), "captions")
    child = multiprocessing.get_context("fork").Process(target=in_folder, args=(str(tmp_path), commit, dying, 0))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert local.shards("images") == []
    assert len(names(local.store)) == puts - 1  # with the second put, the tar stands there alone
    assert commit(local, 0) is True
    assert len(names(local.store)) == 2
    assert len(list(local.read("images", "00000"))) == 4
