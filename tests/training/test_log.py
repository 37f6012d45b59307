"""The files of a run's log."""

import json
import time

import pytest

from storage.object_store import open_store
from training.checkpoint import Writer
from training.log import RunLog, read_metrics
from training.metrics import RunningAverages


def test_a_resumed_log_lacks_the_lines_behind_its_checkpoint_and_each_unreadable_sample_is_one(tmp_path, capsys):
    """Files are replaced at once: a kill halfway leaves one or the other."""
    lines, unreadable = (tmp_path / "runs/run" / name for name in ("metrics.jsonl", "unreadable.jsonl"))
    store = open_store(str(tmp_path))
    with Writer(store) as writer:
        record = RunLog(writer, "run", 0, 10, 1)
        record.unreadable([])
        for step in (1, 2, 3):
            record.event("training", step, {})
    assert not unreadable.exists()
    before, inode = lines.read_text(), lines.stat().st_ino
    with Writer(store) as writer:
        record = RunLog(writer, "run", 3, 10, 1)
        record.unreadable({"step": step, "reason": f"reason {step % 5}"} for step in (7, 1, 2, 3, 4, 5, 6))
    assert "5 samples cannot be read" in capsys.readouterr().out
    assert (lines.read_text(), lines.stat().st_ino) == (before, inode)
    with lines.open() as old, Writer(store) as writer:
        record = RunLog(writer, "run", 2, 10, 1)
        assert old.read() == before
        assert lines.read_text() == "".join(before.splitlines(keepends=True)[:2])
        assert record.unreadable([{"step": 4, "reason": "reason 4"}, {"step": 5, "reason": "reason 1"}]) == 2
    reasons = [json.loads(line)["reason"] for line in unreadable.read_text().splitlines()]
    assert reasons == ["reason 1", "reason 4"]


def test_a_damaged_line_is_named_with_its_file_and_number(tmp_path):
    store, file = open_store(str(tmp_path)), tmp_path / "runs/run/metrics.jsonl"
    file.parent.mkdir(parents=True)
    for bad in (b"{", b"7", b'{"kind": "training"}', b"\xff"):
        file.write_bytes(b'{"kind": "training", "step": 1}\n' + bad + b'\n{"kind": "training", "step": 2}\n')
        for read in (lambda: read_metrics(store, "run", "training"), lambda: RunLog(Writer(store), "run", 2, 9, 1)):
            with pytest.raises(ValueError, match=f"^line 2 of {file} .*remove that line"):
                read()


def test_the_time_of_a_validation_is_not_training_time(monkeypatch: pytest.MonkeyPatch):
    moments = iter([0.0, 10.0, 60.0, 75.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    averages = RunningAverages()
    with averages.paused():
        pass
    assert averages.seconds()[0] == 25.0
