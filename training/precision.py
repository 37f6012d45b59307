"""Set the precision of matrix products and convolutions: bfloat16 autocast, float32, or TF32 on GPUs.

bfloat16 is used in the forward and backward passes. Weights, optimizer, RoIAlign, LayerNorms, the encoder's
residual sums and the losses stay float32. The ResNet's frozen BatchNorms are folded into its weights in float32, and
its blocks output bfloat16. With TF32, a GPU rounds the inputs of float32 products to 10 bits of mantissa. TF32 is
torch's default for convolutions.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from training.distributed import World

Float32 = Literal["ieee", "tf32"]


@contextmanager
def float32_precision(convolutions: Float32, matrices: Float32) -> Iterator[None]:
    """Context manager: set the precision of float32 convolutions and matrix products on GPUs."""
    conv = torch.backends.cudnn.conv  # ty: ignore[missing-attribute] set by torch at import
    matmul = torch.backends.cuda.matmul
    before = conv.fp32_precision, matmul.fp32_precision
    conv.fp32_precision, matmul.fp32_precision = convolutions, matrices
    try:
        yield
    finally:
        conv.fp32_precision, matmul.fp32_precision = before


def recipe_precision(recipe: Any) -> AbstractContextManager[None]:
    """Return a context manager that enables TF32 if recipe.precision is "tf32", and disables it otherwise."""
    kind = "tf32" if recipe.precision == "tf32" else "ieee"
    return float32_precision(kind, kind)


def autocast(recipe: Any, world: World) -> torch.autocast:
    """Return the autocast context of a forward pass: bfloat16 if recipe.precision is bf16, else disabled."""
    return torch.autocast(world.device.type, torch.bfloat16, enabled=recipe.precision == "bf16")


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of convolutions and matrix products with `x`: autocast's if it is enabled, else that of `x`."""
    device = x.device.type
    # is_autocast_enabled raises for a device without autocast, such as `meta`.
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if cast and x.dtype != torch.float64 else x.dtype
