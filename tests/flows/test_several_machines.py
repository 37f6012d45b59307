"""Prefect as docs/serve.md sets it up for several machines: PostgreSQL, a password, two work pools."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from operated import Operated, operated_apart, tiny_pipeline, wait_until
from places import PROJECT
from tools import skip_without

from demo.data import DemoData
from demo.serve import free_port
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
    programs, port = programs[-1].parent, free_port()
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
def cluster(database: str, demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """A server with a password on PostgreSQL, and a worker in each of two pools."""
    folder = tmp_path_factory.mktemp("cluster")
    deployments(folder / "prefect.yaml", demo_data, folder / "root")
    variables = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database, "PREFECT_SERVER_API_AUTH_STRING": PASSWORD}
    file = folder / "prefect.yaml"
    with operated_apart(folder / "home", file, "cpu", "gpu", password=PASSWORD, **variables) as serving:
        yield serving


@pytest.mark.timeout(600)
def test_each_pool_does_its_part(cluster: Operated):
    for deployment, pool in (("collect-captions/default", "cpu"), ("detect-regions/default", "gpu")):
        run = cluster.complete(deployment)
        assert cluster.ask("GET", f"/flow_runs/{run}")["work_pool_name"] == pool
    folder = cluster.deployments.parent / "root" / "captions"
    shards = {file.name for file in (folder / "images").glob("*.parquet")}
    assert shards
    assert {file.name for file in folder.glob("regions/*/*.parquet")} == shards


def test_without_the_password_the_server_says_nothing(cluster: Operated):
    for auth in (None, ("operator", "wrong")):
        asked = httpx.post(f"{cluster.url}/api/flow_runs/filter", json={}, auth=auth, trust_env=False)
        assert asked.status_code == httpx.codes.UNAUTHORIZED
    variables = os.environ | cluster.variables | {"PREFECT_API_AUTH_STRING": "operator:wrong"}
    command = [sys.executable, "-m", "vlbert", "deploy", "prefect.yaml"]
    refused = subprocess.run(command, env=variables, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 1
    assert "PREFECT_API_AUTH_STRING" in refused.stderr
    assert refused.stderr.count("\n") == 1
