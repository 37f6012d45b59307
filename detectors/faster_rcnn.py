"""ResNet-C4 Faster R-CNN with object classes and attributes: the network of bottom-up attention, on torchvision's ops.

An image goes through `resize` -> `to_input` -> backbone -> RPN -> proposals -> RoI features -> heads; each is callable
alone. The regions of an image are its proposals, chosen by select.py: the features and probabilities of a region are
those of exactly that proposal. `boxes` says which box stands for it. `FasterRCNNDetector` is the whole behind the
Detector interface.
Shape letters: N images, H W input pixels, h w cells of the C4 map (stride 16), A anchors a cell, P proposals, K boxes,
D channels of res5, C classes without background; the background is the last column, as "no attribute" is.
"""

import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn

from detectors import detector_id
from detectors.resnet import RESNET50, RESNET101, Res5, ResNetC4, ResNetConfig
from detectors.select import SelectionSettings, select_regions
from storage.sample import Regions, Sample

STRIDE = 16
PIXEL_MEAN_BGR = (102.9801, 115.9465, 122.7717)
# A box grows by at most this factor, so that exp() of a wild delta stays finite.
_LARGEST_LOG_SCALE = math.log(1000 / 16)
# Goes into every detector's id: raise it when the code below, or select.py, finds other regions than before.
_RULES_VERSION = 1
# Settings that are younger than the first ids, with what was done before: with it they do not enter the id.
_BEFORE_THEY_WERE_SETTINGS = {"boxes": "proposals", "keep_features": False}
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class FasterRCNNConfig:
    """Everything about the network except its weights; the defaults are the Visual Genome network."""

    resnet: ResNetConfig = RESNET101
    """Backbone (stem to res4) and res5."""
    num_classes: int = 1600
    """C, without the background."""
    num_attributes: int = 400
    """Without "no attribute"; 0: no attribute head."""
    anchor_sizes: tuple[float, ...] = (64, 128, 256, 512)
    """Square roots of the anchors' areas, in pixels of the resized image."""
    anchor_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Height over width."""
    rpn_channels: int = 512
    """Width of the RPN's 3x3 convolution."""
    short_side: int = 600
    """The image's shorter side becomes so many pixels ..."""
    long_side: int = 1000
    """... unless the longer one would then have more than these, which it gets instead."""
    resize: str = "pil"
    """How: `pil`, antialiased bilinear on 8-bit pixels, is the only way here; Caffe's cv2 gives other pixels."""
    pre_nms: int = 6000
    """Boxes of highest objectness that enter the RPN's suppression."""
    rpn_nms_threshold: float = 0.7
    """IoU above which the RPN suppresses."""
    post_nms: int = 300
    """Proposals that leave it at most."""
    minimum_side: float = 0.0
    """Proposals need sides longer than this, in pixels of the resized image."""
    roi_op: str = "pool"
    """`pool`: RoIPool, quantised; `align1`: RoIAlign, one sample a bin, without the half-pixel shift."""
    pool_size: int = 14
    """Cells a side of what is pooled from a box."""
    box_weights: tuple[float, float, float, float] = (10, 10, 5, 5)
    """Divisors of the box head's dx, dy, dw, dh."""
    attribute_embedding: int = 256
    """Width of the class embedding that the attribute head gets."""
    attribute_hidden: int = 512
    """Hidden width of the attribute head."""

    def __post_init__(self):
        choices = {"resize": ("pil",), "roi_op": ("pool", "align1")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"FasterRCNNConfig.{name} is {getattr(self, name)!r}, must be one of {allowed}")
        at_least_one = ("num_classes", "rpn_channels", "short_side", "pre_nms", "post_nms", "pool_size")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"FasterRCNNConfig.{name} is {getattr(self, name)}, must be at least 1")
        if self.num_attributes < 0:
            raise ValueError(f"FasterRCNNConfig.num_attributes is {self.num_attributes}, must not be negative")
        if self.long_side < self.short_side:
            raise ValueError(f"FasterRCNNConfig.long_side {self.long_side} is less than short_side {self.short_side}")
        if not self.anchor_sizes or not self.anchor_ratios or min(*self.anchor_sizes, *self.anchor_ratios) <= 0:
            raise ValueError(f"anchor sizes {self.anchor_sizes} and ratios {self.anchor_ratios} must all be positive")

    @property
    def num_anchors(self) -> int:
        """A, anchors a cell."""
        return len(self.anchor_sizes) * len(self.anchor_ratios)


VG_RESNET101 = FasterRCNNConfig()
VG_RESNET50 = FasterRCNNConfig(resnet=RESNET50)
# Small enough to train in minutes on a CPU, for the 224x168 scenes and 36 classes of the drawn world.
DEMO = FasterRCNNConfig(
    resnet=ResNetConfig(blocks=(1, 1, 2, 2), width=8, res5_dilated=False),
    num_classes=36,
    num_attributes=0,
    anchor_sizes=(24, 48),
    rpn_channels=64,
    short_side=168,
    long_side=224,
    pre_nms=1000,
    post_nms=100,
    pool_size=7,
)
PRESETS = {"vg_resnet101": VG_RESNET101, "vg_resnet50": VG_RESNET50, "demo": DEMO}


# --- pixels -----------------------------------------------------------------------------------------------------------


def decode_bgr(jpeg: bytes) -> np.ndarray:
    """uint8 [height, width, 3] in BGR order, grey images too. OSError or its like where it is no complete image."""
    with Image.open(io.BytesIO(jpeg)) as image:
        return np.asarray(image.convert("RGB"))[:, :, ::-1]


def resized_size(height: int, width: int, config: FasterRCNNConfig) -> tuple[int, int]:
    """Height and width of the network's input: short side and cap on the long side, rounded half up."""
    scale = config.short_side / min(height, width)
    if max(height, width) * scale > config.long_side:
        scale = config.long_side / max(height, width)
    return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))


def resize(image_bgr: np.ndarray, config: FasterRCNNConfig) -> np.ndarray:
    """uint8 BGR pixels of any size -> uint8 [H, W, 3], antialiased bilinear."""
    height, width = resized_size(*image_bgr.shape[:2], config)
    return np.asarray(Image.fromarray(image_bgr).resize((width, height), Image.Resampling.BILINEAR))


def to_input(resized_bgr: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """uint8 [H, W, 3] BGR -> float32 [1, 3, H, W], minus the mean of each channel; 0..255, not divided."""
    pixels = torch.from_numpy(np.array(resized_bgr, order="C")).to(device).permute(2, 0, 1)[None].float()
    return pixels - torch.tensor(PIXEL_MEAN_BGR, device=device)[None, :, None, None]


# --- boxes ------------------------------------------------------------------------------------------------------------


def cell_anchors(config: FasterRCNNConfig) -> Tensor:
    """float32 [A, 4]: one cell's anchors, xyxy around its corner (0, 0), size by size and ratio by ratio."""
    sides = [
        (math.sqrt(s * s / r), math.sqrt(s * s / r) * r) for s in config.anchor_sizes for r in config.anchor_ratios
    ]
    return torch.tensor([(-w / 2, -h / 2, w / 2, h / 2) for w, h in sides], dtype=torch.float32)


def grid_anchors(cell: Tensor, height: int, width: int) -> Tensor:
    """float32 [h * w * A, 4] in pixels of the input: the cell's anchors at every cell, rows first."""
    ys = torch.arange(height, device=cell.device, dtype=cell.dtype) * STRIDE
    xs = torch.arange(width, device=cell.device, dtype=cell.dtype) * STRIDE
    y, x = torch.meshgrid(ys, xs, indexing="ij")
    shifts = torch.stack([x, y, x, y], dim=-1)
    return (shifts[:, :, None] + cell).reshape(-1, 4)


def apply_deltas(deltas: Tensor, boxes: Tensor, weights: Sequence[float] = (1, 1, 1, 1)) -> Tensor:
    """Move and scale boxes [K, 4] by dx, dy, dw, dh [K, ..., 4], times `weights`; continuous coordinates."""
    x1, y1, x2, y2 = boxes.reshape(len(boxes), *[1] * (deltas.dim() - 2), 4).unbind(-1)
    width, height = x2 - x1, y2 - y1
    dx, dy, dw, dh = (d / w for d, w in zip(deltas.unbind(-1), weights, strict=True))
    x = dx * width + (x1 + 0.5 * width)
    y = dy * height + (y1 + 0.5 * height)
    half_width = 0.5 * torch.exp(dw.clamp(max=_LARGEST_LOG_SCALE)) * width
    half_height = 0.5 * torch.exp(dh.clamp(max=_LARGEST_LOG_SCALE)) * height
    return torch.stack([x - half_width, y - half_height, x + half_width, y + half_height], dim=-1)


def clip_boxes(boxes: Tensor, height: float, width: float) -> Tensor:
    """Boxes [..., 4] cut to the image: 0 <= x <= width, 0 <= y <= height."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return torch.stack(
        [x1.clamp(0, width), y1.clamp(0, height), x2.clamp(0, width), y2.clamp(0, height)],
        dim=-1,
    )


# --- the network ------------------------------------------------------------------------------------------------------


class RPNHead(nn.Module):
    """C4 map -> objectness logits [N, A, h, w] and deltas [N, 4A, h, w]; channels 4a..4a+3 belong to anchor a."""

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        self.conv = nn.Conv2d(config.resnet.c4_channels, config.rpn_channels, 3, padding=1)
        self.objectness_logits = nn.Conv2d(config.rpn_channels, config.num_anchors, 1)
        self.anchor_deltas = nn.Conv2d(config.rpn_channels, 4 * config.num_anchors, 1)
        for layer in self.children():
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, c4: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.conv(c4))
        return self.objectness_logits(hidden), self.anchor_deltas(hidden)


class ProposalGenerator(nn.Module):
    """The RPN's head and its anchors."""

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        self.rpn_head = RPNHead(config)
        # Not part of the state dict: published files that bring anchors of their own are handled in weights.py.
        self.register_buffer("cell_anchors", cell_anchors(config), persistent=False)


@dataclass(frozen=True, eq=False)
class HeadOutputs:
    """What the heads say about K boxes."""

    class_logits: Tensor
    """[K, C + 1]."""
    box_deltas: Tensor
    """[K, C, 4], before division by box_weights."""
    attribute_logits: Tensor | None
    """[K, number of attributes + 1], or None without an attribute head."""


class BoxPredictor(nn.Module):
    """Features [K, D] -> classes, class-specific boxes, and attributes given the most probable class."""

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        channels, classes = config.resnet.res5_channels, config.num_classes
        self.cls_score = nn.Linear(channels, classes + 1)
        self.bbox_pred = nn.Linear(channels, 4 * classes)
        nn.init.normal_(self.cls_score.weight, std=0.01)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        nn.init.zeros_(self.cls_score.bias)
        nn.init.zeros_(self.bbox_pred.bias)
        if config.num_attributes:
            self.cls_embedding = nn.Embedding(classes + 1, config.attribute_embedding)
            self.fc_attr = nn.Linear(channels + config.attribute_embedding, config.attribute_hidden)
            self.attr_score = nn.Linear(config.attribute_hidden, config.num_attributes + 1)
        else:
            self.drop_attributes()

    def drop_attributes(self) -> None:
        """Go on without an attribute head; attributes are then absent, not zero."""
        self.cls_embedding = self.fc_attr = self.attr_score = None

    def forward(self, features: Tensor) -> HeadOutputs:
        class_logits = self.cls_score(features)
        attribute_logits = None
        if self.attr_score is not None:
            embedded = self.cls_embedding(class_logits.argmax(dim=1))
            attribute_logits = self.attr_score(F.relu(self.fc_attr(torch.cat([features, embedded], dim=1))))
        deltas = self.bbox_pred(features).unflatten(1, (-1, 4))
        return HeadOutputs(class_logits, deltas, attribute_logits)


class RoIHeads(nn.Module):
    """res5 and the predictor."""

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        self.res5 = Res5(config.resnet)
        self.box_predictor = BoxPredictor(config)


class FasterRCNN(nn.Module):
    """The network; its state dict has detectron2's names, so published files load by name (weights.py)."""

    def __init__(self, config: FasterRCNNConfig):
        super().__init__()
        self.config = config
        self.backbone = ResNetC4(config.resnet)
        self.proposal_generator = ProposalGenerator(config)
        self.roi_heads = RoIHeads(config)

    @classmethod
    def untrained(cls, config: FasterRCNNConfig, seed: int) -> "FasterRCNN":
        """The network with random weights, the same for the same seed; it finds nothing meaningful."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(config).eval()

    def rpn(self, c4: Tensor) -> tuple[Tensor, Tensor]:
        """Objectness logits [N, A, h, w] and deltas [N, 4A, h, w] of a C4 map."""
        return self.proposal_generator.rpn_head(c4)

    def proposals(self, logits: Tensor, deltas: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Proposals [P, 4] (xyxy, input pixels) and logits [P] of one image, best first, from [A, h, w] and [4A, h, w].

        height and width are those of the network's input. Non-finite boxes and those with no area inside are dropped.
        """
        config = self.config
        anchors = grid_anchors(self.proposal_generator.cell_anchors, *logits.shape[1:])
        scores = logits.permute(1, 2, 0).flatten()
        deltas = deltas.unflatten(0, (-1, 4)).permute(2, 3, 0, 1).reshape(-1, 4)
        boxes = apply_deltas(deltas, anchors)
        finite = torch.isfinite(boxes).all(dim=1) & torch.isfinite(scores)
        boxes = clip_boxes(boxes, height, width)
        sides = boxes[:, 2:] - boxes[:, :2]
        usable = finite & (sides > config.minimum_side).all(dim=1)
        boxes, scores = boxes[usable], scores[usable]
        best = scores.argsort(descending=True, stable=True)[: config.pre_nms]
        boxes, scores = boxes[best], scores[best]
        kept = torchvision.ops.nms(boxes, scores, config.rpn_nms_threshold)[: config.post_nms]
        return boxes[kept], scores[kept]

    def pool(self, c4: Tensor, boxes: Tensor) -> Tensor:
        """[K, 16w, pool_size, pool_size] from the C4 map of one image, [1, 16w, h, w], and boxes in input pixels."""
        size = self.config.pool_size
        if self.config.roi_op == "pool":
            return torchvision.ops.roi_pool(c4, [boxes], size, spatial_scale=1 / STRIDE)
        return torchvision.ops.roi_align(c4, [boxes], size, spatial_scale=1 / STRIDE, sampling_ratio=1, aligned=False)

    def roi_features(self, c4: Tensor, boxes: Tensor) -> Tensor:
        """Features [K, D] of boxes [K, 4] (input pixels) of one image: the mean over the map that res5 puts out."""
        return self.roi_heads.res5(self.pool(c4, boxes)).mean(dim=(2, 3))

    def heads(self, features: Tensor) -> HeadOutputs:
        """Classes, boxes and attributes for features [K, D]."""
        return self.roi_heads.box_predictor(features)

    def regressed(self, proposals: Tensor, deltas: Tensor, labels: Tensor, height: int, width: int) -> Tensor:
        """Where deltas [K, C, 4] of classes labels [K] move proposals [K, 4]; input pixels, clipped, perhaps empty."""
        own = deltas[torch.arange(len(labels), device=labels.device), labels]
        return clip_boxes(apply_deltas(own, proposals, self.config.box_weights), height, width)


# --- behind the Detector interface ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DetectorSettings:
    """How the network is run over images."""

    selection: SelectionSettings = field(default_factory=SelectionSettings)
    """Which proposals become regions."""
    boxes: str = "proposals"
    """A region's box: `proposals`, the RPN's own, as in the authors' files; or `regressed`, where the box head moves it
    for the region's class, as Faster R-CNN's detections are. Only the box changes: which regions there are, their
    order, probabilities and features are those of the proposals. Regressed boxes may therefore overlap more than the
    selection allows; one without any area inside the image keeps its proposal's box.
    """
    keep_features: bool = False
    """Store the features [N, D] of the regions, too, in float16: 2 D bytes a region."""
    device: str = "cpu"
    """`cpu`, `cuda`, or one of several as `cuda:1`."""
    head_dtype: str = "float32"
    """Precision of res5: `float32`, or `bfloat16` for speed on a GPU. Backbone and RPN stay in float32."""
    tf32: bool = False
    """Convolutions of a GPU in TF32: the range of float32 with 10 bits of fraction instead of 23, for speed."""
    threads: int = 1
    """Threads of torch while detecting on a CPU. Another number adds in another order, and so gives other last bits:
    one is what every machine can do alike. More processes, each with its own shards, use more cores.
    """

    def __post_init__(self):
        if self.threads < 1:
            raise ValueError(f"DetectorSettings.threads is {self.threads}, must be at least 1")
        if self.boxes not in ("proposals", "regressed"):
            raise ValueError(f"DetectorSettings.boxes is {self.boxes!r}, neither 'proposals' nor 'regressed'")
        if self.head_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"DetectorSettings.head_dtype is {self.head_dtype!r}, neither 'float32' nor 'bfloat16'")
        if self.device_type not in ("cpu", "cuda"):
            raise ValueError(f"DetectorSettings.device is {self.device!r}, must be cpu, cuda or such as cuda:1")
        if self.tf32 and self.device_type != "cuda":
            raise ValueError(f"DetectorSettings.tf32 is for device cuda; leave it out with device {self.device}")

    @property
    def device_type(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]


@contextmanager
def _running(settings: DetectorSettings) -> Iterator[None]:
    """Torch with these threads and this precision of float32 on GPUs, and afterwards as it was."""
    convolutions, products = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = torch.get_num_threads(), convolutions.fp32_precision, products.fp32_precision
    torch.set_num_threads(settings.threads)
    # Said outright, because torch's own default for convolutions is TF32.
    convolutions.fp32_precision = "tf32" if settings.tf32 else "ieee"
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        threads, convolutions.fp32_precision, products.fp32_precision = before
        torch.set_num_threads(threads)


class FasterRCNNDetector:
    """A FasterRCNN with its weights' description (weights.Loaded.about, or {"untrained": True, "seed": ...})."""

    def __init__(self, network: FasterRCNN, weights: dict, settings: DetectorSettings):
        if "untrained" not in weights:
            raise ValueError(f"the description of the weights must say whether they are `untrained`: {weights}")
        if settings.device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError("DetectorSettings.device is cuda, but torch finds no GPU here; detect on cpu")
        self.network = network.to(settings.device).eval()
        self.settings = settings
        self.about = {
            "backend": "faster_rcnn",
            "rules_version": _RULES_VERSION,
            "network": dataclasses.asdict(network.config),
            "selection": dataclasses.asdict(settings.selection),
            "boxes": settings.boxes,
            "keep_features": settings.keep_features,
            "head_dtype": settings.head_dtype,
            "device": settings.device_type,
            "convolutions": "tf32" if settings.tf32 else "float32",
            "threads": settings.threads,
            **weights,
        }
        # Threads and device change only the last bits of float32 sums as long as no device rounds their terms, so one
        # stage may be made on CPUs and GPUs together. TF32 rounds them to three digits, and makes another detector.
        # The weights' hash says which file it is.
        indifferent = {"weights_file", "classes", "attribute_names", "release", "differs_from_release"}
        indifferent |= {"threads", "device"}
        if not settings.tf32:
            indifferent.add("convolutions")
        indifferent |= {name for name, before in _BEFORE_THEY_WERE_SETTINGS.items() if self.about[name] == before}
        self.id = detector_id({name: value for name, value in self.about.items() if name not in indifferent})

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        with _running(self.settings):
            return [self._detect_one(sample) for sample in samples]

    # One image at a time: padding a batch would change features near the border, and the RoI head has 300 boxes anyway.
    @torch.inference_mode()
    def _detect_one(self, sample: Sample) -> Regions | str:
        try:
            image = decode_bgr(sample.image)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return f"bad_image: {type(error).__name__}: {error}"
        height, width = image.shape[:2]
        if (height, width) != (sample.height, sample.width):
            return f"bad_image: is {width}x{height}, its record says {sample.width}x{sample.height}"
        network = self.network
        pixels = to_input(resize(image, network.config), self.settings.device)
        resized = pixels.shape[2:]
        c4 = network.backbone(pixels)
        logits, deltas = network.rpn(c4)
        proposals, _ = network.proposals(logits[0], deltas[0], *resized)
        stored = to_stored_pixels(proposals, resized, (height, width))
        visible = _have_area(stored)
        proposals, stored = proposals[visible], stored[visible]
        if not len(proposals):
            return "no_regions: the network proposes no box with a finite score"
        with torch.autocast(self.settings.device_type, torch.bfloat16, enabled=self.settings.head_dtype == "bfloat16"):
            features = network.roi_features(c4, proposals)
        outputs = network.heads(features.float())
        regions, chosen = self._choose(sample.key, stored.cpu().numpy(), outputs)
        if self.settings.boxes == "regressed":
            labels = torch.from_numpy(regions.labels).to(chosen)
            deltas = outputs.box_deltas[chosen]
            if not torch.isfinite(deltas).all():
                raise ValueError(f"the network's boxes for sample {sample.key} are not finite: are these its weights?")
            moved = network.regressed(proposals[chosen], deltas, labels, *resized)
            moved = to_stored_pixels(moved, resized, (height, width))
            moved = torch.where(_have_area(moved)[:, None], moved, stored[chosen])
            regions = dataclasses.replace(regions, boxes=moved.cpu().numpy())
        if self.settings.keep_features:
            regions = dataclasses.replace(regions, features=_as_float16(features[chosen], sample.key))
        return regions

    def _choose(self, key: str, boxes: np.ndarray, outputs: HeadOutputs) -> tuple[Regions, Tensor]:
        """The regions among boxes [P, 4] (stored-image pixels), by the 10-100 rule, most probable first.

        With them int64 [N], which of the boxes each is, on the device of the outputs.
        """
        probs = outputs.class_logits.softmax(dim=1).cpu().numpy()
        if not np.isfinite(probs).all():
            raise ValueError(
                f"the network's class probabilities for sample {key} are not finite: are these its weights?"
            )
        foreground = probs[:, :-1]
        chosen = select_regions(boxes, foreground, self.settings.selection).indices
        scores = foreground[chosen].max(axis=1)
        chosen = chosen[np.argsort(-scores, kind="stable")]
        attributes = attribute_scores = None
        if outputs.attribute_logits is not None:
            attribute_probs = outputs.attribute_logits.softmax(dim=1)[:, :-1].cpu().numpy()[chosen]
            attributes = attribute_probs.argmax(axis=1).astype(np.int32)
            attribute_scores = attribute_probs.max(axis=1)
        regions = Regions(
            boxes=boxes[chosen],
            scores=foreground[chosen].max(axis=1),
            labels=foreground[chosen].argmax(axis=1).astype(np.int32),
            detector=self.id,
            background=foreground.shape[1],
            class_probs=probs[chosen].astype(np.float16),
            attributes=attributes,
            attribute_scores=attribute_scores,
        )
        return regions, torch.from_numpy(chosen).to(outputs.class_logits.device)


def _have_area(boxes: Tensor) -> Tensor:
    """bool [K]: which boxes [K, 4] hold any pixels at all."""
    return (boxes[:, 2:] > boxes[:, :2]).all(dim=1)


def _as_float16(features: Tensor, key: str) -> np.ndarray:
    """Features [N, D] of a sample's regions as they are stored; ValueError where float16 cannot hold one."""
    features = features.float().cpu().numpy()
    lost = np.argwhere(~(np.abs(features) <= _LARGEST_FLOAT16))
    if len(lost):
        region, column = lost[0]
        raise ValueError(
            f"sample {key}: feature {column} of region {region} is {features[region, column]:g}; float16 holds numbers "
            f"up to {_LARGEST_FLOAT16:.0f}. Are these the network's weights? If so, detect without --keep-features"
        )
    return features.astype(np.float16)


def to_stored_pixels(boxes: Tensor, resized: Sequence[int], stored: Sequence[int]) -> Tensor:
    """Boxes [K, 4] in pixels of the resized image (height, width) -> pixels of the stored one, clipped to it."""
    scale_y, scale_x = stored[0] / resized[0], stored[1] / resized[1]
    scales = torch.tensor([scale_x, scale_y, scale_x, scale_y], device=boxes.device, dtype=boxes.dtype)
    return clip_boxes(boxes * scales, *stored)
