"""storage.safe_json: what strangers may write as JSON, and what may be printed of it."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.safe_json import parse_json, printable, shown

# A text, and what the error must name beside the file.
REFUSED = {
    "torn": (b'{"a": [1, 2', "delimiter"),
    "empty": (b"", "Expecting value"),
    "two values": (b"{} {}", "more text"),
    "deep lists": (b"[" * 10**5, "too deep"),
    "deep objects": (b'{"a":' * 10**5, "too deep"),
    "not a number": (b'{"a": NaN}', "NaN"),
    "infinite": (b'{"a": -Infinity}', "-Infinity"),
    "overflows float64": (b'{"a": 1e400}', "1e400"),
    "overflows without a plus": (b'{"a": -2.5E+0999}', "too large"),
    "400 digits": (b'{"a": ' + b"7" * 400 + b"}", "64 bits"),
    "400 digits and a fraction": (b'{"a": ' + b"7" * 400 + b".5}", "too large"),
    "5000 digits": (b'{"a": ' + b"7" * 5000 + b"}", "64 bits"),
    "65 bits": (b'{"a": 18446744073709551616}', "64 bits"),
    "65 bits with a sign": (b'{"a": -9223372036854775809}', "64 bits"),
    "one name twice": (b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b'"),
    "the last of many names twice": (
        b'{"a": {' + b"".join(b'"%d":0,' % i for i in range(30_000)) + b'"29999":0}}',
        "29999",
    ),
    "half a surrogate pair": (b'{"a": ["x\\ud83d"]}', "surrogate"),
    "half a surrogate pair as a name": (b'{"\\uDE00": 1}', "surrogate"),
    "half a surrogate pair as text": ('{"a": "\ud83d"}', "surrogates"),
    "not UTF-8": (b'{"a": "\xe9"}', "utf-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "utf-8"),
    "a control character": (b'{"a": "\x1b[2J"}', "control character"),
    "another type": (b"[1]", "holds a list, not an object"),
    "no number": (b"true", "holds true or false, not an object"),
}


@pytest.mark.parametrize(("data", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_names_the_file(data, named):
    with pytest.raises(ValueError, match="^folder/file\\.json") as refused:
        parse_json(data, "folder/file.json", fix="fetch it again")
    said = str(refused.value)
    assert named in said
    assert said.endswith("; fetch it again")
    assert said.isprintable()
    assert len(said) < 300


def test_what_is_taken():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "file") == {"a": 1}  # a byte order mark
    assert parse_json(memoryview(b'{"a": "\\ud83d\\ude00"}'), "file") == {"a": "\U0001f600"}
    assert parse_json(b"[18446744073709551615, -9223372036854775808]", "file", list) == [2**64 - 1, -(2**63)]
    assert parse_json(b"[0.00012345678901234567, 1e300]", "file", list) == [0.00012345678901234567, 1e300]
    assert parse_json("null", "file", (dict, type(None))) is None
    assert parse_json("1", "file", object) == 1
    assert math.isnan(parse_json("NaN", "file", float, nan=True))  # metrics.jsonl, as Python wrote it


def test_true_is_no_number():
    with pytest.raises(ValueError, match="file holds true or false, not a number"):
        parse_json("true", "file", int)


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # without halves of surrogate pairs
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=10,
)


@given(_values, st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_all_that_python_writes_comes_back(value, ascii_only):
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode(), "file", object) == value


@given(st.binary(max_size=40) | st.text(st.sampled_from('{}[]",:\\u0d89eE+-.1 aNI'), max_size=40))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_other_bytes_are_a_value_or_a_value_error(data):
    try:
        value = parse_json(data, "file", object)
    except ValueError as refused:
        said = str(refused)
    else:
        said = json.dumps(value)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    assert said.isprintable()


def test_printed_texts_command_no_terminal():
    assert printable("a cat, un caf\xe9, \u4e00\U0001f600") == "a cat, un caf\xe9, \u4e00\U0001f600"
    assert printable("a\x1b[2J\r\nb\x9bc\x00") == r"a\x1b[2J\r\nb\x9bc\x00"
    assert printable("abc\u202egpj.exe\u2066\ud800") == r"abc\u202egpj.exe\u2066\ud800"


def test_shown_values_are_short():
    deep = []
    for _ in range(10**5):
        deep = [deep]
    for value in (deep, "x" * 10**6, ["x" * 1000] * 1000, {"\x1b": "\x1b"}, b"\x1b" * 100):
        assert len(shown(value)) <= 60
        assert shown(value).isprintable()
    assert shown("a cat") == "'a cat'"
