"""What stands beside the code: pages whose links and checks exist, the licence, the citation, the forms of issues."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from places import PROJECT

from detectors.config import DetectionConfig
from storage.collect.plan import CollectSettings
from storage.settings import parse
from training.program import make_recipe
from vlbert.recipes import RECIPES

PAGES = sorted(
    path.relative_to(PROJECT)
    for pattern in ("*.md", "docs/*.md", "benchmarks/**/*.md")
    for path in PROJECT.glob(pattern)
)
CLAIMS = (PROJECT / "docs" / "reproducibility.md").read_text()
NAMED = {code for line in CLAIMS.splitlines() if line.startswith("|") for code in re.findall("`([^`]+)`", line)}
NAMED |= set(re.findall(r"tests/\S+\.py::\w+", CLAIMS))


def exists(check: str) -> bool:
    """Whether there is this test, file, module to run, or target of make."""
    first, _, rest = check.partition(" ")
    file, _, test = first.partition("::")
    if test:
        return re.search(rf"^def {test}\(", (PROJECT / file).read_text(), re.MULTILINE) is not None
    if first == "make":
        return re.search(rf"^{rest}:", (PROJECT / "Makefile").read_text(), re.MULTILINE) is not None
    if check.startswith("python -m "):
        path = PROJECT / check.split()[2].replace(".", "/")
        return any(
            "__name__" in one.read_text() or one.name == "__main__.py"
            for one in (path.with_suffix(".py"), path / "__main__.py")
            if one.is_file()
        )
    return (PROJECT / (rest.split()[0] if first in ("bash", "python") else first)).exists()


@pytest.mark.parametrize("check", sorted(NAMED - {"-s"}))
def test_the_check_of_a_claim_exists(check):
    assert exists(check)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_links_of_a_page_lead_to_files_and_headings(page: Path):
    text = re.sub(r"```.*?```", "", (PROJECT / page).read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        target, _, heading = link.partition("#")
        path = (PROJECT / page.parent / target) if target else PROJECT / page
        assert path.exists(), link
        if heading:
            heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in heads], link


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
