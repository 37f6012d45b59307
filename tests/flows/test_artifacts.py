"""Artifacts in Prefect's UI: tables, curves, and an artifact that grows."""

import base64
import contextlib
import json
import re
import signal
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.exceptions import TerminationSignal

from flows.artifacts import Artifact, log_errors, log_reason, make_counts_table, stage_logger
from flows.torchrun import Trained, show_training
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import Row
from storage.object_store import StorageUnreachable, open_store
from training.curves import draw_curves, draw_panels, select_lines


def test_a_table_counts_every_status_and_shows_text_of_the_web_as_plain_words(tmp_path: Path):
    catalog = Catalog(open_store(str(tmp_path)), "captions")
    hostile = "[x](javascript:alert(1)) | <b>`\\` http://a.example/_x_\n\u202e" + "y" * 300
    failed = [("http_404", hostile), ("http_404", hostile), ("timeout", ""), ("http_404", hostile)]
    rows = [Row(number, f"{number:020d}", *one) for number, one in enumerate(failed)]
    for shard, table in (("00000", rows[:3]), ("00001", rows[3:])):
        commit_shard(catalog, "images", shard, [], table, {"source": {}})
    table = make_counts_table(catalog, "images")
    assert table.startswith("4 rows in 2 shards of ")
    assert re.search(r"-\W*\n\| http\\_404 +\| +3 +\|\n\| timeout +\| +1 +\|\n\n", table)
    (first,) = (line for line in table.splitlines() if line.startswith("- "))
    escaped = r"\[x\]\(javascript\:alert\(1\)\) \| \<b\>\`\\\` http\:\/\/a\.example\/\_x\_ \\u202eyyy"
    assert first.startswith(rf"- **http\_404**: {escaped}")
    assert first.count("y") == 200 - hostile.index("y")


def test_curves_show_what_was_measured_and_a_long_line_is_thinned(tmp_path: Path):
    store = open_store(str(tmp_path))
    assert draw_curves(store, "r") is None
    logged = {"kind": "training", "data_wait": 0.5, "learning_rate": 0.0002}
    lines = [logged | {"step": step, "loss_words": 1 / step} for step in range(1, 21)]
    measured = {"words_accuracy": 0.5, "sbu/words_accuracy": 0.25, "accuracy/yes/no": 1.0, "seconds": 3.0}
    lines.append({"kind": "validation", "step": 20} | measured)
    store.put("runs/r/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    image = draw_curves(store, "r")
    svg = base64.b64decode(image.removeprefix("data:image/svg+xml;base64,"), validate=True).decode()
    for shown in ("r: training loss", "loss_words 0.050", "learning_rate 0.0002", "words_accuracy 0.500"):
        assert shown in svg
    assert re.search("r: validation, sbu(?s:.*)words_accuracy 0.250", svg)
    assert not re.search("data_wait|seconds|yes/no", svg)
    assert draw_curves(store, "r") == image, "no date, no random ids"

    rows = [{"step": step, "loss": step} | ({"odd": 1.0} if step % 2 else {}) for step in range(6000)]
    lines = select_lines(rows, "loss", "odd")
    assert [len(points) for points in lines.values()] == [6000, 3000], "of the rows that have it"
    assert len(base64.b64decode(draw_panels({"x": lines}).partition(",")[2])) < 30_000


def test_an_artifact_changes_at_most_each_fiftieth_of_the_time_that_has_passed(monkeypatch: pytest.MonkeyPatch):
    clock, shown = SimpleNamespace(now=0.0), []
    monkeypatch.setattr("flows.artifacts.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr("flows.artifacts.log_errors", contextlib.suppress)
    monkeypatch.setattr("flows.artifacts.MarkdownArtifact", Mock())
    monkeypatch.setattr("flows.artifacts.get_client", MagicMock())
    artifact = Artifact("pretrain", "r")
    for clock.now in range(0, 36 * 3600, 5):
        artifact.show(lambda: shown.append(clock.now) or "")
    assert shown[:3] == [0, 10, 20]
    assert 250 < len(shown) < 350


@pytest.mark.usefixtures("prefect_server")
def test_a_run_shows_one_artifact_and_no_server_or_storage_that_is_away_fails_it(caplog: pytest.LogCaptureFixture):
    name, away = f"RefCOCO+ {uuid.uuid4().hex[:6]}", Mock(side_effect=StorageUnreachable("no bucket"))

    def work() -> None:
        artifact = Artifact("showing", name)
        artifact.show(away)
        artifact.show(away)  # not asked again so soon
        artifact.show(lambda: "one", now=True)
        artifact.show(lambda: pytest.fail("not due"))
        artifact.show(lambda: "two", now=True)
        artifact.id = uuid.uuid4()  # of no artifact: the server refuses
        artifact.show(lambda: "three", now=True)
        for end in (KeyboardInterrupt(), SystemExit(1), TerminationSignal(signal.SIGTERM)):
            with pytest.raises(type(end)), log_errors():
                raise end

    flow(name="showing")(work)()
    assert away.call_count == 1
    assert "Prefect's UI was not updated: StorageUnreachable: no bucket" in caplog.text
    assert "Prefect's UI was not updated: PrefectHTTPStatusError: Client error '404" in caplog.text
    key = f"showing-refcoco-{name[-6:]}"
    with get_client(sync_client=True) as client:
        (mine,) = [artifact for artifact in client.read_artifacts(limit=200) if artifact.key == key]
    assert (mine.data, mine.type) == ("two", "markdown")


def test_a_training_shows_its_heartbeat_and_its_curves_then_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, shown, logged = open_store(str(tmp_path)), [], []
    monkeypatch.setattr(Artifact, "show", lambda artifact, content, now=False: shown.append(content()))
    beat = {"step": 5, "steps": 9, "state": "training", "losses": {"words": 1.2346}, "counts": {"skipped": 2}}
    beat |= {"seconds": 9.0, "seconds_left": 3723.0, "samples_per_second": 9.54, "data_wait": 0.031}

    def put_heartbeat(time: str) -> None:
        store.put("runs/r/heartbeat.json", json.dumps(beat | {"time": time}).encode())

    def training(watch) -> Trained:
        put_heartbeat("2026-01-01T00:00:00.000+00:00")  # of the process that this training resumes
        watch()
        put_heartbeat(datetime.now(UTC).isoformat())
        store.put("runs/r/metrics.jsonl", b'{"kind": "training", "step": 5, "loss_words": 1.2}\n')
        watch()
        return Trained("r", "recipe", "d-1", "abc", "s3://bucket/runs/r/step-9", {"accuracy": 0.5, "odd": None}, 1.0, 1)

    trained = show_training("pretrain", str(tmp_path), "r", logged.append, training)
    assert trained.run == "r"
    assert logged[0].startswith("r: training: step 5/9  loss words 1.235  skipped 2  samples/s 9.5  data wait 3 %")
    assert shown[0] == "starting"
    assert re.search(r"time left 1\\:02\\:03\n\n!\[curves\]\(data:image/svg", shown[1])
    assert re.search(r"\| accuracy +\| 0.500 +\|\n\| odd +\| – +\|\n\n", shown[2])
    assert r"step\-9" in shown[2]
    beat["state"] = "done"
    put_heartbeat("2026-01-01T00:00:00.000+00:00")  # of a run that was complete before
    show_training("pretrain", str(tmp_path), "r", logged.append, lambda watch: trained)
    assert r"done\: step 5" in shown[3]


def test_the_log_of_a_pipeline_tells_its_stages_and_at_the_end_the_reason_of_a_failure(prefect_server):
    @flow(name="stage")
    def stage() -> None:
        stage_logger().info("x: 3 of %s shards, 0:10 left", 9)
        raise RuntimeError("torchrun\nit failed; its last lines:\n  | step 1\n  | vlbert train: no room")

    @flow(name="pipeline", on_failure=[log_reason])
    def pipeline() -> None:
        stage_logger().info("stage 1 of 3: x")
        stage()

    run = pipeline(return_state=True).state_details.flow_run_id
    query, deadline, lines = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])), time.monotonic() + 30, []
    with get_client(sync_client=True) as client:
        while not any("failed: " in line for line in lines) and time.monotonic() < deadline:
            time.sleep(0.5)
            lines = [log.message for log in client.read_logs(query) if log.name.endswith(".stage")]
    assert lines == ["stage 1 of 3: x", "stage: x: 3 of 9 shards, 0:10 left", "failed: vlbert train: no room"]
