"""A detector that trains in seconds, and its annotations."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tiny import as_overrides

from detectors.average_precision import (
    AnnotatedBoxes,
)
from detectors.faster_rcnn import FasterRCNNConfig
from detectors.recipes import (
    SGD,
    DataConfig,
    DetectorRecipe,
    SamplingConfig,
    detector_vg_resnet101,
)
from detectors.resnet import ResNetConfig
from storage.catalog import Catalog, Row
from storage.object_store import open_store
from storage.sample import Sample
from training.distributed import World

ALONE = World(0, 1, torch.device("cpu"))


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


def annotated_boxes(*rows: tuple[float, ...], labels: list[int], crowd: list[int] | None = None) -> AnnotatedBoxes:
    return AnnotatedBoxes(boxes(*rows).numpy(), np.array(labels), np.array(crowd or [0] * len(labels), bool))


def coco_annotations(
    file: Path, boxes: dict[int, Sequence[Sequence[float]]], height: int = 168, width: int = 224
) -> Path:
    """An annotation file with [x, y, width, height] boxes by image number, on images of this size."""
    content = {
        "images": [{"id": n, "file_name": f"{n:06}.jpg", "width": width, "height": height} for n in boxes],
        "annotations": [
            {"image_id": n, "category_id": 1, "bbox": list(box)} for n, some in boxes.items() for box in some
        ],
        "categories": [{"id": 1, "name": "thing"}],
    }
    file.write_text(json.dumps(content))
    return file


def commit_images(root: Path | str, shards: Sequence[Sequence[Sample | str]]) -> Catalog:
    """A catalog with these shards of images; a text is the status of a row that was not downloaded."""
    catalog, numbers = Catalog(open_store(str(root)), "captions"), itertools.count()
    for shard, items in enumerate(shards):
        rows = []
        for item, number in zip(items, numbers, strict=False):
            ok = isinstance(item, Sample)
            key, url = (item.key, item.url) if ok else (f"{number:020x}", "")
            rows.append(Row(number, key, "ok" if ok else item, url=url))
        samples = [item for item in items if isinstance(item, Sample)]
        assert catalog.commit("images", f"{shard:05}", samples, rows, {"source": {}})
    return catalog


def coco_data(folder: Path, **changes) -> DataConfig:
    config = DataConfig(
        annotations=str(folder / "coco.json"),
        images=(str(folder / "images"),),
        attribute_names=str(folder / "attributes.txt"),
        held_out_last=8,
        batch=4,
        workers=0,
    )
    return dataclasses.replace(config, **changes)


def tiny_recipe(pictures: Path, root: Path, **changes) -> DetectorRecipe:
    """Six steps in a second; all norms frozen, so that one process and two compute the same."""
    recipe = DetectorRecipe(
        name="tiny",
        network=TINY,
        data=coco_data(pictures),
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


def command_line(pictures: Path, root: Path, **changes) -> list[str]:
    recipe = tiny_recipe(pictures, root, **changes)
    return ["detector_vg_resnet101", *as_overrides(recipe, detector_vg_resnet101())]
