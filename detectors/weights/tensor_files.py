"""Reads the tensors of weight files that others published, and takes off what trainers wrap around them.

A file is torch's, a pickle of numpy arrays, or safetensors. None of it is run: torch reads its own files with
weights_only, storage/pickles.py the pickles.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from storage.pickles import STAND_INS, UnsafePickle, read_pickle
from storage.safe_json import printable, short_repr

_ZIP = b"PK\x03\x04"
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number that torch wrote before it wrote zip files
# The names under which trainers save a state dict beside other things.
_BELOW = ("state_dict", "model_state_dict", "model")
# What data-parallel training and torch.compile put before a module's name.
_WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")
# How many times larger than their file all tensors may be: tied weights share their numbers.
_SHARING = 4


def strip_wrappers(key: str) -> str:
    """Return the name of a tensor without those of wrappers: module.x and module._orig_mod.x are x."""
    return _WRAPPERS.sub("", key)


def unwrapped_names(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return the tensors by `strip_wrappers`; ValueError where two have one."""
    found = {strip_wrappers(name): tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        raise ValueError(f"{file} holds tensors whose names are the same without those of wrappers")
    return found


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a file. Beside them it may hold other things, which are left.

    Raises:
        ValueError: Names the file, and says what it is or holds instead.
    """
    start = _first_bytes(file)
    if is_safetensors(file):
        return read_safetensors(file)[0]
    try:
        if start.startswith((_ZIP, _OLD_TORCH)):
            names = [(call, f"{module}.{name}") for (module, name), call in STAND_INS.items()]
            with torch.serialization.safe_globals(names):
                loaded = torch.load(file, map_location="cpu", weights_only=True)
        else:
            loaded = read_pickle(file.read_bytes())
    except UnsafePickle as error:
        raise _unsafe(file, str(error)) from error
    except Exception as error:  # of any kind: torch's reader checks little of what it reads
        named = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and named:
            raise _unsafe(file, printable(named[1])) from error
        reason = printable(error)[:200] if isinstance(error, ValueError) else type(error).__name__
        raise ValueError(f"{file} is torn or no weight file ({reason}); fetch it again") from error
    while isinstance(loaded, dict) and (inner := next((loaded[n] for n in _BELOW if n in loaded), None)) is not None:
        loaded = inner
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError(
            f"{file} holds no state dict: a dict of named tensors, or one below {' or '.join(_BELOW)}, is needed"
        )
    tensors = {name: _tensor(name, value, file) for name, value in loaded.items()}
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > _SHARING * file.stat().st_size:
        raise ValueError(f"{file} holds tensors larger than itself; they have the same numbers again and again")
    return tensors


def read_safetensors(file: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors by name, and the metadata, of a safetensors file. With tensors=False every tensor is None."""
    _first_bytes(file)
    try:
        with safe_open(file, framework="pt") as stream:
            found = {name: stream.get_tensor(name) if tensors else None for name in stream.keys()}  # noqa: SIM118
            return found, stream.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a safetensors file, or is damaged ({error}); fetch or convert it again"
        ) from error


def is_safetensors(file: Path) -> bool:
    """Return whether a file begins as a safetensors file does."""
    start = _first_bytes(file)
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") < file.stat().st_size


def _first_bytes(file: Path) -> bytes:
    """Raises ValueError if the file is missing or is known to be something else in place of weights."""
    if not Path(file).is_file():
        raise ValueError(f"there is no file of weights {file}")
    with open(file, "rb") as stream:
        start = stream.read(512)
    if not start:
        raise ValueError(f"{file} is empty: fetch it again")
    if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<":
        raise ValueError(f"{file} is a web page, no weights: download the file behind the link")
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(f"{file} is a Git LFS pointer, no weights: run git lfs pull")
    return start


def _unsafe(file: Path, name: str) -> ValueError:
    return ValueError(f"{file} wants to load {name}, which no weights need. Nothing was run; do not trust it")


def _tensor(name: Any, value: Any, file: Path) -> Tensor:
    if isinstance(name, str) and isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
    plain = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    if not isinstance(name, str) or not plain or value.is_quantized:
        raise ValueError(f"{file}: {short_repr(name)} is no tensor but a {type(value).__name__.lower()}")
    return value.detach()
