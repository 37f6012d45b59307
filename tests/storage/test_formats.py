"""Golden files: this code reads them to the same values and writes the same bytes.

The golden files are made by `PYTHONPATH=.:tests python tests/storage/test_formats.py`,
only when a format gets a new version; docs/formats.md describes them.
"""

import shutil
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from places import DATA
from seeded import DETECTOR, as_dict, seeded_regions, seeded_sample

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.collect.download import ImageSettings, commit_images
from storage.collect.normalise import NormalisedImage
from storage.collect.rows import CaptionRow, Place, Reading, Rows, write_rows
from storage.digests import has_valid_digest
from storage.manifests import SCHEMA, Row
from storage.object_store import LocalStore
from storage.runs import json_with_digest
from storage.sample import Sample, pack_regions, unpack_regions
from storage.snapshots import read_columns
from storage.withdrawn import WITHDRAWAL_VERSION, Withdrawn, read_withdrawn

GOLDEN = DATA / "golden"
STAGE = f"regions/{DETECTOR}"
MANIFEST = f"captions/{STAGE}/00000.parquet"
TAR = f"captions/{STAGE}/00000-6d277ce0f700.tar"
IMAGES_MANIFEST = "captions/images/00002.parquet"
IMAGES_TAR = "captions/images/00002-d14c3e377c55.tar"
IMAGES_SOURCE = {"list": f"list.tsv sha256:{'5' * 64}", "rows": [20, 24]}
SNAPSHOT = f"captions/{STAGE}/snapshots/e20c091cc0f58042.parquet"
SOURCE = {"stage": "images", "shard": "00000", "manifest_sha256": "0" * 64, "content": "1" * 64}
WITHDRAWAL = "withdrawn/0123456789abcdef.json"


SHA256 = [
    "06c81c663198ac004f787f168a31b7ab095c13c29490711aad46e746ff096be6",
    "93d8c01bad0370de9efd09bc1185b067a568ac4124260fe62a05d056449313d8",
]
GOLDEN_SAMPLES = [seeded_sample(3, seeded_regions(3, 2)), seeded_sample(4, seeded_regions(4, 0))]


def golden_commit(root: Path) -> None:
    first, second = GOLDEN_SAMPLES
    failed = seeded_sample(5)
    rows = [
        Row(7, first.key, "ok", "", first.url, "CC BY 4.0"),
        Row(8, failed.key, "http_404", "Not Found", failed.url),
        Row(9, second.key, "ok", "", second.url),
    ]
    meta = {"source": SOURCE, "config": {"max_regions": 100}, "random_init": False}
    assert commit_shard(Catalog(LocalStore(str(root)), "captions"), STAGE, "00000", [first, second], rows, meta)


def golden_images_commit(root: Path) -> None:
    """A shard of the stage `images`, as collecting commits it: two rows that are ok, two that are not."""

    def image_of(sample: Sample) -> NormalisedImage:
        return NormalisedImage(sample.image, sample.width, sample.height, sample.sha256, sample.flags)

    first, second = seeded_sample(3), seeded_sample(4)
    outcomes = [
        CaptionRow(20, first.caption, first.url, status="ok", image=image_of(first)),
        CaptionRow(21, "a caption", "http://example.org/gone.jpg", status="http_404", detail="HTTP 404 Not Found"),
        CaptionRow(22, second.caption, second.url, status="ok", image=image_of(second)),
        CaptionRow(23, first.caption, first.url, status="duplicate", detail="of row 20"),
    ]
    catalog = Catalog(LocalStore(str(root)), "captions")
    assert commit_images(catalog, "00002", outcomes, ImageSettings(), IMAGES_SOURCE)


GOLDEN_ROWS = [
    CaptionRow(0, "a café", "http://example.org/0.jpg", {"license": "CC0", "score": 0.5}, "4041d925e79ebac70fbf"),
    CaptionRow(1, "", "", status="bad_row", detail="list.tsv:2: an empty line"),
    CaptionRow(2, "a café", "http://example.org/0.jpg", place=Place("a.tar", 512, 99)),
]
ROWS, READING = "0123456789abcdef", Reading("tsv", ("2", "1", "3"))


def golden_rows(root: Path) -> None:
    write_rows(LocalStore(str(root)), "captions", ROWS, READING, GOLDEN_ROWS)


def test_the_golden_rows_read_to_these_values_and_are_written_so(tmp_path):
    golden_rows(tmp_path)
    for root in (GOLDEN, tmp_path):
        rows = Rows(LocalStore(str(root)), "captions", ROWS)
        assert rows.read(0, 3) == GOLDEN_ROWS
        assert (rows.reading, rows.unreadable, rows.duplicates(0, 3)) == (READING, [1], {2: 0})
        assert rows.digest(0, 3) == "d23559360f10a5a0bc96fc472f26d5ba67121cd7486b54482d457c92224f3403"
    metadata = [pq.read_metadata(root / f"captions/images/rows/{ROWS}.parquet").metadata for root in (GOLDEN, tmp_path)]
    assert metadata[0][b"rows"] == metadata[1][b"rows"]


def test_the_golden_shard_and_manifest_read_to_these_values():
    catalog = Catalog(LocalStore(str(GOLDEN)), "captions")
    assert [as_dict(sample) for sample in catalog.read(STAGE, "00000")] == [as_dict(one) for one in GOLDEN_SAMPLES]
    manifest = catalog.manifest(STAGE, "00000")
    assert (manifest.shard, manifest.stage, manifest.tar, manifest.tar_bytes) == ("00000", STAGE, TAR, 10240)
    assert manifest.tar_sha256.startswith("6d277ce0f700")
    assert manifest.content == manifest.tar_sha256
    assert manifest.statuses == {"http_404": 1, "ok": 2}
    assert manifest.meta == {"source": SOURCE, "config": {"max_regions": 100}, "random_init": False}
    assert manifest.table.schema.equals(SCHEMA)
    third, fourth, fifth = (f"http://example.org/images/00000{i}.jpg" for i in (3, 4, 5))
    assert [tuple(line.values()) for line in manifest.table.to_pylist()] == [
        (7, "f17f635f1028ec2eb17d", "ok", "", third, 0, 3072, 16, 8, 2, SHA256[0], "CC BY 4.0"),
        (8, "01430a82a2e6c6c7f151", "http_404", "Not Found", fifth, *(None,) * 7),
        (9, "9abcd6e6cf1cf0b3855c", "ok", "", fourth, 3072, 3072, 16, 8, 0, SHA256[1], None),
    ]


@pytest.mark.parametrize(
    ("write", "stage", "shard", "tar"),
    [(golden_commit, STAGE, "00000", TAR), (golden_images_commit, "images", "00002", IMAGES_TAR)],
)
def test_this_code_writes_the_golden_tar_and_manifest(tmp_path, write, stage, shard, tar):
    write(tmp_path)
    assert (tmp_path / tar).read_bytes() == (GOLDEN / tar).read_bytes()
    written, golden = (Catalog(LocalStore(str(root)), "captions").manifest(stage, shard) for root in (tmp_path, GOLDEN))
    assert written.table.equals(golden.table)
    assert (written.meta, written.statuses, written.tar) == (golden.meta, golden.statuses, golden.tar)


def test_the_golden_snapshot_reads_to_these_values():
    store = LocalStore(str(GOLDEN))
    index = Catalog(store, "captions").pinned(STAGE, Path(SNAPSHOT).stem)
    assert (index.snapshot.shards, index.tars, index.tar_bytes) == (("00000",), (TAR,), (10240,))
    assert (index.shard.tolist(), index.offset.tolist(), index.length.tolist()) == ([0, 0], [0, 3072], [3072, 3072])
    assert index.urls() == [f"http://example.org/images/00000{i}.jpg" for i in (3, 4)]
    (table,) = read_columns(store, SNAPSHOT, ["shard", "row", "key"])
    assert [*table.to_pydict().values()] == [[0, 0], [7, 9], ["f17f635f1028ec2eb17d", "9abcd6e6cf1cf0b3855c"]]


def test_this_code_writes_the_golden_snapshot(tmp_path):
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    (tmp_path / SNAPSHOT).unlink()
    Catalog(LocalStore(str(tmp_path)), "captions").pin(STAGE)
    today, golden = pq.read_table(tmp_path / SNAPSHOT), pq.read_table(GOLDEN / SNAPSHOT)
    assert today.equals(golden)
    assert pq.read_metadata(tmp_path / SNAPSHOT).metadata == pq.read_metadata(GOLDEN / SNAPSHOT).metadata


def test_the_golden_regions_with_all_arrays_round_trip():
    data = (GOLDEN / "regions.mp").read_bytes()
    regions = unpack_regions(data)
    assert as_dict(seeded_sample(9, regions)) == as_dict(seeded_sample(9, seeded_regions(9, 3, everything=True)))
    assert (regions.background, regions.attributes.tolist()) == (5, [14, 7, 0])
    assert regions.features[0].tolist() == [0.56640625, 0.36328125, 0.75]
    assert pack_regions(seeded_regions(9, 3, everything=True)) == data


def test_the_golden_withdrawal_reads_to_these_values(tmp_path):
    (file,) = (GOLDEN / "withdrawn").iterdir()
    assert file.name == Path(WITHDRAWAL).name
    found = read_withdrawn(LocalStore(str(GOLDEN)))
    assert found == Withdrawn(frozenset({"http://example.org/a.jpg", "é.jpg"}), frozenset({"2" * 64}))


@pytest.mark.parametrize("file", [MANIFEST, IMAGES_MANIFEST, SNAPSHOT, WITHDRAWAL])
def test_a_digest_finds_every_changed_bit(file):
    data = bytearray((GOLDEN / file).read_bytes())
    assert has_valid_digest(data)
    for place in range(0, len(data), 7):
        data[place] ^= 1 << place % 8
        assert not has_valid_digest(data), place
        data[place] ^= 1 << place % 8
    for changed in (data + b"\0", data[:-1], b"\0" + data, data[1:], b""):
        assert not has_valid_digest(changed)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        golden_commit(Path(folder))
        golden_images_commit(Path(folder))
        golden_rows(Path(folder))
        Catalog(LocalStore(folder), "captions").pin(STAGE)
        shutil.rmtree(GOLDEN / "captions", ignore_errors=True)
        shutil.copytree(folder, GOLDEN, dirs_exist_ok=True)
    content = {"urls": ["http://example.org/a.jpg", "é.jpg"], "sha256": ["2" * 64]}
    withdrawal = {"version": WITHDRAWAL_VERSION, "since": "2026-11-25T00:00:00+00:00", **content}
    LocalStore(str(GOLDEN)).put(WITHDRAWAL, json_with_digest(withdrawal))
    (GOLDEN / "regions.mp").write_bytes(pack_regions(seeded_regions(9, 3, everything=True)))
