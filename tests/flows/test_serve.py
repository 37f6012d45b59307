"""`make serve`: its deployments, its alarms, what it refuses, and how it ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import yaml
from operated import Operated, operated, running, wait_until
from places import PROJECT

from demo.serve import free_port
from flows.collect import COMMITTED
from flows.deploy import NEVER_BEGAN, SILENCE, START_LIMIT, set_alarms


def test_a_taken_port_and_a_missing_file_are_refused_before_anything_starts(tmp_path: Path):
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    variables["PYTHONPATH"] = str(PROJECT)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        for port, file, refusal in (
            (str(free_port()), "no.yaml", "vlbert serve: there is no file no.yaml; name one with --deployments"),
            (taken, str(PROJECT / "prefect.yaml"), f"vlbert serve: port {taken} is in use; "),
        ):
            command = [sys.executable, "-m", "vlbert", "serve", "--port", port, "--deployments", file]
            found = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
            assert found.returncode == 1
            assert found.stderr.startswith(refusal)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_run_whose_process_dies_before_it_begins_is_crashed_and_its_place_is_free(served: Operated):
    from prefect.automations import Automation

    alarm = Automation.read(name=NEVER_BEGAN)
    assert alarm.trigger.within == timedelta(seconds=START_LIMIT)
    alarm.trigger.within = timedelta(seconds=10)
    alarm.update()
    try:
        deployment = served.ask("GET", "/deployments/name/collect-captions/default")["id"]
        place = f"/v2/concurrency_limits/deployment:{deployment}"
        later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}  # for no worker
        run = served.ask("POST", f"/deployments/{deployment}/create_flow_run", state=later)["id"]
        served.ask("POST", f"/flow_runs/{run}/set_state", state={"type": "PENDING"}, force=False)
        assert (served.state(run), served.ask("GET", place)["active_slots"]) == ("PENDING", 1)
        served.wait_for(run, lambda: served.state(run) == "CRASHED", 60)
        assert served.ask("GET", place)["active_slots"] == 0
    finally:
        set_alarms()
    assert Automation.read(name=NEVER_BEGAN).trigger.within == timedelta(seconds=START_LIMIT), (
        "a changed alarm is made again"
    )


def check_deployments(server: Operated, directory: Path) -> None:
    """The server has the deployments of the file that was served in this folder, and the alarms."""
    flows = {one["id"]: one["name"] for one in server.ask("POST", "/flows/filter")}
    found = {f"{flows[one['flow_id']]}/{one['name']}": one for one in server.ask("POST", "/deployments/filter")}
    project = yaml.safe_load(server.deployments.read_text())
    assert len(found) == len(project["deployments"])
    # Relative paths in parameters begin where `prefect deploy` ran.
    moves = {"prefect.deployments.steps.set_working_directory": {"directory": str(directory)}}
    assert [one["pull_steps"] for one in found.values()] == len(found) * [[moves]]
    scheduled = found["detect-regions/scheduled"]
    (wanted,) = next(one["schedules"] for one in project["deployments"] if one["name"] == "scheduled")
    (schedule,) = scheduled["schedules"]
    assert (schedule["schedule"]["cron"], schedule["active"]) == (wanted["cron"], wanted.get("active", True))
    automations = server.ask("POST", "/automations/filter")
    (automation,) = [one for one in automations if one["trigger"]["expect"] == [COMMITTED]]
    assert [action["deployment_id"] for action in automation["actions"]] == [scheduled["id"]]
    (alarm,) = [one for one in automations if one["name"].startswith("flow runs without a sign")]
    assert (alarm["enabled"], alarm["trigger"]["posture"], alarm["trigger"]["within"]) == (True, "Proactive", SILENCE)


def test_prefect_takes_the_deployments_of_the_demo(served: Operated):
    check_deployments(served, Path.cwd())


@pytest.mark.slow
@pytest.mark.parametrize("part", ["server", "worker"])
def test_prefect_takes_the_deployments_of_the_project_and_all_ends_with_the_server_or_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
):
    shutil.copy(PROJECT / "prefect.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    with operated(tmp_path / "prefect", tmp_path / "prefect.yaml") as server:
        check_deployments(server, tmp_path)
        os.kill(server.worker() if part == "worker" else server.server(), signal.SIGKILL)
        log, ours = tmp_path / "serve.log", f"PREFECT_HOME={tmp_path / 'prefect'}"
        wait_until(lambda: f"the {part} ended, and all runs with it; " in log.read_text(), 30, log.read_text)
        wait_until(lambda: not [pid for pid, _, variables in running() if ours in variables.split("\0")], 10)


@pytest.mark.slow
def test_a_server_that_gets_many_events_answers_within_seconds(served: Operated):
    """By itself Prefect's server on SQLite waits here for its own lock, a minute each time."""

    def post(path: str, json: object) -> None:
        with suppress(httpx.TransportError):  # a busy server may reset a connection
            httpx.post(f"{served.url}/api{path}", json=json, timeout=90, trust_env=False)

    def hear() -> None:
        run, now = {"prefect.resource.id": f"prefect.flow-run.{uuid4()}"}, datetime.now(UTC).isoformat()
        states = [
            f"prefect.flow-run.{state}" for state in ("Pending", "Running", "heartbeat", "Completed", "heartbeat")
        ]
        of_all = {"occurred": now, "payload": {}, "resource": run}
        post("/events", [of_all | {"event": state, "id": str(uuid4())} for state in states])

    longest, flow = 0.0, served.ask("POST", "/flows/", name="busy")["id"]
    with ThreadPoolExecutor(2) as pool:
        heard = [pool.submit(hear) for _ in range(200)]
        while not all(one.done() for one in heard):
            began = time.monotonic()
            post("/flow_runs/", {"flow_id": flow})
            longest = max(longest, time.monotonic() - began)
    assert longest < 20
