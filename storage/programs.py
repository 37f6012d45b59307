"""Code shared by all commands: arguments, exit statuses, and checks for optional packages."""

import importlib.util
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import tyro

from storage.memory import is_memory_error

# Arguments that several commands have.
Positional = tyro.conf.Positional
Root = Annotated[str, Positional, tyro.conf.arg(metavar="ROOT", help="a folder, or s3://bucket/prefix")]
Dataset = Annotated[str, Positional, tyro.conf.arg(metavar="DATASET", help="a folder in the root, such as captions")]
Checkpoint = Annotated[
    str,
    Positional,
    tyro.conf.arg(metavar="CHECKPOINT", help="ROOT/runs/RUN, ROOT/runs/RUN/step-* or /best, or a folder"),
]
# For a parameter that is a dataclass: its fields are options without a prefix.
Flat = tyro.conf.arg(name="")


class Command:
    """The `main` of a command: parses the command line, and calls `function` with the arguments.

    If `function` is a dict, its keys are the names of subcommands. For ValueError, OSError and the `expected` errors,
    and if memory is short, it prints one line and exits with status 1. After Ctrl-C, it exits with status 130.
    """

    def __init__(
        self, program: str, function: Callable[..., Any] | dict[str, Callable[..., Any]], *expected: type[Exception]
    ):
        self.program, self.function, self.expected = program, function, (ValueError, OSError, *expected)

    def __call__(self, arguments: Sequence[str] | None = None) -> None:
        try:
            cli: Any = tyro.extras.subcommand_cli_from_dict if isinstance(self.function, dict) else tyro.cli
            cli(self.function, args=arguments, prog=self.program, use_underscores=True)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except BrokenPipeError:  # nobody reads the output; vlbert/commands.py handles it as shell tools do
            raise
        except self.expected as error:
            sys.exit(f"{self.program}: {error}")
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not is_memory_error(error):
                raise
            text = "; ".join([str(error) or "out of memory", *getattr(error, "__notes__", [])])
            sys.exit(f"{self.program}: {text}; raise `ulimit -v`, or use a machine with more memory, and run again")


# --- packages ---------------------------------------------------------------------------------------------------------


class PackageMissing(ImportError, ValueError):
    """Raised if an optional package is not installed."""


def require(package: str, purpose: str, extra: str = "pipeline") -> None:
    """Raise PackageMissing if `package` is not installed. The message names the `purpose` and the pip extra."""
    if importlib.util.find_spec(package) is None:
        raise PackageMissing(f"{purpose} needs {package}, which is not installed: pip install 'vlbert[{extra}]'")
