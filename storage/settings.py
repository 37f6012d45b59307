"""Settings as frozen dataclasses: checked when made, read from command lines by tyro, kept as JSON.

A comment beside a field, or the docstring below it, is what `--help` and the flow UI show.
"""

import contextlib
import dataclasses
import functools
import io
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro import _docstrings  # which has no public name for the words about a field

T = TypeVar("T")

# --- checks -----------------------------------------------------------------------------------------------------------


def check(config: Any, holds: Any, name: str, wanted: str) -> None:
    """Raises ValueError, which names the field and its value, unless `holds`."""
    if not holds:
        raise ValueError(f"{type(config).__name__}.{name} is {getattr(config, name)!r}; it must be {wanted}")


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError, which names the field and its value, if a number is not positive; None is."""
    for name in names:
        value = getattr(config, name)
        check(config, value is None or value > 0, name, "positive")


def check_choices(config: Any) -> None:
    """Raises ValueError if a field of Literal type has none of its values, or a number is not finite."""
    for name, kind in _types_of(type(config)).items():
        value, alternatives = getattr(config, name), (kind, *typing.get_args(kind))
        numbers = value if isinstance(value, tuple) else (value,)
        check(config, all(math.isfinite(n) for n in numbers if isinstance(n, float)), name, "finite")
        for choices in [typing.get_args(one) for one in alternatives if typing.get_origin(one) is Literal]:
            fits = value in choices or (value is None and type(None) in alternatives)
            check(config, fits, name, f"one of {', '.join(map(str, choices))}")


def _types_of(kind: type[Any]) -> dict[str, Any]:
    """The annotation of each field of a dataclass. A base class that is none may annotate attributes, too."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


# --- command lines ----------------------------------------------------------------------------------------------------


def parse(
    kind: Callable[..., T],
    arguments: Sequence[str] | None,
    program: str | None = None,
    default: Any = tyro.MISSING_NONPROP,
    **options: Any,
) -> T:
    """Return `kind` called with, or made of, command-line arguments, as `--data.root vl-root --steps 100`.

    Fields that no argument names have their value of `default`. With a `program`, help and errors are printed, and end
    it; without, ValueError is raised, which names the argument.
    """
    make = functools.partial(tyro.cli, kind, args=arguments, default=default, use_underscores=True, **options)
    if program is not None:
        return make(prog=program)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return make(prog="", add_help=False)
    except SystemExit:
        raise ValueError(_text_of_box(printed.getvalue())) from None


def parse_known(kind: Callable[..., T], arguments: Sequence[str] | None, *more: Any, **options: Any) -> tuple[T, list]:
    """Return what `parse` returns, and the arguments that name none of its fields."""
    return parse(kind, arguments, *more, return_unknown_args=True, **options)  # ty: ignore[invalid-explicit-return]


def _text_of_box(printed: str) -> str:
    """What tyro prints in a box, as one line without the box's title."""
    _, *lines = [line.strip("│ ") for line in printed.splitlines() if any(map(str.isalnum, line))] or [""]
    return " ".join(lines).partition(" For full helptext")[0]


def _weights(texts: list[str]) -> dict[str, float | None]:
    found = {}
    for name, separator, weight in (text.partition(":") for text in texts):
        if name in found:
            raise ValueError(f"{name} is there twice; name each once")
        found[name] = float(weight) if separator else None
    return found


def weight_texts(weights: Mapping[str, float | None]) -> list[str]:
    return [name if weight is None else f"{name}:{weight}" for name, weight in weights.items()]


Weights = Annotated[
    Mapping[str, float | None],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME[:WEIGHT] ...",
        instance_from_str=_weights,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=weight_texts,
    ),
]
"""Names, each with its weight or without: on a command line `cc3m:3.0 sbu:0.8`."""


def override(config: T, arguments: Sequence[str]) -> T:
    """Return the config with command-line arguments applied, all at once: fields that belong together change together.

    Raises ValueError, which names the argument, if there is no such field or its value does not fit.
    """
    return parse(type(config), arguments, default=config) if arguments else config


def named_fields(config: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the dotted fields of the config that command-line arguments name, each with the config's value of it."""
    found = {}
    for argument in arguments:
        path = argument[2:].partition("=")[0].replace("-", "_") if argument.startswith("--") else ""
        for name in (path, re.sub(r"(^|\.)no_(\w+)$", r"\1\2", path)):
            with contextlib.suppress(AttributeError):
                found[name] = functools.reduce(getattr, name.split("."), config)
    return found


def as_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the command line that sets these dotted fields."""
    found = []
    for path, value in values.items():
        parent, _, name = path.rpartition(".")
        if isinstance(value, bool):
            found.append(f"--{path}" if value else f"--{parent + '.' if parent else ''}no_{name}")
        elif isinstance(value, Mapping):
            found += [f"--{path}", *weight_texts(value)]
        elif isinstance(value, tuple | list):
            found += [f"--{path}", *map(str, value)]
        else:
            found.append(f"--{path}={value}")
    return found


def changed_fields(config: Any, base: Any = None, prefix: str = "") -> dict[str, Any]:
    """Return the dotted plain fields that differ from `base`, or from their defaults, each with its value.

    override(base, as_arguments(...)) of them gives the config again.
    """
    found = {}
    for field in dataclasses.fields(config):
        path, value = f"{prefix}{field.name}", getattr(config, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        before = default if base is None else getattr(base, field.name)
        if dataclasses.is_dataclass(value):
            found |= changed_fields(value, before if dataclasses.is_dataclass(before) else None, f"{path}.")
        elif value != before:
            found[path] = value
    return found


def override_values(config: Any, values: dict[str, Any]) -> Any:
    """The config with every dotted field of `values` set, all at once; KeyError names one that does not exist."""
    tree: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if not hasattr(config, name):
            raise KeyError(f"{type(config).__name__} has no field {name}")
        tree.setdefault(name, {})[rest] = value
    changes = {
        name: inner[""] if "" in inner else override_values(getattr(config, name), inner)
        for name, inner in tree.items()
    }
    return dataclasses.replace(config, **changes)


# --- JSON -----------------------------------------------------------------------------------------------------------


def to_json(config: Any) -> dict:
    """The config as nested dicts of plain values, for config.json and reports."""
    return dataclasses.asdict(config)


def from_json(kind: type, values: dict, where: str) -> Any:
    """The inverse of to_json for the dataclass `kind`. A field that is missing is younger than the file and takes its
    default; ValueError names `where` and the fields that we do not know."""
    types = _types_of(kind)
    unknown = sorted(values.keys() - types.keys())
    if unknown:
        raise ValueError(
            f"{where}: {kind.__name__} has no field {', '.join(unknown)}; the file is of another version of this code"
        )

    def value(name: str) -> Any:
        found, wanted = values[name], types[name]
        if dataclasses.is_dataclass(wanted) and isinstance(found, dict):
            return from_json(wanted, found, where)
        if dataclasses.is_dataclass(wanted) or not _fits(found, wanted):
            raise ValueError(f"{where}: {kind.__name__}.{name} is {found!r}, which is no {wanted}; the file is damaged")
        return tuple(found) if isinstance(found, list) else found

    return kind(**{name: value(name) for name in values})


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value from JSON may be that of a field with this annotation."""
    kind, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if kind is Mapping:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    if inner:  # of several types
        return any(value is None if option is type(None) else _fits(value, option) for option in inner)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return wanted is Any or type(value) is wanted


def flat(values: dict, prefix: str = "") -> dict[str, object]:
    """Nested dicts as one with dotted names; sequences as lists, as JSON gives them back."""
    found = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return found


def differing_fields(now: dict[str, object], before: dict[str, object]) -> list[tuple[str, object, object]]:
    """(name, now, before) of the fields that both have and that differ; one that a file lacks is younger than it."""
    return [(name, now[name], before[name]) for name in now if name in before and now[name] != before[name]]


# --- words ------------------------------------------------------------------------------------------------------------


def _describe(form: dict[str, Any], kind: type[Any]) -> None:
    for field in dataclasses.fields(kind):
        words = _docstrings.get_field_docstring(kind, field.name, ()) or ""
        form["properties"][field.name]["description"] = " ".join(words.split())


# For pydantic, with which Prefect reads a flow's parameters: a name that is no field is an error, and the form of the
# flow UI shows the words.
FORM = {"extra": "forbid", "json_schema_extra": _describe}
