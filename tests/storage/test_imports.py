"""Folders in img2dataset's output formats, written here by hand, become shards or are refused before the import."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from places import PROJECT
from web import draw, encode

from storage.catalog import Catalog
from storage.collect import collect
from storage.collection_plan import CollectSettings
from storage.download import STATUSES
from storage.fetch import DownloadSettings
from storage.imports import StoredRow, status_of
from storage.object_store import open_store
from storage.sample import sample_key

IMAGES = "images"


def row(shard: int, number: int, image: bytes | None, error: str | None = None, **changes: object) -> dict:
    """One row of a shard's table, and the image that goes with it."""
    return {
        "caption": f"caption {shard}/{number}: a café",
        "url": f"http://example.test/{shard}/{number}.jpg",
        "key": f"{shard:05}{number:04}",
        "status": "success" if image is not None else "failed_to_download",
        "error_message": error,
        "width": 96 if image else None,
        "exif": "{}" if image else None,
        "sha256": None,
        "image": image,
    } | changes


def write_shard(folder: Path, shard: int, rows: list[dict], form: str = "webdataset", extension: str = "jpg") -> None:
    """A shard as img2dataset leaves it; rows are written in the order in which downloads ended."""
    name = f"{shard:05}"
    folder.mkdir(exist_ok=True)
    done = rows[::-1]
    rows_without_image = [{name: value for name, value in row.items() if name != "image"} for row in done]
    files = {}
    for row, meta in zip(done, rows_without_image, strict=True):
        if row["image"] is not None:
            files[f"{row['key']}.{extension}"] = row["image"]
            files[f"{row['key']}.json"] = json.dumps(meta, indent=4).encode()
            files[f"{row['key']}.txt"] = (row.get("caption") or "").encode()
    if form == "webdataset":
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for member, data in files.items():
                info = tarfile.TarInfo(member)
                info.size, info.mtime = len(data), 1732190000.25  # as webdataset: a header of its own for the fraction
                tar.addfile(info, BytesIO(data))
    else:
        (folder / name).mkdir()
        for member, data in files.items():
            (folder / name / member).write_bytes(data)
    pq.write_table(pa.Table.from_pylist(rows_without_image), folder / f"{name}.parquet")
    stats = {"count": len(rows), "successes": len(files) // 3, "failed_to_download": 0, "failed_to_resize": 0}
    (folder / f"{name}_stats.json").write_text(json.dumps(stats, indent=4))


def image_bytes(number: int) -> bytes:
    return encode(draw(seed=number))


def small_folder(folder: Path, form: str = "webdataset", extension: str = "jpg") -> Path:
    """Two shards: five rows, one of them gone, and two rows, one of them no image that we would store."""
    first = [row(0, number, image_bytes(number)) for number in range(4)] + [
        row(0, 4, None, "HTTP Error 404: Not Found")
    ]
    write_shard(folder, 0, first, form, extension)
    write_shard(folder, 1, [row(1, 0, image_bytes(10)), row(1, 1, encode(draw(400, 20)))], form, extension)
    return folder


def imported(root: Path, folder: Path, **changes: object) -> list[tuple]:
    """Collect; (row, status, detail) of every row."""
    settings = CollectSettings("imported", img2dataset=str(folder), **({"rows_per_shard": 3} | changes))
    collect(str(root), settings, lambda line: None)
    tables = Catalog(open_store(str(root)), "imported").columns(IMAGES, ["row", "status", "detail"])
    return [line for table in tables for line in zip(*table.to_pydict().values(), strict=True)]


@pytest.mark.parametrize(("form", "extension"), [("webdataset", "jpg"), ("files", "jpg"), ("webdataset", "png")])
def test_both_formats_are_imported_row_by_row_in_the_order_of_the_list(tmp_path: Path, form: str, extension: str):
    rows = imported(tmp_path / "root", small_folder(tmp_path / "folder", form, extension))
    assert [(number, status) for number, status, _ in rows] == [
        (0, "ok"), (1, "ok"), (2, "ok"), (3, "ok"), (4, "http_404"), (5, "ok"), (6, "bad_geometry"),
    ]  # fmt: skip
    assert rows[4][2] == "img2dataset: failed_to_download: HTTP Error 404: Not Found"
    catalog = Catalog(open_store(str(tmp_path / "root")), "imported")
    assert catalog.shards(IMAGES) == ["00000", "00001", "00002"]  # three rows, two, two: no shard spans two of theirs
    samples = [sample for shard in catalog.shards(IMAGES) for sample in catalog.read(IMAGES, shard)]
    assert [sample.image for sample in samples] == [image_bytes(number) for number in (0, 1, 2, 3, 10)]
    for number, sample in enumerate(samples[:4]):
        url, caption = f"http://example.test/0/{number}.jpg", f"caption 0/{number}: a café"
        assert (sample.url, sample.caption, sample.key) == (url, caption, sample_key(url, caption))


def test_every_image_passes_the_checks_of_a_download(tmp_path: Path):
    images = {
        "bomb": encode(draw(500, 400)),
        "torn": image_bytes(0)[:1000],
        "page": b"<html>",
        "large": image_bytes(0) + bytes(100_000),
        "png": encode(draw(), "PNG"),
        "empty": b"",
    }
    write_shard(tmp_path / "folder", 0, [row(0, number, image) for number, image in enumerate(images.values())])
    download = DownloadSettings(max_pixels=190_000, max_bytes=100_000)
    rows = imported(tmp_path / "root", tmp_path / "folder", download=download)
    assert dict(zip(images, (status for _, status, _ in rows), strict=True)) == {
        "bomb": "too_many_pixels", "torn": "truncated", "page": "not_image", "large": "too_big", "png": "ok",
        "empty": "not_image",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("HTTP Error 404: Not Found", "http_404"),
        ("HTTP Error 999: x", "http_other"),
        ("HTTP Error 302: ... a redirect error that would lead to an infinite loop.", "too_many_redirects"),
        ("<urlopen error [Errno -2] Name or service not known>", "dns"),
        ("<urlopen error [Errno -3] Temporary failure in name resolution>", "dns"),
        ("The read operation timed out", "timeout"),
        ("<urlopen error [Errno 111] Connection refused>", "connect"),
        ("Remote end closed connection without response", "connect"),
        ("<urlopen error [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed>", "tls"),
        ("IncompleteRead(100 bytes read, 900 more expected)", "short_body"),
        ("Use of image disallowed by X-Robots-Tag directive", "refused_by_robots"),
        ("unknown url type: '//example.test/a.jpg'", "bad_url"),
        ("image decoding error", "not_image"),
        ("image too small", "bad_geometry"),
        ("hash mismatch", "not_stored"),
        ("", "not_stored"),
    ],
)
def test_an_error_of_img2dataset_has_a_status(error: str, status: str):
    assert status_of(StoredRow("00000", "000000000", "", "http://x/", "failed_to_download", error)) == status
    assert status in STATUSES


def test_a_failed_resize_is_not_image():
    assert status_of(StoredRow("00000", "000000000", "", "http://x/", "failed_to_resize", "OpenCV")) == "not_image"


def test_an_image_that_is_gone_or_no_file_of_the_folder_is_a_missing_file(tmp_path: Path):
    folder = tmp_path / "folder"
    write_shard(folder, 0, [row(0, number, image_bytes(number)) for number in range(5)], "files")
    (tmp_path / "outside.jpg").write_bytes(image_bytes(9))
    for number, target in ((0, tmp_path / "outside.jpg"), (1, folder / "00000" / "000000003.jpg")):
        (folder / "00000" / f"00000000{number}.jpg").unlink()
        (folder / "00000" / f"00000000{number}.jpg").symlink_to(target)
    (folder / "00000" / "000000002.jpg").unlink()
    os.mkfifo(folder / "00000" / "000000002.jpg")  # never waited for
    (folder / "00000" / "000000004.jpg").unlink()
    rows = imported(tmp_path / "root", folder)
    assert [status for _, status, _ in rows] == ["missing_file", "ok", "missing_file", "ok", "missing_file"]
    for number, detail in ((0, "a link to a file outside"), (2, "not a regular file"), (4, "no image 000000004")):
        assert detail in rows[number][2]


def cut(file: Path, bytes_left: int) -> None:
    file.write_bytes(file.read_bytes()[:bytes_left])


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def many_rows(folder: Path) -> None:
    """A small file of 100,001 rows."""
    columns = {name: pa.repeat("000000000", 100_001) for name in ("key", "url", "status")}
    pq.write_table(pa.table(columns), folder / "00001.parquet")
    (folder / "00001_stats.json").write_text('{"count": 100001}')


def much_text(folder: Path) -> None:
    """A small file of one row group that unpacks to 300 MB."""
    columns = {name: pa.repeat("0", 5000) for name in ("key", "url", "status")}
    columns["caption"] = pa.repeat(60_000 * "a", 5000)
    pq.write_table(pa.table(columns), folder / "00001.parquet", use_dictionary=False, compression="zstd")
    (folder / "00001_stats.json").write_text('{"count": 5000}')


@pytest.mark.parametrize(
    ("tear", "named"),
    [
        (much_text, "bytes of text in row group 0"),
        (lambda folder: (folder / "00001_stats.json").unlink(), "no 00001_stats.json: its writer was stopped"),
        (lambda folder: (folder / "00001.parquet").unlink(), "no 00001.parquet"),
        (lambda folder: cut(folder / "00001.parquet", 900), "00001.parquet cannot be read"),
        (lambda folder: cut(folder / "00001.parquet", 0), "00001.parquet cannot be read"),
        (lambda folder: cut(folder / "00001_stats.json", 9), "00001_stats.json cannot be read"),
        (lambda folder: (folder / "00001_stats.json").write_text('{"count": 3}'), "00001.parquet has 2 rows"),
        (many_rows, "00001.parquet has 100001 rows"),
        (lambda folder: cut(folder / "00001.tar", 5 * 512), "00001.tar ends early"),
        (lambda folder: cut(folder / "00001.tar", 0), "00001.tar ends early"),
        (lambda folder: (folder / "00001.tar").unlink(), "neither 00001.tar nor a folder 00001"),
        *((lambda folder, name=name: fifo(folder / name), name) for name in ("00001.parquet", "00001.tar")),
    ],
)
def test_a_torn_shard_is_named_before_the_import(tmp_path: Path, tear: Callable[[Path], None], named: str):
    folder = small_folder(tmp_path / "folder")
    tear(folder)
    with pytest.raises(ValueError, match="1 of 2 shards cannot be imported") as refused:
        imported(tmp_path / "root", folder)
    assert "(00001: " in str(refused.value)
    assert named in str(refused.value)
    assert not Catalog(open_store(str(tmp_path / "root")), "imported").shards(IMAGES)


@pytest.mark.parametrize("member", [0, 3])
def test_a_tar_that_is_damaged_inside_is_named_and_its_shard_not_committed(tmp_path: Path, member: int):
    folder = small_folder(tmp_path / "folder")
    tar = folder / "00000.tar"
    with tarfile.open(tar) as members:
        offset = members.getmembers()[member].offset
    data = bytearray(tar.read_bytes())
    data[offset + 100 : offset + 200] = b"x" * 100
    tar.write_bytes(data)
    with pytest.raises(ValueError, match="00000.tar is (damaged|torn)"):
        imported(tmp_path / "root", folder)
    assert not Catalog(open_store(str(tmp_path / "root")), "imported").shards(IMAGES)


def test_a_folder_that_is_none_of_img2dataset_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no shard of img2dataset"):
        imported(tmp_path / "root", tmp_path / "empty")
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        imported(tmp_path / "root", tmp_path / "nowhere")


def test_an_import_goes_on_and_a_folder_may_grow_but_not_change(tmp_path: Path):
    folder, root = small_folder(tmp_path / "folder"), tmp_path / "root"
    before = imported(root, folder)
    catalog = Catalog(open_store(str(root)), "imported")
    tars = {shard: header.tar_sha256 for shard, header in catalog.headers(IMAGES).items()}
    catalog.store.delete("imported/images/00001.parquet")
    assert imported(root, folder) == before
    assert {shard: header.tar_sha256 for shard, header in catalog.headers(IMAGES).items()} == tars
    write_shard(folder, 2, [row(2, 0, image_bytes(20))])
    grown = imported(root, folder, rows_per_shard=2)  # what is committed keeps its portions
    assert grown == [*before, (7, "ok", "")]
    pq.write_table(pq.read_table(folder / "00000.parquet").slice(1), folder / "00000.parquet")
    (folder / "00000_stats.json").write_text('{"count": 4}')
    with pytest.raises(ValueError, match="the list changed under committed shards: shard 0000"):
        imported(root, folder)


def test_rows_that_repeat_an_earlier_one_are_duplicates_and_captions_may_be_absent(tmp_path: Path):
    folder = tmp_path / "folder"
    again = {"url": "http://example.test/0/0.jpg"}
    write_shard(folder, 0, [row(0, number, image_bytes(number)) for number in range(2)])
    write_shard(folder, 1, [row(1, 0, image_bytes(0), **again), row(1, 1, image_bytes(0), **again)])
    for name in ("00000", "00001"):
        pq.write_table(pq.read_table(folder / f"{name}.parquet").drop_columns("caption"), folder / f"{name}.parquet")
    rows = imported(tmp_path / "root", folder)
    assert [(status, detail) for _, status, detail in rows] == [
        ("ok", ""), ("ok", ""), ("duplicate", "of row 0"), ("duplicate", "of row 0"),
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["../secret", "/etc/secret", "..\\secret", "a\0b", "1" * 300])
def test_a_key_that_could_leave_the_folder_is_refused_by_name(tmp_path: Path, key: str):
    (tmp_path / "secret.jpg").write_bytes(image_bytes(0))
    write_shard(tmp_path / "folder", 0, [row(0, 0, image_bytes(1))], "files")
    table = pq.read_table(tmp_path / "folder" / "00000.parquet")
    changed = table.set_column(table.schema.names.index("key"), "key", pa.array([key]))
    pq.write_table(changed, tmp_path / "folder" / "00000.parquet")
    with pytest.raises(ValueError, match="00000.parquet: key .* is not a file's name"):
        imported(tmp_path / "root", tmp_path / "folder")


def test_a_table_that_unpacks_to_much_text_is_refused_in_little_memory(tmp_path: Path):
    folder, rows = small_folder(tmp_path / "folder"), 5000
    columns = {name: pa.repeat(value, 250) for name, value in (("key", "0"), ("caption", 60_000 * "a"), ("url", "x"))}
    table = pa.table(columns | {"status": pa.repeat("success", 250)})
    with pq.ParquetWriter(folder / "00000.parquet", table.schema, compression="zstd") as writer:
        for _ in range(rows // 250):
            writer.write_table(table)
    assert (folder / "00000.parquet").stat().st_size < 1_000_000
    (folder / "00000_stats.json").write_text(json.dumps({"count": rows}))
    code = (
        "import resource; import storage.collect as c; import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"settings = c.CollectSettings('imported', img2dataset={str(folder)!r})\n"
        f"try: c.collect({str(tmp_path / 'root')!r}, settings, print)\n"
        "except ValueError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert "00000.parquet holds more than" in done.stdout, done.stderr
    assert int(done.stdout.splitlines()[-1]) * 1024 < 150_000_000  # unpacked, it has 300 MB
