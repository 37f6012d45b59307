"""storage.catalog: commits, revisions, and what is pending."""

import dataclasses
import io
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest
from places import PROJECT
from seeded import REGIONS, as_dict, commit, detect, sealed_parquet, seeded_sample, shard_of

from storage.catalog import Catalog, ShardIndex
from storage.catalog.commit import commit_shard, withdraw_samples
from storage.inventory import Inventory
from storage.manifests import Row
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable
from storage.sample import Sample
from storage.shards import read_span
from storage.verify import verify
from storage.withdrawn import withdraw


def pinned(catalog: Catalog) -> ShardIndex:
    return catalog.pinned("images", catalog.pin("images").id)


def names(store: ObjectStore) -> list[str]:
    return [info.path for info in store.list()]


def test_a_manifest_has_every_row_and_finds_every_sample(catalog):
    samples, rows = shard_of(2, regions=True)
    meta = {"config": {"a": [1, 2.5, None]}, "random_init": True}
    assert commit_shard(catalog, REGIONS, "00002", samples, rows, meta) is True
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


def test_a_shard_without_an_ok_row_has_a_manifest_and_no_tar(catalog):
    rows = [Row(0, "a", "timeout"), Row(1, "b", "http_404", "gone")]
    assert commit_shard(catalog, "images", "00000", [], rows, {}) is True
    assert names(catalog.store) == ["captions/images/00000.parquet"]
    manifest = catalog.manifest("images", "00000")
    assert (manifest.tar, manifest.tar_sha256, manifest.tar_bytes, manifest.ok_rows) == (None, "", 0, 0)
    assert list(catalog.read("images", "00000")) == []
    assert commit_shard(catalog, "images", "00000", [], rows, {}) is False
    commit(catalog, 1)
    index = pinned(catalog)
    assert (len(index), set(index.shard.tolist()), len(index.tars)) == (4, {0}, 1)
    assert index.snapshot.shards == ("00000", "00001")


def revise(catalog: Catalog, number: int, ok: int, stage: str = "images", **meta) -> bool:
    """The next revision of a shard, with the first `ok` of its ok rows; the others are gone by now."""
    samples, rows = shard_of(number, regions=stage != "images")
    kept = {sample.key for sample in samples[:ok]}
    rows = [row if row.key in kept or row.status != "ok" else dataclasses.replace(row, status="gone") for row in rows]
    standing = catalog.headers(stage)[f"{number:05d}"]
    return commit_shard(catalog, stage, f"{number:05d}", samples[:ok], rows, meta, standing)


def test_readers_see_the_newest_revision_and_earlier_ones_stay(catalog):
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
        statuses = [table["status"].to_pylist() for table in catalog.columns("images", ["status"])]
        assert [one.count("ok") for one in statuses] == [ok, 4]
    revisions = catalog.revisions("images", "00000")
    assert [one.revision for one in revisions] == list(range(1, 12))
    assert [one.meta.get("replaces") for one in revisions] == [None, *(one.sha256 for one in revisions[:-1])]
    (again,) = catalog.manifests("images", [revisions[0].name], first.table.column_names)
    assert again == first
    assert catalog.shards("images") == ["00000", "00001"]
    assert all(catalog.store.get(name) == data for name, data in before.items())
    assert len(catalog.pinned("images", index.snapshot.id)) == 8
    assert pinned(catalog).snapshot.ok_rows == found.ok_rows + 4


def test_of_two_revisions_one_wins_and_named_tars_stay(catalog):
    commit(catalog, 0)
    samples, rows = shard_of(0)
    first = catalog.headers("images")["00000"]

    gone = [dataclasses.replace(row, status="gone") for row in rows]

    def overtaken() -> Iterator[Sample]:
        assert commit_shard(catalog, "images", "00000", [], gone, {}, first)
        yield from samples

    # Its tar is that of revision 1.
    assert commit_shard(catalog, "images", "00000", overtaken(), rows, {}, first) is False
    assert catalog.manifest("images", "00000").ok_rows == 0
    assert names(catalog.store) == sorted([first.tar, *(f"captions/images/00000{r}.parquet" for r in ("", ".r2"))])
    another = [dataclasses.replace(sample, caption="another") for sample in samples]
    assert commit_shard(catalog, "images", "00000", another, rows, {}, first) is False
    assert len(names(catalog.store)) == 3


@pytest.mark.parametrize("caption", [None, "another"])
def test_a_writer_that_loses_deletes_its_tar_but_not_the_same_one_of_the_winner(catalog, caption):
    samples, rows = shard_of(0)

    def overtaken() -> Iterator[Sample]:
        assert commit_shard(catalog, "images", "00000", samples, rows, {"winner": True}) is True
        yield from (dataclasses.replace(sample, caption=caption or sample.caption) for sample in samples)

    assert commit_shard(catalog, "images", "00000", overtaken(), rows, {}) is False
    manifest = catalog.manifest("images", "00000")
    assert manifest.meta == {"winner": True}
    assert names(catalog.store) == sorted(["captions/images/00000.parquet", manifest.tar])
    assert [as_dict(sample) for sample in catalog.read("images", "00000")] == [as_dict(sample) for sample in samples]
    assert commit_shard(catalog, "images", "00000", iter(()), rows, {}) is False, "its samples are not read"


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda catalog: commit(catalog, 1), f"^no space in {tempfile.gettempdir()}.*Set TMPDIR"),
        (lambda catalog: catalog.pin("images"), f"^no space in {tempfile.gettempdir()}.*Set TMPDIR"),
        (lambda catalog: catalog.store.put("a/b", bytes(10_000), if_absent=True), "/a/b: .*Free disk space.* again"),
    ],
)
def test_a_full_disk_is_named_and_keeps_nothing(local, write, named):
    commit(local, 0)
    before, (soft, hard) = names(local.store), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # refuses to write, as a full disk does
    try:
        with pytest.raises(StorageUnreachable, match=named):
            write(local)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (names(local.store), list(local.store.leftovers())) == (before, [])


SAMPLES, ROWS = shard_of(0)  # rows 0, 2, 3, 5 are ok


@pytest.mark.parametrize(
    ("stage", "shard", "samples", "rows", "message"),
    [
        ("images", "00000", SAMPLES[1:], ROWS, rf"00000\.parquet: .*{SAMPLES[0].key}, but got sample {SAMPLES[1].key}"),
        ("images", "00000", [*SAMPLES, seeded_sample(99)], ROWS, f"no further .* got sample {seeded_sample(99).key}"),
        ("images", "00000", SAMPLES, [ROWS[1], ROWS[0], *ROWS[2:]], r"00000\.parquet: .*row 0 follows row 1"),
        (REGIONS, "00000", SAMPLES, ROWS, "row 0 .* has no regions of"),
        ("regions/a/b", "00000", SAMPLES, ROWS, "'regions/a/b' is not a stage"),
        ("images", "0", SAMPLES, ROWS, "'0' is not a shard"),
    ],
)
def test_what_cannot_be_committed_is_refused(local, stage, shard, samples, rows, message):
    with pytest.raises(ValueError, match=message):
        commit_shard(local, stage, shard, samples, rows, {})
    assert names(local.store) == []


def test_pending_is_what_the_target_lacks_or_made_from_other_samples(catalog):
    for number in (0, 1, 3):
        commit(catalog, number)
    assert catalog.pending("images", REGIONS) == ["00000", "00001", "00003"]
    for number in (0, 1, 3):
        detect(catalog, number)
    assert catalog.pending("images", "regions/another") == ["00000", "00001", "00003"]
    revise(catalog, 0, 4, asked="again")  # the same samples
    assert catalog.pending("images", REGIONS) == []
    withdraw(catalog.store, [shard_of(0)[0][0].url])
    for stage in ("images", REGIONS):
        withdraw_samples(catalog, stage, "00000")
    assert [catalog.manifest(stage, "00000").ok_rows for stage in ("images", REGIONS)] == [3, 3]
    assert catalog.pending("images", REGIONS) == []
    revise(catalog, 0, 4, asked="again")  # the same, but for what was withdrawn
    assert catalog.pending("images", REGIONS) == []
    revise(catalog, 0, 2)
    assert catalog.pending("images", REGIONS) == ["00000"]
    assert catalog.pending("images", REGIONS, ["00001", "00003"]) == []
    assert list(verify(Inventory(catalog.store))) == []
    revise(catalog, 0, 2, REGIONS, source=catalog.manifest("images", "00000").as_source())
    commit(catalog, 2)
    assert catalog.pending("images", REGIONS) == ["00002"]


def test_a_damaged_or_missing_tar_is_named_before_the_first_sample(catalog):
    commit(catalog, 0)
    tar = catalog.manifest("images", "00000").tar
    data = bytearray(catalog.store.get(tar))
    data[700] ^= 1
    catalog.store.put(tar, bytes(data))
    with pytest.raises(ValueError, match=rf"{tar} is damaged: .* delete .*00000\.parquet and run the stage"):
        catalog.read("images", "00000")
    catalog.store.delete(tar)
    with pytest.raises(ValueError, match=f"{tar} is missing"):
        catalog.read("images", "00000")


def test_invalid_manifests_are_named(local):
    with pytest.raises(ObjectMissing, match="captions/images/00000.parquet"):
        local.manifest("images", "00000")
    commit(local, 0)
    data = local.store.get("captions/images/00000.parquet")
    local.store.put("captions/images/00001.parquet", data)
    with pytest.raises(ValueError, match=r"images/00001\.parquet is the manifest of shard 00000 of images"):
        local.counts("images")
    table = pq.read_table(io.BytesIO(data))
    header = {**json.loads(pq.read_metadata(io.BytesIO(data)).metadata[b"manifest"]), "shard": "00001"}

    def rewritten(**changes: object) -> bytes:
        return sealed_parquet(table, {"manifest": json.dumps(header | changes)})

    for wrong, message in [
        (sealed_parquet(table, {}), "is damaged or not a manifest"),
        (rewritten(version=1), "has version 1, but this code reads 5: use the code"),
        (b'{"version": 1}', "is damaged or not a manifest"),
        (rewritten(shard_version=2), "has version 2, but this code reads 1: use the code"),
    ]:
        local.store.put("captions/images/00001.parquet", wrong)
        with pytest.raises(ValueError, match=rf"images/00001\.parquet {message}") as error:
            local.manifest("images", "00001")
        assert "has version" not in message or "delete" not in str(error.value)


def test_a_manifest_is_parsed_without_threads_which_could_abort_a_process_that_ends():
    program = """if True:
        import os, sys
        from pathlib import Path
        from storage.manifests import parse_parquet
        before = os.listdir("/proc/self/task")
        assert parse_parquet(Path(sys.argv[1]).read_bytes(), ["row", "status"]).num_rows
        assert os.listdir("/proc/self/task") == before
    """
    file = next(PROJECT.glob("tests/data/golden/captions/images/0*.parquet"))
    subprocess.run([sys.executable, "-c", program, str(file)], check=True, cwd=PROJECT)
