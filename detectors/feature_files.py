"""Files of boxes and features that other projects wrote, read a row at a time: TSV, LMDB, HDF5 and JSON.

A row is the fields of one image by our names (`FIELDS`), their values as the format has them: texts, base64 of
little-endian numbers, plain numbers or arrays. detectors/imported.py makes regions of them. The files are untrusted:
pickled values go through storage/safe_pickle.py, and nothing outside a file is read.
"""

import contextlib
import hashlib
import os
import re
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgpack
import numpy as np

from detectors.feature_index import FeatureIndex, Place, file_name_of, number_of, open_index, stem_of
from storage.pickled_arrays import ARRAY_NAMES, SCALAR_NAMES, PickledArray, PickledBytes, plain_bytes
from storage.safe_json import parse_json, printable, shown
from storage.safe_pickle import Hostile, read_pickle

if TYPE_CHECKING:
    import h5py
    import lmdb

# Our name of each field, and the names that files have for it.
FIELDS = {
    "image_id": ("image_id", "img_id"),
    "image_w": ("image_w", "img_w", "image_width", "width"),
    "image_h": ("image_h", "img_h", "image_height", "height"),
    "num_boxes": ("num_boxes",),
    "boxes": ("boxes", "bbox"),
    "features": ("features",),
    "class_probs": ("classes", "cls_prob", "class_probs"),
    "objects_id": ("objects_id", "obj_id"),
    "objects_conf": ("objects_conf", "obj_conf"),
    "attribute_probs": ("attrs", "attr_prob"),
    "attrs_id": ("attrs_id", "attr_id"),
    "attrs_conf": ("attrs_conf", "attr_conf"),
}
_OURS = {theirs: ours for ours, names in FIELDS.items() for theirs in names}
# Columns of a TSV without a first line that names them, by their number: bottom-up attention's and LXMERT's.
_COLUMNS = {
    6: "image_id image_w image_h num_boxes boxes features",
    10: "img_id img_h img_w objects_id objects_conf attrs_id attrs_conf num_boxes boxes features",
}
_LONGEST_ROW = 2**28  # bytes; 100 boxes with features and probabilities are 2 MB as base64
_BLOCK = 2**20
_LMDB_MAGIC = b"\xde\xc0\xef\xbe"  # behind the 16 bytes of its first page's header
_ARRAYS = {bytes([first]) for first in (*range(0x90, 0xA0), 0xDC, 0xDD)}  # how an array of msgpack begins
_NOT_ROWS = (b"keys", b"__keys__", b"__len__")  # what an LMDB holds beside the images
_ZIP_HEADER = struct.Struct("<4s5H3I2H")
_STORED, _DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


class FeatureFile(ABC):
    """One file or folder of rows."""

    kind: str

    def __init__(self, path: Path, columns: Sequence[str] = ()):
        self.path, self.columns = path, tuple(columns)
        self.open()
        self.index: FeatureIndex = open_index(path, self.made_of(), " ".join(self.columns), self.scan)

    def open(self) -> None:  # noqa: B027  a folder needs nothing
        """Open what `read` needs; ValueError names the file where it is of another form."""

    def made_of(self) -> str:
        """Changes when the file does."""
        return _state(self.path.stat())

    @abstractmethod
    def scan(self, digest: "hashlib._Hash") -> Iterator[Place]:
        """The rows in their order, once `digest` has got the content."""

    @abstractmethod
    def read(self, place: Place) -> dict[str, Any]:
        """The fields of a row; ValueError says what is wrong with it, without the file's name."""

    def where(self, place: Place) -> str:
        """Names a row in messages, without the folder: they are stored."""
        return printable(f"{self.path.name}: {place.name}")

    def find(self, match: str, url: str, key: str) -> list[Place]:
        """The rows of an image, two at most: by `file_name`, `number`, `url` or `key`."""
        column, value = {
            "file_name": ("stem", stem_of(file_name_of(url))),
            "number": ("number", number_of(file_name_of(url))),
            "url": ("name", url),
            "key": ("name", key),
        }[match]
        return self.index.find(column, value) if value not in ("", None) else []


def open_feature_file(path: Path, columns: Sequence[str] = ()) -> FeatureFile:
    """The reader of this file's format, its index made. ValueError names a file that is missing or of none of them.

    columns: of a TSV, or of tensorpack's values, in order; none: of a TSV as its first line names them or, by their
    number, as _COLUMNS has them.
    """
    if not path.exists():
        raise ValueError(f"there is no file of features {path}")
    if path.is_dir():
        if (path / "data.mdb").is_file():
            return LmdbFile(path, columns)
        if any(path.glob("*.json")):
            return JsonFolder(path)
        raise ValueError(f"{path} holds neither data.mdb, as an LMDB does, nor *.json, one an image")
    with open(path, "rb") as stream:
        start = stream.read(20)
    if start.startswith(b"PK\x03\x04"):
        return JsonZip(path)
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return Hdf5File(path)
    return (LmdbFile if start[16:] == _LMDB_MAGIC else TsvFile)(path, columns)


class TsvFile(FeatureFile):
    """A line an image, numbers as text and arrays as base64: bottom-up attention's, LXMERT's."""

    kind = "tsv"

    def open(self) -> None:
        self._stream = open(self.path, "rb")  # noqa: SIM115  read by offset as long as the detector lives
        first = self._line()
        names = first.decode("utf-8", "replace").split("\t")
        self._has_header = "boxes" in {_OURS.get(name) for name in names}
        if self._has_header:
            self.columns = tuple(names)
        elif not self.columns:
            if len(names) not in _COLUMNS:
                raise ValueError(
                    f"{self.path} has {len(names)} columns in its first line, not 6 as bottom-up attention's or 10 as "
                    f"LXMERT's: name them with imported.columns=..., as {', '.join(_OURS)}"
                )
            self.columns = tuple(_COLUMNS[len(names)].split())
        self._image_id = next((i for i, name in enumerate(self.columns) if _OURS.get(name) == "image_id"), None)
        if self._image_id is None:
            raise ValueError(f"{self.path}: none of its columns {', '.join(self.columns)} is the image_id")

    def _line(self) -> bytes:
        line = self._stream.readline(_LONGEST_ROW)
        if len(line) == _LONGEST_ROW:
            raise ValueError(f"{self.path} has a line of more than {_LONGEST_ROW} bytes: it is no TSV of features")
        return line.rstrip(b"\r\n")

    def scan(self, digest: "hashlib._Hash") -> Iterator[Place]:
        self._stream.seek(0)
        number = offset = 0
        while line := self._stream.readline(_LONGEST_ROW):
            number += 1
            digest.update(line)
            start, offset = offset, offset + len(line)
            if len(line) == _LONGEST_ROW:
                raise ValueError(f"{self.path} line {number} has more than {_LONGEST_ROW} bytes")
            row = line.rstrip(b"\r\n")
            if row and not (self._has_header and number == 1):
                name = row.split(b"\t", self._image_id + 1)[: self._image_id + 1][-1]
                yield Place(name.decode("utf-8", "replace"), b"%d" % number, start, len(row), zlib.crc32(row))

    def where(self, place: Place) -> str:
        return printable(f"{self.path.name} line {place.member.decode()}")

    def read(self, place: Place) -> dict[str, Any]:
        fields = _read_span(self._stream, place).split(b"\t")
        if len(fields) != len(self.columns):
            raise ValueError(f"has {len(fields)} columns, not {len(self.columns)}: it is cut off, or of another format")
        return _by_our_names(zip(self.columns, (field.decode("utf-8", "replace") for field in fields), strict=True))


class JsonZip(FeatureFile):
    """A zip file with a JSON object an image: VL-BERT's. It is read by offset, without the zip's own list."""

    kind = "json"

    def open(self) -> None:
        self._stream = open(self.path, "rb")  # noqa: SIM115  as above

    def scan(self, digest: "hashlib._Hash") -> Iterator[Place]:
        _digest_file(self.path, digest)
        try:
            with zipfile.ZipFile(self.path) as archive:
                members = archive.infolist()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{self.path} is torn or no zip file ({error}); fetch it again") from error
        for member in members:
            if member.filename.endswith(".json"):
                name, length = stem_of(member.filename), min(member.compress_size, _LONGEST_ROW + 1)
                yield Place(name, member.filename.encode(), member.header_offset, length, member.CRC)

    def where(self, place: Place) -> str:
        return printable(f"{self.path.name}: {place.member.decode()}")

    def read(self, place: Place) -> dict[str, Any]:
        self._stream.seek(place.offset)
        header = self._stream.read(_ZIP_HEADER.size)
        if len(header) < _ZIP_HEADER.size or not header.startswith(b"PK\x03\x04"):
            raise ValueError("is not where the zip's list has it; fetch the file again")
        _, _, flags, method, *_, name, extra = _ZIP_HEADER.unpack(header)
        if flags & 1 or method not in (_STORED, _DEFLATED):
            raise ValueError(f"is encrypted or packed by method {method}, which is not read")
        self._stream.seek(name + extra, os.SEEK_CUR)
        data = self._stream.read(_checked(place.length))
        if method == _DEFLATED:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, _LONGEST_ROW + 1)
            except zlib.error as error:
                raise ValueError(f"is damaged: {error}") from error
        if zlib.crc32(data) != place.crc32:
            raise ValueError("is damaged: its CRC is another; fetch the file again")
        return _read_json(data)


class JsonFolder(FeatureFile):
    """A folder with a JSON file an image: what VL-BERT's zip holds."""

    kind = "json"

    def made_of(self) -> str:
        digest = hashlib.sha256()
        for name in self._names():
            digest.update(f"{name} {_state((self.path / name).stat())}\n".encode())
        return digest.hexdigest()

    def _names(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self.path) if entry.name.endswith(".json"))

    def scan(self, digest: "hashlib._Hash") -> Iterator[Place]:
        for name in self._names():
            data = (self.path / name).read_bytes()
            digest.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
            yield Place(stem_of(name), name.encode(), 0, len(data), zlib.crc32(data))

    def read(self, place: Place) -> dict[str, Any]:
        with open(self.path / place.member.decode(), "rb") as stream:
            return _read_json(_read_span(stream, place))


class LmdbFile(FeatureFile):
    """An LMDB with a pickled dict an image (12-in-1's, volta's), or with a list of values without names.

    tensorpack's LMDBSerializer writes such lists, pickled or as msgpack, under numbers. `columns` names their values.
    """

    kind = "lmdb"

    def open(self) -> None:
        try:
            import lmdb
        except ImportError as error:
            raise ValueError(f"{self.path} is an LMDB: pip install 'vlbert[features]' reads it") from error
        self._lmdb = lmdb
        with self._reading() as reading, reading.cursor() as cursor:
            cursor.first()

    @contextlib.contextmanager
    def _reading(self) -> Iterator["lmdb.Transaction"]:
        """Opened each time, in a fraction of a millisecond: a process may have an LMDB open only once."""
        try:
            with (
                self._lmdb.open(
                    str(self.path), subdir=self.path.is_dir(), readonly=True, lock=False, readahead=False, meminit=False
                ) as database,
                database.begin() as reading,
            ):
                # Pages behind the end of the file would end the process.
                if (database.info()["last_pgno"] + 1) * database.stat()["psize"] > self._file().stat().st_size:
                    raise ValueError(f"{self.path} is cut off: it is smaller than it says; fetch it again")
                yield reading
        except self._lmdb.Error as error:
            raise ValueError(f"{self.path.name} is damaged, or no LMDB ({error}); fetch it again") from error

    def made_of(self) -> str:
        return _state(self._file().stat())

    def _file(self) -> Path:
        return self.path / "data.mdb" if self.path.is_dir() else self.path

    def scan(self, digest: "hashlib._Hash") -> Iterator[Place]:
        _digest_file(self._file(), digest)
        with self._reading() as reading, reading.cursor() as cursor:
            for key in cursor.iternext(values=False):
                if key not in _NOT_ROWS:
                    yield Place(self._name(key, cursor.value()) if self.columns else _text(key), key)

    def _name(self, key: bytes, value: bytes) -> str:
        """The image's name: its image_id or, where it has none, the key."""
        try:
            found = self._fields(value)
            return _text(found["image_id"]) if found.get("image_id") is not None else _text(key)
        except ValueError:
            return _text(key)  # whoever reads the row says what is wrong with it

    def read(self, place: Place) -> dict[str, Any]:
        with self._reading() as reading:
            return self._fields(reading.get(place.member))

    def _fields(self, value: bytes) -> dict[str, Any]:
        _checked(len(value))
        try:
            if value[:1] in _ARRAYS:  # with which no pickle begins
                found = _unpacked(value)
            else:
                found, _ = read_pickle(value, names=ARRAY_NAMES | SCALAR_NAMES)
        except Hostile as error:
            raise ValueError(
                f"wants to load {error}, which no features need. Nothing was run; do not trust the file"
            ) from error
        if type(found) in (list, tuple):
            if len(found) != len(self.columns):
                raise ValueError(
                    f"has {len(found)} values without names, as tensorpack writes them: name them in their order with "
                    f"imported.columns=..., as {', '.join(_OURS)}, and what else there is as you like"
                )
            found = dict(zip(self.columns, found, strict=True))
        if type(found) is not dict:
            raise ValueError(f"is {shown(found)}, not a dict of fields")
        return {name: _plain(value) for name, value in _by_our_names(found.items()).items()}


class Hdf5File(FeatureFile):
    """An HDF5 file with a group an image: volta's."""

    kind = "h5"

    def open(self) -> None:
        try:
            import h5py
        except ImportError as error:
            raise ValueError(f"{self.path} is an HDF5 file: pip install 'vlbert[features]' reads it") from error
        self._h5py = h5py
        try:
            self._file = h5py.File(self.path, "r", locking=False)
        except OSError as error:
            raise ValueError(f"{self.path} is torn or no HDF5 file ({error}); fetch it again") from error

    def scan(self, digest: "hashlib._Hash") -> Iterator[Place]:
        _digest_file(self.path, digest)
        others = []
        for name in self._file:
            if self._is_group(name):
                yield Place(name, name.encode())
            else:
                others.append(name)
        if others and len(others) == len(self._file):
            names = ", ".join(map(printable, others[:5]))
            raise ValueError(
                f"{self.path} has {names} and no group for each image, so it does not say whose regions they are; "
                "docs/detector.md says what to write in its place"
            )

    def _is_group(self, name: str) -> bool:
        here = isinstance(self._file.get(name, getlink=True), self._h5py.HardLink)
        return here and self._file.get(name, getclass=True) is self._h5py.Group

    def read(self, place: Place) -> dict[str, Any]:
        try:
            group = self._file[place.member.decode()]
            names = _by_our_names((name, name) for name in group)
            return {ours: self._value(group, theirs) for ours, theirs in names.items()}
        except (OSError, RuntimeError, KeyError) as error:
            raise ValueError(f"cannot be read: {error}; fetch the file again") from error

    def _value(self, group: "h5py.Group", name: str) -> Any:
        linked, value = group.get(name, getlink=True), group.get(name)
        if not isinstance(linked, self._h5py.HardLink) or not isinstance(value, self._h5py.Dataset):
            raise ValueError(f"{name} is no dataset of the file")
        if value.is_virtual or value.external or value.dtype.kind not in "fiuSO":
            raise ValueError(f"{name} is in another file, or holds no numbers")
        _checked(value.nbytes)
        value = value[()]
        return value.item() if isinstance(value, np.generic) else value


# --- parts of several formats -----------------------------------------------------------------------------------------


def _by_our_names(fields: Iterator[tuple[Any, Any]]) -> dict[str, Any]:
    """The fields that we read; ValueError where two of them are one of ours."""
    found = {}
    for name, value in fields:
        ours = _OURS.get(name) if type(name) is str else None
        if ours in found:
            raise ValueError(f"has {ours} twice, once as {name}")
        if ours:
            found[ours] = value
    return found


def _plain(value: Any) -> Any:
    """A value of a pickle, its array made."""
    if isinstance(value, PickledArray):
        _checked(value.check())
        return value.array()
    return plain_bytes(value) if isinstance(value, PickledBytes) else value


def _text(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _unpacked(value: bytes) -> Any:
    """A value of msgpack, with arrays and numbers as the package msgpack-numpy packs them."""

    def array_or_number(found: dict[Any, Any]) -> Any:
        if b"nd" not in found:
            return found
        if not re.fullmatch(r"[<>|]([fiu][1248]|b1)", str(found.get(b"type"))):
            raise ValueError(f"holds an array of {shown(found.get(b'type'))}, which are no numbers")
        array = np.frombuffer(found[b"data"], found[b"type"])
        array = array.astype(array.dtype.newbyteorder("="))
        return array.reshape(found[b"shape"]) if found[b"nd"] else array.item()

    try:
        return msgpack.unpackb(value, object_hook=array_or_number)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"is no msgpack, or is torn: {printable(error)[:200]}") from error


def _read_json(data: bytes) -> dict[str, Any]:
    _checked(len(data))
    return _by_our_names(parse_json(data, "its text").items())


def _read_span(stream: BinaryIO, place: Place) -> bytes:
    stream.seek(place.offset)
    data = stream.read(_checked(place.length))
    if len(data) != place.length or zlib.crc32(data) != place.crc32:
        raise ValueError("has changed since it was indexed: start again")
    return data


def _checked(length: int) -> int:
    if length > _LONGEST_ROW:
        raise ValueError(f"has {length} bytes, more than {_LONGEST_ROW}")
    return length


def _digest_file(path: Path, digest: "hashlib._Hash") -> None:
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)


def _state(found: os.stat_result) -> str:
    return f"{found.st_size} {found.st_mtime_ns}"
