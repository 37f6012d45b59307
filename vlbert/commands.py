"""`vlbert COMMAND`: the programs of this project under one name."""

import importlib
import os
import re
import select
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from storage.programs import PackageMissing, nearest

# The module whose `main` each command calls, in the order of use. None is imported before it runs.
COMMANDS = {
    "plan": "vlbert.plan",
    "collect": "storage.collect.run",
    "detect": "detectors.run",
    "corpus": "vlbert.data.corpus",
    "recipes": "vlbert.recipes.__main__",
    "train": "vlbert.train",
    "evaluate": "vlbert.evaluation.evaluate",
    "predict": "vlbert.predict.command",
    "compare": "vlbert.comparison.compare",
    "whence": "vlbert.evaluation.whence",
    "withdraw": "vlbert.evaluation.withdraw",
    "replay": "vlbert.evaluation.replay",
    "card": "vlbert.hf.cards",
    "catalog": "storage.catalog.__main__",
    "convert": "vlbert.published.convert",
    "convert-detector": "detectors.weights.__main__",
    "verify-detector": "detectors.verify",
    "train-detector": "detectors.train",
    "vqa-answers": "vlbert.datasets.vqa",
    "serve": "flows.serve",
    "deploy": "flows.deploy",
}

_USAGE = "usage: vlbert COMMAND ...\n       vlbert COMMAND --help    its arguments and fields\n       vlbert --version"


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends with 130 after Ctrl-C, and with 141 where nobody reads its output (`| head`), as the shell has it."""
    try:
        try:
            _start(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # it was another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes once more as it ends
        sys.exit(128 + signal.SIGPIPE)


def _start(arguments: Sequence[str] | None) -> None:
    command, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(f"{_USAGE}\n\n{table(shutil.get_terminal_size((100, 24)).columns)}")
    elif command == "--version":
        import vlbert

        print(f"vlbert {vlbert.__version__}")
    elif command in COMMANDS:
        try:
            importlib.import_module(COMMANDS[command]).main(others)
        except PackageMissing as missing:
            sys.exit(f"vlbert {command}: {missing}")
    else:
        hint = f"vlbert --help lists all{nearest(command, COMMANDS)}"
        print(f"vlbert: there is no command {command!r}; {hint}", file=sys.stderr)
        sys.exit(2)


def table(width: int) -> str:
    """Each command, what it does, and the module behind it, in lines of at most `width` characters."""
    first, last = (max(map(len, column)) for column in (COMMANDS, COMMANDS.values()))
    middle = max(20, width - first - last - 6)
    lines = []
    for command, module in COMMANDS.items():
        words = textwrap.wrap(_purpose(module), middle)
        lines.append(f"  {command:<{first}}  {words[0]:<{middle}}  {module}")
        lines += [" " * (first + 4) + more for more in words[1:]]
    return "\n".join(lines)


def _purpose(module: str) -> str:
    """The first sentence of the module's docstring, without the name before it."""
    paragraph = re.split(r'"""|\n\n', source_of(module).read_text(encoding="utf-8"), maxsplit=2)[1]
    sentence = re.split(r"\.(?=\s)|[.:]$", " ".join(paragraph.split()))[0]
    sentence = re.sub(r"^(\w+|`[^`]+`): ", "", sentence)
    return sentence[0].upper() + sentence[1:]


def source_of(module: str) -> Path:
    """The source file of a module."""
    return Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
