"""Files as they are found in the place of data: pointers, web pages and packed files."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import members

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 133466304\n"
ANNEX = b"/annex/objects/MD5E-s31390--f50d7ac4c6b9031379986bc362fcefb6.json\n"


def zip_of(name: str, data: bytes = b"a\tb\n" * 9) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, data)
    return out.getvalue()


def tar_of(name: str, data: bytes = b"a\tb\n" * 9) -> bytes:
    return members.tar_of([(name, data)], format=tarfile.USTAR_FORMAT)


FOREIGN = {  # what stands in a file, and what an error must say
    "lfs": (LFS, "is a Git LFS pointer.*git lfs pull"),
    "annex": (ANNEX, "is a git-annex pointer.*git annex get"),
    "page": (b"\xef\xbb\xbf\n <!DOCTYPE html><html><title>404</title>", "is a web page"),
    "gzip": (gzip.compress(b"a\tb\n" * 9, mtime=0), "is packed with gzip; unpack it with gunzip"),
    "bzip2": (bz2.compress(b"a\tb\n" * 9), "is packed with bzip2; unpack it with bunzip2"),
    "xz": (lzma.compress(b"a\tb\n" * 9), "is packed with xz; unpack it with unxz"),
    "zip": (zip_of("a.tsv"), "is packed with zip; unpack it with unzip"),
    "excel": (zip_of("[Content_Types].xml"), "is an Office document.*save it as CSV"),
    "tar": (tar_of("a.tsv"), "is packed with tar; unpack it with tar -xf"),
}
