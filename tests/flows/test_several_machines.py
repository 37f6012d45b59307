"""Prefect as docs/operating.md sets it up for several machines: PostgreSQL, a password, two work pools, messages."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml
from browser import chromium
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


@dataclass(frozen=True)
class Database:
    """A PostgreSQL with an empty database `prefect`."""

    port: int
    psql: str

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/prefect"

    def sql(self, statement: str) -> str:
        command = [self.psql, "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-At", "-c", statement]
        return subprocess.run([*command, "prefect"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
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
            found = Database(port, str(programs / "psql"))

            def answers() -> bool:
                assert runs(), log.read_text()
                ask = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
                return subprocess.run(ask).returncode == 0

            wait_until(answers, 60)
            subprocess.run(
                [programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "postgres", "prefect"], check=True
            )
            yield found
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Cluster:
    """A server with a password, and a worker in each of two pools; `messages` is what was announced."""

    url: str
    folder: Path
    variables: dict[str, str]
    messages: list[dict] = field(default_factory=list)

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
def receiver() -> Iterator[tuple[str, list[dict]]]:
    """The URL of a web server, and the JSON that was posted to it."""
    messages: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/alerts", messages
        server.shutdown()


@pytest.fixture(scope="module")
def cluster(
    database: Database, receiver: tuple[str, list[dict]], demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
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
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database.url,
        "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "2592000",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": "3",
    }
    url = f"http://127.0.0.1:{port}"
    found = Cluster(url, folder, variables, receiver[1])
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
        make_block(variables, receiver[0])
        deployments(folder / "prefect.yaml", demo_data, folder / "root")
        deploy = [
            sys.executable,
            "-m",
            "vlbert",
            "deploy",
            folder / "prefect.yaml",
            "--notify",
            "custom-webhook/alerts",
        ]
        subprocess.run(deploy, check=True, env=variables, cwd=PROJECT, timeout=300)
        for pool in ("cpu", "gpu"):
            start(pool, "prefect", "worker", "start", "--pool", pool, "--type", "process", "--name", f"worker-{pool}")
        yield found


def make_block(variables: dict[str, str], url: str) -> None:
    """The block `custom-webhook/alerts`, as a user makes it in the UI."""
    program = (
        "from prefect.blocks.notifications import CustomWebhookNotificationBlock as Block\n"
        "message = {'subject': '{{subject}}', 'body': '{{body}}'}\n"
        f"Block(name='alerts', url={url!r}, json_data=message).save('alerts')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=variables, timeout=120)


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


def test_a_run_that_fails_is_announced(cluster: Cluster):
    detector = {"backend": "faster_rcnn", "weights": "absent.safetensors"}
    failed = cluster.ended("detect-regions/default", detector=detector)
    assert failed["state_type"] == "FAILED"
    wait_until(lambda: cluster.messages, 60, lambda: end_of(cluster.folder / "server.log"))
    (message,) = cluster.messages
    assert message["subject"] == "detect-regions: Failed"
    assert failed["name"] in message["body"]
    assert "absent.safetensors" in message["body"]


def test_runs_that_ended_long_ago_are_removed(cluster: Cluster, database: Database):
    old = cluster.ask("POST", "/flow_runs/", flow_id=cluster.ask("POST", "/flows/", name="old")["id"])["id"]
    cluster.ask("POST", f"/flow_runs/{old}/set_state", state={"type": "COMPLETED"}, force=True)
    young = cluster.ask("POST", "/flow_runs/", flow_id=cluster.ask("POST", "/flows/", name="old")["id"])["id"]
    cluster.ask("POST", f"/flow_runs/{young}/set_state", state={"type": "COMPLETED"}, force=True)
    for run, days in ((old, 31), (young, 29)):
        moment = f"now() - interval '{days} days'"
        database.sql(f"UPDATE flow_run SET start_time = {moment}, end_time = {moment} WHERE id = '{run}'")
    left = f"SELECT id FROM flow_run WHERE id IN ('{old}', '{young}')"
    wait_until(lambda: database.sql(left) == young, 60, lambda: database.sql(left))


def test_the_flow_ui_works_under_another_name_and_asks_for_the_password(cluster: Cluster):
    with chromium() as browser:
        page = browser.new_page()
        page.goto(cluster.url.replace("127.0.0.1", "localhost"))
        box = page.locator("input[type=password]")
        box.wait_for(timeout=60_000)
        box.fill(PASSWORD)
        box.press("Enter")
        page.get_by_text("Dashboard").first.wait_for(timeout=60_000)
        page.goto(cluster.url.replace("127.0.0.1", "localhost") + "/deployments")
        page.get_by_text("collect-captions").first.wait_for(timeout=60_000)
