"""SIGTERM or Ctrl-C (SIGINT) while a run trains: it finishes its step, saves and stops."""

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
_REQUESTS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """A run got SIGTERM or SIGINT, and has saved: the message names the step and the checkpoint."""


class Stop:
    """While it is entered, SIGTERM and SIGINT set `requested`, and end the process only when one comes again later.

    The second Ctrl-C of a program that runs alone ends it without delay: a terminal sends one for each key press, and
    no launcher sends it again. SIGINT stays ignored where it was, as in the background of a script.

    After a training that stopped, or was asked to in its last step, both are ignored for a while: the writer and other
    ranks may still be at work, and the exit status is to tell how the training ended.
    """

    def __init__(self) -> None:
        self.requested = False
        self._passes_until = 0.0  # by time.monotonic()
        self._before: dict[int, signal.Handlers] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # nowhere else may handlers be set
            for number in _REQUESTS:
                if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note) or signal.SIG_DFL
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Stopped) or (self.requested and error is None):
            self.requested, self._passes_until = True, time.monotonic() + _AFTER_TRAINING
        else:
            for number, before in self._before.items():
                signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            alone = number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ
            self.requested, self._passes_until = True, time.monotonic() + (0.0 if alone else _ONE_REQUEST)
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                # Not print, which a signal handler may interrupt.
                os.write(2, b"stopping: this step is finished and saved; Ctrl-C again ends at once and saves nothing\n")
        elif time.monotonic() > self._passes_until:
            before = self._before[number]
            # KeyboardInterrupt would still wait for the writer.
            signal.signal(number, signal.SIG_DFL if before == signal.default_int_handler else before)
            signal.raise_signal(number)


def pass_over_requests() -> None:
    """From here to the end of the program, which is near; Python takes its own handlers away before that."""
    for number in _REQUESTS:
        signal.signal(number, signal.SIG_IGN)


def obey_the_loader_alone() -> None:
    """In a loading process: SIGINT is ignored, and SIGTERM ends it if it comes from its parent, the loader.

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
