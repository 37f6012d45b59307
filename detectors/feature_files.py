"""Formats of other projects' feature files, which have a row of boxes and features per image.

The formats are TSV, JSON, .npz, LMDB and HDF5. A row is read as a dict from our field names (`FIELDS`) to values as the
file stores them: text, base64 of little-endian numbers, numbers or arrays. detectors/imported.py converts the values.
The files are untrusted: storage/pickles.py reads pickled values, links to other files are not followed, and
detectors/feature_reader.py calls this module in a child process. Messages begin after the name of the file or row.
"""

import hashlib
import io
import os
import re
import zipfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from storage.digests import sha256_of
from storage.pickles import read_pickle
from storage.safe_json import parse_json, printable, short_repr
from storage.signatures import START_BYTES, describe_foreign

# Our name for each field, and its names in files.
FIELDS = {
    "image_id": ("image_id", "img_id"),
    "image_w": ("image_w", "img_w", "image_width", "width"),
    "image_h": ("image_h", "img_h", "image_height", "height"),
    "num_boxes": ("num_boxes", "num_bbox"),
    "boxes": ("boxes", "bbox"),
    "norm_boxes": ("norm_bb",),
    "features": ("features", "x"),
    "class_probs": ("classes", "cls_prob", "class_probs", "soft_labels"),
    "objects_id": ("objects_id", "obj_id", "objects"),
    "objects_conf": ("objects_conf", "obj_conf"),
}
_OURS = {theirs: ours for ours, names in FIELDS.items() for theirs in names}
# Columns of a TSV without a header, by their number: bottom-up attention's and LXMERT's.
_COLUMNS = {
    6: "image_id image_w image_h num_boxes boxes features",
    10: "img_id img_h img_w objects_id objects_conf attrs_id attrs_conf num_boxes boxes features",
}
_EXTENSION = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?|json|npz)$", re.IGNORECASE)
LONGEST_ROW = 2**28  # bytes; 100 boxes with features and probabilities are 2 MB as base64
_LMDB_MAGIC = b"\xde\xc0\xef\xbe"  # after the 16 bytes of the first page's header
_MSGPACK_MAPS = [bytes([first]) for first in (*range(0x81, 0x90), 0xDE, 0xDF)]
_NOT_ROWS = (b"keys", b"__keys__", b"__len__")  # keys of an LMDB that are not images


class UnusableFile(ValueError):
    """Raised if a file cannot be opened, with a message that says what to do."""


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """The rows of an open feature file or folder, one per image."""

    names: Sequence[str]
    """Name of each row's image in the file."""
    sha256: Callable[[], str]
    """Function that returns the hash of the file's or folder's content."""
    fields: Callable[[int], Iterable[tuple[Any, Any]]]
    """Function that returns the fields of a row, with names and values as in the file."""

    def read(self, row: int) -> dict[str, Any]:
        """Return a row's fields by our field names. Damaged files raise any exception."""
        fields: dict[str, Any] = {}
        for name, value in self.fields(row):
            ours = _OURS.get(name) if type(name) is str else None
            if ours and value is not None:
                value = value.item() if isinstance(value, np.generic) else value
                value = _unquote(value) if isinstance(value, str | bytes) else value
                fields[ours] = np.asarray(value) if isinstance(value, np.ndarray) else value
        return fields


def stem_of(name: str) -> str:
    """Return the last component of a path, without the extension of an image, JSON or .npz file."""
    return _EXTENSION.sub("", name.rsplit("/", 1)[-1])


def open_rows(path: Path) -> FeatureRows:
    """Open a feature file or folder. Damaged files raise any exception, files of unknown formats UnusableFile."""
    database = path / "data.mdb"
    if path.is_dir() and not database.is_file():
        return _open_members(path)
    with open(database if path.is_dir() else path, "rb") as stream:
        start = stream.read(START_BYTES)
    if problem := describe_foreign(start, ("zip",)):
        raise UnusableFile(problem)
    if start.startswith(b"PK\x03\x04"):
        return _open_members(path)
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return _open_h5(path)
    return _open_lmdb(path) if path.is_dir() or start[16:20] == _LMDB_MAGIC else _open_tsv(path)


def _open_tsv(path: Path) -> FeatureRows:
    """Open a TSV of bottom-up attention or LXMERT: one line per image, numbers as text, arrays as base64.

    The first line may name the columns. Otherwise, the number of columns selects their names in _COLUMNS.
    """
    stream = open(path, "rb")  # noqa: SIM115  stays open for reads by offset
    first = stream.readline(LONGEST_ROW).decode("utf-8", "replace").rstrip("\r\n").split("\t")
    has_header = "boxes" in {_OURS.get(name) for name in first}
    if not has_header and len(first) not in _COLUMNS:
        if len(first) == 2 and first[1].startswith("{"):
            raise UnusableFile("is VinVL's TSV of ids and JSON, which is not read; write a TSV of 6 columns from it")
        if not "".join(first).isprintable() or first[0].startswith(("{", "[")):
            raise UnusableFile("is in none of the formats that are read; docs/detector.md lists them")
        raise UnusableFile(
            f"has {len(first)} columns in its first line, not 6 (bottom-up attention) or 10 (LXMERT); add a "
            f"first line that names the columns; possible names are {', '.join(_OURS)}"
        )
    columns = first if has_header else _COLUMNS[len(first)].split()
    image_id = next((i for i, name in enumerate(columns) if _OURS.get(name) == "image_id"), None)
    if image_id is None:
        raise UnusableFile(f"has the columns {printable(', '.join(first))}, but none for the image_id")
    digest, offsets, names, offset = hashlib.sha256(), array("q"), [], 0
    stream.seek(0)
    while line := stream.readline(LONGEST_ROW):
        if len(line) == LONGEST_ROW:
            raise UnusableFile(f"has a line of more than {LONGEST_ROW} bytes; it is not a TSV of features")
        digest.update(line)
        if line.strip() and not (has_header and offset == 0):
            offsets.append(offset)
            names.append(_unquote(line.split(b"\t", image_id + 1)[: image_id + 1][-1]))
        offset += len(line)

    def fields(row: int) -> Iterable[tuple[str, bytes]]:
        stream.seek(offsets[row])
        cells = stream.readline(LONGEST_ROW).rstrip(b"\r\n").split(b"\t")
        if len(cells) != len(columns):
            raise ValueError(f"has {len(cells)} columns, not {len(columns)}; it is truncated or in another format")
        return zip(columns, cells, strict=True)

    return FeatureRows(names, digest.hexdigest, fields)


def _open_members(path: Path) -> FeatureRows:
    """Open a folder or zip with one JSON or .npz file per image."""
    archive = None if path.is_dir() else zipfile.ZipFile(path)
    # macOS adds a file with a leading dot for each file that it copies.
    found = [n for n in (archive.namelist() if archive else sorted(os.listdir(path))) if not stem_of(n).startswith(".")]
    members = [name for name in found if name.endswith((".json", ".npz"))]
    if not members:
        fix = "unpack it, and give the files with the features" if archive else "give the files with the features"
        if any(name.endswith(".npy") for name in found):
            fix = "give the folder of this .npz" if archive else "convert .npy files with mmf's lmdb_conversion.py"
        names = printable(", ".join(found[:3]) or "nothing")
        raise UnusableFile(f"has neither data.mdb of an LMDB nor *.json or *.npz of each image, but {names}; {fix}")

    def sha256() -> str:
        if archive:
            return sha256_of(path)
        hashes = "".join(f"{name} {sha256_of(path / name)}\n" for name in members)
        return hashlib.sha256(hashes.encode()).hexdigest()

    def fields(row: int) -> Iterable[tuple[str, Any]]:
        name = members[row]
        data = archive.read(name) if archive else (path / name).read_bytes()
        if problem := describe_foreign(data, ("zip",)):
            raise ValueError(problem)
        if name.endswith(".json"):  # VL-BERT's format; .npz is that of bottom-up-attention.pytorch
            return parse_json(data, "its text").items()
        return _read_npz(data)

    return FeatureRows([stem_of(name) for name in members], sha256, fields)


def _open_lmdb(path: Path) -> FeatureRows:
    """Open an LMDB with a dict per image: pickled by 12-in-1, volta and mmf, an .npz or msgpack by UNITER."""
    try:
        import lmdb
    except ImportError as error:
        raise UnusableFile("is an LMDB; to read it, run pip install 'vlbert[features]'") from error
    file = path / "data.mdb" if path.is_dir() else path
    options = {"readonly": True, "lock": False, "readahead": False, "meminit": False}
    database = lmdb.open(str(path), subdir=path.is_dir(), **options)
    if (database.info()["last_pgno"] + 1) * database.stat()["psize"] > file.stat().st_size:
        raise UnusableFile("is truncated: its header states a larger size; download it again")

    def fields(row: int) -> Iterable[tuple[Any, Any]]:
        with database.begin() as transaction:
            value = bytes(transaction.get(keys[row], b""))
        if value.startswith(b"PK"):
            return _read_npz(value)
        is_msgpack = value[:1] in _MSGPACK_MAPS  # with which no pickle begins
        entry = msgpack.unpackb(value, object_hook=_unpack_array) if is_msgpack else read_pickle(value)
        if not isinstance(entry, dict):
            raise ValueError(f"is {short_repr(entry)}, not a dict of fields; write each value with its name")
        return entry.items()

    with database.begin() as transaction, transaction.cursor() as cursor:
        keys = [bytes(key) for key in cursor.iternext(values=False) if key not in _NOT_ROWS]
    return FeatureRows([_unquote(key) for key in keys], partial(sha256_of, file), fields)


def _open_h5(path: Path) -> FeatureRows:
    """Open an HDF5 file with a group per image, the format of the project volta."""
    try:
        import h5py
    except ImportError as error:
        raise UnusableFile("is an HDF5 file; to read it, run pip install 'vlbert[features]'") from error
    file = h5py.File(path, "r", locking=False)

    def is_inside(group: Any, name: str, kind: type) -> bool:
        """Return True if `name` in `group` is an object of type `kind` in this file, not in a linked file."""
        return isinstance(group.get(name, getlink=True), h5py.HardLink) and group.get(name, getclass=True) is kind

    names = [name for name in file if is_inside(file, name, h5py.Group)]
    if not names:
        keys = ", ".join(map(printable, list(file)[:5]))
        raise UnusableFile(
            f"has {keys} but no group for each image, so its regions cannot be assigned to images; "
            "docs/detector.md describes the format"
        )

    def fields(row: int) -> Iterable[tuple[str, Any]]:
        group = file[names[row]]
        for name in (name for name in group if name in _OURS):
            value = group[name] if is_inside(group, name, h5py.Dataset) else None
            if value is None or value.is_virtual or value.external or value.dtype.kind not in "fiuSO":
                raise ValueError(f"{name} is not a dataset of numbers in this file")
            yield name, value[()]

    return FeatureRows(names, partial(sha256_of, path), fields)


def _read_npz(data: bytes) -> list[tuple[str, np.ndarray]]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return [(name, arrays[name]) for name in arrays if name in _OURS]


def _unpack_array(packed: dict[Any, Any]) -> Any:
    """Convert a map of the library msgpack_numpy to its array. Other maps are returned unchanged."""
    if b"nd" not in packed:
        return packed
    # frombuffer refuses objects, and imported.py other types than numbers.
    return np.frombuffer(packed[b"data"], packed[b"type"]).reshape(packed.get(b"shape", ()))


def _unquote(value: str | bytes) -> str:
    """Return a value as text, without the b'...' that Python 2 programs put around it when run with Python 3."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    is_literal = len(text) > 2 and text[:2] in ("b'", 'b"') and text[-1] == text[1]
    # base64.encodebytes ends each 76 characters with a newline.
    return text[2:-1].replace("\\n", "") if is_literal else text
