"""Settings as frozen dataclasses: checked when made, read from field=value and JSON, written back as both."""

import dataclasses
import math
import typing
from typing import Any, Literal


def check(config: Any, holds: Any, name: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{type(config).__name__}.{name} is {getattr(config, name)!r}; it must be {wanted}")


def check_choices(config: Any) -> None:
    """ValueError where a field of Literal type has none of its values, or a number is not finite: code, files and the
    command line may name any."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        check(config, all(math.isfinite(n) for n in numbers if isinstance(n, float)), name, "finite")
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            check(config, getattr(config, name) in choices, name, f"one of {', '.join(map(repr, choices))}")


def override(config: Any, assignments: list[str]) -> Any:
    """The config with every `a.b=value` applied, all at once, so that fields that belong together may change together.

    ValueError names a field that does not exist, with those that do.
    """
    tree: dict[str, Any] = {}
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator:
            raise ValueError(
                f"override {assignment!r} has no '='; write field=value, as in optimizer.learning_rate=1e-4"
            )
        *parents, name = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
            if not isinstance(branch, dict):
                raise ValueError(f"override {assignment}: {parent} is given a value and fields at once; give one")
        branch[name] = (text, path)
    return _apply(config, tree)


def _apply(config: Any, tree: dict[str, Any]) -> Any:
    types = typing.get_type_hints(type(config))
    changes = {}
    for name, change in tree.items():
        if name not in types:
            first = change
            while isinstance(first, dict):
                first = next(iter(first.values()))
            raise ValueError(
                f"override {first[1]}={first[0]}: {type(config).__name__} has no field {name!r}; it has "
                f"{', '.join(types)}"
            )
        old = getattr(config, name)
        if isinstance(change, dict) and not dataclasses.is_dataclass(old):
            raise ValueError(f"override: {name} of {type(config).__name__} is a plain value and has no fields")
        changes[name] = _apply(old, change) if isinstance(change, dict) else _parse(change[0], types[name], change[1])
    return dataclasses.replace(config, **changes)


def _parse(text: str, wanted: Any, whole: str) -> Any:
    """`text` as a value of the annotation `wanted`."""
    kind, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if kind is Literal:
        if text in inner:
            return text
        raise ValueError(f"override {whole}={text}: it must be one of {', '.join(inner)}")
    if type(None) in inner:
        return None if text in ("none", "None", "") else _parse(text, inner[0], whole)
    if kind is tuple:
        item = inner[0]
        return tuple(_parse(part, item, whole) for part in text.split(",") if part)
    if wanted is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if wanted in (int, float, str):
        try:
            return int(float(text)) if wanted is int and float(text).is_integer() else wanted(text)
        except ValueError:
            raise ValueError(f"override {whole}={text}: {text!r} is no {wanted.__name__}") from None
    raise ValueError(
        f"override {whole}={text}: it takes a {wanted}, which the command line cannot give; set its fields"
    )


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


def to_json(config: Any) -> dict:
    """The config as nested dicts of plain values, for config.json and reports."""
    return dataclasses.asdict(config)


def from_json(kind: type, values: dict, where: str) -> Any:
    """The inverse of to_json for the dataclass `kind`. A field that is missing is younger than the file and takes its
    default; ValueError names `where` and the fields that we do not know."""
    types = typing.get_type_hints(kind)
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
