"""Serve the deployments of prefect.yaml on this machine: Prefect's server, a worker, the alarms for runs that died.

    vlbert serve [--deployments FILE] [--home FOLDER] [--port PORT] [--limit N] [--query SECONDS]  until Ctrl-C

Everything that Prefect keeps goes to FOLDER (.prefect, or PREFECT_HOME), nothing to the user's own Prefect. Server and
worker are child processes. If one ends, all ends; systemd may start it again. docs/serve.md says how to run the
parts on machines of their own.
"""

import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flows.deploy import HEARTBEAT, deploy
from flows.settings import quiet_prefect
from flows.supervisor import background
from storage.programs import Command

POOL = "local"  # which the worker serves
PORT = 4200  # Prefect's own
SIGNS_KEPT = 3600  # seconds: a training of two days gives thousands, and the alarm needs but the last
QUERY = 5.0  # seconds between two questions of the worker for work
_START_SECONDS = 120.0  # that the server may take
_POLL = 0.5  # seconds between looks at server and worker


@contextmanager
def serving(
    home: Path, port: int, deployments: Path, query_seconds: float = QUERY, limit: int | None = None
) -> Iterator[Callable[[], None]]:
    """Run server, deployments and worker while the block runs; this process and its children talk to that server.

    Args:
        home: folder for the database and the logs.
        port: of the server on 127.0.0.1.
        deployments: a file such as prefect.yaml.
        query_seconds: between two questions of the worker for work.
        limit: runs that the worker takes at once.

    Yields:
        A function that raises RuntimeError if the server or the worker has ended.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:  # another server would be taken for ours
        raise RuntimeError(f"port {port} is taken; give another, make serve PORT=...") from error
    home.mkdir(parents=True, exist_ok=True)
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:  # the user's own server is not ours
        del os.environ[name]
    os.environ.update(environment(home, port, query_seconds))
    runs: dict[str, Callable[[], bool]] = {}
    with ExitStack() as running:

        def start(name: str, module: str, *arguments: str) -> None:
            log = home / f"{name}.log"
            log.unlink(missing_ok=True)
            command = [sys.executable, "-m", module, name, "start", *arguments]
            runs[name] = running.enter_context(background(command, log))

        def check() -> None:
            for name, runs_still in runs.items():
                if not runs_still():
                    raise RuntimeError(f"the {name} ended, and all runs with it; {end_of(home / f'{name}.log')}")

        start("server", "flows.prefect_patches", "--host", "127.0.0.1", "--port", str(port))
        wait_for_server(check)
        deploy(deployments)
        limited = [] if limit is None else ["--limit", str(limit)]
        start("worker", "prefect", "--pool", POOL, "--type", "process", *limited)
        yield check


def environment(home: Path, port: int, query_seconds: float) -> dict[str, str]:
    """Return the environment variables of server, worker and flow runs."""
    return quiet_prefect(home) | {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        # Where the pages ask: at the server that they came from, whatever it is called there (a tunnel, another name).
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_WORKER_QUERY_SECONDS": str(query_seconds),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT),
        # Who runs is remembered over a restart of the server, and who waits asks once a minute: each asking is kept.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "60",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_EVENT_RETENTION_OVERRIDES": json.dumps(
            {"prefect.flow-run.heartbeat": SIGNS_KEPT}
        ),
        # For `python -m flows.engine`, which prefect.yaml names, to be this Python.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def wait_for_server(check: Callable[[], None]) -> None:
    """Wait until the server of PREFECT_API_URL answers. Raises RuntimeError if it ends or takes too long."""
    from prefect.client.orchestration import get_client  # here, because what it reads is set before

    deadline = time.monotonic() + _START_SECONDS
    with get_client(sync_client=True) as client:
        while client.api_healthcheck() is not None:
            check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the Prefect server did not answer at {client.api_url} in {_START_SECONDS:g} s")
            time.sleep(0.1)


def end_of(log: Path) -> str:
    """Return the last lines of a log, for an error."""
    lines = log.read_text(errors="replace").splitlines()[-50:]
    return f"{log} ends with:\n" + "\n".join(lines)


def serve(home: Path, port: int, deployments: Path, query_seconds: float = QUERY, limit: int | None = None) -> None:
    """Serve until a signal."""
    print(f"starting Prefect with its home in {home}", flush=True)
    with serving(home, port, deployments, query_seconds, limit) as check:
        print(
            f"the flow UI is at http://127.0.0.1:{port}, {home}/worker.log has the log of flows\n"
            "in another terminal:\n"
            f"    export PREFECT_HOME={shlex.quote(str(home))} PREFECT_API_URL=http://127.0.0.1:{port}/api\n"
            f"    {Path(sys.executable).parent}/prefect deployment run pretrain-vlbert/default --watch\n"
            "Ctrl-C ends server, worker and runs",
            flush=True,
        )
        while True:
            check()
            time.sleep(_POLL)


def serve_file(
    deployments: Path = Path("prefect.yaml"),
    home: Path | None = None,
    port: int = PORT,
    limit: int | None = None,
    query: float = QUERY,
) -> None:
    """Serve the deployments of a file on this machine: Prefect's server with its UI, and a worker.

    Args:
        deployments: the file
        home: folder for all that Prefect keeps; by default PREFECT_HOME, or .prefect
        port: of the server and its UI
        limit: runs at once; 1 where runs share a GPU
        query: seconds between looks for new runs
    """
    home = home or Path(os.environ.get("PREFECT_HOME") or ".prefect")
    if not deployments.is_file():
        raise ValueError(f"there is no file {deployments}; --deployments names one such as prefect.yaml")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does
    serve(home.absolute(), port, deployments, query, limit)


main = Command("vlbert serve", serve_file, RuntimeError)
