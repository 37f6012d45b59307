"""The process of a flow run ends with its worker, hears of that once, and waits for a server that is away."""

import contextvars
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
from uuid import uuid4

import httpx
import pytest
from operated import wait_until
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from demo.serve import free_port
from flows.engine import NO_SIGN, is_supervisor, once, wrongly_crashed
from flows.patience import not_waiting, wait_for_server

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
    program = str(Path(__file__).parents[1] / "flows" / "supervisor.py")
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
    """Away behind a proxy for two requests, then there; what is asked for as /missing is not."""

    def do_GET(self) -> None:
        self.server.asked += 1
        self.send_response(404 if self.path == "/missing" else 503 if self.server.asked <= 2 else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering(port: int, asked: int = 0) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", port), Answers)
    server.asked = asked
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
    monkeypatch.setattr("flows.patience._PAUSE", 0.05)
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
        assert (found, server.asked) == ([200], 3), "refused, then 503 twice"
    assert sum("server is away" in record.getMessage() for record in caplog.records) == 1, "one line a minute"


@pytest.mark.usefixtures("patient")
def test_a_request_does_not_wait_where_the_answer_is_no_where_nobody_is_to_wait_or_where_all_ends():
    port = free_port(0)
    with answering(port, asked=2), pytest.raises(httpx.HTTPStatusError):
        ask(f"http://127.0.0.1:{port}/missing")
    with not_waiting(), pytest.raises(httpx.ConnectError):
        ask(f"http://127.0.0.1:{port}/")

    for end in (TerminationSignal(signal.SIGTERM), KeyboardInterrupt()):
        try:
            raise end
        except BaseException:  # noqa: BLE001  as Prefect handles it
            with pytest.raises(httpx.ConnectError):
                ask(f"http://127.0.0.1:{port}/")


def test_a_signal_is_heard_once():
    heard = []
    handler = once(lambda number, frame: heard.append(number))
    handler(signal.SIGTERM, None)
    handler(signal.SIGTERM, None)
    assert heard == [signal.SIGTERM]


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
