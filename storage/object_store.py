"""Named, immutable byte strings below one root: a local folder or `s3://bucket/prefix`. The only user of boto3.

A put is atomic: readers see the whole object or none. The commit of a shard needs `put(..., if_absent=True)`: of any
number of writers, on any number of machines, exactly one gets True.
"""

import contextlib
import functools
import io
import os
import random
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO

from storage.programs import require
from storage.redact import redacted

# Temporary files of `put`, `check` and `now` in a folder: a name, the process and a random number.
_TEMPORARY = re.compile(r"\.(.+\.|probe-)\d+-[0-9a-f]{8}")
_REQUESTS = 7  # attempts of one request, by botocore: if one in ten fails, one in ten million fails for good
_FOLDERS = 100  # attempts to make a folder that others remove at the same time
_ATTEMPTS = 5  # of a conditional put that S3 answers with 409, and of a download that ends early
_PIECE = 2**24  # bytes of an object that a stream fetches at a time
# Servers do not tell wrong credentials, expired ones and those without a right from each other.
_HINT = (
    "Check the network, AWS_ENDPOINT_URL, that the bucket exists, and the credentials (AWS_ACCESS_KEY_ID, ~/.aws), "
    "whose session token may have expired or lack a right (s3:PutObject for writers), then run again: what is "
    "committed stays"
)

# What can be put.
Content = bytes | Path


class ObjectMissing(KeyError):
    """There is no object of this name."""

    def __str__(self) -> str:
        return self.args[0]  # KeyError would print the message in quotes


class StorageUnreachable(ConnectionError):
    """The root cannot be used, a disk is full, or the server refused; http_status: the status of its answer."""

    def __init__(self, message: str, http_status: int | None = None):
        super().__init__(message)
        self.http_status = http_status


@dataclass(frozen=True)
class ObjectInfo:
    """path is relative to the root, size in bytes, modified in seconds since 1970."""

    path: str
    size: int
    modified: float


def _checked(path: str) -> str:
    """The path itself, if it stays below the root and `list` would show it."""
    if not path or "\\" in path or "\0" in path or any(not part or part.startswith(".") for part in path.split("/")):
        raise ValueError(
            f"{path!r} is not a valid name of an object: it must be relative to the root, with no empty part and "
            "no part that begins with a dot"
        )
    return path


def _checked_prefix(prefix: str) -> str:
    if prefix:
        _checked(prefix.removesuffix("/"))
    return prefix


def _hidden(path: str) -> bool:
    """Whether some part begins with a dot: temporary files, and files of other programs."""
    return path.startswith(".") or "/." in path


class LocalStore:
    """Objects as files of one folder. S3Store has the same methods.

    Paths are relative with `/` between the parts; no part begins with a dot (ValueError).
    """

    def __init__(self, root: str):
        if not root:
            raise ValueError("the root of the storage is empty: name a folder or s3://bucket/prefix")
        self.root = root
        self._folder = Path(root).expanduser().absolute()

    def check(self, write: bool) -> None:
        """Make the folder, write one file into it and link it as a commit does; StorageUnreachable says what failed.

        Without `write`, only list it.
        """
        if not write:
            try:
                os.scandir(self._folder).close()
            except OSError as error:
                raise StorageUnreachable(
                    f"cannot read the folder {self._folder}: {error}. Name the root to which the data were written"
                ) from error
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._probe() as probe, self._probe() as other:
                other.unlink()
                os.link(probe, other)
        except OSError as error:
            raise StorageUnreachable(
                f"cannot write to the folder {self._folder}: {error}. Make it writable for this user (on a file system "
                "with hard links), or name another root"
            ) from error

    @contextlib.contextmanager
    def _probe(self) -> Iterator[Path]:
        """A new empty file of the folder."""
        probe = self._folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"")
            yield probe
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
        """Write the object atomically; False (only with if_absent) if it existed already.

        StorageUnreachable, with nothing changed, if it cannot be written.
        """
        with _changing(file := self._file(path)):
            return self._put(file, data, if_absent)

    def _put(self, file: Path, data: Content, if_absent: bool) -> bool:
        if if_absent and file.exists():
            return False
        # In the same folder, so that the rename stays within one file system; with a dot, so that `list` skips it.
        temporary = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with _opened_new(temporary) as out:
                if isinstance(data, Path):
                    with data.open("rb") as source:
                        shutil.copyfileobj(source, out, 1 << 20)
                else:
                    out.write(data)
                out.flush()
                os.fsync(out.fileno())
            if if_absent:
                try:
                    os.link(temporary, file)  # unlike a rename, it fails if the name is taken
                except FileExistsError:
                    return False
            else:
                os.replace(temporary, file)
        finally:
            self._remove(temporary)
        with contextlib.suppress(FileNotFoundError):  # the file was removed already, and its folder with it
            _sync_folder(file.parent)
        return True

    def get(self, path: str) -> bytes:
        """The whole object; ObjectMissing if there is none, StorageUnreachable if it cannot be read."""
        with self._reading(path) as file:
            return file.read()

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; errors as `get`, and ValueError if the object ends before."""
        with self._reading(path) as file:
            data = os.pread(file.fileno(), length, offset)
        return _whole_range(data, self.uri(path), offset, length)

    def exists(self, path: str) -> bool:
        """Return whether the object exists."""
        return self._file(path).is_file()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose path begins with `prefix` (as a string, not as a folder), sorted by path."""
        above = _checked_prefix(prefix).rpartition("/")[0]  # the deepest folder that contains every match
        found = []

        def refuse(error: OSError) -> None:  # os.walk would skip what it cannot read, as if its objects did not exist
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise StorageUnreachable(
                    f"cannot list the folder {error.filename}: {error}. Make it readable for this user"
                ) from error

        for folder, folders, names in os.walk(self._folder / above, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            relative = os.path.relpath(folder, self._folder)
            for name in names:
                path = name if relative == "." else f"{relative}/{name}"
                if not name.startswith(".") and path.startswith(prefix):
                    found.append(path)
        for path in sorted(found):
            try:
                status = os.stat(self._folder / path)
            except FileNotFoundError:
                continue  # deleted since the walk
            yield ObjectInfo(path, status.st_size, status.st_mtime)

    def delete(self, path: str) -> None:
        """Remove the object; no error if it does not exist."""
        self._remove(self._file(path))

    def local_path(self, path: str) -> Path | None:
        """The object as a file of this machine, None on S3."""
        return self._file(path)

    def uri(self, path: str = "") -> str:
        """The full name, for messages and reports."""
        return str(self._file(path) if path else self._folder)

    def now(self) -> float:
        """Seconds since 1970 by the clock that dates the objects; by this machine's if a folder is not writable."""
        try:
            with self._probe() as probe:
                return probe.stat().st_mtime
        except OSError:  # a reader may not write, and `gc` must work on full disks
            return time.time()

    def leftovers(self) -> Iterator[ObjectInfo]:
        """Temporary files of killed writers, and of active ones; only their age tells which. A bucket has none.

        Their paths are those of files of this machine.
        """
        for file in self._folder.rglob(".*"):
            if _TEMPORARY.fullmatch(file.name):
                with contextlib.suppress(FileNotFoundError):  # its writer has finished since the walk
                    status = file.stat()
                    yield ObjectInfo(str(file), status.st_size, status.st_mtime)

    def _remove(self, file: Path) -> None:
        """Remove the file and, if it was the last one, its folder: a bucket has no empty folders either."""
        with _changing(file):
            try:
                file.unlink()
            except FileNotFoundError:
                return  # another writer may have just made the folder for its own file
        if file.parent != self._folder:
            with contextlib.suppress(OSError):  # it holds others
                file.parent.rmdir()

    def _file(self, path: str) -> Path:
        return self._folder / _checked(path)

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[BinaryIO]:
        """The object's file, open; ObjectMissing if there is none, StorageUnreachable if it cannot be read."""
        try:
            with self._file(path).open("rb") as file:
                yield file
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissing(f"there is no object {path} under {self.root}") from error
        except OSError as error:
            raise StorageUnreachable(
                f"cannot read {self.uri(path)}: {error}. Check its disk or file server, and make the file "
                "readable for this user"
            ) from error


@contextlib.contextmanager
def _changing(file: Path) -> Iterator[None]:
    """StorageUnreachable names a file that cannot be written or removed."""
    try:
        yield
    except OSError as error:
        raise StorageUnreachable(
            f"cannot write or remove {file}: {error}. Free disk space (`vlbert catalog gc` lists what may "
            "be deleted) or make it writable for this user, then run again: what is committed stays"
        ) from error


def _opened_new(file: Path) -> BinaryIO:
    """Make the file and the folders above it, whose entries survive a power cut."""
    for left in reversed(range(_FOLDERS)):
        made = [folder for folder in file.parents if not folder.is_dir()]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            opened = file.open("xb")
            break
        # Another process removed the last file of the folder, and the folder with it: before the file was made, or
        # while mkdir looked whether what stands there is a folder.
        except (FileNotFoundError, FileExistsError):
            if not left or file.exists():
                raise
    for folder in made:
        _sync_folder(folder.parent)
    return opened


@functools.cache
def _loader() -> Any:
    """botocore's descriptions of services, read once a process, because reading them takes 0.2 s a client."""
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _whole_range(data: bytes, where: str, offset: int, length: int) -> bytes:
    if len(data) != length:
        raise ValueError(
            f"{where} ends before byte {offset + length}: asked for {length} bytes from {offset}, got {len(data)}. "
            "The object is not the one that its index describes; write the shard again"
        )
    return data


def _endpoint() -> str:
    """The endpoint of the environment, for messages."""
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return redacted(given) if given else "the default endpoint"


class S3Store:
    """Objects in a bucket; endpoint, region and credentials as boto3 finds them (AWS_ENDPOINT_URL, ~/.aws, ...).

    Requests and downloads carry checksums only where S3 requires them.
    """

    def __init__(self, root: str):
        require("boto3", f"the root {root}")
        self.root = root
        self.bucket, _, prefix = root.removeprefix("s3://").partition("/")
        if not self.bucket:
            raise ValueError(f"{root!r} names no bucket: write s3://bucket/prefix")
        prefix = prefix.strip("/")
        self._prefix = f"{_checked(prefix)}/" if prefix else ""
        self._clients = {}  # process id -> client: a connection must not be shared with a fork

    def __reduce__(self) -> tuple:
        return S3Store, (self.root,)  # a client cannot be pickled; its settings come from the environment

    def check(self, write: bool) -> None:
        """Request the bucket, with short timeouts; StorageUnreachable names bucket, endpoint and what to do.

        With `write`, check that a conditional write of an existing object is refused. That object, `.probe`, stays
        (`list` skips it), so that later checks are one request.
        """
        with self._errors("head_bucket", ""):
            client = self._new_client(connect_timeout=3, read_timeout=5, attempts=3)
            client.head_bucket(Bucket=self.bucket)
        if write:
            self._check_conditions()

    def _check_conditions(self) -> None:
        for _ in range(2):  # the first may find no object
            try:
                self._call("put_object", ".probe", Key=f"{self._prefix}.probe", Body=b"", IfNoneMatch="*")
            except StorageUnreachable as error:
                if error.http_status in (409, 412):
                    return
                if error.http_status in (400, 501):
                    break
                raise
        raise StorageUnreachable(
            f"{_endpoint()} does not honour If-None-Match: it wrote {self.uri('.probe')} twice or refused to, so two "
            "writers could overwrite each other's commits. Use an endpoint with conditional writes"
        )

    def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
        key = self._key(path)
        if if_absent:
            return self._put_if_absent(path, data)
        if isinstance(data, bytes):
            self._call("put_object", path, Key=key, Body=data)
            return True
        with self._errors("upload", path), data.open("rb") as file:
            self._client().upload_fileobj(file, self.bucket, key)  # in parts if it is large
        return True

    def _put_if_absent(self, path: str, data: Content) -> bool:
        """One PUT with `If-None-Match: *`, repeated if S3 answers 409 because of two at the same time."""
        # Botocore repeats a request whose answer was lost, and then finds its own object; the mark identifies it.
        mark = secrets.token_hex(16)
        arguments = {"Key": self._key(path), "IfNoneMatch": "*", "Metadata": {"writer": mark}}
        for attempt in range(_ATTEMPTS):
            try:
                with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file:
                    self._call("put_object", path, Body=file, **arguments)
                return True
            except StorageUnreachable as error:
                if error.http_status == 412:
                    return self._mark_of(path) == mark
                if error.http_status != 409 or attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(0.1 * 2**attempt * (0.5 + random.random()))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _mark_of(self, path: str) -> str | None:
        try:
            return self._call("head_object", path, Key=self._key(path)).get("Metadata", {}).get("writer")
        except ObjectMissing:
            return None  # deleted since, to be made again

    def get(self, path: str) -> bytes:
        return self._read(path)

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""  # an HTTP range cannot be empty
        try:
            data = self._read(path, Range=f"bytes={offset}-{offset + length - 1}")
        except StorageUnreachable as error:
            if error.http_status != 416:
                raise
            data = b""
        return _whole_range(data, self.uri(path), offset, length)

    def exists(self, path: str) -> bool:
        try:
            self._call("head_object", path, Key=self._key(path))
        except ObjectMissing:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        whole = self._prefix + _checked_prefix(prefix)
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=whole)
        with self._errors("list_objects_v2", prefix):
            for page in pages:
                for entry in page.get("Contents", []):
                    path = entry["Key"].removeprefix(self._prefix)
                    if path and not _hidden(path):
                        yield ObjectInfo(path, entry["Size"], entry["LastModified"].timestamp())

    def delete(self, path: str) -> None:
        self._call("delete_object", path, Key=self._key(path))

    def local_path(self, path: str) -> Path | None:
        _checked(path)
        return None

    def uri(self, path: str = "") -> str:
        return f"s3://{self.bucket}/{self._prefix}{path}"

    def now(self) -> float:
        answer = self._call("head_bucket", "")
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def leftovers(self) -> Iterator[ObjectInfo]:
        return iter(())  # unfinished uploads in parts go by a lifecycle rule of the bucket: docs/clusters.md

    def _key(self, path: str) -> str:
        return self._prefix + _checked(path)

    def _client(self) -> Any:  # boto3 makes the class at run time
        if os.getpid() not in self._clients:
            self._clients = {os.getpid(): self._new_client(connect_timeout=10, read_timeout=60, attempts=_REQUESTS)}
        return self._clients[os.getpid()]

    def _new_client(self, connect_timeout: int, read_timeout: int, attempts: int) -> Any:
        import boto3
        from botocore.config import Config
        from botocore.session import Session

        config = Config(
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            retries={"mode": "standard", "total_max_attempts": attempts},
            # botocore sends checksums that S3 does not require over https as a trailer, which Ceph and others refuse.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        session = Session()
        session.register_component("data_loader", _loader())
        return boto3.session.Session(botocore_session=session).client("s3", config=config)

    def _call(self, operation: str, path: str, **arguments) -> dict:
        """One request."""
        with self._errors(operation, path):
            return getattr(self._client(), operation)(Bucket=self.bucket, **arguments)

    @contextlib.contextmanager
    def _errors(self, operation: str, path: str) -> Iterator[None]:
        """botocore's errors become ours."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, ValueError) as error:  # ValueError: an endpoint that is no URL
            answer = error.response if isinstance(error, ClientError) else {}
            if path and answer and answer["Error"]["Code"] in ("NoSuchKey", "404", "NotFound"):
                raise ObjectMissing(f"there is no object {path} under {self.root}") from error
            raise StorageUnreachable(
                f"{operation} of {self.uri(path)} at {_endpoint()} failed: {redacted(str(error))}. {_HINT}",
                answer["ResponseMetadata"]["HTTPStatusCode"] if answer else None,
            ) from error

    def _read(self, path: str, **byte_range: str) -> bytes:
        from botocore.exceptions import BotoCoreError

        for attempt in range(_ATTEMPTS):
            body = self._call("get_object", path, Key=self._key(path), **byte_range)["Body"]
            try:
                return body.read()
            except BotoCoreError as error:  # botocore repeats requests, but not after a body that ends early
                if attempt == _ATTEMPTS - 1:
                    raise StorageUnreachable(
                        f"{self.uri(path)} ended early {_ATTEMPTS} times: {redacted(str(error))}"
                    ) from error
        raise AssertionError("unreachable: the last attempt returns or raises")


ObjectStore = LocalStore | S3Store


def open_store(root: str, *, write: bool = True) -> ObjectStore:
    """The objects under a folder (made if it does not exist) or `s3://bucket/prefix`, after a check.

    With `write`, the check is a conditional write, which commits need. write=False is for readers: nothing is written.
    StorageUnreachable names the folder, or the bucket and its endpoint, and what to do.
    """
    if "://" in root and not root.startswith("s3://"):
        raise ValueError(f"cannot store under {root!r}: a root is a folder or s3://bucket/prefix")
    store = S3Store(root) if "://" in root else LocalStore(root)
    store.check(write)
    return store


class Ranges(io.RawIOBase):
    """A read-only file over the range requests of an object."""

    def __init__(self, store: ObjectStore, path: str):
        found = next(store.list(path), None)
        if found is None or found.path != path:
            raise ObjectMissing(f"there is no object {path} under {store.root}")
        self._store, self._path, self._size, self._position = store, path, found.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        length = max(0, min(len(buffer), self._size - self._position))
        buffer[:length] = self._store.get_range(self._path, self._position, length)
        self._position += length
        return length


def open_object(store: ObjectStore, path: str) -> BinaryIO:
    """Open the object for reading: its file, or a stream of pieces from the bucket. Raises OSError or ObjectMissing."""
    file = store.local_path(path)
    return io.BufferedReader(Ranges(store, path), _PIECE) if file is None else file.open("rb")
