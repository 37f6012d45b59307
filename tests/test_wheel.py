"""The wheel in a clean environment: it holds what programs read, and what it requires is all that they import.

Nothing is downloaded but setuptools. The packages that it requires without an extra are those of this environment, each
linked into a folder where no other one is.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import PROJECT
from predicted import STARTED, demo_detector, recorded, save_model
from programs import command_line
from tiny import tiny_root, tiny_sample

from vlbert.tasks.pretraining import PretrainingSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DECLARED = tomllib.loads((PROJECT / "pyproject.toml").read_text())
FOLDERS = [name.rstrip("*") for name in DECLARED["tool"]["setuptools"]["packages"]["find"]["include"]]


@dataclass
class Installed:
    folder: Path
    wheel: Path

    def run(self, *command: object) -> subprocess.CompletedProcess:
        """A program of it, in an empty folder, where no file of the project is on Python's path."""
        programs, working = self.folder / "venv" / "bin", self.folder / "empty"
        working.mkdir(exist_ok=True)
        environment = os.environ | {"PYTHONPATH": "", "PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}
        command = [str(programs / command[0]), *map(str, command[1:])]
        return subprocess.run(command, cwd=working, env=environment, capture_output=True, text=True, timeout=300)


def with_what_they_need(lines: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The packages that these requirements name, and theirs, of this environment."""
    found, seen, todo = {}, set(), [(line, ("",)) for line in lines]
    while todo:
        line, extras = todo.pop()
        wanted = Requirement(line)
        name, inner = canonicalize_name(wanted.name), ("", *sorted(wanted.extras))
        needed = not wanted.marker or any(wanted.marker.evaluate({"extra": extra}) for extra in extras)
        if needed and (name, inner) not in seen:
            seen.add((name, inner))
            found[name] = importlib.metadata.distribution(name)
            todo += [(one, inner) for one in found[name].requires or []]
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source, packages = folder / "source", folder / "packages"
    source.mkdir()
    packages.mkdir()
    for name in FOLDERS:
        shutil.copytree(PROJECT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in PROJECT.iterdir():  # the metadata may name any of them
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, source)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (ours,) = importlib.metadata.distributions(name="vlbert", path=[str(site)])
    for distribution in with_what_they_need(ours.requires).values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    (site / "packages.pth").write_text(f"{packages}\n")
    return Installed(folder, wheel)


def test_the_wheel_holds_all_modules_and_all_that_they_read(installed):
    with zipfile.ZipFile(installed.wheel) as opened:
        held = set(opened.namelist())
    patterns = ("*.py", "*.j2", "*.safetensors", "py.typed")
    files = [file for folder in FOLDERS for pattern in patterns for file in (PROJECT / folder).rglob(pattern)]
    assert {file.relative_to(PROJECT).as_posix() for file in files} - held == set()
    assert not {name for name in held if name.startswith(("tests", "docker"))}
    assert installed.wheel.name.startswith(f"vlbert-{DECLARED['project']['version']}-")


def test_constraints_txt_pins_all_that_the_extras_bring():
    pinned = dict(line.split("==") for line in (PROJECT / "constraints.txt").read_text().split())
    pins = {canonicalize_name(name): version for name, version in pinned.items()}
    found = with_what_they_need([f"vlbert[{','.join(DECLARED['project']['optional-dependencies'])}]"])
    versions = {name: one.version for name, one in found.items() if name not in ("vlbert", "setuptools")}
    assert len(versions) > 150
    assert versions.items() <= pins.items()


def test_prediction_and_training_need_no_extra(installed, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(tiny_sample(3).image)
    save_model(tmp_path, "run", PretrainingSettings(max_elements=24), recorded(demo_detector()), model=STARTED)
    (detector,) = (installed.folder / "venv").rglob("demo/detector.safetensors")
    predict = ["vlbert", "predict", tmp_path / "runs" / "run", tmp_path / "photo.jpg", "a red [MASK]"]
    predict += ["--detector", detector]
    done = installed.run(*predict)
    assert (done.returncode, (installed.folder / "empty/photo-answer.png").is_file()) == (0, True), done.stderr
    assert "drawn: photo-answer.png" in done.stdout
    refused = installed.run(*predict, "--attention")
    assert refused.stderr.endswith("needs matplotlib, which is not installed: pip install 'vlbert[attention]'\n")

    root = tiny_root(tmp_path)
    done = installed.run("vlbert", "train", *command_line(root, "wheel", steps=2))
    assert (done.returncode, (root / "runs" / "wheel" / "step-0000002").is_dir()) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["catalog", "status", "s3://bucket/root"], "the root s3://bucket/root needs boto3"),
        (["serve"], "a flow needs prefect"),
        (["collect", "ROOT", "captions", "--captions=LIST"], "downloading needs aiohttp"),
        (["predict", "ROOT", "--serve"], "--serve needs fastapi"),
    ],
)
def test_a_program_that_needs_an_extra_names_it_in_a_line(installed, tmp_path, command, named):
    (tmp_path / "list.tsv").write_text("a red square\thttp://127.0.0.1:9/a.jpg\n")
    filled = {"ROOT": str(tmp_path / "root"), "--captions=LIST": f"--captions={tmp_path / 'list.tsv'}"}
    done = installed.run("vlbert", *[filled.get(word, word) for word in command])
    assert done.returncode == 1
    extra = "serve" if named.endswith("fastapi") else "pipeline"
    assert done.stderr.splitlines()[-1].endswith(f"{named}, which is not installed: pip install 'vlbert[{extra}]'")
    assert "Traceback" not in done.stderr
