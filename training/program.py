"""The command line of a training: `PROGRAM RECIPE [--field value ...]`, alone or under torchrun."""

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
from datetime import timedelta
from typing import Any, NoReturn

from storage.settings import override, parse, parse_known
from training import distributed
from training.distributed import ALONE, SharedFault, World
from training.loading import EXPECTED
from training.stopping import Stopped
from training.trackers import TRACKERS, MakeTracker

STOPPED = os.EX_TEMPFAIL  # 75, the exit status of a run that was told to stop: start it again
_BEFORE_ANOTHERS_FAILURE = 2.0  # seconds that a rank waits before it ends because another one did


def run_program(
    program: str,
    description: str,
    recipes: Mapping[str, Callable[..., Any]],
    check_complete: Callable[[Any], None],
    train: Callable[[Any, World], Any],
    arguments: Sequence[str] | None,
) -> None:
    """`PROGRAM RECIPE [--field value ...]`, on one process or under torchrun; what is wrong ends it with one line.

    program: what it is called, as `vlbert train`.
    """
    recipe_name, given = split_recipe(arguments, program, description, recipes)
    name = f"{program} {recipe_name}"
    try:
        print_help(recipe_name, given, recipes, name)
    except ValueError as error:
        sys.exit(f"{name}: {error}")

    def work(world: World) -> None:
        # In the world: what is wrong on one rank ends all at once, and is told once.
        recipe, wrong = None, None
        try:
            recipe = make_recipe(recipe_name, given, recipes)
            check_complete(recipe)
            if world.first:  # the others call none
                find_trackers(recipe.trackers)
        except ValueError as error:
            wrong = str(error)
        distributed.raise_on_all_ranks(wrong, world)
        train(recipe, world)

    run_in_world(name, work)


def split_recipe(
    arguments: Sequence[str] | None, program: str, description: str, recipes: Mapping[str, Callable[..., Any]]
) -> tuple[str, list[str]]:
    """Return the name of the recipe and the other arguments; prints the program's help, and ends, without a name."""
    name, *given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if not name.startswith("-"):
        return name, given
    print(f"usage: {program} RECIPE [--field value ...]\n       {program} RECIPE --help    its fields\n\n{description}")
    print("RECIPE is MODULE:FUNCTION, or one of", *recipes, sep="\n  ")
    sys.exit(0 if name in ("-h", "--help") else 2)


def make_recipe(name: str, arguments: Sequence[str], recipes: Mapping[str, Callable[..., Any]]) -> Any:
    """Return what the recipe of this name makes, with the arguments applied: the recipe's own, as --size, and fields.

    Raises ValueError if there is no such recipe or field, or a value does not fit.
    """
    return override(*parse_recipe(name, arguments, recipes))


def parse_recipe(
    name: str, arguments: Sequence[str], recipes: Mapping[str, Callable[..., Any]]
) -> tuple[Any, list[str]]:
    """Return what the recipe of this name makes with its own arguments, as --size, and the other arguments."""
    return parse_known(find_recipe(name, recipes), arguments)


def print_help(name: str, arguments: Sequence[str], recipes: Mapping[str, Callable[..., Any]], program: str) -> None:
    """Print the arguments of a recipe and its fields, and end, if --help is among the arguments."""
    given = [one for one in arguments if one not in ("-h", "--help")]
    if len(given) == len(arguments):
        return
    make = find_recipe(name, recipes)
    recipe, _ = parse_known(make, given)
    if inspect.signature(make).parameters:
        with contextlib.suppress(SystemExit):
            parse(make, ["--help"], program)
    parse(type(recipe), ["--help"], program, recipe, description="")


def find_trackers(names: Sequence[str]) -> dict[str, MakeTracker]:
    """The trackers of these names; ValueError where one cannot be found."""
    return {name: find_recipe(name, TRACKERS, "tracker") for name in names}


def find_recipe(name: str, recipes: Mapping[str, Callable[..., Any]], kind: str = "recipe") -> Callable[..., Any]:
    """Return the recipe of this name; MODULE:FUNCTION is one of your own, importable from the working directory.

    Raises ValueError, which calls it a `kind`, if there is none.
    """
    if name in recipes:
        return recipes[name]
    module, separator, function = name.partition(":")
    if not separator:
        near = difflib.get_close_matches(name, recipes, 1)
        raise ValueError(
            f"there is no {kind} {name}, only {', '.join(sorted(recipes))}; name your own as MODULE:FUNCTION"
            f"{f'; did you mean {near[0]}?' if near else ''}"
        )
    sys.path.append(os.getcwd())  # an installed script does not look there
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); run this in the folder that holds {module.partition('.')[0]}.py"
        ) from error
    if not callable(getattr(found, function, None)):
        raise ValueError(f"{module} has no function {function!r}")
    return getattr(found, function)


def run_in_world(name: str, work: Callable[[World], Any], limit: timedelta = distributed.TIME_LIMIT) -> None:
    """`work` in the world that torchrun describes, or alone; what is wrong ends the program with one line.

    A rank does not report the error of another rank, and a bug keeps its traceback. Where the run was told to
    stop, each rank ends with the status STOPPED.
    """
    world = ALONE
    try:
        world = distributed.start(limit)
        work(world)
    except Stopped as stopped:
        for number in (signal.SIGTERM, signal.SIGINT):  # Python removes its own handlers before it ends
            signal.signal(number, signal.SIG_IGN)
        _end_together(world, STOPPED, f"{name}: stopped: {stopped}")
    except EXPECTED as error:
        if isinstance(error, SharedFault) and world.size > 1:
            _end_together(world, 1, f"{name}: {error}")
        _end(world, 1, name, str(error))
    except KeyboardInterrupt:
        _end(world, 128 + signal.SIGINT, name, "interrupted")
    except Exception as error:
        fault = distributed.peer_failure(error)
        if fault is None:
            raise
        # Meanwhile torchrun sees which rank ended first, names that one, and ends those of its own machine.
        time.sleep(_BEFORE_ANOTHERS_FAILURE)
        _end(world, 1, name, f"another rank is gone or hangs ({fault}); its error stands above, or there")
    distributed.stop(world)  # not after an error: it would wait for ranks that are still at work


def _end_together(world: World, status: int, line: str) -> NoReturn:
    """End every rank with this status; the first one prints the line."""
    distributed.barrier(world)  # where a rank ends, torchrun ends the others: the first one may be saving
    distributed.stop(world)
    if world.first:
        print(line, file=sys.stderr, flush=True)
    sys.exit(status)


def _end(world: World, status: int, name: str, reason: str) -> NoReturn:
    """End with a line and a status.

    The process group of several ranks is still open then, and its threads may abort the interpreter's last steps: the
    status would be that of SIGABRT. So these are left out.
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
