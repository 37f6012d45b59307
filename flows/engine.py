"""The process of one flow run, as prefect.yaml has a worker start it: Prefect's engine, watched from two sides.

    python -m flows.engine

It does not outlive its worker. A worker that is killed cannot end its flow runs, and Prefect leaves them working
without anybody who watches them. So this process looks who its parent is. When that changes it gets one SIGTERM, which
the engine reports as a crash and which makes `flows.supervisor` end what the flow has started, and SIGKILL where that
is not enough.

And it outlives every outage of the server, and asks for its own state: cancelled, the run or one of its stages, it ends
within 10 s. No lease and no alarm ends it. Written for Prefect 3.8.8.
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
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from uuid import UUID

from flows.patience import not_waiting, wait_for_server

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

# With this begins what the alarm of flows/serve.py says of a run. After an outage it may be wrong.
NO_SIGN = "no sign of life"
_LAST_SECONDS = 3.5  # between SIGTERM and SIGKILL, so that nothing is left 5 s after the worker's end
_POLL = 0.2  # seconds between looks at who is our parent
_ASK = 1.0  # seconds between questions for the run's state
_LEASE = 86400.0  # seconds that a run keeps its place among those of its deployment without a word: the server's most


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


def heed(run: UUID) -> None:
    """Ask for the state of `run` and its stages as long as this process lives, and do what it says."""
    threading.Thread(target=_heed, args=(run, datetime.now(UTC)), daemon=True).start()


def _heed(run: UUID, began: datetime) -> None:
    from prefect.client.orchestration import get_client

    logger = logging.getLogger("prefect.engine")
    with not_waiting(), get_client(sync_client=True) as client:
        while True:
            time.sleep(_ASK)
            try:
                runs = [client.read_flow_run(run), *stages(client, run)]
                for one in runs:
                    if wrongly_crashed(one, began):
                        at_work_again(client, one)
                # A stage takes the whole with it: what comes behind needs what it would have made.
                if any(one.state and one.state.is_cancelling() for one in runs):
                    break
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


def at_work_again(client: "SyncPrefectClient", run: "FlowRun") -> None:
    """Say that the run works, and have its place among those of its deployment again, if nobody has taken it."""
    from prefect.states import Running

    state = Running(message="at work; the server was away")
    if run.deployment_id:
        names, logger = [f"deployment:{run.deployment_id}"], logging.getLogger("prefect.engine")
        try:
            answer = client.increment_concurrency_slots_with_lease(names, 1, "concurrency", _LEASE)
            # With it in the state, the server gives the place back when the run ends.
            state.state_details.deployment_concurrency_lease_id = UUID(answer.json()["lease_id"])
        except Exception as error:  # noqa: BLE001  another has it: both work
            logger.warning("the run works without a place of its own: %s", error)
    client.set_flow_run_state(run.id, state, force=True)


# --- Prefect's engine, as it is to be here ----------------------------------------------------------------------------


def prepare() -> None:
    """Change what Prefect's engine does in this process where the server is away, or a signal comes twice."""
    import prefect.flow_engine
    from prefect.utilities import engine

    wait_for_server()
    keep = prefect.flow_engine.maintain_concurrency_lease

    def keep_place(lease: UUID, seconds: float, **_: bool) -> AbstractContextManager:
        # By itself it would end the run where three renewals fail: after five minutes of outage.
        return keep(lease, _LEASE, raise_on_lease_renewal_failure=False)

    prefect.flow_engine.maintain_concurrency_lease = keep_place
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
    heed(UUID(os.environ["PREFECT__FLOW_RUN_ID"]))
    run_engine()
