"""The programs of this project: what each is called, and the packages that it needs."""

import argparse
import difflib
import importlib.metadata
import importlib.util
import re
import runpy
import sys
from collections.abc import Iterable, Sequence

_NAMES: dict[str, str] = {}  # by module, of the program that runs: where it was not started as python -m MODULE

# --- names ------------------------------------------------------------------------------------------------------------


def run(module: str, name: str, arguments: Sequence[str]) -> None:
    """Do what `python -m MODULE ARGUMENTS` does; usage and errors call the program `name`."""
    sys.argv = [name, *arguments]
    _NAMES[module] = name
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        del _NAMES[module]


def name_of(module: str, otherwise: str | None = None) -> str:
    """What a program is called: `vlbert COMMAND` where it was started so, else `otherwise`, `python -m MODULE`."""
    return _NAMES.get(module) or otherwise or f"python -m {module}"


def make_parser(module: str, description: str, otherwise: str | None = None) -> argparse.ArgumentParser:
    """A parser that calls the program by name_of, in the lines of its description, too."""
    name = name_of(module, otherwise)
    text = description.replace(f"python -m {module} ", f"{name_of(module)} ")
    return argparse.ArgumentParser(name, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def nearest(typed: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the name that looks most like what was typed, or ""."""
    found = difflib.get_close_matches(typed, known, 1)
    return f"; did you mean {found[0]}?" if found else ""


# --- packages ---------------------------------------------------------------------------------------------------------


class PackageMissing(ImportError, ValueError):
    """A package is not installed that only some programs need."""


def require(package: str, purpose: str) -> None:
    """PackageMissing where the package is not installed; it names the extra of pyproject.toml that brings it."""
    if importlib.util.find_spec(package) is None:
        wanted = f"vlbert[{extra}]" if (extra := _extra_of(package)) else package
        raise PackageMissing(f"{purpose} needs {package}, which is not installed: pip install '{wanted}'")


def _extra_of(package: str) -> str | None:
    """The extra with this package; None where this tree is not installed."""
    try:
        requirements = importlib.metadata.requires("vlbert") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = re.compile(rf"{package}(?![\w.-]).*extra == ['\"]([\w-]+)['\"]", re.IGNORECASE)
    return next((match[1] for line in requirements if (match := wanted.match(line))), None)
