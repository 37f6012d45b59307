"""Digests inside files: some files contain the sha256 of their own bytes, so that any change is detected.

The digest is 64 hex digits, computed with 64 zeros in its place. docs/formats.md lists the files that contain one, and
says where the digests of all other files are stored.
"""

import hashlib
import io
import mmap
from pathlib import Path

from storage.safe_json import short_repr

OWN_SHA256 = "own_sha256"  # key in a JSON object, and in the key-value metadata of a Parquet file
BLANK = "0" * 64
# The bytes before the digits, as json.dumps writes them and as in a Parquet footer (Thrift's compact protocol).
_MARKS = (f'"{OWN_SHA256}": "'.encode(), f"{OWN_SHA256}\x18@".encode())


def sha256_of(file: Path | io.BufferedReader) -> str:
    """Return the sha256 of a file's bytes, as hex digits."""
    if isinstance(file, Path):
        with file.open("rb") as stream:
            return sha256_of(stream)
    return hashlib.file_digest(file, "sha256").hexdigest()


def check_version(actual: object, version: int, location: str) -> None:
    """Raise ValueError, naming `location`, if a file's version is not the one that this code reads."""
    if type(actual) is not int or actual != version:
        raise ValueError(
            f"{location} has version {short_repr(actual)}, but this code reads {version}: use the code that wrote it"
        )


def write_digest(data: bytearray | mmap.mmap) -> None:
    """Write the digest of `data` over its placeholder, BLANK. Call this last, when all other bytes are final."""
    offset = _digest_offset(data)
    assert offset is not None, f"there is no {OWN_SHA256} in these {len(data)} bytes"
    data[offset : offset + len(BLANK)] = _digest(data, offset)


def has_valid_digest(data: bytes | bytearray | mmap.mmap) -> bool:
    """Return True if the bytes contain a digest and have not changed since it was written."""
    offset = _digest_offset(data)
    return offset is not None and data[offset : offset + len(BLANK)] == _digest(data, offset)


def _digest_offset(data: bytes | bytearray | mmap.mmap) -> int | None:
    offsets = [at + len(mark) for mark in _MARKS if (at := data.rfind(mark)) >= 0]
    return max(offsets, default=None)


def _digest(data: bytes | bytearray | mmap.mmap, offset: int) -> bytes:
    sha256 = hashlib.sha256()
    with memoryview(data) as view, view[:offset] as before, view[offset + len(BLANK) :] as after:
        for part in (before, BLANK.encode(), after):
            sha256.update(part)
    return sha256.hexdigest().encode()
