"""Prefect with a home of its own, set before anything imports it, and one server for all tests that need one."""

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import yaml
from captioned import captioned_scenes
from ceph import Gateway, ceph
from operated import ENDED, Operated, operated, tiny_pipeline
from s3 import SETTINGS, environment, s3_server
from web import Web

from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.deployments import PIPELINE, write_deployments
from demo.serve import DemoServer, free_port
from flows.settings import quiet_prefect
from storage.catalog import Catalog
from storage.collect.run import collect
from storage.object_store import open_store

_home = tempfile.TemporaryDirectory(prefix="prefect-home-")  # removed when the interpreter ends
os.environ.update(quiet_prefect(Path(_home.name)))
os.environ.pop("PREFECT_API_URL", None)
# Before anything imports torch: threads that share tiny work wait for each other, for long where the machine is busy.
os.environ["OMP_NUM_THREADS"] = "1"
gc.disable()  # until all modules are there: what they hold stays
# The same examples in every run, no file of earlier ones, and no limit of time, which a busy machine would exceed.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a process of pytest-xdist whole files, whose fixtures are made once, and one the Prefect server."""
    group = "served" if "served" in getattr(item, "fixturenames", ()) else item.path.name
    item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(trylast=True)  # behind a plugin that shuffles them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a Prefect server go last: its client's threads stay, and with them no test may fork, as torch does.

    They share one, so first come those that look at its pages and find there the runs of one pipeline alone, then those
    that start runs, then those whose flows run in this process (one of them wakes the scheduled detection), and last
    those that let runs and workers die.
    """

    def turn(item: pytest.Item) -> list[bool]:
        needs = set(item.fixturenames)
        if "served" not in needs:
            return []
        last = item.path.name == "test_nothing_left.py", "prefect_server" in needs
        return [*last, "pipeline_run" not in needs, "pipeline_rerun" in needs]

    items.sort(key=turn)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests are no garbage: searching their 600,000 objects again and again takes a tenth of the time."""
    if session.config.getoption("loadgroup", False):  # else each process makes the fixtures of every file
        assert all("@" in item.nodeid for item in session.items), "pytest-xdist does not group tests with this pytest"
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report at the end of the interpreter what is still there


@pytest.fixture(scope="module")
def moto() -> Iterator[dict[str, str]]:
    """The environment of an S3 with an empty bucket `bucket`."""
    with s3_server("bucket") as endpoint:
        yield SETTINGS | {"AWS_ENDPOINT_URL": endpoint}


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Ceph's S3, with a bucket `bucket`, for all tests marked `far`."""
    with ceph(tmp_path_factory.mktemp("ceph") / "ceph", "bucket") as gateway:
        yield gateway


@contextlib.contextmanager
def _bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    """The endpoint of the S3 that a fixture's parameter names, which boto3 finds meanwhile."""
    name, _, scheme = request.param.partition(" ")
    server = request.getfixturevalue(name)
    with environment(**(server.variables(scheme) if scheme else server)):
        yield os.environ["AWS_ENDPOINT_URL"]


_FAR = [pytest.param(f"radosgw {scheme}", marks=pytest.mark.far) for scheme in ("http", "https")]


@pytest.fixture(params=["moto", _FAR[0]])
def s3(request: pytest.FixtureRequest) -> Iterator[str]:
    """The endpoint of an S3 with a bucket `bucket`."""
    with _bucket(request) as endpoint:
        yield endpoint


@pytest.fixture(params=["folder", "moto", *_FAR])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty root: a folder that does not exist yet, or in a bucket."""
    if request.param == "folder":
        yield str(tmp_path / "new" / "root")
        return
    with _bucket(request):
        yield f"s3://bucket/{tmp_path.name}/root"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with Web() as server:
        yield server


@pytest.fixture
def catalog(root: str) -> Catalog:
    return Catalog(open_store(root), "captions")


@pytest.fixture
def local(tmp_path) -> Catalog:
    return Catalog(open_store(str(tmp_path / "root")), "captions")


@pytest.fixture(scope="session")
def served(demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """The demo's deployments of the tiny pipeline, with a server and a worker, as `make serve` starts them.

    The scheduled detection has a root of its own.
    """
    folder = tmp_path_factory.mktemp("served")
    file = folder / "prefect.yaml"
    write_deployments(file, tiny_pipeline(demo_data, folder / "root"), demo_data)
    project = yaml.safe_load(file.read_text())
    (scheduled,) = (one for one in project["deployments"] if one["name"] == "scheduled")
    scheduled["parameters"]["root"] = str(folder / "scheduled")
    file.write_text(yaml.safe_dump(project))
    with operated(folder / "prefect", file) as serving:
        yield serving


@pytest.fixture(scope="session")
def prefect_server(served: Operated) -> Iterator[None]:
    """Flows that a test calls in this process, and its questions to Prefect's client, go to the server of `served`."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, PREFECT_LOCAL_STORAGE_PATH, temporary_settings

    ours = {PREFECT_API_URL: f"{served.url}/api", PREFECT_LOCAL_STORAGE_PATH: served.home / "storage"}
    with temporary_settings(ours):
        yield
        for worker in (APILogWorker, EventsWorker):
            worker.drain_all()  # while there is a server to take it


@pytest.fixture(scope="session")
def pipeline_run(served: Operated) -> subprocess.CompletedProcess:
    """The pipeline, run and watched as a user does."""
    command = [sys.executable, "-m", "prefect", "deployment", "run", PIPELINE, "--watch"]
    return subprocess.run(command, env=os.environ | served.variables, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="session")
def pipeline_rerun(pipeline_run: subprocess.CompletedProcess, served: Operated) -> dict[str, list[str]]:
    """What the pipeline logs when it is run a second time, and the deployment of its fine-tuning, by deployment."""
    assert pipeline_run.returncode == 0, pipeline_run.stdout + pipeline_run.stderr
    runs = {
        "pretrain-vlbert/default": served.start("pretrain-vlbert/default", finetunings=[]),
        "finetune/default": served.start("finetune/default"),  # beside it: both look what there is, and wait
    }
    for run in runs.values():
        served.wait_for(run, lambda run=run: served.state(run) in ENDED, 120)
        assert served.state(run) == "COMPLETED", served.account(run)
    return {deployment: served.logs(run) for deployment, run in runs.items()}


@pytest.fixture(scope="session")
def collected(demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the captioned scenes collected; to be copied, not changed."""
    root = tmp_path_factory.mktemp("collected")
    collect(str(root), captioned_scenes(demo_data), lambda line: None)
    return root


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoData]:
    """24 captioned scenes and 8 broken rows, 8 held out, 16 RefCOCO+ images; served while the tests run."""
    of_tasks = {"task_train": 7, "task_held_out": 3}
    settings = DemoDataSettings(train_scenes=24, held_out_scenes=8, broken_rows=8, text_lines=60, **of_tasks)
    drawn = draw_demo_data(tmp_path_factory.mktemp("data"), settings, free_port())
    with DemoServer(drawn.root):
        yield drawn
