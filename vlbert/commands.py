"""`vlbert COMMAND`: the programs of this project under one name."""

import importlib
import signal
import sys
from collections.abc import Sequence

from storage.programs import PackageMissing

# Each command: the module whose `main` it calls, and what it does. None is imported before it runs.
COMMANDS = {
    "plan": ("vlbert.plan", "estimate GB, hours and euros before anything is downloaded"),
    "collect": ("storage.collect.run", "download a caption list, or import images, into shards"),
    "detect": ("detectors.run", "detect regions in every image shard that has none yet"),
    "corpus": ("vlbert.data.corpus", "tokenise a text-only corpus"),
    "recipes": ("vlbert.recipes", "print how paper and published code differ, and all numbers"),
    "train": ("vlbert.train", "pre-train or fine-tune a model"),
    "evaluate": ("vlbert.evaluation.evaluate", "evaluate a checkpoint on a split: metrics, a page, submissions"),
    "predict": ("vlbert.predict.command", "ask a model about images of your own"),
    "compare": ("vlbert.comparison.compare", "train variants x tasks x seeds, and write a page about what differs"),
    "whence": ("vlbert.evaluation.whence", "list every image URL that a checkpoint has seen, and at which steps"),
    "withdraw": ("vlbert.evaluation.withdraw", "withdraw images, and list every checkpoint that has seen them"),
    "replay": ("vlbert.evaluation.replay", "make the batch of any step again, as a page"),
    "card": ("vlbert.hf.cards", "write a model card or a dataset card"),
    "catalog": ("storage.catalog.command", "inspect, verify and clean a root"),
    "convert": ("vlbert.published.convert", "convert the authors' checkpoints to models of ours, and back"),
    "convert-detector": ("detectors.weights.convert", "convert published weights of the Visual Genome detector"),
    "verify-detector": ("detectors.verify", "draw what the weights of a detector find on your images"),
    "train-detector": ("detectors.train", "train a detector on annotated images"),
    "vqa-answers": ("vlbert.datasets.vqa", "write the list of answers of VQA"),
    "serve": ("flows.serve", "serve the deployments of prefect.yaml on this machine, with the flow UI"),
    "deploy": ("flows.deploy", "deploy work pools, alarms and deployments at a Prefect server"),
}
_USAGE = """usage: vlbert COMMAND ...
       vlbert COMMAND --help    its arguments
       vlbert --version
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Call a command. It ends with 130 after Ctrl-C."""
    command, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(_USAGE, *(f"  {name:<16}  {purpose}" for name, (_, purpose) in COMMANDS.items()), sep="\n")
    elif command == "--version":
        import vlbert

        print(f"vlbert {vlbert.__version__}")
    elif command in COMMANDS:
        try:
            importlib.import_module(COMMANDS[command][0]).main(others)
        except PackageMissing as missing:
            sys.exit(f"vlbert {command}: {missing}")
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
    else:
        print(f"vlbert: there is no command {command!r}; vlbert --help lists all", file=sys.stderr)
        sys.exit(2)
