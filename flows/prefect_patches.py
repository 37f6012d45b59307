"""Work around bugs of Prefect 3.9.1 that affect runs of several days.

    python -m flows.prefect_patches server start ...    runs `prefect server start ...` with the last function

`python -m flows.engine` uses the other functions. With each new version of Prefect, disable one function at a time and
run its test in tests/flows/test_prefect_patches.py. If the test passes without the function, delete the function.

| function                    | upstream issues | without it                                                           |
|-----------------------------|-----------------|----------------------------------------------------------------------|
| `wait_for_server`           | 20462, 22638    | a flow fails at its next request if the server is down for a minute  |
| `keep_slot`, `renew_slot`   | 18802, 21064    | a run ends when its lease cannot be renewed                          |
| `set_running`               | 18802           | a run stays Crashed after an outage, and frees another run's slot    |
| `handle_sigterm_once`       | 21616           | a second SIGTERM interrupts the cleanup that the first one started   |
| `end_as_cancelled`          | 21616           | a stage, or a run after an outage of the server, cannot be cancelled |
| `collect_garbage_in_thread` | 18934           | a server on SQLite blocks itself for a minute                        |
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

NO_SIGN = "no sign of life"  # prefix of the alarm messages of flows/deploy.py
_RETRIES = "8"  # retries of a request, after 2, 4, ... and 256 s: for outages of up to 8 minutes
_LEASE = 86400.0  # seconds that a run keeps its concurrency slot without a renewal: the server's maximum
_SHORT_LEASE = 60.0  # the same, until the run's state names the lease: the server's minimum
_RENEW_SECONDS = _SHORT_LEASE / 3  # time between two renewals: no lease is shorter
_NO_LIMIT = "a run without a slot"  # name of a concurrency limit that does not exist: a lease of it frees no slot
_STARTUP_SECONDS = 30.0  # time after which a server has allocated its permanent objects
_COLLECT_SECONDS = 5.0  # time between two garbage collections


# --- outages of the server --------------------------------------------------------------------------------------------


def wait_for_server() -> None:
    """Make Prefect's clients in this process wait up to 8 minutes if the server becomes unreachable.

    Call this function before prefect is imported. A client that has never reached the server does not wait.
    """
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", _RETRIES)


@contextmanager
def fail_fast() -> Iterator[None]:
    """Context manager that makes Prefect's clients fail within seconds if the server is unreachable."""
    from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1, PREFECT_API_REQUEST_TIMEOUT: 10.0}):
        yield


# --- the concurrency slot of a run ------------------------------------------------------------------------------------


def keep_slot() -> None:
    """Stop Prefect's engine from renewing a run's concurrency slot, because a failed renewal ends the run.

    `renew_slot` renews the slot's lease instead, for a day at a time.
    """
    import prefect.flow_engine

    prefect.flow_engine.maintain_concurrency_lease = lambda *_, **__: nullcontext()  # ty: ignore[invalid-assignment] patched


def renew_slot(
    client: "SyncPrefectClient", run: "FlowRun", renewed: tuple[UUID | None, float]
) -> tuple[UUID | None, float]:
    """Renew the lease of the run's concurrency slot for a day, if a renewal is due, as in each new state of the run.

    Returns the id of the state and the time of its renewal, for the next call's `renewed`. The first call gets
    (None, 0.0). When a run becomes Running, the server shortens its lease to minutes.
    """
    state, now = run.state, time.monotonic()
    lease = state.state_details.deployment_concurrency_lease_id if state and not state.is_final() else None
    if state is None or lease is None or (state.id == renewed[0] and now - renewed[1] < _RENEW_SECONDS):
        return renewed
    client.renew_concurrency_lease(lease, _LEASE)
    return state.id, now


def is_wrongly_crashed(run: "FlowRun", began: datetime) -> bool:
    """Return True if an automation of flows/deploy.py marked `run` as crashed after this process began (at `began`)."""
    state = run.state
    return bool(state and state.is_crashed() and (state.message or "").startswith(NO_SIGN) and state.timestamp >= began)


def set_running(client: "SyncPrefectClient", run: "FlowRun") -> None:
    """Set the state of a run to Running, and take its concurrency slot again if it is still free.

    If the slot is taken, the state gets a lease that holds no slot. Without a lease, the server would free the slot of
    another run when this run ends.
    """
    from prefect.states import Running

    state = Running(message="still running after an outage of the server")
    if run.deployment_id:
        try:
            lease = _take_lease(client, f"deployment:{run.deployment_id}")
        except Exception as error:  # noqa: BLE001  another run has the slot: both continue
            logging.getLogger("prefect.engine").warning("the run continues without a concurrency slot: %s", error)
            lease = _take_lease(client, _NO_LIMIT)
        state.state_details.deployment_concurrency_lease_id = lease
    client.set_flow_run_state(run.id, state, force=True)


def _take_lease(client: "SyncPrefectClient", limit: str) -> UUID:
    """Take a slot of the concurrency limit `limit`, and return the id of its short lease. `renew_slot` extends it."""
    answer = client.increment_concurrency_slots_with_lease([limit], 1, "concurrency", _SHORT_LEASE)
    return UUID(answer.json()["lease_id"])


# --- cancelling -------------------------------------------------------------------------------------------------------


def handle_sigterm_once() -> None:
    """Make Prefect's engine handle only the first SIGTERM, because the worker and this process may each send one."""
    from prefect.utilities import engine

    handler, received = engine._prefect_sigterm_handler, []

    def handle(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            handler(number, frame)

    engine._prefect_sigterm_handler = handle  # ty: ignore[invalid-assignment] it may return


def end_as_cancelled() -> None:
    """End this process, and make the engine report its flow run and the runs of its stages as Cancelled.

    The worker does not notice that a stage was cancelled, and may miss a cancellation after an outage of the server.
    """
    from prefect._internal import control_listener

    control_listener._set_intent("cancel")
    os.kill(os.getpid(), signal.SIGTERM)


# --- the server -------------------------------------------------------------------------------------------------------


def collect_garbage_in_thread() -> None:
    """From now on, collect garbage only in a separate thread, to avoid a deadlock on SQLite.

    Garbage collection in the event loop's thread finalises SQLite cursors. It has to wait if another thread is using
    their connection. That thread waits up to 60 s for the database lock, and the transaction that holds the lock waits
    for the event loop.
    """

    def collect() -> None:
        time.sleep(_STARTUP_SECONDS)
        gc.collect()
        gc.freeze()  # do not scan the objects of a started server again
        while True:
            time.sleep(_COLLECT_SECONDS)
            gc.collect()

    gc.disable()
    threading.Thread(target=collect, daemon=True).start()


if __name__ == "__main__":
    collect_garbage_in_thread()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
