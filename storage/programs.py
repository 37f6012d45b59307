"""What all commands share: how they are called, how they end, and the packages that only some of them need."""

import importlib.util
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro

# The arguments of many commands.
Positional = tyro.conf.Positional
Root = Annotated[str, Positional, tyro.conf.arg(metavar="ROOT", help="a folder, or s3://bucket/prefix")]
Dataset = Annotated[str, Positional, tyro.conf.arg(metavar="DATASET", help="a folder of the root, as captions")]
Checkpoint = Annotated[
    str,
    Positional,
    tyro.conf.arg(metavar="CHECKPOINT", help="ROOT/runs/RUN, ROOT/runs/RUN/step-* or /best, or a folder"),
]
# Of a parameter that is a dataclass: its fields stand on the command line without a prefix.
Flat = tyro.conf.arg(name="")


class Command:
    """The `main` of a command: it calls a function with what the command line says.

    Several functions are called by their names, the command's first argument. ValueError, OSError and the errors that
    are `expected` end it with one line and status 1, and Ctrl-C with 130.
    """

    def __init__(
        self, program: str, function: Callable[..., Any] | dict[str, Callable[..., Any]], *expected: type[Exception]
    ):
        self.program, self.function, self.expected = program, function, (ValueError, OSError, *expected)

    def __call__(self, arguments: Sequence[str] | None = None) -> None:
        try:
            if isinstance(self.function, dict):
                tyro.extras.subcommand_cli_from_dict(
                    self.function, args=arguments, prog=self.program, use_underscores=True
                )
            else:
                tyro.cli(self.function, args=arguments, prog=self.program, use_underscores=True)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except BrokenPipeError:  # nobody reads the output: vlbert/commands.py ends as the shell has it
            raise
        except self.expected as error:
            sys.exit(f"{self.program}: {error}")


# --- packages ---------------------------------------------------------------------------------------------------------


class PackageMissing(ImportError, ValueError):
    """A package is not installed that only some programs need."""


def require(package: str, purpose: str, extra: str = "pipeline") -> None:
    """Raises PackageMissing if the package is not installed. extra: that of pyproject.toml which brings it."""
    if importlib.util.find_spec(package) is None:
        raise PackageMissing(f"{purpose} needs {package}, which is not installed: pip install 'vlbert[{extra}]'")
