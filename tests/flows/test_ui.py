"""The flow UI in a real browser, after `prefect deployment run pretrain-vlbert/default --watch` on a tiny demo data."""

import json
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

pytestmark = pytest.mark.slow

PAPER = "val 79.88 base, 80.31 large; testA 82.40 base"  # RefCOCO+, table 3
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
def names(pipeline_run: subprocess.CompletedProcess, root: Path) -> dict[str, str]:
    """What each run should be called, from what was written."""

    def trained(recipe: str, run: str) -> str:
        (data,) = json.loads((root / f"runs/{run}/step-0000004/state.json").read_text())["data"]
        return (
            f"{recipe} {run} on {data['stage'].removeprefix('regions/')} snapshot {data['snapshots'][-1]['snapshot']}"
        )

    detectors = {dataset: next((root / dataset / "regions").iterdir()).name for dataset in ("captions", "coco")}
    return {
        "pipeline": trained("pretrain_vlbert_demo", "pretrain"),
        "finetune": trained("finetune_refcoco_demo", "refcoco-with"),
        "collect captions": "collect captions from train.tsv",
        "collect coco": "collect coco from coco",
    } | {f"detect {dataset}": f"detect {dataset} by {detector}" for dataset, detector in detectors.items()}


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


def run_links(page: Page, name: str) -> object:
    """The links to the runs of this name."""
    return page.get_by_role("link", name=name, exact=True)


def open_artifact(page: Page, run: str, key: str) -> object:
    """Go from the runs page to an artifact of a run, as a person does; what the artifact shows."""
    page.goto("/runs")
    run_links(page, run).first.click()
    page.locator("#artifacts").click()
    page.locator(".artifact-card__title").filter(has_text=re.compile(f"^{key}$")).click()
    shown = page.locator(".artifact-data-view article")
    expect(shown).to_be_visible()
    assert not re.search(r"[\\`]", shown.inner_text()), "what was escaped shows that it was"
    return shown


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_deployment_that_is_run_and_watched_ends_well(pipeline_run: subprocess.CompletedProcess):
    assert pipeline_run.returncode == 0, pipeline_run.stdout + pipeline_run.stderr


def test_runs_are_listed_by_name_and_found_by_tag(page: Page, names: dict[str, str]):
    page.goto("/runs")
    expect(page.get_by_text("9 runs", exact=True)).to_be_visible()
    for stage, name in names.items():
        expect(run_links(page, name)).to_have_count(2 if stage == "pipeline" else 1)  # the pre-training itself, too

    page.get_by_role("button", name="All tags").click()
    page.keyboard.type("dataset:coco")
    page.locator(".p-select-option", has_text="dataset:coco").click()
    expect(page.get_by_text("2 runs", exact=True)).to_be_visible()
    expect(run_links(page, names["collect coco"])).to_be_visible()
    expect(run_links(page, names["detect coco"])).to_be_visible()
    expect(run_links(page, names["collect captions"])).to_have_count(0)


def test_a_finished_run_shows_its_state_its_tags_and_its_stages(page: Page, served: Operated, names: dict[str, str]):
    (pipeline,) = served.ask("POST", "/flow_runs/filter", flow_runs={"tags": {"all_": ["pipeline"]}})
    page.goto(f"/runs/flow-run/{pipeline['id']}")
    expect(page.locator("header, .page-heading").get_by_text("Completed", exact=True)).to_be_visible()
    expect(page.get_by_text(names["pipeline"], exact=True).first).to_be_visible()
    for tag in ("pipeline", "recipe:pretrain_vlbert_demo"):
        expect(page.get_by_text(tag, exact=True).first).to_be_visible()
    page.locator("#subflow-runs").click()
    expect(page.get_by_text("8 Flow runs", exact=True)).to_be_visible()
    for name in names.values():
        expect(run_links(page, name).first).to_be_visible()
    expect(page.get_by_text("Completed", exact=True)).to_have_count(1 + 8)


def test_a_run_of_the_pipeline_is_complete_for_the_deployment_too(pipeline_rerun: dict[str, list[str]]):
    """The deployment names no detector, and `latest`."""
    assert any(line.startswith("refcoco-with is complete") for line in pipeline_rerun["finetune/default"])


# --- artifacts --------------------------------------------------------------------------------------------------------


def test_counts_by_status_and_the_reasons_are_plain_words(page: Page, names: dict[str, str], root: Path):
    shown = open_artifact(page, names["collect captions"], "images-captions")
    expect(shown).to_contain_text("32 rows in 4 shards, written to")
    link = shown.get_by_role("link", name=f"{root}/captions/images", exact=True)
    expect(link).to_have_attribute("href", f"file://{root}/captions/images")
    expect(shown.get_by_role("row", name="ok 24 75.0%", exact=True)).to_be_visible()
    expect(shown.get_by_role("row", name="http_404 1 3.1%", exact=True)).to_be_visible()
    expect(shown.get_by_role("listitem").filter(has_text="http_404: HTTP 404 Not Found")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_curves_are_an_image(page: Page, names: dict[str, str]):
    shown = open_artifact(page, names["finetune"], "finetune-curves-refcoco-with")
    image = shown.get_by_role("img", name="finetune-curves-refcoco-with")
    expect(image).to_have_js_property("complete", True)
    assert image.evaluate("image => image.naturalWidth") > 500
    assert page.locator("body").inner_text().count("base64") == 0


def test_the_pipeline_shows_its_stages_and_leads_to_their_runs(page: Page, served: Operated, names: dict[str, str]):
    (pipeline,) = served.ask("POST", "/flow_runs/filter", flow_runs={"tags": {"all_": ["pipeline"]}})
    page.goto(f"/runs/flow-run/{pipeline['id']}")
    page.locator("#artifacts").click()
    page.locator(".artifact-card__title").filter(has_text=re.compile("^pipeline-pretrain$")).click()
    shown = page.locator(".artifact-data-view article")
    expect(shown.get_by_role("row")).to_have_count(1 + 8)
    expect(shown.get_by_role("row", name="collect captions")).to_contain_text("24 images in 4 shards")
    href = shown.get_by_role("link", name="detect coco", exact=True).get_attribute("href")
    page.goto(href)
    expect(page.get_by_text(names["detect coco"], exact=True).first).to_be_visible()


def test_progress_ends_with_all_done(page: Page, names: dict[str, str]):
    shown = open_artifact(page, names["finetune"], "finetune-progress-refcoco-with")
    expect(shown.get_by_role("row", name="step 4 of 4", exact=True)).to_be_visible()
    expect(shown.get_by_role("row", name="time left 0:00", exact=True)).to_be_visible()
    expect(shown.get_by_role("row", name="samples/s")).to_be_visible()
    shown = open_artifact(page, names["detect captions"], "detecting-captions")
    expect(shown.get_by_role("row", name="step 4 of 4 shards", exact=True)).to_be_visible()


def test_the_last_metrics_stand_below_what_the_paper_reports(page: Page, names: dict[str, str], root: Path):
    shown = open_artifact(page, names["finetune"], "finetune-refcoco-with")
    expect(shown.get_by_text(PAPER)).to_be_in_viewport(ratio=1)
    metrics = last_metrics(open_store(str(root)), "refcoco-with")
    number = f"accuracy_published {metrics['accuracy_published']:.3f}"
    expect(shown.get_by_role("row", name=number, exact=True)).to_be_in_viewport(ratio=1)
    expect(shown.get_by_role("link", name=f"{root}/runs/refcoco-with/step-0000004", exact=True)).to_be_visible()


# --- deployments ------------------------------------------------------------------------------------------------------


def open_form(page: Page, served: Operated, deployment: str) -> None:
    """The form that asks for the parameters of a run."""
    page.goto(f"/deployments/deployment/{served.ask('GET', f'/deployments/name/{deployment}')['id']}/run")
    expect(page.get_by_text("Validate parameters")).to_be_visible()


def test_a_form_is_filled_with_the_parameters_of_the_deployment(page: Page, served: Operated, root: Path):
    open_form(page, served, "detect-regions/default")
    expect(page.locator("form textarea").first).to_have_value(str(root))
    # A list to choose from, and no field for any text.
    expect(page.locator(".p-select.schema-form-property-string").first).to_have_text("annotated")
