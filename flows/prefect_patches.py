"""Faults of Prefect 3.9.1 that would end or hide a run of days, each mended by one function.

    python -m flows.prefect_patches server start ...    is `prefect server start ...` with `collect_garbage_apart`

`python -m flows.engine` uses the others. At each new version of Prefect remove one and run its test in
tests/flows/test_prefect_patches.py: it goes when the test passes without it.

| function                  | upstream issues | without it                                                             |
|---------------------------|-----------------|------------------------------------------------------------------------|
| `wait_for_server`         | 20462, 22638    | a flow fails at its next request when the server is away for a minute  |
| `keep_slot`, `renew_slot` | 18802, 21064    | a run ends when its lease cannot be renewed                            |
| `set_running`             | 18802           | a run that outlives an outage stays Crashed, and frees another's slot  |
| `handle_sigterm_once`     | 21616           | a second SIGTERM interrupts the cleanup that the first one began       |
| `end_as_cancelled`        | 21616           | a stage cannot be cancelled, nor a run after an outage of the server   |
| `collect_garbage_apart`   | 18934           | a server on SQLite locks itself for a minute                           |
"""

import gc
import logging
import os
import runpy
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

NO_SIGN = "no sign of life"  # the message of the alarms of flows/deploy.py begins so
_RETRIES = "8"  # of a request, after 2, 4, ... and 256 s: for outages of up to 8 minutes
_LEASE = 86400.0  # seconds that a run keeps its concurrency slot without a renewal: the most that the server allows
_SHORT_LEASE = 60.0  # the same, until the run's state names the lease: the server's least
_RENEW = 600.0  # seconds between two renewals
_NO_LIMIT = "a run without a slot"  # no concurrency limit is called so: a lease of it frees nothing
_STARTED = 30.0  # seconds after which a server has made what it keeps
_BETWEEN_COLLECTIONS = 5.0  # seconds between two collections of garbage


# --- a server that is away --------------------------------------------------------------------------------------------


def wait_for_server() -> None:
    """Have Prefect's clients in this process wait for a server that is away. Call it before prefect is imported.

    A client that has not reached the server before does not wait; a run has one client for all its requests.
    """
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", _RETRIES)


@contextmanager
def not_waiting() -> Iterator[None]:
    """Have Prefect's clients fail within seconds in this block if the server is away."""
    from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1, PREFECT_API_REQUEST_TIMEOUT: 10.0}):
        yield


# --- the concurrency slot of a run ------------------------------------------------------------------------------------


def keep_slot() -> None:
    """Keep Prefect's engine from renewing the lease of a run's slot, and from ending the run if that fails.

    `renew_slot` renews it, to a day at a time.
    """
    import prefect.flow_engine

    prefect.flow_engine.maintain_concurrency_lease = lambda *_, **__: nullcontext()


def renew_slot(
    client: "SyncPrefectClient", run: "FlowRun", renewed: tuple[UUID | None, float]
) -> tuple[UUID | None, float]:
    """Renew the lease that the state of the run names, if it is due; returns the lease and when it was renewed.

    Args:
        renewed: the last returned value; (None, 0.0) at first.
    """
    state, now = run.state, time.monotonic()
    lease = state.state_details.deployment_concurrency_lease_id if state and not state.is_final() else None
    if lease is None or (lease == renewed[0] and now - renewed[1] < _RENEW):
        return renewed
    client.renew_concurrency_lease(lease, _LEASE)
    return lease, now


def wrongly_crashed(run: "FlowRun", began: datetime) -> bool:
    """Return whether an alarm crashed this run although its process works since `began`: the server was away."""
    state = run.state
    return bool(state and state.is_crashed() and (state.message or "").startswith(NO_SIGN) and state.timestamp >= began)


def set_running(client: "SyncPrefectClient", run: "FlowRun") -> None:
    """Set the state of a run to Running, and take its slot again unless another run has it.

    The server frees a slot when the run ends whose state names the lease. Without any lease it would free the slot of
    another run. So a run without a slot gets a lease of a limit that does not exist.
    """
    from prefect.states import Running

    state = Running(message="at work; the server was away")
    if run.deployment_id:
        try:
            lease = _take_lease(client, f"deployment:{run.deployment_id}")
        except Exception as error:  # noqa: BLE001  another has it: both work
            logging.getLogger("prefect.engine").warning("the run works without a concurrency slot: %s", error)
            lease = _take_lease(client, _NO_LIMIT)
        state.state_details.deployment_concurrency_lease_id = lease
    client.set_flow_run_state(run.id, state, force=True)


def _take_lease(client: "SyncPrefectClient", limit: str) -> UUID:
    """A short one: if the answer or the new state is lost, it ends by itself. `renew_slot` makes it long."""
    answer = client.increment_concurrency_slots_with_lease([limit], 1, "concurrency", _SHORT_LEASE)
    return UUID(answer.json()["lease_id"])


# --- cancelling -------------------------------------------------------------------------------------------------------


def handle_sigterm_once() -> None:
    """Have Prefect's engine act on the first SIGTERM only: the worker and this process may both send one."""
    from prefect.utilities import engine

    handler, came = engine._prefect_sigterm_handler, []

    def handle(number: int, frame: FrameType | None) -> None:
        if not came:
            came.append(number)
            handler(number, frame)

    engine._prefect_sigterm_handler = handle


def end_as_cancelled() -> None:
    """End the run of this process, and have the engine report all its flow runs as Cancelled.

    The worker cannot do it for a stage, and does not hear of it after an outage of the server.
    """
    from prefect._internal import control_listener

    control_listener._set_intent("cancel")
    os.kill(os.getpid(), signal.SIGTERM)


# --- a server on SQLite -----------------------------------------------------------------------------------------------


def collect_garbage_apart() -> None:
    """Collect garbage in a thread of its own from now on.

    Python collects in whichever thread allocates. In the thread of the event loop it finalises cursors of SQLite, which
    waits while another thread uses their connection. That thread waits up to 60 s for the lock of the database, and the
    transaction that holds the lock waits for the event loop.
    """

    def collect() -> None:
        time.sleep(_STARTED)
        gc.collect()
        gc.freeze()  # what a started server holds is not scanned again
        while True:
            time.sleep(_BETWEEN_COLLECTIONS)
            gc.collect()

    gc.disable()
    threading.Thread(target=collect, daemon=True).start()


if __name__ == "__main__":
    collect_garbage_apart()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
