"""One shard: a deterministic WebDataset tar of Samples, and the offset of each Sample in it.

The layout is a contract, docs/formats.md. tarfile writes it, and webdataset can read it. The headers are parsed here,
because training reads one sample with one pread at a random offset, which tarfile and webdataset cannot do.
"""

import contextlib
import io
import mmap
import os
import re
import secrets
import zlib
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


def read_shard(source: bytes | Path, name: str = "the shard") -> Iterator[Sample | BadSample]:
    """The samples of one tar, in order, each or why it is invalid. `name` names the bytes in messages.

    ValueError names the file, the member and its offset if the tar is torn or not in our layout.
    """
    if isinstance(source, bytes):
        yield from _samples(source, name)
    else:
        with _mapped(source) as data:
            yield from _samples(data, str(source))


def index_shard(file: Path) -> list[Span]:
    """The span of each sample of a WebDataset tar in our layout; errors as in read_shard."""
    with _mapped(file) as data:
        return [Span(key, start, end - start) for key, start, end, _ in _groups(data, str(file))]


def read_span(data: bytes, name: str = "the span") -> Sample:
    """The sample whose bytes [offset, offset + length) are given; ValueError if they are anything else."""
    key, ranges = _span(data, name)
    members = {extension: data[start:end] for extension, (start, end) in ranges.items() if extension != "mp"}
    if "mp" in ranges:  # most of the bytes: unpacking copies them, and one copy is enough
        members["mp"] = memoryview(data)[slice(*ranges["mp"])]
    return _sample(key, members, name)


def span_members(data: bytes, name: str = "the span") -> tuple[str, dict[str, bytes]]:
    """The key of such a sample and its members, extension -> content; errors as in read_span."""
    key, ranges = _span(data, name)
    return key, {extension: data[start:end] for extension, (start, end) in ranges.items()}


def _span(data: bytes, name: str) -> tuple[str, dict[str, tuple[int, int]]]:
    groups = list(_group(_members(data, name), name))
    if len(groups) != 1 or groups[0][2] != len(data):
        raise ValueError(f"{name}: {len(data)} bytes hold {len(groups)} samples, not one; rebuild the index")
    return groups[0][0], groups[0][3]


@contextlib.contextmanager
def _mapped(file: Path) -> Iterator[bytes | mmap.mmap]:
    """A file as memory; slices of it are copies, so they outlive it."""
    with file.open("rb") as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            yield b""  # which mmap refuses
        else:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data


def _samples(data: bytes | mmap.mmap, name: str) -> Iterator[Sample | BadSample]:
    for key, _, _, members in _groups(data, name):
        try:
            sample = _sample(key, {extension: data[start:end] for extension, (start, end) in members.items()}, name)
        except BadSample as error:
            sample = error
        yield sample


def _sample(key: str, members: dict[str, bytes | memoryview], name: str) -> Sample:
    try:
        return from_members(key, members)
    except BadSample as error:
        raise BadSample(f"{name}: {error}; write the shard again", key) from error


# key, offset of its first header, end of its last padded member, extension -> (start, end) of the content
_Group = tuple[str, int, int, dict[str, tuple[int, int]]]


def _groups(data: bytes | mmap.mmap, name: str) -> Iterator[_Group]:
    """The samples of a whole tar."""
    if not data or len(data) % _RECORD:
        raise ValueError(
            f"{name} is torn: {len(data)} bytes are no multiple of {_RECORD}; delete it and write the shard again"
        )
    seen = set()
    for group in _group(_members(data, name, whole=True), name):
        if group[0] in seen:
            raise ValueError(f"{name}: key {group[0]} occurs twice, again at byte {group[1]}; write the shard again")
        seen.add(group[0])
        yield group


def _group(members: Iterator[tuple[str, int, int, int, int]], name: str) -> Iterator[_Group]:
    """Consecutive members of one key, together."""
    current = None
    for member, offset, start, end, padded_end in members:
        key, _, extension = member.partition(".")
        if extension not in EXTENSIONS or not _KEY.fullmatch(key):
            raise ValueError(
                f"{name}: member {member!r} at byte {offset} belongs to no sample (KEY.jpg, KEY.json, KEY.mp); "
                "write the shard again without it"
            )
        if current is not None and current[0] == key:
            if extension in current[3]:
                raise ValueError(f"{name}: member {member} at byte {offset} occurs twice; write the shard again")
            current[3][extension] = (start, end)
            current = (key, current[1], padded_end, current[3])
        else:
            if current is not None:
                yield current
            current = (key, offset, padded_end, {extension: (start, end)})
    if current is not None:
        yield current


def _members(data: bytes | mmap.mmap, name: str, whole: bool = False) -> Iterator[tuple[str, int, int, int, int]]:
    """Per member its name, the offset of its header, start and end of its content, and where its padding ends.

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
        yield member, position, start, end, padded_end
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


def _sum(header: bytes) -> int:
    """The sum of the bytes of a block, 20 times faster than sum(): training reads three headers a sample.

    The low half of Adler-32 is one more than the sum modulo 65,521, which the bytes of half a block cannot reach.
    """
    half = _BLOCK // 2
    return (zlib.adler32(header[:half]) & 0xFFFF) + (zlib.adler32(header[half:]) & 0xFFFF) - 2


def _header(header: bytes, name: str, position: int) -> tuple[bytes, str, int]:
    """Type, name and size of the member whose header this is."""
    try:
        checksum = _octal(header[148:156])
        size = _octal(header[124:136])
        member = header[:100].partition(b"\0")[0].decode("ascii")
    except ValueError as error:
        raise ValueError(f"{name}: no tar header at byte {position}; delete it and write the shard again") from error
    # The checksum counts its own eight bytes as spaces.
    if len(header) != _BLOCK or _sum(header) - sum(header[148:156]) + 8 * 32 != checksum:
        raise ValueError(f"{name}: the tar header at byte {position} is damaged; delete it and write the shard again")
    if header[345]:
        raise ValueError(f"{name}: the name of the member at byte {position} is longer than 100 bytes; repack the tar")
    return header[156:157], member, size
