"""What stands beside the code: pages whose links and checks exist, the licence, the citation, the forms of issues."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
import yaml
from places import PROJECT

from demo.data import DemoDataSettings
from detectors.config import DetectionConfig
from storage.collect.plan import CollectSettings
from storage.settings import parse
from training.program import make_recipe
from vlbert.recipes import RECIPES

RESULTS = PROJECT / "benchmarks" / "results"
CLAIMS = (PROJECT / "docs" / "reproducibility.md").read_text()
NAMED = {code for line in CLAIMS.splitlines() if line.startswith("|") for code in re.findall("`([^`]+)`", line)}
NAMED |= set(re.findall(r"tests/\S+\.py::\w+", CLAIMS))


def exists(check: str) -> bool:
    """Whether there is this test, target of make, module to run, or file."""
    first, *rest = check.split()
    if "::" in check:
        file, test = check.split("::")
        return f"\ndef {test}(" in (PROJECT / file).read_text()
    if first == "make":
        return f"\n{rest[0]}:" in (PROJECT / "Makefile").read_text()
    if rest[:1] == ["-m"]:
        path = PROJECT / rest[1].replace(".", "/")
        return path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    return (PROJECT / (rest[0] if rest else first)).exists()


def test_the_checks_of_all_claims_exist():
    assert [check for check in NAMED - {"-s"} if not exists(check)] == []


@pytest.mark.parametrize("page", [*PROJECT.glob("*.md"), *PROJECT.glob("*/results/*.md")], ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files_and_headings(page: Path):
    """Those of docs/ are checked when the site is built."""
    for target, _, heading in re.findall(r"\]\((?!https?://)([^)\s#]*)(#([^)\s]+))?\)", page.read_text()):
        path = (page.parent / target) if target else page
        assert path.exists(), target
        heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if heading else []
        assert not heading or heading in [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in heads]


def test_the_files_of_measurements_that_pages_name_exist():
    pages = [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), RESULTS / "README.md"]
    named = {path for page in pages for path in re.findall(r"benchmarks/results/[\w*/.-]*[\w*/]", page.read_text())}
    assert len(named) > 15
    assert [path for path in named if "DATE" not in path and not any(PROJECT.glob(path))] == []
    listed = re.findall(r"`(20[^`]+)`", (RESULTS / "README.md").read_text())
    assert {*RESULTS.glob("20*")} == {path for name in listed for path in RESULTS.glob(name.rstrip("/"))}


def test_the_table_of_steps_is_what_its_files_hold():
    """Return seconds a step (median), pairs a second and GB kept for the backward pass, for each line."""
    lines = re.findall(
        r"^\|[^|]*\| (.*?) ?\| (\w[\w ]+) \| ([\d.]+) \| \W*([\d,]+)\W* \| ([\d.]+) \| \d+ \|$",
        (PROJECT / "docs" / "performance.md").read_text(),
        re.MULTILINE,
    )
    assert len(lines) > 10
    file = ""
    for name, precision, *numbers in lines:
        file = name.strip("`") or file
        found = json.loads((RESULTS / "2026-11-23-gpu" / f"{file}.json").read_text())
        step, kept = median(found["seconds a step"][precision]), found["memory"][precision]["kept for backward"]
        assert numbers == [f"{step:.3f}", f"{found['pairs'] / step:,.0f}", f"{kept:.1f}"], (file, precision)


def test_the_site_is_built_without_a_warning(tmp_path):
    # Not --quiet: it hides warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "tour" / "index.html").is_file()


def test_the_arguments_of_kubernetes_are_understood():
    """No cluster runs these files in a test: a field that has gone would be seen by the pod alone."""
    pods = {}
    for file in ("stages.yaml", "pretrain.yaml"):
        for one in yaml.safe_load_all((PROJECT / "docker" / "kubernetes" / file).read_text()):
            if one["kind"] == "Job":
                (container,) = one["spec"]["template"]["spec"]["containers"]
                pods[one["metadata"]["name"]] = [*container.get("command", []), *container.get("args", [])]
    assert parse(CollectSettings, pods["collect"][3:]).captions == "/data/captions.tsv"
    assert parse(DetectionConfig, pods["detect"][4:]).batch == 8
    (arguments,) = (words for words in pods.values() if "vlbert.train" in words)
    name, *fields = arguments[arguments.index("pretrain_vlbert") :]
    assert make_recipe(name, fields, RECIPES).data.root == "s3://bucket/vl-root"


def test_each_target_of_make_is_listed_by_make_help():
    targets = re.search(r"^\.PHONY: (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)[1].split()
    command = ["make", "--no-print-directory", "help"]  # also below `make test`
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert sorted(line.partition(":")[0] for line in listed.splitlines()) == sorted(targets)


def test_the_image_of_the_readme_is_one_that_the_demo_draws():
    (number,) = re.findall(r"demo-root/data/images/(\d{6})\.jpg", (PROJECT / "README.md").read_text())
    settings = DemoDataSettings()
    assert settings.train_scenes <= int(number) < settings.train_scenes + settings.held_out_scenes
