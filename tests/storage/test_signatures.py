"""storage.signatures: what stands in the place of a file is named by its first bytes, by every reader."""

import re
from collections.abc import Callable
from pathlib import Path

import foreign
import pytest
from web import draw, encode

from detectors.names import read_names
from detectors.weights.tensor_files import read_tensors
from storage.collect.lists import read_captions
from storage.pickles import read_pickle
from storage.safe_json import parse_json
from storage.signatures import describe_foreign, image_format
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets.files import read_json, read_text
from vlbert.datasets.refcoco import read_plain_pickle

READERS: dict[str, Callable[[Path], object]] = {
    "list": lambda file: list(read_captions(file)),
    "json": lambda file: parse_json(file.read_bytes(), str(file)),
    "pickle": lambda file: read_pickle(file.read_bytes()),
    "weights": read_tensors,
    "vocabulary": Vocabulary.read,
    "names": read_names,
    "file of a task": lambda file: read_text(file, "task.folder"),
    "json of a task": lambda file: read_json(file, "task.folder"),
    "pickle of a task": read_plain_pickle,
}


@pytest.mark.parametrize("kind", foreign.FOREIGN)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_says_what_a_foreign_file_is(reader: str, kind: str, tmp_path: Path):
    (data, named), file = foreign.FOREIGN[kind], tmp_path / "a"
    if (reader, kind) == ("list", "gzip"):
        return  # read
    file.write_bytes(data)
    with pytest.raises(ValueError, match=("" if reader == "pickle" else re.escape(f"{file} ")) + named):
        READERS[reader](file)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"<PERSON> walks\thttp://x/1.jpg\n",
        b"BZhang smiles\thttp://x\n",
        b"version 2\tb\n",
        b"PKs, 7z and Rar!",
        b"< html >",
    ],
)
def test_a_text_that_begins_in_a_similar_way_is_no_foreign_file(start: bytes):
    assert describe_foreign(start) == ""


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIF"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIF"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "AVIF"),
        (encode(draw(), "AVIF"), "AVIF"),
        (encode(draw(), "JPEG2000"), "JPEG 2000"),
        (b"\0\0\0\x20ftypisom", "video"),
        (b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg xmlns="http://www.w3.org/2000/svg">', "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"\xff\x0a\xfa", "JPEG XL"),
        (b"\0" * 100, ""),
    ],
)
def test_a_format_of_images_is_named(start: bytes, expected: str):
    assert image_format(start) == expected
