"""SIGTERM while a run trains: told to stop, it finishes its step and saves."""

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

# One request may come more than once: to all processes of a group, and again from the launcher among them.
_ONE_REQUEST = 5.0  # seconds
# And once more when a rank has ended, while another still writes: so long after the last step it is passed over.
_AFTER_TRAINING = 60.0  # seconds


class Stopped(Exception):
    """A run was told to stop, and has saved: the message names the step and the checkpoint."""


class Stop:
    """While it is entered, SIGTERM is noted in `told`, and ends the process only when it comes again later.

    Behind a training that stopped, or was told to in its last step, it is passed over for a while: the writer and
    other ranks may still be at work, and the exit status is to say how the training ended.
    """

    def __init__(self) -> None:
        self.told = False
        self._passes_until = 0.0  # by time.monotonic()
        self._before = signal.SIG_DFL

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # nowhere else may handlers be set
            self._before = signal.signal(signal.SIGTERM, self._note) or signal.SIG_DFL
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Stopped) or (self.told and error is None):
            self.told, self._passes_until = True, time.monotonic() + _AFTER_TRAINING
        elif threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.told:
            self.told, self._passes_until = True, time.monotonic() + _ONE_REQUEST
        elif time.monotonic() > self._passes_until:
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)


def pass_over_sigterm() -> None:
    """From here to the end of the program, which is near; Python takes its own handlers away before that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


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
