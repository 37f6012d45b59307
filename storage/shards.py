"""Shards: deterministic WebDataset tars of samples, with the byte range of each sample in its tar.

docs/formats.md specifies the layout. tarfile writes it, and webdataset can read it. This module parses tar headers
itself, because training reads a sample with one pread at any offset. tarfile and webdataset cannot do this.
"""

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from storage.sample import BadSample, Sample, from_members, to_members

SHARD_VERSION = 1
EXTENSIONS = ("jpg", "json", "mp")  # in this order within a sample
_BLOCK = 512  # bytes; headers and contents of a tar begin at multiples of it
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+=-]*")  # no dot, because WebDataset ends the key at the first one
_ZEROS = bytes(_BLOCK)


@dataclass(frozen=True, slots=True)
class Span:
    """Byte range of a sample in its tar, from its first member's header to the end of its last member's padding."""

    key: str
    offset: int
    length: int


def write_shard(samples: Iterable[Sample], file: Path) -> list[Span]:
    """Write samples to a tar, in order, and return their spans. Equal samples give equal bytes.

    Raises ValueError if a key occurs twice or cannot be part of a member's name.
    """
    import tarfile

    spans = []
    seen = set()
    # The same bytes as webdataset's TarWriter, which imports torch (480 MB of memory).
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
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
    return spans


def read_samples(data: bytes, spans: Iterable[Span], name: str) -> Iterator[Sample | BadSample]:
    """Yield the samples of a tar at the given spans, with a BadSample in place of each invalid sample.

    Raises ValueError, naming the member and its offset, if a span is not exactly one sample. `name` is for error
    messages.
    """
    for span in spans:
        try:
            yield read_span(data[span.offset : span.offset + span.length], f"{name} at byte {span.offset}")
        except BadSample as error:
            yield error


def read_span(data: bytes, name: str = "the span") -> Sample:
    """Decode a sample from the bytes of its Span. Raises ValueError if they are not exactly one valid sample."""
    key, ranges = span_members(data, name)
    view = memoryview(data)
    try:
        return from_members(key, {extension: view[start:end] for extension, (start, end) in ranges.items()})
    except BadSample as error:
        raise BadSample(f"{name}: {error}; write the shard again", key) from error


def span_members(data: bytes, name: str = "the span") -> tuple[str, dict[str, tuple[int, int]]]:
    """Return a sample's key, and the start and the end of each member's content, keyed by extension.

    Raises ValueError, naming the member and its offset, if the span does not have exactly one sample.
    """
    members, position = {}, 0
    while position < len(data):
        header = data[position : position + _BLOCK]
        if header == _ZEROS:
            raise ValueError(f"{name}: zeros at byte {position}, where a member should begin; rebuild the index")
        kind, member, size = _parse_header(header, name, position)
        start = position + _BLOCK
        end = start + size
        padded_end = end + -size % _BLOCK
        if padded_end > len(data):
            raise ValueError(
                f"{name} is truncated: member {member!r} at byte {position} should end at byte {padded_end}, but the "
                f"data ends at {len(data)}; delete it and write the shard again"
            )
        if kind not in (b"0", b"\0"):
            raise ValueError(f"{name}: {member!r} at byte {position} is not a file (tar type {kind!r}); repack the tar")
        key, _, extension = member.partition(".")
        if extension not in EXTENSIONS or not _KEY.fullmatch(key):
            raise ValueError(
                f"{name}: member {member!r} at byte {position} belongs to no sample (KEY.jpg, KEY.json, KEY.mp); "
                "write the shard again without it"
            )
        if (key, extension) in members:
            raise ValueError(f"{name}: member {member} at byte {position} occurs twice; write the shard again")
        members[key, extension] = start, end
        position = padded_end
    keys = {key for key, _ in members}
    if len(keys) != 1:
        raise ValueError(f"{name}: {len(data)} bytes hold {len(keys)} samples, not one; rebuild the index")
    return keys.pop(), {extension: content for (_, extension), content in members.items()}


def _octal(field: bytes) -> int:
    """Parse an octal number of a tar header. Unlike int(), this raises ValueError for signs and underscores."""
    digits = field.strip(b" \0")
    if not digits.isdigit():
        raise ValueError(f"{field!r} is not an octal number")
    return int(digits, 8)


def _parse_header(header: bytes, name: str, position: int) -> tuple[bytes, str, int]:
    """Return the type, name and size in bytes of a tar member. `name` and `position` are for error messages."""
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
