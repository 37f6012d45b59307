"""Untrusted JSON, and untrusted texts in messages.

Every JSON file that the program reads goes through `parse_json`. Every text of such a file in a message, a log or an
artifact goes through `printable` or `shown`.
"""

import codecs
import json
import math
import re
import reprlib
from typing import Any

_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}
_NAMES[type(None)] = "null"
# Any number that no C type holds has 19 digits in a row or an exponent of three digits. To find these fast, all digits
# are replaced by zeros: a regular expression would take as long as the decoder.
_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_HUGE = (b"0" * 19, b"0e000", b"0e+000")
_SURROGATE = re.compile(r"\\u[dD][89abAB]|\\u[dD][c-fC-F]")

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 200, 200


def parse_json(
    data: bytes | bytearray | memoryview | str,
    where: str,
    wanted: type | tuple[type, ...] = dict,
    fix: str = "write or fetch it again",
    nan: bool = False,
) -> Any:
    """The value of a JSON text in UTF-8, with or without a byte order mark.

    where: the file, and the line or member of it, for messages. wanted: the type of the value, or several; object: any.
    fix: what to do about a text that is not JSON. nan: whether NaN and Infinity are numbers, as Python writes them.

    ValueError names `where`: not JSON, not UTF-8, nested too deep, of another type, an object with one name twice, a
    number beyond 64 bits or float64, or half of a surrogate pair, which cannot be written to any file.
    """
    try:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        text, zeros = raw.removeprefix(codecs.BOM_UTF8).decode().strip(" \t\r\n"), raw.translate(_ZEROS)
        huge = _HUGE[0] in zeros or _HUGE[1] in zeros or _HUGE[2] in zeros
        value, end = _DECODERS[huge, nan].raw_decode(text)
        if end != len(text):
            raise ValueError(f"more text behind its value, from character {end} on")
        if "\\u" in text and _SURROGATE.search(text):
            _check_texts(value)
    except RecursionError:  # without the traceback of all the levels
        raise ValueError(f"{printable(where)} is nested too deep; {fix}") from None
    except ValueError as error:
        raise ValueError(f"{printable(where)} is not JSON, or is torn: {printable(error)}; {fix}") from error
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    if wanted is not object and type(value) not in kinds:  # by type(): true is no number
        names = " or ".join(_NAMES[kind] for kind in kinds)
        raise ValueError(f"{printable(where)} holds {_NAMES[type(value)]}, not {names}; {fix}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set()
        again = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"an object has the name {shown(again)} twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise ValueError(f"the number {text[:24]}... has more than 64 bits")
    return value


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:24]} is too large")
    return value


def _make(huge: bool, nan: bool) -> json.JSONDecoder:
    checks = {"parse_int": _int, "parse_float": _float} if huge else {}
    return json.JSONDecoder(object_pairs_hook=_unique, parse_constant=None if nan else _no_number, **checks)


# Made once, because that takes longer than decoding a sample's JSON. Only texts that need it check each number.
_DECODERS = {(huge, nan): _make(huge, nan) for huge in (False, True) for nan in (False, True)}


def _check_texts(value: Any) -> None:
    """ValueError for half of a surrogate pair, in a name or a text."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError:
                raise ValueError(f"the text {shown(one)} holds half of a surrogate pair") from None


def printable(text: object) -> str:
    """str(text) on one line; characters that control a terminal or reverse text are escaped."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: object, limit: int = 60) -> str:
    """The repr of an untrusted value for a message, cut short however large or deep it is."""
    text = printable(_SHORT.repr(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."
