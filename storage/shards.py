"""One shard: a deterministic WebDataset tar of Samples, and the offset of each Sample in it.

The layout is a contract, docs/formats.md. tarfile writes it, and webdataset can read it. The headers are parsed here,
because training reads one sample with one pread at a random offset, which tarfile and webdataset cannot do.
"""

import io
import itertools
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from storage.sample import BadSample, Sample, from_members, to_members

SHARD_VERSION = 1
EXTENSIONS = ("jpg", "json", "mp")  # in this order within a sample
_BLOCK = 512  # of a tar: headers and contents begin at multiples of it
_RECORD = 10240  # a tar is padded to a multiple of it
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+=-]*")  # no dot: WebDataset ends the key at the first one
_ZEROS = bytes(_BLOCK)


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a sample: from the first tar header of its members to the end of the last one's padding."""

    key: str
    offset: int
    length: int


def write_shard(samples: Iterable[Sample], file: Path) -> list[Span]:
    """Write the samples, in this order, as one tar. Its bytes depend on nothing else; it appears when it is complete.

    ValueError names a key that occurs twice or cannot be part of a member's name.
    """
    import tarfile

    spans = []
    seen = set()
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        # As webdataset's TarWriter does it, byte for byte; importing that imports torch, which takes 480 MB here.
        with temporary.open("wb") as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in samples:
                if not _KEY.fullmatch(sample.key):
                    raise ValueError(f"{file}: {sample.key!r} cannot be a sample's key: use letters, digits, _ + = -")
                if sample.key in seen:
                    raise ValueError(f"{file}: key {sample.key} occurs twice; keep one of the two rows in this shard")
                seen.add(sample.key)
                offset = tar.offset
                for extension, content in to_members(sample).items():  # jpg, json, mp: sorted
                    member = tarfile.TarInfo(f"{sample.key}.{extension}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                spans.append(Span(sample.key, offset, tar.offset - offset))
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return spans


def read_shard(data: bytes, name: str = "the shard") -> Iterator[Sample | BadSample]:
    """The samples of one tar, in order, each or why it is invalid. `name` names the bytes in messages.

    ValueError names the file, the member and its offset if the tar is torn or not in our layout.
    """
    if not data or len(data) % _RECORD:
        raise ValueError(
            f"{name} is torn: {len(data)} bytes are no multiple of {_RECORD}; delete it and write the shard again"
        )
    seen = set()
    for key, offset, ranges in _groups(data, name, whole=True):
        if key in seen:
            raise ValueError(f"{name}: key {key} occurs twice, again at byte {offset}; write the shard again")
        seen.add(key)
        try:
            yield _sample(data, key, ranges, name)
        except BadSample as error:
            yield error


def read_span(data: bytes, name: str = "the span") -> Sample:
    """The sample whose bytes [offset, offset + length) are given; ValueError if they are anything else."""
    return _sample(data, *span_members(data, name), name)


_Ranges = dict[str, tuple[int, int]]  # extension -> start and end of the member's content


def span_members(data: bytes, name: str = "the span") -> tuple[str, _Ranges]:
    """The key of such a sample, and where its members are in the bytes; errors as in read_span."""
    groups = list(_groups(data, name))
    if len(groups) != 1:
        raise ValueError(f"{name}: {len(data)} bytes hold {len(groups)} samples, not one; rebuild the index")
    return groups[0][0], groups[0][2]


def _sample(data: bytes, key: str, ranges: _Ranges, name: str) -> Sample:
    view = memoryview(data)
    try:
        return from_members(key, {extension: view[start:end] for extension, (start, end) in ranges.items()})
    except BadSample as error:
        raise BadSample(f"{name}: {error}; write the shard again", key) from error


def _groups(data: bytes, name: str, whole: bool = False) -> Iterator[tuple[str, int, _Ranges]]:
    """Per sample its key, the offset of its first header, and its members."""
    for key, members in itertools.groupby(_members(data, name, whole), key=lambda member: member[0]):
        offsets, ranges = [], {}
        for _, extension, offset, start, end in members:
            if extension in ranges:
                raise ValueError(
                    f"{name}: member {key}.{extension} at byte {offset} occurs twice; write the shard again"
                )
            offsets.append(offset)
            ranges[extension] = start, end
        yield key, offsets[0], ranges


def _members(data: bytes, name: str, whole: bool) -> Iterator[tuple[str, str, int, int, int]]:
    """Per member its key and extension, the offset of its header, and the start and end of its content.

    whole: the data must end like a tar, with two blocks of zeros and nothing after them but zeros.
    """
    position = 0
    while position < len(data):
        header = data[position : position + _BLOCK]
        if header == _ZEROS:
            break
        kind, member, size = _header(header, name, position)
        start = position + _BLOCK
        end = start + size
        padded_end = end + -size % _BLOCK
        if padded_end > len(data):
            raise ValueError(
                f"{name} is torn: member {member!r} at byte {position} should end at byte {padded_end}, the data ends "
                f"at {len(data)}; delete it and write the shard again"
            )
        if kind not in (b"0", b"\0"):
            raise ValueError(f"{name}: {member!r} at byte {position} is no file (tar type {kind!r}); repack the tar")
        key, _, extension = member.partition(".")
        if extension not in EXTENSIONS or not _KEY.fullmatch(key):
            raise ValueError(
                f"{name}: member {member!r} at byte {position} belongs to no sample (KEY.jpg, KEY.json, KEY.mp); "
                "write the shard again without it"
            )
        yield key, extension, position, start, end
        position = padded_end
    if whole and (len(data) - position < 2 * _BLOCK or data[position:].count(0) != len(data) - position):
        raise ValueError(f"{name} is torn: no end of archive at byte {position}; delete it and write the shard again")
    if not whole and position != len(data):
        raise ValueError(f"{name}: zeros at byte {position}, where a member should begin; rebuild the index")


def _octal(field: bytes) -> int:
    """A number of a tar header; ValueError if it is not one. int() alone would accept a sign and underscores."""
    digits = field.strip(b" \0")
    if not digits.isdigit():
        raise ValueError(f"{field!r} is not an octal number")
    return int(digits, 8)


def _header(header: bytes, name: str, position: int) -> tuple[bytes, str, int]:
    """Type, name and size of the member whose header this is."""
    try:
        checksum = _octal(header[148:156])
        size = _octal(header[124:136])
        member = header[:100].partition(b"\0")[0].decode("ascii")
    except ValueError as error:
        raise ValueError(f"{name}: no tar header at byte {position}; delete it and write the shard again") from error
    # The checksum counts its own eight bytes as spaces.
    if len(header) != _BLOCK or sum(header) - sum(header[148:156]) + 8 * 32 != checksum:
        raise ValueError(f"{name}: the tar header at byte {position} is damaged; delete it and write the shard again")
    if header[345]:
        raise ValueError(f"{name}: the name of the member at byte {position} is longer than 100 bytes; repack the tar")
    return header[156:157], member, size
