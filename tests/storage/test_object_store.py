"""A folder and a bucket are the same store: every fact here holds for both, S3 over real HTTP."""

import contextlib
import errno
import multiprocessing
import os
import pickle
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from s3 import environment, https_s3_server

from storage.object_store import (
    Content,
    LocalStore,
    ObjectMissing,
    ObjectStore,
    S3Store,
    StorageUnreachable,
    open_store,
)


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path) -> ObjectStore:
    if request.param == "folder":
        return open_store(str(tmp_path / "a" / "root"))
    request.getfixturevalue("s3")
    return open_store(f"s3://bucket/{tmp_path.name}/root")


def paths(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.path for info in store.list(prefix)]


def test_what_is_put_is_got_whole_and_in_ranges(store, tmp_path):
    data = bytes(range(256)) * 50
    (tmp_path / "file").write_bytes(data)
    assert store.put("a/bytes", data) is True
    assert store.put("a/file", tmp_path / "file") is True
    assert store.put("a/views", [memoryview(data)[:7], memoryview(b""), memoryview(data)[7:]]) is True
    for path in ("a/bytes", "a/file", "a/views"):
        assert store.get(path) == data
        assert store.get_range(path, 0, len(data)) == data
        assert store.get_range(path, 255, 3) == b"\xff\x00\x01"
        assert store.get_range(path, len(data) - 1, 1) == b"\xff"
        assert store.get_range(path, 5, 0) == b""
        assert store.exists(path)
    for nothing in (b"", []):
        store.put("a/bytes", nothing)
        assert store.get("a/bytes") == b""


def test_a_range_past_the_end_is_an_error_and_not_less(store):
    store.put("a", b"12345")
    for offset, length in [(3, 3), (5, 1), (900, 2)]:
        with pytest.raises(ValueError, match=f"root/a ends before byte {offset + length}: asked for {length} bytes"):
            store.get_range("a", offset, length)


def test_what_is_not_there_is_missing_by_name(store):
    store.put("folder/there", b"")
    for path in ("nothing", "folder", "folder/there/below", "folder/nothing"):
        assert not store.exists(path)
        with pytest.raises(ObjectMissing, match=f"^there is no object {path} under .*root$"):
            store.get(path)
        with pytest.raises(ObjectMissing, match=f"^there is no object {path} under"):
            store.get_range(path, 0, 1)
    store.delete("nothing")
    store.delete("folder/there")
    assert not store.exists("folder/there")


def test_a_file_that_cannot_be_read_is_told_from_a_missing_one_and_named(tmp_path):
    store = open_store(str(tmp_path))
    (tmp_path / "damaged").symlink_to("/proc/self/mem")  # opens, and says EIO when its beginning is read
    (tmp_path / "circle").symlink_to("circle")
    for path, reason in (("damaged", "Input/output error"), ("circle", "Too many levels of symbolic links")):
        for read in (lambda path: store.get_range(path, 0, 8), store.get):
            with pytest.raises(StorageUnreachable, match=rf"cannot read {tmp_path}/{path}: .*{reason}.*Check its disk"):
                read(path)


@pytest.mark.parametrize("form", ["bytes", "file", "views"])
def test_put_if_absent_never_changes_what_is_there(store, tmp_path, form):
    def content(data: bytes) -> Content:
        if form == "bytes":
            return data
        if form == "views":
            return [memoryview(data)[:2], memoryview(data)[2:]]
        (tmp_path / "file").write_bytes(data)
        return tmp_path / "file"

    assert store.put("a/b", content(b"first"), if_absent=True) is True
    assert store.put("a/b", content(b"second"), if_absent=True) is False
    assert store.get("a/b") == b"first"
    assert store.put("a/b", content(b"third")) is True
    assert store.get("a/b") == b"third"
    assert store.put("a/c", content(b"other"), if_absent=True) is True


def test_of_many_writers_at_once_one_wins_and_its_bytes_stay(tmp_path):
    # Each with Objects of its own, as on machines of their own; moto does not lock, so this asks the folder alone.
    for round_ in range(20):
        barrier = threading.Barrier(8)

        def write(number: int, path: str = f"a/{round_}", barrier: threading.Barrier = barrier) -> bool:
            store = LocalStore(str(tmp_path))
            barrier.wait()
            return store.put(path, b"%d" % number * 10000, if_absent=True)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(write, range(8)))
        assert won.count(True) == 1
        assert LocalStore(str(tmp_path)).get(f"a/{round_}") == b"%d" % won.index(True) * 10000
    assert len([file for file in (tmp_path / "a").iterdir()]) == 20  # and no temporary file


def test_a_list_is_sorted_by_path_and_its_prefix_is_a_string(store):
    names = ["b", "a/c/d", "a-b", "a/b", "a.b", "a/c-d", "ab/c", "a/é", "a/z"]
    started = time.time()
    for name in names:
        store.put(name, name.encode())
    assert paths(store) == sorted(names, key=str.encode)
    assert paths(store, "a/") == ["a/b", "a/c-d", "a/c/d", "a/z", "a/é"]
    assert paths(store, "a/c") == ["a/c-d", "a/c/d"]
    assert paths(store, "a") == ["a-b", "a.b", "a/b", "a/c-d", "a/c/d", "a/z", "a/é", "ab/c"]
    assert paths(store, "zz/") == []
    info = next(store.list("a/c/"))
    assert (info.path, info.size) == ("a/c/d", 5)
    assert started - 2 <= info.modified <= time.time() + 2


def test_a_list_of_more_than_one_page_is_whole(s3, tmp_path):
    store = open_store(f"s3://bucket/{tmp_path.name}")
    names = [f"{i:04d}" for i in range(1003)]  # S3 answers 1000 at a time
    bucket = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for name in names:  # past HTTP, which would take ten times as long
        bucket.put_object("bucket", f"{tmp_path.name}/{name}", b"")
    assert paths(store) == names


def test_files_that_begin_with_a_dot_are_not_listed(tmp_path, s3):
    import boto3

    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x").write_bytes(b"")
    (tmp_path / ".temporary").write_bytes(b"")
    (tmp_path / "shown").write_bytes(b"")
    assert paths(open_store(str(tmp_path))) == ["shown"]
    for key in (".hidden/x", ".temporary", "shown", ""):
        boto3.session.Session().client("s3").put_object(Bucket="bucket", Key=f"dots/{key}", Body=b"")
    assert paths(open_store("s3://bucket/dots")) == ["shown"]


def test_roots_do_not_see_each_other(store, s3):
    store.put("mine", b"")
    sibling = open_store(store.root + "2")
    sibling.put("theirs", b"")
    assert (paths(store), paths(sibling)) == (["mine"], ["theirs"])


@pytest.mark.parametrize(
    "path", ["", "/etc/x", "../x", "a/../../x", "a//b", "a/./b", "a/", ".a", "a/.b", "a\\b", "a\0"]
)
def test_a_path_cannot_leave_the_root_or_hide(store, path):
    for use in (
        store.get,
        store.exists,
        store.delete,
        store.local_path,
        lambda path: store.put(path, b"x"),
        lambda path: store.put(path, b"x", if_absent=True),
        lambda path: store.get_range(path, 0, 1),
    ):
        with pytest.raises(ValueError, match="is not a valid name of an object"):
            use(path)
    if path not in ("", "a/"):
        with pytest.raises(ValueError, match="is not a valid name of an object"):
            list(store.list(path))
    assert paths(store) == []


def test_names_are_told_in_full(tmp_path, s3):
    local, remote = open_store(str(tmp_path)), open_store("s3://bucket/a/b/")
    assert (local.root, local.where(), local.where("x/y")) == (str(tmp_path), str(tmp_path), f"{tmp_path}/x/y")
    assert (remote.root, remote.where(), remote.where("x/y")) == (
        "s3://bucket/a/b/",
        "s3://bucket/a/b/",
        "s3://bucket/a/b/x/y",
    )
    assert local.local_path("x/y") == tmp_path / "x/y"
    assert remote.local_path("x/y") is None
    assert open_store("s3://bucket").where("x") == "s3://bucket/x"


def test_objects_can_be_sent_to_another_process(store):
    store.put("a", b"1")
    assert pickle.loads(pickle.dumps(store)).get("a") == b"1"


def test_a_fork_uses_connections_of_its_own(s3):
    store = open_store("s3://bucket/fork")
    store.put("a", b"1")
    before = store._client()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(send, b"own" if store._client() is not before else b"shared")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(send)
    with os.fdopen(receive, "rb") as answer:
        assert answer.read() == b"own"
    assert store._client() is before


@pytest.mark.parametrize("place", ["{folder}/file", "{folder}/file/below", "/proc/cannot/be/made"])
def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path, place):
    (tmp_path / "file").write_bytes(b"")
    root = place.format(folder=tmp_path)
    with pytest.raises(StorageUnreachable, match=f"^cannot write to the folder {root}: .* Make it writable"):
        open_store(root)


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """No file may become larger meanwhile: the system refuses to write, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_put_without_room_names_the_file_and_the_way_out_and_leaves_nothing(tmp_path, if_absent):
    store = open_store(str(tmp_path))
    with (
        room(5000),
        pytest.raises(StorageUnreachable, match=rf"{tmp_path}/a/b: .*File too large.*Free disk space.* again"),
    ):
        store.put("a/b", bytes(10_000), if_absent=if_absent)
    assert paths(store) == []
    assert list(store.leftovers()) == []


def test_a_file_that_cannot_be_removed_is_named(tmp_path):
    store = open_store(str(tmp_path))
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageUnreachable, match=f"cannot write or remove {tmp_path}/folder: .*make it writable"):
        store.delete("folder")


def test_a_folder_goes_with_its_last_file_and_the_root_stays(tmp_path):
    store = open_store(str(tmp_path / "root"))
    for path in ("run/step/a", "run/step/b", "run/kept", "top"):
        store.put(path, b"")
    store.delete("run/step/a")
    assert (tmp_path / "root/run/step/b").exists()
    empty = open_store(str(tmp_path / "empty"))
    empty.put("top", b"")
    empty.delete("top")
    assert (tmp_path / "empty").is_dir()
    for path in ("run/step/b", "run/step/b", "top"):
        store.delete(path)
    assert [file.name for file in (tmp_path / "root").rglob("*")] == ["run", "kept"]
    with pytest.raises(StorageUnreachable):
        store.put("new/too large", Endless())
    assert [file.name for file in (tmp_path / "root").rglob("*")] == ["run", "kept"]


class Endless(Sequence):
    """Parts of which the second cannot be written."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> memoryview:
        if number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return memoryview(b"half")


def put_and_delete_for_ever(root: str, path: str) -> None:
    store = open_store(root)
    while True:
        store.put(path, b"")
        store.delete(path)


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_put_syncs_the_file_and_then_the_folders_that_it_made(tmp_path, monkeypatch, if_absent):
    store, sync, synced = open_store(str(tmp_path)), os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put("a/b/c", b"data", if_absent=if_absent)
    *made, file, folder = synced
    assert set(made) == {str(tmp_path), f"{tmp_path}/a"}
    assert file.startswith(f"{tmp_path}/a/b/.c.")
    assert folder == f"{tmp_path}/a/b"


def test_a_folder_that_another_removes_at_the_same_time_takes_every_put(tmp_path):
    store = open_store(str(tmp_path))
    removing = multiprocessing.get_context("fork").Process(
        target=put_and_delete_for_ever, args=(str(tmp_path), "run/step/other"), daemon=True
    )
    removing.start()
    for number in range(200):
        store.put("run/step/mine", b"%d" % number)
        assert store.get("run/step/mine") == b"%d" % number
        store.delete("run/step/mine")
    removing.kill()
    removing.join()


def test_deleting_what_is_not_there_leaves_the_folder_to_who_has_just_made_it(tmp_path):
    (tmp_path / "run").mkdir()
    open_store(str(tmp_path)).delete("run/absent")
    assert (tmp_path / "run").is_dir()


def test_a_reader_makes_nothing_and_tries_nothing_out(tmp_path):
    with pytest.raises(StorageUnreachable, match=f"^cannot read the folder {tmp_path}/typo: .* Name the root"):
        open_store(str(tmp_path / "typo"), write=False)
    assert not (tmp_path / "typo").exists()
    open_store(str(tmp_path)).put("a", b"1")
    before = tmp_path.stat().st_mtime_ns
    assert open_store(str(tmp_path), write=False).get("a") == b"1"
    assert tmp_path.stat().st_mtime_ns == before


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_an_empty_one(tmp_path):
    store = open_store(str(tmp_path))
    store.put("file", b"")
    assert paths(store, "absent/") == []
    assert paths(store, "file/") == []
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageUnreachable, match=f"^cannot list the folder {tmp_path}/loop: .* Make it readable"):
        paths(store, "loop/")


def test_a_folder_without_permission_below_the_root_is_an_error():
    with unprivileged(), tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        store.put("a/b/object", b"")
        (Path(folder) / "a" / "b").chmod(0)
        try:
            with pytest.raises(StorageUnreachable, match=f"^cannot list the folder {folder}/a/b: "):
                paths(store)
        finally:
            (Path(folder) / "a" / "b").chmod(0o700)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """As another user, where we are root, who may read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("form", [bytes, Path])
def test_an_endpoint_that_goes_away_is_named_by_every_put(tmp_path, form, if_absent):
    with OddS3() as server, server.environment():
        store = server.store()
        # Few attempts: with all of them botocore waits for seconds.
        store._clients = {os.getpid(): store._new_client(connect_timeout=1, read_timeout=1, attempts=1)}
        port = server.server_port
    (tmp_path / "file").write_bytes(b"data")
    data = b"data" if form is bytes else tmp_path / "file"
    with pytest.raises(StorageUnreachable, match=rf"s3://bucket/a/b at http://127.0.0.1:{port} failed .*run again"):
        store.put("a/b", data, if_absent=if_absent)


@pytest.mark.parametrize("root", ["gs://bucket/x", "http://host/x", "", "s3://", "s3:///prefix", "s3://bucket/../x"])
def test_a_root_that_is_neither_is_refused(root):
    with pytest.raises(ValueError, match="s3://bucket|names no bucket|is not a valid name"):
        open_store(root)


def test_an_unreachable_bucket_is_one_clear_error_within_seconds(s3):
    with pytest.raises(StorageUnreachable, match=f"cannot reach bucket 'absent' at {s3} .*: create the bucket$"):
        open_store("s3://absent/x")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        started = time.monotonic()
        with (
            environment(AWS_ENDPOINT_URL=endpoint),
            pytest.raises(StorageUnreachable, match=f"'bucket' at {endpoint} .*check AWS_ENDPOINT_URL"),
        ):
            open_store("s3://bucket/x")
        assert time.monotonic() - started < 20
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        environment(AWS_ENDPOINT_URL=f"http://me:s3cr3t@{closed}"),
        pytest.raises(StorageUnreachable, match=f"'bucket' at http://{closed} ") as refused,
    ):
        open_store("s3://bucket/root")
    assert "s3cr3t" not in str(refused.value)
    with (
        environment(AWS_ENDPOINT_URL="no-url"),
        pytest.raises(StorageUnreachable, match="'bucket' at no-url .*check AWS_ENDPOINT_URL"),
    ):
        open_store("s3://bucket/x")


class OddS3(ThreadingHTTPServer):
    """An endpoint with one fault: ignores or refuses If-None-Match, answers 409, or breaks off the first downloads."""

    def __init__(self, ignores_conditions: bool = False, broken_downloads: int = 0, refusal: int | None = None):
        super().__init__(("127.0.0.1", 0), OddHandler)
        self.ignores_conditions, self.broken_downloads, self.refusal = ignores_conditions, broken_downloads, refusal
        self.conflicts = 0
        self.stored: dict[str, bytes] = {}
        self.puts = 0

    def __enter__(self) -> "OddS3":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def store(self) -> S3Store:
        with self.environment():
            return open_store("s3://bucket")

    def environment(self):
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        return environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{self.server_port}", **keys)


class OddHandler(BaseHTTPRequestHandler):
    server: OddS3
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self._answer(200 if self.path == "/bucket" or self.path in self.server.stored else 404)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.puts += 1
        if self.server.refusal:
            return self._answer(self.server.refusal)
        if "If-None-Match" in self.headers and not self.server.ignores_conditions:
            if self.server.conflicts:
                self.server.conflicts -= 1
                return self._answer(409)
            if self.path in self.server.stored:
                return self._answer(412)
        self.server.stored[self.path] = body
        return self._answer(200)

    def do_GET(self):
        body = self.server.stored[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.broken_downloads:
            self.server.broken_downloads -= 1
            self.close_connection = True
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_an_endpoint_that_ignores_conditions_is_found_out_at_the_start_and_by_writers_alone():
    with OddS3(ignores_conditions=True) as server, server.environment():
        for root, probe in [("s3://bucket", ".probe"), ("s3://bucket/a/b", "a/b/.probe")]:
            message = f"http://127.0.0.1:{server.server_port} does not honour If-None-Match: .*/{probe} twice"
            with pytest.raises(StorageUnreachable, match=message):
                open_store(root)
        server.puts = 0
        open_store("s3://bucket", write=False)
        assert server.puts == 0


def test_an_endpoint_that_honours_conditions_is_asked_once_from_the_second_start_on(s3):
    with OddS3() as server, server.environment():
        for puts in (2, 3, 4):
            open_store("s3://bucket/a")
            assert (server.puts, list(server.stored)) == (puts, ["/bucket/a/.probe"])
    assert paths(open_store("s3://bucket/probed")) == []


@pytest.mark.parametrize(
    ("status", "message"),
    [(501, "does not honour If-None-Match"), (403, "cannot write to s3://bucket/ at .*s3:PutObject")],
)
def test_a_bucket_that_refuses_the_probe_is_told_with_the_way_out(status, message):
    with OddS3(refusal=status) as server, server.environment():
        with pytest.raises(StorageUnreachable, match=message):
            open_store("s3://bucket")
        open_store("s3://bucket", write=False)


def test_a_conflict_is_asked_again_until_it_is_decided():
    with OddS3() as server, server.environment():
        store = server.store()
        server.conflicts, server.puts = 2, 0
        assert store.put("new", b"1", if_absent=True) is True
        assert server.stored["/bucket/new"] == b"1"
        assert server.puts == 3  # two conflicts, the write
        server.conflicts = 10**6
        with pytest.raises(StorageUnreachable, match="409") as error:
            store.put("other", b"1", if_absent=True)
        assert error.value.http_status == 409
        assert "/bucket/other" not in server.stored


def test_the_clock_is_that_of_the_storage(store):
    before = time.time()
    store.put("a", b"")
    assert abs(next(store.list("a")).modified - store.now()) < 3
    assert abs(store.now() - before) < 3
    assert paths(store) == ["a"]


def test_of_a_folder_that_takes_no_file_the_clock_is_this_machines():
    assert abs(open_store("/proc/self/fdinfo", write=False).now() - time.time()) < 3


def test_what_broken_off_puts_left_is_found_and_can_be_removed(tmp_path, s3):
    import boto3

    store = open_store(str(tmp_path))
    store.put("a/b/object.parquet", b"1")
    left = [".object.parquet.17-0123abcd", ".probe-17-0123abcd", ".probe-17-0123abcd-link"]
    for name in (*left, ".keep", ".object.parquet.swp"):
        (tmp_path / "a" / "b" / name).write_bytes(b"12")
    found = list(store.leftovers())
    assert sorted(one.name for one in found) == sorted(str(tmp_path / "a" / "b" / name) for name in left)
    assert {one.size for one in found} == {2}
    for one in found:
        one.remove()
        one.remove()  # another may have been first
    assert {file.name for file in (tmp_path / "a" / "b").iterdir()} == {
        ".keep",
        ".object.parquet.swp",
        "object.parquet",
    }

    client = boto3.session.Session().client("s3")
    mine, theirs = (client.create_multipart_upload(Bucket="bucket", Key=f"{root}/x.tar") for root in ("parts", "other"))
    client.upload_part(Bucket="bucket", Key="parts/x.tar", UploadId=mine["UploadId"], PartNumber=1, Body=b"123")
    store = open_store("s3://bucket/parts")
    (found,) = store.leftovers()
    assert (found.name, found.size) == (f"s3://bucket/parts/x.tar (upload {mine['UploadId']})", 3)
    found.remove()
    assert list(store.leftovers()) == []
    client.abort_multipart_upload(Bucket="bucket", Key="other/x.tar", UploadId=theirs["UploadId"])


def test_a_download_that_breaks_off_is_asked_for_again():
    with OddS3(broken_downloads=2) as server, server.environment():
        server.stored["/bucket/a"] = bytes(range(200))
        assert server.store().get("a") == bytes(range(200))
    with OddS3(broken_downloads=10**6) as server, server.environment():
        server.stored["/bucket/a"] = bytes(range(200))
        with pytest.raises(StorageUnreachable, match=r"s3://bucket/a ended early 5 times"):
            server.store().get("a")


@pytest.fixture
def https_s3(tmp_path_factory) -> Iterator[list[Mapping[str, str]]]:
    """Of one test alone: the environment that leads to it must not meet the tests of `s3`, in whatever order."""
    with https_s3_server(tmp_path_factory.mktemp("https"), "secure") as came:
        yield came


def sums_sent(came: list[Mapping[str, str]], folder: Path) -> list[str]:
    """Names of the headers about checksums that puts of every form and gets of them send."""
    came.clear()
    store = open_store(f"s3://secure/{folder.name}")
    whole = bytes(9_000_000)  # goes up in two parts
    (folder / "file").write_bytes(whole)
    assert store.put("file", folder / "file") is True
    assert store.get("file") == whole
    for form, data in {"bytes": b"data", "views": [memoryview(b"da"), memoryview(b"ta")]}.items():
        assert store.put(form, data, if_absent=True) is True
        assert store.get(form) == b"data"
    assert {headers[":method"] for headers in came} == {"HEAD", "PUT", "GET", "POST"}
    return sorted({name for headers in came for name in headers if "checksum" in name or "trailer" in name})


def test_over_https_bodies_go_without_checksums_that_not_every_server_takes(https_s3, tmp_path):
    assert sums_sent(https_s3, tmp_path) == []
    assert {headers.get("content-encoding") for headers in https_s3} == {None}, "not aws-chunked"


def test_checksums_are_sent_and_checked_where_the_environment_or_the_file_of_settings_says_so(https_s3, tmp_path):
    both = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_supported")
    sent = {"x-amz-checksum-mode", "x-amz-trailer"}
    with environment(**{f"AWS_{name.upper()}": value for name, value in both.items()}):
        assert sent <= set(sums_sent(https_s3, tmp_path))
    (tmp_path / "config").write_text("[default]\n" + "".join(f"{name} = {value}\n" for name, value in both.items()))
    (tmp_path / "again").mkdir()
    with environment(AWS_CONFIG_FILE=str(tmp_path / "config")):
        assert sent <= set(sums_sent(https_s3, tmp_path / "again"))
