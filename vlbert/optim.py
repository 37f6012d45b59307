"""AdamW in two groups, and the learning rate's warm-up and decay (paper A.2)."""

import torch
from torch import nn

from vlbert.config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters; those of the Fast R-CNN may have a learning rate of their own.

    As in the authors' code, weight decay applies to every parameter, biases and LayerNorms included.
    """
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups["fast_rcnn." in name].append(parameter)
    region_rate = config.learning_rate if config.region_learning_rate is None else config.region_learning_rate
    return torch.optim.AdamW(
        [
            {"params": groups[False], "peak": config.learning_rate},
            {"params": groups[True], "peak": region_rate},
        ],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,  # one kernel for all parameters, on CPUs too
    )


def learning_rate_factor(step: int, steps: int, warm_up: int) -> float:
    """Of step 0..steps-1: rises linearly to 1 over `warm_up` steps, then falls linearly to 0 just after the last."""
    if step < warm_up:
        return (step + 1) / warm_up
    return (steps - step) / max(1, steps - warm_up)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, warm_up: int) -> None:
    """Give every group its learning rate for step `step`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * learning_rate_factor(step, steps, warm_up)
