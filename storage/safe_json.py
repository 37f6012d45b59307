"""Reads JSON that others wrote, and makes other people's texts fit for messages.

Every JSON file that the program reads goes through `parse_json`. Every text of such a file in a message, a log or an
artifact goes through `printable` or `short_repr`.
"""

import json
import reprlib
from typing import Any

_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}
_NAMES[type(None)] = "null"

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def parse_json(
    data: bytes | bytearray | memoryview | str,
    where: str,
    wanted: type | tuple[type, ...] = dict,
    fix: str = "write or fetch it again",
) -> Any:
    """Return the value of a JSON text in UTF-8, with or without a byte order mark.

    NaN and Infinity are read as Python writes them; whoever asks for a number checks that it is finite.

    Args:
        data: The text.
        where: The file, and the line or member of it, for messages.
        wanted: The type of the value, or several; object: any.
        fix: What to do about a text that is not JSON, for messages.

    Raises:
        ValueError: Names `where`. The text is not JSON or not UTF-8, nested too deep, or of another type.
    """
    try:
        text = (data if isinstance(data, str) else str(data, "utf-8")).removeprefix("\ufeff")
        value = json.loads(text)
    except RecursionError:  # without the traceback of all the levels
        raise ValueError(f"{printable(where)} is nested too deep; {fix}") from None
    except ValueError as error:
        raise ValueError(f"{printable(where)} is not JSON, or is torn: {printable(error)[:200]}; {fix}") from error
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    if wanted is not object and type(value) not in kinds:  # by type(): true is no number
        names = " or ".join(_NAMES[kind] for kind in kinds)
        raise ValueError(f"{printable(where)} holds {_NAMES[type(value)]}, not {names}; {fix}")
    return value


def printable(text: object) -> str:
    """str(text) on one line; characters that control a terminal or reverse text are escaped."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def short_repr(value: object, limit: int = 60) -> str:
    """The repr of an untrusted value for a message, cut short however large or deep it is."""
    text = printable(_SHORT.repr(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."
