"""storage.index_file: the processes of a machine map one file of a large index."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from places import PROJECT
from seeded import shard_of

from storage import index_file
from storage.catalog.commit import commit_shard
from storage.index_file import BYTES_A_SAMPLE, FIELDS, shared
from storage.object_store import StorageUnreachable

ID, OTHER = "0123456789abcdef", "f" * 16
SAMPLES = 2_000_000  # of the tests with processes: 32 MB

# `python -c SCRIPT FOLDER NAME SECONDS`: opens an index of SAMPLES samples, made in so many seconds; each making leaves
# a line in FOLDER/made. Prints a sum over all numbers and by how many bytes the process's own memory grew.
SCRIPT = f"""
import sys, time
import numpy as np
from storage import index_file

folder, name, seconds = sys.argv[1:]

def make():
    with open(folder + "/made", "a") as made:
        made.write("made\\n")
    time.sleep(float(seconds))
    return [np.arange({SAMPLES}).astype(dtype) for dtype in index_file.FIELDS.values()]

def own():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

before = own()
arrays = index_file.shared(name, {SAMPLES}, make)
grown = own() - before
print(sum(int(array.sum()) for array in arrays), grown, flush=True)
"""
SUM = 3 * SAMPLES * (SAMPLES - 1) // 2


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files are."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(index_file, "SMALLEST", 1)
    return tmp_path / f"vlbert-index-{os.getuid()}"


def arrays(first: int = 0) -> list[np.ndarray]:
    return [np.arange(first, first + 100).astype(dtype) for dtype in FIELDS.values()]


def same(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found, wanted, strict=True))


def refused() -> list[np.ndarray]:
    raise AssertionError("made although there is a file")


def start(tmp_path: Path, name: str = ID, seconds: float = 0, before: str = "") -> subprocess.Popen:
    command = f"{before} exec {sys.executable} -c '{SCRIPT}' {tmp_path} {name} {seconds}"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(["bash", "-c", command], cwd=PROJECT, env=environment, **pipes)


def result(process: subprocess.Popen) -> tuple[int, int, str]:
    """Sum, growth and errors of a process that `start` started."""
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    total, grown = map(int, out.split())
    return total, grown, errors


def test_the_index_of_a_snapshot_is_the_same_from_a_file(local, folder, monkeypatch):
    for number in (0, 2):
        assert commit_shard(local, "images", f"{number:05d}", *shard_of(number), {})
    snapshot = local.pin("images")
    first, again = local.pinned("images", snapshot.id), local.pinned("images", snapshot.id)
    assert (folder / f"{snapshot.id}.index").stat().st_size == 64 + 16 * len(first)
    monkeypatch.setattr(index_file, "SMALLEST", 2**20)
    alone = local.pinned("images", snapshot.id)
    assert [file.suffix for file in folder.iterdir()].count(".index") == 1
    for name in FIELDS:
        wanted = getattr(alone, name)
        for index in (first, again):
            assert same([getattr(index, name)], [wanted])
            assert not getattr(index, name).flags.writeable
    assert (first.tars, first.keys(), first.snapshot) == (alone.tars, alone.keys(), alone.snapshot)
    assert BYTES_A_SAMPLE == 16


def test_no_process_has_an_index_of_its_own(tmp_path):
    first = result(start(tmp_path))
    second = result(start(tmp_path))
    assert [first[0], second[0]] == [SUM, SUM]
    assert (tmp_path / "made").read_text() == "made\n"
    for _, own, _ in (first, second):  # who has made the file maps it, too
        assert own < 16 * SAMPLES / 10, f"{own:,} bytes of its own"


def test_of_processes_that_race_one_makes_the_file(tmp_path):
    racing = [start(tmp_path, seconds=1) for _ in range(4)]
    assert [result(one)[0] for one in racing] == [SUM] * 4
    assert (tmp_path / "made").read_text() == "made\n"


def test_a_maker_that_is_killed_holds_nobody_up(tmp_path, folder):
    killed = start(tmp_path, seconds=600)
    try:
        while not (tmp_path / "made").exists():
            assert killed.poll() is None, killed.stderr.read()
            time.sleep(0.01)
        waiting = start(tmp_path)
        time.sleep(0.2)
    finally:
        killed.kill()
        killed.communicate()
    assert result(waiting)[0] == SUM
    assert (tmp_path / "made").read_text() == "made\nmade\n"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: data[:64] + bytes(len(data) - 64),
        *(lambda data, at=at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, 63, 64, 900, 1663)),
    ],
)
def test_a_damaged_file_is_made_again(folder, damage):
    shared(ID, 100, arrays)
    file = folder / f"{ID}.index"
    whole = file.read_bytes()
    assert len(whole) == 1664
    file.write_bytes(damage(whole))
    assert same(shared(ID, 100, arrays), arrays())
    assert file.read_bytes() == whole
    assert same(shared(ID, 100, refused), arrays())


def test_a_file_under_another_name_is_not_read(folder):
    shared(OTHER, 100, lambda: arrays(7))
    os.replace(folder / f"{OTHER}.index", folder / f"{ID}.index")
    assert same(shared(ID, 100, arrays), arrays())


def test_where_the_disk_is_full_the_index_is_in_memory(tmp_path, folder):
    total, grown, errors = result(start(tmp_path, before="ulimit -f 1000;"))
    assert total == SUM
    assert grown > 15 * SAMPLES
    assert re.fullmatch(r"this process holds an index of 32 MB of its own, .*File too large.* Set TMPDIR .*\n", errors)
    assert [file.suffix for file in folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("others", ["writable", "link", "file"])
def test_a_folder_that_others_may_have_filled_is_not_read(tmp_path, folder, capfd, others):
    shared(ID, 100, lambda: arrays(7))
    if others == "writable":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "elsewhere")
    if others == "link":
        folder.symlink_to(tmp_path / "elsewhere")
    if others == "file":
        folder.touch()
    assert same(shared(ID, 100, arrays), arrays())
    assert str(folder) in capfd.readouterr().err


@pytest.mark.parametrize("error", [ValueError("damaged"), StorageUnreachable("away")])
def test_an_error_of_the_snapshot_is_raised_and_the_next_one_tries_again(error, capfd):
    def fails() -> list[np.ndarray]:
        raise error

    with pytest.raises(type(error), match=str(error)):
        shared(ID, 100, fails)
    assert same(shared(ID, 100, arrays), arrays())
    assert capfd.readouterr().err == ""


def test_files_that_nobody_opened_for_a_day_are_removed_with_the_next_one(folder):
    kept = shared(ID, 100, arrays)
    (folder / "left.index.1-00000000").touch()
    for file in folder.iterdir():
        os.utime(file, (0, time.time() - 90_000))
    shared(ID, 100, refused)  # opened today
    shared(OTHER, 100, arrays)
    assert {file.name for file in folder.glob("*.index*")} == {f"{ID}.index", f"{OTHER}.index"}
    os.utime(folder / f"{ID}.index", (0, time.time() - 90_000))
    shared("e" * 16, 100, arrays)
    assert not (folder / f"{ID}.index").exists()
    assert same(kept, arrays())  # who has it open still reads it
