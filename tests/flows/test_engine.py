"""The process of a flow run ends with its worker, keeps its concurrency slot, and waits for a server that is away."""

import contextvars
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import pytest
from operated import Operated, wait_until
from places import PROJECT
from prefect import flow
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import TerminationSignal
from prefect.flow_engine import FlowRunEngine
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling, Completed, Crashed, Pending, Running

from demo.serve import free_port
from flows.engine import (
    _SHORT_LEASE,
    NO_SIGN,
    ConcurrencySlot,
    is_supervisor,
    once,
    set_running,
    wrongly_crashed,
)
from flows.prefect_cli import _SHORT, not_waiting, wait_for_server

# Stands for a worker: starts a run, says its process id, and waits.
WORKER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]]).pid, flush=True)
time.sleep(600)
"""
# Stands for a run: notes each SIGTERM in a file, and ends with the first or with none.
RUN = """
import os, signal, sys, time
from flows.engine import end_with
def ended(*_):
    with open(sys.argv[1], "a") as file:
        file.write("SIGTERM ")
    if "stubborn" not in sys.argv[1]:
        sys.exit(1)
signal.signal(signal.SIGTERM, ended)
end_with(os.getppid())
open(sys.argv[1], "a").close()
while True:
    time.sleep(0.1)
"""


def ended(pid: int) -> bool:
    """Also where nobody has reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(("name", "least", "most"), [("willing", 0.0, 2.0), ("stubborn", 3.0, 5.0)])
def test_a_run_ends_with_its_worker(tmp_path: Path, name: str, least: float, most: float):
    notes = tmp_path / name
    worker = subprocess.Popen([sys.executable, "-c", WORKER, RUN, str(notes)], stdout=subprocess.PIPE, text=True)
    run = int(worker.stdout.readline())
    try:
        wait_until(notes.exists, 20)
        time.sleep(0.5)
        assert not ended(run), "while its worker lives"
    finally:
        worker.kill()
        worker.wait()
    assert least <= wait_until(lambda: ended(run), most + 5) <= most
    assert notes.read_text() == "SIGTERM ", "one, and no second that would interrupt what the first one started"


def test_a_supervisor_is_known_by_its_program():
    program = str(PROJECT / "flows" / "supervisor.py")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", program, "1", sys.executable, "-c", "import time; time.sleep(600)"],
        stdin=subprocess.PIPE,
    )
    try:
        wait_until(lambda: is_supervisor(process.pid), 10)  # the kernel shows its command line a moment later
        assert not is_supervisor(os.getpid())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)
    assert not is_supervisor(process.pid)


class Answers(BaseHTTPRequestHandler):
    """Away behind a proxy for two requests, then there; /missing is not."""

    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(404 if self.path == "/missing" else 503 if self.server.requests <= 2 else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(port: int, requests: int = 0) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", port), Answers)
    server.requests = requests
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prefect's clients wait, with short pauses, and make no attempts of their own."""
    for client in (PrefectHttpxSyncClient, PrefectHttpxAsyncClient):
        monkeypatch.setattr(client, "send", client.send)  # which is put back
    monkeypatch.setattr("flows.prefect_cli._PAUSE", 0.05)
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        wait_for_server()
        yield


def ask(url: str) -> int:
    with PrefectHttpxSyncClient(trust_env=False) as client:
        return client.get(url).status_code


async def ask_async(url: str) -> int:
    async with PrefectHttpxAsyncClient(trust_env=False) as client:
        return (await client.get(url)).status_code


def ask_in_a_loop(url: str) -> int:
    import asyncio

    return asyncio.run(ask_async(url))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("asks", [ask, ask_in_a_loop])
def test_a_request_waits_until_the_server_is_back(asks: Callable[[str], int], caplog: pytest.LogCaptureFixture):
    port, found = free_port(0), []
    caplog.set_level(logging.WARNING)
    here = contextvars.copy_context()  # else the thread would not see the settings, and Prefect itself would ask again
    ask_it = lambda: found.append(asks(f"http://127.0.0.1:{port}/"))  # noqa: E731
    asking = threading.Thread(target=here.run, args=(ask_it,), daemon=True)
    asking.start()
    time.sleep(0.5)
    assert not found
    with answering(port) as server:
        asking.join(10)
        assert (found, server.requests) == ([200], 3), "refused, then 503 twice"
    assert sum("server is away" in record.getMessage() for record in caplog.records) == 1, "one line a minute"


@pytest.mark.usefixtures("patient")
def test_a_request_does_not_wait_for_a_404_nor_in_not_waiting_nor_at_the_end_of_the_process():
    port = free_port(0)
    with answering(port, requests=2), pytest.raises(httpx.HTTPStatusError):
        ask(f"http://127.0.0.1:{port}/missing")
    with not_waiting(), pytest.raises(httpx.ConnectError):
        ask(f"http://127.0.0.1:{port}/")

    for end in (TerminationSignal(signal.SIGTERM), KeyboardInterrupt()):
        try:
            raise end
        except BaseException:  # noqa: BLE001  as Prefect handles it
            with pytest.raises(httpx.ConnectError):
                ask(f"http://127.0.0.1:{port}/")


@pytest.mark.usefixtures("patient")
def test_a_request_has_little_time_in_not_waiting():
    import asyncio

    given = []

    def note(request: httpx.Request) -> None:
        given.append(request.extensions["timeout"]["read"])

    async def note_async(request: httpx.Request) -> None:
        note(request)

    async def both(url: str) -> None:
        async with PrefectHttpxAsyncClient(
            timeout=60, trust_env=False, event_hooks={"request": [note_async]}
        ) as client:
            await client.get(url)
            with not_waiting():
                await client.get(url)

    port = free_port(0)
    with answering(port, requests=2):
        with PrefectHttpxSyncClient(timeout=60, trust_env=False, event_hooks={"request": [note]}) as client:
            client.get(f"http://127.0.0.1:{port}/")
            with not_waiting():
                client.get(f"http://127.0.0.1:{port}/")
        asyncio.run(both(f"http://127.0.0.1:{port}/"))
    assert given == [60, _SHORT] * 2


def test_a_signal_is_handled_once():
    handled = []
    handler = once(lambda number, frame: handled.append(number))
    handler(signal.SIGTERM, None)
    handler(signal.SIGTERM, None)
    assert handled == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("kind", "message", "hours", "wrong"),
    [
        (StateType.CRASHED, f"{NO_SIGN} for 70 s: its process is gone", 1, True),
        (StateType.CRASHED, f"{NO_SIGN} for 70 s: its process is gone", -1, False),  # of an attempt before
        (StateType.CRASHED, "its process was gone", 1, False),
        (StateType.FAILED, NO_SIGN, 1, False),
        (StateType.CRASHED, None, 1, False),
    ],
)
def test_only_an_alarm_since_the_process_began_is_wrong(kind: StateType, message: str, hours: int, wrong: bool):
    began = datetime.now(UTC)
    state = State(type=kind, message=message, timestamp=began + timedelta(hours=hours))
    assert wrongly_crashed(FlowRun(flow_id=uuid4(), state=state), began) is wrong


# --- the place of a run among those of its deployment -----------------------------------------------------------------


class Deployed:
    """A deployment that runs once at a time, on the server of `served`, with no worker that would take its runs."""

    def __init__(self, client: SyncPrefectClient, home: Path):
        self.client, self.leases = client, home / "concurrency_leases"
        flow_id = client.create_flow_from_name("places")
        self.id = client.create_deployment(flow_id, f"one-{uuid4().hex[:6]}", concurrency_limit=1)

    def at_work(self) -> FlowRun:
        run = self.client.create_flow_run_from_deployment(self.id)
        for state in (Pending(), Running()):
            self.client.set_flow_run_state(run.id, state)
        run = self.client.read_flow_run(run.id)
        assert run.state.is_running()
        assert lease_of(run)
        return run

    def taken_for_dead(self) -> FlowRun:
        """As the alarm does it."""
        run = self.at_work()
        self.client.set_flow_run_state(run.id, Crashed(message=f"{NO_SIGN} for 70 s"))
        assert self.places() == 0
        return self.client.read_flow_run(run.id)

    def end(self, run: FlowRun) -> None:
        """As the engine does it."""
        self.client.set_flow_run_state(run.id, Completed())

    def places(self) -> int:
        """How many the server believes to be taken."""
        return self.client.read_global_concurrency_limit_by_name(f"deployment:{self.id}").active_slots

    def seconds_left(self, lease: UUID) -> float | None:
        """Of a lease; None where it is gone."""
        try:
            kept = json.loads((self.leases / f"{lease}.json").read_text())
        except FileNotFoundError:
            return None
        return (datetime.fromisoformat(kept["expiration"]) - datetime.now(UTC)).total_seconds()


def lease_of(run: FlowRun) -> UUID | None:
    return run.state.state_details.deployment_concurrency_lease_id


@pytest.fixture
def deployed(served: Operated, prefect_server: None) -> Iterator[Deployed]:
    with get_client(sync_client=True) as client:
        yield Deployed(client, served.home)


@pytest.mark.parametrize("by_server", [True, False])  # or by its worker alone
def test_the_lease_of_a_cancelled_run_ends_with_it(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch, by_server: bool
):
    run, slot = deployed.at_work(), ConcurrencySlot()
    slot.renew(deployed.client, run)
    lease = lease_of(run)
    if by_server:
        deployed.client.set_flow_run_state(run.id, Cancelling())
    monkeypatch.setenv("PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS", "true")
    engine = FlowRunEngine(flow=flow(name="places")(lambda: None), flow_run=run, parameters={})
    engine._client, engine._is_started = deployed.client, True
    engine.handle_cancellation(TerminationSignal(signal.SIGTERM))
    assert deployed.client.read_flow_run(run.id).state.is_cancelled()
    assert (deployed.places(), deployed.seconds_left(lease)) == (0, None), (
        "else it frees another run's place, a day later"
    )


def test_the_lease_that_the_state_names_is_renewed_to_a_day_and_not_each_second(deployed: Deployed, monkeypatch):
    run, slot, renewals = deployed.at_work(), ConcurrencySlot(), []
    renew = deployed.client.renew_concurrency_lease
    monkeypatch.setattr(
        deployed.client, "renew_concurrency_lease", lambda *given: renewals.append(given) or renew(*given)
    )
    assert deployed.seconds_left(lease_of(run)) < 3600
    for _ in range(3):
        slot.renew(deployed.client, run)
    assert deployed.seconds_left(lease_of(run)) > 86000
    assert len(renewals) == 1
    monkeypatch.setattr("flows.engine._RENEW", 0.0)
    slot.renew(deployed.client, run)
    assert len(renewals) == 2
    deployed.end(run)
    slot.renew(deployed.client, deployed.client.read_flow_run(run.id))  # nothing is left to renew
    assert len(renewals) == 2


def test_a_place_that_a_run_has_again_is_renewed_and_ends_with_the_run(deployed: Deployed):
    run, slot = deployed.at_work(), ConcurrencySlot()
    slot.renew(deployed.client, run)
    deployed.client.set_flow_run_state(run.id, Crashed(message=f"{NO_SIGN} for 70 s"))
    run = deployed.client.read_flow_run(run.id)
    slot.renew(deployed.client, run)  # asks for no lease that is gone
    set_running(deployed.client, run, slot)
    again = deployed.client.read_flow_run(run.id)
    assert lease_of(again) not in (None, lease_of(run))
    assert deployed.seconds_left(lease_of(again)) <= _SHORT_LEASE
    slot.renew(deployed.client, again)
    assert deployed.seconds_left(lease_of(again)) > 86000
    assert slot.lease == lease_of(again), "which Cancelling carries"
    assert deployed.places() == 1
    deployed.end(again)
    assert (deployed.places(), deployed.seconds_left(lease_of(again))) == (0, None)


def test_a_place_is_taken_once_though_the_state_could_not_be_set(deployed: Deployed, monkeypatch: pytest.MonkeyPatch):
    run, slot = deployed.taken_for_dead(), ConcurrencySlot()

    def away(*given: object, **named: object) -> None:
        raise httpx.ConnectError("away")

    with monkeypatch.context() as lost:
        lost.setattr(deployed.client, "set_flow_run_state", away)
        with pytest.raises(httpx.ConnectError):
            set_running(deployed.client, run, slot)
    set_running(deployed.client, run, slot)
    assert deployed.places() == 1
    deployed.end(run)
    assert deployed.places() == 0
    assert not leases_of(deployed)


def leases_of(deployed: Deployed) -> list[Path]:
    """Of the deployment's limit."""
    limit = str(deployed.client.read_global_concurrency_limit_by_name(f"deployment:{deployed.id}").id)
    return [path for path in deployed.leases.glob("*-*.json") if limit in path.read_text()]


@pytest.mark.parametrize("whose", ["another run's", "its own, by an answer that was lost"])
def test_a_run_without_a_place_frees_none_when_it_ends(deployed: Deployed, whose: str):
    run, slot = deployed.taken_for_dead(), ConcurrencySlot()
    if whose == "another run's":
        deployed.at_work()
    else:
        ConcurrencySlot().reacquire(deployed.client, deployed.id)
    set_running(deployed.client, run, slot)
    again = deployed.client.read_flow_run(run.id)
    assert again.state.is_running()
    slot.renew(deployed.client, again)
    assert deployed.places() == 1
    deployed.end(run)
    assert deployed.places() == 1
    assert deployed.seconds_left(lease_of(again)) is None
    (left,) = leases_of(deployed)
    assert deployed.seconds_left(UUID(left.stem)) <= 300, "it is freed by whoever took it, or soon"
