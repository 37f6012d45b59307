"""Caption lists in the formats and shapes in which they are published: written here, with made-up rows."""

import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import PROJECT
from web import Web, draw, encode, send

from storage.catalog import Catalog
from storage.collect.fetch import DownloadSettings
from storage.collect.lists import ListFile, find_reading, license_of, parse_rows, read_captions
from storage.collect.plan import CollectSettings, plan
from storage.collect.run import collect
from storage.object_store import open_store
from storage.sample import sample_key
from storage.settings import from_assignments

ROWS = [(f"http://example.test/{n}.jpg", f'caption {n}, "quoted": a café') for n in range(5)]
URLS, CAPTIONS = ([row[n] for row in ROWS] for n in (0, 1))


def columns(**more: list) -> dict[str, list]:
    return {"url": URLS, "caption": CAPTIONS} | more


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
COYO = {
    "id": [841814333321 + n for n in range(5)], "url": URLS, "text": CAPTIONS, "width": [96] * 5, "height": [64] * 5,
    "image_phash": ["c9b6a7d8469c1959"] * 5, "clip_similarity_vitb32": [0.43] * 5,
}  # fmt: skip
SBU = {"image_urls": URLS, "user_ids": ["47889917@N08"] * 5, "captions": CAPTIONS}
OBJECTS = [{"url": url, "caption": caption} for url, caption in ROWS]
SWAPPED = [(caption, url) for url, caption in ROWS]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("Train_GCC-training.tsv", tsv(*SWAPPED), "URL in column 2, caption in column 1 (as Conceptual Captions)"),
        ("no-suffix", tsv(*SWAPPED), "TSV without a header, URL in column 2"),
        ("cc12m.tsv", tsv(*ROWS), "URL in column 1, caption in column 2 (as CC12M)"),
        ("cc12m.tsv.gz", gzip.compress(tsv(*ROWS)), "TSV without a header, URL in column 1"),
        ("named.tsv", tsv(("caption", "url"), *SWAPPED), "TSV with a header, URL in column url"),
        ("mark.tsv", b"\xef\xbb\xbf" + tsv(("URL", "TEXT"), *ROWS), "URL in column URL, caption in column TEXT"),
        ("list.csv", csv_of(*ROWS), "CSV without a header, URL in column 1"),
        ("list.csv", csv_of(("id", "image_url", "caption"), *((7, *row) for row in ROWS)), "URL in column image_url"),
        ("list.csv.gz", gzip.compress(csv_of(("url", "caption"), *ROWS)), "CSV with a header"),
        ("captions.txt", csv_of(("url", "caption"), *ROWS), "CSV with a header"),
        ("list.jsonl", lines(*OBJECTS), "JSON lines, URL in column url"),
        ("list.jsonl.gz", gzip.compress(lines(*OBJECTS)), "JSON lines, URL in column url"),
        (
            "part-0.parquet",
            parquet(**LAION),
            "Parquet, URL in column URL, caption in column TEXT, LICENSE kept (as LAION)",
        ),
        ("part-0.parquet", parquet(**COYO), "URL in column url, caption in column text (as COYO-700M)"),
        ("hub.parquet", parquet(image_url=URLS, user_id=CAPTIONS, caption=CAPTIONS), "(as SBU)"),
        ("hub.parquet", parquet(image_url=URLS, caption=CAPTIONS), "(as Conceptual Captions or CC12M)"),
        (
            "a.parquet",
            parquet(url=pa.array(URLS, pa.string_view()), caption=pa.array(CAPTIONS, pa.large_string())),
            "url",
        ),
        ("a.parquet", parquet(url=URLS, caption=pa.array(CAPTIONS).dictionary_encode(), license=[[1]] * 5), "url"),
        ("a.jsonl", lines(*({**one, "license": {"id": 1}} for one in OBJECTS)), "JSON lines, URL in column url"),
        ("a.jsonl", lines(*({**one, "similarity": float("nan")} for one in OBJECTS)), "JSON lines, URL in column url"),
        (
            "sbu-captions-all.json",
            json.dumps(SBU).encode(),
            "URL in column image_urls, caption in column captions (as SBU)",
        ),
        ("rows.json", json.dumps(OBJECTS).encode(), "JSON, URL in column url"),
    ],
)
def test_a_list_of_each_shape_is_recognised_and_has_the_same_rows(name: str, data: bytes, said: str, tmp_path: Path):
    file = tmp_path / name
    file.write_bytes(data)
    assert said in str(find_reading(file))
    rows = list(read_captions(file))
    extra = {"LICENSE": "?"} if "LICENSE kept" in said else None
    assert [(row.row, row.url, row.caption, row.extra) for row in rows] == [
        (n, url, caption, extra) for n, (url, caption) in enumerate(ROWS)
    ]
    assert list(read_captions(file, 1, 3)) == rows[1:3]


@pytest.mark.parametrize(
    ("name", "data", "columns", "extra"),
    [
        ("a.parquet", parquet(**LAION), "URL,TEXT,NSFW,WIDTH", {"NSFW": None, "WIDTH": None}),
        ("a.parquet", parquet(**COYO), "2,3,id,width", {"id": 841814333322, "width": 96}),
        ("a.tsv", tsv(*((n, *row) for n, row in enumerate(ROWS))), "2,3,1", {"1": "1"}),
        ("a.csv", csv_of(("n", "u", "c"), *((n, *row) for n, row in enumerate(ROWS))), "u,c,n", {"n": "1"}),
        ("a.csv", csv_of(("n", "url", "caption"), *((n, *row) for n, row in enumerate(ROWS))), "2,3,1", {"1": "1"}),
        ("a.jsonl", lines(*({**one, "n": n} for n, one in enumerate(OBJECTS))), "url,caption,n", {"n": 1}),
        ("a.json", json.dumps(SBU).encode(), "image_urls,captions,user_ids", {"user_ids": "47889917@N08"}),
        ("a.tsv", tsv(*SWAPPED), "2,1", None),
    ],
)  # fmt: skip
def test_columns_are_named_or_counted_and_further_ones_are_kept(
    name: str, data: bytes, columns: str, extra: dict | None, tmp_path: Path
):
    file = tmp_path / name
    file.write_bytes(data)
    reading = find_reading(file, tuple(columns.split(",")))
    rows = list(read_captions(file, reading=reading))
    assert [(row.url, row.caption) for row in rows] == ROWS
    assert rows[1].extra == extra


FOUR = [("a", "b", "c", "d")]
BROKEN = bytearray(parquet(url=URLS * 99, caption=CAPTIONS * 99))
BROKEN[20:60] = bytes(40)


@pytest.mark.parametrize(
    ("name", "data", "columns", "named"),
    [
        ("a.parquet", parquet(**columns(text=CAPTIONS)), "", r"columns url, caption, text, several .*columns=url,"),
        ("a.parquet", parquet(picture=URLS, words=CAPTIONS), "", "picture, words, none that is known"),
        ("a.parquet", parquet(**columns()), "url,title", "no column 'title'; it has url, caption"),
        ("a.parquet", parquet(**columns()), "url,3", "no column '3'"),
        ("a.parquet", parquet(**columns(n=[1] * 5)), "url,n", "column n holds int64, not text"),
        ("a.parquet", parquet(**columns(n=[[1]] * 5)), "url,caption,n", "column n holds list"),
        ("a.parquet", parquet(**columns())[:-9], "", "a.parquet cannot be read"),
        ("a.parquet", b"<html>", "", "a.parquet is not a Parquet file"),
        ("a.parquet", parquet(url=URLS, URL=URLS, caption=CAPTIONS), "", "url, URL, caption, several that may be"),
        ("a.parquet", parquet(**columns(license=[[1]] * 5)), "url,caption,license", "column license holds list"),
        ("a.parquet", BROKEN, "", r"a\.parquet cannot be read"),
        ("a.json", b"[]", "", r"a\.json has no columns"),
        ("a.csv", b"url,caption\ru,c\r", "", r"a\.csv, row 1: a carriage return"),
        ("a.csv", b"url,caption\nu,c\n\nu,c\n", "", r"a\.csv, row 2: 0 columns, and 2 are expected; every row"),
        ("a.csv", b'url,caption\nu,"c" d\n', "", r"a\.csv, row 1: .*write quotes"),
        ("a.csv", "url,caption\nu,c\n".encode("utf-16"), "", r"a\.csv, row 1: not UTF-8 .*convert"),
        (
            "a.jsonl",
            lines(OBJECTS[0], {**OBJECTS[0], "license": 1}, *[OBJECTS[0]] * 99, {**OBJECTS[0], "license": {}}),
            "",
            r"a\.jsonl:102: 'license' is {}",
        ),
        ("a.tsv", tsv(*FOUR * 3), "", "4 columns and no header .* columns=2,1"),
        ("a.tsv", tsv(("url", "caption", "caption"), *FOUR), "url,caption", "2 columns 'caption'"),
        ("a.tsv", tsv(("url", "caption", "n"), *FOUR), "", r"a\.tsv:2: 4 columns, and 3 are expected"),
        ("a.csv", csv_of(("url", "caption"), ("u", "c"), ("u", "c", "x")), "", r"a\.csv, row 2: 3 columns, and 2"),
        ("a.csv", b'url,caption\nu,"c\nu,c\n', "", r"a\.csv, row 1: unexpected end of data"),
        ("a.csv", b"one\ntwo\n", "", "1 columns and no header"),
        ("a.jsonl", lines({"url": "u", "caption": 7}), "", r"a\.jsonl:1: 'caption' is 7, not a text"),
        ("a.jsonl", lines({"url": "u", "caption": "c", "x": [1]}), "url,caption,x", r"a\.jsonl:1: 'x' is \[1\]"),
        ("a.jsonl", lines(*OBJECTS) + b"{", "", r"a\.jsonl:6 is not JSON"),
        ("a.json", b'{"image_urls": ["u"], "captions": []}', "", "differ in length"),
        ("a.json", b'[{"url": "u"}, 7]', "", "row 2: 7 is not an object"),
        ("a.tsv.gz", gzip.compress(tsv(*ROWS) * 9)[:-20], "", r"a\.tsv\.gz is damaged or ends early"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_by_file_and_row(
    name: str, data: bytes, columns: str, named: str, tmp_path: Path
):
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(ValueError, match=named):
        list(read_captions(file, reading=find_reading(file, tuple(filter(None, columns.split(","))))))


_CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@settings(max_examples=40)
@given(st.lists(st.tuples(_CELL, _CELL, _CELL), max_size=6))
def test_records_of_a_csv_join_to_the_file_and_are_read_from_any_offset(rows: list[tuple]):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "list.csv")
        file.write_bytes(csv_of(("url", "caption", "n"), *rows))
        reading = find_reading(file)
        with ListFile(file, reading) as opened:
            records = list(opened.records())
            assert b"".join(records) == file.read_bytes()[opened.first :]
            at = opened.first + len(b"".join(records[:2]))
            later = list(parse_rows(opened.records(2, at), file, reading, 2))
        assert [(row.url, row.caption) for row in read_captions(file)] == [row[:2] for row in rows]
        assert [row.url for row in later] == [row[0] for row in rows[2:]]


# --- collected --------------------------------------------------------------------------------------------------------


def served(web: Web, file: Path, write: Callable, rows: int = 7, **changes: object) -> CollectSettings:
    """A list of these many rows, of which the last one is gone."""
    urls = [web.put(f"/listed/{n}.jpg", send(encode(draw(seed=n)))) for n in range(rows - 1)] + [web.url("/gone.jpg")]
    file.write_bytes(write(urls, [f"caption {n}" for n in range(rows)]))
    download = DownloadSettings(deadline=3, retries=0, second_pass=0, allowed_hosts=(web.host,))
    return CollectSettings("captions", **({"captions": str(file), "download": download, "rows_per_shard": 3} | changes))


def laion(urls: list[str], captions: list[str]) -> bytes:
    return parquet(URL=urls, TEXT=captions, NSFW=["UNLIKELY"] * len(urls), similarity=[n / 8 for n in range(len(urls))])


def zipped(urls: list[str], captions: list[str]) -> bytes:
    return gzip.compress(
        csv_of(("url", "caption", "similarity"), *zip(urls, captions, itertools.count(), strict=False))
    )


@pytest.mark.parametrize(
    ("name", "write", "columns", "extra"),
    [
        ("a.parquet", laion, ("URL", "TEXT", "similarity", "NSFW"), {"similarity": 0.5, "NSFW": "UNLIKELY"}),
        ("a.csv.gz", zipped, (), None),
    ],
)
def test_a_list_is_collected_and_collected_again_with_its_reading_in_the_manifest(
    name: str, write: Callable, columns: tuple, extra: dict | None, web: Web, tmp_path: Path
):
    said, root = [], str(tmp_path / "root")
    collected = served(web, tmp_path / name, write, columns=columns)
    assert collect(root, collected, said.append).counts == {"ok": 6, "http_404": 1}
    assert any(f"is read as {find_reading(tmp_path / name, columns)}" in line for line in said)
    catalog = Catalog(open_store(root), "captions")
    assert [header.meta["source"]["reading"] for header in catalog.headers("images").values()] == 3 * [
        {"form": name.split(".")[1], "columns": list(columns) or ["url", "caption"], "header": name == "a.csv.gz"}
    ]
    samples = [sample for shard in catalog.shards("images") for sample in catalog.read("images", shard)]
    assert [sample.key for sample in samples] == [
        sample_key(web.url(f"/listed/{n}.jpg"), f"caption {n}") for n in range(6)
    ]
    assert samples[4].extra == extra
    catalog.store.delete("captions/images/00001.parquet")  # goes on in the middle of the file
    assert collect(root, collected, said.append).new_shards == 1
    assert list(catalog.read("images", "00001"))[1].extra == extra
    grown = served(web, tmp_path / name, write, 9, columns=columns)
    with pytest.raises(ValueError, match="the list changed under committed shards"):  # its row 6 was /gone.jpg
        collect(root, grown, said.append)


def test_a_list_that_is_read_in_another_way_than_before_is_an_error(web: Web, tmp_path: Path):
    def write(urls: list[str], captions: list[str]) -> bytes:
        return tsv(("url", "caption", "alt"), *zip(urls, captions, captions, strict=True))

    collected = served(web, tmp_path / "list.tsv", write)
    collect(str(tmp_path / "root"), collected, lambda line: None)
    for columns in (("url", "alt"), ("url", "caption", "alt")):
        with pytest.raises(ValueError, match="is read otherwise than when shard 00000"):
            collect(str(tmp_path / "root"), served(web, tmp_path / "list.tsv", write, columns=columns), print)


@pytest.mark.slow
def test_a_large_parquet_is_read_in_little_memory(tmp_path: Path):
    file, rows = tmp_path / "large.parquet", 1_500_000
    urls = pa.array([f"http://example.test/some/folder/with/a/long/name/{n:09}.jpg" for n in range(10_000)])
    texts = pa.array([f"a caption of the usual length, which differs from row to row: {n}" for n in range(10_000)])
    with pq.ParquetWriter(file, pa.schema({"URL": pa.string(), "TEXT": pa.string()})) as writer:
        batch = pa.table({"URL": pa.concat_arrays([urls] * 50), "TEXT": pa.concat_arrays([texts] * 50)})
        for _ in range(rows // len(batch)):
            writer.write_table(batch, row_group_size=len(batch))
    code = (
        "import re; from pathlib import Path; from storage.collect.lists import read_captions\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        f"before = peak(); rows = sum(1 for _ in read_captions(Path({str(file)!r})))\n"
        "print(rows, peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    found, kilobytes = map(int, done.stdout.split())
    assert found == rows
    assert kilobytes < 100_000  # as a table it has 240 MB, as rows about 500


def test_a_list_of_before_is_planned_as_before(tmp_path: Path):
    """The digest of rows and the offsets are those of its lines, whatever can be read beside it."""
    file = tmp_path / "list.tsv"
    file.write_bytes(tsv(*SWAPPED))
    first, second = plan(CollectSettings("x", captions=str(file), rows_per_shard=3), {})
    assert first.source == f"list.tsv sha256:{hashlib.sha256(tsv(*SWAPPED[:3])[:-1]).hexdigest()}"
    assert (second.start, second.stop, second.offset) == (3, 5, len(tsv(*SWAPPED[:3])))


PAGES = [PROJECT / "docs" / name for name in ("data.md", "download.md")]
COMMANDS = [
    found.replace("\\\n", " ").split()
    for page in PAGES
    for found in re.findall(r"^    vlbert collect (\S+ \S+(?:.*\\\n)*.*)$", page.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_commands_of_the_pages_are_settings(command: list[str]):
    assert from_assignments(CollectSettings, command[2:], name=command[1]).origin


def test_the_code_of_the_page_writes_a_list_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert len(COMMANDS) == 10
    images = [{"id": 9, "file_name": "COCO_train2014_000000000009.jpg"}]
    annotations = [{"image_id": 9, "id": n, "caption": f"caption {n}"} for n in range(2)]
    (tmp_path / "captions_train2014.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/data.md", "exec"), {})
    reading = find_reading(tmp_path / "captions.jsonl", of_folder=True)
    rows = read_captions(tmp_path / "captions.jsonl", reading=reading)
    assert [(row.url, row.caption) for row in rows] == [(images[0]["file_name"], f"caption {n}") for n in range(2)]


def test_a_folder_is_no_list(tmp_path: Path):
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder; name one list"):
        find_reading(tmp_path)


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({"LICENSE": "?"}, "?"),
        ({"license_url": "http://a", "licence": "CC0"}, "CC0"),
        ({"license": 4}, "4"),
        ({"license": ""}, None),
        ({"license": None, "n": 1}, None),
        ({"n": "CC0"}, None),
        (None, None),
    ],
)
def test_the_licence_of_a_row_is_in_a_column_of_that_name(extra: dict | None, found: str | None):
    assert license_of(extra) == found
