"""Settings as frozen dataclasses: checked on construction, parsed from command lines by tyro, saved as JSON.

`--help` and Prefect's UI show the comment next to a field, or the docstring below it.
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
from tyro import _docstrings  # tyro has no public function for the description of a field

from storage.safe_json import printable, short_repr

T = TypeVar("T")

# --- checks -----------------------------------------------------------------------------------------------------------


def check(config: Any, holds: Any, name: str, wanted: str) -> None:
    """Raise a ValueError about the field `name` unless `holds` is true. `wanted` describes the allowed values."""
    if not holds:
        raise ValueError(f"{type(config).__name__}.{name} is {getattr(config, name)!r}; it must be {wanted}")


def check_positive(config: Any, *names: str) -> None:
    """Raise ValueError if one of the named fields is not positive. None is allowed."""
    for name in names:
        value = getattr(config, name)
        check(config, value is None or value > 0, name, "positive")


def check_choices(config: Any) -> None:
    """Raise ValueError if a field has a value that is not in its Literal type, or a number that is not finite."""
    for name, kind in _types_of(type(config)).items():
        value, alternatives = getattr(config, name), (kind, *typing.get_args(kind))
        numbers = value if isinstance(value, tuple) else (value,)
        check(config, all(math.isfinite(n) for n in numbers if isinstance(n, float)), name, "finite")
        for choices in [typing.get_args(type_) for type_ in alternatives if typing.get_origin(type_) is Literal]:
            fits = value in choices or (value is None and type(None) in alternatives)
            check(config, fits, name, f"one of {', '.join(map(str, choices))}")


def _types_of(kind: type[Any]) -> dict[str, Any]:
    """Return the type of each field of a dataclass, by name."""
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
    """Call a function or create a dataclass with command-line arguments such as `--data.root vl-root --steps 100`.

    Fields without an argument take their value from `default`. If `program` is given, help and errors are printed and
    the process exits. If it is None, an error raises a ValueError that names the argument.
    """
    make = functools.partial(tyro.cli, kind, args=arguments, default=default, use_underscores=True, **options)
    if program is not None:
        return make(prog=program)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return make(prog="", add_help=False)
    except SystemExit:
        raise ValueError(_unbox(printed.getvalue())) from None


def parse_known(kind: Callable[..., T], arguments: Sequence[str] | None, *more: Any, **options: Any) -> tuple[T, list]:
    """Parse arguments as `parse` does. Return the result, and the arguments that match no field."""
    return parse(kind, arguments, *more, return_unknown_args=True, **options)  # ty: ignore[invalid-explicit-return]


def _unbox(printed: str) -> str:
    """Return the text of a box that tyro printed, as one line and without the box's title."""
    _, *lines = [line.strip("│ ") for line in printed.splitlines() if any(map(str.isalnum, line))] or [""]
    return " ".join(lines).partition(" For full helptext")[0]


def _parse_weights(texts: list[str]) -> dict[str, float | None]:
    weights = {}
    for name, separator, weight in (text.partition(":") for text in texts):
        if name in weights:
            raise ValueError(f"{name} is given twice; give each name once")
        weights[name] = float(weight) if separator else None
    return weights


def weight_texts(weights: Mapping[str, float | None]) -> list[str]:
    return [name if weight is None else f"{name}:{weight}" for name, weight in weights.items()]


Weights = Annotated[
    Mapping[str, float | None],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME[:WEIGHT] ...",
        instance_from_str=_parse_weights,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=weight_texts,
    ),
]
"""Names with optional weights, such as `cc3m:3.0 sbu:0.8` on a command line."""


def override(config: T, arguments: Sequence[str]) -> T:
    """Return a copy of the config with the values that command-line arguments set.

    All arguments are applied in one step, because the fields are checked together. Raises ValueError, naming the
    argument, if there is no such field or its value does not fit.
    """
    return parse(type(config), arguments, default=config) if arguments else config


def named_fields(config: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the fields that command-line arguments set, as a dict from dotted name to value in `config`."""
    fields = {}
    for argument in arguments:
        path = argument[2:].partition("=")[0].replace("-", "_") if argument.startswith("--") else ""
        for name in (path, re.sub(r"(^|\.)no_(\w+)$", r"\1\2", path)):
            with contextlib.suppress(AttributeError):
                fields[name] = functools.reduce(getattr, name.split("."), config)
    return fields


def as_arguments(values: Mapping[str, Any]) -> list[str]:
    """Convert `values`, whose keys are dotted field names, to command-line arguments that set these fields."""
    arguments = []
    for path, value in values.items():
        parent, _, name = path.rpartition(".")
        if isinstance(value, bool):
            arguments.append(f"--{path}" if value else f"--{parent + '.' if parent else ''}no_{name}")
        elif isinstance(value, Mapping):
            arguments += [f"--{path}", *weight_texts(value)]
        elif isinstance(value, tuple | list):
            arguments += [f"--{path}", *map(str, value)]
        else:
            arguments.append(f"--{path}={value}")
    return arguments


def changed_fields(config: Any, base: Any = None, prefix: str = "") -> dict[str, Any]:
    """Return the fields whose values differ from those in `base`, as a dict from dotted name to value in `config`.

    If `base` is None, the defaults are used instead. `override(base, as_arguments(changed_fields(config, base)))`
    equals `config`. `prefix` is put before each name.
    """
    changes = {}
    for field in dataclasses.fields(config):
        path, value = f"{prefix}{field.name}", getattr(config, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        before = default if base is None else getattr(base, field.name)
        if dataclasses.is_dataclass(value):
            changes |= changed_fields(value, before if dataclasses.is_dataclass(before) else None, f"{path}.")
        elif value != before:
            changes[path] = value
    return changes


def override_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of `config` with new field values, keyed by dotted name. Raises KeyError for an unknown field."""
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
    """Return the config as nested dicts of plain values, for config.json and reports."""
    return dataclasses.asdict(config)


def from_json(kind: type[Any], values: dict, location: str) -> Any:
    """Create a dataclass of type `kind` from the output of `to_json`. Missing fields get their defaults.

    Raises ValueError, naming `location` and the field, if a field is unknown, missing or invalid.
    """
    types = _types_of(kind)
    unknown = sorted(values.keys() - types.keys())
    if unknown:
        names = printable(", ".join(unknown))[:200]
        raise ValueError(f"{location}: {kind.__name__} has no field {names}; another version of this code wrote it")
    no_default = [one.name for one in dataclasses.fields(kind) if one.default is one.default_factory]
    if missing := [name for name in no_default if name not in values]:
        raise ValueError(f"{location}: {kind.__name__}.{missing[0]} is missing; add it")

    def value(name: str) -> Any:
        item, expected = values[name], types[name]
        if dataclasses.is_dataclass(expected) and isinstance(item, dict):
            return from_json(expected, item, location)
        if dataclasses.is_dataclass(expected) or not _fits(item, expected):
            raise ValueError(f"{location}: {kind.__name__}.{name} is {short_repr(item)}, not {expected}; correct it")
        return tuple(item) if isinstance(item, list) else item

    fields = {name: value(name) for name in values}
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error


def _fits(value: Any, expected: Any) -> bool:
    """Return True if a value from JSON fits a field with this annotation."""
    kind, inner = typing.get_origin(expected), typing.get_args(expected)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if kind is Mapping:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if inner:  # a union
        return any(value is None if option is type(None) else _fits(value, option) for option in inner)
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return expected is Any or type(value) is expected


def flat(values: dict, prefix: str = "") -> dict[str, object]:
    """Flatten nested dicts into one dict with dotted keys. Tuples become lists, as in a JSON round trip."""
    flattened = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flattened |= flat(value, f"{prefix}{name}.")
        else:
            flattened[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flattened


def differing_fields(now: dict[str, object], before: dict[str, object]) -> list[tuple[str, object, object]]:
    """Return (name, now, before) of each field whose value has changed. Skips fields that `before` lacks."""
    # A field that `before` lacks was added to the code later.
    return [(name, now[name], before[name]) for name in now if name in before and now[name] != before[name]]


# --- descriptions -----------------------------------------------------------------------------------------------------


def _describe(form: dict[str, Any], kind: type[Any]) -> None:
    for field in dataclasses.fields(kind):
        description = _docstrings.get_field_docstring(kind, field.name, ()) or ""
        form["properties"][field.name]["description"] = " ".join(description.split())


# For pydantic, which Prefect uses to read a flow's parameters: an unknown field is an error, and the form of the flow
# UI shows the descriptions.
FORM = {"extra": "forbid", "json_schema_extra": _describe}
