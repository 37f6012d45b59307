"""A GPU that is not there: tensors that say `virtual:0`, on which real programs run while every operation is recorded.

    with VirtualDevice() as device:
        model.to(DEVICE); loss = model(batch.to(DEVICE)); loss.backward(); optimizer.step()
    device.operations        what a GPU would have done, in order
    device.peak              bytes that it would have held at most

Of floating point tensors only the shapes are kept, so that a step of 128 images takes seconds and no memory; a number
that the program asks for is 1.0. Integers and booleans, which decide shapes, are computed.

What a GPU refuses is refused: an operation between tensors of both devices raises RuntimeError with file and line. The
host waits for copies, unless they are non-blocking and the host's memory is page-locked. Autocast casts as it does on
CUDA. Kernels of cuDNN and attention that the project calls there are recorded under their own names.
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

from benchmarks.rehearsal.operations import INDEXING, Operation, Record, by_mask, bytes_of, recorded, tensors_in, writes

aten = torch.ops.aten
_FOREACH = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)  # tensors taken many at once
_BLOCK = 512  # bytes: the allocator of CUDA hands out multiples of it


class _Stream:
    """All that is done on the device is done at once, so nothing waits for another stream."""

    def wait_stream(self, other: "_Stream") -> None: ...
    def wait_event(self, event: None) -> None: ...
    def record_event(self) -> None: ...


class _Module(_DummyBackendModule):
    """torch.virtual: what torch.autocast asks, and streams."""

    _initialized = False
    Stream = current_stream = _Stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        """Empty: the device draws what the CPU draws. torch.random.fork_rng asks all devices."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def stream(self, stream: _Stream) -> AbstractContextManager:
        return nullcontext()


_setup_privateuseone_for_python_backend("virtual", _Module())
DEVICE = torch.device("virtual", 0)


class VirtualTensor(torch.Tensor):
    """`held` is a CPU tensor where the values are known, else one of device meta."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "VirtualTensor":
        with torch.inference_mode(False):  # a view of what was made outside of it belongs there, too
            return torch.Tensor._make_wrapper_subclass(
                cls, held.shape, strides=held.stride(), dtype=held.dtype, device=DEVICE
            )

    def __init__(self, held: Tensor):
        self.held = held

    @property
    def is_cuda(self) -> bool:
        """Code that asks takes the way that it takes on a GPU."""
        return True

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"VirtualTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if _active is None:
            raise RuntimeError(f"{function} on the virtual device, outside of `with VirtualDevice()`")
        return _active.compute(function, args, kwargs or {})


# --- the device -------------------------------------------------------------------------------------------------------


class VirtualDevice(TorchDispatchMode, Record):
    """Context manager: while it is entered, the device computes and records.

    held           bytes that the device holds now
    held_at_start  and held when recording began
    peak           and held at most since then
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        Record.__init__(self)
        self.held = self.held_at_start = self.peak = 0

    def __enter__(self) -> "VirtualDevice":
        global _active
        if _active is not None:
            raise RuntimeError("one virtual device at a time")
        _active = self
        self._threads = torch.autograd.is_multithreading_enabled()
        torch.autograd.set_multithreading_enabled(False)  # a device that is not there has no thread
        self._clear, torch.clear_autocast_cache = torch.clear_autocast_cache, _casts.clear
        for kinds in _FOREACH:
            kinds.append(VirtualTensor)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        global _active
        super().__exit__(*raised)
        for kinds in _FOREACH:
            kinds.remove(VirtualTensor)
        torch.clear_autocast_cache = self._clear
        torch.autograd.set_multithreading_enabled(self._threads)
        _casts.clear()
        _active = None

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Sees what has no tensor of the device yet, too: torch.arange(3, device=DEVICE)."""
        return self.compute(function, args, kwargs or {})

    def start(self) -> None:
        """Record from here on; what is held stays."""
        self.operations, self.marks = [], []
        self.held_at_start = self.peak = self.held

    def record(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.peak = max(self.peak, self.held)

    def compute(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """The result of a call in which the device has a part.

        RuntimeError where a GPU would refuse it: a tensor of the CPU among those of the device.
        """
        name, given = function._schema.name, tensors_in((args, kwargs))
        ours = [one for one in given if isinstance(one, VirtualTensor)]
        hosts = [one for one in given if not isinstance(one, VirtualTensor)]
        device = kwargs.get("device")
        on_device = bool(ours) if device is None else torch.device(device).type == DEVICE.type
        if name == "aten::is_pinned":
            return _is_pinned(args[0])
        if not ours and not on_device:
            copies = name in ("aten::pin_memory", "aten::_pin_memory")
            pins = copies or kwargs.pop("pin_memory", False)
            out = args[0].clone() if copies else function(*args, **kwargs)
            if pins:  # without a GPU, no memory is
                _pinned.add(out.untyped_storage())
            return out
        if name == "aten::_has_compatible_shallow_copy_type":  # asked by Module.to, of tensors of both devices
            return False
        if name == "aten::scaled_dot_product_attention":  # these come whole where no gradient is wanted
            return _attention(*args, **kwargs)
        if function._can_decompose():
            return function.decompose(*args, **kwargs)
        if ours and any(_is_stray(one, function, args, kwargs) for one in hosts):
            shapes = ", ".join(f"{tuple(one.shape)} on {one.device}" for one in given)
            raise RuntimeError(f"{name} mixes tensors of the CPU and of the device, {shapes}: {_where()}")
        if name == "aten::copy_":
            out = _copied(*args)
        elif name == "aten::_local_scalar_dense":
            out = function(_known(args[0]))
        else:
            out = self._wrap(_call(function, args, kwargs, given), function, args, kwargs, on_device)
        operation = recorded(function, args, kwargs, out)
        copied, waits = _crossing(name, args, kwargs, out, hosts, on_device)
        if copied:
            operation = dataclasses.replace(operation, kernels=1, read=0, written=0, copied=copied)
        if copied or waits:
            operation = dataclasses.replace(operation, waits=waits, where=_where())
        self.record(operation)
        return out

    def _wrap(self, out: Any, function: Any, args: tuple, kwargs: dict, on_device: bool) -> Any:
        """The result as the caller gets it; what works in place hands back the tensor that it was given."""
        changed = writes(function, args, kwargs)
        if changed:
            return changed[0] if function._schema.returns else None
        if not on_device:
            return tree_map(_known, out)
        return tree_map(lambda value: self.new(value) if isinstance(value, Tensor) else value, out)

    def new(self, found: Tensor) -> VirtualTensor:
        """A tensor of the device, in memory of its own unless it shares that of another."""
        if found.device.type == "cpu" and found.is_floating_point():
            found = _to_meta(found)
        storage = found.untyped_storage()
        if storage not in _storages:
            size = -(-storage.nbytes() // _BLOCK) * _BLOCK
            _storages.add(storage)
            weakref.finalize(storage, self._free, size)
            self.held += size
        return VirtualTensor(found)

    def _free(self, size: int) -> None:
        self.held -= size


_active: VirtualDevice | None = None
_storages: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()  # of the device
_pinned: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()  # of the host, page-locked


# --- what crosses between host and device -----------------------------------------------------------------------------

_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
_WAITS |= {"aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave"}
_WAITS |= {"torchvision::nms"}
_COPIES = {"aten::_to_copy", "aten::copy_"}


def _is_stray(host: Tensor, function: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a tensor of the CPU may not be there: copies, indices and single numbers may, but not what is written
    to."""
    name = function._schema.name
    if name in _COPIES or (name in INDEXING and any(one is host for one in args[1])):
        return False
    return host.dim() > 0 or any(one is host for one in writes(function, args, kwargs))


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, VirtualTensor):
        return target.copy_(_known(source))
    if target.held.device.type == "cpu":
        if _is_unknown(source):
            target.held = _to_meta(target)
        else:
            target.held.copy_(_held(source))
    return target


def _crossing(name: str, args: tuple, kwargs: dict, out: Any, hosts: list[Tensor], on_device: bool) -> tuple[int, bool]:
    """(bytes that go between host and device, whether the host waits)."""
    if name == "aten::copy_":
        if not hosts:
            return 0, False
        later = len(args) > 2 and args[2]
        return bytes_of(args[1]), not (later and _is_pinned(hosts[0]))
    if not on_device:  # .to("cpu", non_blocking=True) takes page-locked memory by itself
        return sum(map(bytes_of, tensors_in(out))), not kwargs.get("non_blocking")
    if name == "aten::_to_copy":
        later = kwargs.get("non_blocking") and all(map(_is_pinned, hosts))
        return sum(map(bytes_of, hosts)), bool(hosts) and not later
    copied = sum(bytes_of(one) for one in hosts if one.dim())  # others are arguments of the kernel
    return copied, bool(copied) or name in _WAITS or (name in INDEXING and by_mask(args[1]))


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage() in _pinned


def _where() -> str:
    """The two innermost lines of this project; the backward pass has none of its own."""
    frame, own = sys._getframe(), []
    while frame and len(own) < 2:
        file = frame.f_code.co_filename
        if file != __file__ and "/site-packages/" not in file:
            own.append(f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(own)


# --- values -----------------------------------------------------------------------------------------------------------


def _call(function: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> Any:
    """The result on tensors that are there: of the CPU where it is computed, else of meta."""
    name = function._schema.name
    kernel = _KERNELS_OF_CUDA.get(name, function)
    if name == "torchvision::nms":
        return torch.arange(len(args[0]))  # keeps all: as much as there can be
    if name in _WAITS:
        args, kwargs = tree_map(_known, (args, kwargs))
        return kernel(*args, **kwargs)
    if _makes_floats(name, args, kwargs) or any(map(_is_unknown, given)):
        if writes(function, args, kwargs):
            return None  # it only writes numbers that nobody knows
        if name in INDEXING:
            args = (args[0], [*_as_indices(args[1])], *args[2:])
        args, kwargs = tree_map(_to_meta, (args, _on(kwargs, "meta")))
        return kernel(*args, **kwargs)
    args, kwargs = tree_map(_held, (args, _on(kwargs, "cpu")))
    return kernel(*args, **kwargs)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, VirtualTensor) else value


def _is_unknown(value: Any) -> bool:
    return isinstance(value, VirtualTensor) and value.held.device.type == "meta"


def _known(value: Any) -> Any:
    """What a program reads of a tensor that was not computed: ones, so that every number is finite and counts."""
    held = _held(value)
    if isinstance(held, Tensor) and held.device.type == "meta":
        return torch.ones(held.shape, dtype=held.dtype)
    return held


def _to_meta(value: Any) -> Any:
    held = _held(value)
    if isinstance(held, Tensor) and held.device.type != "meta":
        return torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
    return held


def _on(kwargs: dict, device: str) -> dict:
    return kwargs | {"device": torch.device(device)} if "device" in kwargs else kwargs


def _as_indices(indices: Any) -> Iterator[Any]:
    """Masks as what they select, so that the shape is known."""
    for one in indices:
        if isinstance(one, Tensor) and one.dtype == torch.bool:
            yield from _known(one).nonzero(as_tuple=True)
        else:
            yield one


def _makes_floats(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether a call without tensors makes floating point numbers, or one with them changes to these."""
    dtype = kwargs.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype.is_floating_point
    if any(isinstance(value, VirtualTensor) for value in tree_iter((args, kwargs))):
        return False
    return name not in ("aten::arange", "aten::full") or any(isinstance(v, float) for v in tree_iter(args))


def _convolution_of_cudnn(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
    """Channels last where what comes in is."""
    last = any(one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last) for one in (x, weight))
    y = aten.convolution.default(x, weight, *more)
    return y.contiguous(memory_format=torch.channels_last) if last else y


def _convolution_fused(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
    """With bias, ReLU and perhaps a sum, which leave the shape as it is; behind them stands the geometry."""
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
    """As cached_cast of torch's autocast_mode.cpp: leaves that learn are cast once a forward pass."""
    if not isinstance(value, VirtualTensor) or not value.is_floating_point() or value.dtype in (dtype, torch.float64):
        return value
    if not (dtype != torch.float32 and value.is_leaf and value.requires_grad and value.dtype == torch.float32):
        return value.to(dtype)
    key = (id(value), dtype)
    if key not in _casts:
        _casts[key] = (value, value.to(dtype))
    return _casts[key][1]


def _casting(operation: Any, dtype: torch.dtype | None) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        without = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1))
        with without:
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
    """The memory-efficient kernel, which CUDA takes where there is a mask, as in padded rows."""
    bias = attn_mask
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    gradients = torch.is_grad_enabled() and query.requires_grad
    return aten._scaled_dot_product_efficient_attention.default(query, key, value, bias, gradients, dropout_p)[0]


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """As torch.tensor(list, device=...) copies, which the dispatcher does not show: it waits."""
    _active.record(Operation("aten::_to_copy", 1, copied=bytes_of(source), waits=True, where=_where()))
    return _copied(target, source)


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
        _library.impl(_name, _casting(getattr(getattr(aten, _packet), _overload or "default"), _dtype), _KEY)
_library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
