"""`vlbert COMMAND` and `python -m MODULE` are one program under two names; shells complete what the programs take."""

import json
import os
import pty
import re
import runpy
import select
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from places import PROJECT
from tools import skip_without

import vlbert
from training.program import run_program
from vlbert.commands import COMMANDS, main, table
from vlbert.completion import FIELDS, FIRST, candidates
from vlbert.recipes import RECIPES

# These modules were imported by other tests. That one runs again, as __main__, is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def nothing_stays(cache, monkeypatch):
    """Of what a program does to its process; the cache of completion is one of these tests."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("COLUMNS", "200")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def help_of(capsys: pytest.CaptureFixture, command: str, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments, "--help"])
    assert ended.value.code in (None, 0)
    return capsys.readouterr().out


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_a_program_has_two_names_and_its_help_says_the_one_that_was_called(capsys, command):
    module = COMMANDS[command]
    helped = help_of(capsys, command)
    assert helped.startswith(f"usage: vlbert {command} ")
    assert f"python -m {module} " not in helped
    sys.argv = [module, "--help"]
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code in (None, 0)
    module_helped = capsys.readouterr().out
    assert module_helped.startswith(f"usage: {'torchrun' if command == 'train' else 'python'} -m {module} ")
    assert f"vlbert {command} " not in module_helped
    # Fields that --help lists are completed, too.
    assert (command in FIELDS) == ("\nfields:\n" in helped or "RECIPE --help lists the fields" in helped)


def test_the_table_has_each_command_its_purpose_and_its_module(capsys):
    main([])
    printed = capsys.readouterr().out
    main(["--help"])
    assert capsys.readouterr().out == printed
    for command, module in COMMANDS.items():
        (line,) = re.findall(rf"^  {command}  +(\w.*?)  +{re.escape(module)}$", printed, re.MULTILINE)
        assert len(line.split()) > 4
    for width in (80, 100, 200):
        assert max(map(len, table(width).splitlines())) <= width


def test_the_version_is_that_of_pyproject_toml(capsys):
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert vlbert.__version__ == version
    main(["--version"])
    assert capsys.readouterr().out == f"vlbert {version}\n"


def test_a_command_that_does_not_exist_is_named_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["evalute", "recipe"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("no command 'evalute'; vlbert --help lists all; did you mean evaluate?\n")
    for arguments, near in [
        (["train", "pretrain_vlbert_dem"], "pretrain_vlbert_demo"),
        (["train", "pretrain_vlbert_demo", "data.rot=x"], "root"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert str(ended.value.code).endswith(f"; did you mean {near}?")


def test_a_pipe_that_nobody_reads_and_ctrl_c_end_a_command_as_the_shell_has_it(tmp_path):
    command = [sys.executable, "-m", "vlbert", "completion", "bash"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=PROJECT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")  # while it is imported
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROJECT)])}
    command = [sys.executable, "-m", "vlbert", "convert", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"")


def test_a_program_runs_and_its_errors_call_it_as_it_was_called(capsys, tmp_path):
    main(["recipes"])
    assert "| finetune_vqa_base" in capsys.readouterr().out.replace("`", "")
    for arguments in (["train", "pretrain_vlbert_bass"], ["evaluate", "x", "y"], ["predict", str(tmp_path), "a.jpg"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert str(ended.value.code).startswith(f"vlbert {arguments[0]}")


@pytest.mark.parametrize(("gpus", "rank", "told"), [(8, None, True), (1, None, False), (8, "0", False)])
def test_one_process_beside_several_gpus_says_how_all_are_used(monkeypatch, capsys, gpus, rank, told):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "1")
    ran = []
    recipes = {"small": RECIPES["pretrain_vlbert_demo"]}
    run_program("vlbert.train", "Train.", recipes, lambda recipe: None, lambda *_: ran.append(1), ["small"])
    assert ran == [1]
    assert ("torchrun --nproc-per-node 8 -m vlbert.train small" in capsys.readouterr().err) == told


# --- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("tra", ["train", "train-detector"]),
        ("--v", ["--version"]),
        ("nonsense a", []),
        ("train pretrain_vilbert_base", ["pretrain_vilbert_base", "pretrain_vilbert_base_multi_task"]),
        ("train pretrain_vlbert_demo mod", ["model."]),
        ("train pretrain_vlbert_demo steps=3 data.held", ["data.held_out="]),
        ("train pretrain_vlbert_demo model.regions.feat", ["model.regions.features="]),
        (
            "train pretrain_vlbert_demo model.regions.features=",
            ["model.regions.features=end_to_end", "model.regions.features=precomputed"],
        ),
        ("train pretrain_vlbert_demo compile=t", ["compile=true"]),
        ("train pretrain_vlbert_demo data.root=", []),
        ("train unknown_recipe mo", []),
        ("plan pretrain_vlbert_demo --li", ["--list"]),
        ("collect root name capt", ["captions="]),
        ("collect na", []),  # DATASET
        ("detect root name backend=f", ["backend=faster_rcnn"]),
        ("catalog s", ["status"]),
        ("catalog status ", []),
        ("compare family_d", ["family_demo"]),
        ("completion ", ["bash", "zsh"]),
        ("predict folder ", []),  # of files: the shell's own
        ("predict --att", ["--attention"]),
    ],
)
def test_the_last_word_is_completed(line, wanted):
    assert candidates(re.split(" +", line)) == wanted


@pytest.mark.parametrize("command", FIELDS)
def test_every_field_that_help_lists_is_completed_and_no_other(capsys, command):
    recipe = {"vlbert.recipes:RECIPES": ["pretrain_vlbert_demo"], "detectors.recipes:RECIPES": ["detector_demo"]}
    given = recipe.get(FIELDS[command], [])
    fields = help_of(capsys, command, *given).partition("\nfields:\n")[2]
    listed = set(re.findall(r"^  ([\w.]+)(?:=.*)?  \(", fields, re.MULTILINE))

    def completed(typed: str) -> set[str]:
        found = candidates([command, *given, typed])
        return {one for word in found for one in (completed(word) if word.endswith(".") else [word[:-1]])}

    assert listed
    assert completed("") == listed


def test_what_modules_define_is_kept_until_a_source_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    line = ["compare", "family"]
    assert candidates(line) == ["family_demo"]
    (file,) = (tmp_path / "cache" / "vlbert").iterdir()
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"names": ["family_kept"]}))
    assert candidates(line) == ["family_kept"]
    older = [saved["stamp"][0], saved["stamp"][1] - 1]
    for damaged in (json.dumps(saved | {"names": ["family_kept"], "stamp": older}), "{", "[]", "{}"):
        file.write_text(damaged)
        assert candidates(line) == ["family_demo"]
        assert json.loads(file.read_text()) == saved
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # nothing can be kept there
    assert candidates(line) == ["family_demo"]


def test_completing_a_command_or_an_option_imports_nothing_that_takes_long():
    for line in ("vlbert tr", "vlbert train --h", "vlbert "):
        command = [sys.executable, "-X", "importtime", "-m", "vlbert", "completion", "--candidates", line]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
        imported = {row.rpartition("|")[2].strip().partition(".")[0] for row in done.stderr.splitlines()}
        assert "argparse" in imported
        assert not imported & {"torch", "numpy", "pyarrow", "PIL", "prefect", "detectors", "training"}
        assert done.stdout.split()


class Shell:
    """An interactive shell on a terminal of its own, where `vlbert` prints what it was called with."""

    VLBERT = """vlbert() { if [ "$1" = completion ]; then {python} -m vlbert "$@"; else echo "called <$*>"; fi; }"""

    def __init__(self, command: Sequence[str], setup: Sequence[str], folder: Path):
        environment = os.environ | {"PYTHONPATH": str(PROJECT), "TERM": "dumb", "HOME": str(folder), "PS1": "> "}
        main_end, end = pty.openpty()
        self.terminal = main_end
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=end, stdout=end, stderr=end, start_new_session=True
        )
        os.close(end)
        for line in [self.VLBERT.replace("{python}", sys.executable), *setup]:
            os.write(self.terminal, f"{line}\n".encode())
        self.calls("vlbert begin")

    def calls(self, typed: str) -> str:
        """What vlbert was called with after these keys and Enter."""
        os.write(self.terminal, f"{typed}\n".encode())
        seen, end = "", time.monotonic() + 60
        while not (found := re.search(r"called <(.*?)>\r?\n", seen)):
            assert time.monotonic() < end, seen
            if select.select([self.terminal], [], [], 1.0)[0]:
                seen += os.read(self.terminal, 65536).decode(errors="replace")
        return found[1]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.mark.parametrize("name", ["bash", pytest.param("zsh", marks=pytest.mark.slow)])
def test_a_shell_completes_at_the_press_of_tab(tmp_path, name):
    if shutil.which(name) is None:
        skip_without("far", f"{name} is not installed; .ci/run installs it")
    (tmp_path / "list.tsv").write_text("")
    candidates(["collect", ""])  # kept from here on
    command = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}[name]
    setup = {"bash": [], "zsh": ["autoload -U compinit; compinit -D -u"]}[name]
    shell = Shell(command, [*setup, f'eval "$(vlbert completion {name})"'], tmp_path)
    try:
        assert shell.calls("vlbert eva\tx") == "evaluate x"
        assert (
            shell.calls("vlbert collect root captions downl\tjpe\t90")
            == "collect root captions download.jpeg_quality=90"
        )
        assert shell.calls("vlbert collect r c captions=li\t") == "collect r c captions=list.tsv"
        assert shell.calls("vlbert collect r c commit_unreachable=t\tx") == "collect r c commit_unreachable=true x"
        assert shell.calls("vlbert predict li\tx") == "predict list.tsv x"
    finally:
        shell.close()


def test_what_completes_a_first_argument_belongs_to_a_command():
    assert {*FIELDS, *FIRST} <= {*COMMANDS}
    assert not {*FIELDS} & {*FIRST}


def test_the_page_names_commands_and_extras_that_exist(capsys):
    page = (PROJECT / "docs" / "commands.md").read_text()
    for text in (page, (PROJECT / "README.md").read_text()):
        assert {*re.findall(r"(?:^ {4}|`)vlbert ([a-z][a-z-]+)", text, re.MULTILINE)} <= {*COMMANDS}
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*re.findall(r"vlbert\[(\w+)\]", page)} <= {*extras}
    for line in re.findall(r'^ +(eval ".*?")', page, re.MULTILINE):
        assert line in help_of(capsys, "completion")
