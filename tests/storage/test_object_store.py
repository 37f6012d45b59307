"""storage.object_store: what holds of a folder and of a bucket, S3 over real HTTP."""

import errno
import multiprocessing
import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from s3 import environment

from storage.object_store import LocalStore, ObjectMissing, ObjectStore, StorageUnreachable, open_store


@pytest.fixture
def store(root: str) -> ObjectStore:
    return open_store(root)


def paths(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.path for info in store.list(prefix)]


def test_put_and_get_round_trip_whole_and_in_ranges(store, tmp_path):
    data = bytes(range(256)) * 50
    (tmp_path / "file").write_bytes(data)
    assert store.put("a/bytes", data) is True
    assert store.put("a/file", tmp_path / "file") is True
    for path in ("a/bytes", "a/file"):
        assert store.get(path) == data
        assert store.get_range(path, 0, len(data)) == data
        assert store.get_range(path, 255, 3) == b"\xff\x00\x01"
        assert store.get_range(path, len(data) - 1, 1) == b"\xff"
        assert store.get_range(path, 5, 0) == b""
        assert store.exists(path)
    store.put("a/bytes", b"12345")
    assert store.get("a/bytes") == b"12345"
    for offset, length in [(3, 3), (5, 1), (900, 2)]:
        with pytest.raises(
            ValueError, match=f"root/a/bytes ends before byte {offset + length}: asked for {length} bytes"
        ):
            store.get_range("a/bytes", offset, length)


def test_missing_objects_are_named(store):
    store.put("folder/there", b"")
    for path in ("nothing", "folder", "folder/there/below", "folder/nothing"):
        assert not store.exists(path)
        for use in (store.get, lambda path: store.get_range(path, 0, 1)):
            with pytest.raises(ObjectMissing, match=f"^there is no object {path} under .*root$"):
                use(path)
    for path in ("nothing", "folder/nothing", "folder/there"):
        store.delete(path)
    assert not store.exists("folder/there")


def test_put_if_absent_never_changes_what_is_there(store, tmp_path):
    (tmp_path / "file").write_bytes(b"second")
    for path, content in (("a/b", b"second"), ("a/c", tmp_path / "file")):
        assert store.put(path, b"first", if_absent=True) is True
        assert store.put(path, content, if_absent=True) is False
        assert store.get(path) == b"first"
        assert store.put(path, content) is True
        assert store.get(path) == b"second"
    assert store.put("a/d", tmp_path / "file", if_absent=True) is True


def test_a_list_is_sorted_by_path_and_its_prefix_is_a_string(store):
    names, started = ["b", "a/c/d", "a-b", "a/b", "a.b", "a/c-d", "ab/c", "a/é", "a/z"], time.time()
    assert abs(store.now() - started) < 3
    for name in names:
        store.put(name, name.encode())
    assert paths(store) == sorted(names, key=str.encode)
    assert paths(store, "a/") == ["a/b", "a/c-d", "a/c/d", "a/z", "a/é"]
    assert paths(store, "a/c") == ["a/c-d", "a/c/d"]
    assert paths(store, "a") == ["a-b", "a.b", "a/b", "a/c-d", "a/c/d", "a/z", "a/é", "ab/c"]
    assert paths(store, "zz/") == []
    info = next(store.list("a/c/"))
    assert (info.path, info.size) == ("a/c/d", 5)
    assert abs(info.modified - store.now()) < 3
    assert pickle.loads(pickle.dumps(store)).get("b") == b"b"  # as another process gets it


def test_a_list_of_more_than_one_page_is_whole(moto, tmp_path):
    names = [f"{i:04d}" for i in range(1003)]  # S3 answers 1000 at a time
    for name in names:  # past HTTP, which would take ten times as long
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object("bucket", f"{tmp_path.name}/{name}", b"")
    with environment(**moto):
        assert paths(open_store(f"s3://bucket/{tmp_path.name}")) == names


@pytest.mark.parametrize("path", ["", "/etc/x", "a/../../x", "a//b", "a/.b", "a\\b", "a\0"])
def test_invalid_paths_are_refused(store, path):
    uses = [store.get, store.exists, store.delete, store.local_path, lambda path: store.get_range(path, 0, 1)]
    uses += [lambda path: store.put(path, b"x"), lambda path: store.put(path, b"x", if_absent=True)]
    uses += [lambda path: list(store.list(path))] if path else []
    for use in uses:
        with pytest.raises(ValueError, match="is not a valid object name"):
            use(path)
    assert paths(store) == []


def test_a_fork_uses_connections_of_its_own(s3, monkeypatch):
    store = open_store("s3://bucket/fork")
    before = store._client()
    assert store._client() is before
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert store._client() is not before


@pytest.mark.parametrize("place", ["{folder}/file", "{folder}/file/below", "/proc/cannot/be/made"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, place):
    (tmp_path / "file").write_bytes(b"")
    root = place.format(folder=tmp_path)
    with pytest.raises(StorageUnreachable, match=f"^cannot write to the folder {root}: .* Make it writable") as refused:
        open_store(root)
    assert refused.value.lasts


def test_a_disk_that_is_full_may_be_free_later_and_a_path_that_is_a_folder_may_not(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    (tmp_path / "folder/below").mkdir(parents=True)
    with pytest.raises(StorageUnreachable, match="cannot write or remove .*/folder: .*Free disk space") as lasting:
        store.put("folder", b"")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageUnreachable, match="No space left") as passing:
        store.put("a", b"")
    assert (lasting.value.lasts, passing.value.lasts) == (True, False)


def test_a_root_that_was_moved_away_is_not_made_anew_and_goes_on_when_it_is_back(tmp_path):
    root, moved = tmp_path / "root", tmp_path / "moved"
    store = open_store(str(root))
    store.put("run/step/a", b"1")
    root.rename(moved)
    for path in ("b", "run/step/a", "run/new/a"):
        for if_absent in (False, True):
            with pytest.raises(StorageUnreachable, match=f"{root}/{path}.* root {root} was moved .*put") as gone:
                store.put(path, b"2", if_absent=if_absent)
            assert gone.value.lasts
    store.delete("run/step/a")
    store.now()
    with pytest.raises(StorageUnreachable, match=f"^cannot write to the folder {root}: "):
        open_store(str(root))  # as the next stage of the same process does
    assert not root.exists()
    moved.rename(root)
    assert store.get("run/step/a") == b"1"
    open_store(str(root)).put("run/new/a", b"2")
    assert store.get("run/new/a") == b"2"


def test_a_folder_goes_with_its_last_file_and_the_root_stays(tmp_path):
    store = open_store(str(tmp_path / "root"))
    for path in ("run/step/a", "run/step/b", "run/kept", "top", "other/run/claims/a"):
        store.put(path, b"")
    store.delete("run/step/a")
    assert (tmp_path / "root/run/step/b").exists()
    for path in ("run/step/b", "run/step/b", "top", "other/run/claims/a"):
        store.delete(path)
    assert [file.name for file in (tmp_path / "root").rglob("*")] == ["run", "kept"]


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_put_syncs_the_file_and_new_folders(tmp_path, monkeypatch, if_absent):
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


def test_puts_succeed_while_another_removes_the_folder(tmp_path):
    store = open_store(str(tmp_path))

    def put_and_delete_for_ever() -> None:
        while True:
            store.put("run/step/other", b"")
            store.delete("run/step/other")

    removing = multiprocessing.get_context("fork").Process(target=put_and_delete_for_ever, daemon=True)
    removing.start()
    for number in range(60):
        store.put("run/step/mine", b"%d" % number)
        assert store.get("run/step/mine") == b"%d" % number
        store.delete("run/step/mine")
    removing.kill()
    removing.join()


def test_a_reader_writes_nothing(tmp_path):
    with pytest.raises(StorageUnreachable, match=f"^cannot read the folder {tmp_path}/typo: .* Name the root"):
        open_store(str(tmp_path / "typo"), write=False)
    assert not (tmp_path / "typo").exists()
    open_store(str(tmp_path)).put("a", b"1")
    before = tmp_path.stat().st_mtime_ns
    assert open_store(str(tmp_path), write=False).get("a") == b"1"
    assert tmp_path.stat().st_mtime_ns == before


def test_hidden_files_are_not_listed_and_a_folder_that_cannot_be_listed_is_an_error(tmp_path):
    store = open_store(str(tmp_path))
    store.put("file", b"")
    assert paths(store, "absent/") == []
    assert paths(store, "file/") == []
    (tmp_path / ".hidden").mkdir()
    for name in (".hidden/x", ".temporary"):
        (tmp_path / name).write_bytes(b"")
    assert paths(store) == ["file"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageUnreachable, match=f"^cannot list the folder {tmp_path}/loop: .* Make it readable"):
        paths(store, "loop/")


@pytest.mark.parametrize("root", ["gs://bucket/x", "", "s3://", "s3://bucket/../x"])
def test_invalid_roots_are_refused(root):
    with pytest.raises(ValueError, match="s3://bucket|names no bucket|is not a valid object name"):
        open_store(root)


def test_an_unreachable_bucket_is_named_within_seconds(s3):
    with pytest.raises(StorageUnreachable, match=f"s3://absent/x/ at {s3} .*that the bucket exists") as refused:
        open_store("s3://absent/x")
    assert refused.value.lasts
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        closed = f"127.0.0.1:{unused.getsockname()[1]}"
        for endpoint, named, lasts in (
            (f"http://me:s3cr3t@{closed}", f"http://{closed}", False),
            ("no-url", "no-url", True),
        ):
            started = time.monotonic()
            with (
                environment(AWS_ENDPOINT_URL=endpoint),
                pytest.raises(StorageUnreachable, match=f"s3://bucket/x/.* {named}.*AWS_ENDPOINT_URL") as refused,
            ):
                open_store("s3://bucket/x")
            assert "s3cr3t" not in str(refused.value)
            assert refused.value.lasts is lasts
            assert time.monotonic() - started < 20


def test_of_many_writers_one_wins(tmp_path):
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
    assert len(list((tmp_path / "a").iterdir())) == 20  # and no temporary file
