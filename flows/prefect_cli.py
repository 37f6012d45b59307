"""Prefect's command line with two faults of Prefect 3.8.8 mended.

    python -m flows.prefect_cli worker start --pool local --type process    as `prefect worker start`
    python -m flows.prefect_cli server start                                as `prefect server start`

A worker, and each flow run (flows/engine.py), waits for a server that is away. Prefect by itself gives up after about a
minute: a flow then fails where it begins a stage, and a worker ends with all its runs, or no longer asks whether one
was cancelled.

A server on SQLite no longer locks itself for a minute. Python's garbage collector runs in whichever thread allocates.
In the thread of the event loop it finalises cursors of SQLite, which waits while another thread uses their connection.
That thread waits up to 60 s (busy_timeout) for the lock of the database, and the transaction that holds the lock waits
for the event loop.
"""

import gc
import logging
import runpy
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

_PAUSE = 2.0  # seconds between two requests to a server that is away; Prefect's client has made several before
_BETWEEN_WARNINGS = 60.0  # seconds between two warnings that it is
_ANSWERS = (502, 503, 504)  # of a proxy whose server is away, or of a server whose database is
_SHORT = 10.0  # seconds that a request may take that does not wait
_STARTED = 30.0  # seconds after which a server has made what it keeps
_BETWEEN_COLLECTIONS = 5.0  # seconds between two collections of garbage

_waits: ContextVar[bool] = ContextVar("waits", default=True)


@contextmanager
def not_waiting() -> Iterator[None]:
    """In the block Prefect's clients fail within seconds where the server is away, also those that were made before."""
    from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    token = _waits.set(False)
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1, PREFECT_API_REQUEST_TIMEOUT: _SHORT}):
            yield
    finally:
        _waits.reset(token)


class _Outage:
    """The failures of one request in a row."""

    def __init__(self) -> None:
        self.since, self.logged = time.monotonic(), -_BETWEEN_WARNINGS

    def goes_on(self, error: Exception) -> None:
        """Log it now and then; raises the error where it is of another kind, or nobody is to wait."""
        import httpx

        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        away = isinstance(error, httpx.TransportError) or status in _ANSWERS
        if not away or not _waits.get() or _ending():
            raise error
        now = time.monotonic()
        if now - self.logged >= _BETWEEN_WARNINGS:
            self.logged = now
            message = "the Prefect server is away (%s: %s); asked again since %.0f s"
            # Not to the server, like what flows log.
            logging.getLogger("prefect.outage").warning(message, type(error).__name__, error, now - self.since)


def _ending() -> bool:
    """Whether this thread is about to end because of a signal: it reports that where it can, and does not wait."""
    from prefect.exceptions import ExternalSignal

    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, ExternalSignal | KeyboardInterrupt | SystemExit):  # not CancelledError: a timeout has it
            return True
        error = error.__context__
    return False


def wait_for_server() -> None:
    """From here on, in this process."""
    from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient

    PrefectHttpxSyncClient.send = _waiting(PrefectHttpxSyncClient.send)
    PrefectHttpxAsyncClient.send = _waiting_async(PrefectHttpxAsyncClient.send)


def _hasten(request: "httpx.Request") -> None:
    """Give it little time where nobody is to wait: a client that was made before the block gives a minute."""
    import httpx

    if not _waits.get():
        request.extensions["timeout"] = httpx.Timeout(_SHORT).as_dict()


def _waiting(send: "Callable[..., httpx.Response]") -> "Callable[..., httpx.Response]":
    def waiting(client: object, request: "httpx.Request", *rest: object, **kwargs: object) -> "httpx.Response":
        outage = _Outage()
        _hasten(request)
        while True:
            try:
                return send(client, request, *rest, **kwargs)
            except Exception as error:  # noqa: BLE001  raised where it is no outage
                outage.goes_on(error)
            time.sleep(_PAUSE)

    return waiting


def _waiting_async(send: "Callable[..., Awaitable[httpx.Response]]") -> "Callable[..., Awaitable[httpx.Response]]":
    import anyio

    async def waiting(client: object, request: "httpx.Request", *rest: object, **kwargs: object) -> "httpx.Response":
        outage = _Outage()
        _hasten(request)
        while True:
            try:
                return await send(client, request, *rest, **kwargs)
            except Exception as error:  # noqa: BLE001  as above
                outage.goes_on(error)
            await anyio.sleep(_PAUSE)

    return waiting


def collect_garbage_apart() -> None:
    """From here on, garbage is collected in a thread of its own, which may wait for a lock."""

    def collect() -> None:
        time.sleep(_STARTED)
        gc.collect()
        gc.freeze()  # what a started server holds is not scanned again
        while True:
            time.sleep(_BETWEEN_COLLECTIONS)
            gc.collect()

    gc.disable()
    threading.Thread(target=collect, daemon=True).start()


if __name__ == "__main__":
    if sys.argv[1:2] == ["server"]:
        collect_garbage_apart()
    else:
        wait_for_server()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
