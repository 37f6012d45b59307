"""The log of a run: its files, a full disk, the heartbeat."""

import json
import multiprocessing
import re
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from places import PROJECT
from writing import Held, files, nothing, wait_for

from storage.object_store import StorageUnreachable, open_store
from training.log import PROGRESS_LINES, RunLog, read_heartbeat, read_metrics
from training.log_files import Lines
from training.metrics import Line
from training.writer import Writer


def line(**changes: Any) -> Line:
    return Line({"all": 1.5}, {}, {}, {}, **{"steps": 1, "seconds": 1.0, "data_wait": 0.0, "memory": 0} | changes)


def steps_of(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def write_to_a_full_disk(file: Path) -> None:
    """Its limit lies in the middle of the third line."""
    logged = []
    lines = Lines(file, logged.append)
    for step in range(5):
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, resource.RLIM_INFINITY))
        lines.add([{"step": step}])
    assert steps_of(file) == [0, 1], "no part of a line"
    assert lines.lost.startswith(f"3 lines of {file} are not written: ")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    lines.add([{"step": 5}])
    assert steps_of(file) == [0, 1, 2, 3, 4, 5]
    assert lines.lost is None
    assert [text.split()[0] for text in logged] == ["cannot", str(file)]


def test_a_full_disk_costs_no_line(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=write_to_a_full_disk, args=(tmp_path / "lines",))
    child.start()  # a limit to the size of files holds for a whole process
    child.join(30)
    assert child.exitcode == 0


@pytest.fixture
def record(tmp_path) -> RunLog:
    """Of a run whose log cannot be written: a folder stands in its place."""
    record = RunLog(Writer(open_store(str(tmp_path))), "run", 0, 10, 1)
    (tmp_path / "runs/run/metrics.jsonl").mkdir()
    return record


def test_a_log_that_cannot_be_written_ends_no_training(tmp_path, record, capsys):
    file = tmp_path / "runs/run/metrics.jsonl"
    with record.writer, record.running():
        for step in (1, 2):
            record.training(step, line(), 0.1)
        record.publish()
        file.rmdir()
        record.training(3, line(), 0.1)
        assert steps_of(file) == [1, 2, 3]
    # The thread that publishes the file may find the folder too, and has a line of its own.
    assert capsys.readouterr().out.count(f"cannot write {file}, the training goes on and this is tried again") == 1
    assert read_heartbeat(record.store, "run")["state"] == "done"


def test_lines_that_are_never_written_fail_the_run_at_its_end(tmp_path, record):
    def training() -> None:
        with record.writer, record.running():
            record.training(1, line(), 0.1)
            (tmp_path / "runs/run/metrics.jsonl").rmdir()
            (tmp_path / "runs/run/skipped.jsonl").mkdir()
            record._lines["skipped.jsonl"].add([{"step": 1}])

    named = f"1 lines of {tmp_path}/runs/run/skipped.jsonl are not written"
    with pytest.raises(StorageUnreachable, match=named):
        training()
    beat = read_heartbeat(record.store, "run")
    assert beat["state"] == "failed"
    assert re.match(named, beat["reason"])
    assert [found["step"] for found in read_metrics(record.store, "run", "training")] == [1]


def test_the_log_is_synced_before_a_checkpoint(tmp_path, record):
    given, log = threading.Event(), record._lines["metrics.jsonl"]
    with pytest.raises(StorageUnreachable, match=f"cannot write {log.file}: "):
        log.sync()  # no disk syncs a folder that is read as a file
    log.file.rmdir()
    log.sync()
    with record.writer as writer:
        writer.do("begin", given.wait)
        record.step(1)
        record.publish()
        writer.checkpoint("runs/run/step-0000001", files(1), nothing)
        assert list(writer._queue)[-2:] == ["runs/run/metrics.jsonl", "checkpoint"]
        given.set()


def test_a_damaged_line_is_named_with_its_file_and_number(tmp_path):
    file = tmp_path / "runs/run/metrics.jsonl"
    file.parent.mkdir(parents=True)
    store = open_store(str(tmp_path))
    for bad in (b"{", b"7", b'{"kind": "training"}', b"\xff"):
        file.write_bytes(b'{"kind": "training", "step": 1}\n' + bad + b'\n{"kind": "training", "step": 2}\n{"ki')
        for read in (lambda: read_metrics(store, "run", "training"), lambda: RunLog(Writer(store), "run", 2, 9, 1)):
            with pytest.raises(ValueError, match=f"^line 2 of {file} is no JSON"):
                read()


def test_without_progress_lines_an_empty_line_is_the_sign_of_life(tmp_path, record, capsys, monkeypatch):
    monkeypatch.setenv(PROGRESS_LINES, "0")
    record.training(1, line(), 0.1)
    assert capsys.readouterr().out.endswith("\n\n"), "after what cannot be written"
    record.training(2, line(), 0.1)
    assert capsys.readouterr().out == "\n"
    monkeypatch.delenv(PROGRESS_LINES)
    record.training(3, line(), 0.1)
    assert capsys.readouterr().out.startswith("step 3/10  ")


def test_the_heartbeat_is_starting_until_the_first_step_is_done(tmp_path):
    store = open_store(str(tmp_path))
    record = RunLog(Writer(store), "run", 0, 10, 1)
    with record.writer, record.running():
        wait_for(lambda: (read_heartbeat(store, "run") or {}).get("state") == "starting")
        record.step(1)
        wait_for(lambda: read_heartbeat(store, "run")["state"] == "training")
        assert read_heartbeat(store, "run")["step"] == 1


def test_the_page_of_formats_names_every_field_of_the_heartbeat(tmp_path):
    store = open_store(str(tmp_path))
    record = RunLog(Writer(store), "run", 0, 10, 1)
    with record.writer, record.running():
        record.training(1, line(), 0.1)
    page = (PROJECT / "docs" / "formats.md").read_text()
    (table,) = re.findall(r"\| field of `heartbeat.json` .*?\n(.*?)\n\n", page, re.DOTALL)
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == read_heartbeat(store, "run").keys() | {"detector", "snapshot", "device"}


def test_the_share_of_time_that_saves_held_up_is_logged(tmp_path):
    store = Held(tmp_path, "step-0000001/state.json")
    record = RunLog(Writer(store), "run", 0, 10, 1)
    with record.writer as writer, record.running():
        began = time.monotonic()
        writer.checkpoint("runs/run/step-0000001", files(1), nothing)
        threading.Timer(0.2, store.let_through.set).start()
        writer.checkpoint("runs/run/step-0000002", files(2), nothing)
        gone = time.monotonic() - began
        record.training(2, line(), 0.1)
        record.training(3, line(), 0.1)
    first, second = (found["save_wait"] for found in read_metrics(store, "run", "training"))
    assert 0.1 / gone < first <= 1
    assert second == 0
    assert read_heartbeat(store, "run")["save_wait"] == 0
