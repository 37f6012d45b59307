"""What Prefect keeps of the pipeline: one task run a shard, one artifact a table, few lines of a long training."""

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from places import PROJECT

from benchmarks.orchestration import MOST_TASK_RUNS, SHARDS, expected_artifacts, expected_task_runs
from flows.artifacts import Live
from flows.torchrun import paced

FEW = 12
DAY_AND_A_HALF = 36 * 3600  # seconds
STAGES = ["collect", "detect", "pretrain", "finetune"]


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def moments(live: Live, lines: Iterable[float]) -> list[float]:
    """At which of these progress lines, seconds after its start, a live artifact changes: its own rule is asked."""
    shown = []
    for seconds in lines:
        now = time.monotonic()
        live.started, live.shown = now - seconds, now - (seconds - shown[-1]) if shown else None
        if live.due:
            shown.append(seconds)
    return shown


def test_the_log_of_a_long_training_is_short_and_never_silent_for_long():
    clock, heard = Clock(), []
    log = paced(lambda line: heard.append((clock.now, line)), clock=clock)
    for clock.now in range(0, DAY_AND_A_HALF, 2):
        log("a progress line")
    times = [time for time, _ in heard]
    assert times[:4] == [0, 6, 12, 18]  # the first lines after five seconds
    assert len(times) < 700
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert all(gap <= max(6, after / 100 + 2) for gap, after in zip(gaps, times[1:], strict=True))


def test_a_live_artifact_changes_as_often_as_its_description_says():
    assert 90 <= len(moments(Live("collecting", "captions"), range(1800))) <= 200  # a line each second of half an hour
    assert 450 <= len(moments(Live("collecting", "captions"), range(0, DAY_AND_A_HALF, 2))) <= 650


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pipeline_leaves_one_task_run_a_shard_and_one_artifact_a_table(tmp_path: Path):
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.orchestration", "--shards", str(FEW), "--json", str(file)]
    ended = subprocess.run(command, timeout=540, cwd=PROJECT, capture_output=True, text=True)
    assert file.exists(), ended.stderr
    found = json.loads(file.read_text())
    database = found["database"]
    assert found["task_runs"] == database["rows"]["task_run"] == expected_task_runs(FEW, 1)
    assert database["artifacts"] == expected_artifacts()
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "within the bars")
    assert found["flow_runs"] == 9
    assert [(stage["name"], stage["flow_runs"]) for stage in found["stages"]] == list(
        zip(STAGES, (3, 3, 1, 1), strict=True)
    )
    assert sum(stage["task_runs"] for stage in found["stages"]) == found["task_runs"]

    # As many shards as Conceptual Captions has would stay within the bars.
    assert expected_task_runs(SHARDS, 1) <= MOST_TASK_RUNS
    assert expected_task_runs(SHARDS, 1) <= MOST_TASK_RUNS, "with as many shards as Conceptual Captions has"
