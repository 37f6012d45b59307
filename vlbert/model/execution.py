"""Activation checkpointing and compiled kernels for training.

Neither changes the results or the names in the state dict. Both are applied to single blocks: a layer of the encoder,
or a residual block of the Fast R-CNN.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vlbert.config import Recipe
from vlbert.model.vlbert import VLBert

MAX_GRAPHS = 32  # per class of blocks; beyond it, torch.compile logs a warning and stops compiling that class


def trainable_blocks(model: VLBert) -> list[nn.Module]:
    """Return the encoder layers and Fast R-CNN residual blocks that have trainable parameters."""
    stages: list[nn.Module] = [model.encoder.layers]
    if model.fast_rcnn is not None:
        backbone = model.fast_rcnn.backbone
        stages += [backbone.res2, backbone.res3, backbone.res4, model.fast_rcnn.res5]
    # Frozen blocks keep no activations, so checkpointing would save nothing.
    return [block for stage in stages for block in stage.children() if any(p.requires_grad for p in block.parameters())]


def execute_as(recipe: Recipe, model: VLBert) -> None:
    """Apply the recipe's settings `activation_checkpointing` and `compile` to the model."""
    for block in trainable_blocks(model):
        if recipe.activation_checkpointing:
            checkpoint_activations(block)
        if recipe.compile:  # blocks of one shape share kernels; sizes that vary between batches are dynamic
            block.compile(dynamic=True)
    if recipe.compile:
        # All blocks of a class count together: first and other blocks of four stages, in training and in validation.
        limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
        torch._dynamo.config.recompile_limit = limit  # ty: ignore[invalid-assignment] typed as its default, 8


def checkpoint_activations(block: nn.Module) -> None:
    """Make a block keep only its inputs. Its other activations are recomputed in the backward pass.

    The recomputation uses the same dropout masks. The block can no longer be copied or pickled. A block with
    nn.BatchNorm2d is not changed, because recomputation would update its running statistics twice per batch.
    """
    if any(isinstance(part, nn.BatchNorm2d) for part in block.modules()):
        return
    forward = block.forward

    def forward_twice(*inputs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*inputs)
        return checkpoint(forward, *inputs, use_reentrant=False)

    block.forward = forward_twice
