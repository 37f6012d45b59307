"""Command line of the training programs: `PROGRAM RECIPE [--field value ...]`, as one process or under torchrun."""

import atexit
import contextlib
import difflib
import importlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from storage.settings import override, parse, parse_known
from training import distributed
from training.distributed import ALONE, SharedFault, World
from training.loading import EXPECTED
from training.stopping import Stopped
from training.trackers import TRACKERS, MakeTracker

STOPPED = os.EX_TEMPFAIL  # 75, the exit status of a run that was stopped by SIGTERM or SIGINT and can be resumed
_PEER_FAILURE_DELAY = 2.0  # seconds that a rank waits before it exits because another one failed


def run_program(
    program: str,
    description: str,
    recipes: Mapping[str, Callable[..., Any]],
    check_complete: Callable[[Any], None],
    train: Callable[[Any, World], Any],
    arguments: Sequence[str] | None,
) -> None:
    """Run the command line `PROGRAM RECIPE [--field value ...]`, as one process or under torchrun.

    Errors are printed as one line. `program` is the program's name in messages. `check_complete` raises ValueError if
    the recipe lacks a required field.
    """
    recipe_name, remaining = split_recipe(arguments, program, description, recipes)
    name = f"{program} {recipe_name}"
    try:
        print_help(recipe_name, remaining, recipes, name)
    except ValueError as error:
        sys.exit(f"{name}: {error}")

    def make_and_train(world: World) -> None:
        # On every rank, because an error of one rank must end all of them, and be printed once.
        recipe, fault = None, None
        try:
            recipe = make_recipe(recipe_name, remaining, recipes)
            check_complete(recipe)
            if world.first:  # other ranks have no trackers
                find_trackers(recipe.trackers)
        except ValueError as error:
            fault = str(error)
        distributed.raise_on_all_ranks(fault, world)
        train(recipe, world)

    run_in_world(name, make_and_train)


def split_recipe(
    arguments: Sequence[str] | None, program: str, description: str, recipes: Mapping[str, Callable[..., Any]]
) -> tuple[str, list[str]]:
    """Return the recipe's name and the remaining arguments. Without a name, print the program's help and exit."""
    name, *remaining = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if not name.startswith("-"):
        return name, remaining
    print(f"usage: {program} RECIPE [--field value ...]\n       {program} RECIPE --help    list its fields")
    print(f"\n{description}\nRECIPE is MODULE:FUNCTION, or one of", *recipes, sep="\n  ")
    sys.exit(0 if name in ("-h", "--help") else 2)


def make_recipe(name: str, arguments: Sequence[str], recipes: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the recipe with all arguments applied: its function's arguments, such as --size, and recipe fields.

    Raises ValueError if there is no such recipe or field, or if a value is not allowed.
    """
    return override(*parse_known(find_recipe(name, recipes), arguments))


def print_help(name: str, arguments: Sequence[str], recipes: Mapping[str, Callable[..., Any]], program: str) -> None:
    """If --help is among the arguments, print the recipe's arguments and fields, and exit."""
    remaining = [argument for argument in arguments if argument not in ("-h", "--help")]
    if len(remaining) == len(arguments):
        return
    make = find_recipe(name, recipes)
    recipe, _ = parse_known(make, remaining)
    if inspect.signature(make).parameters:
        with contextlib.suppress(SystemExit):
            parse(make, ["--help"], program)
    parse(type(recipe), ["--help"], program, recipe, description="")


def find_trackers(names: Sequence[str]) -> dict[str, MakeTracker]:
    """Return the functions that make the named trackers. Raises ValueError if one is not found."""
    return {name: find_recipe(name, TRACKERS, "tracker") for name in names}


def find_recipe(name: str, recipes: Mapping[str, Callable[..., Any]], kind: str = "recipe") -> Callable[..., Any]:
    """Return the function with this name in `recipes` or, if the name is MODULE:FUNCTION, the function of that module.

    The module may be in the working directory. Raises ValueError if there is no such function. `kind` is the word for
    the function in error messages.
    """
    if name in recipes:
        return recipes[name]
    module, separator, function = name.partition(":")
    if not separator:
        near = difflib.get_close_matches(name, recipes, 1)
        raise ValueError(
            f"there is no {kind} {name}, only {', '.join(sorted(recipes))}; give your own as MODULE:FUNCTION"
            f"{f'; did you mean {near[0]}?' if near else ''}"
        )
    sys.path.append(os.getcwd())  # not searched by installed scripts
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); run this in the folder that holds {module.partition('.')[0]}.py"
        ) from error
    if not callable(getattr(imported, function, None)):
        raise ValueError(f"{module} has no function {function!r}")
    return getattr(imported, function)


def run_in_world(name: str, function: Callable[[World], Any]) -> None:
    """Call `function` with the World of this process, and exit with a status and message if it fails.

    Expected errors (EXPECTED) are printed as one line, and only once if all ranks raise the same error. Other errors
    keep their traceback. If the run was stopped by a signal, each rank exits with status STOPPED.
    """
    world = ALONE
    try:
        world = distributed.start()
        function(world)
    except Stopped as stopped:
        for number in (signal.SIGTERM, signal.SIGINT):  # Python removes its own handlers before it exits
            signal.signal(number, signal.SIG_IGN)
        _end_together(world, STOPPED, f"{name}: stopped: {stopped}")
    except EXPECTED as error:
        if isinstance(error, SharedFault) and world.size > 1:
            _end_together(world, 1, f"{name}: {error}")
        _end(world, 1, name, str(error))
    except KeyboardInterrupt:
        _end(world, 128 + signal.SIGINT, name, "interrupted")
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):  # torch's words
            hint = "if it hung, its stack is above; if it was killed, memory may be short"
            _end(world, 1, name, f"a loading process ended; {hint} ({error}). Start again; a training resumes")
        fault = distributed.peer_failure(error)
        if fault is None:
            raise
        # Meanwhile torchrun sees which rank failed first, reports that one, and ends the other ranks of its machine.
        time.sleep(_PEER_FAILURE_DELAY)
        _end(world, 1, name, f"another rank failed or hangs ({fault}); see its error above or in its own log")
    distributed.stop(world)  # not after an error, because it would wait for ranks that are still training


def _end_together(world: World, status: int, line: str) -> NoReturn:
    """Exit on every rank with this status. Rank 0 prints the line."""
    distributed.barrier(world)  # torchrun ends all ranks when one exits, but rank 0 may still be saving
    distributed.stop(world)
    if world.first:
        print(line, file=sys.stderr, flush=True)
    sys.exit(status)


def _end(world: World, status: int, name: str, reason: str) -> NoReturn:
    """Print the reason, and exit with this status.

    With several ranks, the process group is still open. Its threads could abort the process with SIGABRT during
    the interpreter's shutdown, so the shutdown is skipped.
    """
    line = f"{name}: {reason if world.first else f'rank {world.rank}: {reason}'}"
    if status == 1 and world.size == 1:
        sys.exit(line)
    print(line, file=sys.stderr, flush=True)
    if world.size > 1:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # ends the loading processes
        os._exit(status)
    sys.exit(status)
