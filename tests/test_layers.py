"""The order of dependence, flows -> vlbert -> detectors -> training -> storage, and who imports prefect or boto3."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from places import PROJECT

ROOMS = ("flows", "vlbert", "detectors", "training", "storage")
MAY_IMPORT = {room: set(ROOMS[place:]) for place, room in enumerate(ROOMS)}
ONLY_IN = {"prefect": "flows/", "boto3": "storage/object_store.py", "detectron2": "detectors/detectron2.py"}
# In vlbert, only these may import detectors: region features, prediction, and the configuration that names the ResNet.
# Every file may import detectors.drawing.
KNOW_DETECTORS = {
    "vlbert/model/fast_rcnn.py",
    "vlbert/predict.py",
    "vlbert/config.py",
    "vlbert/recipes.py",
    "vlbert/convert.py",
    "vlbert/published.py",
    "vlbert/initial_weights.py",  # starts from a detector's weights
}
FILES = sorted(path.relative_to(PROJECT) for folder in MAY_IMPORT for path in (PROJECT / folder).rglob("*.py"))
HOUSE = {*MAY_IMPORT, "demo", "benchmarks", "tests"}


def imported(file: Path) -> set[str]:
    """Every module that the file imports anywhere, in functions too."""
    names = set()
    for node in ast.walk(ast.parse((PROJECT / file).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import; name the package"
            names.add(node.module)
    return names


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_what_stands_to_its_right(file):
    names = imported(file)
    packages = {name.split(".")[0] for name in names}
    assert packages & HOUSE <= MAY_IMPORT[file.parts[0]]
    for package, place in ONLY_IN.items():
        assert package not in packages or str(file).startswith(place)
    if file.parts[0] == "vlbert" and str(file) not in KNOW_DETECTORS:
        assert {name for name in names if name.split(".")[0] == "detectors"} <= {"detectors.drawing"}
    if file.parts[0] == "storage":
        assert "torch" not in packages


def test_training_needs_none_of_the_packages_that_other_rooms_need():
    """vlbert.train and its benchmark import with torch, torchvision, numpy, pyarrow, msgpack, pillow alone."""
    program = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import benchmarks.train_step, vlbert.train
print("imported")
"""
    absent = ["aiohttp", "boto3", "botocore", "fastapi", "jinja2", "matplotlib", "prefect", "simplejpeg", "tensorboard"]
    run = subprocess.run(
        [sys.executable, "-c", program % [*absent, "webdataset"]],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=120,
    )
    assert run.stdout.strip() == "imported", run.stderr


@pytest.mark.parametrize("function", ["Image.open", "from_pretrained"])
def test_what_reads_files_of_strangers_is_told_what_to_take(function):
    """Pillow, which formats; transformers, that it runs no code of theirs."""
    wanted = {"Image.open": "formats", "from_pretrained": "trust_remote_code"}[function]
    calls = [
        (file, call.lineno, {keyword.arg for keyword in call.keywords})
        for file in [*FILES, *(path.relative_to(PROJECT) for path in (PROJECT / "demo").rglob("*.py"))]
        for call in ast.walk(ast.parse((PROJECT / file).read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(function)
    ]
    assert len(calls) >= 3
    assert [f"{file}:{line}" for file, line, named in calls if wanted not in named] == []
