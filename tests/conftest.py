"""Prefect with a home of its own, set before anything imports it, and one server for all tests that need one."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.serve import WorldServer, free_port
from demo.world import World, WorldSettings, draw_world
from flows.settings import quiet_prefect

_home = tempfile.TemporaryDirectory(prefix="prefect-home-")  # removed when the interpreter ends
os.environ.update(quiet_prefect(Path(_home.name)))
os.environ.pop("PREFECT_API_URL", None)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server on a temporary database; it takes up to half a minute to start."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """24 captioned scenes and 8 broken rows, 8 held out, 16 RefCOCO+ pictures; served while the tests run."""
    settings = WorldSettings(
        train_scenes=24, held_out_scenes=8, broken_rows=8, text_lines=60, refcoco_train=7, refcoco_held_out=3
    )
    drawn = draw_world(tmp_path_factory.mktemp("world"), settings, free_port(0))
    with WorldServer(drawn.root):
        yield drawn
