"""Read published weight files, and remove the wrappers that training programs put around tensors and their names.

A file is in torch's format, a safetensors file, or a pickle of numpy arrays. No code in it is run: torch reads its own
format with weights_only, and storage/pickles.py reads the pickles.
"""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from storage.pickles import STAND_INS, UnsafePickle, read_pickle
from storage.safe_json import printable, short_repr
from storage.signatures import START_BYTES, check_start

_ZIP = b"PK\x03\x04"
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # magic number of torch's format before zip files
# Keys under which trainers save a state dict next to other values.
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "module")
# Names that data-parallel training, torch.compile, activation checkpointing and trainers add to those of modules.
_WRAPPERS = re.compile(r"^((module|model|_[a-z_]+)\.)+|(?<=\.)_(orig_mod|(fsdp|checkpoint)_wrapped_module)\.")
# Largest ratio of the size of all tensors to the size of their file; above 1 because tied weights are stored once.
_MAX_EXPANSION = 4


def strip_wrappers(key: str) -> str:
    """Return a tensor's name without the names of wrappers: module._orig_mod.x becomes x."""
    return _WRAPPERS.sub("", key)


def unwrap_names(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Apply strip_wrappers to all names. Raises ValueError if two names become the same."""
    unwrapped = {strip_wrappers(name): tensor for name, tensor in tensors.items()}
    if len(unwrapped) < len(tensors):
        raise ValueError(f"{file} has tensors with the same name, apart from the prefixes of wrappers")
    return unwrapped


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the state dict of a weight file, as tensors by name. Raises ValueError if the file is unusable."""
    start = _read_start(file)
    if is_safetensors(file):
        return read_safetensors(file)[0]
    try:
        if start.startswith((_ZIP, _OLD_TORCH)):
            names: list[Callable | tuple[Callable, str]] = [
                (call, f"{module}.{name}") for (module, name), call in STAND_INS.items()
            ]
            with torch.serialization.safe_globals(names):
                loaded = torch.load(file, map_location="cpu", weights_only=True)
        else:
            loaded = read_pickle(file.read_bytes())
    except UnsafePickle as error:
        raise _unsafe(file, str(error)) from error
    except Exception as error:  # torch's reader checks little, so damaged files raise many types
        match = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and match:
            raise _unsafe(file, printable(match[1])) from error
        reason = printable(error)[:200] if isinstance(error, ValueError) else type(error).__name__
        raise ValueError(f"{file} is damaged or not a weight file ({reason}); download it again") from error
    while (
        isinstance(loaded, dict)
        and (inner := next((loaded[n] for n in _STATE_DICT_KEYS if n in loaded), None)) is not None
    ):
        loaded = inner
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError(
            f"{file} has no state dict; a dict of named tensors is needed, or one under {' or '.join(_STATE_DICT_KEYS)}"
        )
    tensors = {name: _to_tensor(name, value, file) for name, value in loaded.items()}
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > _MAX_EXPANSION * file.stat().st_size:
        raise ValueError(f"{file} has tensors that are much larger than the file, because they repeat the same numbers")
    return tensors


def read_safetensors(file: Path, tensors: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors by name and the metadata of a safetensors file. With tensors=False, every tensor is None."""
    _read_start(file)
    try:
        with safe_open(file, framework="pt") as stream:
            by_name = {name: stream.get_tensor(name) if tensors else None for name in stream.keys()}  # noqa: SIM118
            return by_name, stream.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a safetensors file, or is damaged ({error}); download or convert it again"
        ) from error


def is_safetensors(file: Path) -> bool:
    """Return True if the start of a weight file looks like a safetensors header."""
    start = _read_start(file)
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") < file.stat().st_size


def _read_start(file: Path) -> bytes:
    """Read the first bytes. Raises ValueError if the file is missing, empty, a web page, a pointer or packed."""
    if not Path(file).is_file():
        raise ValueError(f"weight file {file} does not exist")
    with open(file, "rb") as stream:
        start = stream.read(START_BYTES)
    if not start:
        raise ValueError(f"{file} is empty; download it again")
    # The name of the first member is at byte 30. In torch's zip files, it ends with data.pkl.
    check_start(file, start, ("zip",) if b"/data.pkl" in start[30:] else ())
    return start


def _unsafe(file: Path, name: str) -> ValueError:
    return ValueError(f"{file} wants to load {name}, which weights do not need. Nothing was run; do not trust it")


def _to_tensor(name: Any, value: Any, file: Path) -> Tensor:
    if isinstance(name, str) and isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    if not isinstance(name, str) or not is_dense or value.is_quantized:
        raise ValueError(f"{file}: {short_repr(name)} is not a tensor but a {type(value).__name__.lower()}")
    return value.detach()
