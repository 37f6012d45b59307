"""storage.safe_json: which JSON of other people is read, and which texts are printed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.safe_json import parse_json, printable, short_repr

# A text, and what the error must name beside the file.
REFUSED = {
    "torn": (b'{"a": [1, 2', "delimiter"),
    "deep lists": (b"[" * 10**5, "too deep"),
    "5000 digits": (b'{"a": ' + b"7" * 5000 + b"}", "digits"),
    "a control character": (b'{"a": "\x1b[2J"}', "control character"),
    "another type": (b"[1]", "holds a list, not an object"),
}


@pytest.mark.parametrize(("data", "named"), REFUSED.values(), ids=REFUSED)
def test_refused_texts_name_the_file(data: bytes, named: str):
    with pytest.raises(ValueError, match="^folder/file\\.json") as refused:
        parse_json(data, "folder/file.json", fix="fetch it again")
    message = str(refused.value)
    assert named in message
    assert message.endswith("; fetch it again")
    assert message.isprintable()
    assert len(message) < 300


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
@settings(max_examples=50, deadline=None)
def test_what_python_writes_is_read_with_its_nan_and_infinity(value: object):
    text = json.dumps(value)
    assert repr(parse_json(memoryview(b"\xef\xbb\xbf" + text.encode()), "file", object)) == repr(value)


def test_texts_of_others_are_printed_on_one_short_line():
    assert printable("a cat, un caf\xe9, \u4e00") == "a cat, un caf\xe9, \u4e00"
    assert printable("a\x1b[2J\r\nb\u202egpj.exe\ud800") == r"a\x1b[2J\r\nb\u202egpj.exe\ud800"
    deep = []
    for _ in range(10**5):
        deep = [deep]
    for value in (deep, "x" * 10**6, ["x" * 1000] * 1000, {"\x1b": "\x1b"}):
        assert len(short_repr(value)) <= 60
        assert short_repr(value).isprintable()
