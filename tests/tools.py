"""Programs that a test needs beside Python's packages."""

import os

import pytest


def skip_without(what: str, reason: str) -> None:
    """Skip the test, or fail it where VLBERT_NO_SKIP names `what`: browser or far."""
    if what in os.environ.get("VLBERT_NO_SKIP", "").split(","):
        pytest.fail(f"{reason} (VLBERT_NO_SKIP names {what})")
    pytest.skip(reason)
