"""Headless Chromium, as Debian packages it, for tests that look at pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright
from tools import skip_without


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; where there is none the test is skipped, or fails where VLBERT_NO_SKIP says browser."""
    program = shutil.which("chromium")
    if program is None:
        skip_without("browser", "there is no chromium on the PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()
