"""Recognises files by their first bytes, so that an error says what a file is instead of what it lacks."""

import re
from collections.abc import Collection
from pathlib import Path

START_BYTES = 512  # of a file; enough for this module
_FOREIGN = (  # what a file is, its first bytes, and what to do
    ("a Git LFS pointer", rb"version https://git-lfs", "run git lfs pull in its repository"),
    ("a git-annex pointer", rb"/annex/objects/", "run git annex get in its repository"),
    ("a web page", rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|\?xml|!--|error\b)", "download the file behind it"),
    ("an Office document", rb".{30}\[Content_Types\]\.xml", "save it as CSV in UTF-8"),
    ("packed with gzip", rb"\x1f\x8b", "unpack it with gunzip"),
    ("packed with bzip2", rb"BZh[1-9]1AY&SY", "unpack it with bunzip2"),
    ("packed with xz", rb"\xfd7zXZ\0", "unpack it with unxz"),
    ("packed with zstd", rb"\x28\xb5\x2f\xfd", "unpack it with unzstd"),
    ("packed with zip", rb"PK\x03\x04", "unpack it with unzip"),
    ("packed with 7z", rb"7z\xbc\xaf\x27\x1c", "unpack it with 7z x"),
    ("packed with tar", rb".{257}ustar", "unpack it with tar -xf"),
)
_IMAGES = {  # formats that are not always read
    "AVIF": rb".{4}ftyp(avi[fs]|m[is]f1.{4}.{0,24}avi[fs])",
    "HEIF": rb".{4}ftyp(he[iv][cmsx]|m[is]f1)",
    "video": rb".{4}ftyp|\x1aE\xdf\xa3|RIFF.{4}AVI ",
    "JPEG 2000": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "PDF": rb"%PDF",
    "SVG": rb"[^a-z]*(<\?xml.*|<!DOCTYPE.*|<!--.*)?<svg",
}


def describe_foreign(start: bytes, reads: Collection[str] = ()) -> str:
    """Return what a file is and what to do, beginning with "is", or "" if it is no pointer, web page or packed file.

    Args:
        start: the first START_BYTES bytes of the file, or more
        reads: what the caller reads itself, such as gzip
    """
    start = start[:START_BYTES]
    for name, pattern, hint in _FOREIGN:
        if name.rpartition(" ")[2] not in reads and re.match(pattern, start, re.DOTALL | re.IGNORECASE):
            return f"is {name}; {hint}"
    return ""


def check_start(file: Path | str, start: bytes, reads: Collection[str] = ()) -> None:
    """Raise ValueError, naming the file, if it is foreign (`describe_foreign`)."""
    if problem := describe_foreign(start, reads):
        raise ValueError(f"{file} {problem}")


def read_file(file: Path) -> bytes:
    """Return the bytes of a file. Raises OSError, or ValueError if it is foreign (`describe_foreign`)."""
    check_start(file, data := file.read_bytes())
    return data


def image_format(start: bytes) -> str:
    """Return the name of the format of a file that is not always read as an image, or ""."""
    start = start[:START_BYTES]
    return next((name for name, pattern in _IMAGES.items() if re.match(pattern, start, re.DOTALL)), "")
