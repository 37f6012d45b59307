"""Run Prefect's server and a worker on this machine, for the deployments of prefect.yaml.

    vlbert serve [--deployments FILE] [--home FOLDER] [--port PORT] [--limit N] [--query SECONDS]

The command runs until Ctrl-C. Prefect's files go to FOLDER, by default PREFECT_HOME or .prefect. The user's own
Prefect server is not used. The server and the worker are child processes. If either ends, this program ends too, and
systemd may restart it. docs/serve.md explains how to run the parts on different machines.
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
from flows.supervisor import run_in_background
from storage.programs import Command

POOL = "local"  # work pool of the worker
PORT = 4200  # Prefect's default
HEARTBEAT_RETENTION = 3600  # seconds: two days of training give thousands of heartbeats, but the alarm needs the last
QUERY = 5.0  # seconds between two queries of the worker for new runs
_START_SECONDS = 120.0  # time limit for the server's start
_POLL = 0.5  # seconds between two checks of server and worker


@contextmanager
def serving(
    home: Path, port: int, deployments: Path, query_seconds: float = QUERY, limit: int | None = None
) -> Iterator[Callable[[], None]]:
    """Context manager that runs a Prefect server, and a worker for the deployments in a file.

    Args:
        home: Folder for the database and the logs.
        port: Port of the server on 127.0.0.1. Prefect's clients in this process then use this server.
        deployments: File of deployments, such as prefect.yaml.
        query_seconds: Seconds between two queries of the worker for new runs.
        limit: Maximum number of concurrent runs of the worker, by default unlimited.

    Yields:
        A function that raises RuntimeError if the server or the worker has ended.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:  # check now: a server already on this port would be mistaken for ours
        raise RuntimeError(f"port {port} is in use; choose another one with make serve PORT=...") from error
    home.mkdir(parents=True, exist_ok=True)
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:  # settings of the user's own server
        del os.environ[name]
    os.environ.update(environment(home, port, query_seconds))
    checks: dict[str, Callable[[], bool]] = {}
    with ExitStack() as processes:

        def start(name: str, module: str, *arguments: str) -> None:
            log = home / f"{name}.log"
            log.unlink(missing_ok=True)
            command = [sys.executable, "-m", module, name, "start", *arguments]
            checks[name] = processes.enter_context(run_in_background(command, log))

        def check() -> None:
            for name, is_running in checks.items():
                if not is_running():
                    raise RuntimeError(f"the {name} ended, and all runs with it; {read_tail(home / f'{name}.log')}")

        start("server", "flows.prefect_patches", "--host", "127.0.0.1", "--port", str(port))
        wait_for_server(check)
        deploy(deployments)
        limited = [] if limit is None else ["--limit", str(limit)]
        start("worker", "prefect", "--pool", POOL, "--type", "process", *limited)
        yield check


def environment(home: Path, port: int, query_seconds: float) -> dict[str, str]:
    """Return environment variables for the server, the worker and the flow runs."""
    return quiet_prefect(home) | {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        # Relative, so that the UI calls the server it was loaded from, even through a tunnel or by another host name.
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_WORKER_QUERY_SECONDS": str(query_seconds),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT),
        # Leases survive a restart of the server. Waiting runs ask only once a minute, because requests are stored.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "60",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_EVENT_RETENTION_OVERRIDES": json.dumps(
            {"prefect.flow-run.heartbeat": HEARTBEAT_RETENTION}
        ),
        # Makes `python -m flows.engine` in prefect.yaml use this Python.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def wait_for_server(check: Callable[[], None]) -> None:
    """Wait until the server at PREFECT_API_URL responds, calling `check` meanwhile. Raises RuntimeError after 120 s."""
    from prefect.client.orchestration import get_client  # here, because it reads settings that callers set first

    deadline = time.monotonic() + _START_SECONDS
    with get_client(sync_client=True) as client:
        while client.api_healthcheck() is not None:
            check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the Prefect server did not start at {client.api_url} within {_START_SECONDS:g} s")
            time.sleep(0.1)


def read_tail(log: Path) -> str:
    """Return the path and the last 50 lines of a log file, for an error message."""
    lines = log.read_text(errors="replace").splitlines()[-50:]
    return f"{log} ends with:\n" + "\n".join(lines)


def serve_file(
    deployments: Path = Path("prefect.yaml"),
    home: Path | None = None,
    port: int = PORT,
    limit: int | None = None,
    query: float = QUERY,
) -> None:
    """Serve the deployments of a file on this machine, with Prefect's server, its UI and a worker.

    Args:
        deployments: file that describes the deployments
        home: folder for all files of Prefect, by default PREFECT_HOME or .prefect
        port: port of the server and its UI
        limit: maximum number of concurrent runs, by default unlimited; use 1 if runs share a GPU
        query: seconds between two queries for new runs
    """
    home = (home or Path(os.environ.get("PREFECT_HOME") or ".prefect")).absolute()
    if not deployments.is_file():
        raise ValueError(f"there is no file {deployments}; name one with --deployments, such as prefect.yaml")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handle SIGTERM like Ctrl-C
    print(f"starting Prefect, with its files in {home}", flush=True)
    with serving(home, port, deployments, query, limit) as check:
        print(
            f"Prefect's UI is at http://127.0.0.1:{port}; the flows' log is {home}/worker.log\n"
            "To start a run, in another terminal:\n"
            f"    export PREFECT_HOME={shlex.quote(str(home))} PREFECT_API_URL=http://127.0.0.1:{port}/api\n"
            f"    {Path(sys.executable).parent}/prefect deployment run pretrain-vlbert/default --watch\n"
            "Ctrl-C stops the server, the worker and all runs",
            flush=True,
        )
        while True:
            check()
            time.sleep(_POLL)


main = Command("vlbert serve", serve_file, RuntimeError)
