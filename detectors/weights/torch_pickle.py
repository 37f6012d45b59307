"""Reads the tensors of published weight files without running any code in them.

The files are torch's (zip files, and the older format) or pickles of numpy arrays. storage/safe_pickle.py interprets
the pickle with stand-ins for the classes that it names; the tensors are then made here from the file's bytes. Neither
numpy's nor torch's own reader is used.
"""

import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from storage.pickled_arrays import ARRAY_NAMES, NUMPY_CORES, PickledArray, count_of, tuple_of
from storage.safe_json import printable, shown
from storage.safe_pickle import Global, Hostile, StandIn, check_key, read_pickle

_ZIP = b"PK\x03\x04"
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number that torch wrote before it wrote zip files
# What detectron2's trainers write beside the model.
_BESIDE_THE_MODEL = ("__author__", "matching_heuristics", "optimizer", "scheduler", "iteration", "epoch")
# How many times larger than their file all tensors may be: tied weights share their numbers.
_SHARING = 4
# What Python's reader of zip files raises for a damaged one.
_TORN = (ValueError, OSError, EOFError, LookupError, ArithmeticError, MemoryError, RuntimeError)
_TORN += (struct.error, zlib.error, zipfile.BadZipFile)


@dataclass(frozen=True)
class WeightFile:
    """The contents of a weight file."""

    tensors: dict[str, Tensor]
    beside: tuple[str, ...]
    """Names of what else it holds: no weights."""
    container: str
    """`torch file` or `pickle of numpy arrays`."""


def read_tensors(file: Path) -> WeightFile:
    """The tensors of a file, by name, at the top or below `model`. ValueError says what the file holds instead."""
    container, loaded = read_weight_file(file)
    model = loaded.get("model", loaded) if isinstance(loaded, dict) else None
    if not isinstance(model, dict) or not model:
        raise ValueError(f"{file} holds no dict of tensors, neither by name nor below 'model'")
    beside = tuple(printable(name) for name in loaded if name != "model") if model is not loaded else ()
    foreign = [name for name in beside if name not in _BESIDE_THE_MODEL]
    if foreign:
        raise ValueError(f"{file} holds {', '.join(foreign[:20])} beside 'model', which no release has")
    return WeightFile(named_tensors(file, model), beside, container)


def read_weight_file(file: Path) -> tuple[str, Any]:
    """WeightFile.container and the value of a torch file or pickle, with stand-ins for its tensors (`named_tensors`).

    ValueError where it is another kind of file, is torn, or names what no weights need.
    """
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
    try:
        if start.startswith(_ZIP):
            return "torch file", _read_zip(file)
        data = file.read_bytes()
        if start.startswith(_OLD_TORCH):
            return "torch file", _read_old_torch(data)
        return "pickle of numpy arrays", read_pickle(data, names=_NAMES)[0]
    except Hostile as error:
        raise ValueError(
            f"{file} wants to load {error}, which no weights need. Nothing was run; do not trust it"
        ) from error
    except _TORN as error:
        raise ValueError(f"{file} is torn or no weight file ({printable(error)[:200]}); fetch it again") from error


def named_tensors(file: Path, named: dict[Any, Any]) -> dict[str, Tensor]:
    """The tensors of a dict in read_weight_file's value. ValueError names what is no tensor, or too large."""
    tensors, made, left = {}, {}, _SHARING * file.stat().st_size
    try:
        for name, value in named.items():
            if not isinstance(name, str) or not isinstance(value, _Tensor | PickledArray):
                what = value.name if isinstance(value, _Other) else type(value).__name__.strip("_").lower()
                raise ValueError(f"{shown(name)} is no tensor but a {what}")
            left -= value.check()
            if left < 0:
                raise ValueError("its tensors are larger than the file; they hold the same numbers again and again")
            if id(value) not in made:
                is_array = isinstance(value, PickledArray)
                made[id(value)] = torch.from_numpy(value.array()) if is_array else value.tensor()
            tensors[name] = made[id(value)]
    except _TORN as error:
        raise ValueError(f"{file}: {printable(error)[:200]}") from error
    return tensors


# --- tensors of torch -------------------------------------------------------------------------------------------------

_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


class _Storage:
    """The numbers of a torch file, read once, for the first tensor that uses them."""

    __slots__ = ("count", "dtype", "flat", "key", "read")

    def __init__(self, dtype: torch.dtype, count: int, key: str, read: Callable[[str], bytes]):
        self.dtype, self.count, self.key, self.read = dtype, count, key, read
        self.flat: Tensor | None = None

    def tensor(self) -> Tensor:
        """[count]."""
        if self.flat is None:
            raw = self.read(self.key)
            if len(raw) != self.count * self.dtype.itemsize:
                raise ValueError(f"a storage of {self.count} numbers of {self.dtype} has {len(raw)} bytes")
            self.flat = torch.frombuffer(bytearray(raw), dtype=self.dtype)
        return self.flat


class _Storages(dict[str, _Storage]):
    """The storages that a pickle of torch names, by key."""

    def __init__(self, read: Callable[[str], bytes]):
        super().__init__()
        self.read = read

    def named(self, identity: Any) -> _Storage:
        """identity: ("storage", type, key, device, count), before there were zip files also a part of it or None."""
        if not isinstance(identity, tuple) or len(identity) not in (5, 6) or identity[0] != "storage":
            raise ValueError("a persistent id that is no storage")
        kind, key, _, count = identity[1:5]
        if identity[5:] not in ((), (None,)):
            raise ValueError("a storage that is a part of another")
        if not isinstance(kind, Global) or kind.name not in _STORAGES or not isinstance(key, str):
            raise ValueError("a storage of an unknown type")
        found = self.setdefault(key, _Storage(_STORAGES[kind.name], count_of((count,)), key, self.read))
        if (found.dtype, found.count) != (_STORAGES[kind.name], count):
            raise ValueError(f"a storage {shown(key)} of two types or sizes")
        return found


@dataclass(frozen=True, eq=False)
class _Tensor(StandIn):
    """Stands for a tensor."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def check(self) -> int:
        """Its size in bytes; ValueError where it lies outside its storage."""
        count = count_of(self.shape)
        count_of(self.strides)
        if len(self.strides) != len(self.shape):
            raise ValueError(f"a tensor of shape {self.shape} with {len(self.strides)} strides")
        last = self.offset + sum((side - 1) * stride for side, stride in zip(self.shape, self.strides, strict=True))
        if count and not 0 <= self.offset <= last < self.storage.count:
            raise ValueError(f"a tensor outside its storage of {self.storage.count} numbers")
        return count * self.storage.dtype.itemsize

    def tensor(self) -> Tensor:
        if not count_of(self.shape):
            return torch.zeros(self.shape, dtype=self.storage.dtype)
        tensor = self.storage.tensor().as_strided(self.shape, self.strides, self.offset)
        return tensor if tensor.numel() == self.storage.count else tensor.clone()


class _Other(StandIn):
    """Stands for values beside the weights, such as numpy's scalars."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name


def _read_zip(file: Path) -> Any:
    """Torch's format since 1.6: data.pkl, and an uncompressed member for each storage."""
    archive = zipfile.ZipFile(file)  # open as long as a storage may be read: its list of members is read once
    members = {member.filename: member for member in archive.infolist()}
    if len(members) != len(archive.infolist()):
        raise ValueError("two of its members have one name")
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1 or f"{pickles[0][:-8]}constants.pkl" in members:
        raise ValueError("a zip file, and no state dict of torch")
    folder = pickles[0].removesuffix("data.pkl")
    # Members may lie on each other, or be written small: reading all of them must not take more than the file.
    if sum(member.file_size for member in members.values()) > file.stat().st_size:
        raise ValueError("its members are larger than the file")
    order = folder + "byteorder"
    if order in members and archive.read(order) != b"little":
        raise ValueError("its numbers are of a machine whose big end comes first")
    storages = _Storages(lambda key: archive.read(f"{folder}data/{key}"))
    return read_pickle(archive.read(pickles[0]), names=_NAMES, persistent=storages.named)[0]


def _read_old_torch(data: bytes) -> Any:
    """Torch's format before 1.6: several pickles, then for each storage its count and numbers."""
    spans: dict[str, tuple[int, int]] = {}

    def read(key: str) -> bytes:
        start, end = spans[key]
        return data[start:end]

    storages = _Storages(read)
    _, offset = read_pickle(data)
    version, offset = read_pickle(data, offset)
    machine, offset = read_pickle(data, offset)
    if version != 1001 or not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise ValueError("of another version than torch's 1001, or of a machine whose big end comes first")
    value, offset = read_pickle(data, offset, _NAMES, storages.named)
    keys, offset = read_pickle(data, offset)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or set(keys) != storages.keys():
        raise ValueError("its list of storages is not of its tensors")
    for key in keys:
        end = offset + 8 + storages[key].count * storages[key].dtype.itemsize
        if int.from_bytes(data[offset : offset + 8], "little") != storages[key].count or end > len(data):
            raise ValueError(f"its storage {printable(key)[:100]} is not whole")
        spans[key] = offset + 8, end
        offset = end
    return value


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or type(offset) is not int:
        raise ValueError("a tensor without a storage")
    return _Tensor(storage, offset, tuple_of(shape), tuple_of(strides))


# --- what a file may name ---------------------------------------------------------------------------------------------


def _ordered_dict(pairs: Any = None) -> dict:
    if pairs is None:
        return {}
    if type(pairs) is not list:
        raise ValueError("an OrderedDict of no pairs")
    found = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError("an OrderedDict of no pairs")
        check_key(pair[0])
        found[pair[0]] = pair[1]
    pairs.clear()  # a list that is named often would give a whole dict each time
    return found


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _other(name: str) -> Callable[..., _Other]:
    return lambda *_: _Other(name)


_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    **ARRAY_NAMES,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
# What training programs save beside the weights: counters, best metrics and settings.
_BESIDE = [(f"{core}.multiarray", "scalar") for core in NUMPY_CORES]
_BESIDE += [("collections", "Counter"), ("__builtin__", "set"), ("builtins", "set")]
_BESIDE += [("torch", "Size"), ("torch", "device"), *(("torch", str(dtype)[6:]) for dtype in _STORAGES.values())]
_BESIDE += [tuple(name.split(".")) for name in _STORAGES]  # a type of storages is named and never called
_NAMES |= {(module, name): _other(f"{module}.{name}") for module, name in _BESIDE}
