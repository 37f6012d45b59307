"""The programs of this project: what each is called, and the packages that it needs."""

import argparse
import difflib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable

# --- names ------------------------------------------------------------------------------------------------------------


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser of the program `name`, as `vlbert collect`."""
    return argparse.ArgumentParser(name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


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
