"""A Faster R-CNN behind the Detector interface: images in, regions out, as fast as they are exact.

The regions of an image are proposals, chosen by select.py: the features and probabilities of a region are those of
exactly that proposal. `boxes` says which box stands for it, or that boxes are given.
Shape letters: P proposals of an image, N regions, C classes without background, D channels of res5.
"""

import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from detectors import Detector, detector_id
from detectors.faster_rcnn import (
    NARROWEST_INPUT,
    PRECISIONS,
    FasterRCNN,
    FasterRCNNConfig,
    clip_boxes,
    decode_bgr,
    resize,
    resize_scale,
    resized_size,
    to_input,
)
from detectors.select import SelectionSettings, select_regions
from storage.sample import Regions, Sample
from training.precision import float32_products

# Goes into every detector's id: raise it when the code here, in faster_rcnn.py or in select.py finds other regions.
_RULES_VERSION = 3
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
# Of res5's input, on a CPU as many as its caches like, on a GPU as many as fill it (1 GB in float32).
_ROIS_AT_A_TIME = {"cpu": 16, "cuda": 1200}
# Metadata that the id ignores: these fields do not change the regions, or the hash of the weights covers them.
_IGNORED_FIELDS = {"weights_file", "classes", "attribute_names", "release", "differs_from_release", "code_version"}
# Threads and batch change only the last bits of float32 sums. So does the device as long as nothing is rounded more
# coarsely, and one stage may be made on CPUs and GPUs together.
_IGNORED_FIELDS |= {"threads", "batch"}


@dataclass(frozen=True)
class DetectorSettings:
    """How the network is run over images."""

    selection: SelectionSettings = field(default_factory=SelectionSettings)
    """Which proposals become regions."""
    boxes: str = "proposals"
    """A region's box: `proposals`, the RPN's own, as in the authors' files; or `regressed`, where the box head moves it
    for the region's class, as Faster R-CNN's detections are. Only the box changes: which regions there are, their
    order, probabilities and features are those of the proposals. Regressed boxes may therefore overlap more than the
    selection allows; one without any area inside the image keeps its proposal's box. Or `given`: the regions are the
    boxes of an annotation file, in its order, and only what they show comes from the network.
    """
    keep_features: bool = False
    """Store the features [N, D] of the regions, too, in float16: 2 D bytes a region."""
    device: str = "cpu"
    """`cpu`, `cuda`, or one of several as `cuda:1`."""
    precision: str = "fp32"
    """`fp32`: float32 throughout; `bf16-res5`: res5 in bfloat16, for speed. Backbone and RPN stay in float32."""
    tf32: bool = False
    """Convolutions of a GPU in TF32: the range of float32 with 10 bits of fraction instead of 23, for speed."""
    threads: int = 1
    """Threads of torch while detecting on a CPU. Another number adds in another order, and so gives other last bits:
    one is what every machine can do alike. More processes, each with its own shards, use more cores.
    """
    batch: int = 1
    """Images that go through the backbone together, all of one resized size: nothing is padded, which would change
    features near the border. On a GPU, 8 keep it busy.
    """
    workers: int = 1
    """Threads that decode and resize the next images and choose the regions of the last ones meanwhile."""

    def __post_init__(self):
        for name in ("threads", "batch", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"DetectorSettings.{name} is {getattr(self, name)}, must be at least 1")
        if self.boxes not in ("proposals", "regressed", "given"):
            raise ValueError(f"DetectorSettings.boxes is {self.boxes!r}, must be 'proposals', 'regressed' or 'given'")
        if self.precision not in PRECISIONS:
            raise ValueError(f"DetectorSettings.precision is {self.precision!r}, must be one of {PRECISIONS}")
        if self.device_type not in ("cpu", "cuda"):
            raise ValueError(f"DetectorSettings.device is {self.device!r}, must be cpu, cuda or such as cuda:1")
        if self.tf32 and self.device_type != "cuda":
            raise ValueError(f"DetectorSettings.tf32 is for device cuda; leave it out with device {self.device}")

    @property
    def device_type(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]


@contextmanager
def running(settings: DetectorSettings) -> Iterator[None]:
    """Torch with these threads and this precision of float32 on GPUs, and afterwards as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with float32_products(convolutions="tf32" if settings.tf32 else "ieee", matrices="ieee"):
            yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """An image on its way to the network."""

    sample: Sample
    pixels: np.ndarray
    """[H, W, 3], resized."""
    scales: tuple[float, float]
    """Input pixels a stored pixel, down and across."""
    given: Regions | None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the input."""
        return self.pixels.shape[:2]


@dataclass(frozen=True, eq=False)
class _Seen:
    """What the network says about the boxes of one image."""

    sample: Sample
    boxes: np.ndarray
    """float32 [P, 4], stored pixels."""
    probs: np.ndarray
    """float32 [P, C + 1]."""
    attribute_probs: np.ndarray | None
    moved: np.ndarray | None
    """float32 [P, 4], stored pixels: where the box head moves each for its most probable class."""
    features: np.ndarray | None
    """float32 [P, D]."""


def describe_detector(
    network: FasterRCNNConfig, weights: dict, settings: DetectorSettings, given: str | None, backend: str
) -> tuple[str, dict]:
    """The id and the metadata of a FasterRCNNDetector, without building the network.

    weights: metadata of the weights; given: the id of the detector whose boxes are the regions.
    """
    metadata = {
        "backend": backend,
        "code_version": importlib.metadata.version("vlbert"),
        "rules_version": _RULES_VERSION,
        "network": dataclasses.asdict(network),
        "selection": dataclasses.asdict(settings.selection) if given is None else None,
        "boxes": settings.boxes,
        "given": given,
        "keep_features": settings.keep_features,
        "precision": settings.precision,
        "device": settings.device_type,
        "convolutions": "tf32" if settings.tf32 else "float32",
        "threads": settings.threads,
        "batch": settings.batch,
        **weights,
    }
    ignored = _IGNORED_FIELDS | ({"device"} if settings.precision == "fp32" and not settings.tf32 else set())
    hashed = {name: value for name, value in metadata.items() if name not in ignored}
    hashed["untrained"] = hashed.pop("random_init")  # the name under which it was first hashed: ids stay what they are
    return detector_id(hashed), metadata


class FasterRCNNDetector:
    """A network and the metadata of its weights: `LoadedWeights.metadata`, or {"random_init": True, "seed": ...}.

    given: whose boxes are the regions, with DetectorSettings.boxes `given`.
    """

    def __init__(
        self,
        network: FasterRCNN,
        weights: dict,
        settings: DetectorSettings,
        given: Detector | None = None,
        backend: str = "faster_rcnn",
    ):
        if "random_init" not in weights:
            raise ValueError(f"the metadata of the weights have no `random_init`: {weights}")
        if settings.device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError("DetectorSettings.device is cuda, but torch finds no GPU here; detect on cpu")
        if (given is not None) != (settings.boxes == "given"):
            raise ValueError("boxes are given by an annotation file, and with DetectorSettings.boxes 'given' alone")
        rois = _ROIS_AT_A_TIME[settings.device_type]
        self.network = network.for_inference(settings.precision, rois).to(settings.device)
        self.settings, self.given = settings, given
        self.id, self.metadata = describe_detector(
            network.config, weights, settings, given.id if given else None, backend
        )

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        with running(self.settings), ThreadPoolExecutor(self.settings.workers) as pool, torch.inference_mode():
            found = self._found(samples, pool)
            return [one.result() for one in found]

    def _found(self, samples: Sequence[Sample], pool: ThreadPoolExecutor) -> list[Future[Regions | str]]:
        """One future a sample: batches of equal size go through the network while the pool works before and after."""
        found = [pool.submit(self._prepare, sample) for sample in samples]
        waiting: dict[tuple[int, int], list[int]] = {}
        for place, future in enumerate(list(found)):
            prepared = future.result()
            if isinstance(prepared, str):
                continue
            batch = waiting.setdefault(prepared.size, [])
            batch.append(place)
            if len(batch) == self.settings.batch:
                self._see(waiting.pop(prepared.size), found, pool)
        for batch in waiting.values():
            self._see(batch, found, pool)
        return found

    def _see(self, batch: list[int], found: list[Future], pool: ThreadPoolExecutor) -> None:
        """Replace what stands in `found` at these places by what becomes of it."""
        prepared = [found[place].result() for place in batch]
        for place, seen in zip(batch, self._through_network(prepared), strict=True):
            found[place] = pool.submit(self._choose, seen) if isinstance(seen, _Seen) else _done(seen)

    def _prepare(self, sample: Sample) -> _Prepared | str:
        try:
            image = decode_bgr(sample.image)
        except UnidentifiedImageError:
            # Its own words hold an address in memory, and the same shard would give another manifest in each run.
            return "bad_image: UnidentifiedImageError: neither a JPEG nor a PNG"
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return f"bad_image: {type(error).__name__}: {error}"
        height, width = image.shape[:2]
        if (height, width) != (sample.height, sample.width):
            return f"bad_image: is {width}x{height}, its record says {sample.width}x{sample.height}"
        given = self.given.detect([sample])[0] if self.given else None
        if isinstance(given, str):
            return given
        config = self.network.config
        size = resized_size(height, width, config)
        if min(size) < NARROWEST_INPUT:
            return (
                f"bad_image: {width}x{height} is too narrow: the network would get it at {size[1]}x{size[0]}, and "
                f"needs {NARROWEST_INPUT} pixels each way"
            )
        pixels = resize(image, config)
        scales = (pixels.shape[0] / height, pixels.shape[1] / width)
        if config.resize == "caffe":
            scales = (resize_scale(height, width, config),) * 2
        return _Prepared(sample, pixels, scales, given)

    def _through_network(self, batch: list[_Prepared]) -> list[_Seen | str]:
        """What the network says about images of one size."""
        network, size = self.network, batch[0].size
        c4 = network.backbone(to_input(np.stack([image.pixels for image in batch]), self.settings.device))
        # Looked at here, because pooling passes over what is not a number, as if it were not part of the image.
        finite = torch.isfinite(c4).flatten(1).all(dim=1).tolist()
        if not all(finite):
            good = [image for image, is_finite in zip(batch, finite, strict=True) if is_finite]
            seen = iter(self._through_network(good) if good else [])
            return [next(seen) if is_finite else _not_finite("activations") for is_finite in finite]
        if self.given:
            boxes = [_to_input_pixels(image.given.boxes, image.scales, c4) for image in batch]
        else:
            logits, deltas = network.rpn(c4)
            boxes = [self._proposals(image, logits[place], deltas[place], size) for place, image in enumerate(batch)]
        features = network.roi_features(c4, boxes)
        outputs = network.heads(features)
        probs = outputs.class_logits.softmax(dim=1)
        attribute_probs = moved = None
        if outputs.attribute_logits is not None:
            attribute_probs = outputs.attribute_logits.softmax(dim=1)[:, :-1]
        if self.settings.boxes == "regressed":
            moved = network.regressed(torch.cat(boxes), outputs.box_deltas, probs[:, :-1].argmax(dim=1), *size)
        kept = features if self.settings.keep_features else None
        # From the device once a batch, and then dealt out to its images.
        here = [None if one is None else one.cpu() for one in (torch.cat(boxes), probs, attribute_probs, moved, kept)]
        seen, end = [], 0
        for place, image in enumerate(batch):
            start, end = end, end + len(boxes[place])
            if start == end:
                seen.append(_no_proposals(logits[place], deltas[place]))
            else:
                seen.append(self._seen(image, *(None if one is None else one[start:end] for one in here)))
        return seen

    def _proposals(self, image: _Prepared, logits: Tensor, deltas: Tensor, size: tuple[int, int]) -> Tensor:
        proposals, _ = self.network.proposals(logits, deltas, *size, scale=min(image.scales))
        return proposals[_have_area(to_stored_pixels(proposals, image.scales, _stored(image)))]

    def _seen(
        self,
        image: _Prepared,
        boxes: Tensor,
        probs: Tensor,
        attribute_probs: Tensor | None,
        moved: Tensor | None,
        features: Tensor | None,
    ) -> _Seen:
        """One image's share of what the network says, on the CPU."""
        scales, stored = image.scales, _stored(image)
        return _Seen(
            image.sample,
            image.given.boxes if image.given else to_stored_pixels(boxes, scales, stored).numpy(),
            probs.numpy(),
            None if attribute_probs is None else attribute_probs.numpy(),
            None if moved is None else to_stored_pixels(moved, scales, stored).numpy(),
            None if features is None else features.numpy(),
        )

    def _choose(self, seen: _Seen) -> Regions | str:
        """The regions of one image, by the 10-100 rule and most probable first; all in their order if given."""
        if not np.isfinite(seen.probs).all():
            return _not_finite("class probabilities")
        foreground = seen.probs[:, :-1]
        if self.given:
            chosen = np.arange(len(foreground))
        else:
            chosen = select_regions(seen.boxes, foreground, self.settings.selection).indices
            chosen = chosen[np.argsort(-foreground[chosen].max(axis=1), kind="stable")]
        boxes = seen.boxes[chosen]
        if seen.moved is not None:
            moved = seen.moved[chosen]
            if not np.isfinite(moved).all():
                return _not_finite("boxes")
            has_area = (moved[:, 2:] > moved[:, :2]).all(axis=1)
            boxes = np.where(has_area[:, None], moved, boxes)
        attributes = attribute_scores = features = None
        if seen.attribute_probs is not None:
            attribute_probs = seen.attribute_probs[chosen]
            if not np.isfinite(attribute_probs).all():
                return _not_finite("attribute probabilities")
            attributes = attribute_probs.argmax(axis=1).astype(np.int32)
            attribute_scores = attribute_probs.max(axis=1)
        if seen.features is not None:
            features = seen.features[chosen]
            if not (np.abs(features) <= _LARGEST_FLOAT16).all():
                largest = np.abs(features).max()
                return f"not_finite: a feature is {largest:g}, and float16 holds {_LARGEST_FLOAT16:.0f} at most"
            features = features.astype(np.float16)
        return Regions(
            boxes=boxes,
            scores=foreground[chosen].max(axis=1),
            labels=foreground[chosen].argmax(axis=1).astype(np.int32),
            detector=self.id,
            background=foreground.shape[1],
            class_probs=seen.probs[chosen].astype(np.float16),
            attributes=attributes,
            attribute_scores=attribute_scores,
            features=features,
        )


def _done(value: str) -> Future:
    future = Future()
    future.set_result(value)
    return future


def _no_proposals(logits: Tensor, deltas: Tensor) -> str:
    """Why there are none."""
    for what, numbers in (("objectness", logits), ("box deltas", deltas)):
        if not torch.isfinite(numbers).all():
            return _not_finite(what)
    return "no_regions: the network proposes no box inside the image"


def _not_finite(what: str) -> str:
    return f"not_finite: the network's {what} are not all finite numbers"


def _stored(image: _Prepared) -> tuple[int, int]:
    return image.sample.height, image.sample.width


def _have_area(boxes: Tensor) -> Tensor:
    """bool [K]: which boxes [K, 4] hold any pixels at all."""
    return (boxes[:, 2:] > boxes[:, :2]).all(dim=1)


def to_stored_pixels(boxes: Tensor, scales: Sequence[float], stored: Sequence[int]) -> Tensor:
    """Boxes [K, 4] in pixels of the network's input, `scales` (down, across) of them a stored pixel, -> pixels of the
    stored image (height, width), clipped to it."""
    down, across = scales
    each = torch.tensor([1 / across, 1 / down, 1 / across, 1 / down], device=boxes.device, dtype=boxes.dtype)
    return clip_boxes(boxes * each, *stored)


def _to_input_pixels(boxes: np.ndarray, scales: Sequence[float], like: Tensor) -> Tensor:
    down, across = scales
    return torch.from_numpy(boxes * np.float32([across, down, across, down])).to(like)
