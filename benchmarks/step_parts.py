"""What a training step consists of: what each part must compute, counted, and how long it takes, measured.

A part takes the time between two marks on the device's time line, so that the parts of a step add up to it. Marks lie
at the boundaries of modules, in the forward pass and, as hooks of the tensors there, in the backward pass.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from detectors.resnet import ResNetConfig
from training.operations import Record
from vlbert.config import ModelConfig, StreamSize
from vlbert.data.batch import Batch, Example
from vlbert.rehearsal import TrainingStep, total
from vlbert.tasks.base import TaskModel

FORWARD = ("pixels", "backbone", "RoIAlign", "res5", "embedding", "encoder", "heads")
PARTS = ("transfer", *FORWARD, *(f"{part}, backward" for part in reversed(FORWARD[1:])), "optimizer")


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


class Marked(nn.Module):
    """A module between two marks: `before` is the part that ends where it begins, `behind` the one that follows it in
    the forward pass and so comes before it in the backward pass.

    Called several times a step, as the backbone is, its calls follow one another in the backward pass, too, the last
    one first.
    """

    def __init__(self, inner: nn.Module, clock: Clock, before: str, part: str, behind: str):
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
def marked(model: TaskModel, clock: Clock) -> Iterator[None]:
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


def marked_step(step: TrainingStep, batch: Batch, clock: Clock | Record) -> None:
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


def counted_flops(config: ModelConfig, examples: Sequence[Example], vocabulary: int, classes: int) -> dict[str, int]:
    """Part -> floating point operations that one step over these examples cannot do without.

    Counted from shapes, two for a multiplication and addition, in convolutions, linear layers and attention alone: no
    padding, no kernel and no fusion changes them. A backward pass takes the forward pass's once for the gradient of the
    input and once for that of the weights, where these are wanted. What is computed twice to save memory counts once.
    """
    images = [example.image for example in examples if example.image is not None]
    flops = Counter(dict.fromkeys(("encoder", "embedding", "heads"), 0))
    if config.regions.features == "end_to_end":
        frozen, resnet = config.regions.frozen_stages, config.regions.resnet
        for image in images:
            width, height = image.size
            forward, backward, map_learns = _backbone_flops(resnet, height, width, frozen)
            flops.update({"backbone": forward, "backbone, backward": backward})
            forward, backward = _res5_flops(resnet, config.regions.roi_size, frozen, map_learns)
            count = len(image.boxes)
            flops.update({"res5": forward * count, "res5, backward": backward * count})
    c, regions, joint = config.hidden_size, config.regions_stream, config.embedding == "visual_linguistic"
    count = sum(len(image.boxes) for image in images)
    if joint:
        into = (config.geometry_channels + config.regions.channels) * (config.visual_embedding_size or c)
    else:
        into = (5 + config.regions.channels) * regions.hidden_size
    flops["embedding"] += 2 * count * into
    for example in examples:
        boxes = 0 if example.image is None else len(example.image.boxes)
        for words in example.texts:
            lengths = len(words.tokens), boxes + joint  # with [END]
            flops["encoder"] += sum(_layer_flops(config, kind, *lengths) for kind in config.layers)
            flops["heads"] += 2 * len(words.labels["words"]) * (c * c + c * config.word_rows(vocabulary))
    labels = sum(len(image.labels["region_classes"]) for image in images)
    flops["heads"] += 2 * labels * regions.hidden_size * (regions.hidden_size + 1 + classes)
    for part in ("embedding", "encoder", "heads"):
        flops[f"{part}, backward"] = 2 * flops[part]
    return dict(flops)


def _layer_flops(config: ModelConfig, kind: str, tokens: int, regions: int) -> int:
    """Of one layer J, T, V or X over one row."""
    text, seen, shared = config.text_stream, config.regions_stream, config.coattention.hidden_size

    def feed_forward(length: int, size: StreamSize) -> int:
        return 2 * length * 2 * size.hidden_size * size.intermediate_size

    def attention(length: int, size: StreamSize) -> int:
        return 2 * length * 4 * size.hidden_size**2 + 2 * 2 * length**2 * size.hidden_size

    if kind == "X":  # queries, keys, values and the way back of both streams, and two products of attention each
        linear = 2 * 4 * shared * (tokens * text.hidden_size + regions * seen.hidden_size)
        products = 2 * 2 * 2 * tokens * regions * shared
        return linear + products + feed_forward(tokens, text) + feed_forward(regions, seen)
    length, size = {"J": (tokens + regions, text), "T": (tokens, text), "V": (regions, seen)}[kind]
    return attention(length, size) + feed_forward(length, size)


@dataclasses.dataclass
class _Count:
    """Operations of convolutions, counted one after the other; `learns`: whether a gradient flows into the map."""

    learns: bool
    forward: int = 0
    backward: int = 0

    def conv(self, height: int, width: int, inputs: int, outputs: int, kernel: int, trained: bool, learns: bool):
        """One that puts out a map of height x width; its input's gradient is wanted where `learns`."""
        flops = 2 * height * width * inputs * outputs * kernel**2
        self.forward += flops
        self.backward += flops * (int(trained) + int(learns))

    def stage(self, config: ResNetConfig, number: int, height: int, width: int, stride: int, trained: bool) -> tuple:
        """res<number> over a map of height x width; the size of what comes out."""
        middle = config.width * 2 ** (number - 2)
        inputs, outputs = config.width if number == 2 else 2 * middle, 4 * middle
        for block in range(config.blocks[number - 2]):
            step = stride if block == 0 else 1
            after = (height - 1) // step + 1, (width - 1) // step + 1
            within = after if config.stride_in_1x1 else (height, width)
            inside = self.learns or trained
            self.conv(*within, inputs, middle, 1, trained, self.learns)
            self.conv(*after, middle, middle, 3, trained, inside)
            self.conv(*after, middle, outputs, 1, trained, inside)
            if inputs != outputs or step != 1:
                self.conv(*after, inputs, outputs, 1, trained, self.learns)
            self.learns, inputs, (height, width) = inside, outputs, after
        return height, width


def _backbone_flops(config: ResNetConfig, height: int, width: int, frozen: int) -> tuple[int, int, bool]:
    """(forward, backward) of one image, and whether the map that comes out has a gradient."""
    count = _Count(learns=False)
    height, width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
    count.conv(height, width, 3, config.width, 7, frozen < 1, False)
    count.learns = frozen < 1
    if config.stem_pool == "caffe":
        height, width = (-(-(side - 3) // 2) + 1 for side in (height, width))
    else:
        height, width = ((side - 1) // 2 + 1 for side in (height, width))
    for number, stride in ((2, 1), (3, 2), (4, 2)):
        height, width = count.stage(config, number, height, width, stride, trained=frozen < number)
    return count.forward, count.backward, count.learns


def _res5_flops(config: ResNetConfig, roi_size: int, frozen: int, learns: bool) -> tuple[int, int]:
    """(forward, backward) of one region."""
    count = _Count(learns=learns)
    count.stage(config, 5, roi_size, roi_size, 1 if config.res5_dilated else 2, trained=frozen < 5)
    return count.forward, count.backward


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
