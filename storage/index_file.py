"""The numbers of a large index as one file of this machine, which all its processes map: ranks, workers, trainings.

It is in TMPDIR, and made of the snapshot again whenever it is missing or damaged. A file that was not opened for a day
is removed when the next one is made. Who has it mapped still reads it.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

SMALLEST = 2**20  # samples; each process holds a smaller index in its own memory
FIELDS = {"offset": np.dtype("<i8"), "length": np.dtype("<i4"), "shard": np.dtype("<u4")}  # one array after the other
BYTES_A_SAMPLE = sum(dtype.itemsize for dtype in FIELDS.values())
_DIGEST = 64  # hex digits before the arrays: sha256 of version, snapshot and arrays
_VERSION = 1
_UNUSED = 86400.0  # seconds

Arrays = Sequence[np.ndarray]  # in the order of FIELDS, all of one length, read-only


def shared(snapshot: str, samples: int, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of a snapshot's index, from the file that one process of this machine makes of make().

    If there can be no file, as on a full disk, they are of this process alone, and that is printed.
    """
    if samples < SMALLEST:
        return make()
    try:
        file = _folder() / f"{snapshot}.index"
        if found := _mapped(file, snapshot, samples):
            return found
        lock = _locked(file.with_suffix(".lock"))
    except OSError as error:
        return _alone(make(), error)
    with lock:
        if found := _mapped(file, snapshot, samples):  # another process has made it meanwhile
            return found
        made = make()
        try:
            _write(file, snapshot, made)
        except OSError as error:
            return _alone(made, error)
        return _mapped(file, snapshot, samples) or made


def _alone(made: Arrays, error: OSError) -> Arrays:
    megabytes = sum(array.nbytes for array in made) / 1e6
    print(
        f"this process holds an index of {megabytes:,.0f} MB of its own, as it cannot share a file: {error}. "
        "Set TMPDIR to a folder with more space that is yours",
        file=sys.stderr,
        flush=True,
    )
    return made


def _folder() -> Path:
    """Of this user alone: others could change what is read."""
    folder = Path(tempfile.gettempdir(), f"vlbert-index-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o170022 != 0o040000:
        raise PermissionError(f"{folder} is not a folder that only this user can write to; remove it")
    return folder


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)  # and so no longer locked


def _locked(file: Path) -> contextlib.AbstractContextManager[None]:
    """Locked until its end; the end of a process that was killed counts, too."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.utime(descriptor)  # it is in use
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return _closing(descriptor)


def _mapped(file: Path, snapshot: str, samples: int) -> Arrays | None:
    """The arrays of the file; None if it is missing, damaged or of something else."""
    try:
        with file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size != _DIGEST + BYTES_A_SAMPLE * samples:
                return None
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return None
    arrays, start = [], _DIGEST
    for dtype in FIELDS.values():
        arrays.append(np.frombuffer(data, dtype, samples, start))
        start += dtype.itemsize * samples
    if data[:_DIGEST] != _digest(snapshot, arrays):
        return None
    with contextlib.suppress(OSError):  # removed since; the arrays stay
        os.utime(file)
    return arrays


def _write(file: Path, snapshot: str, arrays: Arrays) -> None:
    _remove_unused(file.parent)
    temporary = file.with_name(f"{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as out:
            out.write(_digest(snapshot, arrays))
            for array, dtype in zip(arrays, FIELDS.values(), strict=True):
                assert array.dtype == dtype, f"{array.dtype}, not {dtype}"
                out.write(memoryview(array).cast("B"))
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_unused(folder: Path) -> None:
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes them, too
            if time.time() - file.stat().st_mtime > _UNUSED:
                file.unlink()


def _digest(snapshot: str, arrays: Arrays) -> bytes:
    sha256 = hashlib.sha256(f"index {_VERSION} of {snapshot}\n".encode())
    for array in arrays:
        sha256.update(memoryview(array).cast("B"))
    return sha256.hexdigest().encode()
