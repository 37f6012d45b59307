"""`vlbert COMMAND`: the programs of this project under one name."""

import dataclasses
import difflib
import importlib
import inspect
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Union, get_type_hints

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
_COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")
_USAGE = """usage: vlbert COMMAND ...
       vlbert COMMAND --help                         its arguments
       vlbert --version
       vlbert --tyro-print-completion bash|zsh|fish  a script that completes commands, recipes and fields
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Call a command. It ends with 130 after Ctrl-C, and with 141 if nobody reads its output (`| head`)."""
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
        print(_USAGE, *(f"  {name:<16}  {purpose}" for name, (_, purpose) in COMMANDS.items()), sep="\n")
    elif command == "--version":
        import vlbert

        print(f"vlbert {vlbert.__version__}")
    elif command in _COMPLETION:
        _complete([command, *others])
    elif command in COMMANDS:
        _module_of(command).main(others)
    else:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"vlbert: there is no command {command!r}; vlbert --help lists all{hint}", file=sys.stderr)
        sys.exit(2)


def _module_of(command: str) -> Any:
    try:
        return importlib.import_module(COMMANDS[command][0])
    except PackageMissing as missing:
        sys.exit(f"vlbert {command}: {missing}")


def _complete(arguments: list[str]) -> None:
    """Print what has a shell complete the commands, their arguments, and the recipes with their fields."""
    import tyro

    def chosen(functions: Mapping[str, Callable[..., Any]]) -> Callable[[Any], None]:
        """Return a function whose first argument is the name of one of these."""
        made = [Annotated[Any, tyro.conf.subcommand(name, constructor=one)] for name, one in functions.items()]

        def choose(one: Any) -> None:
            pass

        choose.__annotations__["one"] = Annotated[Union[tuple(made)], tyro.conf.arg(name="")]  # noqa: UP007  # ty: ignore[invalid-type-form]
        return choose

    def with_fields(name: str, make: Callable[..., Any]) -> type:
        """Return a dataclass with the parameters of a recipe's function, and the fields of what it makes."""
        recipe, hints = make(), get_type_hints(make)
        kind = type(recipe)
        own = [(argument, hints[argument], one.default) for argument, one in inspect.signature(make).parameters.items()]
        fields = ("fields", Annotated[kind, tyro.conf.arg(name="")], recipe)  # ty: ignore[invalid-type-form]
        return dataclasses.make_dataclass(name, [*own, fields])

    found = {}
    for name in COMMANDS:
        module = _module_of(name)
        function = getattr(module, "Options", None) or getattr(module.main, "function", None)
        if function is None:  # its first argument is a recipe
            function = {recipe: with_fields(recipe, make) for recipe, make in module.RECIPES.items()}
        found[name] = chosen(function) if isinstance(function, dict) else function
    tyro.extras.subcommand_cli_from_dict(
        found, prog="vlbert", args=arguments, use_underscores=True, config=(tyro.conf.OmitSubcommandPrefixes,)
    )
