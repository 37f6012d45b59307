"""What the flow UI shows: tables, links, curves, and artifacts that grow; a UI that is away stops nobody."""

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
from prefect.exceptions import TerminationSignal

from flows import artifacts
from flows.artifacts import (
    Live,
    Stage,
    Stages,
    commonest_reasons,
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
from flows.curves import curves, draw
from flows.supervisor import ChildFailed, ChildTimedOut
from flows.torchrun import Heartbeat, TrainingMonitor
from storage.catalog import Catalog, Row
from storage.object_store import StorageUnreachable, open_store

IMAGES = "images"


def catalog_of(folder: Path, *shards: Sequence[tuple[str, str]]) -> Catalog:
    """A dataset whose shards have rows with these statuses and details."""
    catalog, number = Catalog(open_store(str(folder)), "captions"), 0
    for index, rows in enumerate(shards):
        table = [Row(number + i, f"{number + i:020d}", *row) for i, row in enumerate(rows)]
        catalog.commit(IMAGES, f"{index:05d}", [], table, {"source": {}})
        number += len(rows)
    return catalog


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_table_counts_every_status_and_quotes_the_web_as_plain_words(tmp_path: Path):
    hostile = "[x](javascript:alert(1)) | <b>`\\` http://a.example/_x_\n" + "y" * 300
    catalog = catalog_of(
        tmp_path,
        [("http_404", hostile), ("http_404", hostile), ("timeout", "")],
        [("http_404", hostile)],
    )
    lines = table_of_counts(catalog, IMAGES).splitlines()
    assert lines[0] == f"4 rows in 2 shards, written to {link(f'{tmp_path}/captions/images')}"
    assert lines[2:6] == [
        "| status | rows | share |",
        "|---|---:|---:|",
        r"| http\_404 | 3 | 75.0% |",
        "| timeout | 1 | 25.0% |",
    ]
    assert lines[7].startswith("The commonest reasons")
    assert lines[9].startswith(
        r"- **http\_404**, 3 rows: \[x\]\(javascript\:alert\(1\)\) \| \<b\>\`\\\` http\:\/\/a\.example\/\_x\_ yyy"
    )
    assert lines[9].count("y") == 200 - hostile.index("y")
    assert lines[10:] == ["- **timeout**, 1 row"]


def test_details_that_differ_in_numbers_alone_are_one_reason_counted_over_all_shards(tmp_path: Path):
    catalog = catalog_of(
        tmp_path,
        [("timeout", "after 3.0 s"), ("timeout", "after 12.25 s"), ("connect", "after 3.0 s")],
        [("timeout", "after 7.5 s"), ("damaged", "sha256 is 12ab34cd"), ("timeout", "of the name server")],
        [("damaged", "sha256 is ffeeddcc"), ("timeout", "after 4.0 s")],
    )
    shards = catalog.shards(IMAGES)
    assert sorted(commonest_reasons(catalog, IMAGES, shards)) == [
        ("connect", 1, "after 3.0 s"),
        ("damaged", 2, "sha256 is 12ab34cd"),
        ("timeout", 1, "of the name server"),
        ("timeout", 4, "after 12.25 s"),
    ]
    assert commonest_reasons(catalog, IMAGES, shards)[:2] == [
        ("timeout", 4, "after 12.25 s"),
        ("damaged", 2, "sha256 is 12ab34cd"),
    ]
    assert commonest_reasons(catalog, IMAGES, shards[2:])[0][1] == 1  # of these shards alone


def test_a_table_shows_the_ten_commonest_reasons(tmp_path: Path):
    words = ["alpha", "bravo", "golf", "delta", "echo", "hotel", "india", "kilo", "lima", "mike", "november", "oscar"]
    # The later the word, the more often: twelve reasons, from 1 row to 12.
    rows = [("http_error", word) for number, word in enumerate(words) for _ in range(number + 1)]
    catalog = catalog_of(tmp_path, rows[::2], rows[1::2])
    found = commonest_reasons(catalog, IMAGES, catalog.shards(IMAGES))
    assert [(rows, word) for _, rows, word in found] == [(n + 1, words[n]) for n in range(11, 1, -1)]
    table = table_of_counts(catalog, IMAGES)
    assert table.count("\n- **http\\_error**, ") == 10
    assert "| 78 | 100.0% |" in table


def test_a_table_of_metrics_has_the_papers_number_and_progress_is_a_row_a_fact():
    where = "s3://bucket/vl-root/runs/x/step-0000004"
    table = table_of_metrics({"accuracy": 0.5, "chance_of_it": 1 / 3}, where, "79.88 val")
    assert "\n| accuracy | 0.500 |\n| chance\\_of\\_it | 0.333 |" in table
    assert "on the real data:** 79\\.88 val\n" in table
    assert link(where) in table
    numbers = {"accuracy": 0.5, "accuracy/yes/no": 1.0, "chance": 0.25}
    beside = table_of_metrics(numbers, where, "", {"accuracy": "79.88 base|", "exact": "1"})
    assert "| metric | value | the paper, % |\n|---|---:|---|\n| accuracy | 0.500 | 79\\.88 base\\| |\n" in beside
    assert beside.endswith("\n| chance | 0.250 |  |")
    assert table_of_progress({"step": "4 of 8", "left": "a|b"}) == "| step | 4 of 8 |\n|---|---:|\n| left | a\\|b |"


def test_a_table_of_an_evaluation_links_its_files_and_leaves_parts_of_the_split_to_its_page():
    metrics = {"accuracy": 0.5, "accuracy/yes/no": 0.25, "odd": None}
    table = table_of_evaluation(metrics, {"accuracy": "71.16"}, "/r/evaluations/val-step-1", ("results.json",))
    assert table.splitlines() == [
        f"Page {link('/r/evaluations/val-step-1/index.html')}",
        "",
        f"Submission {link('/r/evaluations/val-step-1/results.json')}",
        "",
        "| metric | value | the paper, % |",
        "|---|---:|---|",
        "| accuracy | 0.500 | 71\\.16 |",
        "| odd | – |  |",
    ]


def test_a_stage_that_has_a_run_is_a_link_whose_words_are_not_escaped():
    begun, waits = Stage("collect held-out|x", run="id"), Stage("held-out|x")
    assert table_of_stages([begun, waits]).splitlines()[2:] == [
        "| [collect held-out%7Cx](/runs/flow-run/id) |  |  |  |  |  |",
        r"| held\-out\|x |  |  |  |  |  |",
    ]


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


def texts(svg: str) -> list[str]:
    return [
        "".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter() if "text" in element.tag
    ]


def test_curves_name_the_run_and_the_last_value_of_each_line():
    training = [
        {"step": step, "loss_words": 1 / step, "loss_regions": 2.0, "learning_rate": 1e-5 * step, "data_wait": 0.5}
        | {"samples_per_second": 30.0 + step}
        | ({"gradient_norm": 3.25} if step < 20 else {})  # all steps of the last line were left out
        for step in range(1, 21)
    ]
    validation = [
        {"step": 10, "words_accuracy": 0.25, "seconds": 3.0},
        {"step": 20, "words_accuracy": 0.5, "monitored_accuracy_grounding_gap": 0.125, "accuracy/yes/no": 1.0},
    ]
    shown = texts(draw("a <b> run", training, validation))
    assert "a <b> run: training loss" in shown
    assert "a <b> run: validation" in shown
    assert {"loss_words 0.050", "loss_regions 2.000"} <= set(shown)
    assert {"words_accuracy 0.500", "monitored_accuracy_grounding_gap 0.125"} <= set(shown)
    assert {"learning rate 0.0002", "gradient norm 3.25", "samples/s 50"} <= set(shown)
    assert not [text for text in shown if "data_wait" in text or "seconds" in text or "yes/no" in text]
    bare = [{"step": 1, "loss_words": 1.0}]
    assert not [text for text in texts(draw("x", bare, [])) if "norm" in text or "rate" in text or "/s" in text]
    assert draw("x", training, validation) == draw("x", training, validation)  # no date, no random ids
    assert not [text for text in texts(draw("x", training, [])) if "validation" in text]


def test_a_run_has_no_curves_before_its_first_line_and_those_of_whole_lines_after_it(tmp_path: Path):
    store = open_store(str(tmp_path))
    assert curves(store, "r") is None
    store.put("runs/r/metrics.jsonl", b'{"kind": "training", "st')
    assert curves(store, "r") is None
    store.put("runs/r/metrics.jsonl", b'{"kind": "training", "step": 1, "loss_words": 2.5}\n{"kind": "tr')
    head, _, data = curves(store, "r").partition(",")
    assert head == "data:image/svg+xml;base64"
    assert "loss_words 2.500" in texts(base64.b64decode(data, validate=True).decode())


# --- an artifact that grows -------------------------------------------------------------------------------------------


def test_an_artifact_is_shown_at_most_each_hundredth_of_the_time_that_has_passed():
    live, now = Live("detecting", "captions", seconds=10.0), time.monotonic()
    assert live.due  # nothing is shown yet

    def due(age: float, since_shown: float) -> bool:
        live.started, live.shown = now - age, now - since_shown
        return live.due

    assert (due(60, 8), due(60, 11)) == (False, True)
    assert (due(900, 8), due(900, 11)) == (False, True)  # a hundredth is 9 s: the 10 are more
    assert (due(10_000, 90), due(10_000, 105)) == (False, True)
    assert (due(200_000, 1990), due(200_000, 2010)) == (False, True)


def in_a_flow(work: Callable[[], object]) -> object:
    """What `work` returns in a flow run of the test server."""
    from prefect import flow

    return flow(name="showing", validate_parameters=False)(work)()


@pytest.mark.usefixtures("prefect_server")
def test_one_artifact_is_made_and_then_changed_and_a_server_that_refuses_is_logged(caplog: pytest.LogCaptureFixture):
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    name = f"grows-{uuid.uuid4().hex[:6]}"

    def work() -> str:
        name_run("first", "a:1")
        name_run("second", "b:2")
        live = Live("showing", name)
        live.show("one")
        made = live.id
        live.show("two")
        assert live.id == made
        live.id = uuid.uuid4()  # of no artifact: the server refuses
        live.shown = None
        live.show("three")
        assert not live.due, "a server that refuses is not asked at every line"
        return flow_run.get_id()

    run_id = in_a_flow(work)
    assert "the flow UI was not updated: PrefectHTTPStatusError: Client error '404" in caplog.text
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(run_id)
        mine = [artifact for artifact in client.read_artifacts(limit=200) if artifact.key == key_of("showing", name)]
    assert (run.name, run.tags, run.state_type.value) == ("second", ["a:1", "b:2"], "COMPLETED")
    assert [(artifact.data, artifact.type, artifact.flow_run_id) for artifact in mine] == [("two", "markdown", run.id)]


@pytest.mark.usefixtures("prefect_server")
def test_a_run_shows_its_stages_and_links_to_their_runs_though_the_server_was_away_at_first(
    monkeypatch: pytest.MonkeyPatch,
):
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    name, seen, runs, made = f"stages-{uuid.uuid4().hex[:6]}", [], {}, artifacts.MarkdownArtifact

    def first_away(**given: object) -> object:
        monkeypatch.setattr(artifacts, "MarkdownArtifact", made)
        raise ConnectionError("no server")

    monkeypatch.setattr(artifacts, "MarkdownArtifact", first_away)

    def rows() -> list[str]:
        with get_client(sync_client=True) as client:
            (one,) = [one for one in client.read_artifacts(limit=200) if one.key == key_of("pipeline", name)]
        assert str(one.flow_run_id) == runs["parent"]
        return [re.sub(r"\d+( \| [^|]+ \|)$", r"N\1", line) for line in one.data.splitlines()[2:]]

    @flow(name="stage", validate_parameters=False)
    def stage(which: str) -> str:
        runs[which] = flow_run.get_id()
        show_progress(lambda: {"step": "3 of 9", "loss": "words 1", "time left": "7"})
        seen.append(rows())
        show_progress(lambda: pytest.fail("not due again so soon"))
        if which == "b":
            raise ValueError("no file\nand more")
        return which

    def work() -> None:
        runs["parent"] = flow_run.get_id()
        stages = Stages(name, ["a", "b", "c"])
        assert stages.run("a", lambda: stage("a"), lambda result: f"made {result}") == "a"
        seen.append(rows())
        with pytest.raises(ValueError, match="no file"):
            stages.run("b", lambda: stage("b"), str)
        seen.append(rows())

    in_a_flow(work)
    a, b = (f"| [{which}](/runs/flow-run/{runs[which]})" for which in "ab")
    waits = ["| b |  |  |  |  |  |", "| c |  |  |  |  |  |"]
    assert seen[0] == [a + " | 3 of 9 | words 1 | 7 | N | at work |", *waits]
    assert seen[1] == [a + " |  |  |  | N | made a |", *waits]
    assert seen[3] == [
        a + " |  |  |  | N | made a |",
        b + " |  |  |  | N | failed |",
        waits[1],
        "",
        r"- **b** failed: ValueError\: no file",
    ]
    in_a_flow(lambda: show_progress(lambda: pytest.fail("of no pipeline")))


BEAT = {"step": 0, "steps": 5000, "state": "training", "losses": None, "seconds": 9.0, "seconds_left": None}
BEAT |= {"detector": "d-1", "snapshot": "abc"}
LOSSES = {"losses": {"words": 1.2346, "regions": 2.0}, "counts": {"skipped": 2}, "seconds_left": 3723.0}
LOSSES |= {"samples_per_second": 9.54, "data_wait": 0.031}


def test_a_training_shows_its_last_heartbeat_and_asks_a_storage_that_is_away_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    asked, shown, named = [], [], []

    def away(root: str, write: bool) -> None:
        asked.append(root)
        raise StorageUnreachable("no bucket")

    monkeypatch.setattr("flows.torchrun.open_store", away)
    monkeypatch.setattr("flows.torchrun.show_progress", lambda facts=dict: shown.append(dict(facts())))
    monkeypatch.setattr("flows.torchrun.name_run", lambda *words: named.append(words))
    monitor = TrainingMonitor("pretrain", "s3://bucket/root", "pretrain_vlbert_demo", "r")
    monitor.progress.attempted()
    monitor(BEAT)
    assert asked == []
    for step in range(1, 30):
        monitor(BEAT | LOSSES | {"step": step})
    assert len(asked) == 1, "and not at each heartbeat"
    assert caplog.text.count("the flow UI was not updated") == 1
    tags = ("recipe:pretrain_vlbert_demo", "detector:d-1", "snapshot:abc")
    assert named == [("pretrain_vlbert_demo r on d-1 snapshot abc", *tags)], "once"
    assert shown[:2] == [{}, {"step": "0 of 5000", "time gone": "0:09", "state": "training"}]
    assert shown[-1] == {
        "step": "29 of 5000",
        "loss": "words 1.235  regions 2.000  skipped 2",
        "samples/s": "9.5",
        "data wait": "3 %",
        "time gone": "0:09",
        "time left": "1:02:03",
        "state": "training",
    }


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
        away.setattr("flows.torchrun.open_store", Mock(side_effect=StorageUnreachable("no bucket")))
        heartbeat = Heartbeat(str(tmp_path), "r", beats.append, print)
    heartbeat.read()
    assert (beats, heartbeat.state) == ([], None)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    store.put("runs/r/heartbeat.json", json.dumps({"time": now, "state": "training"}).encode())
    heartbeat.read()
    assert heartbeat.state == "training"


def test_facts_that_cannot_be_had_are_not_asked_for_at_each_call(monkeypatch: pytest.MonkeyPatch):
    asked, stages = [], Stages.__new__(Stages)
    stages.live, stages.rows = Live("pipeline", "r"), {"a": Stage("a")}
    monkeypatch.setattr(stages.live, "show", lambda content: None)

    def facts() -> dict[str, str]:
        asked.append(1)
        raise StorageUnreachable("no bucket")

    def work() -> None:
        for _ in range(3):
            stages.rows["a"].run = "known"
            show_progress(facts)

    stages.run("a", work, str)
    assert len(asked) == 1


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


def test_a_stage_that_a_signal_ends_is_not_at_work(monkeypatch: pytest.MonkeyPatch):
    shown = []
    monkeypatch.setattr(Live, "show", lambda live, content: shown.append(content))

    def work() -> None:
        raise TerminationSignal(signal.SIGTERM)

    with pytest.raises(TerminationSignal):
        Stages("r", ["a"]).run("a", work, str)
    row, reason = shown[-1].splitlines()[2], shown[-1].splitlines()[-1]
    assert row.endswith("| ended |")
    assert reason.startswith("- **a** ended: TerminationSignal")


def test_a_table_that_cannot_be_read_and_a_place_outside_any_run_fail_nothing(caplog: pytest.LogCaptureFixture):
    def table() -> str:
        raise StorageUnreachable("no bucket")

    publish("images", "captions", table)
    assert "the flow UI was not updated: StorageUnreachable: no bucket" in caplog.text


@pytest.mark.usefixtures("prefect_server")
def test_reporting_swallows_what_goes_wrong_and_lets_a_signal_pass(caplog: pytest.LogCaptureFixture):
    class Cancelled(BaseException):
        """As what Prefect raises in the flow at SIGTERM."""

    def work() -> list[str]:
        passed = []
        with reporting():
            raise ConnectionError("no server")
        for end in (KeyboardInterrupt(), SystemExit(1), Cancelled()):
            try:
                with reporting():
                    raise end
            except BaseException as error:  # noqa: BLE001  the very ones that must come through
                passed.append(type(error).__name__)
        return passed

    assert in_a_flow(work) == ["KeyboardInterrupt", "SystemExit", "Cancelled"]
    warnings = [record.getMessage() for record in caplog.records if "was not updated" in record.getMessage()]
    assert warnings == ["the flow UI was not updated: ConnectionError: no server"]
