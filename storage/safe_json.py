"""Safe reading of untrusted JSON, and safe printing of untrusted text.

All JSON files are read with `parse_json`. Text from such files is passed through `printable` or `short_repr` before it
is put into a message, a log or an artifact.
"""

import json
import reprlib
from collections.abc import Callable
from typing import Any

from storage.signatures import describe_foreign

_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
_NAMES |= {bool: "true or false", type(None): "null"}

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def parse_json(
    data: bytes | bytearray | memoryview | str,
    location: str,
    wanted: type | tuple[type, ...] = dict,
    fix: str = "write or fetch it again",
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse JSON text in UTF-8, UTF-16 or UTF-32, with or without a byte order mark.

    NaN and Infinity are accepted, because Python writes them. A caller that needs finite numbers must check for them.

    Args:
        location: origin of the text, for error messages: a file, with a line or member if there are several
        wanted: allowed type or types of the value; `object` allows any
        fix: advice for the user if the text is invalid, for error messages
        pairs: function that makes the value of each object from its names and values; default: `dict`, where the last
            value of a name counts

    Raises:
        ValueError: the text is not Unicode, not JSON or too deeply nested, or the type of its value is not in `wanted`
    """
    try:
        text = data if isinstance(data, str) else str(data, json.detect_encoding(bytes(data[:4])))
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=pairs)
    except RecursionError:  # without the traceback of all levels
        raise ValueError(f"{printable(location)} is nested too deeply; {fix}") from None
    except ValueError as error:
        if problem := describe_foreign(data.encode() if isinstance(data, str) else bytes(data)):
            raise ValueError(f"{printable(location)} {problem}") from error
        raise ValueError(f"{printable(location)} is truncated or not JSON: {printable(error)[:200]}; {fix}") from error
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    if wanted is not object and type(value) not in kinds:  # not isinstance: true is not a number
        names = " or ".join(_NAMES[kind] for kind in kinds)
        raise ValueError(f"{printable(location)} holds {_NAMES[type(value)]}, not {names}; {fix}")
    return value


def printable(text: object) -> str:
    """Return str(text) on one line. Characters that control a terminal or reverse text are escaped."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def short_repr(value: object, limit: int = 60) -> str:
    """Return the repr of an untrusted value, cut to `limit` characters. The value may be large or deeply nested."""
    text = printable(_SHORT.repr(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."
