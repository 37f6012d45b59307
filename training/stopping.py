"""SIGTERM or Ctrl-C (SIGINT) while a run trains: it finishes its step, saves and stops."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

_REQUESTS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A run got SIGTERM or SIGINT, and has saved: the message names the step and the checkpoint."""


class Stop:
    """Context manager: the first SIGTERM or SIGINT sets `requested`; a second SIGINT (Ctrl-C) terminates.

    A second SIGTERM does not: launchers repeat to each process what its whole group has got, and send SIGKILL in the
    end. torchrun repeats SIGINT, too. SIGINT stays ignored where it was, as in the background of a script. After a
    training that stopped all stays as it is: the writer and other ranks may still be at work.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, signal.Handlers] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # nowhere else may handlers be set
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
            # Not print, which a signal handler may interrupt.
            os.write(2, b"stopping: this step is finished and saved; Ctrl-C again ends at once and saves nothing\n")
        self.requested = True


def ignore_group_signals() -> None:
    """In a loading process: ignore SIGINT, and end at SIGTERM only if it comes from the parent, the loader.

    Terminals and launchers signal whole groups of processes, and the step that is to be finished needs what is loaded
    for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_the_loader, daemon=True).start()


def _wait_for_the_loader() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
