"""Caption lists in the formats and shapes in which they are published, and their rows in the dataset's folder."""

import csv
import dataclasses
import gzip
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import DATA, PROJECT

from storage.collect.lists import find_reading, read_captions, read_rows
from storage.collect.plan import CollectSettings, prepare_rows
from storage.collect.rows import PART_ROWS, CaptionRow, Place, Reading, Rows, write_rows
from storage.object_store import open_store
from storage.settings import parse

ROWS = [(f"http://example.test/{n}.jpg", f'caption {n}, "quoted": a café') for n in range(5)]
URLS, CAPTIONS = ([row[n] for row in ROWS] for n in (0, 1))


def tsv(*rows: tuple) -> bytes:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows).encode()


def csv_of(*rows: tuple) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows(rows)
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
        ("a.jsonl", lines(*({**one, "similarity": float("nan")} for one in OBJECTS)), "url caption", None),
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
        ("a.json", b'{"image_urls": ["u"], "captions": []}', "", "columns of equal length.*docs/images.md"),
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
        ("a.jsonl", lines(GOOD) + b"{\n[1]\n" + lines(GOOD), "", [1, 2], r"a\.jsonl:2: the line is truncated"),
        ("a.json", json.dumps([GOOD, 7]).encode(), "", [1], r"a\.json, row 2: 7 is not an object"),
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


@given(_TEXT, _TEXT, st.sampled_from([b"\n", b"\r\n", b""]))
def test_a_line_is_split_at_its_first_tab_and_nowhere_else(caption: str, url: str, end: bytes):
    """Further tabs, quotes, #, escapes and U+2028 are text; a byte order mark is one in the first line alone."""
    url = (url + "\tmore").rstrip("\r")
    with tempfile.NamedTemporaryFile(suffix=".tsv") as file:
        file.write(b"\xef\xbb\xbffirst\thttp://x/0\n" + f"{caption}\t{url}".encode() + end)
        file.flush()
        rows = list(read_captions(Path(file.name)))
    assert rows == [CaptionRow(0, "first", "http://x/0"), CaptionRow(1, caption, url)]


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
