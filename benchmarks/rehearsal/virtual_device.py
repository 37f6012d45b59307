"""Simulate a GPU: real programs run on tensors of the device `virtual:0`, and every operation is recorded.

    with VirtualDevice() as device:
        model.to(DEVICE); loss = model(batch.to(DEVICE)); loss.backward(); optimizer.step()
    device.operations        operations of the GPU, in order
    device.peak              peak memory of the GPU in bytes

Only the shapes of floating point tensors are kept, so that a step of 128 images takes seconds and no memory. A program
that reads a value of such a tensor gets 1.0. Integers and booleans are computed, because shapes depend on them.

The virtual device raises RuntimeError, with file and line, for operations that mix tensors of CPU and device, as a GPU
does. The host waits for copies, unless they are non-blocking and the host's memory is page-locked. Autocast works as on
CUDA. Kernels of cuDNN and attention that the project calls on CUDA are recorded under their own names.
"""

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from benchmarks.rehearsal.operations import (
    INDEXING,
    Operation,
    Record,
    count_bytes,
    find_tensors,
    has_mask,
    make_operation,
    written_arguments,
)

aten = torch.ops.aten
_FOREACH: tuple[list[Any], ...] = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
_BLOCK = 512  # bytes: the CUDA allocator's block sizes are multiples of it


class _Stream:
    """A stream that does nothing, because operations complete immediately and never have to be waited for."""

    def wait_stream(self, other: "_Stream") -> None: ...
    def wait_event(self, event: None) -> None: ...
    def record_event(self) -> None: ...


class _Module(_DummyBackendModule):
    """The module torch.virtual, with streams and the functions that torch.autocast calls."""

    _initialized = False
    Stream = current_stream = _Stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        """Return an empty state, because the device uses the CPU's generator. torch.random.fork_rng calls this."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def stream(self, stream: _Stream) -> AbstractContextManager:
        return nullcontext()


_setup_privateuseone_for_python_backend("virtual", _Module())
DEVICE = torch.device("virtual", 0)


class VirtualTensor(torch.Tensor):
    """A tensor of the virtual device. `held` is a CPU tensor if the values are known, otherwise a meta tensor."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "VirtualTensor":
        with torch.inference_mode(False):  # views of tensors that were made outside of it must not be inference tensors
            return torch.Tensor._make_wrapper_subclass(
                cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE
            )

    def __init__(self, held: Tensor):
        self.held = held

    @property
    def is_cuda(self) -> bool:  # ty: ignore[incompatible-property-override] never set
        """True, so that programs take the same branches as on a GPU."""
        return True

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"VirtualTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # ty: ignore[incompatible-method-override] torch has no signature
        if _active is None:
            raise RuntimeError(f"{func} was called on the virtual device outside of `with VirtualDevice()`")
        return _active.compute(func, args, kwargs or {})


# --- the device -------------------------------------------------------------------------------------------------------


class VirtualDevice(TorchDispatchMode, Record):
    """Context manager: compute and record operations on the virtual device.

    Attributes:
        held: Bytes of device memory in use.
        held_at_start: Bytes in use when recording began.
        peak: Maximum of `held` since then.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        Record.__init__(self)
        self.held = self.held_at_start = self.peak = 0

    def __enter__(self) -> "VirtualDevice":
        global _active
        if _active is not None:
            raise RuntimeError("only one virtual device can be active at a time")
        _active = self
        self._threads = torch.autograd.is_multithreading_enabled()
        torch.autograd.set_multithreading_enabled(False)  # autograd has no thread for the virtual device
        self._clear, torch.clear_autocast_cache = torch.clear_autocast_cache, _casts.clear  # ty: ignore[invalid-assignment] patched
        for kinds in _FOREACH:
            kinds.append(VirtualTensor)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        global _active
        super().__exit__(exc_type, exc_val, exc_tb)
        for kinds in _FOREACH:
            kinds.remove(VirtualTensor)
        torch.clear_autocast_cache = self._clear  # ty: ignore[invalid-assignment] patched, as above
        torch.autograd.set_multithreading_enabled(self._threads)
        _casts.clear()
        _active = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Handle all calls, including those without a tensor of the device, such as torch.arange(3, device=DEVICE)."""
        return self.compute(func, args, kwargs or {})

    def start(self) -> None:
        """Start a new recording. Tensors that are in use stay counted in `held`."""
        self.operations, self.marks = [], []
        self.held_at_start = self.peak = self.held

    def record(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.peak = max(self.peak, self.held)

    def compute(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Compute a call and return its result. Record the call if it involves the device.

        Raises RuntimeError if the call mixes tensors of CPU and device, which a GPU refuses.
        """
        name, inputs = function._schema.name, find_tensors((args, kwargs))
        ours = [tensor for tensor in inputs if isinstance(tensor, VirtualTensor)]
        hosts = [tensor for tensor in inputs if not isinstance(tensor, VirtualTensor)]
        device = kwargs.get("device")
        on_device = bool(ours) if device is None else torch.device(device).type == DEVICE.type
        if name == "aten::is_pinned":
            return _is_pinned(args[0])
        if not ours and not on_device:
            copies = name in ("aten::pin_memory", "aten::_pin_memory")
            pins = copies or kwargs.pop("pin_memory", False)
            out = args[0].clone() if copies else function(*args, **kwargs)
            if pins:  # remembered here, because without a GPU torch pins nothing
                _pinned.add(out.untyped_storage())
            return out
        if name == "aten::_has_compatible_shallow_copy_type":  # called by Module.to with tensors of both devices
            return False
        if name == "aten::scaled_dot_product_attention":  # without gradients, it is not decomposed before
            return _attention(*args, **kwargs)
        if function._can_decompose():
            return function.decompose(*args, **kwargs)
        if ours and any(_is_stray(host, function, args, kwargs) for host in hosts):
            shapes = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in inputs)
            raise RuntimeError(f"{name} mixes tensors of the CPU and of the device, {shapes}: {_caller_lines()}")
        if name == "aten::copy_":
            out = _copy(*args)
        elif name == "aten::_local_scalar_dense":
            out = function(_to_known(args[0]))
        else:
            out = self._wrap(_call(function, args, kwargs, inputs), function, args, kwargs, on_device)
        operation = make_operation(function, args, kwargs, out)
        copied, waits = _transfer(name, args, kwargs, out, hosts, on_device)
        if copied:
            operation = dataclasses.replace(operation, kernels=1, read=0, written=0, copied=copied)
        if copied or waits:
            operation = dataclasses.replace(operation, waits=waits, location=_caller_lines())
        self.record(operation)
        return out

    def _wrap(self, out: Any, function: Any, args: tuple, kwargs: dict, on_device: bool) -> Any:
        """Wrap a result in tensors of the right device. An in-place call returns the tensor that was passed to it."""
        changed = written_arguments(function, args, kwargs)
        if changed:
            return changed[0] if function._schema.returns else None
        if not on_device:
            return tree_map(_to_known, out)
        return tree_map(lambda value: self.new(value) if isinstance(value, Tensor) else value, out)

    def new(self, tensor: Tensor) -> VirtualTensor:
        """Make a tensor of the device, and count its memory, unless it shares the memory of another tensor."""
        if tensor.device.type == "cpu" and tensor.is_floating_point():
            tensor = _to_meta(tensor)
        storage = tensor.untyped_storage()
        if storage not in _storages:
            size = -(-storage.nbytes() // _BLOCK) * _BLOCK
            _storages.add(storage)
            weakref.finalize(storage, self._free, size)
            self.held += size
        return VirtualTensor(tensor)

    def _free(self, size: int) -> None:
        self.held -= size


_active: Any = None  # a VirtualDevice, while one is entered
_storages: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()  # of the device
_pinned: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()  # of the host, page-locked


# --- transfers between host and device --------------------------------------------------------------------------------

_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
_WAITS |= {"aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave"}
_WAITS |= {"torchvision::nms"}
_COPIES = {"aten::_to_copy", "aten::copy_"}


def _is_stray(host: Tensor, function: Any, args: tuple, kwargs: dict) -> bool:
    """Return True if a GPU would refuse the CPU tensor `host` in this call on the device.

    It accepts sources and targets of copies, indices, and single numbers that are not written to.
    """
    name = function._schema.name
    if name in _COPIES or (name in INDEXING and any(index is host for index in args[1])):
        return False
    return host.dim() > 0 or any(written is host for written in written_arguments(function, args, kwargs))


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, VirtualTensor):
        return target.copy_(_to_known(source))
    if target.held.device.type == "cpu":
        if _is_unknown(source):
            target.held = _to_meta(target)
        else:
            target.held.copy_(_held(source))
    return target


def _transfer(name: str, args: tuple, kwargs: dict, out: Any, hosts: list[Tensor], on_device: bool) -> tuple[int, bool]:
    """Return the bytes that a call copies between host and device, and whether the host waits for it."""
    if name == "aten::copy_":
        if not hosts:
            return 0, False
        asynchronous = len(args) > 2 and args[2]
        return count_bytes(args[1]), not (asynchronous and _is_pinned(hosts[0]))
    if not on_device:  # .to("cpu", non_blocking=True) allocates page-locked memory
        return sum(map(count_bytes, find_tensors(out))), not kwargs.get("non_blocking")
    if name == "aten::_to_copy":
        asynchronous = kwargs.get("non_blocking") and all(map(_is_pinned, hosts))
        return sum(map(count_bytes, hosts)), bool(hosts) and not asynchronous
    copied = sum(count_bytes(host) for host in hosts if host.dim())  # single numbers are arguments of the kernel
    return copied, bool(copied) or name in _WAITS or (name in INDEXING and has_mask(args[1]))


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage() in _pinned


def _caller_lines() -> str:
    """Return the two innermost lines of this project in the call stack (FILE:LINE < FILE:LINE), or "" if none."""
    frame, lines = sys._getframe(), []
    while frame and len(lines) < 2:
        file = frame.f_code.co_filename
        if file != __file__ and "/site-packages/" not in file:
            lines.append(f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


# --- values -----------------------------------------------------------------------------------------------------------


def _call(function: Any, args: tuple, kwargs: dict, inputs: list[Tensor]) -> Any:
    """Compute a call on CPU tensors if all values are known, and otherwise on meta tensors."""
    name = function._schema.name
    kernel = _KERNELS_OF_CUDA.get(name, function)
    if name == "torchvision::nms":
        return torch.arange(len(args[0]))  # keeps all boxes: the maximum
    if name in _WAITS:
        args, kwargs = tree_map(_to_known, (args, kwargs))
        return kernel(*args, **kwargs)
    if _makes_floats(name, args, kwargs) or any(map(_is_unknown, inputs)):
        if written_arguments(function, args, kwargs):
            return None  # it only writes unknown values
        if name in INDEXING:
            args = (args[0], [*_as_indices(args[1])], *args[2:])
        args, kwargs = tree_map(_to_meta, (args, _set_device(kwargs, "meta")))
        return kernel(*args, **kwargs)
    args, kwargs = tree_map(_held, (args, _set_device(kwargs, "cpu")))
    return kernel(*args, **kwargs)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, VirtualTensor) else value


def _is_unknown(value: Any) -> bool:
    return isinstance(value, VirtualTensor) and value.held.device.type == "meta"


def _to_known(value: Any) -> Any:
    """Return the CPU tensor that a program reads. Unknown values are 1, so that every number is finite and not 0."""
    held = _held(value)
    if isinstance(held, Tensor) and held.device.type == "meta":
        return torch.ones(held.shape, dtype=held.dtype)
    return held


def _to_meta(value: Any) -> Any:
    held = _held(value)
    if isinstance(held, Tensor) and held.device.type != "meta":
        return torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
    return held


def _set_device(kwargs: dict, device: str) -> dict:
    return kwargs | {"device": torch.device(device)} if "device" in kwargs else kwargs


def _as_indices(indices: Any) -> Iterator[Any]:
    """Yield the indices, with masks replaced by the positions that they select, so that the result's shape is known."""
    for index in indices:
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            yield from _to_known(index).nonzero(as_tuple=True)
        else:
            yield index


def _makes_floats(name: str, args: tuple, kwargs: dict) -> bool:
    """Return True if a call makes floating point values: it has no tensors, or converts them to a float dtype."""
    dtype = kwargs.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype.is_floating_point
    if any(isinstance(value, VirtualTensor) for value in tree_iter((args, kwargs))):
        return False
    return name not in ("aten::arange", "aten::full") or any(isinstance(v, float) for v in tree_iter(args))


def _convolution_of_cudnn(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
    """Convolve like cuDNN: the result is channels last if an input is."""
    last = any(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
    y = aten.convolution.default(x, weight, *more)
    return y.contiguous(memory_format=torch.channels_last) if last else y


def _convolution_fused(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
    """Convolve for the result's shape only: no bias, ReLU, sum. `more` ends with stride, padding, dilation, groups."""
    y = torch.nn.functional.conv2d(x, weight, None, *more[-4:])
    return y.contiguous(memory_format=torch.channels_last)


_KERNELS_OF_CUDA: dict[str, Callable] = {
    "aten::convolution": _convolution_of_cudnn,
    "aten::cudnn_convolution_relu": _convolution_fused,
    "aten::cudnn_convolution_add_relu": _convolution_fused,
}


# --- autocast and attention, as on CUDA -------------------------------------------------------------------------------

_KEY = "AutocastPrivateUse1"
_LOW = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv2d", "convolution", "scaled_dot_product_attention")
_FLOAT32 = ("layer_norm", "nll_loss", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss")
_FLOAT32 += ("exp", "log", "log1p", "rsqrt", "reciprocal", "pow.Tensor_Scalar", "kl_div", "cdist", "logsumexp")
_FLOAT32 += ("softmax.int", "log_softmax.int", "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList", "prod")
_casts: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast like cached_cast in torch's autocast_mode.cpp: trainable weights are cast only once per forward pass."""
    if not isinstance(value, VirtualTensor) or not value.is_floating_point() or value.dtype in (dtype, torch.float64):
        return value
    if not (dtype != torch.float32 and value.is_leaf and value.requires_grad and value.dtype == torch.float32):
        return value.to(dtype)
    key = (id(value), dtype)
    if key not in _casts:
        _casts[key] = (value, value.to(dtype))
    return _casts[key][1]


def _with_casts(operation: Any, dtype: torch.dtype | None) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        guard = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY)))
        with guard:
            target = dtype or torch.get_autocast_dtype(DEVICE.type)
            args, kwargs = tree_map(lambda value: _cast(value, target), (args, kwargs))
            return operation(*args, **kwargs)

    return call


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Call the memory-efficient kernel, which CUDA uses if there is a mask, as for padded rows."""
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    gradients = torch.is_grad_enabled() and query.requires_grad
    return aten._scaled_dot_product_efficient_attention.default(query, key, value, bias, gradients, dropout_p)[0]


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy for torch.tensor(list, device=...), and record that: the host waits, and the dispatcher does not see it."""
    _active.record(Operation("aten::_to_copy", 1, copied=count_bytes(source), waits=True, location=_caller_lines()))
    return _copy(target, source)


def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _active.new(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _active.new(torch.empty(size, dtype=dtype))


_all_operations = torch.library.Library("_", "IMPL")
_all_operations.fallback(torch.library.fallthrough_kernel, _KEY)
_library = torch.library.Library("aten", "IMPL")
for _names, _dtype in ((_LOW, None), (_FLOAT32, torch.float32)):
    for _name in _names:
        _packet, _, _overload = _name.partition(".")
        _library.impl(_name, _with_casts(getattr(getattr(aten, _packet), _overload or "default"), _dtype), _KEY)
_library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
