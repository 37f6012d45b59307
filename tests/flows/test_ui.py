"""The flow UI in a real browser, after `prefect deployment run pretrain-vlbert/default --watch` on a tiny demo data."""

import re

import pytest
from browser import chromium
from operated import Operated
from playwright.sync_api import expect

from storage.object_store import open_store
from training.log import last_metrics

SECONDS = 20.0  # that a page may take to show what a test waits for


@pytest.mark.slow
@pytest.mark.usefixtures("pipeline_run")
def test_a_training_shows_its_last_metrics_its_progress_and_its_curves(served: Operated):
    root = served.deployments.parent / "root"
    metrics = last_metrics(open_store(str(root)), "refcoco-with")
    expect.set_options(timeout=SECONDS * 1000)
    with chromium() as browser:
        page = browser.new_page(base_url=served.url, viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(SECONDS * 1000)
        page.goto("/runs")
        page.get_by_role("link", name="refcoco refcoco-with", exact=True).first.click()
        page.locator("#artifacts").click()
        page.locator(".artifact-card__title").filter(has_text=re.compile("^finetune-refcoco-with$")).click()
        shown = page.locator(".artifact-data-view article")
        expect(shown).to_be_visible()
        assert not re.search(r"[\\`]", shown.inner_text()), "what was escaped shows that it was"
        number = f"accuracy_published {metrics['accuracy_published']:.3f}"
        expect(shown.get_by_role("row", name=number)).to_be_in_viewport(ratio=1)
        expect(shown).to_contain_text(f"{root}/runs/refcoco-with/step-0000004")
        expect(shown).to_contain_text("done: step 4/4")
        image = shown.get_by_role("img", name="curves")
        expect(image).to_have_js_property("complete", True)
        assert image.evaluate("image => image.naturalWidth") > 500
        assert page.locator("body").inner_text().count("base64") == 0
