"""Prefect as docs/operating.md sets it up for several machines: PostgreSQL, a password, two work pools."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from operated import ENDED, tiny_pipeline, wait_until
from places import PROJECT
from tools import skip_without

from demo.data import DemoData
from demo.serve import free_port
from flows.serve import end_of
from flows.settings import quiet_prefect
from flows.supervisor import background

pytestmark = pytest.mark.far

PASSWORD = "operator:change-me"
_AS_POSTGRES = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]  # it refuses to run as root


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL with an empty database `prefect`."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not programs:
        skip_without("far", "there is no PostgreSQL: apt-get install postgresql")
    programs, port = programs[-1].parent, free_port(0)
    folder = Path("/tmp") / f"postgres-{os.getpid()}"  # pytest's folders are closed to other users
    as_owner = _AS_POSTGRES if os.geteuid() == 0 else []
    folder.mkdir()
    if as_owner:
        shutil.chown(folder, "postgres", "postgres")
    try:
        data = folder / "data"
        initialise = [programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--no-sync"]
        subprocess.run([*as_owner, *initialise], check=True, capture_output=True, cwd=folder)
        log = tmp_path_factory.mktemp("postgres") / "log"
        settings = [f"port={port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={folder}", "fsync=off"]
        command = [programs / "postgres", "-D", data, *(part for setting in settings for part in ("-c", setting))]
        with background([*as_owner, *command], log) as runs:

            def answers() -> bool:
                assert runs(), log.read_text()
                ask = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
                return subprocess.run(ask).returncode == 0

            wait_until(answers, 60)
            subprocess.run(
                [programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "postgres", "prefect"], check=True
            )
            yield f"postgresql+asyncpg://postgres@127.0.0.1:{port}/prefect"
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Cluster:
    """A server with a password, and a worker in each of two pools."""

    url: str
    folder: Path
    variables: dict[str, str]

    def ask(self, method: str, path: str, **json: object) -> object:
        user, _, password = PASSWORD.partition(":")
        answer = httpx.request(
            method, f"{self.url}/api{path}", json=json or None, auth=(user, password), timeout=60, trust_env=False
        )
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def ended(self, deployment: str, **parameters: object) -> dict:
        """A run of flow/name that has ended."""
        known = self.ask("GET", f"/deployments/name/{deployment}")["id"]
        run = self.ask("POST", f"/deployments/{known}/create_flow_run", parameters=parameters)["id"]

        def state() -> str:
            return self.ask("GET", f"/flow_runs/{run}")["state_type"]

        def why() -> str:
            return "\n".join([state(), *(end_of(log) for log in self.folder.glob("*.log"))])

        wait_until(lambda: state() in ENDED, 180, why)
        return self.ask("GET", f"/flow_runs/{run}")


def deployments(file: Path, demo_data: DemoData, root: Path) -> None:
    """docker/prefect.yaml with the demo's data for collection and detection."""
    project = yaml.safe_load((PROJECT / "docker" / "prefect.yaml").read_text())
    first = tiny_pipeline(demo_data, root)["datasets"][0]
    detector = first.pop("detector")
    own = {
        "collect_flow": {"root": str(root), "dataset": first, "machines": 1},
        "detect_flow": {"root": str(root), "detector": detector, "datasets": [first["name"]], "machines": 1},
    }
    for deployment in project["deployments"]:
        deployment["parameters"] |= own.get(deployment["entrypoint"].rpartition(".")[2], {})
    file.write_text(yaml.safe_dump({name: project[name] for name in ("name", "deployments")}))


@pytest.fixture(scope="module")
def cluster(database: str, demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, port = tmp_path_factory.mktemp("cluster"), free_port(0)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    variables |= quiet_prefect(folder / "home") | {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_API_AUTH_STRING": PASSWORD,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    serving = variables | {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_UI_API_URL": "/api",
    }
    url = f"http://127.0.0.1:{port}"
    found = Cluster(url, folder, variables)
    with ExitStack() as running:

        def start(name: str, module: str, *arguments: str, environment: dict[str, str] = variables) -> None:
            command = [sys.executable, "-m", module, *arguments]
            running.enter_context(background(command, folder / f"{name}.log", environment=environment))

        at = ["--host", "127.0.0.1", "--port", str(port)]
        start("server", "flows.prefect_patches", "server", "start", *at, environment=serving)

        def answers() -> bool:
            try:
                return found.ask("GET", "/health") is True
            except httpx.TransportError:
                return False

        wait_until(answers, 180, lambda: end_of(folder / "server.log"))
        deployments(folder / "prefect.yaml", demo_data, folder / "root")
        deploy = [sys.executable, "-m", "vlbert", "deploy", folder / "prefect.yaml"]
        subprocess.run(deploy, check=True, env=variables, cwd=PROJECT, timeout=300)
        for pool in ("cpu", "gpu"):
            start(pool, "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", f"worker-{pool}")
        yield found


@pytest.mark.timeout(600)
def test_each_pool_does_its_part(cluster: Cluster):
    collected = cluster.ended("collect-captions/default")
    detected = cluster.ended("detect-regions/default")
    states = [(run["state_type"], run["work_pool_name"]) for run in (collected, detected)]
    assert states == [("COMPLETED", "cpu"), ("COMPLETED", "gpu")]
    folder = cluster.folder / "root" / "captions"
    shards = {file.name for file in (folder / "images").glob("*.parquet")}
    assert shards
    assert {file.name for file in folder.glob("regions/*/*.parquet")} == shards


def test_without_the_password_the_server_says_nothing(cluster: Cluster):
    for auth in (None, ("operator", "wrong")):
        asked = httpx.post(f"{cluster.url}/api/flow_runs/filter", json={}, auth=auth, trust_env=False)
        assert asked.status_code == httpx.codes.UNAUTHORIZED
    command = [sys.executable, "-m", "vlbert", "deploy", "prefect.yaml"]
    refused = subprocess.run(
        command,
        env=cluster.variables | {"PREFECT_API_AUTH_STRING": "operator:wrong"},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert refused.returncode == 1
    assert "PREFECT_API_AUTH_STRING" in refused.stderr
    assert refused.stderr.count("\n") == 1
