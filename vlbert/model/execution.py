"""Other ways to compute a model in training: with less memory (activation checkpointing), or by compiled kernels.

Neither changes what is computed, nor a name in the state dict. Both are done block by block: a layer of the encoder, or
a residual block of the Fast R-CNN.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vlbert.config import Recipe
from vlbert.model.vlbert import VLBert

MOST_GRAPHS = 32  # that torch.compile may make of one class of blocks; beyond it, it gives up for good and says so


def blocks(model: VLBert) -> list[nn.Module]:
    """The blocks that learn; frozen ones keep no activations anyway."""
    stages = [model.encoder.layers]
    if model.fast_rcnn is not None:
        backbone = model.fast_rcnn.backbone
        stages += [backbone.res2, backbone.res3, backbone.res4, model.fast_rcnn.res5]
    return [block for stage in stages for block in stage.children() if any(p.requires_grad for p in block.parameters())]


def execute_as(recipe: Recipe, model: VLBert) -> None:
    """Compute the model as the recipe's `activation_checkpointing` and `compile` say."""
    for block in blocks(model):
        if recipe.activation_checkpointing:
            activation_checkpointing(block)
        if recipe.compile:  # blocks of one shape share kernels, sizes that differ from batch to batch are variables
            block.compile(dynamic=True)
    if recipe.compile:
        # Blocks of one class count together: first and other blocks of four stages, in training and in validation.
        torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)


def activation_checkpointing(block: nn.Module) -> None:
    """From now on, keep of the block's forward pass only what went in, and compute it again in the backward pass.

    The second pass draws the same dropout. The block cannot be copied or pickled then. One with live norms, which would
    count a batch twice, stays as it is.
    """
    if any(isinstance(part, nn.BatchNorm2d) for part in block.modules()):
        return
    forward = block.forward

    def forward_twice(*given: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*given)
        return checkpoint(forward, *given, use_reentrant=False)

    block.forward = forward_twice
