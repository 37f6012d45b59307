"""Stop a run on SIGTERM or Ctrl-C (SIGINT): the run finishes its step, saves and exits."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_REQUESTS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """Raised after a run received SIGTERM or SIGINT and saved a checkpoint. The message names the checkpoint."""


class Stop:
    """Context manager that sets `requested` on the first SIGTERM or SIGINT. A second Ctrl-C ends the process.

    A second SIGTERM is ignored, because launchers send it both to the process group and to each process. Under
    torchrun, a second SIGINT is ignored too, because torchrun repeats the first one. If SIGINT was already ignored, as
    in a script's background jobs, it stays ignored. After a stopped run, the handlers stay in place, because the writer
    and other ranks may still be running.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # handlers can be set only there
            for number in _REQUESTS:
                if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not (isinstance(error, Stopped) or (self.requested and error is None)):
            for number, before in self._before.items():
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(number, signal.SIG_DFL)  # KeyboardInterrupt would still wait for the writer
            # Not print, which is not reentrant: this handler may interrupt another print.
            os.write(2, b"stopping after this step is finished and saved; Ctrl-C again exits at once without saving\n")
        self.requested = True


def ignore_group_signals() -> None:
    """Make a data loading process ignore SIGINT, and exit on SIGTERM only if the signal comes from its parent.

    Terminals and launchers send signals to whole process groups. A run that is stopping still needs its last batches.
    """

    def exit_at_parents_sigterm() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=exit_at_parents_sigterm, daemon=True).start()
