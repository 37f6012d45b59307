"""The optimizer in two groups, and how its learning rate goes up and down (paper A.2)."""

import torch
from torch import nn

from vlbert.config import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD over all trainable parameters; those of the Fast R-CNN may have a learning rate of their own.

    Weight decay applies to every parameter, biases and LayerNorms included.
    """
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups["fast_rcnn." in name].append(parameter)
    region_rate = config.learning_rate if config.region_learning_rate is None else config.region_learning_rate
    peaks = {False: config.learning_rate, True: region_rate}
    parameters = [{"params": group, "peak": peaks[of_regions]} for of_regions, group in groups.items() if group]
    # Fused: one kernel for all parameters, on CPUs too.
    common = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "fused": True}
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    adam = torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
    return adam(parameters, betas=config.betas, eps=config.epsilon, **common)


def learning_rate_factor(update: int, updates: int, config: OptimizerConfig) -> float:
    """Of update 1, 2, ... of `updates`: rises linearly to 1 over the warm-up, then falls as config.schedule says.

    linear: to 0 at the last update, as in the authors' code. step: by `decay` after each of `decay_at` updates.
    """
    if update < config.warm_up:
        return update / config.warm_up
    if config.schedule == "step":
        return config.decay ** sum(update >= at for at in config.decay_at)
    return max(0.0, (updates - update) / max(1, updates - config.warm_up))


def prepare_step(optimizer: torch.optim.Optimizer, step: int, steps: int, config: OptimizerConfig) -> None:
    """Give every group what holds for step 0..steps-1: its learning rate and, for Adam, its epsilon."""
    # One update more in the schedule than there are: so the last one is not lost to a learning rate of 0.
    factor = learning_rate_factor(step + 1, steps + 1, config)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
        if config.kind != "sgd" and config.bert_adam:
            # BERT's Adam divides by sqrt(v) + epsilon and then corrects the bias of v, PyTorch's the other way round.
            # PyTorch counts its own updates, so behind n steps that were left out this is as of n updates later: by
            # update 1,000 one of them changes epsilon by 0.03 %.
            group["eps"] = config.epsilon / (1 - config.betas[1] ** (step + 1)) ** 0.5
        if config.kind == "adamw" and config.bert_adam:
            # And it decays what the step has changed already, PyTorch's what was there before it: the same as a step
            # that is smaller by the decay.
            decay = group["lr"] * config.weight_decay
            group["lr"], group["weight_decay"] = group["lr"] * (1 - decay), config.weight_decay / (1 - decay)
