"""Serve the deployments of prefect.yaml on this machine: Prefect's server, a worker, the alarms for runs that died.

    vlbert serve [--deployments FILE] [--home FOLDER] [--port PORT] [--limit N] [--query SECONDS]  until Ctrl-C

Everything that Prefect keeps goes to FOLDER (.prefect, or PREFECT_HOME), nothing to the user's own Prefect. A server
that dies is replaced, and runs go on meanwhile. A worker that dies is replaced; its runs have died with it.
docs/operating.md says how to run the parts on machines of their own.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import UUID

from flows.deploy import HEARTBEAT, deploy, work_pools
from flows.settings import quiet_prefect
from flows.supervisor import background
from storage.programs import Command

POOL = "local"  # which the worker serves
PORT = 4200  # Prefect's own
SIGNS_KEPT = 3600  # seconds: a training of two days gives thousands, and the alarm needs but the last
_START_SECONDS = 120.0  # that the server may take
QUERY = 5.0  # seconds between two questions of the worker for work
_POLL = 0.5  # seconds between looks at server and worker
_PAUSE = 5.0  # seconds before one that died is replaced
_AT_ONCE = 60.0  # seconds: what ended sooner after its start may be unable to start
_MOST_AT_ONCE = 5  # such ends in a row


@contextmanager
def serving(
    home: Path, port: int, deployments: Path, query_seconds: float = QUERY, limit: int | None = None
) -> Iterator[Callable[[], None]]:
    """Server, deployments and worker while the block runs; this process and its children talk to that server.

    home: folder for the database and the logs; port: of the server on 127.0.0.1; deployments: a file such as
    prefect.yaml; query_seconds: between two questions of the worker for work; limit: runs that it takes at once.
    Yields a function that replaces server and worker where they have ended.
    """
    home.mkdir(parents=True, exist_ok=True)
    with ExitStack() as running:
        running.enter_context(alone(home, port))
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:  # the user's own server is not ours
            del os.environ[name]
        os.environ.update(environment(home, port, query_seconds))
        prefect = [sys.executable, "-m", "flows.prefect_cli"]
        server_log, worker_log = home / "server.log", home / "worker.log"
        for log in (server_log, worker_log):
            log.unlink(missing_ok=True)
        server = [*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        serves, serve_again = running.enter_context(
            replaceable("server", lambda: background(server, server_log), server_log)
        )
        wait_for_server(port, serves, server_log)
        crash_the_dead()
        deploy(deployments)

        def crash_runs_of_worker() -> None:
            with suppress(Exception):  # where the server is away, the alarms do it
                crash_the_dead()

        worker = [*prefect, "worker", "start", "--pool", POOL, "--type", "process"]
        worker += [] if limit is None else ["--limit", str(limit)]
        name, start = "worker, and its runs with it,", lambda: background(worker, worker_log)
        _, work_again = running.enter_context(replaceable(name, start, worker_log, crash_runs_of_worker))

        def check() -> None:
            serve_again()
            work_again()

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


@contextmanager
def replaceable(
    name: str,
    start: Callable[[], AbstractContextManager[Callable[[], bool]]],
    log: Path,
    after: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Callable[[], bool], Callable[[], None]]]:
    """A child in the background; yields two functions: does it run, and one that replaces it where it has ended.

    The latter says that `name` ended, with the end of its log, and calls `after` before it starts another. RuntimeError
    where it has ended at once so often that it seems unable to start, and no run is at work that this would end.
    """
    with ExitStack() as running:
        runs = running.enter_context(start())
        started, at_once = time.monotonic(), 0

        def again() -> None:
            nonlocal runs, started, at_once
            if not runs():
                running.close()
                at_once = at_once + 1 if time.monotonic() - started < _AT_ONCE else 0
                if at_once >= _MOST_AT_ONCE and not worked_for():
                    raise RuntimeError(f"the {name} ended at once {at_once} times in a row; {end_of(log)}")
                print(f"the {name} ended; another one is started; {end_of(log)}", flush=True)
                time.sleep(_PAUSE)  # a worker's runs have ended in 5 s
                after()
                runs, started = running.enter_context(start()), time.monotonic()

        yield lambda: runs(), again


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


def wait_for_server(port: int, serves: Callable[[], bool], log: Path) -> None:
    """Until it answers; RuntimeError with the end of its log where it ends or takes too long."""
    url = f"http://127.0.0.1:{port}/api/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would not find this machine
    deadline = time.monotonic() + _START_SECONDS
    while serves() and time.monotonic() < deadline:
        try:
            with opener.open(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"the Prefect server did not answer at {url} in {_START_SECONDS:g} s; {end_of(log)}")


def crash_the_dead() -> None:
    """Crash the runs that the server believes to be at work, and that no process of this machine works for.

    They died together with the server, as when the machine lost power, or with their worker before their first sign of
    life: nobody else would end them, and a deployment that runs once at a time would wait for them for ever. The server
    listens on this machine alone: no other has any.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId, FlowRunFilterState
    from prefect.client.schemas.filters import FlowRunFilterStateType as OfType
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed

    at_work = FlowRunFilterState(type=OfType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]))
    with get_client(sync_client=True) as client:
        spared, found = set(), worked_for()
        while found:  # a run that is worked for, and those below it, which are in the same process
            spared |= found
            below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=list(found)))
            found = {run.id for run in client.read_flow_runs(flow_run_filter=below)} - spared
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=at_work)):
            if run.id not in spared:
                state = Crashed(message="its process was gone when server or worker started again")
                client.set_flow_run_state(run.id, state, force=True)


def worked_for() -> set[UUID]:
    """The flow runs that processes of this machine work for: each child of one has a variable that names it."""
    found = set()
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError, ValueError):  # it ended meanwhile, is another user's, or has set that to no id
            for variable in variables.read_bytes().split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name == b"PREFECT__FLOW_RUN_ID":
                    found.add(UUID(value.decode()))
    return found


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
