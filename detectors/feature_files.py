"""Files of boxes and features that other projects wrote, read a row at a time: TSV, JSON, .npz, LMDB and HDF5.

A row is the fields of one image by our names (`FIELDS`), their values as the format has them: texts, base64 of
little-endian numbers, plain numbers or arrays. detectors/imported.py makes regions of them. The files are untrusted:
pickled values go through storage/pickles.py, and nothing outside a file is read.
"""

import contextlib
import hashlib
import io
import os
import zipfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from detectors.feature_index import stem_of
from storage.pickles import UnsafePickle, read_pickle
from storage.safe_json import parse_json, printable, shown

if TYPE_CHECKING:
    import lmdb

# Our name of each field, and the names that files have for it.
FIELDS = {
    "image_id": ("image_id", "img_id"),
    "image_w": ("image_w", "img_w", "image_width", "width"),
    "image_h": ("image_h", "img_h", "image_height", "height"),
    "num_boxes": ("num_boxes", "num_bbox"),
    "boxes": ("boxes", "bbox"),
    "features": ("features", "x"),
    "class_probs": ("classes", "cls_prob", "class_probs"),
    "objects_id": ("objects_id", "obj_id", "objects"),
    "objects_conf": ("objects_conf", "obj_conf"),
}
_OURS = {theirs: ours for ours, names in FIELDS.items() for theirs in names}
# Columns of a TSV without a first line that names them, by their number: bottom-up attention's and LXMERT's.
_COLUMNS = {
    6: "image_id image_w image_h num_boxes boxes features",
    10: "img_id img_h img_w objects_id objects_conf attrs_id attrs_conf num_boxes boxes features",
}
_LONGEST_ROW = 2**28  # bytes; 100 boxes with features and probabilities are 2 MB as base64
_LMDB_MAGIC = b"\xde\xc0\xef\xbe"  # behind the 16 bytes of its first page's header
_NOT_ROWS = (b"keys", b"__keys__", b"__len__")  # what an LMDB holds beside the images


class FeatureFile(ABC):
    """One file or folder of rows. Opening it reads all of it once, for its hash and where each row lies."""

    path: Path
    kind: str
    names: Sequence[str]
    """The image of each row, as the file calls it."""
    sha256: str
    """Of the content."""

    @abstractmethod
    def _fields(self, row: int) -> Iterable[tuple[Any, Any]]:
        """The names and values of a row, as the file has them."""

    def read(self, row: int) -> dict[str, Any]:
        """Return the fields of a row by our names; ValueError says what is wrong with it, without the file's name."""
        found: dict[str, Any] = {}
        try:
            for name, value in self._fields(row):
                ours = _OURS.get(name) if type(name) is str else None
                if ours in found:
                    raise ValueError(f"has {ours} twice, once as {name}")
                if ours and value is not None:
                    value = value.item() if isinstance(value, np.generic) else value
                    found[ours] = np.asarray(value) if isinstance(value, np.ndarray) else value
        except UnsafePickle as error:
            raise ValueError(
                f"wants to load {error}, which no features need. Nothing was run; do not trust the file"
            ) from error
        except ValueError:
            raise
        except Exception as error:  # of any kind that a reader of torn files has
            raise ValueError(f"cannot be read: {type(error).__name__}: {printable(error)[:200]}") from error
        return found

    def where(self, row: int) -> str:
        """Return the name of a row for messages, without the folder: they are stored."""
        return printable(f"{self.path.name}: {self.names[row]}")


def open_feature_file(path: Path) -> FeatureFile:
    """Open a file with the reader of its format. ValueError names a file that is missing or of none of them."""
    if not path.exists():
        raise ValueError(f"there is no file of features {path}")
    if path.is_dir():
        return LmdbFile(path) if (path / "data.mdb").is_file() else MemberFile(path)
    with open(path, "rb") as stream:
        start = stream.read(20)
    if start.startswith(b"PK\x03\x04"):
        return MemberFile(path)
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return Hdf5File(path)
    if start.startswith(b"\x1f\x8b"):
        raise ValueError(f"{path} is packed by gzip, and its rows cannot be found in it: unpack it")
    return (LmdbFile if start[16:] == _LMDB_MAGIC else TsvFile)(path)


class TsvFile(FeatureFile):
    """A line an image, numbers as text and arrays as base64: bottom-up attention's, LXMERT's.

    The columns are those that the first line names or, by their number, those of _COLUMNS.
    """

    kind = "tsv"

    def __init__(self, path: Path):
        self.path = path
        self._stream = open(path, "rb")  # noqa: SIM115  read by offset as long as the detector lives
        first = self._stream.readline(_LONGEST_ROW).decode("utf-8", "replace").rstrip("\r\n").split("\t")
        has_header = "boxes" in {_OURS.get(name) for name in first}
        if not has_header and len(first) not in _COLUMNS:
            raise ValueError(
                f"{path} has {len(first)} columns in its first line, not 6 as bottom-up attention's or 10 as LXMERT's: "
                f"put a line before it that names them, as {', '.join(_OURS)}"
            )
        self._columns = first if has_header else _COLUMNS[len(first)].split()
        image_id = next((i for i, name in enumerate(self._columns) if _OURS.get(name) == "image_id"), None)
        if image_id is None:
            raise ValueError(f"{path}: none of its columns {printable(', '.join(first))} is the image_id")
        digest, self._offsets, self.names, offset = hashlib.sha256(), array("q"), [], 0
        self._stream.seek(0)
        while line := self._stream.readline(_LONGEST_ROW):
            if len(line) == _LONGEST_ROW:
                raise ValueError(f"{path} has a line of more than {_LONGEST_ROW} bytes: it is no TSV of features")
            digest.update(line)
            if line.strip() and not (has_header and offset == 0):
                self._offsets.append(offset)
                self.names.append(_cell(line.split(b"\t", image_id + 1)[: image_id + 1][-1]))
            offset += len(line)
        self.sha256 = digest.hexdigest()

    def _fields(self, row: int) -> Iterable[tuple[str, str]]:
        self._stream.seek(self._offsets[row])
        cells = self._stream.readline(_LONGEST_ROW).rstrip(b"\r\n").split(b"\t")
        if len(cells) != len(self._columns):
            raise ValueError(f"has {len(cells)} columns, not {len(self._columns)}: it is cut off, or of another format")
        return zip(self._columns, map(_cell, cells), strict=True)


class MemberFile(FeatureFile):
    """A JSON object (VL-BERT's) or an .npz (bottom-up-attention.pytorch's) an image: a folder, a zip, or one .npz."""

    def __init__(self, path: Path):
        self.path, self._zip = path, None
        if path.is_dir():
            members = sorted(entry.name for entry in os.scandir(path))
        elif path.suffix == ".npz":
            members = [path.name]
        else:
            try:
                self._zip = zipfile.ZipFile(path)
            except zipfile.BadZipFile as error:
                raise ValueError(f"{path} is torn or no zip file ({error}); fetch it again") from error
            members = self._zip.namelist()
        # Names with a dot before them are macOS's, beside each file that it copied.
        self._members = [n for n in members if n.endswith((".json", ".npz")) and not n.split("/")[-1].startswith(".")]
        if not self._members:
            raise ValueError(f"{path} holds neither data.mdb, as an LMDB does, nor *.json or *.npz, one an image")
        self.kind = self._members[0].rpartition(".")[2]
        self.names = [stem_of(name) for name in self._members]
        if path.is_dir():
            digest = hashlib.sha256()
            for name in self._members:
                digest.update(f"{name} {_file_hash(path / name)}\n".encode())
            self.sha256 = digest.hexdigest()
        else:
            self.sha256 = _file_hash(path)

    def _fields(self, row: int) -> Iterable[tuple[str, Any]]:
        name = self._members[row]
        if self._zip:
            member = self._zip.getinfo(name)
            _check_length(member.file_size)
            data = self._zip.read(member)
        else:
            file = self.path / name if self.path.is_dir() else self.path
            _check_length(file.stat().st_size)
            data = file.read_bytes()
        if name.endswith(".json"):
            return parse_json(data, "its text").items()
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            _check_length(sum(member.file_size for member in arrays.zip.infolist()))
            return [(name, arrays[name]) for name in arrays if name in _OURS]


class LmdbFile(FeatureFile):
    """An LMDB with a pickled dict an image: 12-in-1's, volta's, mmf's."""

    kind = "lmdb"

    def __init__(self, path: Path):
        try:
            import lmdb
        except ImportError as error:
            raise ValueError(f"{path} is an LMDB: pip install 'vlbert[features]' reads it") from error
        self.path, self._lmdb = path, lmdb
        self._file = path / "data.mdb" if path.is_dir() else path
        with self._reading() as reading, reading.cursor() as cursor:
            self._keys = [key for key in cursor.iternext(values=False) if key not in _NOT_ROWS]
        self.names = [key.decode("utf-8", "replace") for key in self._keys]
        self.sha256 = _file_hash(self._file)

    @contextlib.contextmanager
    def _reading(self) -> Iterator["lmdb.Transaction"]:
        """Opened each time, in a fraction of a millisecond: a process may have an LMDB open only once."""
        options = {"readonly": True, "lock": False, "readahead": False, "meminit": False}
        try:
            with (
                self._lmdb.open(str(self.path), subdir=self.path.is_dir(), **options) as database,
                database.begin() as reading,
            ):
                # Pages behind the end of the file would end the process.
                if (database.info()["last_pgno"] + 1) * database.stat()["psize"] > self._file.stat().st_size:
                    raise ValueError(f"{self.path} is cut off: it is smaller than it says; fetch it again")
                yield reading
        except self._lmdb.Error as error:
            raise ValueError(f"{self.path} is damaged, or no LMDB ({error}); fetch it again") from error

    def _fields(self, row: int) -> Iterable[tuple[Any, Any]]:
        with self._reading() as reading:
            value = reading.get(self._keys[row])
        _check_length(len(value))
        found = read_pickle(value)
        if not isinstance(found, dict):
            raise ValueError(f"is {shown(found)}, not a dict of fields; write each value with its name")
        return found.items()


class Hdf5File(FeatureFile):
    """An HDF5 file with a group an image: volta's."""

    kind = "h5"

    def __init__(self, path: Path):
        try:
            import h5py
        except ImportError as error:
            raise ValueError(f"{path} is an HDF5 file: pip install 'vlbert[features]' reads it") from error
        self.path, self._h5py = path, h5py
        try:
            self._file = h5py.File(path, "r", locking=False)
        except OSError as error:
            raise ValueError(f"{path} is torn or no HDF5 file ({error}); fetch it again") from error
        self.names = [name for name in self._file if self._inside(self._file, name, h5py.Group)]
        if not self.names and len(self._file):
            names = ", ".join(map(printable, list(self._file)[:5]))
            raise ValueError(
                f"{path} has {names} and no group for each image, so it does not say whose regions they are; "
                "docs/detector.md says what to write in its place"
            )
        self.sha256 = _file_hash(path)

    def _inside(self, group: Any, name: str, kind: type) -> bool:
        """Whether a name is one of this kind in the file itself."""
        linked = isinstance(group.get(name, getlink=True), self._h5py.HardLink)
        return linked and group.get(name, getclass=True) is kind

    def _fields(self, row: int) -> Iterable[tuple[str, Any]]:
        group = self._file[self.names[row]]
        for name in filter(_OURS.__contains__, group):
            value = group[name] if self._inside(group, name, self._h5py.Dataset) else None
            if value is None or value.is_virtual or value.external or value.dtype.kind not in "fiuSO":
                raise ValueError(f"{name} is no dataset of numbers in this file")
            _check_length(value.nbytes)
            yield name, value[()]


# --- parts of several formats -----------------------------------------------------------------------------------------


def _cell(raw: bytes) -> str:
    """The text of a cell. Programs of Python 3 that were written for Python 2 leave b'...' around it."""
    text = raw.decode("utf-8", "replace")
    return text[2:-1] if text[:2] in ("b'", 'b"') and text[-1:] == text[1] else text


def _check_length(length: int) -> None:
    if length > _LONGEST_ROW:
        raise ValueError(f"has {length} bytes, more than {_LONGEST_ROW}")


def _file_hash(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
