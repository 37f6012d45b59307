"""Count the kernels, matrix products and bytes of a torch operation on a GPU, from the shapes of its tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Product:
    """`batch` products of matrices [m, k] and [k, n]. Convolutions are also described as products."""

    batch: int
    m: int
    n: int
    k: int
    split: bool = False  # True: the sum over k may be split between the processors of a card

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Operation:
    """A call of a torch operation, as a GPU executes it: its kernels, products, memory traffic and waits."""

    name: str
    kernels: int  # launches; 0 for views and allocations
    products: tuple[Product, ...] = ()  # computed by tensor cores
    dtype: torch.dtype | None = None  # dtype of the products
    read: int = 0  # bytes of device memory that are read
    written: int = 0  # bytes of device memory that are written
    copied: int = 0  # bytes between host and device
    waits: bool = False  # True if the host waits until the device is done
    location: str = ""  # file:line < its caller, for waits and copies; "" in the backward pass
    tensors: int = 0  # number of tensors of a _foreach_ or _fused_ operation

    @property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)

    @property
    def bytes(self) -> int:
        return self.read + self.written


@dataclass(eq=False)
class Record:
    """A list of operations, with marks between them. It has the `mark` method of the clocks in step_parts.py."""

    operations: list[Operation] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)

    def mark(self, part: str) -> None:
        """Assign the operations since the last mark to `part`."""
        self.marks.append((len(self.operations), part))

    def parts(self) -> Iterator[tuple[str, Operation]]:
        """Yield (part, operation) for each operation. The part is "" after the last mark."""
        first = 0
        for end, part in [*self.marks, (len(self.operations), "")]:
            yield from ((part, operation) for operation in self.operations[first:end])
            first = end


INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_ALLOCATES = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_ALLOCATES |= {"aten::_unsafe_view", "aten::set_", "aten::resize_", "aten::_local_scalar_dense"}

# Number of kernels of an operation, if it is not 1, as launched by torch 2.11 on CUDA.
_KERNELS = {
    "aten::nonzero": 3,  # count, copy, select
    "aten::masked_select": 5,
    "aten::masked_scatter": 3,
    "aten::masked_scatter_": 3,
    "aten::native_layer_norm_backward": 2,
    "aten::embedding_dense_backward": 6,  # sorts
    "aten::_embedding_bag": 1,
    "aten::_embedding_bag_dense_backward": 6,
    "aten::index_put_": 4,
    "aten::_index_put_impl_": 4,
    "aten::_scaled_dot_product_efficient_attention_backward": 2,
    "aten::_scaled_dot_product_flash_attention_backward": 3,
    "aten::sort": 4,
    "aten::topk": 2,
    "aten::cumsum": 1,
    "torchvision::nms": 13,  # sorts, compares, selects
}
_SELECTS = {"aten::index_select", "aten::gather", "aten::index", "aten::embedding", "aten::_unsafe_index"}
_CHUNKS_PER_LAUNCH, _CHUNK = 320, 65536  # in torch's multi_tensor_apply, used by _foreach_ and _fused_ operations


def make_operation(function: Any, args: tuple, kwargs: dict, out: Any) -> Operation:
    """Describe the call function(*args, **kwargs) with result `out` as an Operation, from the shapes of its tensors."""
    name = function._schema.name
    if name in _ALLOCATES or function.is_view:
        return Operation(name, 0)
    results, inputs = find_tensors(out), find_tensors((args, kwargs))
    read, written = sum(map(count_bytes, inputs)), sum(map(count_bytes, results))
    if name in _SELECTS:  # only the selected rows of the table are read
        read = written + sum(map(count_bytes, inputs[1:]))
    elif name == "aten::_embedding_bag":
        read = count_bytes(args[1]) * (1 + args[0].shape[1] * args[0].element_size() // args[1].element_size())
        written = count_bytes(results[0])
    elif name in ("aten::fill_", "aten::zero_", "aten::full", "aten::zeros", "aten::ones"):
        read = 0
    kernels, tensors = _KERNELS.get(name, 1), []
    if name in INDEXING and has_mask(args[1]):
        kernels += _KERNELS["aten::nonzero"]
    if name.startswith(("aten::_foreach_", "aten::_fused_")):
        tensors = find_tensors(args[0])
        written = sum(map(count_bytes, tensors)) if written_arguments(function, args, kwargs) else written
        if name.startswith("aten::_fused_adam"):  # both moments
            written += sum(map(count_bytes, find_tensors(args[2:4])))
        kernels = max(1, -(-sum(-(-tensor.numel() // _CHUNK) for tensor in tensors) // _CHUNKS_PER_LAUNCH))
    products = tuple(_products(name, args, results))
    if name == "aten::convolution_backward":
        kernels = len(products) + bool(args[10][2])
        grad, x, weight = map(count_bytes, args[:3])
        read = (grad + weight) * args[10][0] + (grad + x) * args[10][1]
    elif name == "aten::convolution" and args[2] is not None:  # cuDNN adds the bias in a second kernel
        kernels, read, written = 2, read + written, 2 * written
    elif name == "aten::_embedding_bag_backward":
        kernels, read = 6, 4 * count_bytes(args[0])  # a gradient for each of the four cells of a sample
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), None)
    return Operation(name, kernels, products, dtype, read, written, tensors=len(tensors))


def count_bytes(tensor: Tensor) -> int:
    """Return the bytes of memory that a tensor covers. An expanded dimension (stride 0) counts once."""
    if 0 in tensor.shape:
        return 0
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


_CONVOLUTIONS = {"aten::convolution", "aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu"}
_ATTENTION = "aten::_scaled_dot_product_efficient_attention"


def _products(name: str, args: tuple, results: list[Tensor]) -> Iterator[Product]:
    if name == "aten::mm":
        yield Product(1, args[0].shape[0], args[1].shape[1], args[0].shape[1], split=True)
    elif name == "aten::addmm":
        yield Product(1, args[1].shape[0], args[2].shape[1], args[1].shape[1])
    elif name in ("aten::bmm", "aten::baddbmm"):
        a, b = args[-2:] if name == "aten::bmm" else args[1:3]
        yield Product(a.shape[0], a.shape[1], b.shape[2], a.shape[2])
    elif name in _CONVOLUTIONS:
        y, weight = results[0], args[1]
        yield Product(1, y.shape[0] * math.prod(y.shape[2:]), weight.shape[0], weight[0].numel())
    elif name == "aten::convolution_backward":
        grad, _, weight = args[:3]
        outputs, inputs, area = weight.shape[0], weight.shape[1], weight.shape[2:].numel()
        positions = grad.shape[0] * grad.shape[2:].numel()
        if args[10][0]:  # a product over the output positions: a stride does not make it larger
            yield Product(1, positions, inputs * area, outputs)
        if args[10][1]:
            yield Product(1, outputs, inputs * area, positions, split=True)
    elif name in (_ATTENTION, f"{_ATTENTION}_backward"):
        backward = name != _ATTENTION
        query, key = args[1:3] if backward else args[:2]
        batch, (length, width), keys = query.shape[0] * query.shape[1], query.shape[2:], key.shape[2]
        for _ in range(5 if backward else 2):
            yield Product(batch, length, keys, width, split=True)


def find_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def written_arguments(function: Any, args: tuple, kwargs: dict) -> list[Any]:
    """Return the arguments that a call writes to, or an empty list if it returns new tensors."""
    schema = function._schema
    if any(result.alias_info is None for result in schema.returns):
        return []
    written = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return written


def has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices)
