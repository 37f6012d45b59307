"""The driver of `make demo`: whose root it works on, what it prints, and its Prefect. The road itself: test_flows."""

import dataclasses
import json
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

import demo.__main__ as demo
from demo.world import DEFAULT_PORT, WorldSettings, draw_world
from flows.settings import quiet_prefect
from flows.training import Trained

PROJECT = Path(__file__).parents[1]
TINY = WorldSettings(
    train_scenes=2, held_out_scenes=1, broken_rows=0, text_lines=1, refcoco_train=1, refcoco_held_out=0
)


@pytest.mark.parametrize(
    ("grounding", "with_it", "without", "failed"),
    [
        (0.12, 0.5, 0.4, []),
        (0.11, 0.5, 0.4, ["grounding is 0.110"]),
        (0.3, 0.25, 0.2, ["not over chance"]),
        (0.3, 0.4, 0.4, ["not over 0.400 without it"]),
        (0.0, 0.1, 0.4, ["grounding is 0.000", "not over chance", "not over 0.400 without it"]),
    ],
)
def test_the_gates_name_what_was_not_learned(grounding: float, with_it: float, without: float, failed: list[str]):
    from flows.pipeline import Road

    def trained(run: str, metrics: dict[str, float]) -> Trained:
        return Trained(run, "recipe", "detector", "snapshot", "", metrics, 1.0, 1)

    finetuned = [
        trained(demo.RUNS["with"], {"accuracy": with_it, "chance": 0.25}),
        trained(demo.RUNS["without"], {"accuracy": without, "chance": 0.25}),
    ]
    road = Road([], {}, trained("pretrain", {"watched_accuracy_grounding": grounding}), finetuned, 1)
    messages = demo.gates(road)
    assert len(messages) == len(failed)
    for message, part in zip(messages, failed, strict=True):
        assert message.startswith("GATE FAILED: ")
        assert part in message


def logged(said: str, kind: str = "Flow", name: str = "finetune_refcoco_demo finetune-with on a1 snapshot b2") -> bytes:
    """A line of a worker's log."""
    return f"10:11:12.345 | INFO    | {kind} run '{name}' - {said}\n".encode()


def test_what_stages_say_is_shown_as_the_workers_log_grows_and_prefects_own_words_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    log, shown = tmp_path / "worker.log", []

    def until(lines: int) -> None:
        deadline = time.monotonic() + 10
        while len(shown) < lines:
            assert time.monotonic() < deadline, shown
            shown.extend(capsys.readouterr().out.splitlines())
            time.sleep(0.02)

    log.write_text("Worker 'ProcessWorker' started!\n")
    with log.open("ab", buffering=0) as file, demo.stages_shown(log):
        file.write(logged("captions: 4 of 9 shards collected: ok 380, timeout 5"))
        file.write(logged("Finished in state Completed()", "Task", "captions from 00000"))
        file.write(logged("refcoco+: nothing to detect", "Task", "refcoco+"))
        until(2)
        half = logged("pretrain is complete: é")
        file.write(half[:-2])  # the first byte of the last letter
        time.sleep(0.5)  # two looks
        file.write(half[-2:])
        until(3)
        file.write(logged("the flow UI was not told: captions: x"))
        file.write(logged("finetune-with: step 4/4"))
        file.write(logged("finetune-without: the last words"))
        file.write(logged("captions: half a li")[:-1])  # of a worker that was killed
    shown += capsys.readouterr().out.splitlines()
    assert shown == [
        "10:11:12  captions: 4 of 9 shards collected: ok 380, timeout 5",
        "10:11:12  refcoco+: nothing to detect",
        "10:11:12  pretrain is complete: é",
        "10:11:12  finetune-with: step 4/4",
        "10:11:12  finetune-without: the last words",
    ]


def test_the_demo_has_a_prefect_of_its_own_that_no_proxy_stands_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "example.org, 127.0.0.1")
    told = quiet_prefect(tmp_path)
    assert told["no_proxy"] == told["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("NO_PROXY", "*")
    assert quiet_prefect(tmp_path)["NO_PROXY"] == "*"


def test_the_commands_that_are_printed_name_the_root_and_the_seed(tmp_path: Path):
    assert demo.again("ui", Path("demo-root")) == "make ui ROOT=demo-root"
    assert demo.again("demo", Path("my root"), 3) == "make demo ROOT='my root' SEED=3"
    with pytest.raises(ValueError, match=f"run it first: make demo ROOT={re.escape(str(tmp_path))}/none"):
        demo.show_ui(tmp_path / "none", 4200)

    def make(what: str) -> str:
        command = ["make", "--dry-run", "--old-file=.venv/installed", what, "ROOT=my root", "SEED=3"]
        return subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout

    assert '-m demo --root "my root" --seed 3' in make("demo")
    assert '-m demo ui --root "my root"' in make("ui")


def test_make_clean_removes_what_a_demo_made_and_nothing_else(tmp_path: Path):
    def clean(root: Path) -> int:
        return subprocess.run(
            ["make", "clean", f"ROOT={root}"], cwd=PROJECT, capture_output=True, check=False
        ).returncode

    mine, made = tmp_path / "my thesis", tmp_path / "my demo"
    mine.mkdir()
    (made / "world").mkdir(parents=True)
    (made / "world" / "world.json").touch()
    assert clean(mine) != 0
    assert mine.exists()
    assert clean(made) == 0
    assert not made.exists()
    assert clean(tmp_path / "nothing") == 0


def test_a_root_of_another_seed_or_version_is_refused_before_anything_is_drawn(tmp_path: Path):
    world = draw_world(tmp_path / "my root" / "world", TINY, 9001)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    root = re.escape(str(tmp_path)) + "/my root"
    elsewhere = f"(?s)make demo ROOT=OTHER.*make clean ROOT='{root}'"
    with pytest.raises(demo.OtherWorld, match=elsewhere) as refused:
        demo.draw(world.root, dataclasses.replace(TINY, seed=1))
    assert f"make demo ROOT='{tmp_path}/my root'. " in str(refused.value)
    with pytest.raises(SystemExit, match="^error: .* holds the world of seed 0, not of seed 1"):
        demo.main(["--root", str(world.root.parent), "--seed", "1"])
    assert demo.draw(world.root, TINY).port == 9001  # the one that stands in its lists
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    about = json.loads(world.about.read_text())
    world.about.write_text(json.dumps(about | {"version": 0}))
    with pytest.raises(demo.OtherWorld, match=elsewhere):
        demo.draw(world.root, TINY)


def test_another_port_than_the_usual_one_is_said_loudly(tmp_path: Path, capsys: pytest.CaptureFixture):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if other.connect_ex(("127.0.0.1", DEFAULT_PORT)):  # else it is taken already: as good
            other.close()
            with socket.create_server(("127.0.0.1", DEFAULT_PORT)):
                world = demo.draw(tmp_path / "world", TINY)
        else:
            world = demo.draw(tmp_path / "world", TINY)
    assert world.port != DEFAULT_PORT
    assert f"WARNING: port {DEFAULT_PORT} is taken, so the world is served at {world.port}" in capsys.readouterr().out


def test_the_table_says_whose_memory_it_shows():
    lines = demo.table([demo.Stage("detect", 12.34, 250_000_000)]).splitlines()
    assert lines[1].endswith("peak MB of one process")
    assert lines[2].split() == ["detect", "12.3", "30", "250"]
