"""A flow, its worker, or both die while it detects or trains: nothing is left of it, and the next run goes on.

Real server, worker, detector and torchrun. `pytest -m "" -s tests/flows/test_nothing_left.py` prints a line for each.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from operated import ENDED, Operated, operated, operated_apart, running, server_of, tiny_pipeline, wait_until
from pydantic import TypeAdapter

from demo.data import DemoData
from storage.collect.plan import CollectSettings
from storage.collect.run import collect

pytestmark = pytest.mark.slow

AWAY = 75.0  # seconds without a server: signs of life may be missing for 70
CANCELLED = 10.0  # seconds after which a cancelled run has no process
LEFT = 5.0  # seconds after which no process may be left
ALARM = 90.0  # seconds after which every run must have ended for the server, too
# A network of the real size with few proposals: about a second a shard, so that there is something to interrupt.
SLOW = {"preset": "vg_resnet50", "random_init": True, "network": {"short_side": 320, "post_nms": 20}}
STEPS = ["--steps=100000", "--save_every=10", "--log_every=5", "--validate_every=100000"]
STEPS += ["--data.batch=8", "--data.text_batch=2"]
TABLE = [("kill -9 of the flow", "detection")]
TABLE += [(event, "training") for event in ("cancel", "SIGTERM to the flow", "kill -9 of the flow")]


@pytest.fixture(scope="module")
def pipeline(demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A pipeline of its own root: a training without end on two processes."""
    parameters = tiny_pipeline(demo_data, tmp_path_factory.mktemp("nothing-left") / "root", processes=2)
    parameters["datasets"][:] = parameters["datasets"][:1]
    parameters["datasets"][0] |= {"rows_per_shard": 100, "shards_per_task": 1}
    pretraining = parameters["pretraining"]
    pretraining |= {"overrides": [*pretraining["overrides"], *STEPS], "held_out": []}
    return parameters | {"finetunings": []}


@pytest.fixture(scope="module")
def collected(demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root of its own, where no pipeline detects with another detector: more shards of one row than are used up."""
    return collect_rows(demo_data, tmp_path_factory.mktemp("collected"))


def collect_rows(demo_data: DemoData, root: Path) -> str:
    rows = [row for row in demo_data.train_tsv.read_text().splitlines() if "/broken/" not in row]
    (root / "rows.tsv").write_text("".join(f"{row}\n" for row in 3 * rows))
    source = tiny_pipeline(demo_data, root)["datasets"][0] | {"captions": str(root / "rows.tsv")}
    source = source | {"rows_per_shard": 1, "shards_per_task": 100}
    del source["detector"]
    settings = TypeAdapter(CollectSettings).validate_python(source)
    collect(str(root), settings, lambda line: None)  # not by the flow, whose event would have them detected
    return str(root)


def waiting(root: str) -> int:
    return len(list(Path(root).glob("captions/images/*.parquet"))) - len(committed(root))


def committed(root: str) -> dict[str, int]:
    """The manifests of the slow detector's shards, and when each was written."""
    return {str(file): file.stat().st_mtime_ns for file in Path(root).glob("captions/regions/*/*.parquet")}


def detecting(served: Operated, root: str) -> str:
    """A run of the slow detector that can be interrupted."""
    assert waiting(root) >= 6, "the tests before used up the others; collect more"
    return served.start("detect-regions/default", root=root, detector=SLOW, datasets=["captions"])


def checkpoints(root: str) -> list[str]:
    return sorted(file.parent.name for file in Path(root).glob("runs/pretrain/step-*/state.json"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("event", "stage"), TABLE)
def test_nothing_is_left_and_the_next_run_goes_on(
    served: Operated, pipeline: dict, collected: str, event: str, stage: str
):
    lines = served.listen()
    if stage == "detection":
        before, left = committed(collected), waiting(collected)
        run = detecting(served, collected)

        def progress() -> list[str]:  # `kill -9` loses what the flow has not printed yet, so the test waits for it
            return [line for line in lines() if " shards: " in line and "captions: " in line]

        served.wait_for(run, lambda: len(committed(collected)) >= len(before) + 2 and progress(), 90)
        found = interrupt(served, run, event, "vlbert detect")
        assert before.items() <= committed(collected).items(), "a shard was committed twice"
        assert f"captions: 1 of {left} shards: " in progress()[0], "it began with what the runs before it had left"
    else:
        run, before = training(served, pipeline)
        found = interrupt(served, run, event, "vlbert.train")
        resumes = f"pretrain resumes from {pipeline['root']}/runs/pretrain/"
        assert not before or any(resumes + before[-1] in line for line in lines())
    print(f"\n| {event} | {stage} | {found} |")
    assert found["gone"] <= LEFT
    assert found["all_ended"] <= ALARM
    assert found["state"] == ("CANCELLED" if event == "cancel" else "CRASHED")


def training(served: Operated, pipeline: dict) -> tuple[str, list[str]]:
    """A run of the pipeline that has written a new checkpoint, and the checkpoints before it."""
    before = checkpoints(pipeline["root"])
    run = served.start("pretrain-vlbert/default", **pipeline)
    served.wait_for(run, lambda: set(checkpoints(pipeline["root"])) - set(before), 240)
    return run, before


def interrupt(served: Operated, run: str, event: str, child: str) -> dict:
    """Do `event` to a run whose child is at work; seconds until nothing was left and until the server knew."""
    commands = served.processes(run)
    at_work = [command for command in commands.values() if child in command and "supervisor.py" not in command]
    assert len(at_work) == (3 if child == "vlbert.train" else 1), commands  # torchrun and two ranks
    if event == "cancel":
        cancel_by_command(served, run)
    else:
        flow, worker = served.process(run), served.worker()
        for pid in {"flow": [flow], "worker": [worker], "both": [worker, flow]}[event.split()[-1]]:
            os.kill(pid, signal.SIGTERM if event.startswith("SIGTERM") else signal.SIGKILL)
    started = time.monotonic()
    served.wait_for(run, lambda: not served.processes(run), 4 * LEFT)
    gone = time.monotonic() - started
    served.wait_for(run, lambda: served.state(run) in ENDED, ALARM + 10)
    ended = time.monotonic() - started
    runs = [child["id"] for child in served.below(run)]
    served.wait_for(run, lambda: all(served.state(one) in ENDED for one in runs), ALARM + 10)
    return {"gone": gone, "ended": ended, "all_ended": time.monotonic() - started, "state": served.state(run)}


def cancel_by_command(served: Operated, run: str) -> None:
    command = [sys.executable, "-m", "prefect", "flow-run", "cancel", run]
    subprocess.run(command, env=os.environ | served.variables, check=True, capture_output=True, timeout=60)


def cancel_by_page(served: Operated, run: str) -> None:
    state = {"type": "CANCELLING", "name": "Cancelling", "message": "Cancelled from the Prefect UI"}
    served.ask("POST", f"/flow_runs/{run}/set_state", state=state)


def at_work(served: Operated, pids: dict[str, int]) -> bool:
    """Whether each run is RUNNING, in the process that it had, and holds a place: not so where the server does not
    answer, whose SQLite may be locked for two minutes after a start."""
    try:
        held = [one["active_slots"] for one in served.ask("POST", "/v2/concurrency_limits/filter")]
        return held.count(1) == len(pids) and all(
            served.state(run) == "RUNNING" and served.process(run) == pid for run, pid in pids.items()
        )
    except httpx.HTTPError:
        return False


def cancelled(served: Operated, run: str, which: str, cancel: Callable[[Operated, str], None]) -> None:
    """Cancel `which`, the run or its stage, and see that all of it has ended in time, the lease of its place too."""
    held = served.ask("GET", f"/flow_runs/{run}")["state"]["state_details"]["deployment_concurrency_lease_id"]
    lease = served.home / "concurrency_leases" / f"{held}.json"
    assert lease.exists()
    cancel(served, which)
    seconds = served.wait_for(run, lambda: not served.processes(run), 4 * CANCELLED)
    served.wait_for(run, lambda: served.state(run) in ENDED, ALARM)
    print(f"\n| {cancel.__name__} | {'run' if which == run else 'stage'} | {seconds:.1f} | {served.state(run)} |")
    assert seconds <= CANCELLED
    assert served.state(run) == served.state(which) == "CANCELLED"
    assert not lease.exists(), "else it frees another run's place when it ends, a day later"
    assert {served.state(child["id"]) for child in served.below(run)} <= {"CANCELLED", "COMPLETED"}


def stage_of(served: Operated, run: str) -> str:
    (stage,) = [one["id"] for one in served.below(run) if one["state_type"] == "RUNNING"]
    return stage


@pytest.fixture
def three_at_a_time(served: Operated) -> Iterator[None]:
    """The deployment of the detection runs three times at once."""
    path = f"/deployments/{served.ask('GET', '/deployments/name/detect-regions/default')['id']}"
    served.ask("PATCH", path, concurrency_limit=3)
    yield
    served.ask("PATCH", path, concurrency_limit=1)


def others_of(served: Operated, run: str) -> list[str]:
    found = served.ask("POST", "/flow_runs/filter", flow_runs={"tags": {"all_": [f"with:{run}"]}})
    return [one["id"] for one in found]


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("three_at_a_time")
def test_a_detection_on_three_machines_shares_the_shards_and_is_cancelled_as_one(served: Operated, collected: str):
    before = committed(collected)
    slow = {"root": collected, "detector": SLOW, "datasets": ["captions"], "machines": 3}
    run = served.start("detect-regions/default", **slow)

    def at_work() -> int:
        return len({file.name.partition("-")[0] for file in Path(collected).glob("captions/regions/*/claims/*.txt")})

    served.wait_for(run, lambda: at_work() == 3 and len(committed(collected)) >= len(before) + 3, 240)
    runs = [run, *others_of(served, run)]
    assert len(runs) == 3
    assert before.items() <= committed(collected).items(), "a shard was committed twice"
    cancel_by_command(served, run)
    seconds = served.wait_for(run, lambda: not any(served.processes(one) for one in runs), 4 * CANCELLED)
    print(f"\n| cancel | detection on three machines | {seconds:.1f} | | | |")
    served.wait_for(run, lambda: all(served.state(one) in ENDED for one in runs), ALARM)
    assert seconds <= 2 * CANCELLED
    assert [served.state(one) for one in runs] == ["CANCELLED"] * 3
    assert at_work() == 0, "the claims are released"


@pytest.mark.timeout(400)
def test_more_machines_than_the_deployment_runs_at_a_time_are_refused(served: Operated, collected: str):
    run = served.start("detect-regions/default", root=collected, detector=SLOW, datasets=["captions"], machines=3)
    served.wait_for(run, lambda: served.state(run) in ENDED, 60)
    message = served.ask("GET", f"/flow_runs/{run}")["state"]["message"]
    assert "machines is 3, but" in message
    assert "set its concurrency_limit in prefect.yaml to 3, and deploy it" in message
    assert others_of(served, run) == []


@pytest.fixture
def apart(served: Operated, tmp_path: Path) -> Iterator[Operated]:
    """The deployments of `served` on a server and a worker that end independently, as on several machines."""
    with operated_apart(tmp_path / "prefect", served.deployments, "local") as server:
        yield server


@pytest.mark.timeout(900)
def test_an_outage_of_the_server_ends_no_run_and_what_is_cancelled_afterwards_ends(
    apart: Operated, pipeline: dict, demo_data: DemoData, tmp_path: Path
):
    """A training on two processes and a detection, longer without a server than signs of life may be missing."""
    served = apart
    root, images = pipeline["root"], collect_rows(demo_data, tmp_path)
    trains, _ = training(served, pipeline)
    slower = SLOW | {"network": {"short_side": 800, "long_side": 1333, "post_nms": 300}}  # it must outlast the outage
    detection = served.start("detect-regions/default", root=images, detector=slower, datasets=["captions"])
    served.wait_for(detection, lambda: committed(images), 120)
    pids = {run: served.process(run) for run in (trains, detection)}
    os.kill(served.server(), signal.SIGKILL)
    time.sleep(10)
    then = checkpoints(root)[-1], len(committed(images))
    time.sleep(AWAY)
    wait_until(lambda: checkpoints(root)[-1] > then[0] and len(committed(images)) > then[1], 240)  # both go on
    with server_of(served):
        for _ in range(2):  # the alarm takes them for dead some time later, and they say that they are not
            wait_until(lambda: at_work(served, pids), 300)
            time.sleep(15)
        cancelled(served, trains, stage_of(served, trains), cancel_by_page)
        cancelled(served, detection, detection, cancel_by_command)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("event", ["kill -9 of the worker", "kill -9 of both"])
def test_a_run_whose_worker_is_gone_is_crashed(apart: Operated, collected: str, event: str):
    """By itself or, as on a machine of its own that is gone, by the alarm."""
    before = committed(collected)
    run = detecting(apart, collected)
    apart.wait_for(run, lambda: len(committed(collected)) > len(before), 90)
    found = interrupt(apart, run, event, "vlbert detect")
    message = apart.ask("GET", f"/flow_runs/{run}")["state"]["message"]
    print(f"\n| {event} | detection | {found} |")
    assert found["state"] == "CRASHED"
    assert found["gone"] <= LEFT
    assert found["ended"] <= ALARM
    if event == "kill -9 of both":
        assert message.startswith("no sign of life for 70 s")


@pytest.mark.timeout(400)
def test_runs_that_died_with_their_server_are_crashed_when_it_starts_again_and_do_not_block_others(
    served: Operated, pipeline: dict, tmp_path: Path
):
    root, home = pipeline["root"], tmp_path / "prefect"
    ours = f"PREFECT_HOME={home}"
    with operated(home, served.deployments) as first:
        run, _ = training(first, pipeline)
        os.kill(first.serve(), signal.SIGKILL)
        wait_until(lambda: not [pid for pid, _, variables in running() if ours in variables.split("\0")], LEFT)
    with operated(home, served.deployments) as second:
        assert len(second.ask("POST", "/automations/filter")) == 3, "two alarms and the trigger, each once"
        runs = [run, *(child["id"] for child in second.below(run))]
        second.wait_for(run, lambda: all(second.state(one) in ENDED for one in runs), ALARM)
        assert second.state(run) == "CRASHED"
        last, lines = checkpoints(root)[-1], second.listen()
        again = second.start("pretrain-vlbert/default", **pipeline)
        second.wait_for(again, lambda: any(f"resumes from {root}/runs/pretrain/{last}" in line for line in lines()), 90)
        interrupt(second, again, "SIGTERM to the flow", "vlbert.train")


@pytest.mark.timeout(400)
def test_a_cancelled_stage_takes_the_pipeline_with_it(served: Operated, pipeline: dict):
    run, _ = training(served, pipeline)
    cancelled(served, run, stage_of(served, run), cancel_by_page)
