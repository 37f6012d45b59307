"""Published weight files -> tensors, without running anything that stands in them.

Files of torch go through its `weights_only` reader. A pickle of numpy arrays goes through one of its own, in which
stand-ins take the place of everything that a pickle may name: neither numpy nor anything else sees what the file says.
"""

import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ZIP = b"PK\x03\x04"
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number that torch wrote before it wrote zip files
# What detectron2's trainers write beside the model.
_BESIDE_THE_MODEL = ("__author__", "matching_heuristics", "optimizer", "scheduler", "iteration", "epoch")
# What a damaged file makes an unpickler raise; a random byte in it can lead anywhere.
_TORN = (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
_TORN += (ArithmeticError, MemoryError, struct.error, pickle.UnpicklingError)


@dataclass(frozen=True)
class WeightFile:
    """What stood in a file."""

    tensors: dict[str, Tensor]
    beside: tuple[str, ...]
    """Names of what else there was: no weights."""
    container: str
    """`torch file` or `pickle of numpy arrays`."""


def read_tensors(file: Path) -> WeightFile:
    """The tensors of a file, by name; they stand alone in it or below `model`. ValueError says what it is instead."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    with open(file, "rb") as stream:
        start = stream.read(512)
    if not start:
        raise ValueError(f"{file} is empty: fetch it again")
    if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<":
        raise ValueError(f"{file} is a web page, no weights: download the file behind the link")
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < file.stat().st_size:
        raise ValueError(f"{file} is a safetensors file already; load it as it is")
    if start.startswith((_ZIP, _OLD_TORCH)):
        container, loaded = "torch file", _read_torch(file)
    else:
        container, loaded = "pickle of numpy arrays", _read_pickle(file)
    model = loaded.get("model", loaded) if isinstance(loaded, dict) else None
    if not isinstance(model, dict) or not model:
        raise ValueError(f"{file} holds no dict of tensors, neither by name nor below 'model'")
    beside = tuple(str(name) for name in loaded if name != "model") if model is not loaded else ()
    foreign = [name for name in beside if name not in _BESIDE_THE_MODEL]
    if foreign:
        raise ValueError(f"{file} holds {', '.join(foreign)} beside 'model', which no release has")
    tensors = {}
    for name, value in model.items():
        if isinstance(value, _Array) and value.array is not None:
            value = torch.from_numpy(value.array)
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"{file}: {name!r} is no tensor but a {type(value).__name__.strip('_')}")
        tensors[name] = value.detach()
    return WeightFile(tensors, beside, container)


def _read_torch(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted:
            raise ValueError(_distrust(file, wanted[1])) from error
        raise ValueError(f"{file} is no file of torch, or a damaged one; fetch it again") from error
    except _TORN as error:
        reason = str(error).split("\n")[0][:200]
        raise ValueError(f"{file} is torn or no file of torch ({reason}); fetch it again") from error


def _read_pickle(file: Path) -> Any:
    try:
        with open(file, "rb") as stream:
            return _PlainUnpickler(stream, encoding="latin1").load()
    except _Hostile as error:
        raise ValueError(_distrust(file, str(error))) from error
    except _TORN as error:
        reason = str(error).split("\n")[0][:200]
        raise ValueError(f"{file} is torn or no weight file ({reason}); fetch it again") from error


def _distrust(file: Path, what: str) -> str:
    return f"{file} wants to load {what}, which no weights need. Nothing was run; do not trust it"


class _Hostile(pickle.UnpicklingError):
    """Names what a pickle asked for."""


class _Array:
    """Stands for a numpy array in a pickle; numpy's own code never sees what the file says."""

    __slots__ = ("array",)

    def __init__(self):
        self.array: np.ndarray | None = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, columns_first, raw = state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray):
            raise _Hostile("an array of objects")
        order = "F" if columns_first else "C"
        array = np.frombuffer(raw, dtype.plain()).reshape(tuple(int(side) for side in shape), order=order)
        self.array = array.astype(array.dtype.newbyteorder("="), order="C")  # a copy, which torch may own


class _Dtype:
    """Stands for a numpy dtype: a plain number."""

    __slots__ = ("kind", "order")

    def __init__(self, kind: str):
        self.kind, self.order = kind, "<"
        self.plain()

    def __setstate__(self, state: tuple) -> None:
        # (version, byte order, sub-array, names, fields, ...): what has parts is no number.
        if any(part is not None for part in state[2:5]):
            raise _Hostile("an array of records")
        self.order = state[1]

    def plain(self) -> np.dtype:
        if not re.fullmatch(r"[fiu][1248]|b1", self.kind) or self.order not in ("<", ">", "|", "="):
            raise _Hostile(f"an array of {self.kind!r}")
        return np.dtype(("" if self.order == "|" else self.order) + self.kind)


class _StandIn:
    """Is called where a pickle calls `name`; nothing about it can be changed by the pickle."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _Hostile("a function with changes")


def _empty_array(*_: Any) -> _Array:
    return _Array()


def _array_of_buffer(raw: bytes, dtype: _Dtype, shape: tuple, order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


def _dtype(kind: Any, *_: Any) -> _Dtype:
    if not isinstance(kind, str):
        raise _Hostile(f"a numpy.dtype of {type(kind).__name__}")
    return _Dtype(kind)


def _latin1(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise _Hostile(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


_STAND_INS = {
    ("__builtin__", "bytes"): _StandIn(_no_bytes),  # how an array without numbers is pickled for Python 2
    ("numpy", "ndarray"): _StandIn(_empty_array),
    ("numpy", "dtype"): _StandIn(_dtype),
    ("_codecs", "encode"): _StandIn(_latin1),
    ("collections", "OrderedDict"): _StandIn(dict),
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _StandIn(_empty_array) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _StandIn(_array_of_buffer) for core in ("core", "_core")},
}


class _PlainUnpickler(pickle.Unpickler):
    """Dicts, lists, strings, numbers and arrays of them; whatever else a pickle names is refused, not imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise _Hostile(f"{module}.{name}")
        return _STAND_INS[module, name]
