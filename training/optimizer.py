"""The optimizer of all models, its learning rate schedule and gradient clipping."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from storage.settings import check, check_choices, check_positive


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer and its schedule. The defaults are those of VL-BERT (paper A.2)."""

    kind: Literal["adamw", "adam", "sgd"] = "adamw"  # adamw: decoupled weight decay; others: added to the gradient
    learning_rate: float = 2e-5  # peak rate, after warmup, for the whole global batch; never scaled automatically
    region_learning_rate: float | None = None  # peak rate of a Fast R-CNN inside the model; None: learning_rate
    # peak rate of what BERT can initialise: text embedding and layers J and T; None: learning_rate
    bert_learning_rate: float | None = None
    warmup_steps: int = 8000  # steps of linear warmup from 0 to learning_rate
    # after warmup: linear decay to 0 at the end; multiply by `decay` at each of decay_at (step); or stay constant
    schedule: Literal["linear", "step", "constant"] = "linear"
    # update with learning rate 0: none; the first, as in ViLBERT's first code release; or, if schedule is linear, the
    # last, as in VL-BERT's code and ViLBERT's second release
    zero_update: Literal["none", "first", "last"] = "none"
    decay_at: tuple[int, ...] = ()  # for schedule step: numbers of updates after which the rate is decayed
    decay: float = 0.1  # for schedule step: factor of each decay
    betas: tuple[float, float] = (0.9, 0.999)  # for Adam: decay rates of the two moments
    momentum: float = 0.9  # for SGD
    epsilon: float = 1e-6  # for Adam: added to the denominator
    # order of operations in Adam. True, as in BERT: add epsilon before the second moment's bias correction, and decay
    # weights after the update. False: as in PyTorch
    bert_adam: bool = True
    bias_correction: bool = True  # correct the bias of Adam's moments; BERT's own optimizer does not
    weight_decay: float = 1e-4  # share of a weight that is subtracted by a step at learning rate 1
    # parameters that decay. all: every parameter; matrices: all but biases and LayerNorms; vectors: only biases and
    # LayerNorms, as in ViLBERT's first code release
    decayed: Literal["all", "matrices", "vectors"] = "all"
    as_matrices: tuple[str, ...] = ()  # ends of names of LayerNorms that `decayed` treats as matrices, as in ViLBERT
    max_grad_norm: float | None = 10.0  # maximum global gradient norm; None: no clipping
    clip_each: bool = False  # clip the gradient of each tensor to max_grad_norm, instead of the global gradient

    def __post_init__(self):
        check_choices(self)
        rates = "learning_rate", "region_learning_rate", "bert_learning_rate"
        check_positive(self, *rates, "max_grad_norm", "epsilon")
        check(self, self.warmup_steps >= 0, "warmup_steps", "0 or more")
        fits = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(self, fits, "betas", "two numbers in [0, 1)")
        check(self, not self.clip_each or self.max_grad_norm, "clip_each", "false if max_grad_norm is None")
        adams = self.bias_correction or self.kind == "adamw"
        check(self, adams, "bias_correction", "true unless kind is adamw")
        check(self, 0 <= self.momentum < 1, "momentum", "in [0, 1)")
        check(self, self.weight_decay >= 0, "weight_decay", "0 or more")
        check(self, 0 < self.decay <= 1, "decay", "in (0, 1]")
        fits = (self.schedule == "step") == bool(self.decay_at)
        check(self, fits, "decay_at", "given if schedule is step, and empty otherwise")
        rising = list(self.decay_at) == sorted(set(self.decay_at)) and min(self.decay_at, default=1) > 0
        check(self, rising, "decay_at", "increasing numbers of updates")


def check_decay(config: OptimizerConfig, steps: int) -> None:
    """Raise ValueError if an update in `config.decay_at` is not before the last of `steps` updates."""
    late = [at for at in config.decay_at if at >= steps]
    if late:
        raise ValueError(
            f"optimizer.decay_at has update {late[-1]}, but the run has only {steps} steps. Change one of them, or set "
            "--optimizer.schedule=linear and an empty --optimizer.decay_at"
        )


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Create the optimizer, with one parameter group per pair of peak learning rate and weight decay.

    Parameters whose names start with a prefix in `model.bert_parameters` (optional) get `bert_learning_rate`.
    """
    bert_prefixes = tuple(getattr(model, "bert_parameters", ()))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rate = None
        if "fast_rcnn." in name:
            rate = config.region_learning_rate
        elif name.startswith(bert_prefixes):
            rate = config.bert_learning_rate
        vector = parameter.dim() == 1 and not name.endswith(config.as_matrices)
        decays = {"all": True, "matrices": not vector, "vectors": vector}[config.decayed]
        key = config.learning_rate if rate is None else rate, config.weight_decay if decays else 0.0
        groups.setdefault(key, []).append(parameter)
    # Of equal rates, the last name counts.
    names = {config.bert_learning_rate: "bert", config.region_learning_rate: "fast_rcnn", config.learning_rate: "rest"}
    parameters = [
        {"params": group, "peak": peak, "decay": decay, "name": names[peak]} for (peak, decay), group in groups.items()
    ]
    rate, decay = config.learning_rate, config.weight_decay
    # Fused: one kernel for all parameters, on CPUs, too.
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, rate, config.momentum, weight_decay=decay, fused=True)
    adam = torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
    return adam(parameters, rate, config.betas, config.epsilon, decay, fused=True)


def learning_rate_factor(update: int, updates: int, config: OptimizerConfig) -> float:
    """Return the learning rate at an update, as a fraction of the peak learning rate.

    Updates are counted from 1 or, if `zero_update` is "first", from 0.

    The fraction rises linearly to 1 over the warmup. Then the linear schedule decreases it to 0 at the last update
    (`updates`), as in the authors' code. The step schedule multiplies it by `decay` after each update in `decay_at`.
    """
    if update < config.warmup_steps:
        return update / config.warmup_steps
    if config.schedule == "linear":
        return max(0.0, (updates - update) / max(1, updates - config.warmup_steps))
    return config.decay ** sum(update + (config.zero_update == "first") > at for at in config.decay_at)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, config: OptimizerConfig) -> None:
    """Set the learning rate, weight decay and Adam's epsilon of all parameter groups for a step, counted from 0."""
    # By default, the schedule has one more update than the run, so that the last one does not have learning rate 0.
    update, updates = step + (config.zero_update != "first"), steps + (config.zero_update == "none")
    factor = learning_rate_factor(update, updates, config)
    # PyTorch counts only the updates taken, so after n skipped steps these corrections are ahead by n updates. At
    # update 1,000, one skipped step changes epsilon by 0.03 %.
    first, second = (1 - beta ** (step + 1) for beta in config.betas)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = group["peak"] * factor, group["decay"]
        if config.kind != "sgd" and (config.bert_adam or not config.bias_correction):
            # BERT's Adam adds epsilon to sqrt(v) before it corrects the bias of v; PyTorch adds it afterwards.
            group["eps"] = config.epsilon / second**0.5
        if config.kind == "adamw" and config.bert_adam:
            # BERT decays the weight after the update, PyTorch before it. A step that is smaller by the decay makes both
            # equal.
            decay = group["lr"] * group["decay"]
            group["lr"], group["weight_decay"] = group["lr"] * (1 - decay), group["decay"] / (1 - decay)
        if config.kind != "sgd" and not config.bias_correction:
            # PyTorch corrects both moments. A changed step size undoes this, and the decay is changed to stay the same.
            uncorrected = first / second**0.5
            group["lr"], group["weight_decay"] = group["lr"] * uncorrected, group["weight_decay"] / uncorrected


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the rate of most parameters as `learning_rate`, and each other rate as `learning_rate_<group name>`."""
    sizes, rates = Counter(), {}
    for group in optimizer.param_groups:
        sizes[group["name"]] += sum(parameter.numel() for parameter in group["params"])
        rates[group["name"]] = group["lr"]
    most = rates.pop(max(sizes, key=sizes.__getitem__))
    return {"learning_rate": most} | {f"learning_rate_{name}": rate for name, rate in rates.items()}


def clip_gradients(model: nn.Module, config: OptimizerConfig) -> Tensor:
    """Clip the gradients according to `config`, and return their global norm before clipping."""
    if config.max_grad_norm is None or not config.clip_each:
        return nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or math.inf)
    # All at once: on a GPU, one clip_grad_norm_ call per tensor took as long as a forward pass.
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients))
    torch._foreach_mul_(gradients, [*(config.max_grad_norm / (norms + 1e-6)).clamp(max=1).unbind()])
    return norms.norm()
