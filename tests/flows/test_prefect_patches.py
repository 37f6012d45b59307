"""The process of a flow run ends with its worker; one test or two for each patch of flows/prefect_patches.py."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock
from uuid import UUID, uuid4

import httpx
import prefect.flow_engine
import pytest
from operated import Operated, running, wait_until
from places import PROJECT
from prefect._internal import control_listener
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.concurrency._leases import maintain_concurrency_lease
from prefect.exceptions import TerminationSignal
from prefect.states import Completed, Crashed, Pending, Running
from prefect.utilities.engine import capture_sigterm

from demo.serve import free_port
from flows.prefect_patches import (
    _SHORT_LEASE,
    NO_SIGN,
    end_as_cancelled,
    handle_sigterm_once,
    is_wrongly_crashed,
    keep_slot,
    renew_slot,
    set_running,
)

# Stands for a run that does not end at SIGTERM: prints its process id, and each signal.
RUN = """
import os, signal, threading, time
from flows.engine import exit_with_parent
signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))
threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""


def test_a_run_ends_with_its_worker_also_where_it_hears_no_sigterm():
    starts = ["sh", "-c", '"$@" & exec sleep 600', "worker"]
    worker = subprocess.Popen([*starts, sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(worker.stdout.readline())
        time.sleep(0.5)
        assert Path(f"/proc/{pid}").exists(), "while its worker does"
    finally:
        worker.kill()
        worker.wait()
    assert 3 <= wait_until(lambda: pid not in {one for one, _, _ in running()}, 10) <= 5
    assert worker.stdout.read() == "SIGTERM\n", "one, and no second that would interrupt what the first one started"


ASK = """
import os, sys, time
from flows.prefect_patches import fail_fast, wait_for_server
wait_for_server()
from prefect.client.base import PrefectHttpxSyncClient
time.sleep = lambda seconds, sleep=time.sleep: sleep(seconds / 100)  # a minute and its hundredth
with PrefectHttpxSyncClient(trust_env=False) as client:
    print(client.get(sys.argv[1]).status_code, flush=True)  # one that has never reached a server does not wait
    sys.stdin.readline()
    try:
        with fail_fast():
            client.get(sys.argv[1])
    except Exception as error:
        print(type(error).__name__, flush=True)
    print(client.get(sys.argv[1]).status_code, flush=True)
"""


@contextmanager
def answering(port: int) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", port), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield
        server.shutdown()


def test_a_request_outlasts_an_outage_of_150_seconds_but_not_in_not_waiting():
    """`wait_for_server`: here a second is a hundredth."""
    port = free_port()
    command = [sys.executable, "-c", ASK, f"http://127.0.0.1:{port}/"]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(command, cwd=PROJECT, text=True, **pipes) as asking:
        with answering(port):
            assert asking.stdout.readline() == "200\n", asking.stderr.read()
        asking.stdin.write("\n")
        asking.stdin.flush()
        assert asking.stdout.readline() == "ConnectError\n"
        time.sleep(1.5)
        with answering(port):
            printed, _ = asking.communicate(timeout=30)
    assert (printed, asking.returncode) == ("200\n", 0)


def test_a_lease_that_cannot_be_renewed_ends_no_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefect.flow_engine, "maintain_concurrency_lease", maintain_concurrency_lease)
    monkeypatch.setattr("prefect.concurrency._leases._RENEWAL_MAX_ATTEMPTS", 1)
    monkeypatch.setattr(SyncPrefectClient, "renew_concurrency_lease", Mock(side_effect=httpx.ConnectError("away")))

    keep_slot()
    with prefect.flow_engine.maintain_concurrency_lease(uuid4(), 300, raise_on_lease_renewal_failure=True):
        time.sleep(1)


def test_a_signal_is_handled_once(monkeypatch: pytest.MonkeyPatch):
    handled = []
    handler = "prefect.utilities.engine._prefect_sigterm_handler"
    monkeypatch.setattr(handler, lambda number, frame: handled.append(number))
    handle_sigterm_once()
    with capture_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert handled == [signal.SIGTERM]


def test_a_run_that_ends_as_cancelled_says_so_to_the_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_listener, "_intent", None)
    with pytest.raises(TerminationSignal), capture_sigterm():
        end_as_cancelled()  # its signal comes at the end of this line
    assert control_listener.get_intent() == "cancel"


def test_only_an_alarm_since_the_process_began_is_wrong():
    began = datetime.now(UTC)
    for kind, message, hours, wrong in (
        (StateType.CRASHED, f"{NO_SIGN} for 70 s: its process is gone", 1, True),
        (StateType.CRASHED, f"{NO_SIGN} for 70 s: its process is gone", -1, False),  # of an attempt before
        (StateType.CRASHED, "its process was gone", 1, False),
        (StateType.FAILED, NO_SIGN, 1, False),
    ):
        state = State(type=kind, message=message, timestamp=began + timedelta(hours=hours))
        assert is_wrongly_crashed(FlowRun(flow_id=uuid4(), state=state), began) is wrong


class Deployed:
    """A deployment that runs once at a time, on the server of `served`, with no worker that would take its runs."""

    def __init__(self, client: SyncPrefectClient, home: Path):
        self.client, self.leases = client, home / "concurrency_leases"
        flow_id = client.create_flow_from_name("places")
        self.id = client.create_deployment(flow_id, f"one-{uuid4().hex[:6]}", concurrency_limit=1)

    def created(self) -> FlowRun:
        return self.client.create_flow_run_from_deployment(self.id)

    def asks(self, run: FlowRun) -> str:
        """Return the name of the run's state after a worker asked for its slot."""
        self.client.set_flow_run_state(run.id, Pending())
        return self.client.read_flow_run(run.id).state.name

    def at_work(self) -> FlowRun:
        run = self.created()
        for state in (Pending(), Running()):
            self.client.set_flow_run_state(run.id, state)
        return self.client.read_flow_run(run.id)

    def crashed_and_running_again(self, run: FlowRun) -> FlowRun:
        """Set the run to Crashed, as the alarm does, and then to Running, as the run does."""
        self.client.set_flow_run_state(run.id, Crashed(message=f"{NO_SIGN} for 70 s"))
        set_running(self.client, self.client.read_flow_run(run.id))
        return self.client.read_flow_run(run.id)

    def places(self) -> int:
        return self.client.read_global_concurrency_limit_by_name(f"deployment:{self.id}").active_slots

    def seconds_left(self, run: FlowRun) -> float | None:
        """Return how long the run's lease is still valid, or None if it has none."""
        lease = self.leases / f"{lease_of(run)}.json"
        if not lease.exists():
            return None
        expiration = datetime.fromisoformat(json.loads(lease.read_text())["expiration"])
        return (expiration - datetime.now(UTC)).total_seconds()

    def age(self, run: FlowRun, seconds: float) -> None:
        """Let so much time pass for the run's lease."""
        for file in (self.leases / f"{lease_of(run)}.json", self.leases / "expirations.json"):
            content = json.loads(file.read_text())
            key = str(lease_of(run)) if file.stem == "expirations" else "expiration"
            content[key] = (datetime.fromisoformat(content[key]) - timedelta(seconds=seconds)).isoformat()
            file.write_text(json.dumps(content))


def lease_of(run: FlowRun) -> UUID | None:
    return run.state.state_details.deployment_concurrency_lease_id


@pytest.fixture
def deployed(served: Operated, prefect_server: None) -> Iterator[Deployed]:
    with get_client(sync_client=True) as client:
        yield Deployed(client, served.home)


def test_the_slot_of_a_run_is_renewed_to_a_day_also_when_it_has_it_again_and_ends_with_it(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
):
    run = deployed.at_work()
    assert deployed.seconds_left(run) < 3600
    renewed = renew_slot(deployed.client, run, (None, 0.0))
    assert deployed.seconds_left(run) > 86000
    assert renew_slot(deployed.client, run, renewed) == renewed, "not each second"
    monkeypatch.setattr("flows.prefect_patches._RENEW_SECONDS", 0.0)
    assert renew_slot(deployed.client, run, renewed) != renewed

    again = deployed.crashed_and_running_again(run)
    assert lease_of(again) not in (None, lease_of(run))
    assert deployed.seconds_left(again) <= _SHORT_LEASE
    renewed = renew_slot(deployed.client, again, renewed)
    assert deployed.seconds_left(again) > 86000
    assert deployed.places() == 1
    deployed.client.set_flow_run_state(again.id, Completed())  # as the engine does it
    assert (deployed.places(), deployed.seconds_left(again)) == (0, None)
    assert renew_slot(deployed.client, deployed.client.read_flow_run(run.id), renewed) == renewed, "nothing is left"


@pytest.mark.parametrize("early", [True, False])
def test_the_second_run_waits_for_the_whole_of_the_first_whether_that_is_renewed_before_or_after_it_is_running(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, early: bool
):
    client, clock, renewed = deployed.client, [1000.0], (None, 0.0)
    monkeypatch.setattr("flows.prefect_patches.time", Mock(monotonic=lambda: clock[0]))
    run, second = deployed.created(), deployed.created()
    assert deployed.asks(run) == "Pending"
    if early:
        renewed = renew_slot(client, client.read_flow_run(run.id), renewed)
    client.set_flow_run_state(run.id, Running())
    for turn in range(35):  # 700 s, of which the server's own lease holds 300
        run = client.read_flow_run(run.id)
        renewed = renew_slot(client, run, renewed)
        assert turn or deployed.seconds_left(run) > 80000, "as soon as it is seen to be running"
        if turn == 20:  # as if the server had cut it to its minimum in the same state
            deployed.age(run, 86400 - _SHORT_LEASE)
        clock[0] += 20
        deployed.age(run, 20)
        assert deployed.seconds_left(run) > 0, f"after {clock[0] - 1000:g} s"
    assert deployed.seconds_left(run) > 80000, "an outage of hours costs no slot"
    assert deployed.asks(second) == "AwaitingConcurrencySlot"
    client.set_flow_run_state(run.id, Completed())
    assert deployed.asks(second) == "Pending"


def test_a_run_without_a_slot_frees_none_when_it_ends(deployed: Deployed):
    run = deployed.at_work()
    deployed.client.set_flow_run_state(run.id, Crashed(message=f"{NO_SIGN} for 70 s"))
    other = deployed.at_work()
    again = deployed.crashed_and_running_again(run)
    renew_slot(deployed.client, again, (None, 0.0))
    deployed.client.set_flow_run_state(run.id, Completed())
    assert (deployed.places(), deployed.seconds_left(again)) == (1, None)
    assert deployed.seconds_left(other) > 0
