"""Stand-ins for numpy's arrays in other people's pickles: nothing of numpy is called by the pickle.

`read_pickle(data, names=ARRAY_NAMES)` gives a PickledArray for each array; its numbers are checked and made by `array`.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from storage.safe_json import shown
from storage.safe_pickle import Hostile, StandIn


class PickledArray(StandIn):
    """Stands for a numpy array."""

    __slots__ = ("state",)

    def __init__(self, *state: Any):
        self.state = state

    def build(self, state: Any) -> None:
        self.state = tuple_of(state, 5)[1:]

    def check(self) -> int:
        """Its size in bytes; ValueError where it is no array of plain numbers."""
        shape, dtype, _, raw = tuple_of(self.state, 4)
        if not isinstance(dtype, _Dtype) or not isinstance(raw, str | bytes | PickledBytes):
            raise ValueError("an array of objects")
        return count_of(shape) * dtype.plain().itemsize

    def array(self) -> np.ndarray:
        """A writable copy, in this machine's byte order and C order."""
        shape, dtype, columns_first, raw = self.state
        raw = plain_bytes(raw)
        if self.check() != len(raw):
            raise ValueError(f"an array of {self.check()} bytes, of which {len(raw)} are there")
        array = np.frombuffer(raw, dtype.plain()).reshape(shape, order="F" if columns_first else "C")
        return array.astype(array.dtype.newbyteorder("="), order="C")


class _Dtype(StandIn):
    """Stands for a numpy dtype: a plain number."""

    __slots__ = ("kind", "order")

    def __init__(self, kind: Any, *_: Any):
        if not isinstance(kind, str):
            raise Hostile(f"a numpy.dtype of {type(kind).__name__}")
        self.kind, self.order = kind, "<"
        self.plain()

    def build(self, state: Any) -> None:
        # (version, byte order, sub-array, names, fields, ...): what has parts is no number.
        if not isinstance(state, tuple) or len(state) < 5 or any(part is not None for part in state[2:5]):
            raise Hostile("an array of records")
        self.order = state[1]
        self.plain()

    def plain(self) -> np.dtype:
        if not re.fullmatch(r"[fiu][1248]|b1", self.kind) or self.order not in ("<", ">", "|", "="):
            raise Hostile(f"an array of {shown(self.kind)}")
        return np.dtype(("" if self.order == "|" else self.order) + self.kind)


class PickledBytes:
    """Bytes as Python 3 pickles them for Python 2; encoded only when needed, as a pickle may name them often."""

    __slots__ = ("text",)

    def __init__(self, text: Any, encoding: Any):
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise Hostile(f"_codecs.encode to {shown(encoding)}")
        self.text = text


def plain_bytes(raw: Any) -> bytes:
    """Bytes as a pickle of any protocol has them. ValueError where they are no bytes."""
    text = raw.text if isinstance(raw, PickledBytes) else raw
    if not isinstance(text, str | bytes):
        raise ValueError(f"a {type(text).__name__} where bytes belong")
    return text.encode("latin1") if isinstance(text, str) else text


def tuple_of(value: Any, length: int | None = None) -> tuple:
    if not isinstance(value, tuple) or (len(value) != length if length else len(value) > 32):
        raise ValueError(f"{shown(value)} is no tuple of {length or 'a few'}")
    return value


def count_of(shape: Any) -> int:
    """The number of elements of a shape."""
    count = 1
    for side in tuple_of(shape):
        if type(side) is not int or not 0 <= side < 2**48:
            raise ValueError(f"{shown(side)} is no side of a tensor")
        count *= side
    if count >= 2**48:
        raise ValueError(f"a tensor of {count} numbers")
    return count


def _array_of_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> PickledArray:
    return PickledArray(shape, dtype, order == "F", raw)


def _array(*_: Any) -> PickledArray:
    return PickledArray()


def _scalar(dtype: Any, raw: Any = b"") -> Any:
    if not isinstance(dtype, _Dtype) or len(raw := plain_bytes(raw)) != dtype.plain().itemsize:
        raise ValueError("a number of numpy that is no plain number")
    return np.frombuffer(raw, dtype.plain())[0].item()


def _no_bytes(*_: Any) -> bytes:
    return b""


NUMPY_CORES = ("numpy.core", "numpy._core")  # before its version 2, and since
ARRAY_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): PickledBytes,
    ("__builtin__", "bytes"): _no_bytes,  # how an array without numbers is pickled for Python 2
    ("numpy", "ndarray"): _array,
    ("numpy", "dtype"): _Dtype,
    **{(f"{core}.multiarray", "_reconstruct"): _array for core in NUMPY_CORES},
    **{(f"{core}.numeric", "_frombuffer"): _array_of_buffer for core in NUMPY_CORES},
}
SCALAR_NAMES = {(f"{core}.multiarray", "scalar"): _scalar for core in NUMPY_CORES}
"""Numpy's single numbers, as plain ones."""
