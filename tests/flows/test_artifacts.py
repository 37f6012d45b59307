"""What the flow UI shows: tables, links, curves, and artifacts that grow."""

import base64
import json
import re
import signal
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run

from flows import artifacts
from flows.artifacts import (
    Live,
    Stage,
    Stages,
    key_of,
    link,
    name_run,
    publish,
    reason_of,
    reporting,
    show_progress,
    table_of_counts,
    table_of_evaluation,
    table_of_metrics,
    table_of_progress,
    table_of_stages,
)
from flows.supervisor import ChildFailed, ChildTimedOut
from flows.torchrun import Heartbeat, TrainingMonitor, paced
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import Row
from storage.object_store import StorageUnreachable, open_store
from training.curves import curves, draw, lines_of

IMAGES = "images"
AWAY = Mock(side_effect=StorageUnreachable("no bucket"))


def catalog_of(folder: Path, *shards: Sequence[tuple[str, str]]) -> Catalog:
    """A dataset whose shards have rows with these statuses and details."""
    catalog, number = Catalog(open_store(str(folder)), "captions"), 0
    for index, rows in enumerate(shards):
        table = [Row(number + i, f"{number + i:020d}", *row) for i, row in enumerate(rows)]
        commit_shard(catalog, IMAGES, f"{index:05d}", [], table, {"source": {}})
        number += len(rows)
    return catalog


def cells(table: str) -> list[list[str]]:
    """The rows of the tables in markdown, without their rules."""
    rows = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in table.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[0] != "---"]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_table_counts_every_status_and_shows_text_of_the_web_as_plain_words(tmp_path: Path):
    hostile = "[x](javascript:alert(1)) | <b>`\\` http://a.example/_x_\n" + "y" * 300
    rows = [("http_404", hostile), ("http_404", hostile), ("timeout", "")]
    table = table_of_counts(catalog_of(tmp_path, rows, [("http_404", hostile)]), IMAGES)
    assert table.startswith(f"4 rows in 2 shards, written to {link(f'{tmp_path}/captions/images')}\n")
    assert cells(table)[1:] == [[r"http\_404", "3", "75.0%"], ["timeout", "1", "25.0%"]]
    (first,) = (line for line in table.splitlines() if line.startswith("- "))
    escaped = r"\[x\]\(javascript\:alert\(1\)\) \| \<b\>\`\\\` http\:\/\/a\.example\/\_x\_ yyy"
    assert first.startswith(rf"- **http\_404**: {escaped}")
    assert first.count("y") == 200 - hostile.index("y")


def test_tables_of_metrics_and_progress():
    checkpoint = "s3://bucket/vl-root/runs/x/step-0000004"
    table = table_of_metrics({"accuracy": 0.5, "accuracy/yes/no": 1.0, "a_b": 1 / 3}, checkpoint, "79.88 val")
    assert cells(table) == [["metric", "value"], ["accuracy", "0.500"], [r"a\_b", "0.333"]]
    assert r"on the real data:** 79\.88 val" in table
    assert link(checkpoint) in table
    several = {"accuracy": 0.5, "accuracy/yes/no": 1.0, "chance": 0.2, "sbu/accuracy": 0.4, "cc/accuracy": 0.75}
    assert cells(table_of_metrics(several, checkpoint)) == [
        ["metric", "value", "sbu", "cc"],
        ["accuracy", "0.500", "0.400", "0.750"],
        ["chance", "0.200", "–", "–"],
    ]
    assert cells(table_of_progress({"step": "4 of 8", "left": "a|b"})) == [["step", "4 of 8"], ["left", r"a\|b"]]


def test_the_table_of_an_evaluation_links_its_files_and_shows_the_papers_numbers():
    metrics = {"accuracy_published": 0.5, "accuracy/yes/no": 0.25, "odd": None}
    table = table_of_evaluation(
        metrics, {"accuracy_published": "71.16"}, "/r/evaluations/val-step-1", ("results.json",)
    )
    assert cells(table)[1:] == [[r"accuracy\_published", "0.500", r"71\.16"], ["odd", "–", ""]]
    for name in ("index.html", "results.json"):
        assert link(f"/r/evaluations/val-step-1/{name}") in table


def test_a_stage_that_has_a_run_is_a_link_whose_words_are_not_escaped():
    _, begun, waits = cells(table_of_stages([Stage("collect held-out|x", run="id"), Stage("held-out|x")]))
    assert begun == ["[collect held-out%7Cx](/runs/flow-run/id)", *[""] * 5]
    assert waits == [r"held\-out\|x", *[""] * 5]


def test_no_two_datasets_share_an_artifact():
    names = ("refcoco", "refcoco+", "RefCOCO", "refcoco_", "refcoco-", "a-b", "a b", "ü", "ö")
    keys = [key_of("images", name) for name in names]
    assert keys[0] == "images-refcoco"
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch("[a-z0-9-]+", key) for key in keys)


@pytest.mark.parametrize(
    ("where", "words", "url"),
    [
        ("/data/vl/captions", "/data/vl/captions", "file:///data/vl/captions"),
        ("/a b/100% (old)", "/a b/100% (old)", "file:///a%20b/100%25%20%28old%29"),
        ("s3://bucket/a[b]\\c", "s3://bucket/a%5Bb%5D%5Cc", "s3://bucket/a%5Bb%5D%5Cc"),
        ("/" + 300 * "x", "/" + 300 * "x", "file:///" + 300 * "x"),
    ],
)
def test_a_link_leads_to_a_folder_with_any_name(where: str, words: str, url: str):
    assert link(where) == f"[{words}]({url})"


# --- curves -----------------------------------------------------------------------------------------------------------


def texts(image: str) -> set[str]:
    """The words in an SVG that is a data: URI."""
    head, _, data = image.partition(",")
    assert head == "data:image/svg+xml;base64"
    svg = ElementTree.fromstring(base64.b64decode(data, validate=True))
    return {"".join(element.itertext()).strip() for element in svg.iter() if "text" in element.tag}


def test_curves_show_losses_and_accuracies_with_their_last_values(tmp_path: Path):
    store = open_store(str(tmp_path))
    assert curves(store, "r") is None
    lines = [{"kind": "training", "step": step, "loss_words": 1 / step, "data_wait": 0.5} for step in range(1, 21)]
    store.put("runs/r/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    assert {"r: training loss", "loss_words 0.050"} <= texts(curves(store, "r"))
    of_run = {"learning_rate": 0.0002, "gradient_norm": 3.25, "samples_per_second": 50.0}
    lines.append({"kind": "training", "step": 21, "loss_words": 0.04} | of_run)
    lines.append({"kind": "validation", "step": 20, "words_accuracy": 0.5, "accuracy/yes/no": 1.0, "seconds": 3.0})
    store.put("runs/r/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    shown = texts(curves(store, "r"))
    assert {"r: training loss", "loss_words 0.040", "r: validation", "words_accuracy 0.500"} <= shown
    assert {"r: learning rate", "r: gradient norm", "r: samples/s"} <= shown
    assert {"learning_rate 0.0002", "gradient_norm 3.250", "samples_per_second 50.000"} <= shown
    assert not [text for text in shown if "data_wait" in text or "seconds" in text or "yes/no" in text]
    assert curves(store, "r") == curves(store, "r"), "no date, no random ids"
    lines.append(
        {"kind": "validation", "step": 21, "words_accuracy": 0.5, "sbu/words_accuracy": 0.25, "sbu/seconds": 1}
    )
    store.put("runs/r/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    assert texts(curves(store, "r")) - shown >= {"r: validation, sbu", "words_accuracy 0.250"}


def test_a_line_of_a_chart_is_thinned_and_passes_over_rows_without_the_value():
    rows = [{"step": step, "loss": step} | ({"odd": 1.0} if step % 2 else {}) for step in range(6000)]
    lines = lines_of(rows, "loss", "odd")
    assert [len(points) for points in lines.values()] == [6000, 3000]
    assert len(base64.b64decode(draw({"x": lines}).partition(",")[2])) < 30_000


# --- an artifact that grows -------------------------------------------------------------------------------------------


def moments(live: Live, lines: range) -> list[float]:
    """At which of these seconds after its start an artifact changes that is offered a change at each."""
    shown = []
    for seconds in lines:
        now = time.monotonic()
        live.started, live.shown = now - seconds, now - (seconds - shown[-1]) if shown else None
        if live.due:
            shown.append(seconds)
    return shown


def test_an_artifact_changes_at_most_each_hundredth_of_the_time_that_has_passed():
    day_and_a_half = range(0, 36 * 3600, 2)
    live = Live("collecting", "captions")
    assert moments(live, range(1800))[:3] == [0, 10, 20]
    assert 90 <= len(moments(live, range(1800))) <= 200
    assert 450 <= len(moments(live, day_and_a_half)) <= 650
    assert len(moments(Live("pretrain-curves", "r", share=0.05), day_and_a_half)) < 200


def test_the_log_of_a_long_training_is_short_and_never_silent_for_long():
    times = []
    clock = Mock(return_value=0)
    log = paced(times.append, clock=clock)
    for clock.return_value in range(0, 36 * 3600, 2):
        log(clock())
    assert times[:4] == [0, 6, 12, 18]
    assert len(times) < 700
    assert all(after - before <= max(6, after / 100 + 2) for before, after in zip(times, times[1:], strict=False))


def in_a_flow(work: Callable[[], object]) -> object:
    """What `work` returns in a flow run of the test server."""
    return flow(name="showing", validate_parameters=False)(work)()


@pytest.mark.usefixtures("prefect_server")
def test_an_artifact_is_made_once_and_then_changed(caplog: pytest.LogCaptureFixture):
    name = f"grows-{uuid.uuid4().hex[:6]}"

    def work() -> str:
        name_run("first", "a:1")
        name_run("second", "b:2")
        live = Live("showing", name)
        live.show("one")
        live.show("two")
        live.id = uuid.uuid4()  # of no artifact: the server refuses
        live.shown = None
        live.show("three")
        assert not live.due, "a server that refuses is left alone at the next line"
        return flow_run.get_id()

    run_id = in_a_flow(work)
    assert "the flow UI was not updated: PrefectHTTPStatusError: Client error '404" in caplog.text
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(run_id)
        mine = [artifact for artifact in client.read_artifacts(limit=200) if artifact.key == key_of("showing", name)]
    assert (run.name, run.tags, run.state_type.value) == ("second", ["a:1", "b:2"], "COMPLETED")
    assert [(artifact.data, artifact.type, artifact.flow_run_id) for artifact in mine] == [("two", "markdown", run.id)]


@pytest.mark.usefixtures("prefect_server")
def test_a_run_shows_its_stages_though_the_server_was_away_at_first(monkeypatch: pytest.MonkeyPatch):
    name, seen, runs, made = f"stages-{uuid.uuid4().hex[:6]}", [], {}, artifacts.MarkdownArtifact

    def first_away(**given: object) -> object:
        monkeypatch.setattr(artifacts, "MarkdownArtifact", made)
        raise ConnectionError("no server")

    monkeypatch.setattr(artifacts, "MarkdownArtifact", first_away)

    def note() -> None:
        with get_client(sync_client=True) as client:
            (one,) = [one for one in client.read_artifacts(limit=200) if one.key == key_of("pipeline", name)]
        assert str(one.flow_run_id) == runs["parent"]
        seen.append((cells(one.data)[1:], one.data.splitlines()[-1]))

    @flow(name="stage", validate_parameters=False)
    def stage(which: str) -> str:
        runs[which] = flow_run.get_id()
        show_progress(lambda: {"step": "3 of 9", "loss": "words 1", "time left": "7"})
        note()
        show_progress(lambda: pytest.fail("not due again so soon"))
        if which == "b":
            raise ValueError("no file\nand more")
        return which

    def work() -> None:
        runs["parent"] = flow_run.get_id()
        stages = Stages(name, ["a", "b", "c"])
        assert stages.run("a", lambda: stage("a"), lambda result: f"made {result}") == "a"
        note()
        with pytest.raises(ValueError, match="no file"):
            stages.run("b", lambda: stage("b"), str)
        note()

    in_a_flow(work)
    a, b = (f"[{which}](/runs/flow-run/{runs[which]})" for which in "ab")
    rows = [[row[:4] + row[5:] for row in table] for table, _ in seen]  # without the seconds
    assert rows[0] == [[a, "3 of 9", "words 1", "7", "running"], ["b", *[""] * 4], ["c", *[""] * 4]]
    assert rows[1][0] == [a, "", "", "", "made a"]
    assert rows[3] == [[a, "", "", "", "made a"], [b, "", "", "", "failed"], ["c", *[""] * 4]]
    assert seen[3][1] == r"- **b** failed: ValueError\: no file"
    in_a_flow(lambda: show_progress(lambda: pytest.fail("of no pipeline")))


def test_a_stage_that_a_signal_ends_is_not_running(monkeypatch: pytest.MonkeyPatch):
    shown = []
    monkeypatch.setattr(Live, "show", lambda live, content: shown.append(content))
    with pytest.raises(TerminationSignal):
        Stages("r", ["a"]).run("a", Mock(side_effect=TerminationSignal(signal.SIGTERM)), str)
    assert cells(shown[-1])[1][-1] == "ended"
    assert shown[-1].splitlines()[-1].startswith("- **a** ended: TerminationSignal")


def test_facts_that_cannot_be_had_are_not_asked_for_at_each_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Live, "show", lambda live, content: None)
    stages, facts = Stages("r", ["a"]), Mock(side_effect=StorageUnreachable("no bucket"))

    def work() -> None:
        for _ in range(3):
            stages.rows["a"].run = "known"
            show_progress(facts)

    stages.run("a", work, str)
    assert facts.call_count == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no file\nand more"), "ValueError: no file"),
        (ValueError(), "ValueError: "),
        (
            ChildFailed(["python", "-m", "x"], 3, ["a", "the cause"], "it failed with 3"),
            "ChildFailed: it failed with 3: the cause",
        ),
        (ChildTimedOut(["python"], -15, [], "it took longer than 3 s"), "ChildTimedOut: it took longer than 3 s"),
    ],
)
def test_a_reason_is_one_line_and_of_a_child_its_last_words(error: Exception, line: str):
    assert reason_of(error) == line


def test_reporting_fails_nothing_and_lets_a_signal_pass(caplog: pytest.LogCaptureFixture):
    publish("images", "captions", AWAY)
    assert "the flow UI was not updated: StorageUnreachable: no bucket" in caplog.text
    for end in (KeyboardInterrupt(), SystemExit(1), TerminationSignal(signal.SIGTERM)):
        with pytest.raises(type(end)), reporting():
            raise end


# --- trainings --------------------------------------------------------------------------------------------------------

BEAT = {"step": 0, "steps": 5000, "state": "training", "losses": None, "seconds": 9.0, "seconds_left": None}
BEAT |= {"detector": "d-1", "snapshot": "abc"}
LOSSES = {"losses": {"words": 1.2346, "regions": 2.0}, "counts": {"skipped": 2}, "seconds_left": 3723.0}
LOSSES |= {"samples_per_second": 9.54, "data_wait": 0.031}


def test_a_training_shows_its_heartbeats_and_asks_a_storage_that_is_away_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    opened, shown, named = Mock(side_effect=StorageUnreachable("no bucket")), [], []
    monkeypatch.setattr("flows.torchrun.open_store", opened)
    monkeypatch.setattr("flows.torchrun.show_progress", lambda facts=dict: shown.append(dict(facts())))
    monkeypatch.setattr("flows.torchrun.name_run", lambda *words: named.append(words))
    monitor = TrainingMonitor("pretrain", "s3://bucket/root", "pretrain_vlbert_demo", "r")
    monitor.progress.attempted()
    monitor(BEAT)
    assert not opened.called
    for step in range(1, 30):
        monitor(BEAT | LOSSES | {"step": step})
    assert opened.call_count == 1
    assert caplog.text.count("the flow UI was not updated") == 1
    tags = ("recipe:pretrain_vlbert_demo", "detector:d-1", "snapshot:abc")
    assert named == [("pretrain_vlbert_demo r on d-1 snapshot abc", *tags)], "once"
    assert shown[1] == {"step": "0 of 5000", "time gone": "0:09", "state": "training"}
    assert {"step": "29 of 5000", "loss": "words 1.235  regions 2.000  skipped 2", "time left": "1:02:03"}.items() <= (
        shown[-1].items()
    )


def test_a_heartbeat_that_cannot_be_read_is_logged_once_and_read_again(tmp_path: Path):
    store, beats, logged = open_store(str(tmp_path)), [], []
    store.put("runs/r/heartbeat.json", b"{}")
    heartbeat = Heartbeat(str(tmp_path), "r", beats.append, logged.append)
    heartbeat.read()
    assert beats == [], "of an earlier training"
    store.put("runs/r/heartbeat.json", b"{torn")
    heartbeat.read()
    heartbeat.read()
    assert len(logged) == 1
    before = heartbeat.heard
    store.put("runs/r/heartbeat.json", b'{"state": "training"}')
    heartbeat.read()
    heartbeat.read()
    assert beats == [{"state": "training"}]
    assert heartbeat.heard > before


def test_the_heartbeat_of_an_earlier_training_is_not_taken_for_ours_where_the_storage_was_away_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, beats = open_store(str(tmp_path)), []
    store.put("runs/r/heartbeat.json", b'{"time": "2026-01-01T00:00:00.000+00:00", "state": "stopped"}')
    with monkeypatch.context() as away:
        away.setattr("flows.torchrun.open_store", AWAY)
        heartbeat = Heartbeat(str(tmp_path), "r", beats.append, print)
    heartbeat.read()
    assert (beats, heartbeat.state) == ([], None)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    store.put("runs/r/heartbeat.json", json.dumps({"time": now, "state": "training"}).encode())
    heartbeat.read()
    assert heartbeat.state == "training"
