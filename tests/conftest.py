"""Prefect with a home of its own, set before anything imports it, and one server for all tests that need one."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
