"""Object stores: named objects in a local folder or under `s3://bucket/prefix`. No other module uses boto3.

A put is atomic: readers see the whole object or nothing. Commits of shards use `put(..., if_absent=True)`. If several
writers, even on different machines, put the same object, only the first put returns True.
"""

import contextlib
import errno
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

# Temporary files of `put`, `check` and `now` in a folder: a name, the process id and a random number.
_TEMPORARY = re.compile(r"\.(.+\.|probe-)\d+-[0-9a-f]{8}")
_REQUESTS = 7  # botocore's attempts per request; if one in ten fails, one in ten million fails for good
_FOLDERS = 100  # attempts to make a folder that other processes remove at the same time
_ATTEMPTS = 5  # attempts of a conditional put that S3 answers with 409, and of a download that ends early
_CHUNK = 2**24  # bytes that a stream fetches with one request
# Servers do not distinguish between wrong credentials, expired ones and missing permissions.
_HINT = (
    "Check the network, AWS_ENDPOINT_URL, that the bucket exists, and the credentials (AWS_ACCESS_KEY_ID, ~/.aws): "
    "the session token may have expired or lack a permission (writers need s3:PutObject). Then run again: committed "
    "shards are kept"
)
# Errors of a folder that remain until a user changes it, unlike a full disk or a file server that is away
_LASTING = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS}
_opened: set[Path] = set()  # roots that this process has opened

Content = bytes | Path  # an object's bytes, or a file that holds them


class ObjectMissing(LookupError):
    """Raised for an object that does not exist."""


class StorageUnreachable(ConnectionError):
    """Raised if the storage cannot be read or written: it is unreachable or full, or refuses a request."""

    def __init__(self, message: str, http_status: int | None = None):
        super().__init__(message)
        # Of the server's answer; 400 if no request can be made, as without credentials; None if there was no answer.
        self.http_status = http_status

    @property
    def lasts(self) -> bool:
        """True if a later attempt must fail too, unless someone changes settings, rights or folders."""
        status = self.http_status
        refused = status is not None and (status < 500 or status == 501) and status not in (408, 409, 429)
        return refused or getattr(self.__cause__, "errno", None) in _LASTING


@dataclass(frozen=True)
class ObjectInfo:
    """Path, size and date of an object."""

    path: str  # relative to the root
    size: int  # bytes
    modified: float  # seconds since 1970


def _check_path(path: str) -> str:
    """Return `path` unchanged. Raises ValueError if it is outside the root, or if `list` would skip it."""
    if not path or "\\" in path or "\0" in path or any(not part or part.startswith(".") for part in path.split("/")):
        raise ValueError(
            f"{path!r} is not a valid object name: it must be relative to the root, without empty parts or parts that "
            "begin with a dot"
        )
    return path


def _check_prefix(prefix: str) -> str:
    if prefix:
        _check_path(prefix.removesuffix("/"))
    return prefix


class LocalStore:
    """A store that keeps objects as files in a local folder. S3Store has the same methods.

    Paths are relative to the root, with `/` between the parts. A part that begins with a dot raises ValueError.
    """

    def __init__(self, root: str):
        if not root:
            raise ValueError("the storage root is empty: name a folder or s3://bucket/prefix")
        self.root = root
        self._folder = Path(root).expanduser().absolute()

    def check(self, write: bool) -> None:
        """Create the store's folder if it is missing, and check that files in it can be written and hard-linked.

        Without `write`, only check that the folder can be listed. Raises StorageUnreachable if a check fails.
        """
        if not write:
            try:
                os.scandir(self._folder).close()
            except OSError as error:
                raise StorageUnreachable(
                    f"cannot read the folder {self._folder}: {error}. Name the root that the data was written to, "
                    "or put it back if it was moved"
                ) from error
            return
        try:
            if self._folder not in _opened:  # else it was moved away or unmounted: see `_open_new`
                self._folder.mkdir(parents=True, exist_ok=True)
            _opened.add(self._folder)
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
        """Context manager that creates an empty file in the folder and removes it at the end."""
        probe = self._folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"")
            yield probe
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
        """Write an object atomically. With `if_absent`, leave an existing object unchanged and return False.

        If the object cannot be written, raises StorageUnreachable and leaves an existing object unchanged.
        """
        with _write_errors(file := self.local_path(path), self._folder):
            if if_absent and file.exists():
                return False
            # In the same folder, so that the rename stays within one file system; with a dot, so that `list` skips it.
            temporary = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
            try:
                with _open_new(temporary, self._folder) as out, _open_content(data) as source:
                    shutil.copyfileobj(source, out, 1 << 20)
                    out.flush()
                    os.fsync(out.fileno())
                if if_absent:
                    try:
                        os.link(temporary, file)  # fails if the name is taken, unlike a rename
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
        """Return an object's bytes. Raises ObjectMissing or, if the object cannot be read, StorageUnreachable."""
        with self._open(path) as file:
            return file.read()

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        """Return `length` bytes of an object, starting at byte `offset`.

        Raises ValueError if the object is too short, and the same errors as `get`.
        """
        with self._open(path) as file:
            data = os.pread(file.fileno(), length, offset)
        return _check_range(data, self.uri(path), offset, length)

    def exists(self, path: str) -> bool:
        """Return True if the object exists."""
        return self.local_path(path).is_file()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects whose path begins with `prefix`, sorted by path. The prefix may end within a name."""
        parent = _check_prefix(prefix).rpartition("/")[0]  # the deepest folder that contains every match
        paths = []

        def refuse(error: OSError) -> None:  # os.walk skips unreadable folders, as if their objects did not exist
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise StorageUnreachable(
                    f"cannot list the folder {error.filename}: {error}. Make it readable for this user"
                ) from error

        for folder, folders, names in os.walk(self._folder / parent, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".")]
            relative = os.path.relpath(folder, self._folder)
            for name in names:
                path = name if relative == "." else f"{relative}/{name}"
                if not name.startswith(".") and path.startswith(prefix):
                    paths.append(path)
        for path in sorted(paths):
            try:
                status = os.stat(self._folder / path)
            except FileNotFoundError:
                continue  # deleted since the walk
            yield ObjectInfo(path, status.st_size, status.st_mtime)

    def delete(self, path: str) -> None:
        """Delete an object. An object that does not exist is not an error."""
        self._remove(self.local_path(path))

    def local_path(self, path: str) -> Path:
        """Return the path of the object's local file. S3Store returns None."""
        return self._folder / _check_path(path)

    def uri(self, path: str = "") -> str:
        """Return the local path or s3:// URI of an object, for messages and reports. The default is the root."""
        return str(self.local_path(path) if path else self._folder)

    def now(self) -> float:
        """Return the storage's time in seconds since 1970, or this machine's time if no file can be written."""
        try:
            with self._probe() as probe:
                return probe.stat().st_mtime
        except OSError:  # a reader may not write, and `gc` must work on full disks
            return time.time()

    def leftovers(self) -> Iterator[ObjectInfo]:
        """Yield the temporary files of writers, with absolute local paths. Yield nothing for a bucket.

        A writer may still be active, or it may have been killed. Only the age of its file distinguishes the two.
        """
        for file in self._folder.rglob(".*"):
            if _TEMPORARY.fullmatch(file.name):
                with contextlib.suppress(FileNotFoundError):  # its writer has finished since the walk
                    status = file.stat()
                    yield ObjectInfo(str(file), status.st_size, status.st_mtime)

    def _remove(self, file: Path) -> None:
        """Remove a file, and the folders that are now empty. A bucket has no empty folders either."""
        with _write_errors(file, self._folder):
            try:
                file.unlink()
            except FileNotFoundError:
                return  # another writer may have just made the folder for its own file
        with contextlib.suppress(OSError):  # a folder is not empty
            for parent in file.relative_to(self._folder).parents[:-1]:
                (self._folder / parent).rmdir()

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[BinaryIO]:
        try:
            with self.local_path(path).open("rb") as file:
                yield file
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissing(f"there is no object {path} under {self.root}") from error
        except OSError as error:
            raise StorageUnreachable(
                f"cannot read {self.uri(path)}: {error}. Check its disk or file server, and make the file "
                "readable for this user"
            ) from error


@contextlib.contextmanager
def _write_errors(file: Path, root: Path) -> Iterator[None]:
    """Context manager that turns OSError into StorageUnreachable. The message names the file and gives advice."""
    try:
        yield
    except OSError as error:
        advice = (
            "Free disk space (`vlbert catalog gc` lists what may be deleted) or make the file writable for this user, "
            "then run again: committed shards are kept"
        )
        if not root.is_dir():
            advice = f"The root {root} was moved or unmounted: put it back, or start again with its new path"
        raise StorageUnreachable(f"cannot write or remove {file}: {error}. {advice}") from error


def _open_content(data: Content) -> BinaryIO:
    return io.BytesIO(data) if isinstance(data, bytes) else data.open("rb")


def _open_new(file: Path, root: Path) -> BinaryIO:
    """Create a file. If folders below `root` are created, sync them, so that they survive a power failure."""
    for left in reversed(range(_FOLDERS)):
        made = [folder for folder in file.parents if folder.is_relative_to(root) and not folder.is_dir()]
        try:
            for folder in reversed(made):
                if folder != root:  # it was moved away or unmounted: files in a new one would be lost to its readers
                    folder.mkdir(exist_ok=True)
            opened = file.open("xb")
            break
        # Another process removed the last file of the folder, and the folder with it, before the file was created or
        # while mkdir checked whether the path is a folder.
        except (FileNotFoundError, FileExistsError):
            if not left or file.exists() or root in made:
                raise
    for folder in made:
        _sync_folder(folder.parent)
    return opened


@functools.cache
def _create_loader() -> Any:
    """Return botocore's loader of service descriptions. All clients share it, because loading takes 0.2 s."""
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_range(data: bytes, uri: str, offset: int, length: int) -> bytes:
    if len(data) != length:
        raise ValueError(
            f"{uri} ends before byte {offset + length}: asked for {length} bytes from {offset}, got {len(data)}. "
            "The object does not match its index; write the shard again"
        )
    return data


def _endpoint() -> str:
    """Return the S3 endpoint that the environment sets, or "the default endpoint", for messages."""
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return redacted(given) if given else "the default endpoint"


class S3Store:
    """A store that keeps objects in a bucket. boto3 reads the endpoint and credentials (AWS_ENDPOINT_URL, ~/.aws)."""

    def __init__(self, root: str):
        require("boto3", f"the root {root}")
        self.root = root
        self.bucket, _, prefix = root.removeprefix("s3://").partition("/")
        if not self.bucket:
            raise ValueError(f"{root!r} names no bucket: write s3://bucket/prefix")
        prefix = prefix.strip("/")
        self._prefix = f"{_check_path(prefix)}/" if prefix else ""
        self._clients = {}  # process id -> client; a fork must not share a connection

    def __reduce__(self) -> tuple:
        return S3Store, (self.root,)  # a client cannot be pickled; its settings come from the environment

    def check(self, write: bool) -> None:
        """Check that the bucket answers within a short time. Raises StorageUnreachable, naming the endpoint, if not.

        With `write`, also check that the server refuses a conditional write to an existing object. That object,
        `.probe`, is kept so that later checks need only one request. `list` skips it.
        """
        with self._errors("head_bucket", ""):
            client = self._new_client(connect_timeout=3, read_timeout=5, attempts=3)
            client.head_bucket(Bucket=self.bucket)
        if not write:
            return
        for _ in range(2):  # the first write succeeds if there is no object yet
            try:
                self._call("put_object", ".probe", Key=f"{self._prefix}.probe", Body=b"", IfNoneMatch="*")
            except StorageUnreachable as error:
                if error.http_status in (409, 412):
                    return
                if error.http_status in (400, 501):
                    break
                raise
        raise StorageUnreachable(
            f"{_endpoint()} does not honour If-None-Match: it wrote {self.uri('.probe')} twice or refused the header, "
            "so two writers could overwrite each other's commits. Use an endpoint with conditional writes",
            501,
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
        """Put an object with `If-None-Match: *`. Try again after a 409, S3's answer to simultaneous puts."""
        # botocore repeats a request if its answer was lost, and then finds its own object; the mark identifies it.
        mark = secrets.token_hex(16)
        arguments = {"Key": self._key(path), "IfNoneMatch": "*", "Metadata": {"writer": mark}}
        for attempt in range(_ATTEMPTS):
            try:
                with _open_content(data) as file:
                    self._call("put_object", path, Body=file, **arguments)
                return True
            except StorageUnreachable as error:
                if error.http_status == 412:
                    answer = self._head(path)  # None if it was deleted since
                    return answer is not None and answer.get("Metadata", {}).get("writer") == mark
                if error.http_status != 409 or attempt == _ATTEMPTS - 1:
                    raise
            time.sleep(0.1 * 2**attempt * (0.5 + random.random()))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _head(self, path: str) -> dict | None:
        try:
            return self._call("head_object", path, Key=self._key(path))
        except ObjectMissing:
            return None

    def get(self, path: str, **byte_range: str) -> bytes:
        from botocore.exceptions import BotoCoreError

        failure = None
        for _ in range(_ATTEMPTS):
            body = self._call("get_object", path, Key=self._key(path), **byte_range)["Body"]
            try:
                return body.read()
            except BotoCoreError as error:  # botocore does not repeat a request if its body ends early
                failure = error
        message = f"the download of {self.uri(path)} ended early {_ATTEMPTS} times: {redacted(str(failure))}"
        raise StorageUnreachable(message) from failure

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""  # an HTTP range cannot be empty
        try:
            data = self.get(path, Range=f"bytes={offset}-{offset + length - 1}")
        except StorageUnreachable as error:
            if error.http_status != 416:
                raise
            data = b""
        return _check_range(data, self.uri(path), offset, length)

    def exists(self, path: str) -> bool:
        return self._head(path) is not None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        key = self._prefix + _check_prefix(prefix)
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=key)
        with self._errors("list_objects_v2", prefix):
            for page in pages:
                for entry in page.get("Contents", []):
                    path = entry["Key"].removeprefix(self._prefix)
                    if path and "/." not in f"/{path}":  # neither .probe nor hidden files of other programs
                        yield ObjectInfo(path, entry["Size"], entry["LastModified"].timestamp())

    def delete(self, path: str) -> None:
        self._call("delete_object", path, Key=self._key(path))

    def local_path(self, path: str) -> None:
        _check_path(path)

    def uri(self, path: str = "") -> str:
        return f"s3://{self.bucket}/{self._prefix}{path}"

    def now(self) -> float:
        answer = self._call("head_bucket", "")
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def leftovers(self) -> Iterator[ObjectInfo]:
        return iter(())  # a lifecycle rule of the bucket removes unfinished multipart uploads: docs/clusters.md

    def _key(self, path: str) -> str:
        return self._prefix + _check_path(path)

    def _client(self) -> Any:  # Any, because boto3 makes the class at run time
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
            # Over https, botocore sends optional checksums as a trailer, which Ceph and other servers refuse.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        session = Session()
        session.register_component("data_loader", _create_loader())
        return boto3.session.Session(botocore_session=session).client("s3", config=config)

    def _call(self, operation: str, path: str, **arguments) -> dict:
        """Call an operation of the boto3 client on this bucket, and return the answer. `path` is for error messages."""
        with self._errors(operation, path):
            return getattr(self._client(), operation)(Bucket=self.bucket, **arguments)

    @contextlib.contextmanager
    def _errors(self, operation: str, path: str) -> Iterator[None]:
        """Context manager that turns botocore's errors into ObjectMissing or StorageUnreachable."""
        from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

        try:
            yield
        except (BotoCoreError, ClientError, ValueError) as error:  # ValueError: the endpoint is not a URL
            answer = error.response if isinstance(error, ClientError) else {}
            away = isinstance(error, ConnectionError | HTTPClientError)
            if path and answer and answer["Error"]["Code"] in ("NoSuchKey", "404", "NotFound"):
                raise ObjectMissing(f"there is no object {path} under {self.root}") from error
            raise StorageUnreachable(
                f"{operation} of {self.uri(path)} at {_endpoint()} failed: {redacted(str(error))}. {_HINT}",
                answer["ResponseMetadata"]["HTTPStatusCode"] if answer else None if away else 400,
            ) from error


ObjectStore = LocalStore | S3Store


def open_store(root: str, *, write: bool = True) -> ObjectStore:
    """Open the store at `root`, a folder or `s3://bucket/prefix`, and check that it can be used.

    With `write`, create the folder if it is missing, and check that the store supports the conditional writes that
    commits need. Otherwise, write nothing. Raises StorageUnreachable, naming the folder or the bucket and its endpoint,
    if a check fails.
    """
    if "://" in root and not root.startswith("s3://"):
        raise ValueError(f"cannot store under {root!r}: a root is a folder or s3://bucket/prefix")
    store = S3Store(root) if "://" in root else LocalStore(root)
    store.check(write)
    return store


class Ranges(io.RawIOBase):
    """A read-only file object that fetches byte ranges of an object as they are read."""

    def __init__(self, store: ObjectStore, path: str):
        info = next(store.list(path), None)
        if info is None or info.path != path:
            raise ObjectMissing(f"there is no object {path} under {store.root}")
        self._store, self._path, self._size, self._position = store, path, info.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:  # a writable buffer of bytes
        length = max(0, min(len(buffer), self._size - self._position))
        buffer[:length] = self._store.get_range(self._path, self._position, length)
        self._position += length
        return length


def open_object(store: ObjectStore, path: str) -> io.BufferedReader:
    """Open an object for reading, as a local file or as a stream from the bucket. Raises OSError or ObjectMissing."""
    file = store.local_path(path)
    return io.BufferedReader(Ranges(store, path), _CHUNK) if file is None else file.open("rb")
