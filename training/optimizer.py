"""The optimizer of any model here, and how its learning rate goes up and down."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from storage.settings import check, check_choices, check_positive


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule; the defaults are those of VL-BERT (paper A.2)."""

    kind: Literal["adamw", "adam", "sgd"] = "adamw"  # decay beside the gradient, or in it (Adam, SGD with momentum)
    learning_rate: float = 2e-5  # at the end of warm-up, for the whole global batch; it never scales by itself
    region_learning_rate: float | None = None  # of a Fast R-CNN inside the model; None: the same
    bert_learning_rate: float | None = None  # of what BERT may give: text embedding, layers J and T; None: the same
    warmup_steps: int = 8000  # steps from 0 to learning_rate
    # After warm-up: linearly to 0 at the end, by `decay` at each of decay_at, or as it is.
    schedule: Literal["linear", "step", "constant"] = "linear"
    decay_at: tuple[int, ...] = ()  # step: after so many updates
    decay: float = 0.1  # step: factor
    betas: tuple[float, float] = (0.9, 0.999)  # Adam's
    momentum: float = 0.9  # SGD's
    epsilon: float = 1e-6  # Adam's
    # BERT's: epsilon is added before the second moment's bias is corrected, and decay follows the step. Else PyTorch's.
    bert_adam: bool = True
    bias_correction: bool = True  # of Adam's moments; BERT's own optimizer has none
    weight_decay: float = 1e-4  # share of a weight that a step at learning rate 1 takes away
    # What decays. all: every parameter, biases and LayerNorms included; matrices: all but these; vectors: these alone,
    # as in ViLBERT's first program
    decayed: Literal["all", "matrices", "vectors"] = "all"
    max_grad_norm: float | None = 10.0  # largest global gradient norm; None: any
    clip_each: bool = False  # max_grad_norm is of each tensor's gradient by itself

    def __post_init__(self):
        check_choices(self)
        rates = "learning_rate", "region_learning_rate", "bert_learning_rate"
        check_positive(self, *rates, "max_grad_norm", "epsilon")
        check(self, self.warmup_steps >= 0, "warmup_steps", "0 or more")
        fits = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(self, fits, "betas", "two numbers in [0, 1)")
        check(self, not self.clip_each or self.max_grad_norm, "clip_each", "false where max_grad_norm is none")
        adams = self.bias_correction or self.kind == "adamw"
        check(self, adams, "bias_correction", "true unless kind is adamw")
        check(self, 0 <= self.momentum < 1, "momentum", "in [0, 1)")
        check(self, self.weight_decay >= 0, "weight_decay", "0 or more")
        check(self, 0 < self.decay <= 1, "decay", "in (0, 1]")
        fits = (self.schedule == "step") == bool(self.decay_at)
        check(self, fits, "decay_at", "given for schedule step, and only there")
        rising = list(self.decay_at) == sorted(set(self.decay_at)) and min(self.decay_at, default=1) > 0
        check(self, rising, "decay_at", "increasing numbers of updates")


def check_decay(config: OptimizerConfig, steps: int) -> None:
    """ValueError where a decay would come after the last of `steps` updates."""
    late = [at for at in config.decay_at if at >= steps]
    if late:
        raise ValueError(
            f"optimizer.decay_at names update {late[-1]}, and the run has {steps} steps; set both, or "
            "--optimizer.schedule=linear and --optimizer.decay_at without updates"
        )


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD over all trainable parameters, in groups of one peak of the learning rate and one decay.

    A model may name what a BERT may have given it: `bert_parameters`, beginnings of names.
    """
    of_bert = tuple(getattr(model, "bert_parameters", ()))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate = None
        if "fast_rcnn." in name:
            rate = config.region_learning_rate
        elif name.startswith(of_bert):
            rate = config.bert_learning_rate
        decays = {"all": True, "matrices": parameter.dim() > 1, "vectors": parameter.dim() == 1}[config.decayed]
        key = config.learning_rate if rate is None else rate, config.weight_decay if decays else 0.0
        groups.setdefault(key, []).append(parameter)
    parameters = [{"params": group, "peak": peak, "decay": decay} for (peak, decay), group in groups.items()]
    # Fused: one kernel for all parameters, on CPUs too.
    common = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "fused": True}
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    adam = torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
    return adam(parameters, betas=config.betas, eps=config.epsilon, **common)


def learning_rate_factor(update: int, updates: int, config: OptimizerConfig) -> float:
    """Of update 1, 2, ... of `updates`: rises linearly to 1 over the warm-up, then follows config.schedule.

    linear: to 0 at the last update, as in the authors' code. step: by `decay` after each of `decay_at` updates.
    """
    if update < config.warmup_steps:
        return update / config.warmup_steps
    if config.schedule == "linear":
        return max(0.0, (updates - update) / max(1, updates - config.warmup_steps))
    return config.decay ** sum(update > at for at in config.decay_at)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, config: OptimizerConfig) -> None:
    """Give every group what holds for step 0..steps-1: its learning rate and, for Adam, its epsilon."""
    # One update more in the schedule than there are: so the last one is not lost to a learning rate of 0.
    factor = learning_rate_factor(step + 1, steps + 1, config)
    # PyTorch counts its own updates, so behind n steps that were left out these are as of n updates later: by update
    # 1,000 one of them changes epsilon by 0.03 %.
    first, second = (1 - beta ** (step + 1) for beta in config.betas)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = group["peak"] * factor, group["decay"]
        if config.kind != "sgd" and (config.bert_adam or not config.bias_correction):
            # BERT's Adam divides by sqrt(v) + epsilon and then corrects the bias of v, PyTorch's the other way round.
            group["eps"] = config.epsilon / second**0.5
        if config.kind == "adamw" and config.bert_adam:
            # And it decays what the step has changed already, PyTorch's what was there before it: the same as a step
            # that is smaller by the decay.
            decay = group["lr"] * group["decay"]
            group["lr"], group["weight_decay"] = group["lr"] * (1 - decay), group["decay"] / (1 - decay)
        if config.kind != "sgd" and not config.bias_correction:
            # PyTorch corrects both moments: undone by the step's size, and decay stays what it was.
            uncorrected = first / second**0.5
            group["lr"], group["weight_decay"] = group["lr"] * uncorrected, group["weight_decay"] / uncorrected


def clip_gradients(model: nn.Module, config: OptimizerConfig) -> Tensor:
    """Clips the gradients as the configuration says; returns their global norm before."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if not config.clip_each:
        return nn.utils.clip_grad_norm_(parameters, math.inf if config.max_grad_norm is None else config.max_grad_norm)
    # All at once: on a GPU, clip_grad_norm_ of each by itself took as long as a forward pass.
    gradients = [parameter.grad for parameter in parameters]
    norms = torch.stack(torch._foreach_norm(gradients))
    torch._foreach_mul_(gradients, [*(config.max_grad_norm / (norms + 1e-6)).clamp(max=1).unbind()])
    return norms.norm()
