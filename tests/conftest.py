"""Prefect with a home of its own, set before anything imports it, and one server for all tests that need one."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from operated import Operated, operated, tiny_road

from demo.__main__ import write_deployments
from demo.serve import WorldServer, free_port
from demo.world import World, WorldSettings, draw_world
from flows.settings import quiet_prefect

_home = tempfile.TemporaryDirectory(prefix="prefect-home-")  # removed when the interpreter ends
os.environ.update(quiet_prefect(Path(_home.name)))
os.environ.pop("PREFECT_API_URL", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a Prefect server go last: its client's threads stay, and with them no test may fork, as torch does.

    Those that look at its pages go before those that let runs die, and find the runs of one road alone.
    """

    def turn(item: pytest.Item) -> int:
        needs = set(item.fixturenames)
        return ("prefect_server" in needs) + 2 * ("served" in needs) + ("served" in needs and "walked" not in needs)

    items.sort(key=turn)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server on a temporary database; it takes up to half a minute to start."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """The demo's deployments on the tiny road, with a server and a worker, as `make serve` starts them.

    The scheduled detection has a root of its own, and is awake, but the clock starts nothing while tests run.
    """
    folder = tmp_path_factory.mktemp("served")
    file = folder / "prefect.yaml"
    write_deployments(file, tiny_road(world, folder / "root"))
    project = yaml.safe_load(file.read_text())
    (scheduled,) = (one for one in project["deployments"] if one["name"] == "scheduled")
    scheduled["parameters"]["root"] = str(folder / "scheduled")
    scheduled["schedules"][0] |= {"cron": f"0 {(time.gmtime().tm_hour + 6) % 24} * * *", "active": True}
    file.write_text(yaml.safe_dump(project))
    with operated(folder / "prefect", file) as serving:
        yield serving


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """24 captioned scenes and 8 broken rows, 8 held out, 16 RefCOCO+ pictures; served while the tests run."""
    settings = WorldSettings(
        train_scenes=24, held_out_scenes=8, broken_rows=8, text_lines=60, refcoco_train=7, refcoco_held_out=3
    )
    drawn = draw_world(tmp_path_factory.mktemp("world"), settings, free_port(0))
    with WorldServer(drawn.root):
        yield drawn
