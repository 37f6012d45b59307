"""storage.safe_json: which JSON of other people is read, and which texts are printed."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.safe_json import parse_json, printable, shown

# A text, and what the error must name beside the file.
REFUSED = {
    "torn": (b'{"a": [1, 2', "delimiter"),
    "two values": (b"{} {}", "more text"),
    "deep lists": (b"[" * 10**5, "too deep"),
    "not a number": (b'{"a": NaN}', "NaN"),
    "overflows float64": (b'{"a": 1e400}', "1e400"),
    "400 digits and a fraction": (b'{"a": ' + b"7" * 400 + b".5}", "too large"),
    "5000 digits": (b'{"a": ' + b"7" * 5000 + b"}", "64 bits"),
    "65 bits": (b'{"a": 18446744073709551616}', "64 bits"),
    "65 bits with a sign": (b'{"a": -9223372036854775809}', "64 bits"),
    "one name twice": (b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b'"),
    "one name twice, not the first": (b'{"a": 1, "b": 2, "b": 3}', "'b'"),
    "half a surrogate pair": (b'{"a": ["x\\ud83d"]}', "surrogate"),
    "half a surrogate pair as a name": (b'{"\\uDE00": 1}', "surrogate"),
    "half a surrogate pair as text": ('{"a": "\ud83d"}', "surrogates"),
    "not UTF-8": (b'{"a": "\xe9"}', "utf-8"),
    "a control character": (b'{"a": "\x1b[2J"}', "control character"),
    "another type": (b"[1]", "holds a list, not an object"),
}


@pytest.mark.parametrize(("data", "named"), REFUSED.values(), ids=REFUSED)
def test_refused_texts_name_the_file(data, named):
    with pytest.raises(ValueError, match="^folder/file\\.json") as refused:
        parse_json(data, "folder/file.json", fix="fetch it again")
    message = str(refused.value)
    assert named in message
    assert message.endswith("; fetch it again")
    assert message.isprintable()
    assert len(message) < 300


def test_texts_at_the_limits_are_read():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "file") == {"a": 1}  # a byte order mark
    assert parse_json(memoryview(b'{"a": "\\ud83d\\ude00"}'), "file") == {"a": "\U0001f600"}
    assert parse_json(b"[18446744073709551615, -9223372036854775808]", "file", list) == [2**64 - 1, -(2**63)]
    assert parse_json(b"[0.00012345678901234567, 1e300]", "file", list) == [0.00012345678901234567, 1e300]
    assert parse_json("null", "file", (dict, type(None))) is None
    assert parse_json("1", "file", object) == 1
    assert math.isnan(parse_json("NaN", "file", float, nan=True))  # metrics.jsonl, as Python wrote it
    with pytest.raises(ValueError, match="file holds true or false, not a number"):
        parse_json("true", "file", int)


_texts = st.text(st.characters(exclude_categories=["Cs"]))  # without halves of surrogate pairs
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts,
    lambda inner: st.lists(inner) | st.dictionaries(_texts, inner),
    max_leaves=10,
)


@given(_values, st.booleans())
@settings(max_examples=100)
def test_json_of_python_round_trips(value, ascii_only):
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode(), "file", object) == value


@given(st.binary(max_size=40) | st.text(st.sampled_from('{}[]",:\\u0d89eE+-.1 aNI'), max_size=40))
@settings(max_examples=200)
def test_any_bytes_are_a_value_or_a_value_error(data):
    try:
        value = parse_json(data, "file", object)
    except ValueError as refused:
        message = str(refused)
        assert message.isprintable()
    else:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def test_printable_escapes_control_characters():
    assert printable("a cat, un caf\xe9, \u4e00\U0001f600") == "a cat, un caf\xe9, \u4e00\U0001f600"
    assert printable("a\x1b[2J\r\nb\x9bc\x00") == r"a\x1b[2J\r\nb\x9bc\x00"
    assert printable("abc\u202egpj.exe\u2066\ud800") == r"abc\u202egpj.exe\u2066\ud800"


def test_shown_values_are_short_and_printable():
    deep = []
    for _ in range(10**5):
        deep = [deep]
    for value in (deep, "x" * 10**6, ["x" * 1000] * 1000, {"\x1b": "\x1b"}, b"\x1b" * 100):
        assert len(shown(value)) <= 60
        assert shown(value).isprintable()
    assert shown("a cat") == "'a cat'"
