"""Run Prefect's engine for one flow run. Workers start this program, as set in prefect.yaml.

    python -m flows.engine

- The process ends when its worker ends. A killed worker cannot end its flow runs, and Prefect leaves them running. So
  this process watches its parent, the worker. When the parent has ended, the process sends itself SIGTERM: the engine
  then reports a crash, and `flows.supervisor` ends the flow's child processes. If that is not enough, SIGKILL follows.
- The process survives an outage of the server (flows/prefect_patches.py).
- The process checks its run's state every second, and exits within 10 s if the run or one of its stages is cancelled.
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
from uuid import UUID

from flows.prefect_patches import (
    end_as_cancelled,
    fail_fast,
    handle_sigterm_once,
    is_wrongly_crashed,
    keep_slot,
    renew_slot,
    set_running,
    wait_for_server,
)

_KILL_DELAY = 3.5  # seconds between SIGTERM and SIGKILL, so that all processes exit within 5 s of the worker's end
_PARENT_INTERVAL = 0.2  # seconds between two checks of the parent
_STATE_INTERVAL = 1.0  # seconds between two requests of the run's state


def exit_with_parent(parent: int) -> None:
    """End this process when the process with id `parent` is no longer its parent. Call this in a thread."""
    while os.getppid() == parent:
        time.sleep(_PARENT_INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_KILL_DELAY)
    os.kill(os.getpid(), signal.SIGKILL)


def follow_state(run: UUID, began: datetime) -> None:
    """Renew the concurrency slot of `run`, and end this process if `run` or one of its stages is cancelled.

    Call this in a thread. `began` is when this process began.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
    from prefect.client.schemas.sorting import FlowRunSort

    stages = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    logger, renewed = logging.getLogger("prefect.engine"), (None, 0.0)
    with fail_fast(), get_client(sync_client=True) as client:
        while True:
            time.sleep(_STATE_INTERVAL)
            try:
                flow_runs = [client.read_flow_run(run)]
                flow_runs += client.read_flow_runs(flow_run_filter=stages, sort=FlowRunSort.START_TIME_DESC)
                for flow_run in flow_runs:
                    if is_wrongly_crashed(flow_run, began):
                        set_running(client, flow_run)
                # Cancelling a stage ends the whole run, because later stages need its result.
                if any(flow_run.state and flow_run.state.is_cancelling() for flow_run in flow_runs):
                    break
                renewed = renew_slot(client, flow_runs[0], renewed)
            except Exception as error:  # noqa: BLE001  the server is unreachable or failing: try again
                logger.debug("cannot read the state of the run: %s", error)
    end_as_cancelled()


def run_engine() -> None:
    """Run Prefect's engine, and exit without Python's normal shutdown, because it takes seconds if torch is loaded."""
    status = 1

    def exit_now() -> None:
        logging.shutdown()  # sends the remaining logs; logging's own exit handler would run after this one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(exit_now)  # before Prefect registers its exit handlers, so that it runs after them
    try:
        runpy.run_module("prefect.engine", run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        # Limit the time to exit: after an outage, sending the logs of that time took 6 s or more.
        timer = threading.Timer(_KILL_DELAY, os._exit, (status,))
        timer.daemon = True
        timer.start()
        raise


if __name__ == "__main__":
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    wait_for_server()
    keep_slot()
    handle_sigterm_once()
    # Let the engine report a run as Cancelled, because the worker may be unable to.
    os.environ["PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS"] = "true"
    run = UUID(os.environ["PREFECT__FLOW_RUN_ID"])
    threading.Thread(target=follow_state, args=(run, datetime.now(UTC)), daemon=True).start()
    run_engine()
