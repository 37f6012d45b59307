"""Estimate the time of recorded operations on a GPU, from a simple model of the card.

An operation takes the longest of these times: its products on the tensor cores, its memory traffic, its copies to or
from the host, and MIN_KERNEL per kernel. The host needs time to launch each operation. The device starts an operation
after its launch and after the previous operation. A host that waits continues when the device is done.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.rehearsal.operations import Operation, Product
from training.precision import Float32


@dataclass(frozen=True)
class Card:
    """A GPU's peak rates, from its data sheet."""

    name: str
    flops: dict[str, float]  # bf16, tf32 and fp32 -> FLOP/s of dense products with float32 accumulation
    bandwidth: float  # memory bandwidth in bytes per second
    processors: int  # streaming multiprocessors, each of which computes one tile of a product at a time
    link: float  # bytes per second between page-locked host memory and the card


def _card(name: str, bf16: float, tf32: float, fp32: float, bandwidth: float, processors: int, link: float) -> Card:
    flops = {"bf16": bf16 * 1e12, "tf32": tf32 * 1e12, "fp32": fp32 * 1e12}
    return Card(name, flops, bandwidth * 1e12, processors, link)


# From NVIDIA's data sheets: H100 SXM, H200 SXM, A100 80GB SXM, L40S; RTX 4090: Ada whitepaper.
CARDS = {
    "h100": _card("H100 SXM", 989, 495, 67, 3.35, 132, 55e9),
    "h200": _card("H200 SXM", 989, 495, 67, 4.8, 132, 55e9),
    "a100": _card("A100 SXM 80GB", 312, 156, 19.5, 2.04, 108, 25e9),
    "l40s": _card("L40S", 362, 183, 91.6, 0.864, 142, 25e9),
    "rtx4090": _card("RTX 4090", 165, 82.6, 82.6, 1.008, 128, 25e9),
}

# Measured on one H100 with a 16-core host (benchmarks/results/2026-11-23-gpu), and assumed for the other cards.
# Products of 8192 x 8192 matrices reached 775 of 989 TFLOP/s in bfloat16, 368 of 495 in TF32 and 51 of 67 in float32.
PRODUCT_EFFICIENCY = {"bf16": 0.78, "tf32": 0.74, "fp32": 0.77}
BANDWIDTH_EFFICIENCY = 0.85  # of kernels that read and write rows in sequence
CONVOLUTION_EFFICIENCY = 0.6  # of bandwidth, in cuDNN convolutions with bias, sum and ReLU: the backbone, forward
GATHER_EFFICIENCY = 0.35  # of bandwidth, in kernels that read or write scattered rows: RoIAlign
MIN_KERNEL = 2.5e-6  # minimum seconds of a kernel
LAUNCH = 31e-6  # host seconds per operation, with Python and autograd; measured on ViLBERT's encoder
LAUNCH_TENSOR = 4e-6  # additional host seconds per tensor of a multi-tensor operation; measured on ViLBERT's optimizer
TILE = 128  # rows and columns of a product that one processor computes at a time

_GATHERS = {"aten::_embedding_bag", "aten::_embedding_bag_backward", "aten::index_select", "aten::index_add"}
_GATHERS |= {"aten::gather", "aten::index", "aten::index_put", "aten::index_copy", "aten::embedding_dense_backward"}
_CONVOLUTIONS = {"aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu", "aten::convolution"}

# What the time of a part is spent on: products, memory traffic, very short kernels, copies between host and device, and
# waiting for the host's next launch.
BOUNDS = ("compute", "memory", "launches", "link", "host")


class Part(Counter):
    """Costs of a part of a step: seconds on the device's time line by BOUNDS, and kernels, waits, flops and bytes."""

    @property
    def seconds(self) -> float:
        return sum(self[name] for name in BOUNDS)

    @property
    def bound_by(self) -> str:
        """The entry of BOUNDS that takes the most time."""
        return max(BOUNDS, key=self.__getitem__)


def product_seconds(product: Product, kind: str, card: Card) -> float:
    """Return the seconds that a card takes for a matrix product in precision `kind`, computed in tiles.

    Partial tiles at the edges take as long as whole ones, and some processors are idle in the last round. A product
    with few tiles and a long inner dimension is split along it.
    """
    tiles = product.batch * -(-product.m // TILE) * -(-product.n // TILE)
    padded = 2 * tiles * TILE * TILE * product.k
    if product.split:
        tiles *= max(1, min(-(-product.k // 512), card.processors // tiles))
    rounds = -(-tiles // card.processors)
    return padded * rounds * card.processors / tiles / (card.flops[kind] * PRODUCT_EFFICIENCY[kind])


def operation_seconds(operation: Operation, card: Card, float32: Float32 = "ieee") -> dict[str, float]:
    """Return the seconds of an operation for each of its possible bounds. The operation takes the longest of them.

    `float32` is the precision of float32 products.
    """
    kind = "bf16" if operation.dtype in (torch.bfloat16, torch.float16) else "tf32" if float32 == "tf32" else "fp32"
    efficiency = BANDWIDTH_EFFICIENCY
    if operation.name in _GATHERS:
        efficiency = GATHER_EFFICIENCY
    elif operation.name in _CONVOLUTIONS:
        efficiency = CONVOLUTION_EFFICIENCY
    return {
        "compute": sum(product_seconds(product, kind, card) for product in operation.products),
        "memory": operation.bytes / (card.bandwidth * efficiency),
        "launches": MIN_KERNEL * operation.kernels,
        "link": operation.copied / card.link,
    }


def timeline(operations: Iterable[tuple[str, Operation]], card: Card, float32: Float32 = "ieee") -> dict[str, Part]:
    """Return the costs of each part of a step. `operations` are (part, operation) in the order of their launches."""
    parts: dict[str, Any] = defaultdict(Part)  # typeshed's Counter counts only in integers
    host = device = 0.0
    for name, operation in operations:
        if not operation.kernels and not operation.waits:
            continue
        part = parts[name]
        host += LAUNCH + LAUNCH_TENSOR * operation.tensors
        if operation.kernels:
            seconds = operation_seconds(operation, card, float32)
            bound = max(seconds, key=seconds.__getitem__)
            part["host"] += max(0.0, host - device)
            part[bound] += seconds[bound]
            device = max(host, device) + seconds[bound]
        if operation.waits:
            host = max(host, device)
        for count in ("kernels", "waits", "flops", "bytes"):
            part[count] += getattr(operation, count)
    return dict(parts)
