"""Pickles that other people wrote, read without importing or running anything that they name.

`read_pickle` interprets the opcodes itself, with limits on their number, on the memo, on lengths, depth and size.
Memory and time are proportional to the file. It takes the opcodes that plain values, numpy's arrays and torch's tensors
need, of any protocol and of Python 2 and 3; a name stands for what the caller says it does.
"""

import codecs
import struct
from collections.abc import Callable, Mapping
from typing import Any

from storage.safe_json import printable, shown

# Limits that no file of a release comes near: RefCOCO+'s has seven million opcodes, weights have thousands.
_MAX_OPCODES = 2**25
_MAX_DEPTH = 64
_MAX_ITEMS = 2**26  # with everything counted as often as it is reached: the size of its repr
_MAX_NUMBER = 64  # bytes of a whole number
_MAX_LINE = 200  # bytes of a number or name in a text protocol
_INDEX = 2**60  # keys beyond it could be chosen such that all have the same hash

Names = Mapping[tuple[str, str], Callable[..., Any]]


class Hostile(ValueError):
    """Says what a pickle asked for that nobody gave it."""


class StandIn:
    """Stands in a pickle's values for an object that is not made. `build` takes what the pickle says of its state."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        pass


class Global:
    """A name in a pickle, and what is called where the pickle calls it. The pickle cannot change it."""

    __slots__ = ("call", "name")

    def __init__(self, name: str, call: Callable[..., Any]):
        self.name, self.call = name, call


def read_pickle(
    data: bytes,
    start: int = 0,
    names: Names | None = None,
    persistent: Callable[[Any], Any] | None = None,
    encoding: str = "latin1",
) -> tuple[Any, int]:
    """The value of the pickle that begins at `start`, and where it ends.

    names: (module, name) -> what its calls give; values of it are dicts, lists, tuples, texts, bytes, numbers, and what
    these return. persistent: what a persistent id stands for. encoding: of Python 2's plain strings.

    Hostile where it names anything else; ValueError for what is torn, no pickle or beyond a limit. A repr of the value
    is bounded, but may be large: `safe_json.shown` cuts it.
    """
    reader = _Reader(data, start, names or {}, persistent, encoding)
    try:
        value = reader.run()
    except (IndexError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"torn at byte {reader.position}: {type(error).__name__} {printable(error)}"[:200]) from error
    _check_nesting(value)
    return value, reader.position


def check_key(key: Any) -> None:
    """ValueError where a value may not be the key of a dict: the hash of nested tuples takes for ever, and whole
    numbers can be chosen so that all have the same."""
    if type(key) is not str and not (type(key) in (int, bool) and -_INDEX < key < _INDEX):
        raise ValueError(f"a {type(key).__name__} is the key of a dict, {shown(key)}; texts and indices can be")


def _check_nesting(value: Any) -> None:
    """ValueError where the value holds itself, is nested too deep, or holds the same so often that its repr is huge."""
    found: dict[int, tuple[int, int] | None] = {}  # id -> size and depth; None: it is being counted
    waiting = [(value, False)] if type(value) in _CONTAINERS else []
    while waiting:
        one, counted = waiting.pop()
        if not counted and id(one) in found:
            continue
        inner = [item for item in (one.values() if type(one) is dict else one) if type(item) in _CONTAINERS]
        if not counted and inner:
            found[id(one)] = None
            waiting.append((one, True))
            if any(found.get(id(item), ()) is None for item in inner):
                raise ValueError("one of its values holds itself")
            waiting += [(item, False) for item in inner]
            continue
        size = 1 + len(one) + sum(found[id(item)][0] for item in inner)
        depth = 1 + max((found[id(item)][1] for item in inner), default=0)
        if size > _MAX_ITEMS:
            raise ValueError(f"it holds the same values again and again, more than {_MAX_ITEMS} in all")
        if depth > _MAX_DEPTH:
            raise ValueError(f"its values are nested more than {_MAX_DEPTH} deep")
        found[id(one)] = size, depth


class _Reader:
    """The machine that a pickle is a program of: a stack, marks in it, and a memo."""

    def __init__(self, data: bytes, start: int, names: Names, persistent: Callable[[Any], Any] | None, encoding: str):
        self.data, self.position, self.encoding = data, start, encoding
        self.names, self.persistent = names, persistent
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, opcodes = self.data, _OPCODES
        for _ in range(_MAX_OPCODES):
            opcode = data[self.position]
            self.position += 1
            if opcode == _STOP:
                return self.stack.pop()
            opcodes[opcode](self)
        raise ValueError(f"it has more than {_MAX_OPCODES} opcodes")

    # What stands behind an opcode.

    def line(self) -> bytes:
        start = self.position
        end = self.data.index(b"\n", start)
        self.position = end + 1
        return self.data[start:end]

    def short_line(self) -> str:
        line = self.line()
        if len(line) > _MAX_LINE:
            raise ValueError(f"a number or name of {len(line)} bytes")
        return line.decode()

    def number(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def length(self, layout: struct.Struct) -> int:
        length, left = self.number(layout), len(self.data) - self.position
        if not 0 <= length <= left:
            raise ValueError(f"{length} bytes at byte {self.position}, of which {left} are there")
        return length

    def counted(self, layout: struct.Struct) -> bytes:
        length = self.length(layout)
        start = self.position
        self.position = start + length
        return self.data[start : start + length]

    # The stack.

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        if len(self.marked) > _MAX_DEPTH:
            raise ValueError(f"its values are nested more than {_MAX_DEPTH} deep")
        self.marked.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        """What stands above the last mark; it is taken away."""
        items, self.stack = self.stack, self.marked.pop()
        return items

    def last(self, kind: type) -> Any:
        """The value on top, which stays and must be of this kind."""
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"a {type(self.stack[-1]).__name__} where a {kind.__name__} belongs")
        return self.stack[-1]

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.to_mark()

    # The memo.

    def put(self, index: int) -> None:
        # A pickler counts from 0 or 1, and each value takes a byte at least.
        if not 0 <= index <= self.position:
            raise ValueError(f"an index of {index} in the memo at byte {self.position}")
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    # Values.

    def text(self, layout: struct.Struct) -> None:
        self.push(str(self.counted(layout), "utf-8", "surrogatepass"))

    def plain_text(self, raw: bytes) -> None:
        """Python 2's str."""
        self.push(str(raw, self.encoding))

    def quoted(self) -> None:
        line = self.line()
        if len(line) < 2 or line[0] != line[-1] or line[:1] not in (b"'", b'"'):
            raise ValueError("a text without its quotes")
        raw = line[1:-1]
        self.stack.append(str(codecs.escape_decode(raw)[0] if b"\\" in raw else raw, self.encoding))

    def whole_number(self) -> None:
        line = self.short_line()
        self.stack.append(line == "01" if line in ("00", "01") else int(line.removesuffix("L")))

    def binary_number(self, layout: struct.Struct) -> None:
        raw = self.counted(layout)
        if len(raw) > _MAX_NUMBER:
            raise ValueError(f"a whole number of {len(raw)} bytes")
        self.push(int.from_bytes(raw, "little", signed=True))

    def items(self, values: list[Any]) -> None:
        target = self.last(dict)
        if len(values) % 2:
            raise ValueError("a key without a value")
        for index in range(0, len(values), 2):
            if type(values[index]) is not str:
                check_key(values[index])
            target[values[index]] = values[index + 1]

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        if type(key) is not str:
            check_key(key)
        self.last(dict)[key] = value

    def new_dict(self) -> None:
        values = self.to_mark()
        self.push({})
        self.items(values)

    def append(self) -> None:
        value = self.stack.pop()
        self.last(list).append(value)

    def extend(self) -> None:
        values = self.to_mark()
        self.last(list).extend(values)

    def new_tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("a tuple of more than there is")
        values = tuple(self.stack[-count:])
        self.stack[-count:] = [values]

    # Names, and what is done with them.

    def name(self, module: str, name: str) -> None:
        dotted = f"{module}.{name}"
        if (module, name) not in self.names:
            raise Hostile(printable(dotted[:100]))
        self.push(Global(dotted, self.names[module, name]))

    def name_of_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name that is no text")
        self.name(module, name)

    def call(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if type(called) is not Global or type(arguments) is not tuple:
            raise ValueError(f"a call of a {type(called).__name__}")
        self.push(called.call(*arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, StandIn):
            target.build(state)
        elif type(target) is not dict:  # what an OrderedDict has beside its items is left away
            raise Hostile(f"changes of a {type(target).__name__}")

    def persistent_id(self) -> None:
        if self.persistent is None:
            raise Hostile("a persistent id")
        self.push(self.persistent(self.stack.pop()))


_CONTAINERS = (list, tuple, dict)
_U1, _U2, _U4, _U8 = (struct.Struct(f"<{code}") for code in "BHIQ")
_I4, _FLOAT = struct.Struct("<i"), struct.Struct(">d")
_STOP = ord(".")


def _refused(opcode: int) -> Callable[[_Reader], None]:
    def refuse(reader: _Reader) -> None:
        raise ValueError(f"byte {reader.position - 1} is {opcode:#04x}, no opcode that plain values need")

    return refuse


_KNOWN: dict[bytes, Callable[[_Reader], Any]] = {
    b"\x80": lambda reader: reader.number(_U1),  # PROTO
    b"\x95": lambda reader: reader.length(_U8),  # FRAME
    b"(": _Reader.mark,
    b"0": _Reader.pop,
    b"1": _Reader.to_mark,
    b"2": lambda reader: reader.push(reader.stack[-1]),
    b"p": lambda reader: reader.put(int(reader.short_line())),
    b"q": lambda reader: reader.put(reader.number(_U1)),
    b"r": lambda reader: reader.put(reader.number(_U4)),
    b"\x94": lambda reader: reader.put(len(reader.memo)),
    b"g": lambda reader: reader.get(int(reader.short_line())),
    b"h": lambda reader: reader.get(reader.number(_U1)),
    b"j": lambda reader: reader.get(reader.number(_U4)),
    b"N": lambda reader: reader.push(None),
    b"\x88": lambda reader: reader.push(True),
    b"\x89": lambda reader: reader.push(False),
    b"I": _Reader.whole_number,
    b"L": _Reader.whole_number,
    b"J": lambda reader: reader.push(reader.number(_I4)),
    b"K": lambda reader: reader.push(reader.number(_U1)),
    b"M": lambda reader: reader.push(reader.number(_U2)),
    b"\x8a": lambda reader: reader.binary_number(_U1),
    b"\x8b": lambda reader: reader.binary_number(_I4),
    b"F": lambda reader: reader.push(float(reader.short_line())),
    b"G": lambda reader: reader.push(reader.number(_FLOAT)),
    b"S": _Reader.quoted,
    b"U": lambda reader: reader.plain_text(reader.counted(_U1)),
    b"T": lambda reader: reader.plain_text(reader.counted(_I4)),
    b"V": lambda reader: reader.push(str(reader.line(), "raw-unicode-escape")),
    b"\x8c": lambda reader: reader.text(_U1),
    b"X": lambda reader: reader.text(_U4),
    b"\x8d": lambda reader: reader.text(_U8),
    b"C": lambda reader: reader.push(reader.counted(_U1)),
    b"B": lambda reader: reader.push(reader.counted(_U4)),
    b"\x8e": lambda reader: reader.push(reader.counted(_U8)),
    b"\x96": lambda reader: reader.push(reader.counted(_U8)),  # BYTEARRAY8
    b"]": lambda reader: reader.push([]),
    b"l": lambda reader: reader.push(reader.to_mark()),
    b"a": _Reader.append,
    b"e": _Reader.extend,
    b"}": lambda reader: reader.push({}),
    b"d": _Reader.new_dict,
    b"s": _Reader.set_item,
    b"u": lambda reader: reader.items(reader.to_mark()),
    b")": lambda reader: reader.push(()),
    b"t": lambda reader: reader.push(tuple(reader.to_mark())),
    b"\x85": lambda reader: reader.new_tuple(1),
    b"\x86": lambda reader: reader.new_tuple(2),
    b"\x87": lambda reader: reader.new_tuple(3),
    b"c": lambda reader: reader.name(reader.short_line(), reader.short_line()),
    b"\x93": _Reader.name_of_stack,
    b"R": _Reader.call,
    b"b": _Reader.build,
    b"Q": _Reader.persistent_id,
}
_OPCODES = [_KNOWN.get(bytes([opcode]), _refused(opcode)) for opcode in range(256)]
