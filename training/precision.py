"""What matrix products and convolutions are computed in: bfloat16 by autocast, and float32 on GPUs.

bfloat16 is for forward passes (their backward follows them); weights, optimizer, RoIAlign, LayerNorms, the encoder's
sums and losses stay float32. Within the ResNet frozen norms are multiplied into the weights in float32, and what comes
out of a block is bfloat16. A GPU may round what goes into a float32 product to 10 bits, TF32: torch's own default for
convolutions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from training.distributed import World

Float32 = Literal["ieee", "tf32"]


@contextmanager
def float32_precision(convolutions: Float32, matrices: Float32) -> Iterator[None]:
    """On GPUs, float32 convolutions and matrix products as said, and afterwards as before."""
    of_convolutions, of_matrices = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = of_convolutions.fp32_precision, of_matrices.fp32_precision
    of_convolutions.fp32_precision, of_matrices.fp32_precision = convolutions, matrices
    try:
        yield
    finally:
        of_convolutions.fp32_precision, of_matrices.fp32_precision = before


@contextmanager
def recipe_precision(recipe: Any) -> Iterator[None]:
    """For a whole run, backward passes too: float32 products rounded where recipe.precision is tf32, else exact."""
    kind = "tf32" if recipe.precision == "tf32" else "ieee"
    with float32_precision(kind, kind):
        yield


def autocast(recipe: Any, world: World) -> torch.autocast:
    """For a forward pass: bfloat16 where recipe.precision says so."""
    return torch.autocast(world.device.type, torch.bfloat16, enabled=recipe.precision == "bf16")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that convolutions and matrix products of x compute in: autocast's, or its own."""
    device = x.device.type
    # is_autocast_enabled raises for a device without autocast, such as `meta`.
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if cast and x.dtype != torch.float64 else x.dtype
