"""`vlbert COMMAND`."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from places import PROJECT

import vlbert
from vlbert.commands import COMMANDS, main


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    """Of what a program does to its process."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setenv("COLUMNS", "200")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code in (None, 0)
    assert capsys.readouterr().out.startswith(f"usage: vlbert {command} ")


def test_bash_completes_the_commands_as_the_guide_says():
    (line,) = re.findall("`(complete .*)`", (PROJECT / "docs" / "library.md").read_text())
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    completed = subprocess.run(["bash", "-c", f"{line}; complete -p"], env=env, capture_output=True, text=True).stdout
    (words,) = re.findall(r"^complete -W '([^']*)' vlbert\n$", completed)
    assert words.split() == [*COMMANDS]


def test_the_version_is_that_of_pyproject_toml(capsys):
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert vlbert.__version__ == version
    main(["--version"])
    assert capsys.readouterr().out == f"vlbert {version}\n"
    main(["recipes"])  # and a program without arguments
    assert "finetune_vqa_base" in capsys.readouterr().out


def test_a_command_that_does_not_exist_is_named_with_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["evalute", "recipe"])
    assert capsys.readouterr().err.endswith("no command 'evalute'; vlbert --help lists all; did you mean evaluate?\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("train pretrain_vlber", "vlbert train pretrain_vlber: .*; did you mean pretrain_vlbert?"),
        ("train pretrain_vlbert --data.rot x", "vlbert train pretrain_vlbert: .*--data.rot.* meant: --data.root"),
        ("evaluate x y z", "vlbert evaluate"),
        ("predict . a.jpg", "vlbert predict"),
    ],
)
def test_errors_of_a_program_call_it_as_it_was_called(arguments, named):
    with pytest.raises(SystemExit, match=f"^{named}"):
        main(arguments.split())


def test_the_installed_script_finds_a_recipe_of_the_working_directory(tmp_path):
    (tmp_path / "mine.py").write_text("from vlbert.recipes.vlbert import finetune_vqa as recipe\n")
    script = str(Path(sys.executable).parent / "vlbert")
    commands = ([script, "train", f"{name}:recipe", "--size", "large", "--help"] for name in ("mine", "yours"))
    ended = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True) for command in commands]
    assert (ended[0].returncode, ended[1].returncode) == (0, 1)
    assert all(text in ended[0].stdout for text in ("--size {base,large,demo}", "--data.root", "(default: 1024)"))
    assert re.fullmatch("vlbert train yours:recipe: yours cannot be imported .*; run this in .*\n", ended[1].stderr)


def test_a_pipe_that_nobody_reads_and_ctrl_c_end_a_command_as_the_shell_has_it(tmp_path):
    for command in ([], ["catalog"]):
        reader, writer = os.pipe()
        os.close(reader)
        program = [sys.executable, "-m", "vlbert", *command, "--help"]
        done = subprocess.run(program, cwd=PROJECT, stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, b"")
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")  # while it is imported
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROJECT)])}
    command = [sys.executable, "-m", "vlbert", "convert", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"")


def test_the_pages_name_commands_and_extras_that_exist():
    pages = [PROJECT / "README.md", *(PROJECT / "docs").glob("*.md")]
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for text in (page.read_text() for page in pages):
        assert {*re.findall(r"(?:^ {4}|`)vlbert ([a-z][a-z-]+)", text, re.MULTILINE)} <= {*COMMANDS}
        assert {*re.findall(r"vlbert\[(\w+)\]", text)} <= {*extras}
