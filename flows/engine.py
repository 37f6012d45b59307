"""The process of one flow run, as prefect.yaml has a worker start it: Prefect's engine, with two watchers.

    python -m flows.engine

It does not outlive its worker. A worker that is killed cannot end its flow runs, and Prefect leaves them running
unsupervised. So this process watches its parent. When the parent changes, it sends itself one SIGTERM, which the engine
reports as a crash and which makes `flows.supervisor` end the processes of the flow, and SIGKILL if that is not enough.

It outlives every outage of the server, and asks for its own state: where the run or one of its stages is cancelled, it
ends within 10 s. No lease and no alarm ends it. Written for Prefect 3.9.1.
"""

import atexit
import logging
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from uuid import UUID

from flows.prefect_cli import not_waiting, wait_for_server

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

# The message of the alarm of flows/deploy.py begins so. After an outage the alarm may be wrong.
NO_SIGN = "no sign of life"
_LAST_SECONDS = 3.5  # between SIGTERM and SIGKILL, so that nothing is left 5 s after the worker's end
_POLL = 0.2  # seconds between looks at who is our parent
_ASK = 1.0  # seconds between questions for the run's state
_LEASE = 86400.0  # seconds that a run keeps its concurrency slot without a renewal: the most that the server allows
_SHORT_LEASE = 60.0  # the same, until the run's state names the lease: the server's least
_RENEW = 600.0  # seconds between two renewals
_NO_LIMIT = "a run without a slot"  # no concurrency limit is called so: a lease of it frees nothing


def end_with(parent: int) -> None:
    """Have this process ended when `parent`, a process id, is its parent no longer."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    # One SIGTERM and no second, which would interrupt what the first made the flow report and clean up.
    if not is_supervisor(os.getppid()):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def is_supervisor(process: int) -> bool:
    """Whether it is that of flows/serve.py, which adopts the runs of a worker that has died, and ends them itself."""
    try:
        return b"flows/supervisor.py\0" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has ended too, or this is no Linux
        return False


# --- what the server says of this run ---------------------------------------------------------------------------------


def follow_state(run: UUID, slot: "ConcurrencySlot") -> None:
    """Follow the state of `run` and its stages as long as this process lives: end when cancelled, keep the slot."""
    threading.Thread(target=_follow, args=(run, slot, datetime.now(UTC)), daemon=True).start()


def _follow(run: UUID, slot: "ConcurrencySlot", began: datetime) -> None:
    from prefect.client.orchestration import get_client

    logger = logging.getLogger("prefect.engine")
    with not_waiting(), get_client(sync_client=True) as client:
        while True:
            time.sleep(_ASK)
            try:
                runs = [client.read_flow_run(run), *stages(client, run)]
                for one in runs:
                    if wrongly_crashed(one, began):
                        set_running(client, one, slot)
                # A stage takes the whole with it: what comes behind needs what it would have made.
                if any(one.state and one.state.is_cancelling() for one in runs):
                    break
                slot.renew(client, runs[0])
            except Exception as error:  # noqa: BLE001  the server is away, or not well: it is asked again
                logger.debug("the state of the run is not known: %s", error)
    _end_as_cancelled()


def stages(client: "SyncPrefectClient", run: UUID) -> "list[FlowRun]":
    """The flow runs that `run` has started in its own process."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
    from prefect.client.schemas.sorting import FlowRunSort

    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    return client.read_flow_runs(flow_run_filter=below, sort=FlowRunSort.START_TIME_DESC)


def _end_as_cancelled() -> None:
    """As the worker does it, which may come too late or twice: the engine reports all that runs here as Cancelled."""
    from prefect._internal import control_listener

    control_listener._set_intent("cancel")
    os.kill(os.getpid(), signal.SIGTERM)


def wrongly_crashed(run: "FlowRun", began: datetime) -> bool:
    """Whether the alarm took it for dead since this process began: the server heard nothing while it was away."""
    state = run.state
    return bool(state and state.is_crashed() and (state.message or "").startswith(NO_SIGN) and state.timestamp >= began)


class ConcurrencySlot:
    """A run's slot under the concurrency limit of its deployment: a lease, which the run's state names.

    The server frees a slot when the lease that is named ends, or is not renewed, whoever has the slot by then. So a
    lease that is taken here is short at first, and `renew` makes it long when the state names it.
    """

    def __init__(self) -> None:
        self.lease: UUID | None = None  # that the state of the run named last
        self._taken: UUID | None = None  # by `reacquire`
        self._renewed: tuple[UUID, float] | None = None

    def renew(self, client: "SyncPrefectClient", run: "FlowRun") -> None:
        """Renew the lease that the state of the run names, where that is due."""
        state = run.state
        lease = state.state_details.deployment_concurrency_lease_id if state and not state.is_final() else None
        if lease is None:
            return
        self.lease = lease
        if self._renewed is None or self._renewed[0] != lease or time.monotonic() - self._renewed[1] >= _RENEW:
            client.renew_concurrency_lease(lease, _LEASE)
            self._renewed = lease, time.monotonic()

    def reacquire(self, client: "SyncPrefectClient", deployment: UUID) -> UUID:
        """Take a lease for a run that lost its own: of its slot or, where another run has that, of no slot.

        Without any lease the server would free the slot of the other run when this one ends.
        """
        if self._taken is not None:  # the server may not have heard of it in the run's state
            try:
                client.renew_concurrency_lease(self._taken, _SHORT_LEASE)
                return self._taken
            except Exception as error:  # noqa: BLE001  it has ended
                self._taken = None
                logging.getLogger("prefect.engine").debug("another lease is taken: %s", error)
        try:
            self._taken = _lease(client, f"deployment:{deployment}")
        except Exception as error:  # noqa: BLE001  another has it: both work
            logging.getLogger("prefect.engine").warning("the run works without a concurrency slot: %s", error)
            self._taken = _lease(client, _NO_LIMIT)
        return self._taken


def _lease(client: "SyncPrefectClient", limit: str) -> UUID:
    answer = client.increment_concurrency_slots_with_lease([limit], 1, "concurrency", _SHORT_LEASE)
    return UUID(answer.json()["lease_id"])


def set_running(client: "SyncPrefectClient", run: "FlowRun", slot: "ConcurrencySlot") -> None:
    """Set the state of the run to Running, and take its concurrency slot again if no other run has taken it."""
    from prefect.states import Running

    state = Running(message="at work; the server was away")
    if run.deployment_id:
        # With it in the state, the server frees the slot when the run ends.
        state.state_details.deployment_concurrency_lease_id = slot.reacquire(client, run.deployment_id)
    client.set_flow_run_state(run.id, state, force=True)


# --- Prefect's engine, as it is to be here ----------------------------------------------------------------------------


def prepare() -> None:
    """Change what Prefect's engine does in this process where the server is away, or a signal comes twice."""
    import prefect.flow_engine
    from prefect.utilities import engine

    wait_for_server()
    # By itself it would end the run where three renewals fail, after five minutes of outage; `follow_state` renews.
    prefect.flow_engine.maintain_concurrency_lease = lambda *_, **__: nullcontext()
    engine._prefect_sigterm_handler = once(engine._prefect_sigterm_handler)
    # The engine itself reports a run as Cancelled, for its worker may be unable to.
    os.environ["PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS"] = "true"


def once(handler: Callable[[int, FrameType | None], None]) -> Callable[[int, FrameType | None], None]:
    """A signal's handler that acts once: a second signal would interrupt what the first one made the flow clean up."""
    came = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not came:
            came.append(number)
            handler(number, frame)

    return handle


def run_engine() -> None:
    """Prefect's engine. The process ends with it: taking torch's modules apart would take seconds more."""
    status = 1

    def leave() -> None:
        logging.shutdown()  # sends what the server has not yet; it is registered before this, and would come after
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(leave)  # before Prefect registers what is to be done at the end, so it comes behind that
    try:
        runpy.run_module("prefect.engine", run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise


if __name__ == "__main__":
    end_with(os.getppid())
    prepare()
    follow_state(UUID(os.environ["PREFECT__FLOW_RUN_ID"]), ConcurrencySlot())
    run_engine()
