"""Safe reading of untrusted pickles that contain plain values, numpy arrays and numpy numbers.

A pickle can call any object that it names. This reader maps the allowed names to functions of this file, refuses all
others, and imports nothing.
"""

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np

from storage.safe_json import printable, short_repr
from storage.signatures import describe_foreign


class UnsafePickle(ValueError):
    """Raised if a pickle names an object that is not needed for plain values and arrays."""


class _Dtype:
    """A stand-in for numpy.dtype that accepts only numbers and booleans.

    A pickle could change the state of a real dtype, so that numpy would treat bytes as pointers.
    """

    order: Literal["<", ">", "=", "|"]

    def __init__(self, kind: str, *_: Any):
        if not re.fullmatch(r"[fiu][1248]|b1", kind):
            raise UnsafePickle(f"an array of {short_repr(kind)}")
        self.kind, self.order = kind, "="

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1]

    def plain(self) -> np.dtype:
        return np.dtype(self.kind).newbyteorder(self.order)


class _Array(np.ndarray):
    """A stand-in for numpy.ndarray that accepts only arrays of numbers."""

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, columns_first, raw = state
        super().__setstate__((1, shape, dtype.plain(), columns_first, _raw_bytes(raw)))


def _raw_bytes(raw: str | bytes) -> bytes:
    return raw.encode("latin1") if isinstance(raw, str) else raw  # str if Python 2 pickled it


def _reconstruct(*_: Any) -> _Array:
    return _Array(0, np.uint8)


def _frombuffer(raw: bytes, dtype: _Dtype, shape: tuple[int, ...], order: Literal["C", "F"]) -> np.ndarray:
    return np.frombuffer(raw, dtype.plain()).reshape(shape, order=order)


def _scalar(dtype: _Dtype, raw: str | bytes) -> bool | int | float:
    return np.frombuffer(_raw_bytes(raw), dtype.plain())[0].item()


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise UnsafePickle(f"_codecs.encode to {short_repr(encoding)}")
    return text.encode(encoding)


STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    # Python 3 pickles bytes for Python 2 with the first name, and empty bytes with the second.
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): lambda: b"",
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}
for _core in ("numpy.core", "numpy._core"):  # numpy 1 and numpy 2
    STAND_INS |= {
        (f"{_core}.multiarray", "_reconstruct"): _reconstruct,
        (f"{_core}.multiarray", "scalar"): _scalar,
        (f"{_core}.numeric", "_frombuffer"): _frombuffer,
    }


class _Unpickler(pickle._Unpickler):  # written in Python, because the one in C allocates what a damaged index names
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise UnsafePickle(printable(f"{module}.{name}"[:100]))
        # A new object each time, because a pickle may set attributes of the objects that it names.
        return partial(STAND_INS[module, name])


def read_pickle(data: bytes, encoding: str = "latin1") -> Any:
    """Return the object stored in a pickle. `encoding` is used to decode byte strings that were pickled by Python 2.

    Raises:
        UnsafePickle: the pickle names an object that is not in STAND_INS
        ValueError: the data is truncated or not a pickle. The message begins with "is", so that callers can put the
            file name before it.
    """
    try:
        return _Unpickler(io.BytesIO(data), encoding=encoding).load()
    except (UnsafePickle, MemoryError):
        raise
    except Exception as error:  # a pickle is a program and can raise anything
        reason = f"{type(error).__name__}: {printable(error)[:200]}"
        problem = describe_foreign(data)
        raise ValueError(problem or f"is not a pickle or is truncated: {reason}") from error
