"""Files that carry the sha256 of their own bytes, so that a changed bit is seen in what nothing else names.

The digest is 64 hex digits in the file; where it stands, 64 zeros are hashed in its place. docs/formats.md says which
files carry one, and which digest holds each of the others.
"""

import hashlib
import mmap

OWN_SHA256 = "own_sha256"  # of a JSON object, and of the key-value metadata of a Parquet file
BLANK = "0" * 64
# Before the digits: as json.dumps writes it, and as the footer of a Parquet file has it (Thrift's compact protocol).
_MARKS = (f'"{OWN_SHA256}": "'.encode(), f"{OWN_SHA256}\x18@".encode())


def seal(data: bytearray | mmap.mmap) -> None:
    """Put the digest where BLANK stands for it; everything else is written already."""
    place = _place(data)
    if place is None:
        raise AssertionError(f"no {OWN_SHA256} is in these {len(data)} bytes")
    data[place : place + len(BLANK)] = _digest(data, place)


def is_whole(data: bytes | bytearray | mmap.mmap) -> bool:
    """Whether these are the bytes that were sealed: all, in the same order, and none changed."""
    place = _place(data)
    return place is not None and data[place : place + len(BLANK)] == _digest(data, place)


def _place(data: bytes | bytearray | mmap.mmap) -> int | None:
    found = [at + len(mark) for mark in _MARKS if (at := data.rfind(mark)) >= 0]
    return max(found, default=None)


def _digest(data: bytes | bytearray | mmap.mmap, place: int) -> bytes:
    sha256 = hashlib.sha256()
    with memoryview(data) as view, view[:place] as before, view[place + len(BLANK) :] as after:
        for part in (before, BLANK.encode(), after):
            sha256.update(part)
    return sha256.hexdigest().encode()
