"""The images that a detector learns from: lists, COCO's and Visual Genome's annotations, examples of a step."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import CLASSES, tiny_sample
from tiny_detector import ATTRIBUTES, TINY, annotated_images, coco_data

from detectors.examples import TrainingImages, make_example
from detectors.ground_truth import GroundTruth, read_ground_truth
from detectors.recipes import DataConfig
from training.distributed import World


def write(file: Path, content: Any) -> str:
    """The file's name, with this text or JSON in it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(file)


def coco(folder: Path, images: Mapping[int, str], **lists: str) -> DataConfig:
    """Images by id, each with one object; of their files only the names count here. Lists: their text."""
    names = [{"id": number, "file_name": name, "width": 90, "height": 60} for number, name in images.items()]
    found = [{"image_id": number, "category_id": 1, "bbox": [number, 0, 20, 20]} for number in images]
    content = {"images": names, "annotations": found, "categories": [{"id": 1, "name": "dog"}]}
    for name in images.values():
        write(folder / "images" / name, "")
    return DataConfig(
        annotations=write(folder / "coco.json", content),
        images=(str(folder / "images"),),
        **{name: write(folder / f"{name}.txt", text) for name, text in lists.items()},
    )


def ids(truth: GroundTruth) -> tuple[list[str], list[str]]:
    return [image.id for image in truth.train], [image.id for image in truth.held_out]


def test_a_line_of_a_list_names_an_image_by_its_file(tmp_path):
    images = {number: f"{number - 1}.png" for number in range(1, 7)}
    lists = {"train_list": "0.png\n/a/folder/3.png 7\n1.png\nabsent.png\n", "held_out_list": "\ufeff4.png\n\n5.png\n"}
    truth = read_ground_truth(coco(tmp_path, images, **lists))
    assert ids(truth) == (["1", "2", "4"], ["5", "6"])
    assert truth.skipped == {"lines of train_list.txt that match no image": 1}
    found = read_ground_truth(coco(tmp_path, images, held_out_list="2.png\n"))
    assert ids(found) == (["1", "2", "4", "5", "6"], ["3"])


def test_lists_that_divide_nothing_are_refused(tmp_path):
    images = {1: "a/1.jpg", 2: "b/1.jpg", 3: "b/3.jpg", 4: "4.jpg"}
    for train, held_out, message in (
        ("3.jpg\n4.jpg\n", "3.jpg\n", "share 1 images, such as 3"),
        ("3.jpg\n", "elsewhere.jpg\n", "held_out_list.txt matches none of the 4"),
        ("3.jpg\n1.jpg\n", "4.jpg\n", "train_list.txt:2: 1.jpg matches 2 images"),
    ):
        with pytest.raises(ValueError, match=message):
            read_ground_truth(coco(tmp_path, images, train_list=train, held_out_list=held_out))


def test_crowds_are_skipped_and_images_that_no_list_names_may_be_absent(tmp_path):
    config = coco(tmp_path, {1: "1.jpg", 2: "2.jpg", 3: "3.jpg"}, train_list="1.jpg\n", held_out_list="2.jpg\n")
    (tmp_path / "images" / "3.jpg").unlink()
    truth = read_ground_truth(config)
    assert (ids(truth), truth.skipped) == ((["1"], ["2"]), {})
    (tmp_path / "images" / "2.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 images are absent from .*: 2.jpg"):
        read_ground_truth(config)
    config = coco(tmp_path / "crowd", {1: "1.jpg", 2: "2.jpg"})
    content = json.loads(Path(config.annotations).read_text())
    content["annotations"][0]["iscrowd"] = 1
    write(Path(config.annotations), content)
    truth = read_ground_truth(config)
    assert (ids(truth)[0], truth.skipped["boxes around many objects (iscrowd)"]) == (["2"], 1)


ONE = {"object_id": 1, "x": 5, "y": 5, "w": 20, "h": 20, "names": ["square"]}
# Entries of images as their JSON text, and what is said of them.
UNUSABLE = {
    "no image": ("null", r"[1] is None, not an object"),
    "no id": ('{"objects": []}', r"[1] has the image_id None"),
    "no objects": ('{"image_id": 2}', r"[1] has no list `objects`"),
    "an image's name twice": ('{"image_id": 2, "image_id": 3, "objects": []}', r"[1] has the name 'image_id' twice"),
    "no object": (None, r"image 2, [0] is None"),
    "name for names": ({"names": ..., "name": "square"}, r"image 2, [0] has the names None"),
    "no box": ({"x": ...}, r"image 2, [0] has x, y, w, h [None, 5, 20, 20]"),
    "a bad box": ({"w": float("nan")}, r"image 2, [0] has x, y, w, h [5, 5, nan, 20]"),
    "a text as number": ({"h": "20"}, r"image 2, [0] has x, y, w, h [5, 5, 20, '20']"),
    "bad attributes": ({"attributes": "red"}, r"image 2, [0] has the attributes 'red'"),
    "a name twice": (
        '{"image_id": 2, "objects": [{"names": [], "names": ["a"]}]}',
        r"image 2, [0] has the name 'names' t",
    ),
}


@pytest.mark.parametrize(("entry", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_entry_of_visual_genome_costs_itself_alone(entry: Any, message: str, tmp_path: Path):
    if not isinstance(entry, str):
        changed = entry and {name: value for name, value in (ONE | entry).items() if value is not ...}
        entry = json.dumps({"image_id": 2, "objects": [changed]})
    Image.new("RGB", (90, 60)).save(tmp_path / "1.jpg")
    Image.new("RGB", (90, 60)).save(tmp_path / "2.jpg")
    good = json.dumps({"image_id": 1, "objects": [ONE, ONE | {"x": 30}]})
    names = {"classes": write(tmp_path / "classes.txt", "square\n"), "images": (str(tmp_path),)}
    config = DataConfig(objects=write(tmp_path / "objects.json", f"[{good}, {entry}]"), **names)
    truth = read_ground_truth(config)
    assert [(image.id, image.boxes.tolist()) for image in truth.train] == [("1", [[5, 5, 25, 25], [30, 5, 50, 25]])]
    (reason,) = (reason for reason in truth.skipped if "unusable entries" in reason)
    assert reason.startswith(f"unusable entries of objects.json, the first: {message}")
    assert truth.skipped[reason] == 1
    write(tmp_path / "objects.json", f"[{entry}]")
    with pytest.raises(
        ValueError, match=r"objects\.json: all 1 entries are unusable, the first: .*; download it again"
    ):
        read_ground_truth(config)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = annotated_images(tmp_path_factory.mktemp("annotated") / "images", 24)
    coco = json.loads((folder / "coco.json").read_text())
    objects_of = {image["id"]: [] for image in coco["images"]}
    for number, annotation in enumerate(coco["annotations"], start=1):
        box = dict(zip("xywh", annotation["bbox"], strict=True))
        words = {"names": [CLASSES[annotation["category_id"] - 10].upper()], "attributes": annotation["attributes"]}
        objects_of[annotation["image_id"]].append(box | words | {"object_id": number})
    genome = [{"image_id": image, "objects": objects} for image, objects in objects_of.items()]
    (folder / "scene_graphs.json").write_text(json.dumps(genome))
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    return folder


def genome_data(folder: Path, **changes) -> DataConfig:
    files = {"objects": str(folder / "scene_graphs.json"), "classes": str(folder / "classes.txt")}
    return dataclasses.replace(coco_data(folder), annotations=None, **(files | changes))


def test_both_formats_give_the_same_ground_truth(images, tmp_path):
    coco = read_ground_truth(coco_data(images))
    assert coco.hash == read_ground_truth(genome_data(images)).hash
    plain = json.loads((images / "scene_graphs.json").read_text())
    plain[0]["objects"][0].pop("attributes")
    plain = write(tmp_path / "scene_graphs.json", plain)
    assert read_ground_truth(genome_data(images, objects=plain)).hash != coco.hash
    assert (len(coco.train), len(coco.held_out), coco.skipped) == (16, 8, {})
    assert (coco.classes, coco.attribute_names) == (tuple(CLASSES), ATTRIBUTES)
    first, sample = coco.train[1], tiny_sample(1, regions=2)
    np.testing.assert_array_equal(first.boxes, sample.regions.boxes)
    np.testing.assert_array_equal(first.labels, sample.regions.labels - 1)
    assert first.attributes == tuple((1,) if x2 - x1 > 22 else (0,) for x1, _, x2, _ in first.boxes)


def test_what_cannot_be_used_is_left_out_and_counted(images, tmp_path):
    graphs = json.loads((images / "scene_graphs.json").read_text())
    graphs[0]["objects"] += [
        {"x": -5, "y": -5, "w": 20, "h": 12, "names": ["unknown", " Crimson  Square"]},
        {"x": 90, "y": 10, "w": 40, "h": 12, "names": ["red square"], "attributes": ["odd"]},
        {"x": 5, "y": 5, "w": 20, "h": 12, "names": ["unicorn"]},
        {"x": 96, "y": 5, "w": 20, "h": 12, "names": ["red square"]},
        {"x": 5, "y": 5, "w": 20, "h": 0, "names": ["red square"]},
    ]
    graphs[2]["objects"] = []
    file = write(tmp_path / "scene_graphs.json", [*graphs, {"image_id": 999, "objects": []}])
    classes = write(tmp_path / "classes.txt", "red square,crimson square\n" + "\n".join(CLASSES[1:]))
    truth = read_ground_truth(genome_data(images, objects=file, classes=classes, unreadable=0.05))
    assert truth.skipped == {
        "attributes that are not in data.attribute_names": 1,
        "boxes of classes that are not in data.classes": 1,
        "boxes less than a pixel wide or high inside the image": 2,
        "images absent or unreadable": 1,
        "training images without objects": 1,
    }
    assert "2" not in {image.id for image in truth.train}
    first = truth.train[0]
    np.testing.assert_array_equal(first.boxes[1:], [[0, 0, 15, 7], [90, 10, 96, 22]])
    assert first.labels[1:].tolist() == [0, 0]
    assert first.attributes[1:] == ((), ())
    with pytest.raises(ValueError, match=r"1 of 25 images are absent from .*images, or unreadable: 999.jpg"):
        read_ground_truth(genome_data(images, objects=file, classes=classes))


def test_a_mirrored_image_has_its_boxes_mirrored(images):
    image = read_ground_truth(coco_data(images)).train[2]
    plain, mirrored = (make_example(image, TINY, mirror, 0) for mirror in (False, True))
    assert torch.equal(plain.pixels.flip(1), mirrored.pixels)
    np.testing.assert_array_equal(plain.boxes, image.boxes)
    np.testing.assert_array_equal(96 - plain.boxes[:, [2, 0]], mirrored.boxes[:, [0, 2]])
    bare = make_example(dataclasses.replace(image, attributes=((), (0, 2), ())), TINY, False, 0)
    assert bare.attributes.tolist() == [[0, 0, 0, 1], [1, 0, 1, 0], [0, 0, 0, 1]], "the last: it has none"
    large = make_example(image, dataclasses.replace(TINY, short_side=128, long_side=192), False, 0)
    assert large.pixels.shape == (128, 192, 3)
    np.testing.assert_array_equal(large.boxes, image.boxes * 2)


def test_every_rank_reads_its_share_of_the_same_order(images):
    config = coco_data(images)
    truth = read_ground_truth(config)

    def read(rank: int, size: int, step: int) -> list[int]:
        data = TrainingImages(truth.train, TINY, config, World(rank, size, torch.device("cpu")))
        return [example.seed for example in data[step].examples]

    for step in range(6):
        assert read(0, 1, step) == read(0, 2, step) + read(1, 2, step)
    epoch = [seed for step in range(4) for seed in read(0, 1, step)]
    assert len(set(epoch)) == 16, "each image once an epoch"
    assert epoch != [seed for step in range(4, 8) for seed in read(0, 1, step)]
