# TEMPORARY: leaves when the last program reads its command line by tyro
"""Settings as frozen dataclasses: checked when made, read from field=value and JSON, written back as both.

A program lists the fields of its settings in --help, and the flow UI shows them as a form. Both take the words from the
docstring below a field, or from the comment beside it.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import math
import sys
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal


def nearest(typed, known):
    found = difflib.get_close_matches(typed, known, 1)
    return f"; did you mean {found[0]}?" if found else ""


def make_parser(name, description):
    return argparse.ArgumentParser(name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


# --- checks -----------------------------------------------------------------------------------------------------------


def check(config: Any, holds: Any, name: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{type(config).__name__}.{name} is {getattr(config, name)!r}; it must be {wanted}")


def check_choices(config: Any) -> None:
    """ValueError where a field of Literal type has none of its values, or a number is not finite: code, files and the
    command line may name any."""
    for name, kind in _types_of(type(config)).items():
        value = getattr(config, name)
        numbers = value if isinstance(value, tuple) else (value,)
        check(config, all(math.isfinite(n) for n in numbers if isinstance(n, float)), name, "finite")
        choices = _choices(kind)
        check(config, not choices or value in choices, name, f"one of {', '.join(map(str, choices))}")


def _choices(kind: Any) -> tuple:
    """The values that an annotation Literal[...], or Literal[...] | None, allows; () for every other."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    inner = typing.get_args(kind)
    return (*_choices(inner[0]), None) if type(None) in inner and _choices(inner[0]) else ()


def _types_of(kind: type[Any]) -> dict[str, Any]:
    """The annotation of each field of a dataclass. A base class that is none may annotate attributes, too."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


# --- field=value ------------------------------------------------------------------------------------------------------


def override(config: Any, assignments: Sequence[str]) -> Any:
    """The config with every `a.b=value` applied, all at once, so that fields that belong together may change together.

    ValueError names a field that does not exist, with those that do.
    """
    return _apply(type(config), config, _tree(assignments))


def from_assignments(kind: type, assignments: Sequence[str], **given: Any) -> Any:
    """A `kind` of these `a.b=value`; a field that is not named has its default, or its value of `given`."""
    return _apply(kind, None, _tree(assignments), given)


def assignments_of(config: Any, base: Any = None) -> list[str]:
    """`a.b=value` of each field in which the config differs from `base`, or from its fields' defaults: the inverse of
    override(base, ...) and of from_assignments. ValueError names a value that field=value cannot give."""
    found = []
    for path, value, kind in _changes(config, base):
        text = as_text(value)
        if _parse(text, kind, path) != value:
            raise ValueError(f"{type(config).__name__}.{path} is {value!r}, which field=value cannot give")
        found.append(f"{path}={text}")
    return found


def changed_fields(config: Any) -> list[str]:
    """Dotted names of the fields that do not have their defaults."""
    return [path for path, _, _ in _changes(config)]


def _changes(config: Any, base: Any = None, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value, annotation) of each plain field that differs from `base`, or from its default."""
    types = _types_of(type(config))
    for field in dataclasses.fields(config):
        path, value = f"{prefix}{field.name}", getattr(config, field.name)
        before = default_of(field) if base is None else getattr(base, field.name)
        if dataclasses.is_dataclass(value):
            yield from _changes(value, before if dataclasses.is_dataclass(before) else None, f"{path}.")
        elif value != before:
            yield path, value, types[field.name]


def default_of(field: dataclasses.Field) -> Any:
    """The default of a dataclass's field; MISSING where it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def as_text(value: Any) -> str:
    """A plain value as field=value has it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    if isinstance(value, Mapping):
        return ",".join(name if one is None else f"{name}:{as_text(one)}" for name, one in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tree(assignments: Sequence[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator:
            raise ValueError(f"{assignment!r} has no '='; write field=value, as in optimizer.learning_rate=1e-4")
        *parents, name = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
            if not isinstance(branch, dict):
                raise ValueError(f"{assignment}: {parent} is given a value and fields at once; give one")
        branch[name] = (text, path)
    return tree


def _apply(kind: type[Any], config: Any, tree: dict[str, Any], given: dict[str, Any] | None = None) -> Any:
    types, changes = _types_of(kind), dict(given or {})
    defaults = {field.name: default_of(field) for field in dataclasses.fields(kind)}
    for name, change in tree.items():
        if name not in types or name in (given or {}):
            first = change
            while isinstance(first, dict):
                first = next(iter(first.values()))
            known = [one for one in types if one not in (given or {})]
            hint = f"it has {', '.join(known)}{nearest(name, known)}"
            raise ValueError(f"{first[1]}={first[0]}: {kind.__name__} has no field {name!r}; {hint}")
        old = defaults[name] if config is None else getattr(config, name)
        if isinstance(change, dict) and not dataclasses.is_dataclass(old):
            raise ValueError(f"{name} of {kind.__name__} is a plain value and has no fields")
        changes[name] = (
            _apply(type(old), old, change) if isinstance(change, dict) else _parse(change[0], types[name], change[1])
        )
    if config is not None:
        return dataclasses.replace(config, **changes)
    needed = [name for name, value in defaults.items() if value is dataclasses.MISSING and name not in changes]
    if needed:
        raise ValueError(f"{kind.__name__}.{needed[0]} is not set; give {needed[0]}=...")
    return kind(**changes)


def _parse(text: str, wanted: Any, whole: str) -> Any:
    """`text` as a value of the annotation `wanted`."""
    kind, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if kind is Literal:
        if text in inner:
            return text
        raise ValueError(f"{whole}={text}: it must be one of {', '.join(inner)}")
    if type(None) in inner:
        return None if text in ("none", "None", "") else _parse(text, inner[0], whole)
    if kind is tuple:
        item = inner[0]
        return tuple(_parse(part, item, whole) for part in text.split(",") if part)
    if kind is Mapping:
        return _parse_mapping(text, inner[1], whole)
    if wanted is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if wanted in (int, float, str):
        with contextlib.suppress(ValueError):
            return wanted(text)
        with contextlib.suppress(ValueError):
            if wanted is int and float(text).is_integer():  # as 1e3
                return int(float(text))
        raise ValueError(f"{whole}={text}: {text!r} is no {wanted.__name__}")
    if wanted is bool:
        raise ValueError(f"{whole}={text}: it must be true or false")
    raise ValueError(f"{whole}={text}: it takes a {wanted}, which the command line cannot give; set its fields")


def _parse_mapping(text: str, wanted: Any, whole: str) -> dict[str, Any]:
    """`name:value,name:value`; a value that may be None may be left out."""
    found = {}
    for part in filter(None, text.split(",")):
        name, separator, value = part.partition(":")
        if name in found:
            raise ValueError(f"{whole}={text}: {name} is there twice; name each once")
        if not separator and type(None) not in typing.get_args(wanted):
            raise ValueError(f"{whole}={text}: {name} has no value; write {name}:value")
        found[name] = _parse(value, wanted, whole)
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


@functools.cache
def field_words(kind: type) -> dict[str, str]:
    """What the source says about each field of a dataclass, and of its bases: the docstring below it, or the comments
    above or beside it. A comment that is indented behind its # goes on with the one above."""
    found = {}
    for base in reversed([one for one in kind.__mro__ if dataclasses.is_dataclass(one)]):
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
        own = {number for number in comments if lines[number - 1].lstrip().startswith("#")}  # lines without code
        goes_on = {number for number in own if comments[number].startswith("#  ")}
        (definition,) = ast.parse(source).body
        assert isinstance(definition, ast.ClassDef)
        body = definition.body
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                words = str(following.value.value)
            else:
                first, last = statement.lineno, statement.end_lineno or statement.lineno
                while first - 1 in own - goes_on:
                    first -= 1
                while last + 1 in goes_on:
                    last += 1
                words = " ".join(comments.get(line, "").lstrip("# ") for line in range(first, last + 1))
            found[statement.target.id] = " ".join(words.split())
    return found


def field_help(config: Any, without: Sequence[str] = ()) -> str:
    """The fields of a dataclass, or with the values of an instance, as --help lists them."""
    return "\n".join(_field_lines(config, "", without))


def _field_lines(config: Any, prefix: str, without: Sequence[str] = ()) -> Iterator[str]:
    kind = config if isinstance(config, type) else type(config)
    types, words = _types_of(kind), field_words(kind)
    for field in dataclasses.fields(kind):
        value = default_of(field) if config is kind else getattr(config, field.name)
        if field.name in without:
            continue
        if dataclasses.is_dataclass(value):
            yield from textwrap.wrap(f"{prefix}{field.name}.*: {words[field.name]}", 100, subsequent_indent=" " * 6)
            yield from _field_lines(value, f"{prefix}{field.name}.")
            continue
        given = "" if value is dataclasses.MISSING else f"={as_text(value)}"
        yield f"{prefix}{field.name}{given}  ({_kind(types[field.name])})"
        yield from textwrap.wrap(words[field.name], 100, initial_indent=" " * 6, subsequent_indent=" " * 6)


def field_values(config: Any, prefix: str = "") -> dict[str, list[str]]:
    """The dotted name of each field of a dataclass, or of an instance, with the values that it may have: those of a
    Literal or of a bool, for every other []."""
    kind, found = config if isinstance(config, type) else type(config), {}
    types = _types_of(kind)
    for field in dataclasses.fields(kind):
        value = default_of(field) if config is kind else getattr(config, field.name)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found |= field_values(value, f"{name}.")
        else:
            values = (True, False) if types[field.name] is bool else _choices(types[field.name])
            found[name] = [as_text(one) for one in values]
    return found


def _kind(wanted: Any) -> str:
    """An annotation, as --help has it."""
    kind, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if kind is Literal:
        return " | ".join(inner)
    if kind is tuple:
        return ",".join([_kind(inner[0])] * (1 if inner[-1] is ... else len(inner))) + (
            ",..." if inner[-1] is ... else ""
        )
    if kind is Mapping:
        number, *optional = typing.get_args(inner[1]) or (inner[1],)
        return f"name[:{_kind(number)}],..." if optional else f"name:{_kind(number)},..."
    if inner:
        return " | ".join("none" if one is type(None) else _kind(one) for one in inner)
    return {str: "text", bool: "true | false"}.get(wanted, wanted.__name__)


def add_fields(parser: argparse.ArgumentParser, config: Any, note: str = "", without: Sequence[str] = ()) -> None:
    """Have the program take field=value, into `fields`, and list the fields of the config in --help; `note` instead
    where it is None."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("fields", nargs="*", metavar="field=value", help="settings; lists by comma, or none")
    listed = textwrap.indent(field_help(config, without), "  ") if config else ""
    parser.epilog = f"fields:\n{listed}" if config else note


def _describe(form: dict[str, Any], kind: type) -> None:
    for name, words in field_words(kind).items():
        form["properties"][name]["description"] = words


# For pydantic, with which Prefect reads a flow's parameters: a name that is no field is an error, and the form of the
# flow UI shows the words.
FORM = {"extra": "forbid", "json_schema_extra": _describe}


def add_recipe_fields(
    parser: argparse.ArgumentParser, recipes: Mapping[str, Callable[[], Any]], arguments: Sequence[str] | None
) -> None:
    """Have the program take field=value behind RECIPE, into `fields`; RECIPE --help lists those of that recipe."""
    arguments, recipe = sys.argv[1:] if arguments is None else arguments, None
    if {"-h", "--help"} & {*arguments}:
        named = [argument for argument in arguments if not argument.startswith("-")]
        from training.program import find_recipe

        with contextlib.suppress(ValueError):
            recipe = find_recipe(named[0], recipes)() if named else None
    add_fields(parser, recipe, "RECIPE --help lists the fields of that recipe, with its values.")
