"""The process of one flow run, as prefect.yaml has a worker start it: Prefect's engine, patched and watched.

    python -m flows.engine

- It ends with its worker. A worker that is killed cannot end its flow runs, and Prefect leaves them running. So this
  process watches its parent. When the parent changes, it sends itself SIGTERM, which the engine reports as a crash and
  which makes `flows.supervisor` end the processes of the flow, and SIGKILL if that is not enough.
- It outlives an outage of the server (flows/prefect_patches.py).
- It asks for its own state each second. If the run or one of its stages is cancelled, it ends within 10 s.
"""

import atexit
import logging
import os
import runpy
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

from flows.prefect_patches import (
    end_as_cancelled,
    handle_sigterm_once,
    keep_slot,
    not_waiting,
    renew_slot,
    set_running,
    wait_for_server,
    wrongly_crashed,
)

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

_LAST_SECONDS = 3.5  # between SIGTERM and SIGKILL, so that nothing is left 5 s after the worker's end
_POLL = 0.2  # seconds between looks at who is our parent
_ASK = 1.0  # seconds between questions for the run's state


def exit_with_parent(parent: int) -> None:
    """Have this process ended when `parent`, a process id, is its parent no longer."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def follow_state(run: UUID) -> None:
    """Follow the state of `run` and its stages as long as this process lives: end when cancelled, keep the slot."""
    threading.Thread(target=_follow, args=(run, datetime.now(UTC)), daemon=True).start()


def _follow(run: UUID, began: datetime) -> None:
    from prefect.client.orchestration import get_client

    logger, renewed = logging.getLogger("prefect.engine"), (None, 0.0)
    with not_waiting(), get_client(sync_client=True) as client:
        while True:
            time.sleep(_ASK)
            try:
                runs = [client.read_flow_run(run), *stage_runs(client, run)]
                for one in runs:
                    if wrongly_crashed(one, began):
                        set_running(client, one)
                # A stage takes the whole with it: the stages after it need what it would have made.
                if any(one.state and one.state.is_cancelling() for one in runs):
                    break
                renewed = renew_slot(client, runs[0], renewed)
            except Exception as error:  # noqa: BLE001  the server is away, or not well: it is asked again
                logger.debug("the state of the run is not known: %s", error)
    end_as_cancelled()


def stage_runs(client: "SyncPrefectClient", run: UUID) -> "list[FlowRun]":
    """The flow runs that `run` has started in its own process."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
    from prefect.client.schemas.sorting import FlowRunSort

    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    return client.read_flow_runs(flow_run_filter=below, sort=FlowRunSort.START_TIME_DESC)


def run_engine() -> None:
    """Run Prefect's engine, and end the process with it: taking torch's modules apart would take seconds more."""
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
        # It was told to end. After an outage, sending the logs of that time has taken 6 s and more.
        late = threading.Timer(_LAST_SECONDS, os._exit, (status,))
        late.daemon = True
        late.start()
        raise


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    wait_for_server()
    keep_slot()
    handle_sigterm_once()
    # The engine itself reports a run as Cancelled, for its worker may be unable to.
    os.environ["PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS"] = "true"
    follow_state(UUID(os.environ["PREFECT__FLOW_RUN_ID"]))
    run_engine()
