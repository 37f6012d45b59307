"""The order of dependence, flows -> vlbert -> detectors -> training -> storage, and who imports prefect or boto3."""

import ast
import functools
from collections.abc import Iterable
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
    "vlbert/predict/predictor.py",
    "vlbert/predict/page.py",  # takes images as large as the predictor does
    "vlbert/hf/processor.py",  # has a detector inside
    "vlbert/config.py",
    "vlbert/recipes/demo.py",
    "vlbert/published/convert.py",
    "vlbert/published/checkpoints.py",
    "vlbert/published/vilbert.py",
    "vlbert/published/vlbert.py",
    "vlbert/initial_weights.py",  # starts from a detector's weights
    "vlbert/plan.py",
}
FILES = sorted(path.relative_to(PROJECT) for folder in MAY_IMPORT for path in (PROJECT / folder).rglob("*.py"))
HOUSE = {*MAY_IMPORT, "demo", "benchmarks", "tests"}


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse((PROJECT / file).read_text())


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules that these statements import, and what they import from them."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the package"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_what_stands_to_its_right(file):
    names = names_in(ast.walk(parsed(file)))
    packages = {name.split(".")[0] for name in names}
    assert packages & HOUSE <= MAY_IMPORT[file.parts[0]]
    for package, place in ONLY_IN.items():
        assert package not in packages or str(file).startswith(place)
    if file.parts[0] == "vlbert" and str(file) not in KNOW_DETECTORS:
        assert all(name.startswith("detectors.drawing") for name in names if name.startswith("detectors"))
    if file.parts[0] == "storage":
        assert "torch" not in packages


@pytest.mark.parametrize(("function", "wanted"), [("Image.open", "formats"), ("from_pretrained", "trust_remote_code")])
def test_readers_of_foreign_files_name_what_they_take(function, wanted):
    """Pillow: which formats. transformers: no code of others."""
    calls = [
        (file, call.lineno, {keyword.arg for keyword in call.keywords})
        for file in [*FILES, *(path.relative_to(PROJECT) for path in (PROJECT / "demo").rglob("*.py"))]
        for call in ast.walk(parsed(file))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(function)
    ]
    assert len(calls) >= 3
    assert [f"{file}:{line}" for file, line, named in calls if wanted not in named] == []
