"""A training step and its parts: how long each takes, measured, and what it computes, counted by PyTorch.

A part takes the time between two marks on the device's time line, so that the parts of a step add up to it. Marks lie
at the boundaries of modules, in the forward pass and, as hooks of the tensors there, in the backward pass.
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
    """The model of a recipe as training runs it, with its optimizer; without data, log or checkpoints."""

    def __init__(self, recipe: Recipe, model: TaskModel, world: World):
        self.recipe, self.model, self.world = recipe, model, world
        self.optimizer = make_optimizer(model, recipe.optimizer)

    def losses(self, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        with autocast(self.recipe, self.world):
            return self.model(batch)

    def take(self, batch: Batch) -> None:
        """A step over a batch of the device."""
        total(self.losses(batch)).backward()
        self.update()

    def update(self) -> None:
        clip_gradients(self.model, self.recipe.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def total(losses: dict[str, tuple[Tensor, int]]) -> Tensor:
    """What is learned from: the mean of each loss, together. What carries no gradient is a measure, and no loss."""
    return sum(loss / max(1, count) for loss, count in losses.values() if loss.requires_grad)


class Marks(Protocol):
    """A Clock, a FlopClock, or the record of a rehearsal."""

    def mark(self, part: str) -> None: ...


class Clock:
    """Marks on the time line of a device: the interval since the mark before it belongs to a part."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """What came since the last mark was `part`; of the first mark, nothing."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # on the queue: nothing waits for it
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def milliseconds(self) -> dict[str, float]:
        """Part -> milliseconds, of all intervals since the first mark."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        found = Counter()
        for (_, before), (part, now) in zip(self.marks, self.marks[1:], strict=False):
            found[part] += before.elapsed_time(now) if self.device.type == "cuda" else 1000 * (now - before)
        return dict(found)


class FlopClock:
    """Marks of which the intervals are counted in floating point operations: of convolutions, products and attention.

    flops: part -> operations of all intervals. What is padded counts, and what is computed twice to save memory.
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
    """Where a sum is fused, too, its other summand stands before the weight."""
    weight = more[1] if isinstance(more[1], torch.Size) and len(more[1]) == 4 else more[0]
    return conv_flop_count([*x], [*weight], [*out_shape])


class Marked(nn.Module):
    """A module between two marks: `before` is the part that ends where it begins, `behind` the one that follows it in
    the forward pass and so comes before it in the backward pass.

    Called several times a step, as the backbone is, its calls follow one another in the backward pass, too, the last
    one first.
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

    def forward(self, *given: Any, **named: Any) -> Any:
        self.clock.mark(self.before if self.calls == 0 else self.part)
        self.calls += 1
        call = self.calls
        for tensor in learning(given):
            tensor.register_hook(lambda gradient: self._mark_backward(self.part))
        found = self.inner(*given, **named)
        for tensor in learning(found):
            # What ends here is the part behind or, of a call before the last, this module in the call after it.
            tensor.register_hook(lambda gradient: self._mark_backward(self.behind if call == self.calls else self.part))
        self.clock.mark(self.part)
        return found

    def _mark_backward(self, part: str) -> None:
        self.clock.mark(f"{part}, backward")


def learning(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts and dataclasses through which a gradient flows."""
    if isinstance(value, Tensor) and value.requires_grad:
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from learning(each)
    elif isinstance(value, dict):
        yield from learning([*value.values()])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from learning([getattr(value, one.name) for one in dataclasses.fields(value)])


@contextlib.contextmanager
def marked(model: TaskModel, clock: Marks) -> Iterator[None]:
    """While it lasts, the modules of the fast path mark where they begin and end."""
    vlbert, fast_rcnn = model.vlbert, model.vlbert.fast_rcnn
    modules = [(vlbert, "embedding", "pixels" if fast_rcnn is None else "res5", "encoder")]
    modules += [(vlbert, "encoder", "embedding", "heads")]
    if fast_rcnn is not None:
        modules += [(fast_rcnn, "backbone", "pixels", "RoIAlign"), (fast_rcnn, "res5", "RoIAlign", "res5")]
    before = [(parent, name, getattr(parent, name)) for parent, name, _, _ in modules]
    for parent, name, earlier, behind in modules:
        setattr(parent, name, Marked(getattr(parent, name), clock, earlier, name, behind))
    try:
        yield
    finally:
        for parent, name, module in before:
            setattr(parent, name, module)


def marked_step(step: TrainingStep, batch: Batch, clock: Marks) -> None:
    """A step over a batch of the host; the clock learns where its PARTS end."""
    last = "embedding" if step.model.vlbert.fast_rcnn is None else "backbone"
    with marked(step.model, clock):
        clock.mark("")
        batch = batch.to(step.world.device)
        clock.mark("transfer")
        loss = total(step.losses(batch))
        clock.mark("heads")
        loss.backward()
        clock.mark(f"{last}, backward")
        step.update()
        clock.mark("optimizer")


def counted_flops(step: TrainingStep, batch: Batch) -> dict[str, int]:
    """Part -> floating point operations of a step over this batch."""
    clock = FlopClock()
    with clock.counter:
        marked_step(step, batch, clock)
    return dict(clock.flops)


def matrix_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating point operations a second of one large product of random matrices: what the device gives at best."""
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
