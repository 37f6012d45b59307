"""SIGTERM while a run trains: told to stop, it finishes its step and saves."""

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

# One request may come twice: to all processes of a group, and once more from the launcher among them.
_ONE_REQUEST = 5.0  # seconds


class Stopped(Exception):
    """A run was told to stop, and has saved: the message names the step and the checkpoint."""


class Stop:
    """While it is entered, SIGTERM is noted in `told`, and ends the process only when it comes again later."""

    def __init__(self) -> None:
        self.told = False
        self._since = 0.0
        self._before = signal.SIG_DFL

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # nowhere else may handlers be set
            self._before = signal.signal(signal.SIGTERM, self._note) or signal.SIG_DFL
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.told and time.monotonic() - self._since > _ONE_REQUEST:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        elif not self.told:
            self.told, self._since = True, time.monotonic()


def obey_the_loader_alone() -> None:
    """In a loading process: SIGTERM ends it if it comes from its parent, the loader.

    Launchers signal whole groups of processes, and the step that is to be finished needs what is loaded for it.
    """
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_the_loader, daemon=True).start()


def _wait_for_the_loader() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
