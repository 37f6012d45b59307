"""Measure the time of each part of a training step, and count its floating point operations.

A part's time is the time between two marks on the device's time line, so that the parts add up to the whole step. Marks
are set at the boundaries of modules: in the forward pass, and by tensor hooks in the backward pass.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from training.distributed import World
from training.optimizer import clip_gradients, make_optimizer
from training.precision import autocast
from vlbert.config import Recipe
from vlbert.data.batch import Batch
from vlbert.tasks.base import TaskModel

FORWARD = ("pixels", "backbone", "RoIAlign", "res5", "embedding", "encoder", "heads")
PARTS = ("transfer", *FORWARD, *(f"{part}, backward" for part in reversed(FORWARD[1:])), "optimizer")


class TrainingStep:
    """The training step of a recipe: its model and optimizer, without data, log or checkpoints."""

    def __init__(self, recipe: Recipe, model: TaskModel, world: World):
        self.recipe, self.model, self.world = recipe, model, world
        self.optimizer = make_optimizer(model, recipe.optimizer)

    def losses(self, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        with autocast(self.recipe, self.world):
            return self.model(batch)

    def take(self, batch: Batch) -> None:
        """Take a training step on a batch that is already on the device."""
        total_loss(self.losses(batch)).backward()
        self.update()

    def update(self) -> None:
        clip_gradients(self.model, self.recipe.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def total_loss(losses: dict[str, tuple[Tensor, int]]) -> Tensor:
    """Return the sum of the mean losses. Entries without gradient are measures, and are left out."""
    return torch.as_tensor(sum(loss / max(1, count) for loss, count in losses.values() if loss.requires_grad))


class Marks(Protocol):
    """Protocol of Clock, FlopClock and the rehearsal's Record: `mark` assigns what was done since the last mark."""

    def mark(self, part: str) -> None: ...


class Clock:
    """A clock that sets marks on a device's time line. A mark assigns the time since the previous mark to a part."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """Assign the time since the last mark to `part`. The first mark only starts the clock."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # queued, without waiting for the device
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def milliseconds(self) -> dict[str, float]:
        """Return the total milliseconds of each part. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        times = Counter()
        for (_, before), (part, now) in zip(self.marks, self.marks[1:], strict=False):
            times[part] += before.elapsed_time(now) if self.device.type == "cuda" else 1000 * (now - before)
        return dict(times)


class FlopClock:
    """A counter of the floating point operations between marks: of convolutions, matrix products and attention.

    `flops` has the counts by part. They include operations on padding, and those that are repeated to save memory.
    """

    def __init__(self) -> None:
        fused = {getattr(torch.ops.aten, name): _cudnn_flops for name in _FUSED_BY_CUDNN}
        if hasattr(torch.ops.mkldnn, "_convolution_pointwise"):
            fused[torch.ops.mkldnn._convolution_pointwise] = _onednn_flops
        self.counter = FlopCounterMode(display=False, custom_mapping=fused)
        self.flops, self.before = Counter(), 0

    def mark(self, part: str) -> None:
        counted = self.counter.get_total_flops()
        self.flops[part] += counted - self.before
        self.before = counted


_FUSED_BY_CUDNN = ("cudnn_convolution_relu", "cudnn_convolution_add_relu")


def _cudnn_flops(x: torch.Size, weight: torch.Size, *more: Any, out_shape: torch.Size, **options: Any) -> int:
    return conv_flop_count([*x], [*weight], [*out_shape])


def _onednn_flops(x: torch.Size, *more: Any, out_shape: torch.Size, **options: Any) -> int:
    """Count the FLOPs of a oneDNN convolution. If a sum is fused, its other summand comes before the weight."""
    weight = more[1] if isinstance(more[1], torch.Size) and len(more[1]) == 4 else more[0]
    return conv_flop_count([*x], [*weight], [*out_shape])


class MarkedModule(nn.Module):
    """A wrapper that marks where the module `inner` begins and ends. Its own part is `part`.

    `before` and `behind` are the parts before and after it in the forward pass. It may be called several times per
    step, as the backbone is. Then the backward pass runs the calls in reverse order.
    """

    def __init__(self, inner: nn.Module, clock: Marks, before: str, part: str, behind: str):
        super().__init__()
        self.inner, self.clock, self.before, self.part, self.behind = inner, clock, before, part, behind
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.mark(self.before if self.calls == 0 else self.part)
        self.calls += 1
        call = self.calls
        for tensor in find_learnable(args):
            tensor.register_hook(lambda gradient: self._mark_backward(self.part))
        output = self.inner(*args, **kwargs)
        for tensor in find_learnable(output):
            # The part that ends here is `behind`, or this module's next call, unless this is the last one.
            tensor.register_hook(lambda gradient: self._mark_backward(self.behind if call == self.calls else self.part))
        self.clock.mark(self.part)
        return output

    def _mark_backward(self, part: str) -> None:
        self.clock.mark(f"{part}, backward")


def find_learnable(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that require a gradient in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor) and value.requires_grad:
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from find_learnable(item)
    elif isinstance(value, dict):
        yield from find_learnable([*value.values()])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from find_learnable([getattr(value, field.name) for field in dataclasses.fields(value)])


@contextlib.contextmanager
def mark_modules(model: TaskModel, clock: Marks) -> Iterator[None]:
    """Context manager: make the model's main modules mark where they begin and end."""
    vlbert, fast_rcnn = model.vlbert, model.vlbert.fast_rcnn
    modules = [(vlbert, "embedding", "pixels" if fast_rcnn is None else "res5", "encoder")]
    modules += [(vlbert, "encoder", "embedding", "heads")]
    if fast_rcnn is not None:
        modules = [*modules, (fast_rcnn, "backbone", "pixels", "RoIAlign"), (fast_rcnn, "res5", "RoIAlign", "res5")]
    originals = [(parent, name, getattr(parent, name)) for parent, name, _, _ in modules]
    for parent, name, before, behind in modules:
        setattr(parent, name, MarkedModule(getattr(parent, name), clock, before, name, behind))
    try:
        yield
    finally:
        for parent, name, module in originals:
            setattr(parent, name, module)


def run_marked_step(step: TrainingStep, batch: Batch, clock: Marks) -> None:
    """Take a training step on a batch in host memory, with a mark at the end of each of the PARTS."""
    last = "embedding" if step.model.vlbert.fast_rcnn is None else "backbone"
    with mark_modules(step.model, clock):
        clock.mark("")
        batch = batch.to(step.world.device)
        clock.mark("transfer")
        loss = total_loss(step.losses(batch))
        clock.mark("heads")
        loss.backward()
        clock.mark(f"{last}, backward")
        step.update()
        clock.mark("optimizer")


def count_flops(step: TrainingStep, batch: Batch) -> dict[str, int]:
    """Take a step on this batch, and return the number of floating point operations of each part."""
    clock = FlopClock()
    with clock.counter:
        run_marked_step(step, batch, clock)
    return dict(clock.flops)


def measure_matrix_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s measured for a large product of random matrices, as an upper bound for the device."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    clock = Clock(device)
    for _ in range(2):
        a @ b
    clock.mark("")
    rounds = 20 if device.type == "cuda" else 3
    for _ in range(rounds):
        a @ b
        clock.mark("product")
    return 2 * size**3 * rounds / clock.milliseconds()["product"] * 1000
