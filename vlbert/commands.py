"""Run the programs of this project as `vlbert COMMAND`."""

import argparse
import difflib
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.programs import PackageMissing

# Command -> the module whose `main` it calls, and its description. A module is imported only to run its command.
COMMANDS = {
    "plan": ("vlbert.plan", "estimate GB, hours and euros in advance"),
    "collect": ("storage.collect.run", "download the images of a caption list, or import images, into shards"),
    "failures": ("storage.collect.failures", "list the rows without an image or regions, with reason and hint"),
    "detect": ("detectors.run", "detect regions in every image shard that has none yet"),
    "corpus": ("vlbert.data.corpus", "tokenise a text-only corpus"),
    "recipes": ("vlbert.recipes", "print differences between paper and published code, and each recipe's numbers"),
    "train": ("vlbert.train", "pre-train or fine-tune a model"),
    "evaluate": ("vlbert.evaluation.evaluate", "evaluate a checkpoint on a split: metrics, a page, submissions"),
    "predict": ("vlbert.predict.command", "ask a model about your own images"),
    "compare": ("vlbert.comparison.compare", "train models on several tasks and seeds, and compare them on a page"),
    "whence": ("vlbert.evaluation.whence", "list every image URL that a checkpoint has seen, and at which steps"),
    "withdraw": ("vlbert.evaluation.withdraw", "withdraw images, and list every checkpoint that has seen them"),
    "replay": ("vlbert.evaluation.replay", "rebuild the batch of any step, and show it as a page"),
    "card": ("vlbert.hf.cards", "write a model card or a dataset card"),
    "catalog": ("storage.catalog.command", "inspect, verify and clean a root"),
    "convert": ("vlbert.published.convert", "convert the authors' checkpoints to models of this project, and back"),
    "convert-detector": ("detectors.weights.convert", "convert published weights of the Visual Genome detector"),
    "verify-detector": ("detectors.verify", "draw the regions that a detector finds on your images"),
    "train-detector": ("detectors.train", "train a detector on annotated images"),
    "vqa-answers": ("vlbert.datasets.vqa", "write VQA's list of answers"),
    "serve": ("flows.serve", "serve the deployments of prefect.yaml on this machine, with Prefect's UI"),
    "deploy": ("flows.deploy", "create work pools, alarms and deployments on a Prefect server"),
}
_USAGE = """usage: vlbert COMMAND ...
       vlbert COMMAND ... --task_file FILE  for a task of your own, which this Python file defines
       vlbert COMMAND --help                its arguments
       vlbert --version
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. The exit status is 130 after Ctrl-C, and 141 if a pipe (such as `| head`) is closed."""
    try:
        try:
            _run_command(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # stdout is intact: another pipe is broken
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        sys.exit(128 + signal.SIGPIPE)


def _run_command(arguments: Sequence[str] | None) -> None:
    command, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(_USAGE, *(f"  {name:<16}  {purpose}" for name, (_, purpose) in COMMANDS.items()), sep="\n")
    elif command == "--version":
        import vlbert

        print(f"vlbert {vlbert.__version__}")
    elif command in COMMANDS:
        others = _import_task_files(command, others)
        _import_module(command).main(others)
    else:
        matches = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        print(f"vlbert: there is no command {command!r}; vlbert --help lists all{hint}", file=sys.stderr)
        sys.exit(2)


def _import_task_files(command: str, arguments: Sequence[str]) -> list[str]:
    """Run the files that --task_file names, as modules of their names. Return the other arguments."""
    parser = argparse.ArgumentParser(f"vlbert {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--task_file", "--task-file", type=Path, action="append", default=[])
    given, others = parser.parse_known_args(arguments)
    for file in given.task_file:
        if not file.is_file():
            sys.exit(f"vlbert {command}: there is no --task_file {file}; name the Python file of your task")
        sys.path.insert(0, str(file.resolve().parent))
        importlib.import_module(file.stem)
    return others


def _import_module(command: str) -> Any:
    try:
        return importlib.import_module(COMMANDS[command][0])
    except PackageMissing as missing:
        sys.exit(f"vlbert {command}: {missing}")
