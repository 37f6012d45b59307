"""Headless Chromium, as Debian packages it, for tests that look at pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; where there is none the test is skipped, or fails where VLBERT_NO_SKIP says browser."""
    program = shutil.which("chromium")
    if program is None:
        reason = "there is no chromium on the PATH: apt-get install chromium"
        if "browser" in os.environ.get("VLBERT_NO_SKIP", "").split(","):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()
