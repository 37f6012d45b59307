"""What a call of torch's dispatcher costs a GPU: kernels, products and bytes, counted from shapes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Product:
    """`batch` products of matrices [m, k] and [k, n]; a convolution is one, too. `split`: the sum over k may be split
    between the processors of a card."""

    batch: int
    m: int
    n: int
    k: int
    split: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Operation:
    """One call of torch's dispatcher, as a GPU executes it.

    kernels    launches; 0 for what only makes a view or allocates
    products   what tensor cores compute
    dtype      in which
    read, written  bytes, of memory of the device
    copied     bytes between host and device
    waits      whether the host waits until the device is done
    where      of waits and copies: file:line < its caller; "" in the backward pass
    tensors    how many a _foreach_ or _fused_ operation takes
    """

    name: str
    kernels: int
    products: tuple[Product, ...] = ()
    dtype: torch.dtype | None = None
    read: int = 0
    written: int = 0
    copied: int = 0
    waits: bool = False
    where: str = ""
    tensors: int = 0

    @property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)

    @property
    def bytes(self) -> int:
        return self.read + self.written


@dataclass(eq=False)
class Record:
    """Operations in order, and marks between them: see `mark`, which is that of a clock, too."""

    operations: list[Operation] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)

    def mark(self, part: str) -> None:
        """What came since the last mark was `part`."""
        self.marks.append((len(self.operations), part))

    def parts(self) -> Iterator[tuple[str, Operation]]:
        """Each operation with its part, "" behind the last mark."""
        first = 0
        for end, part in [*self.marks, (len(self.operations), "")]:
            yield from ((part, one) for one in self.operations[first:end])
            first = end


INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_ALLOCATES = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_ALLOCATES |= {"aten::_unsafe_view", "aten::set_", "aten::resize_", "aten::_local_scalar_dense"}

# Kernels of one operation where these are not one, as torch 2.11 launches them on CUDA.
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
_CHUNKS_A_LAUNCH, _CHUNK = 320, 65536  # of torch's multi_tensor_apply, which _foreach_ and _fused_ operations use


def recorded(function: Any, args: tuple, kwargs: dict, out: Any) -> Operation:
    """What a call costs on a GPU, by the shapes of what goes in and comes out."""
    name = function._schema.name
    if name in _ALLOCATES or function.is_view:
        return Operation(name, 0)
    results, given = tensors_in(out), tensors_in((args, kwargs))
    read, written = sum(map(bytes_of, given)), sum(map(bytes_of, results))
    if name in _SELECTS:  # of the table only what is selected
        read = written + sum(map(bytes_of, given[1:]))
    elif name == "aten::_embedding_bag":
        read = bytes_of(args[1]) * (1 + args[0].shape[1] * args[0].element_size() // args[1].element_size())
        written = bytes_of(results[0])
    elif name in ("aten::fill_", "aten::zero_", "aten::full", "aten::zeros", "aten::ones"):
        read = 0
    kernels, tensors = _KERNELS.get(name, 1), []
    if name in INDEXING and by_mask(args[1]):
        kernels += _KERNELS["aten::nonzero"]
    if name.startswith(("aten::_foreach_", "aten::_fused_")):
        tensors = tensors_in(args[0])
        written = sum(map(bytes_of, tensors)) if writes(function, args, kwargs) else written
        if name.startswith("aten::_fused_adam"):  # both moments
            written += sum(map(bytes_of, tensors_in(args[2:4])))
        kernels = max(1, -(-sum(-(-one.numel() // _CHUNK) for one in tensors) // _CHUNKS_A_LAUNCH))
    products = tuple(_products(name, args, results))
    if name == "aten::convolution_backward":
        kernels = len(products) + bool(args[10][2])
        grad, x, weight = map(bytes_of, args[:3])
        read = (grad + weight) * args[10][0] + (grad + x) * args[10][1]
    elif name == "aten::convolution" and args[2] is not None:  # cuDNN adds the bias in a second kernel
        kernels, read, written = 2, read + written, 2 * written
    elif name == "aten::_embedding_bag_backward":
        kernels, read = 6, 4 * bytes_of(args[0])  # a gradient for each of the four cells that a sample was made of
    dtype = next((one.dtype for one in given if one.is_floating_point()), None)
    return Operation(name, kernels, products, dtype, read, written, tensors=len(tensors))


def bytes_of(tensor: Tensor) -> int:
    """Of the elements that are there: an expanded dimension is read once."""
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
        yield Product(1, y.shape[0] * y.shape[2:].numel(), weight.shape[0], weight[0].numel())
    elif name == "aten::convolution_backward":
        grad, _, weight = args[:3]
        outputs, inputs, area = weight.shape[0], weight.shape[1], weight.shape[2:].numel()
        places = grad.shape[0] * grad.shape[2:].numel()
        if args[10][0]:  # as a product over the places of the output: a stride makes it no larger
            yield Product(1, places, inputs * area, outputs)
        if args[10][1]:
            yield Product(1, outputs, inputs * area, places, split=True)
    elif name in (_ATTENTION, f"{_ATTENTION}_backward"):
        backward = name != _ATTENTION
        query, key = args[1:3] if backward else args[:2]
        batch, (length, width), keys = query.shape[0] * query.shape[1], query.shape[2:], key.shape[2]
        for _ in range(5 if backward else 2):
            yield Product(batch, length, keys, width, split=True)


def tensors_in(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def writes(function: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments into which a call writes, where it does nothing else."""
    schema = function._schema
    if any(one.alias_info is None for one in schema.returns):
        return []
    found = []
    for number, one in enumerate(schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(one.name))
    return found


def by_mask(indices: Any) -> bool:
    return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in indices)
