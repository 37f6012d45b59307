"""What GPUs can do, and how long recorded operations take on one: a model of a card, not a measurement.

An operation takes the longer of its products on the tensor cores and its bytes from memory, and at least SHORTEST a
kernel. The host hands operations over one after the other and each takes its time, too: the device does one when it
is there and the one before is done. Where the host waits for the device, it goes on when that is done.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.rehearsal.operations import Operation, Product
from training.precision import Float32


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet.

    flops      a second, of dense products with float32 sums, in bf16, tf32 and fp32
    bandwidth  bytes a second of its memory
    processors streaming multiprocessors, each of which takes one tile of a product at a time
    link       bytes a second between page-locked memory of the host and the card
    """

    name: str
    flops: dict[str, float]
    bandwidth: float
    processors: int
    link: float


def _card(name: str, bf16: float, tf32: float, fp32: float, bandwidth: float, processors: int, link: float) -> Card:
    flops = {"bf16": bf16 * 1e12, "tf32": tf32 * 1e12, "fp32": fp32 * 1e12}
    return Card(name, flops, bandwidth * 1e12, processors, link)


# Data sheets of NVIDIA: H100 SXM, H200 SXM, A100 80GB SXM, L40S, and the Ada whitepaper for the RTX 4090.
CARDS = {
    "h100": _card("H100 SXM", 989, 495, 67, 3.35, 132, 55e9),
    "h200": _card("H200 SXM", 989, 495, 67, 4.8, 132, 55e9),
    "a100": _card("A100 SXM 80GB", 312, 156, 19.5, 2.04, 108, 25e9),
    "l40s": _card("L40S", 362, 183, 91.6, 0.864, 142, 25e9),
    "rtx4090": _card("RTX 4090", 165, 82.6, 82.6, 1.008, 128, 25e9),
}

# Measured on one H100 with 16 cores beside it (benchmarks/results/2026-11-23-gpu), and taken to hold for the others.
# Products of 8192 x 8192 matrices reached 775 of 989 TFLOP/s in bfloat16, 368 of 495 in TF32 and 51 of 67 in float32.
PRODUCTS_REACH = {"bf16": 0.78, "tf32": 0.74, "fp32": 0.77}
BANDWIDTH_REACHED = 0.85  # by kernels that read and write one row after the other
CONVOLUTIONS_REACH = 0.6  # of the bandwidth, by cuDNN's with bias, sum and ReLU: the backbone, forward
GATHERS_REACH = 0.35  # of the bandwidth, by kernels that read or write rows here and there: RoIAlign
SHORTEST = 2.5e-6  # seconds of any kernel
LAUNCH = 31e-6  # seconds of the host for an operation, Python and autograd included: ViLBERT's encoder
LAUNCH_TENSOR = 4e-6  # and for each tensor of an operation on many: its optimizer
TILE = 128  # rows and columns of a product that one processor computes at a time

_GATHERS = {"aten::_embedding_bag", "aten::_embedding_bag_backward", "aten::index_select", "aten::index_add"}
_GATHERS |= {"aten::gather", "aten::index", "aten::index_put", "aten::index_copy", "aten::embedding_dense_backward"}
_CONVOLUTIONS = {"aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu", "aten::convolution"}

# What the seconds of a part are spent on: products, memory, kernels that are too short for either, copies between host
# and device, and waiting for the host's next operation.
BOUNDS = ("compute", "memory", "launches", "link", "host")


class Part(Counter):
    """Of a part of a step: seconds on the device's time line by BOUNDS; kernels, waits, flops, bytes."""

    @property
    def seconds(self) -> float:
        return sum(self[name] for name in BOUNDS)

    @property
    def bound_by(self) -> str:
        """What takes most of it."""
        return max(BOUNDS, key=self.__getitem__)


def product_seconds(product: Product, kind: str, card: Card) -> float:
    """By tiles: those at an edge take as long as whole ones, and in the last round some processors have none.

    A product with few tiles and a long sum is split along it.
    """
    tiles = product.batch * -(-product.m // TILE) * -(-product.n // TILE)
    padded = 2 * tiles * TILE * TILE * product.k
    if product.split:
        tiles *= max(1, min(-(-product.k // 512), card.processors // tiles))
    rounds = -(-tiles // card.processors)
    return padded * rounds * card.processors / tiles / (card.flops[kind] * PRODUCTS_REACH[kind])


def operation_seconds(operation: Operation, card: Card, float32: Float32 = "ieee") -> dict[str, float]:
    """What a card needs for an operation, by what may bind it; the longest counts. float32: what it computes in."""
    kind = "bf16" if operation.dtype in (torch.bfloat16, torch.float16) else "tf32" if float32 == "tf32" else "fp32"
    reached = BANDWIDTH_REACHED
    if operation.name in _GATHERS:
        reached = GATHERS_REACH
    elif operation.name in _CONVOLUTIONS:
        reached = CONVOLUTIONS_REACH
    return {
        "compute": sum(product_seconds(one, kind, card) for one in operation.products),
        "memory": operation.bytes / (card.bandwidth * reached),
        "launches": SHORTEST * operation.kernels,
        "link": operation.copied / card.link,
    }


def timeline(operations: Iterable[tuple[str, Operation]], card: Card, float32: Float32 = "ieee") -> dict[str, Part]:
    """Part -> what its operations take on the card, one after the other. operations: each with its part."""
    parts: dict[str, Part] = defaultdict(Part)
    host = device = 0.0
    for name, operation in operations:
        if not operation.kernels and not operation.waits:
            continue
        part = parts[name]
        host += LAUNCH + LAUNCH_TENSOR * operation.tensors
        if operation.kernels:
            needed = operation_seconds(operation, card, float32)
            kind = max(needed, key=needed.get)
            part["host"] += max(0.0, host - device)
            part[kind] += needed[kind]
            device = max(host, device) + needed[kind]
        if operation.waits:
            host = max(host, device)
        for count in ("kernels", "waits", "flops", "bytes"):
            part[count] += getattr(operation, count)
    return dict(parts)
