"""The process of one flow run, as prefect.yaml has a worker start it: Prefect's engine, but not outliving its worker.

    python -m flows.engine

A worker that is killed cannot end its flow runs, and Prefect leaves them working without anybody who watches them. So
this process hears of its parent's death: from the kernel, as SIGTERM, which the engine reports as a crash and which
makes `flows.supervisor` end what the flow has started; where that is not enough, a thread ends it. Linux only (prctl).
"""

import ctypes
import os
import runpy
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAST_SECONDS = 4.0  # between SIGTERM and SIGKILL, so that nothing is left 5 s after the worker's end
_POLL = 0.2  # seconds between looks at who is our parent


def end_with(parent: int) -> None:
    """End this process when `parent`, a process id, is its parent no longer: SIGTERM at once, and SIGKILL 4 s later."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise OSError("prctl(PR_SET_PDEATHSIG) failed: this flow run would outlive its worker")
    if os.getppid() != parent:  # it died before the call, which then hears of nothing
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=_end_late, args=(parent,), daemon=True).start()


def _end_late(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    # No second SIGTERM: it would interrupt what the first one made the flow clean up.
    time.sleep(_LAST_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with(os.getppid())
    runpy.run_module("prefect.engine", run_name="__main__")
