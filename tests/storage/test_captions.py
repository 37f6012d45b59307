"""The caption list reads as Conceptual Captions means it."""

import json
from pathlib import Path

import pytest
from places import DATA

from storage.download import CaptionRow, read_captions

CONFORMANCE = DATA / "conceptual_captions"


def write(folder: Path, data: bytes) -> Path:
    file = folder / "list.tsv"
    file.write_bytes(data)
    return file


def test_the_conformance_list_gives_the_expected_rows():
    expected = json.loads((CONFORMANCE / "expected_rows.json").read_text())["rows"]
    rows = read_captions(CONFORMANCE / "Train_GCC-synthetic.tsv")
    assert rows == [CaptionRow(**row) for row in expected]
    assert len(rows) == 14


@pytest.mark.parametrize(
    ("line", "caption", "url"),
    [
        pytest.param('say "a\tb" twice\thttp://x/1', 'say "a', 'b" twice\thttp://x/1', id="only the first tab splits"),
        pytest.param('"quoted" caption\thttp://x/1', '"quoted" caption', "http://x/1", id="quotes are text"),
        pytest.param("\thttp://x/1", "", "http://x/1", id="an empty caption is a caption"),
        pytest.param("a  b \t http://x/1 ", "a  b ", " http://x/1 ", id="spaces stay"),
        pytest.param(
            "a\u2028b\x0bc\x85d\re\thttp://x/1", "a\u2028b\x0bc\x85d\re", "http://x/1", id="only \\n ends a line"
        ),
        pytest.param("a\thttp://x/%C3%A9?a=1&amp;b", "a", "http://x/%C3%A9?a=1&amp;b", id="escapes stay"),
        pytest.param("caf\u00e9 e\u0301\thttp://x/\u00e9", "caf\u00e9 e\u0301", "http://x/\u00e9", id="no normal form"),
        pytest.param("# a comment?\thttp://x/1", "# a comment?", "http://x/1", id="# is text"),
        pytest.param("caption\t", "caption", "", id="an empty URL is left to the downloader"),
    ],
)
def test_a_line_is_split_at_its_first_tab_and_nowhere_else(tmp_path: Path, line: str, caption: str, url: str):
    for end in (b"\n", b"\r\n", b""):
        rows = read_captions(write(tmp_path, b"first\thttp://x/0\n" + line.encode() + end))
        assert rows[1:] == [CaptionRow(1, caption, url)], end


def test_a_byte_order_mark_is_no_part_of_the_first_caption(tmp_path: Path):
    file = write(tmp_path, b"\xef\xbb\xbfa\thttp://x/0\r\n\xef\xbb\xbfb\thttp://x/1\r\n")
    assert read_captions(file) == [CaptionRow(0, "a", "http://x/0"), CaptionRow(1, "\ufeffb", "http://x/1")]


def test_a_range_of_rows_keeps_its_row_numbers(tmp_path: Path):
    file = write(tmp_path, b"".join(b"c%d\thttp://x/%d\n" % (i, i) for i in range(10)))
    assert read_captions(file, 3, 6) == read_captions(file)[3:6]
    assert [row.row for row in read_captions(file, 8)] == [8, 9]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\thttp://x/0\nno tab here\n", r"list\.tsv:2: no tab in 'no tab here'.*remove"),
        (b"a\thttp://x/0\n\nb\thttp://x/1\n", r"list\.tsv:2: an empty line.*remove"),
        (b"a\thttp://x/0\r\n\r\n", r"list\.tsv:2: an empty line"),
        (b"caf\xe9\thttp://x/0\n", r"list\.tsv:1: not UTF-8.*convert"),
    ],
)
def test_a_line_that_is_no_row_is_an_error_with_file_and_line(tmp_path: Path, data: bytes, message: str):
    file = write(tmp_path, data)
    with pytest.raises(ValueError, match=message):
        read_captions(file)


def test_a_bad_line_in_a_range_is_named_by_its_line_in_the_file(tmp_path: Path):
    file = write(tmp_path, b"a\t0\nb\t1\nc\t2\nbad\n")
    assert len(read_captions(file, 0, 3)) == 3
    with pytest.raises(ValueError, match=r"list\.tsv:4: "):
        read_captions(file, 2)
