"""The caption list reads as Conceptual Captions means it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import DATA

from storage.collect.lists import PLAIN, CaptionRow, parse_rows, read_captions

CONFORMANCE = DATA / "conceptual_captions"


def write(folder: Path, data: bytes) -> Path:
    file = folder / "list.tsv"
    file.write_bytes(data)
    return file


def test_the_conformance_list_gives_the_expected_rows():
    expected = json.loads((CONFORMANCE / "expected_rows.json").read_text())["rows"]
    rows = list(read_captions(CONFORMANCE / "Train_GCC-synthetic.tsv"))
    assert rows == [CaptionRow(**row) for row in expected]
    assert len(rows) == 14


_TEXT = st.text(st.characters(exclude_characters="\t\n"), max_size=20)


@given(_TEXT.filter(lambda text: not text.startswith("\ufeff")), _TEXT, st.sampled_from([b"\n", b"\r\n", b""]))
def test_a_line_is_split_at_its_first_tab_and_nowhere_else(caption: str, url: str, end: bytes):
    url = (url + "\tmore").rstrip("\r")  # further tabs, quotes, #, escapes and U+2028 are text
    lines = [b"first\thttp://x/0\n", f"{caption}\t{url}".encode() + end]
    assert list(parse_rows(lines, Path("list.tsv"), PLAIN, 0))[1] == CaptionRow(1, caption, url)


def test_a_byte_order_mark_is_no_part_of_the_first_caption(tmp_path: Path):
    file = write(tmp_path, b"\xef\xbb\xbfa\thttp://x/0\r\n\xef\xbb\xbfb\thttp://x/1\r\n")
    assert list(read_captions(file)) == [CaptionRow(0, "a", "http://x/0"), CaptionRow(1, "\ufeffb", "http://x/1")]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"a\thttp://x/0\nno tab here\n", r"list\.tsv:2: .*'no tab here'"),
        (b"a\thttp://x/0\n\nb\thttp://x/1\n", r"list\.tsv:2: an empty line"),
        (b"a\thttp://x/0\r\n\r\n", r"list\.tsv:2: an empty line"),
        (b"caf\xe9\thttp://x/0\n", r"list\.tsv:1: not UTF-8"),
    ],
)
def test_a_malformed_line_is_an_error_with_file_and_line(tmp_path: Path, data: bytes, named: str):
    file = write(tmp_path, data)
    with pytest.raises(ValueError, match=named):
        list(read_captions(file))


def test_a_range_of_rows_keeps_its_row_numbers(tmp_path: Path):
    file = write(tmp_path, b"a\t0\nb\t1\nc\t2\nbad\n")
    assert [row.row for row in read_captions(file, 1, 3)] == [1, 2]
    with pytest.raises(ValueError, match=r"list\.tsv:4: "):
        list(read_captions(file, 2))
