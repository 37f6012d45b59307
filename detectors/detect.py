"""FasterRCNNDetector, a Faster R-CNN with the Detector interface: images in, regions out.

select.py selects an image's regions from its proposals. A region's features and probabilities are those of its
proposal; `DetectorSettings.boxes` decides which box is stored.
Shape letters: P proposals of an image, N regions, C classes without background, D channels of res5.
"""

import dataclasses
import importlib.metadata
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from detectors import detector_id
from detectors.config import DetectorSettings
from detectors.detectron2 import AnyFasterRCNN, Detectron2FasterRCNN
from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig, regress_boxes
from detectors.preprocess import BAD_IMAGE, NARROWEST_INPUT, decode_bgr, resize, resize_scale, resized_size, to_input
from detectors.select import select_regions
from storage.sample import Regions, Sample
from training.operators import clip_boxes
from training.precision import float32_precision

# Part of every detector's id: raise it if a change here, in faster_rcnn.py, preprocess.py or select.py changes regions.
_RULES_VERSION = 3
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
# Boxes in a res5 batch: few enough for the caches of a CPU, enough to fill a GPU (1 GB in float32).
ROIS_AT_A_TIME = {"cpu": 16, "cuda": 1200}
GPU_BATCH = 8  # images that keep a GPU busy
# Metadata that the id ignores, because they do not change the regions or the hash of the weights covers them.
_IGNORED_FIELDS = {"weights_file", "classes", "attribute_names", "release", "code_version"}
# The batch size changes only the last bits of float32 sums. So does the device if everything is float32; a detector's
# shards may then come from both CPUs and GPUs.
_IGNORED_FIELDS |= {"batch"}


@contextmanager
def inference_settings(threads: int = 1) -> Iterator[None]:
    """Context manager that sets torch's thread count and turns off TF32 on GPUs. Both are restored on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with float32_precision(convolutions="ieee", matrices="ieee"):
            yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A sample with its image decoded and resized for the network."""

    sample: Sample
    pixels: np.ndarray
    """BGR [H, W, 3], resized."""
    scales: tuple[float, float]
    """Input pixels per stored pixel: vertical, horizontal."""

    def to_stored(self, boxes: Tensor) -> np.ndarray:
        return to_stored_pixels(boxes, self.scales, (self.sample.height, self.sample.width)).numpy()


@dataclass(frozen=True, eq=False)
class _Outputs:
    """The network's outputs for the proposals of one image, on the CPU."""

    boxes: np.ndarray
    """float32 [P, 4], stored pixels."""
    probs: np.ndarray
    """float32 [P, C + 1]."""
    attribute_probs: np.ndarray | None
    regressed: np.ndarray | None
    """float32 [P, 4], stored pixels: each box after the box head's regression for its most probable class."""
    features: np.ndarray | None
    """float32 [P, D]."""


def describe_detector(
    network: FasterRCNNConfig, weights: dict, settings: DetectorSettings, backend: str
) -> tuple[str, dict]:
    """Return a FasterRCNNDetector's id and metadata without building it. `weights` is metadata from load_weights."""
    metadata = {
        "backend": backend,
        "code_version": importlib.metadata.version("vlbert"),
        "rules_version": _RULES_VERSION,
        "network": dataclasses.asdict(network),
        "selection": dataclasses.asdict(settings.selection),
        "boxes": settings.boxes,
        "keep_features": settings.keep_features,
        "precision": settings.precision,
        "device": settings.device_type,
        "batch": settings.batch,
        **weights,
    }
    ignored = _IGNORED_FIELDS | ({"device"} if settings.precision == "fp32" else set())
    hashed = {name: value for name, value in metadata.items() if name not in ignored}
    # Names and values of the first version of the hash, kept so that ids do not change.
    hashed |= {"untrained": hashed.pop("random_init"), "convolutions": "float32", "given": None}
    return detector_id(hashed), metadata


def choose_device(settings: DetectorSettings) -> DetectorSettings:
    """Return the settings with the device in place of `auto`, and with the batch for the device if none is set."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = found if settings.device == "auto" else settings.device
    batch = settings.batch or (1 if device == "cpu" else GPU_BATCH)
    return dataclasses.replace(settings, device=device, batch=batch)


def network_class(backend: str) -> type[AnyFasterRCNN]:
    """Return the network class of a backend, `faster_rcnn` or `detectron2`."""
    return Detectron2FasterRCNN if backend == "detectron2" else FasterRCNN


class FasterRCNNDetector:
    """A Detector that runs a Faster R-CNN.

    `weights` is metadata: the result of load_weights or, for random weights, {"random_init": True, "seed": ...}.
    """

    # torch's threads for an image on a CPU. Their number changes the order of sums and so the last bits; with one, all
    # machines give the same regions. Other cores compute other images at the same time.
    threads = 1

    def __init__(self, network: AnyFasterRCNN, weights: dict, settings: DetectorSettings, backend: str = "faster_rcnn"):
        if settings.device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError("DetectorSettings.device is cuda, but torch finds no GPU; set device to auto or cpu")
        settings = self.settings = choose_device(settings)
        rois = ROIS_AT_A_TIME[settings.device_type]
        self.network = network.for_inference(settings.precision, rois).to(settings.device)
        on_cpu = settings.device_type == "cpu"
        # Threads that prepare the next images and select the regions of the last ones. A GPU would wait for one thread.
        self.workers = 1 if on_cpu else min(8, os.cpu_count() or 1)
        # Batches that are computed at the same time. Each takes up to 0.5 GB on a CPU.
        self.networks = min(8, torch.get_num_threads()) if on_cpu else 1
        self.id, self.metadata = describe_detector(network.config, weights, settings, backend)

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        results: dict[int, Future | str] = {}  # by index of the sample
        batches: dict[tuple[int, ...], dict[int, _Prepared]] = {}  # by size of the images, then index of the sample
        # torch's number of threads is that of the thread that sets it.
        networks = ThreadPoolExecutor(self.networks, "network", torch.set_num_threads, (self.threads,))
        with inference_settings(self.threads), ThreadPoolExecutor(self.workers) as pool:

            def run(batch: dict[int, _Prepared]) -> None:
                for index, outputs in zip(batch, self._run_network(list(batch.values())), strict=True):
                    results[index] = outputs if isinstance(outputs, str) else pool.submit(self._select, outputs)

            try:
                runs = []
                # The pool prepares images before the network and selects regions after it.
                for index, image in enumerate(pool.map(self._prepare, samples)):
                    if isinstance(image, str):
                        results[index] = image
                        continue
                    batch = batches.setdefault(image.pixels.shape, {})
                    batch[index] = image
                    if len(batch) == self.settings.batch:
                        runs.append(networks.submit(run, batches.pop(image.pixels.shape)))
                for future in [*runs, *(networks.submit(run, batch) for batch in batches.values())]:
                    future.result()
            finally:  # after an error or SIGTERM, do not wait: the claims must be released first
                networks.shutdown(wait=False, cancel_futures=True)
            return [result if isinstance(result, str) else result.result() for _, result in sorted(results.items())]

    def describe_speed(self, samples: Sequence[Sample]) -> str:
        """Return the device and, measured with the first of `samples`, the images per second."""
        settings, on_cpu = self.settings, self.settings.device_type == "cpu"
        place = f"cpu ({self.networks} threads)" if on_cpu else f"cuda:{torch.device(settings.device).index or 0}"
        samples = samples[: self.networks * (settings.batch or 1)]
        if not on_cpu:
            self.detect(samples)  # loads the kernels
        started = time.monotonic()
        is_measured = any(isinstance(found, Regions) for found in self.detect(samples))
        rate = len(samples) / (time.monotonic() - started)
        return f"detecting on {place}" + (f", about {rate:.3g} images/s" if is_measured else "")

    def _prepare(self, sample: Sample) -> _Prepared | str:
        try:
            image = decode_bgr(sample.image)
        except UnidentifiedImageError:
            # The error's own message contains a memory address, so manifests of the same shard would differ.
            return "bad_image: UnidentifiedImageError: neither a JPEG nor a PNG"
        except BAD_IMAGE as error:
            return f"bad_image: {type(error).__name__}: {error}"
        height, width = image.shape[:2]
        if (height, width) != (sample.height, sample.width):
            return f"bad_image: is {width}x{height}, but its record has {sample.width}x{sample.height}"
        config = self.network.config
        size = resized_size(height, width, config)
        if min(size) < NARROWEST_INPUT:
            return (
                f"bad_image: {width}x{height} is too narrow: it is resized to {size[1]}x{size[0]}, but the network "
                f"needs at least {NARROWEST_INPUT} pixels in each direction"
            )
        pixels = resize(image, config)
        scales = (pixels.shape[0] / height, pixels.shape[1] / width)
        if config.resize == "caffe":
            scale = resize_scale(height, width, config)
            scales = (scale, scale)
        return _Prepared(sample, pixels, scales)

    @torch.inference_mode()
    def _run_network(self, batch: list[_Prepared]) -> list[_Outputs | str]:
        """Run the network on images of one size. Return each image's outputs or, if it has none, `status: detail`."""
        network, size = self.network, batch[0].pixels.shape[:2]
        c4 = network.backbone(to_input(np.stack([image.pixels for image in batch]), self.settings.device))
        logits, deltas = network.rpn(c4)
        # Checked here, because pooling skips NaN as if it were outside the image.
        finite = [torch.isfinite(each).flatten(1).all(dim=1) for each in (c4, logits, deltas)]
        finite = torch.stack(finite).all(dim=0).tolist()
        boxes, stored = self._find_proposals(batch, logits, deltas)
        features = network.roi_features(c4, boxes)
        heads = network.roi_heads.box_predictor(features)
        probs = heads.class_logits.softmax(dim=1)
        attribute_probs = regressed = None
        if heads.attribute_logits is not None:
            attribute_probs = heads.attribute_logits.softmax(dim=1)[:, :-1]
        if self.settings.boxes == "regressed":
            labels = probs[:, :-1].argmax(dim=1)
            regressed = regress_boxes(network.config, torch.cat(boxes), heads.box_deltas, labels, *size)
        # Copied from the device once per batch, then split into images.
        probs = probs.cpu()
        tensors = (attribute_probs, regressed, features if self.settings.keep_features else None)
        tensors = [None if tensor is None else tensor.cpu() for tensor in tensors]
        outputs, end = [], 0
        for image, own, is_finite in zip(batch, stored, finite, strict=True):
            start, end = end, end + len(own)
            if not is_finite:
                outputs.append(_not_finite("activations"))
            elif not len(own):
                outputs.append("no_regions: the network proposes no box inside the image")
            else:
                arrays = [None if tensor is None else tensor[start:end].numpy() for tensor in tensors]
                if arrays[1] is not None:
                    arrays[1] = image.to_stored(torch.from_numpy(arrays[1]))
                outputs.append(_Outputs(own, probs[start:end].numpy(), *arrays))
        return outputs

    def _find_proposals(
        self, batch: list[_Prepared], logits: Tensor, deltas: Tensor
    ) -> tuple[list[Tensor], list[np.ndarray]]:
        """Return each image's non-empty proposals [P, 4]: tensors in input pixels, and arrays in stored pixels."""
        scales = [min(image.scales) for image in batch]
        boxes, _ = self.network.proposals(logits, deltas, *batch[0].pixels.shape[:2], scales=scales)
        # Copied from the device once per batch.
        copies = torch.cat(boxes).cpu().split([len(own) for own in boxes])
        stored = [image.to_stored(own) for image, own in zip(batch, copies, strict=True)]
        for i, own in enumerate(stored):
            has_area = (own[:, 2:] > own[:, :2]).all(axis=1)
            if not has_area.all():
                boxes[i], stored[i] = boxes[i][torch.from_numpy(has_area)], own[has_area]
        return boxes, stored

    def _select(self, outputs: _Outputs) -> Regions | str:
        """Return an image's selected regions, most probable first, or a status if an output is not finite."""
        numbers = {
            "class probabilities": outputs.probs,
            "attribute probabilities": outputs.attribute_probs,
            "boxes": outputs.regressed,
        }
        for name, array in numbers.items():
            if array is not None and not np.isfinite(array).all():
                return _not_finite(name)
        foreground = outputs.probs[:, :-1]
        selected = select_regions(outputs.boxes, foreground, self.settings.selection)
        selected = selected[np.argsort(-foreground[selected].max(axis=1), kind="stable")]
        boxes = outputs.boxes[selected]
        if outputs.regressed is not None:
            regressed = outputs.regressed[selected]
            has_area = (regressed[:, 2:] > regressed[:, :2]).all(axis=1)
            boxes = np.where(has_area[:, None], regressed, boxes)
        attributes = attribute_scores = features = None
        if outputs.attribute_probs is not None:
            attribute_probs = outputs.attribute_probs[selected]
            attributes = attribute_probs.argmax(axis=1).astype(np.int32)
            attribute_scores = attribute_probs.max(axis=1)
        if outputs.features is not None:
            features = outputs.features[selected]
            if not (np.abs(features) <= _LARGEST_FLOAT16).all():
                largest = np.abs(features).max()
                return f"not_finite: a feature is {largest:g}, but the largest float16 is {_LARGEST_FLOAT16:.0f}"
            features = features.astype(np.float16)
        return Regions(
            boxes=boxes,
            scores=foreground[selected].max(axis=1),
            labels=foreground[selected].argmax(axis=1).astype(np.int32),
            detector=self.id,
            background=foreground.shape[1],
            class_probs=outputs.probs[selected].astype(np.float16),
            attributes=attributes,
            attribute_scores=attribute_scores,
            features=features,
        )


def _not_finite(outputs: str) -> str:
    return f"not_finite: the network's {outputs} are not all finite numbers"


def to_stored_pixels(boxes: Tensor, scales: Sequence[float], stored: tuple[int, int]) -> Tensor:
    """Convert boxes [K, 4] from input pixels to pixels of the stored image, and clip them to the image.

    `scales` is (vertical, horizontal) in input pixels per stored pixel. `stored` is the stored image's (height, width).
    """
    down, across = scales
    factors = torch.tensor([1 / across, 1 / down, 1 / across, 1 / down], device=boxes.device, dtype=boxes.dtype)
    return clip_boxes(boxes * factors, *stored)
