"""Serve the deployments of prefect.yaml on this machine: Prefect's server, a worker, the alarms for runs that died.

    vlbert serve [--deployments FILE] [--home FOLDER] [--port PORT] [--limit N] [--query SECONDS]  until Ctrl-C

Everything that Prefect keeps goes to FOLDER (.prefect, or PREFECT_HOME), nothing to the user's own Prefect. Server and
worker are child processes. If one ends, all ends; systemd may start it again. docs/operating.md says how to run the
parts on machines of their own.
"""

import fcntl
import json
import os
import shlex
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flows.deploy import HEARTBEAT, deploy, work_pools
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
    home.mkdir(parents=True, exist_ok=True)
    with ExitStack() as running:
        running.enter_context(alone(home, port))
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:  # the user's own server is not ours
            del os.environ[name]
        os.environ.update(environment(home, port, query_seconds))
        runs: dict[str, Callable[[], bool]] = {}

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
        wait_for_server(port, check)
        deploy(deployments)
        limited = [] if limit is None else ["--limit", str(limit)]
        start("worker", "prefect", "--pool", POOL, "--type", "process", *limited)
        yield check


@contextmanager
def alone(home: Path, port: int) -> Iterator[None]:
    """RuntimeError where another serves from `home` or on `port`: it would be taken for ours, and its runs for dead."""
    with open(home / "serving", "w") as file, socket.socket() as listener:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"{home} is served already, by another process; end that, or give --home") from error
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that is just closing is free
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise RuntimeError(f"port {port} is taken: {error.strerror}; give another, make serve PORT=...") from error
        listener.close()
        yield


def environment(home: Path, port: int, query_seconds: float) -> dict[str, str]:
    """The environment variables of server, worker and flow runs."""
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


def wait_for_server(port: int, check: Callable[[], None]) -> None:
    """Wait until the server answers. Raises RuntimeError if it ends or takes too long."""
    url = f"http://127.0.0.1:{port}/api/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would not find this machine
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        check()
        try:
            with opener.open(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"the Prefect server did not answer at {url} in {_START_SECONDS:g} s")


def end_of(log: Path) -> str:
    """The last lines of a log, for an error."""
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
    if other := [pool for pool in work_pools(deployments) if pool != POOL]:
        raise ValueError(
            f"{deployments} has deployments for the work pools {', '.join(other)}, and the worker that is "
            f"started here serves {POOL} alone: their runs would wait for ever. Name {POOL} there, or start a "
            "worker for each pool as docs/operating.md has it under Several machines"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does
    serve(home.absolute(), port, deployments, query, limit)


main = Command("vlbert serve", serve_file, RuntimeError)
