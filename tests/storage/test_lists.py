"""Caption lists in the formats and shapes in which they are published, and their rows in the dataset's folder."""

import csv
import dataclasses
import gzip
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import foreign
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import DATA, PROJECT
from web import draw, encode

from storage.collect.lists import find_reading, read_captions, read_rows
from storage.collect.plan import CollectSettings, prepare_rows
from storage.collect.rows import PART_ROWS, CaptionRow, Place, Reading, Rows, write_rows
from storage.object_store import open_store
from storage.settings import parse

ROWS = [(f"http://example.test/{n}.jpg", f'caption {n}, "quoted": a café') for n in range(5)]
URLS, CAPTIONS = ([row[n] for row in ROWS] for n in (0, 1))


def tsv(*rows: tuple) -> bytes:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows).encode()


def csv_of(*rows: tuple, delimiter: str = ",") -> bytes:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(rows)
    return out.getvalue().encode()


def parquet(**table: list) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(table), out, row_group_size=2)
    return out.getvalue()


def lines(*rows: dict) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


LAION = {
    "SAMPLE_ID": [*range(5)], "URL": URLS, "TEXT": CAPTIONS, "HEIGHT": [64.0] * 5, 
    "WIDTH": [96.0, float("nan")] + [1.0] * 3,
    "LICENSE": ["?"] * 5, "NSFW": ["UNLIKELY", None, "UNSURE", "NSFW", "UNLIKELY"], "similarity": [0.25] * 5,
}  # fmt: skip
SBU = {"image_urls": URLS, "user_ids": ["47889917@N08"] * 5, "captions": CAPTIONS}
OBJECTS = [{"url": url, "caption": caption} for url, caption in ROWS]
SWAPPED = [(caption, url) for url, caption in ROWS]


NUMBERED = [(n, *row) for n, row in enumerate(ROWS)]
NOT_FINITE = [float("nan"), float("inf"), -float("inf"), 1e999, None]
COCO = {
    "info": {},
    "licenses": [{"id": 3, "name": "CC", "url": "http://license.test"}],
    "images": [{"id": n, "coco_url": url, "file_name": f"{n}.jpg", "license": 3} for n, url, _ in reversed(NUMBERED)],
    "annotations": [{"id": 9 - n, "image_id": n, "caption": caption} for n, _, caption in NUMBERED],
}
EXCEL = csv_of(("url", "caption"), *ROWS, delimiter=";")
PIPES = b"caption| n| url\n" + b"".join(f"{text} | 1| {url}\n".encode() for url, text in ROWS)
INDENTED = json.dumps(OBJECTS, indent=1, ensure_ascii=False).encode()
THIRD = csv_of(("url", "caption", "caption"), *((url, n, text) for n, url, text in NUMBERED))
ENCODED = parquet(url=URLS, caption=pa.array(CAPTIONS).dictionary_encode(), license=[[1]] * 5)


@pytest.mark.parametrize(
    ("name", "data", "columns", "extra"),
    [  # the columns that are named are found, too
        ("Train_GCC-training.tsv", tsv(*SWAPPED), "2 1", None),
        ("gzip-without-suffix", gzip.compress(tsv(*ROWS), mtime=0), "1 2", None),
        ("mark.tsv", b"\xef\xbb\xbf" + tsv(("URL", "TEXT"), *ROWS), "URL TEXT", None),
        ("list.csv", csv_of(("id", "image_url", "caption"), *((7, *row) for row in ROWS)), "image_url caption", None),
        ("list.jsonl.gz", gzip.compress(lines(*OBJECTS), mtime=0), "url caption", None),
        ("parquet-without-suffix", parquet(**LAION), "URL TEXT LICENSE", {"LICENSE": "?"}),
        ("a.parquet", ENCODED, "url caption", None),
        ("a.jsonl", lines(*({**one, "n": n} for one, n in zip(OBJECTS, NOT_FINITE, strict=True))), "url caption", None),
        ("a.json", json.dumps([{**one, "n": NOT_FINITE} for one in OBJECTS]).encode(), "url caption", None),
        *(  # blank lines at the end
            (f"a.{suffix}", data + end, columns, None)
            for suffix, data, columns in (
                ("tsv", tsv(*ROWS), "1 2"),
                ("csv", csv_of(("url", "text"), *ROWS), "url text"),
                ("jsonl", lines(*OBJECTS), "url caption"),
                ("json", json.dumps(OBJECTS).encode(), "url caption"),
            )
            for end in (b"\n", b"\r\n \n\n", b"\n\t\n")
        ),
        *(  # what Windows writes
            (f"{encoding}-{name}", data.decode().encode(encoding), columns, None)
            for name, data, columns in (
                ("a.tsv", tsv(*SWAPPED), "2 1"),
                ("a.csv", EXCEL, "url caption"),
                ("a.jsonl", lines(*OBJECTS), "url caption"),
                ("a.json", INDENTED, "url caption"),
            )
            for encoding in ("utf-8-sig", "utf-16", "utf-16-be", "utf-32")
        ),
        ("gzip.tsv.gz", gzip.compress(tsv(*SWAPPED).decode().encode("utf-16"), mtime=0), "2 1", None),
        ("semicolons.txt", EXCEL, "url caption", None),
        ("no-header.csv", EXCEL.split(b"\n", 1)[1], "1 2", None),
        ("commas.txt", csv_of(("image_url", "text"), *ROWS), "image_url text", None),
        ("tabs.csv", tsv(("caption", "url"), *SWAPPED), "url caption", None),
        ("pipes.csv", PIPES, "url caption", None),
        ("captions_val2014.json", json.dumps(COCO).encode(), "url caption license", {"license": "http://license.test"}),
        ("redcaps.json", json.dumps({"info": {}, "annotations": OBJECTS}).encode(), "url caption", None),
        ("by-url.json", json.dumps(dict(ROWS)).encode(), "url caption", None),
        ("sbu-captions-all.json", json.dumps(SBU).encode(), "image_urls captions", None),
        ("rows.json", json.dumps(OBJECTS).encode(), "url caption", None),
        ("named.parquet", parquet(**LAION), "URL TEXT NSFW WIDTH", {"NSFW": None, "WIDTH": None}),
        ("named.tsv", tsv(*NUMBERED), "2 3 1", {"1": "1"}),
        ("named.csv", THIRD, "url 3", None),
        ("named.json", json.dumps(SBU).encode(), "image_urls captions user_ids", {"user_ids": "47889917@N08"}),
    ],
)
def test_a_list_of_each_shape_has_the_same_rows_of_its_columns(name, data, columns, extra, tmp_path: Path):
    file = tmp_path / name
    file.write_bytes(data)
    reading = find_reading(file, (*columns.split(),) if "named" in name else ())
    assert reading.columns == (*columns.split(),)
    rows = list(read_rows(file, reading))
    assert [(row.row, row.url, row.caption, row.status) for row in rows] == [(*row, "") for row in NUMBERED]
    assert rows[1].extra == extra


BROKEN = bytearray(parquet(url=URLS * 99, caption=CAPTIONS * 99))
BROKEN[20:60] = bytes(40)


@pytest.mark.parametrize(
    ("name", "data", "columns", "named"),
    [
        ("a.parquet", parquet(url=URLS, text=URLS, caption=URLS), "", "columns url, text, caption, more than one"),
        ("a.parquet", parquet(picture=URLS, words=CAPTIONS), "", "picture, words, none with a known name"),
        ("a.parquet", parquet(url=URLS, caption=CAPTIONS), "url,title", "no column 'title'; it has url, caption"),
        ("a.parquet", BROKEN, "", r"a\.parquet cannot be read"),
        ("a.json", b"[]", "", r"a\.json has no readable row"),
        ("a.json", b'{"image_urls": ["u"], "captions": []}', "", "no table.*docs/images.md"),
        ("a.json", lines(*OBJECTS), "", "a.json is .*not JSON: Extra data.* rename it to .jsonl"),
        ("a.json", b'{"version": 1, "data": {"a": []}}', "", "fields version, data, but no table"),
        ("a.json", b'{"11": "a dog", "12": "a cat"}', "", "fields 11, 12, but no table.* maps ID"),
        ("a.json", b'{"11": ["a dog"], "12": ["a cat"]}', "", "fields 11, 12, but no table.* maps ID"),
        (
            "a.json",
            b'{"images": [{"id": 1}], "annotations": [{"image_id": 1, "bbox": []}]}',
            "",
            "columns .*bbox.* none",
        ),
        ("a.csv", b"a#b\nc#d\n", "", "the columns 1, none .* or to names in its first line: .'a#b'.*lists the formats"),
        ("a.parquet", parquet(jpg=[b""], txt=["a"]), "", "jpg, txt, none with .* code to unpack images from Parquet"),
        ("a.parquet", foreign.LFS, "", r"a\.parquet is a Git LFS pointer"),
        ("a.tsv.gz", gzip.compress(foreign.tar_of("a.tsv"), mtime=0), "", "is packed with tar"),
        ("a.tsv", tsv(*[("a", "b", "c", "d")] * 3), "", "1, 2, 3, 4, none .* or to names in its first line: .'a', 'b'"),
        ("a.tsv", tsv(("url", "caption", "caption"), ("a", "b", "c")), "url,caption", "'caption'; it has url, 2, 3"),
        ("a.tsv.gz", gzip.compress(tsv(*ROWS) * 9, mtime=0)[:-20], "", r"a\.tsv\.gz cannot be read"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_by_file(name, data, columns, named, tmp_path: Path):
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(ValueError, match=named):
        list(read_rows(file, find_reading(file, tuple(filter(None, columns.split(","))))))


GOOD = OBJECTS[0]
HUB = parquet(image=[{"bytes": encode(draw()), "path": "a.png"}], caption=[["a dog", "a cat"]])


@pytest.mark.parametrize(
    ("name", "data", "columns", "bad", "named"),
    [
        ("a.tsv", b"a\thttp://x/0\nno tab\nb\thttp://x/1\n", "", [1], r"a\.tsv:2: 1 columns, but 2 .*'no tab'.*remove"),
        ("a.tsv", b"a\thttp://x/0\ncaf\xe9\thttp://x/1\n", "", [1], r"a\.tsv:2: not UTF-8; convert"),
        ("a.csv", b"url,caption\nu,c\nu,c,x\n", "", [1], r"a\.csv, row 3: 3 columns, but 2 are expected"),
        ("a.csv", b"url,caption\nu,c\ru,c\nu,c\n", "", [0], r"a\.csv, row 2: .*correct the row's quotes"),
        ("a.csv", b'url,caption\nu,c\nu,"c\nu,c\n', "", [1], r"a\.csv, row 3: unexpected end of data"),
        ("a.jsonl", lines(GOOD, {"url": "u", "caption": 7}, GOOD), "", [1], r"a\.jsonl:2: 'caption' is 7, not a str"),
        ("a.jsonl", lines(GOOD, {**GOOD, "x": [1]}), "url,caption,x", [1], r"a\.jsonl:2: 'x' is \[1\]"),
        ("a.tsv", b"a\thttp://x/0\n\nb\thttp://x/1\n", "", [1], r"a\.tsv:2: 1 columns, but 2 "),
        (
            "a.jsonl",
            lines(*[GOOD] * 100, {**GOOD, "caption": ["a", "b"]}),
            "",
            [100],
            "a.jsonl:101: .* several captions",
        ),
        (
            "a.jsonl",
            lines({**GOOD, "caption": "['a' 'b']"}),
            "",
            [0],
            "a.jsonl, caption 1: .* write it as JSON",
        ),
        (
            "a.jsonl",
            lines(GOOD, {**GOOD, "caption": ["a", 7]}),
            "",
            [1],
            "a.jsonl, caption 2: 'caption' is 7, not a str",
        ),
        ("a.json", json.dumps(COCO | {"images": COCO["images"][1:]}).encode(), "", [4], "a.json, row 5: .*image_id"),
        (
            "a.json",
            json.dumps(COCO | {"annotations": [*COCO["annotations"], 7]}).encode(),
            "",
            [5],
            "a.json, row 6: 7 ",
        ),
        ("a.jsonl", lines(GOOD) + b"{\n[1]\n" + lines(GOOD), "", [1, 2], r"a\.jsonl:2: the line is truncated"),
        ("a.json", json.dumps([GOOD, 7]).encode(), "", [1], r"a\.json, row 2: 7 is not an object"),
        ("a.parquet", HUB, "image,caption", [0], "a.parquet, caption 1: .* code to unpack images"),
        ("a.parquet", parquet(url=URLS, n=[1] * 5), "url,n", [*range(5)], r"a\.parquet, row 1: 'n' is 1, not a str"),
    ],
)
def test_a_row_that_cannot_be_read_is_one_with_a_status(name, data, columns, bad, named, tmp_path: Path):
    file = tmp_path / name
    file.write_bytes(data)
    rows = list(read_rows(file, find_reading(file, tuple(filter(None, columns.split(","))))))
    assert [row.row for row in rows] == [*range(len(rows))]
    assert [row.row for row in rows if row.status == "bad_row"] == bad
    assert re.match(named, rows[bad[0]].detail)
    assert all(row.url for row in rows if row.row not in bad)
    if name != "a.parquet" and not columns:
        with pytest.raises(ValueError, match=named):
            list(read_captions(file))


def test_the_conformance_list_gives_the_expected_rows():
    folder = DATA / "conceptual_captions"
    expected = json.loads((folder / "expected_rows.json").read_text())["rows"]
    assert list(read_captions(folder / "Train_GCC-synthetic.tsv")) == [CaptionRow(**row) for row in expected]


_TEXT = st.text(st.characters(exclude_characters="\t\n", exclude_categories=["Cs"]), max_size=20)


@given(st.lists(_TEXT, min_size=1, max_size=3), _TEXT, st.sampled_from([b"\n", b"\r\n", b""]), st.booleans())
def test_a_line_of_two_columns_is_split_beside_its_url_and_nowhere_else(parts, path: str, end: bytes, is_last: bool):
    """Further tabs, quotes, #, escapes and U+2028 are text; a byte order mark is one in the first line alone."""
    caption, url = "\t".join(parts).rstrip("\r"), ("http://x/" + path).rstrip("\r")
    first = "first\thttp://x/0" if is_last else "http://x/0\tfirst"
    with tempfile.NamedTemporaryFile(suffix=".tsv") as file:
        line = f"{caption}\t{url}" if is_last else f"{url}\t{caption}"
        file.write(b"\xef\xbb\xbf" + f"{first}\n{first}\n{line}".encode() + end)
        file.flush()
        *_, row = read_captions(Path(file.name))
    assert row == CaptionRow(2, caption, url)


KARPATHY = [{"filename": "a.jpg", "sentences": [{"raw": "one", "tokens": []}, {"raw": "two"}], "split": "val"}]


@pytest.mark.parametrize(
    ("name", "data", "columns"),
    [
        ("results.token", b"a.jpg#0\tone\na.jpg#1\ttwo\n", "1 2"),
        ("names.tsv", b"one\ta.jpg\ntwo\ta.jpg\n", "2 1"),
        (
            "coco_karpathy_val.json",
            b'[{"image": "a.jpg", "caption": ["one", "two"]}]',
            "image caption",
        ),
        ("dataset_coco.json", json.dumps({"images": KARPATHY, "dataset": "coco"}).encode(), "filename sentences"),
        ("by-name.json", b'{"a.jpg": ["one", "two"]}', "image caption"),
        ("hub.csv", csv_of(("filename", "caption"), ("a.jpg", '["one", "two"]')), "filename caption"),
        ("hub.parquet", parquet(image=["a.jpg"], sentences=[["one", "two"]]), "image sentences"),
        ("kaggle.csv", b"image_name| comment_number| comment\na.jpg| 0| one\na.jpg| 1| two\n", "image_name comment"),
        ("captions.txt", csv_of(("image", "caption"), ("a.jpg", "one"), ("a.jpg", "two")), "image caption"),
    ],
)
def test_a_list_of_file_names_has_a_row_for_each_caption(name: str, data: bytes, columns: str, tmp_path: Path):
    file = tmp_path / name
    file.write_bytes(data)
    reading = find_reading(file, of_folder=True)
    assert reading.columns == (*columns.split(),)
    assert [*read_rows(file, reading)] == [CaptionRow(0, "one", "a.jpg"), CaptionRow(1, "two", "a.jpg")]
    location = "results.token:2" if name == "results.token" else f"{name}, caption 2"
    assert not reading.several or reading.location(name, 1) == location


def test_the_command_of_an_error_about_ids_makes_a_list_that_is_read(tmp_path: Path):
    file = tmp_path / "ids.json"
    file.write_text('{"11": ["a dog", "a café"], "12": ["a cat"]}')
    with pytest.raises(ValueError, match="no table") as refused:
        find_reading(file, of_folder=True)
    _, *code = shlex.split(str(refused.value).partition("run: ")[2])
    subprocess.run([sys.executable, *code], cwd=tmp_path, check=True)
    rows = read_rows(tmp_path / "list.json", find_reading(tmp_path / "list.json", of_folder=True))
    assert [(row.url, row.caption) for row in rows] == [("11.jpg", "a dog"), ("11.jpg", "a café"), ("12.jpg", "a cat")]


def test_rows_are_written_once_and_read_back_by_number(tmp_path: Path):
    """Over the border of two parts; a list that grew shares the first of them."""
    store, count = open_store(str(tmp_path)), PART_ROWS + 50
    extras = {"similarity": 0.125, "license": None}, None
    texts = [(n, f"caption {n % (PART_ROWS + 20)}", "http://x/\u30c4") for n in range(count)]
    rows = [CaptionRow(n, *text, extras[n % 2], place=Place("a.tar", n, 9) if n % 3 else None) for n, *text in texts]
    for n in range(7, count, 1000):
        rows[n] = dataclasses.replace(rows[n], status="bad_caption", detail="why")
    reading = Reading("csv", ("url", "caption"), header=True)
    written = write_rows(store, "captions", "a" * 16, reading, iter(rows))
    for found in (written, Rows(store, "captions", "a" * 16)):
        assert (found.reading, found.count, found.unreadable) == (reading, count, [*range(7, count, 1000)])
        for start, stop in ((0, 5), (PART_ROWS - 5, PART_ROWS + 5), (count - 1, count), (0, count), (7, 7)):
            assert found.read(start, stop) == rows[start:stop]
        firsts = {n: n - PART_ROWS - 20 for n in range(PART_ROWS + 20, count) if n - PART_ROWS - 20 != 7}
        assert found.duplicates(0, count) == firsts
        assert found.duplicates(PART_ROWS + 21, PART_ROWS + 23) == {PART_ROWS + 21: 1, PART_ROWS + 22: 2}
    names = {info.path for info in store.list("captions/images/rows/")}
    grown = write_rows(store, "captions", "b" * 16, reading, iter([*rows, CaptionRow(count, "new", "http://x/new")]))
    assert grown.digest(0, count) == written.digest(0, count) != grown.digest(1, count)
    assert len({info.path for info in store.list("captions/images/rows/")} - names) == 2  # the last part and an index


@pytest.mark.parametrize("which", ["part", "index"])
def test_rows_that_are_damaged_or_gone_are_named(which: str, tmp_path: Path):
    store = open_store(str(tmp_path))
    write_rows(store, "captions", "a" * 16, Reading("tsv"), iter([CaptionRow(0, "a", "http://x")]))
    (path,) = (one.path for one in store.list("captions/images/rows/") if ("part-" in one.path) == (which == "part"))
    data = store.get(path)
    store.put(path, data[:300] + bytes([data[300] ^ 1]) + data[301:])
    for _ in range(2 if which == "part" else 1):
        with pytest.raises(ValueError, match=rf"{re.escape(path)} is damaged.*delete .*aaaa\.parquet"):
            Rows(store, "captions", "a" * 16).read(0, 1)
        store.delete(path)


def test_a_list_is_not_parsed_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, store = tmp_path / "a.csv", open_store(str(tmp_path / "root"))
    file.write_bytes(csv_of(("url", "caption", "n"), *((*row, 1) for row in ROWS)))
    parsed = []
    monkeypatch.setattr("storage.collect.plan.read_rows", lambda *of: parsed.append(of) or read_rows(*of))

    def rows_of(*columns: str) -> list[CaptionRow]:
        collected = CollectSettings("captions", captions=str(file), columns=columns)
        return prepare_rows(store, collected).read(0, 5)

    assert rows_of() == rows_of() == list(read_captions(file))
    assert len(parsed) == 1
    assert rows_of("url", "caption", "n")[0].extra == {"n": "1"}  # otherwise read, so read again
    file.write_bytes(file.read_bytes() + b"http://x,a,1\n")
    rows_of()
    assert len(parsed) == 3


@pytest.mark.slow
def test_a_large_list_is_read_in_little_memory(tmp_path: Path):
    file, rows = tmp_path / "large.parquet", 500_000
    urls = pa.array([f"http://example.test/some/folder/with/a/long/name/{n:09}.jpg" for n in range(10_000)])
    texts = pa.array([f"a caption of the usual length, which differs from row to row: {n}" for n in range(10_000)])
    with pq.ParquetWriter(file, pa.schema({"URL": pa.string(), "TEXT": pa.string()})) as writer:
        batch = pa.table({"URL": pa.concat_arrays([urls] * 50), "TEXT": pa.concat_arrays([texts] * 50)})
        for _ in range(rows // len(batch)):
            writer.write_table(batch, row_group_size=len(batch))
    code = (
        "import re; from pathlib import Path; from storage.collect.plan import CollectSettings, prepare_rows\n"
        "from storage.object_store import open_store\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        f"store, settings = open_store({str(tmp_path / 'root')!r}), CollectSettings('x', captions={str(file)!r})\n"
        "before = peak(); rows = prepare_rows(store, settings)\n"
        "print(rows.count, peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    found, kilobytes = map(int, done.stdout.split())
    assert found == rows
    assert kilobytes < 150_000  # as rows it has about 250 MB


def test_the_commands_of_the_page_are_settings():
    page = (PROJECT / "docs" / "images.md").read_text()
    for command in re.findall(r"^    vlbert collect \S+ (\S+(?:.*\\\n)*.*)$", page, re.MULTILINE):
        assert parse(CollectSettings, command.replace("\\\n", " ").split()).origin


def test_the_code_of_the_page_makes_a_list_from_parquet_with_images(tmp_path: Path):
    page = (PROJECT / "docs" / "images.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.parquet").write_bytes(HUB)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    file = tmp_path / "photos.jsonl"
    rows = [*read_rows(file, find_reading(file, of_folder=True))]
    assert [(row.url, row.caption) for row in rows] == [("0-0.jpg", "a dog"), ("0-0.jpg", "a cat")]
    assert (tmp_path / "photos" / "0-0.jpg").read_bytes() == encode(draw())
