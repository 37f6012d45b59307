"""The flow UI in a real browser, after `prefect deployment run pretrain-vlbert/default --watch` on a tiny demo data."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium
from operated import Operated
from playwright.sync_api import Browser, BrowserContext, Page, expect

from storage.object_store import open_store
from training.log import last_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pipeline_run")]

SECONDS = 20.0  # that a page may take to show what a test waits for


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def root(served: Operated) -> Path:
    """Where the pipeline puts what it makes."""
    return served.deployments.parent / "root"


@pytest.fixture(scope="module")
def window(browser: Browser, served: Operated) -> Iterator[BrowserContext]:
    """A window for all tests, which loads the program of the pages once; paths that are opened are the server's."""
    expect.set_options(timeout=SECONDS * 1000)
    opened = browser.new_context(base_url=served.url, viewport={"width": 1400, "height": 1000})
    opened.set_default_timeout(SECONDS * 1000)
    yield opened
    opened.close()


@pytest.fixture
def page(window: BrowserContext) -> Iterator[Page]:
    """An empty page; what the pages remember of an earlier test is forgotten."""
    opened = window.new_page()
    yield opened
    opened.evaluate("localStorage.clear(); sessionStorage.clear()")
    opened.close()


def open_artifact(page: Page, run: str, key: str) -> object:
    """Go from the runs page to an artifact of a run, as a person does; what the artifact shows."""
    page.goto("/runs")
    page.get_by_role("link", name=run, exact=True).first.click()
    page.locator("#artifacts").click()
    page.locator(".artifact-card__title").filter(has_text=re.compile(f"^{key}$")).click()
    shown = page.locator(".artifact-data-view article")
    expect(shown).to_be_visible()
    assert not re.search(r"[\\`]", shown.inner_text()), "what was escaped shows that it was"
    return shown


def test_a_deployment_that_is_run_and_watched_ends_well(pipeline_run: subprocess.CompletedProcess):
    assert pipeline_run.returncode == 0, pipeline_run.stdout + pipeline_run.stderr


def test_a_run_of_the_pipeline_is_complete_for_the_deployment_too(pipeline_rerun: dict[str, list[str]]):
    """The deployment names no detector, and `latest`."""
    assert any(line.startswith("refcoco-with is complete") for line in pipeline_rerun["finetune/default"])


def test_counts_by_status_and_the_reasons_are_plain_words(page: Page, root: Path):
    shown = open_artifact(page, "collect captions", "images-captions")
    expect(shown).to_contain_text(f"32 rows in 4 shards of {root}/captions/images")
    expect(shown.get_by_role("row", name="ok 24", exact=True)).to_be_visible()
    expect(shown.get_by_role("row", name="http_404 1", exact=True)).to_be_visible()
    expect(shown.get_by_role("listitem").filter(has_text="http_404: HTTP 404 Not Found")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_training_shows_its_last_metrics_its_progress_and_its_curves(page: Page, root: Path):
    shown = open_artifact(page, "refcoco refcoco-with", "finetune-refcoco-with")
    metrics = last_metrics(open_store(str(root)), "refcoco-with")
    number = f"accuracy_published {metrics['accuracy_published']:.3f}"
    expect(shown.get_by_role("row", name=number)).to_be_in_viewport(ratio=1)
    expect(shown).to_contain_text(f"{root}/runs/refcoco-with/step-0000004")
    expect(shown).to_contain_text("done: step 4/4")
    image = shown.get_by_role("img", name="curves")
    expect(image).to_have_js_property("complete", True)
    assert image.evaluate("image => image.naturalWidth") > 500
    assert page.locator("body").inner_text().count("base64") == 0
