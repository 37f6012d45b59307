"""A detector that trains in seconds, and its annotations."""

import dataclasses
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tiny import CLASSES, as_overrides, tiny_sample

from detectors.faster_rcnn import FasterRCNNConfig
from detectors.recipes import SGD, DataConfig, DetectorRecipe, SamplingConfig, detector_vg_resnet101
from detectors.resnet import FrozenNorm, ResNetConfig
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import Row
from storage.object_store import open_store
from storage.sample import Sample

TINY = FasterRCNNConfig(
    resnet=ResNetConfig(blocks=(1, 1, 1, 1), width=4, stride_in_1x1=False, stem_pool="torch", res5_dilated=False),
    num_classes=8,
    num_attributes=3,
    anchor_sizes=(16, 32),
    rpn_channels=16,
    short_side=64,
    long_side=96,
    pre_nms=100,
    post_nms=20,
    pool_size=4,
    attribute_embedding=8,
    attribute_hidden=8,
)
ATTRIBUTES = ("small", "large", "left")


def boxes(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lively_norms(module: torch.nn.Module) -> torch.nn.Module:
    generator = seeded(0)
    for norm in module.modules():
        if isinstance(norm, FrozenNorm | torch.nn.BatchNorm2d):
            norm.weight.data.uniform_(0.5, 1.5, generator=generator)
            norm.bias.data.uniform_(-0.5, 0.5, generator=generator)
            norm.running_mean.uniform_(-0.5, 0.5, generator=generator)
            norm.running_var.uniform_(0.5, 2.0, generator=generator)
    return module


def image_file(pixels: np.ndarray | Image.Image, kind: str = "jpeg") -> bytes:
    stream = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(stream, kind, **{"quality": 95, "subsampling": 0} if kind == "jpeg" else {})
    return stream.getvalue()


def rectangles(height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [height, width, 3]: coloured rectangles."""
    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), rng.integers(0, 256, 3), np.uint8)
    for _ in range(8):
        y, x = rng.integers(0, height - 20), rng.integers(0, width - 20)
        pixels[y : y + rng.integers(10, height), x : x + rng.integers(10, width)] = rng.integers(0, 256, 3)
    return pixels


def image_sample(number: int, image: bytes | np.ndarray, size: tuple[int, int] | None = None) -> Sample:
    """size: the height and width of its record."""
    if isinstance(image, np.ndarray):
        image, size = image_file(image), size or image.shape[:2]
    return Sample(f"{number:020x}", image, "caption", f"http://host/{number:06}.jpg", size[1], size[0], "ab")


def coco_annotations(file: Path, boxes: dict[int, Sequence[Sequence[float]]]) -> Path:
    """An annotation file with [x, y, width, height] boxes by image number, on images of 224x168."""
    found = [{"image_id": n, "category_id": 1, "bbox": list(box)} for n, some in boxes.items() for box in some]
    images = [{"id": n, "file_name": f"{n:06}.jpg", "width": 224, "height": 168} for n in boxes]
    categories = [{"id": 1, "name": "thing"}]
    file.write_text(json.dumps({"images": images, "annotations": found, "categories": categories}))
    return file


def commit_images(root: Path | str, shards: Sequence[Sequence[Sample | str]], dataset: str = "captions") -> Catalog:
    """A catalog with these shards of images; a text is the status of a row that was not downloaded."""
    catalog, numbers = Catalog(open_store(str(root)), dataset), itertools.count()
    for shard, items in enumerate(shards):
        rows = []
        for item, number in zip(items, numbers, strict=False):
            ok = isinstance(item, Sample)
            key, url = (item.key, item.url) if ok else (f"{number:020x}", "")
            rows.append(Row(number, key, "ok" if ok else item, url=url, license=f"CC {number}"))
        samples = [item for item in items if isinstance(item, Sample)]
        assert commit_shard(catalog, "images", f"{shard:05}", samples, rows, {"source": {}})
    return catalog


def annotated_images(folder: Path, count: int) -> Path:
    """So many images of coloured shapes, annotated in COCO's format, in a new folder."""
    (folder / "images").mkdir(parents=True)
    categories = [{"id": 10 + number, "name": name} for number, name in enumerate(CLASSES)]
    coco = {"images": [], "annotations": [], "categories": categories}
    for number in range(count):
        sample = tiny_sample(number, regions=1 + number % 3)
        (folder / "images" / f"{number}.jpg").write_bytes(sample.image)
        size = {"width": sample.width, "height": sample.height}
        coco["images"].append({"id": number, "file_name": f"{number}.jpg"} | size)
        for (x1, y1, x2, y2), label in zip(sample.regions.boxes.tolist(), sample.regions.labels.tolist(), strict=True):
            annotation = {"image_id": number, "category_id": 9 + label, "bbox": [x1, y1, x2 - x1, y2 - y1]}
            coco["annotations"].append(annotation | {"attributes": ["large" if x2 - x1 > 22 else "small"]})
    (folder / "coco.json").write_text(json.dumps(coco))
    (folder / "attributes.txt").write_text("".join(f"{name}\n" for name in ATTRIBUTES))
    return folder


def coco_data(folder: Path, **changes) -> DataConfig:
    names = {"annotations": str(folder / "coco.json"), "attribute_names": str(folder / "attributes.txt")}
    settings = names | {"images": (str(folder / "images"),), "held_out_last": 8, "batch": 4, "workers": 0}
    return DataConfig(**(settings | changes))


def tiny_recipe(images: Path, root: Path, **changes) -> DetectorRecipe:
    """Six steps in a second; all norms frozen, so that one process and two compute the same."""
    recipe = DetectorRecipe(
        name="tiny",
        network=TINY,
        data=coco_data(images),
        sampling=SamplingConfig(anchors=32, anchors_inside=False, pre_nms=60, post_nms=30, rois=16),
        optimizer=dataclasses.replace(SGD, learning_rate=2e-3, warmup_steps=2),
        root=str(root),
        steps=6,
        random_init=True,
        frozen_stages=1,
        log_every=1,
        validate_every=100,
        save_every=3,
    )
    return dataclasses.replace(recipe, **changes)


def command_line(images: Path, root: Path, **changes) -> list[str]:
    recipe = tiny_recipe(images, root, **changes)
    return ["detector_vg_resnet101", *as_overrides(recipe, detector_vg_resnet101())]
