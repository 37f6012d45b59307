"""What others have stored, written here by hand, becomes shards or is refused: img2dataset's formats, plain tars."""

import base64
import contextlib
import functools
import gzip
import json
import os
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import PROJECT
from storage.forgotten import forget
from web import draw, encode

from storage.catalog import Catalog
from storage.collect.download import STATUSES
from storage.collect.fetch import DownloadSettings
from storage.collect.img2dataset import status_of
from storage.collect.imports import StoredRow
from storage.collect.plan import CollectSettings
from storage.collect.run import collect
from storage.collect.tfrecord import masked_crc32c, read_examples
from storage.object_store import open_store
from storage.sample import Sample, sample_key

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


def record(fields: dict[str, bytes]) -> bytes:
    """A record of a .tfrecord file: a tf.train.Example of these texts, as TensorFlow writes it."""

    def sized(number: int, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 127:
            size, length = size >> 7, length + bytes([size & 127 | 128])
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    features = (sized(1, sized(1, name.encode()) + sized(2, sized(1, sized(1, fields[name])))) for name in fields)
    data = sized(1, b"".join(features))
    length = len(data).to_bytes(8, "little")
    return b"".join(part + masked(part).to_bytes(4, "little") for part in (length, data))


def masked(data: bytes) -> int:
    """The checksum of a part of a record, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


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
    elif form == "files":
        (folder / name).mkdir()
        for member, data in files.items():
            (folder / name / member).write_bytes(data)
    elif form == "tfrecord":
        stored = [
            {"key": one["key"].encode(), extension: one["image"], "width": b"96"}
            for one in done
            if one["image"] is not None
        ]
        (folder / f"{name}.tfrecord").write_bytes(b"".join(map(record, stored)))
    elif form == "parquet":
        rows_without_image = [{name: value for name, value in row.items() if name != "image"} for row in done]
        for meta, image in zip(rows_without_image, done, strict=True):
            meta |= {extension: image["image"], "txt": meta.get("caption") if image["image"] else None}
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


def imported(root: Path, folder: Path | str, **changes: object) -> list[tuple]:
    """Collect; (row, status, detail) of every row."""
    settings = CollectSettings("imported", img2dataset=str(folder), **({"rows_per_shard": 3} | changes))
    collect(str(root), settings, lambda line: None)
    tables = Catalog(open_store(str(root)), "imported").columns(IMAGES, ["row", "status", "detail"])
    return [line for table in tables for line in zip(*table.to_pydict().values(), strict=True)]


@pytest.mark.parametrize(
    ("form", "extension"),
    [
        ("webdataset", "jpg"), ("webdataset", "png"), ("files", "jpg"), ("parquet", "jpg"), ("parquet", "webp"),
        ("tfrecord", "jpg"), ("tfrecord", "webp"),
    ],
)  # fmt: skip
def test_each_format_is_imported_row_by_row_in_the_order_of_the_list(tmp_path: Path, form: str, extension: str):
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


@pytest.mark.parametrize("form", ["webdataset", "files", "parquet", "tfrecord"])
def test_each_format_of_a_bucket_is_imported_as_that_of_a_folder(form: str, s3: str, tmp_path: Path):
    folder, bucket = small_folder(tmp_path / "folder", form), open_store("s3://bucket/theirs")
    write_shard(folder, 2, [row(2, 0, image_bytes(0) + bytes(100_000)), row(2, 1, image_bytes(1))], form)
    for file in (one for one in folder.rglob("*") if one.is_file()):
        bucket.put(str(file.relative_to(folder)), file.read_bytes())
    download = DownloadSettings(max_bytes=100_000)
    here, there = (
        imported(tmp_path / str(number), origin, download=download)
        for number, origin in enumerate((folder, "s3://bucket/theirs"))
    )
    assert there == here
    assert [status for _, status, _ in here[-2:]] == ["too_big", "ok"]
    assert samples_of(tmp_path / "0") == samples_of(tmp_path / "1")


# Written by tensorflow 2.21: two Examples, the first of a key, an image, a number, a fraction and an empty text.
BY_TENSORFLOW = (
    "eNpLZ4CAXWvPXuFK5RLnYi3PTCnJEOKT4uHi+g8DjFw8XCx5+XmpQixcTFwMXCJczNmplUK8XNxcnAZQYM4lzMWcVZAuBNTIxZGYp5CZm5ieyiXIxVqcnF+U"
    "KsQhxMbFArTJvvq8ztFwRoi1D14xh3FdYcJqoAXXbiYulvLUpAKhTUxc65m41jD9HwVEA/P4v/IA9F1Wsw=="
)


def test_examples_of_tensorflow_are_read_and_any_changed_byte_is_found():
    data = zlib.decompress(base64.b64decode(BY_TENSORFLOW))
    first, second = ({name: bytes(value) for name, value in one.items()} for one in read_examples(BytesIO(data), "a"))
    assert first == {"key": b"000000007", "jpg": b"an image", "none": b""}
    assert second == {"key": b"000000008", "webp": bytes([255]) * 300}
    checked = [
        at for at in range(len(data)) if at not in (*range(8, 12), *range(127, 131))
    ]  # the checksums of the lengths are not read
    for at in checked[::7]:
        with pytest.raises(ValueError, match=r"a at byte (0|119) (is damaged|ends early)"):
            list(read_examples(BytesIO(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]), "a"))
    for end in set(range(1, len(data))) - {119}:
        with pytest.raises(ValueError, match=r"a at byte (0|119) ends early"):
            list(read_examples(BytesIO(data[:end]), "a"))


@given(st.binary(min_size=4, max_size=1100))
def test_the_checksum_of_records_is_that_of_tensorflow(data: bytes):
    assert masked_crc32c(data) == masked(data)


@given(st.binary(max_size=60))
def test_an_example_that_is_none_is_an_error_that_names_the_file(data: bytes):
    length = len(data).to_bytes(8, "little")
    whole = length + bytes(4) + data + masked(data).to_bytes(4, "little")
    with contextlib.suppress(ValueError):
        for example in read_examples(BytesIO(whole), "a.tfrecord"):
            assert all(isinstance(name, str) for name in example)


def test_rows_that_img2dataset_lost_have_a_status(tmp_path: Path):
    folder = small_folder(tmp_path / "folder")
    (folder / "00001_stats.json").write_text('{"count": 4}')
    rows = imported(tmp_path / "root", folder)
    assert [status for _, status, _ in rows[5:]] == ["ok", "bad_geometry", "not_stored", "not_stored"]
    assert rows[8][2] == "img2dataset: lost: it wrote no row"


def test_a_row_whose_url_was_forgotten_is_not_imported(tmp_path: Path):
    forget(open_store(str(tmp_path / "root")), ["http://example.test/0/1.jpg"])
    rows = imported(tmp_path / "root", small_folder(tmp_path / "folder"))
    assert [status for _, status, _ in rows[:3]] == ["ok", "forgotten", "ok"]


@pytest.mark.parametrize("form", ["webdataset", "parquet", "tfrecord"])
def test_every_image_passes_the_checks_of_a_download(form: str, tmp_path: Path):
    images = {
        "bomb": encode(draw(500, 400)),
        "torn": image_bytes(0)[:1000],
        "page": b"<html>",
        "large": image_bytes(0) + bytes(100_000),
        "png": encode(draw(), "PNG"),
        "empty": b"",
    }
    write_shard(tmp_path / "folder", 0, [row(0, number, image) for number, image in enumerate(images.values())], form)
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
        ("Use of image disallowed by X-Robots-Tag directive", "x_robots_tag"),
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
        (lambda folder: (folder / "00001_stats.json").write_text('{"count": 1}'), "00001.parquet has 2 rows"),
        (
            lambda folder: (folder / "00001_stats.json").write_text("{}"),
            "00001_stats.json cannot be read: its count is",
        ),
        (many_rows, "00001_stats.json counts 100001 rows"),
        (lambda folder: cut(folder / "00001.tar", 5 * 512), "00001.tar ends early"),
        (lambda folder: cut(folder / "00001.tar", 0), "00001.tar ends early"),
        (lambda folder: (folder / "00001.tar").unlink(), "nor a folder 00001, and no column jpg"),
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


def test_a_damaged_tfrecord_is_named_and_its_shard_not_committed(tmp_path: Path):
    folder = small_folder(tmp_path / "folder", "tfrecord")
    whole = (folder / "00001.tfrecord").read_bytes()
    for data in (whole[:-1], whole[:2000] + b"\xff" + whole[2001:]):
        (folder / "00001.tfrecord").write_bytes(data)
        with pytest.raises(ValueError, match=r"00001.tfrecord at byte \d+ (is damaged|ends early)"):
            imported(tmp_path / "root", folder)
        assert Catalog(open_store(str(tmp_path / "root")), "imported").shards(IMAGES) == ["00000", "00001"]


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
    (tmp_path / "empty" / "000_stats.json").write_text('{"count": 1}')  # fewer digits: oom_shard_count=3
    with pytest.raises(ValueError, match="000: no 000.parquet; its format dummy stores nothing"):
        imported(tmp_path / "root", tmp_path / "empty")


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
        "import resource; import storage.collect.run as c; import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"settings = c.CollectSettings('imported', img2dataset={str(folder)!r})\n"
        f"try: c.collect({str(tmp_path / 'root')!r}, settings, print)\n"
        "except ValueError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert "00000.parquet holds more than" in done.stdout, done.stderr
    assert int(done.stdout.splitlines()[-1]) * 1024 < 150_000_000  # unpacked, it has 300 MB


def test_a_column_of_the_tables_is_kept_on_request(tmp_path: Path):
    write_shard(
        tmp_path / "folder", 0, [row(0, n, image_bytes(n), similarity=n / 4, title="a title") for n in range(2)]
    )
    imported(tmp_path / "root", tmp_path / "folder", columns=("url", "title", "similarity"))
    samples = list(Catalog(open_store(str(tmp_path / "root")), "imported").read(IMAGES, "00000"))
    assert [(one.caption, one.extra) for one in samples] == [("a title", {"similarity": n / 4}) for n in range(2)]
    with pytest.raises(ValueError, match="00000.parquet has no column 'alt'; it has caption, url, key"):
        imported(tmp_path / "other", tmp_path / "folder", columns=("url", "alt"))


@pytest.mark.parametrize("origin", ["img2dataset", "webdataset", "captions"])
def test_a_licence_is_kept_without_being_asked_for(origin: str, tmp_path: Path):
    """In the sample, and in the manifest of every row, whatever its status."""
    licences, folder = ["CC BY 4.0", "?", None, "CC0"], tmp_path / "folder"
    images = {number: image_bytes(number) for number in range(3)}  # that of row 3 is gone
    if origin == "img2dataset":
        write_shard(folder, 0, [row(0, n, images.get(n), "HTTP Error 404: x", LICENSE=licences[n]) for n in range(4)])
    elif origin == "webdataset":
        members = [one for n in images for one in with_json(f"{n}", n, "jpg", Licence=licences[n])]
        put_tars(str(folder), a=tar_of([*members, *with_json("3", 3, "jpg", Licence=licences[3])[1:]]))
    else:
        folder.mkdir()
        for number, image in images.items():
            (folder / f"{number}.jpg").write_bytes(image)
        lines = [{"file_name": f"{n}.jpg", "caption": "a", "n": n, "license": licences[n]} for n in range(4)]
        (tmp_path / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"captions": str(tmp_path / "list.jsonl"), "images": str(folder)} if origin == "captions" else {}
    settings = CollectSettings("imported", **(given or {origin: str(folder)}))
    collect(str(tmp_path / "root"), settings, lambda line: None)
    manifest = Catalog(open_store(str(tmp_path / "root")), "imported").manifest(IMAGES, "00000")
    assert [one == "ok" for one in manifest.table["status"].to_pylist()] == [True, True, True, False]
    assert manifest.table["license"].to_pylist() == licences
    assert [[*sample.extra.values()] for sample in samples_of(tmp_path / "root")] == [[one] for one in licences[:3]]


# --- plain tars -------------------------------------------------------------------------------------------------------

Members = list[tuple[str, bytes]]


def tar_of(members: Members, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1702599999.5
            tar.addfile(info, BytesIO(data))
    return out.getvalue()


def with_text(key: str, number: int) -> Members:
    """As cc3m-wds has it."""
    return [(f"{key}.jpg", image_bytes(number)), (f"{key}.txt", f"caption {number}: a café\n".encode())]


def with_json(key: str, number: int, extension: str = "png", **fields: object) -> Members:
    image = image_bytes(number) if extension.lower() in ("jpg", "jpeg") else encode(draw(seed=number), extension)
    fields = {"caption": f"caption {number}: a café", "url": f"http://example.test/{number}", "width": 96} | fields
    return [(f"{key}.{extension}", image), (f"{key}.json", json.dumps(fields).encode())]


def with_both(key: str, number: int) -> Members:
    """As img2dataset writes it; the members that follow are of no use here."""
    image, text = with_json(key, number, "webp", caption="another"), with_text(key, number)[1:]
    return [*image, *text, (f"{key}.cls", b"7"), (f"{key}.mask.png", b"?")]


def put_tars(root: str, **tars: bytes) -> str:
    store = open_store(root)
    for name, data in tars.items():
        store.put(f"{name}.tar", data)
    return root


def of_tars(root: Path | str, tars: str, **changes: object) -> list[tuple]:
    settings = CollectSettings("imported", webdataset=tars, **({"rows_per_shard": 2} | changes))
    collect(str(root), settings, lambda line: None)
    tables = Catalog(open_store(str(root)), "imported").columns(IMAGES, ["row", "status", "detail", "url"])
    return [line for table in tables for line in zip(*table.to_pydict().values(), strict=True)]


def samples_of(root: Path) -> list[Sample]:
    catalog = Catalog(open_store(str(root)), "imported")
    return [sample for shard in catalog.shards(IMAGES) for sample in catalog.read(IMAGES, shard)]


@pytest.mark.parametrize(
    ("members", "url"),
    [
        (with_text, "train/a.tar/000{}.jpg"),
        (with_json, "http://example.test/{}"),
        (functools.partial(with_json, extension="JPEG"), "http://example.test/{}"),
        (functools.partial(with_json, extension="gif"), "http://example.test/{}"),
        (functools.partial(with_json, similarity=float("nan")), "http://example.test/{}"),
        (with_both, "http://example.test/{}"),
    ],
)
def test_plain_tars_of_each_kind_are_imported(members: Callable[[str, int], Members], url: str, tmp_path: Path):
    root = str(tmp_path / "tars")
    first, second = ([one for n in numbers for one in members(f"000{n}", n)] for numbers in (range(3), (3, 0)))
    put_tars(root, **{"train/a": tar_of(first), "train/b": tar_of(second, tarfile.GNU_FORMAT)})
    rows = of_tars(tmp_path / "imported", root)
    last = "duplicate" if "{}" in url and url.startswith("http") else "ok"
    assert [status for _, status, *_ in rows] == ["ok"] * 4 + [last]
    found = samples_of(tmp_path / "imported")[:4]
    assert [one.caption for one in found] == [f"caption {n}: a café" for n in range(4)]
    assert [one.url for one in found[:3]] == [url.format(n) for n in range(3)]
    assert [one.key for one in found] == [sample_key(one.url, one.caption) for one in found]
    jpegs = [data for name, data in first if name.lower().endswith(("jpg", "jpeg"))]
    assert not jpegs or [one.image for one in found[:3]] == jpegs
    catalog = Catalog(open_store(str(tmp_path / "imported")), "imported")
    assert catalog.shards(IMAGES) == ["00000", "00001", "00002"]  # of two rows, one, and two: none spans two tars
    before = {shard: header.tar_sha256 for shard, header in catalog.headers(IMAGES).items()}
    catalog.store.delete("imported/images/00001.parquet")  # in the middle of a tar
    assert of_tars(tmp_path / "imported", root) == rows
    assert {shard: header.tar_sha256 for shard, header in catalog.headers(IMAGES).items()} == before


def test_tars_of_a_bucket_are_imported_as_those_of_a_folder(s3: str, tmp_path: Path):
    tars = {name: tar_of([one for n in range(3) for one in with_both(f"{name}{n}", n)]) for name in ("a", "b")}
    roots = [put_tars(root, **tars) for root in (str(tmp_path / "tars"), "s3://bucket/tars")]
    here, there = (of_tars(tmp_path / str(number), root) for number, root in enumerate(roots))
    assert there == here
    assert [status for _, status, *_ in here] == ["ok"] * 3 + ["duplicate"] * 3
    assert samples_of(tmp_path / "0") == samples_of(tmp_path / "1")


def test_a_member_without_its_pair_is_a_row_with_a_status(tmp_path: Path):
    members = [
        *with_text("good", 0),
        ("no-text.jpg", image_bytes(1)),
        ("no-image.txt", b"a caption"),
        ("latin.jpg", image_bytes(2)),
        ("latin.txt", "café".encode("latin-1")),
        ("long.jpg", image_bytes(3)),
        ("long.txt", b"a" * (2**20 + 1)),
        ("torn.jpg", image_bytes(4)[:500]),
        ("torn.txt", b"a caption"),
        ("several.jpg", image_bytes(5)),
        ("several.txt", b"\xef\xbb\xbfthe first\r\n"),
        ("several.jpg", image_bytes(6)),  # the same key again: another sample
        ("several.png", encode(draw(seed=7), "PNG")),  # a second image of one
        ("several.txt", b"the second"),
        ("dots.1.jpg", image_bytes(8)),
        ("scan.tiff", b"II*"),
        ("scan.txt", b"a caption"),
        ("link.txt", b"a caption"),
        ("README", b"of nobody"),
        ("._good.jpg", b"of an archiver"),
    ]
    rows = of_tars(tmp_path / "root", put_tars(str(tmp_path / "tars"), a=tar_of(members)))
    assert [(row, status) for row, status, *_ in rows] == list(
        enumerate(
            ["ok", "bad_caption", "missing_file", "bad_caption", "bad_caption", "truncated", "ok", "ok"]
            + ["missing_file"] * 3
        )
    )
    assert [detail for _, _, detail, _ in rows[8:]] == [
        "a.tar has no image dots; .1.jpg is none that is read",
        "a.tar has no image scan; .tiff is none that is read",
        "a.tar has no image link",
    ]
    assert [(one.caption, one.image) for one in samples_of(tmp_path / "root")[1:]] == [
        ("the first", image_bytes(5)), ("the second", image_bytes(6)),
    ]  # fmt: skip
    assert [detail for _, _, detail, _ in rows[1:4]] == [
        "a.tar has no caption for no-text.jpg",
        "a.tar has no image no-image",
        "latin.txt: 'utf-8' codec can't decode byte 0xe9 in position 3: unexpected end of data",
    ]


def test_fields_of_a_json_are_named_and_kept_on_request(tmp_path: Path):
    members = [one for n in range(3) for one in with_json(f"{n}", n, "jpg", alt=f"alt {n}", score=n / 2)]
    members += [("3.jpg", image_bytes(3)), ("3.json", b"{"), *with_json("4", 4, "jpg", alt=7)]
    tars = put_tars(str(tmp_path / "tars"), a=tar_of(members))
    rows = of_tars(tmp_path / "root", tars, columns=("url", "alt", "score", "width"))
    assert [status for _, status, *_ in rows] == ["ok"] * 3 + ["bad_caption"] * 2
    assert [detail.partition(":")[0] for _, _, detail, _ in rows[3:]] == ["3.json", "4.json"]
    assert rows[4][2] == "4.json: 'alt' is 7, not a text"
    assert [(one.caption, one.extra) for one in samples_of(tmp_path / "root")] == [
        (f"alt {n}", {"score": n / 2, "width": 96}) for n in range(3)
    ]
    with pytest.raises(ValueError, match="is read otherwise than when shard 00000"):
        of_tars(tmp_path / "root", tars)


@pytest.mark.parametrize(
    ("tars", "columns", "named"),
    [
        ({}, (), "tars holds no .tar"),
        ({"a": tar_of(with_text("a", 0))[:-9000], "b": tar_of(with_text("b", 1))}, (), r"1 of 2 .*a\.tar ends early"),
        ({"a": b""}, (), r"a\.tar ends early"),
        ({"a": gzip.compress(tar_of(with_text("a", 0)))}, (), r"a\.tar is packed"),
        ({"a": tar_of([("a.jpg", image_bytes(0))])}, (), "first samples have no .txt, and no .json"),
        ({"a": tar_of(with_json("a", 0, "jpg", text="b"))}, (), "caption, url, width, text; name the fields"),
        ({"a": tar_of(with_json("a", 0, "jpg"))}, ("url", "alt"), "no .json has a field 'alt'; there are caption, url"),
        ({"a": tar_of(with_json("a", 0, "jpg", x=[1]))}, ("url", "caption", "x"), r"a\.tar: a: 'x' is \[1\]"),
    ],
)
def test_tars_that_cannot_be_imported_are_refused_before(
    tars: dict[str, bytes], columns: tuple[str, ...], named: str, tmp_path: Path
):
    (tmp_path / "tars").mkdir()
    put_tars(str(tmp_path / "tars"), **tars)
    with pytest.raises(ValueError, match=named):
        of_tars(tmp_path / "root", str(tmp_path / "tars"), columns=columns)
    assert not Catalog(open_store(str(tmp_path / "root")), "imported").shards(IMAGES)


@pytest.mark.parametrize("member", [0, 4])
def test_a_tar_with_a_damaged_header_and_one_that_changed_are_refused(member: int, tmp_path: Path):
    data = bytearray(tar_of([one for n in range(4) for one in with_text(f"{n}", n)], tarfile.USTAR_FORMAT))
    tars = put_tars(str(tmp_path / "tars"), a=bytes(data))
    of_tars(tmp_path / "root", tars)
    with tarfile.open(fileobj=BytesIO(bytes(data))) as members:
        offset = members.getmembers()[member].offset
    data[offset + 100 : offset + 200] = b"x" * 100
    put_tars(tars, a=bytes(data))
    with pytest.raises(ValueError, match=r"a\.tar is (damaged|torn)"):
        of_tars(tmp_path / "root", tars)
    put_tars(tars, a=tar_of([one for n in range(1, 5) for one in with_text(f"{n}", n)]))
    with pytest.raises(ValueError, match="the list changed under committed shards: shard 00000"):
        of_tars(tmp_path / "root", tars)
