"""The process of one flow run, as prefect.yaml has a worker start it: Prefect's engine, but not outliving its worker.

    python -m flows.engine

A worker that is killed cannot end its flow runs, and Prefect leaves them working without anybody who watches them. So
this process looks who its parent is. When that changes it gets one SIGTERM, which the engine reports as a crash and
which makes `flows.supervisor` end what the flow has started, and SIGKILL where that is not enough.
"""

import os
import runpy
import signal
import threading
import time
from pathlib import Path

_LAST_SECONDS = 3.5  # between SIGTERM and SIGKILL, so that nothing is left 5 s after the worker's end
_POLL = 0.2  # seconds between looks at who is our parent


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


if __name__ == "__main__":
    end_with(os.getppid())
    runpy.run_module("prefect.engine", run_name="__main__")
