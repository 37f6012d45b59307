"""Compute a pre-training step in a straightforward way, in plain fp32.

This is the baseline of benchmarks/train_step.py, and the reference for tests of the fast path
(tests/vlbert/test_train_step.py). It uses the model's configuration and weight names, but shares no code with it.
Tensors are channels first. Convolution, normalisation and ReLU are separate. Images, texts and regions are padded, and
the encoder runs over the padding. Both heads run at every position, labelled or not. Attention is explicit, and the
optimizer updates one parameter after another. Shape letters are those of vlbert/data/batch.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import roi_align

from training.optimizer import OptimizerConfig
from vlbert.config import ModelConfig
from vlbert.data.batch import Example
from vlbert.tasks.base import TaskModel

LossSums = dict[str, tuple[Tensor, int]]  # name -> (sum, count), as returned by the model

NO_LABEL = -100  # target of positions without a label
_AS_PUBLISHED: dict[str, Any] = {
    "visual_norm": "layer_norm",
    "special_tokens": "own",
    "masked_region_token": True,
    "end_visual_embedding": False,
}
_AS_PUBLISHED |= {"visual_embedding_size": None, "visual_activation": "relu", "visual_dropout": True}
_AS_PUBLISHED |= {"geometry": "centre", "region_classes": None}


@dataclass(frozen=True, eq=False)
class PlainBatch:
    """A batch of padded examples, one per row. The P rows with an image come first."""

    tokens: Tensor  # int64 [N, T]
    segments: Tensor  # int64 [N, T]
    token_region: Tensor  # int64 [N, T]
    word_targets: Tensor  # int64 [N, T], NO_LABEL at positions without a label
    text_mask: Tensor  # bool [N, T]
    pixels: Tensor  # float [P, 3, H, W], BGR, normalised, masked regions 0
    boxes: Tensor  # float [P, R, 4]
    region_mask: Tensor  # bool [P, R]
    masked: Tensor  # bool [P, R]
    sizes: Tensor  # float [P, 2], width and height of the images
    features: Tensor  # float [P, R, D], zeros if features are computed end to end
    region_targets: Tensor  # float [P, R, 1 + classes], zeros at regions without a label

    def to(self, device: torch.device) -> "PlainBatch":
        return PlainBatch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def pad_examples(examples: Sequence[Example], config: ModelConfig) -> PlainBatch:
    """Pad examples into one batch. Raises ValueError if an example has several texts, or shares of region cells."""
    if any(e.more or (e.image and e.image.cells is not None) for e in examples):
        raise ValueError("the plain path supports pre-training only: one text per example, and no shares of cells")
    examples = sorted(examples, key=lambda example: example.image is None)  # stable: keeps the order otherwise
    texts, images = [e.text for e in examples], [e.image for e in examples if e.image is not None]
    n, p, t = len(texts), len(images), max(len(words.tokens) for words in texts)
    r = max((len(image.boxes) for image in images), default=0)
    classes = max((image.labels["region_classes"].shape[1] for image in images), default=1)
    width, height = (max((q.size[side] for q in images if q.pixels is not None), default=0) for side in (0, 1))
    batch = PlainBatch(
        tokens=torch.zeros(n, t, dtype=torch.int64),
        segments=torch.zeros(n, t, dtype=torch.int64),
        token_region=torch.zeros(n, t, dtype=torch.int64),
        word_targets=torch.full((n, t), NO_LABEL),
        text_mask=torch.zeros(n, t, dtype=torch.bool),
        pixels=torch.zeros(p, 3, height, width),
        boxes=torch.zeros(p, r, 4),
        region_mask=torch.zeros(p, r, dtype=torch.bool),
        masked=torch.zeros(p, r, dtype=torch.bool),
        sizes=torch.tensor([image.size for image in images], dtype=torch.float32).view(-1, 2),
        features=torch.zeros(p, r, config.regions.channels),
        region_targets=torch.zeros(p, r, classes),
    )
    for row, words in enumerate(texts):
        length = len(words.tokens)
        for tensor, values in ((batch.tokens, words.tokens), (batch.segments, words.segments)):
            tensor[row, :length] = torch.from_numpy(values)
        batch.token_region[row, :length] = torch.from_numpy(words.token_region)
        batch.text_mask[row, :length] = True
        batch.word_targets[row, :length][words.label_masks["word_label_mask"]] = torch.from_numpy(words.labels["words"])
    for row, image in enumerate(images):
        count = len(image.boxes)
        batch.boxes[row, :count] = torch.from_numpy(image.boxes)
        batch.masked[row, :count] = torch.from_numpy(image.masked)
        batch.region_mask[row, :count] = True
        class_probs = torch.from_numpy(image.labels["region_classes"])
        batch.region_targets[row, :count][image.label_masks["region_label_mask"]] = class_probs
        if image.features is not None:
            batch.features[row, :count] = torch.from_numpy(image.features)
        if image.pixels is not None:
            mean = torch.tensor(config.regions.pixel_mean).view(3, 1, 1)
            pixels = (image.pixels.flip(0).float() - mean) / config.regions.pixel_std
            blanked = [*image.boxes[image.masked], *(() if image.covered is None else image.covered)]
            for x1, y1, x2, y2 in (box.astype(int) for box in blanked):
                pixels[:, y1 : y2 + 1, x1 : x2 + 1] = 0
            batch.pixels[row, :, : pixels.shape[1], : pixels.shape[2]] = pixels
    return batch


class PlainPretraining:
    """A plain implementation of a pre-training model, with a copy of the weights of `model`.

    In a row, regions directly follow the text, and padding comes last, as published. Raises ValueError if the model's
    configuration differs from the published one.
    """

    def __init__(self, model: TaskModel):
        self.config, self.training = model.vlbert.config, True
        regions = self.config.regions
        differing = [name for name, value in _AS_PUBLISHED.items() if getattr(self.config, name) != value]
        differing += [] if regions.resnet.norm == "frozen" else ["regions.resnet.norm"]
        differing += [] if regions.masked_pixels == "mean" else ["regions.masked_pixels"]
        differing += [] if regions.features == "precomputed" or regions.masking == "pixels" else ["regions.masking"]
        differing += [] if model.task.settings.losses_over == "labels" else ["losses_over"]
        if differing:
            raise ValueError(f"the plain path supports only the published model; this differs: {', '.join(differing)}")
        self.weights = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            self.weights[name].requires_grad_(parameter.requires_grad)

    def parameters(self) -> list[Tensor]:
        """Return the trainable weights."""
        return [weight for weight in self.weights.values() if weight.requires_grad]

    def __call__(self, batch: PlainBatch) -> LossSums:
        end_to_end = self.config.regions.features == "end_to_end" and len(batch.boxes)
        appearance = self._appearance(batch) if end_to_end else batch.features
        x, mask, first = self._embed(batch, appearance)
        for layer in range(len(self.config.layers)):
            x = self._layer(f"vlbert.encoder.layers.{layer}", x, mask)
        return self._losses(batch, x, first)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps=1e-12)

    def _dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config.dropout, self.training)

    def _conv(self, name: str, x: Tensor, stride: int = 1, dilation: int = 1) -> Tensor:
        weight, norm = self.weights[f"{name}.weight"], f"{name}.norm"
        x = F.conv2d(x, weight, stride=stride, padding=dilation * (weight.shape[2] // 2), dilation=dilation)
        statistics = (self.weights[f"{norm}.running_mean"], self.weights[f"{norm}.running_var"])
        affine = (self.weights[f"{norm}.weight"], self.weights[f"{norm}.bias"])
        return F.batch_norm(x, *statistics, *affine, training=False, eps=1e-5)

    def _stage(self, name: str, x: Tensor, blocks: int, stride: int, dilation: int = 1) -> Tensor:
        for block in range(blocks):
            here, step = f"{name}.{block}", stride if block == 0 else 1
            first, second = (step, 1) if self.config.regions.resnet.stride_in_1x1 else (1, step)
            y = self._conv(f"{here}.conv1", x, first).relu()
            y = self._conv(f"{here}.conv2", y, second, dilation).relu()
            y = self._conv(f"{here}.conv3", y)
            if f"{here}.shortcut.weight" in self.weights:
                x = self._conv(f"{here}.shortcut", x, step)
            x = (x + y).relu()
        return x

    def _appearance(self, batch: PlainBatch) -> Tensor:
        """Return the appearance features of the regions, [P, R, D], with zeros at padding."""
        config, resnet = self.config.regions, self.config.regions.resnet
        x = self._conv("vlbert.fast_rcnn.backbone.stem.conv1", batch.pixels, 2).relu()
        caffe = resnet.stem_pool == "caffe"
        x = F.max_pool2d(x, 3, stride=2, padding=0 if caffe else 1, ceil_mode=caffe)
        for number, stride in ((2, 1), (3, 2), (4, 2)):
            x = self._stage(f"vlbert.fast_rcnn.backbone.res{number}", x, resnet.blocks[number - 2], stride)
        boxes = [boxes[mask] for boxes, mask in zip(batch.boxes, batch.region_mask, strict=True)]
        cells = roi_align(x, boxes, config.roi_size, 1 / 16, sampling_ratio=1, aligned=False)
        stride, dilation = (1, 2) if resnet.res5_dilated else (2, 1)
        cells = self._stage("vlbert.fast_rcnn.res5", cells, resnet.blocks[3], stride, dilation)
        pooled = cells.mean(dim=(2, 3))  # (K, D)
        appearance = pooled.new_zeros(*batch.region_mask.shape, pooled.shape[1])
        appearance[batch.region_mask] = pooled
        return appearance

    def _geometry(self, batch: PlainBatch) -> Tensor:
        """Return sines and cosines of each box's centre and size in hundredths of the image, [P, R, channels]."""
        x1, y1, x2, y2 = batch.boxes.unbind(dim=2)
        width, height = batch.sizes[:, :1], batch.sizes[:, 1:]
        n = self.config.geometry_channels // 8
        wavelength = torch.tensor([1000 ** (i / n) for i in range(n)], device=x1.device)
        values = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
        angles = [100 * value[:, :, None] / wavelength for value in values]
        return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=2)

    def _embed(self, batch: PlainBatch, appearance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the encoder's input [N, S, C], its padding mask [N, S], and the first region's position [N]."""
        table = {name: self.weights[f"vlbert.embedding.{name}.weight"] for name in ("words", "positions", "segments")}
        special = {
            name: self.weights[f"vlbert.embedding.{name}.weight"][0]
            for name in ("region_token", "masked_region_token", "end_token", "no_image_embedding")
        }
        if self.config.regions.features == "precomputed":
            blank = self.weights["vlbert.embedding.masked_appearance.weight"][0]
            appearance = torch.where(batch.masked[:, :, None], blank, appearance)
        visual = self._dropout(torch.cat([self._geometry(batch), appearance], dim=2))
        visual = self._linear("vlbert.embedding.visual", visual).relu()  # (P, R, C)
        (n, t), p = batch.tokens.shape, len(batch.region_mask)
        lengths, regions = batch.text_mask.sum(dim=1), F.pad(batch.region_mask.sum(dim=1), (0, n - p))
        word_visual = torch.cat(
            [
                visual[torch.arange(p, device=visual.device)[:, None], batch.token_region[:p]],
                special["no_image_embedding"].expand(n - p, t, -1),
            ]
        )
        words = table["words"][batch.tokens] + self._norm("vlbert.embedding.text_visual.norm", word_visual)
        words = words + table["positions"][:t] + table["segments"][batch.segments]
        tokens = torch.where(batch.masked[:, :, None], special["masked_region_token"], special["region_token"])
        boxes = tokens + self._norm("vlbert.embedding.region_visual.norm", visual)
        boxes = boxes + table["positions"][lengths[:p]][:, None] + table["segments"][2]
        ends = special["end_token"] + table["positions"][lengths + 1] + table["segments"][2]

        first, end = lengths, lengths + regions
        x = words.new_zeros(n, int(end.max()) + 1, words.shape[2])
        mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        row, position = batch.text_mask.nonzero(as_tuple=True)
        x[row, position], mask[row, position] = words[row, position], True
        row, position = batch.region_mask.nonzero(as_tuple=True)
        x[row, first[row] + position], mask[row, first[row] + position] = boxes[row, position], True
        row = torch.arange(n, device=x.device)
        x[row, end], mask[row, end] = ends, True
        return self._dropout(self._norm("vlbert.embedding.norm", x)), mask, first

    def _layer(self, name: str, x: Tensor, mask: Tensor) -> Tensor:
        n, s, c = x.shape
        query, key, value = (
            self._linear(f"{name}.{part}", x).view(n, s, self.config.num_heads, -1).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        scores = query @ key.transpose(2, 3) / (c / self.config.num_heads) ** 0.5  # (N, heads, S, S)
        scores = scores - 10_000.0 * (~mask)[:, None, None, :]
        attended = (self._dropout(scores.softmax(dim=3)) @ value).transpose(1, 2).reshape(n, s, c)
        attended = self._dropout(self._linear(f"{name}.attention_output", attended))
        x = self._norm(f"{name}.attention_norm", x + attended)
        y = self._dropout(self._linear(f"{name}.output", F.gelu(self._linear(f"{name}.intermediate", x))))
        return self._norm(f"{name}.output_norm", x + y)

    def _losses(self, batch: PlainBatch, x: Tensor, first: Tensor) -> LossSums:
        (_, t), (p, r) = batch.tokens.shape, batch.region_mask.shape
        words = F.gelu(self._linear("head.word_transform.dense", x[:, :t]))
        words = self._norm("head.word_transform.norm", words)
        words = F.linear(words, self.weights["vlbert.embedding.words.weight"], self.weights["head.word_bias"])
        losses = {}
        for name, rows in (("words", slice(0, p)), ("text_words", slice(p, None))):
            targets = batch.word_targets[rows].flatten()
            loss = F.cross_entropy(words[rows].flatten(0, 1), targets, ignore_index=NO_LABEL, reduction="sum")
            losses[name] = (loss, int((targets != NO_LABEL).sum()))
        positions = (first[:p, None] + torch.arange(r, device=x.device)).clamp(max=x.shape[1] - 1)
        regions = x[:p].gather(1, positions[:, :, None].expand(-1, -1, x.shape[2])) * batch.region_mask[:, :, None]
        regions = F.gelu(self._linear("head.region_transform.dense", regions))
        log_probs = self._linear("head.region_classifier", regions).log_softmax(dim=2)
        count = int((batch.region_targets.sum(dim=2) > 0).sum())
        if p:
            losses["regions"] = (-(batch.region_targets * log_probs).sum(), count)
        return losses


def make_plain_optimizer(plain: PlainPretraining, config: OptimizerConfig) -> torch.optim.AdamW:
    """Make an AdamW that updates one parameter after another."""
    rate, decay = config.learning_rate, config.weight_decay
    return torch.optim.AdamW(plain.parameters(), rate, config.betas, config.epsilon, decay, foreach=False, fused=False)


def gradient_errors(model: TaskModel, plain: PlainPretraining) -> dict[str, float]:
    """Return the model's relative gradient error by parameter: norm of the difference / norm of plain's gradient.

    Gradients that are zero in exact arithmetic (the keys' biases) contain only rounding errors. So the divisor is at
    least 1e-4 of the norm of all gradients together. Raises ValueError if a gradient exists on only one side.
    """
    gradients = {name: weight.grad for name, weight in plain.weights.items() if weight.grad is not None}
    ours = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    if ours.keys() != gradients.keys():
        raise ValueError(f"these gradients exist on only one side: {sorted(ours.keys() ^ gradients.keys())}")
    least = 1e-4 * float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    return {
        name: float((ours[name] - gradient).norm() / gradient.norm().clamp(min=least))
        for name, gradient in gradients.items()
    }
