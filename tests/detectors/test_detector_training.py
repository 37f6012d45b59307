"""The detector's own training: what is read and matched, how detections are counted, runs stopped and gone on with."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from places import PROJECT
from safetensors.torch import load_file, save_file
from tiny import CLASSES, tiny_sample
from tiny_detector import ALONE, ATTRIBUTES, TINY, annotated_boxes, boxes, coco_data, command_line, seeded, tiny_recipe
from torch import nn

from demo.data import CATEGORIES, DemoDataSettings, captioned_scenes, coco_file, draw_into
from detectors.average_precision import (
    FALSE_POSITIVE,
    NOT_COUNTED,
    TRUE_POSITIVE,
    Detections,
    average_precision,
    class_results,
    match_detections,
    mean_average_precision,
)
from detectors.examples import TrainingImages, make_example
from detectors.faster_rcnn import FasterRCNN
from detectors.ground_truth import read_ground_truth
from detectors.losses import BACKGROUND, FOREGROUND, IGNORED, Losses, Target, match_anchors
from detectors.recipes import (
    RECIPES,
    SGD,
    DataConfig,
    SamplingConfig,
    detector_demo,
    detector_vg_resnet101,
)
from detectors.resnet import ResNetConfig
from detectors.train import check_complete, main, train
from detectors.validate import validate
from detectors.weights.files import load_resnet, load_weights, read_config
from detectors.weights.init_from import init_from
from storage.object_store import open_store
from storage.runs import checkpoints
from training.distributed import World
from training.log import read_metrics


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """24 pictures of coloured shapes, annotated in COCO's format and in Visual Genome's."""
    folder = tmp_path_factory.mktemp("annotated")
    (folder / "images").mkdir()
    categories = [{"id": 10 + number, "name": name} for number, name in enumerate(CLASSES)]
    coco = {"images": [], "annotations": [], "categories": categories}
    genome, sizes = [], []
    for number in range(24):
        sample = tiny_sample(number, regions=1 + number % 3)
        (folder / "images" / f"{number}.jpg").write_bytes(sample.image)
        size = {"width": sample.width, "height": sample.height}
        coco["images"].append({"id": number, "file_name": f"{number}.jpg"} | size)
        sizes.append({"image_id": number} | size)
        entries = []
        for box, label in zip(sample.regions.boxes.tolist(), sample.regions.labels.tolist(), strict=True):
            x, y, w, h = box[0], box[1], box[2] - box[0], box[3] - box[1]
            attributes = ["large" if w > 22 else "small"]
            coco["annotations"].append(
                {"image_id": number, "category_id": 9 + label, "bbox": [x, y, w, h], "attributes": attributes}
            )
            words = {"names": [CLASSES[label - 1].upper()], "object_id": len(coco["annotations"])}
            entries.append({"x": x, "y": y, "w": w, "h": h, "attributes": attributes} | words)
        genome.append({"image_id": number, "objects": entries})
    (folder / "coco.json").write_text(json.dumps(coco))
    (folder / "objects.json").write_text(json.dumps(genome))
    (folder / "image_data.json").write_text(json.dumps(sizes))
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    (folder / "attributes.txt").write_text("".join(f"{name}\n" for name in ATTRIBUTES))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory, pictures) -> Path:
    """A root with the run `whole`, that others are held against."""
    root = tmp_path_factory.mktemp("root")
    train(tiny_recipe(pictures, root, run="whole"), ALONE)
    return root


SHIPPED = PROJECT / "demo" / "detector.safetensors"


# --- boxes, anchors, regions ------------------------------------------------------------------------------------------


def test_anchors_are_taught_by_overlap_and_the_best_of_each_object_always():
    anchors = boxes((0, 0, 10, 10), (0, 0, 10, 8), (0, 0, 10, 5), (0, 0, 10, 2), (50, 50, 60, 60), (-5, 0, 5, 10))
    objects = boxes((0, 0, 10, 10), (55, 50, 75, 60))  # the second overlaps one anchor, by a fifth
    sampling = SamplingConfig(anchor_positive=0.7, anchor_negative=0.3, anchors_inside=False)
    taught, matched = match_anchors(anchors, objects, 100, 100, sampling)
    #          IoU 1       0.8         0.5      0.2         0.2, best   1/3
    assert taught.tolist() == [FOREGROUND, FOREGROUND, IGNORED, BACKGROUND, FOREGROUND, IGNORED]
    assert matched[[0, 1, 4]].tolist() == [0, 0, 1]
    inside, _ = match_anchors(anchors, objects, 100, 100, dataclasses.replace(sampling, anchors_inside=True))
    assert inside.tolist() == [*taught.tolist()[:5], IGNORED]
    cut, _ = match_anchors(anchors, objects, 100, 55, dataclasses.replace(sampling, anchors_inside=True))
    assert cut[4] == IGNORED, "an anchor beyond the border stands for nothing, even where it is the best"


def target(seed: int = 0, classes: tuple[int, ...] = (3, 5)) -> Target:
    attributes = torch.zeros(2, 4)
    attributes[0, 1] = attributes[0, 2] = attributes[1, 3] = 1
    return Target(
        pixels=torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(seed)) * 50,
        boxes=boxes((5, 5, 30, 30), (50, 20, 90, 60)),
        labels=torch.tensor(classes),
        attributes=attributes,
        generator=torch.Generator().manual_seed(seed),
    )


def test_images_of_one_size_and_of_several_give_the_same_losses_as_alone():
    losses = Losses(FasterRCNN.random_init(TINY, 0).eval(), SamplingConfig(rois=16))
    other = dataclasses.replace(target(1), pixels=target(1).pixels[:, :, :, :80].contiguous())

    def alone(make) -> dict[str, tuple[float, int]]:
        return {name: (float(loss.detach()), count) for name, (loss, count) in losses([make()]).items()}

    parts = [alone(target), alone(lambda: target(2)), alone(lambda: dataclasses.replace(other, generator=seeded(1)))]
    together = losses([target(), dataclasses.replace(other, generator=seeded(1)), target(2)])
    for name, (loss, count) in together.items():
        assert count == sum(part[name][1] for part in parts)
        assert float(loss.detach()) == pytest.approx(sum(part[name][0] for part in parts), rel=1e-4)


# --- counting ---------------------------------------------------------------------------------------------------------


def test_a_second_detection_of_an_object_is_wrong_and_a_crowd_counts_for_nothing():
    there = annotated_boxes((0, 0, 10, 10), (20, 0, 30, 10), (40, 0, 90, 50), labels=[1, 2, 1], crowd=[0, 0, 1])
    found = Detections(
        boxes=boxes(
            (0, 0, 10, 9),  # right: the better of two
            (0, 0, 10, 10),  # the same object again, less sure
            (20, 0, 30, 10),  # right place, another class
            (0, 0, 10, 4.9),  # too little of it
            (40, 0, 90, 50),  # the crowd
            (40, 0, 90, 49),  # and again
        ).numpy(),
        scores=np.array([0.9, 0.8, 0.95, 0.99, 0.5, 0.4], np.float32),
        labels=np.array([1, 1, 1, 1, 1, 1]),
    )
    assert match_detections(found, there, 0.5).tolist() == [
        TRUE_POSITIVE,
        FALSE_POSITIVE,
        FALSE_POSITIVE,
        FALSE_POSITIVE,
        NOT_COUNTED,
        NOT_COUNTED,
    ]
    half = Detections(boxes((0, 0, 10, 5)).numpy(), np.ones(1, np.float32), np.array([1]))
    assert match_detections(half, there, 0.5).tolist() == [TRUE_POSITIVE], "as much as the threshold is enough"


def test_of_equally_sure_detections_the_first_takes_the_object():
    there = annotated_boxes((0, 0, 10, 10), labels=[0])
    twice = Detections(boxes((0, 0, 10, 10), (0, 0, 10, 9)).numpy(), np.full(2, 0.5, np.float32), np.zeros(2, int))
    assert match_detections(twice, there, 0.5).tolist() == [TRUE_POSITIVE, FALSE_POSITIVE]


def test_average_precision_is_the_area_under_the_interpolated_curve():
    """By hand: right, wrong, right, right, wrong of 5 objects: precisions 1, 1/2, 2/3, 3/4, 3/5; the wrong one's dip is
    filled, and the second right one's 2/3 becomes the 3/4 that follows: (1 + 3/4 + 3/4) / 5."""
    scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
    right = np.array([1, 0, 1, 1, 0])
    assert average_precision(scores, right, 5) == pytest.approx(2.5 / 5)
    backwards = slice(None, None, -1)
    assert average_precision(scores[backwards], right[backwards], 5) == pytest.approx(2.5 / 5)
    tied = np.array([0.9, 0.5, 0.5])
    assert average_precision(tied, np.array([0, 1, 0]), 1) == pytest.approx(1 / 2)
    assert average_precision(tied, np.array([0, 0, 1]), 1) == pytest.approx(1 / 3)
    assert average_precision(np.zeros(0), np.zeros(0, int), 3) == 0


def test_the_mean_is_over_the_classes_that_are_there():
    labels, scores = np.array([0, 0, 2, 3, 0]), np.array([0.9, 0.8, 0.7, 0.9, 0.99])
    verdicts = np.array([TRUE_POSITIVE, FALSE_POSITIVE, FALSE_POSITIVE, TRUE_POSITIVE, NOT_COUNTED])
    # Class 0: one of 4 found, first. Class 1: never detected. Class 2: not there. Class 3: all found.
    results = class_results(labels, scores, verdicts, np.array([4, 2, 0, 1]))
    assert [(r.label, r.objects, r.detections) for r in results] == [(0, 4, 2), (1, 2, 0), (3, 1, 1)]
    assert [r.average_precision for r in results] == [0.25, 0, 1]
    metrics = mean_average_precision(results)
    assert metrics["map50"] == pytest.approx(1.25 / 3)
    assert metrics["map50_weighted"] == pytest.approx((0.25 * 4 + 1) / 7)
    assert mean_average_precision([]) == {}


# --- annotations ------------------------------------------------------------------------------------------------------


def genome_data(folder: Path, **changes) -> DataConfig:
    config = dataclasses.replace(
        coco_data(folder), annotations=None, objects=str(folder / "objects.json"), classes=str(folder / "classes.txt")
    )
    return dataclasses.replace(config, **changes)


def test_both_formats_say_the_same(pictures, tmp_path):
    coco = read_ground_truth(coco_data(pictures))
    genome = read_ground_truth(genome_data(pictures))
    sized = read_ground_truth(genome_data(pictures, image_data=str(pictures / "image_data.json")))
    assert coco.hash == genome.hash == sized.hash
    # attributes.json holds the objects, too; beside objects.json it only tells their attributes.
    attributes = rewritten(
        pictures / "objects.json", tmp_path, lambda data: [e.update(attributes=e.pop("objects")) for e in data]
    )
    attributes = attributes.rename(tmp_path / "attributes.json")
    plain = rewritten(
        pictures / "objects.json", tmp_path, lambda data: [o.pop("attributes") for e in data for o in e["objects"]]
    )
    assert read_ground_truth(genome_data(pictures, objects=str(attributes))).hash == coco.hash
    assert read_ground_truth(genome_data(pictures, objects=str(plain), attributes=str(attributes))).hash == coco.hash
    assert read_ground_truth(genome_data(pictures, objects=str(plain))).hash != coco.hash
    assert (len(coco.train), len(coco.held_out)) == (16, 8)
    assert coco.classes == tuple(CLASSES)
    assert coco.attribute_names == ATTRIBUTES
    first, sample = coco.train[1], tiny_sample(1, regions=2)
    np.testing.assert_array_equal(first.boxes, sample.regions.boxes)
    np.testing.assert_array_equal(first.labels, sample.regions.labels - 1)
    assert first.attributes == tuple((1,) if x2 - x1 > 22 else (0,) for x1, _, x2, _ in first.boxes)
    assert coco.skipped == {}


def rewritten(file: Path, folder: Path, change) -> Path:
    """A copy of a JSON file, changed."""
    data = json.loads(file.read_text())
    change(data)
    new = folder / file.name
    new.write_text(json.dumps(data))
    return new


def test_what_cannot_be_used_is_left_out_and_counted(pictures, tmp_path):
    def change(data: list[dict]) -> None:
        data[0]["objects"].append({"x": -5, "y": -5, "w": 20, "h": 12, "names": ["unknown", " Crimson  Square"]})
        data[0]["objects"].append({"x": 90, "y": 10, "w": 40, "h": 12, "names": ["red square"], "attributes": ["odd"]})
        data[0]["objects"].append({"x": 5, "y": 5, "w": 20, "h": 12, "names": ["unicorn"]})
        data[0]["objects"].append({"x": 96, "y": 5, "w": 20, "h": 12, "names": ["red square"]})
        data[0]["objects"].append({"x": 5, "y": 5, "w": 20, "h": 0, "names": ["red square"]})
        data[2]["objects"].clear()
        data.append({"image_id": 999, "objects": []})

    classes = tmp_path / "classes.txt"
    classes.write_text("red square,crimson square\n" + "".join(f"{name}\n" for name in CLASSES[1:]))
    file = rewritten(pictures / "objects.json", tmp_path, change)
    truth = read_ground_truth(genome_data(pictures, objects=str(file), classes=str(classes), unreadable=0.05))
    assert truth.skipped == {
        "attributes of no name in data.attribute_names": 1,
        "boxes of no class in data.classes": 1,
        "boxes with less than a pixel's width or height inside the image": 2,
        "images absent or unreadable": 1,
        "images to train on without any object": 1,
    }
    assert "2" not in {image.id for image in truth.train}
    first = truth.train[0]
    np.testing.assert_array_equal(first.boxes[1:], [[0, 0, 15, 7], [90, 10, 96, 22]])
    assert first.labels[1:].tolist() == [0, 0]
    assert first.attributes[1:] == ((), ())
    with pytest.raises(ValueError, match=r"1 of 25 images are absent from .*images, or unreadable: 999.jpg"):
        read_ground_truth(genome_data(pictures, objects=str(file), classes=str(classes)))


def test_lists_of_ids_or_paths_divide_the_images(pictures, tmp_path):
    train, held_out = tmp_path / "train.txt", tmp_path / "val.txt"
    train.write_text("VG_100K/3.jpg xml/3.xml\nVG_100K_2/4.jpg xml/4.xml\n\n5\nVG_100K/12345.jpg\n")
    held_out.write_text("7\n6.jpg\n")
    config = coco_data(pictures, train_list=str(train), held_out_list=str(held_out), held_out_last=0)
    truth = read_ground_truth(config)
    assert [image.id for image in truth.train] == ["3", "4", "5"]
    assert [image.id for image in truth.held_out] == ["6", "7"]
    held_out.write_text("7\n4\n")
    with pytest.raises(ValueError, match="share 1 images, such as 4"):
        read_ground_truth(config)
    held_out.write_text("elsewhere.jpg\n")
    with pytest.raises(ValueError, match=r"val.txt names none of the 24 images"):
        read_ground_truth(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[1].pop("objects"), r"objects.json: \[1\] has no list `objects`"),
        (lambda data: data[3].update(image_id="x"), r"objects.json: \[3\] has image_id 'x'"),
        (lambda data: data[1]["objects"][0].update(x=None), r"image 1, \[0\] has x, y, w, h \[None"),
        (lambda data: data[1]["objects"][1].update(names="red square"), r"image 1, \[1\] has the names 'red square'"),
    ],
)
def test_a_damaged_entry_is_named(pictures, tmp_path, change, message):
    file = rewritten(pictures / "objects.json", tmp_path, change)
    with pytest.raises(ValueError, match=message):
        read_ground_truth(genome_data(pictures, objects=str(file)))


def test_a_mirrored_image_has_its_boxes_mirrored_and_crowds_are_not_learnt(pictures):
    image = read_ground_truth(coco_data(pictures)).train[2]
    crowd = dataclasses.replace(image, crowd=np.array([False, True, False]))
    plain, mirrored = (make_example(crowd, TINY, mirror, 0) for mirror in (False, True))
    np.testing.assert_array_equal(plain.pixels[:, ::-1], mirrored.pixels)
    np.testing.assert_array_equal(plain.boxes, image.boxes[[0, 2]])
    np.testing.assert_array_equal(96 - plain.boxes[:, [2, 0]], mirrored.boxes[:, [0, 2]])
    bare = make_example(dataclasses.replace(image, attributes=((), (0, 2), ())), TINY, False, 0)
    assert bare.attributes.tolist() == [[0, 0, 0, 1], [1, 0, 1, 0], [0, 0, 0, 1]], "the last: it has none"
    large = make_example(image, dataclasses.replace(TINY, short_side=128, long_side=192), False, 0)
    assert large.pixels.shape == (128, 192, 3)
    np.testing.assert_array_equal(large.boxes, image.boxes * 2)


# --- runs -------------------------------------------------------------------------------------------------------------


def losses_of(root: Path, run: str) -> list[list[float]]:
    lines = read_metrics(open_store(str(root)), run, "training")
    return [[line[name] for name in sorted(line) if name.startswith(("loss_", "step"))] for line in lines]


def tensors_of(root: Path, run: str, step: int = 6) -> dict[str, torch.Tensor]:
    return load_file(root / "runs" / run / f"step-{step:07d}" / "model.safetensors")


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_leaves_five_losses_the_map_of_each_class_and_moves_what_is_to_move(root, pictures):
    first, *_, last = read_metrics(open_store(str(root)), "whole", "training")
    losses = {name for name in first if name.startswith("loss_")}
    assert losses == {f"loss_{name}" for name in ("objectness", "anchors", "classes", "boxes", "attributes")}
    assert last["loss_objectness"] < first["loss_objectness"]
    assert first["learning_rate"] == pytest.approx(1e-3)
    (validation,) = read_metrics(open_store(str(root)), "whole", "validation")
    assert {"map50", "map50_weighted", "proposal_recall"} <= validation.keys()
    rows = [json.loads(line) for line in (root / "runs/whole/predictions.jsonl").read_text().splitlines()]
    assert sum(row["objects"] for row in rows) == sum(1 + number % 3 for number in range(16, 24))
    before, after = tensors_of(root, "whole", 3), tensors_of(root, "whole")
    still = {name for name in after if torch.equal(before[name], after[name])}
    assert {name for name in after if "stem" in name or ".norm." in name} == still


def test_a_run_that_is_killed_goes_on_as_if_nothing_had_happened(root, pictures, capsys):
    recipe = tiny_recipe(pictures, root, run="killed")
    train(recipe, ALONE)
    # As if it had been killed in step 5: the last checkpoint is gone, the metrics run ahead of the one before.
    for file in (root / "runs/killed/step-0000006").iterdir():
        file.unlink()
    (root / "runs/killed/weights.safetensors").unlink()
    capsys.readouterr()
    train(recipe, ALONE)
    assert "killed goes on from" in capsys.readouterr().out
    assert losses_of(root, "killed") == losses_of(root, "whole")
    assert equal(tensors_of(root, "killed"), tensors_of(root, "whole"))
    files = [load_file(root / "runs" / run / "weights.safetensors") for run in ("whole", "killed")]
    assert equal(*files)


def test_live_norms_and_adam_go_on_as_well(root, pictures):
    resnet = dataclasses.replace(TINY.resnet, norm="batch")
    changes = {
        "network": dataclasses.replace(TINY, resnet=resnet),
        "optimizer": dataclasses.replace(
            SGD, kind="adamw", epsilon=1e-8, schedule="linear", warmup_steps=2, max_grad_norm=1.0
        ),
        "steps": 4,
        "save_every": 2,
        "validate_every": 2,  # after which norms are live again
    }
    for run in ("live", "stopped-live"):
        train(tiny_recipe(pictures, root, run=run, **changes), ALONE)
    for file in (root / "runs/stopped-live/step-0000004").iterdir():
        file.unlink()
    train(tiny_recipe(pictures, root, run="stopped-live", **changes), ALONE)
    live = tensors_of(root, "live", 4)
    assert equal(tensors_of(root, "stopped-live", 4), live)
    assert live["backbone.res2.0.conv1.norm.num_batches_tracked"] == 4
    assert not torch.equal(
        live["backbone.res2.0.conv1.norm.running_var"], torch.ones_like(live["backbone.res2.0.conv1.norm.running_var"])
    )


def test_a_finished_run_says_so_and_gives_its_weights_again(root, pictures, capsys):
    recipe = tiny_recipe(pictures, root, run="whole")
    file = root / "runs/whole/weights.safetensors"
    before = file.read_bytes()
    file.unlink()
    metrics = train(recipe, ALONE)
    assert "whole is complete" in capsys.readouterr().out
    assert "map50" in metrics
    assert file.read_bytes() == before


def test_a_run_goes_on_only_as_it_began(root, pictures, tmp_path):
    recipe = tiny_recipe(pictures, root, run="whole")
    optimizer = dataclasses.replace(recipe.optimizer, learning_rate=1e-4)
    with pytest.raises(ValueError, match=r"trained with optimizer.learning_rate = 0.002, the recipe says 0.0001"):
        train(dataclasses.replace(recipe, optimizer=optimizer), ALONE)
    with pytest.raises(ValueError, match=r"trained with data.seed = 0"):
        train(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, seed=1)), ALONE)
    file = rewritten(pictures / "coco.json", tmp_path, lambda data: data["annotations"][0].update(category_id=11))
    with pytest.raises(ValueError, match=r"step-0000006 was trained on other annotations"):
        train(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, annotations=str(file))), ALONE)


def test_the_result_is_the_network_that_was_trained(root, pictures):
    resnet = dataclasses.replace(TINY.resnet, norm="batch")
    recipe = tiny_recipe(pictures, root, run="live-half", network=dataclasses.replace(TINY, resnet=resnet), half=True)
    train(recipe, ALONE)
    file = root / "runs/live-half/weights.safetensors"
    trained = FasterRCNN(recipe.network)
    trained.load_state_dict(tensors_of(root, "live-half"))
    loaded = FasterRCNN(read_config(file))
    metadata = load_weights(loaded, file)
    assert metadata.classes == tuple(CLASSES)
    assert metadata.attribute_names == ATTRIBUTES
    assert {tensor.dtype for tensor in load_file(file).values()} >= {torch.float16}
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}
    pixels = target().pixels
    with torch.inference_mode():
        ours, theirs = trained.eval().backbone(pixels), loaded.eval().backbone(pixels)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(ours.abs().max()))
    # And its ResNet is where another training starts.
    fresh = FasterRCNN(recipe.network)
    load_resnet(fresh.backbone, fresh.roi_heads.res5, file)


def test_a_few_unreadable_are_passed_over_and_many_end_the_run(root, pictures, tmp_path, capsys):
    (tmp_path / "images").mkdir()
    for file in (pictures / "images").iterdir():
        (tmp_path / "images" / file.name).write_bytes(file.read_bytes())
    torn = tmp_path / "images" / "3.jpg"
    torn.write_bytes(torn.read_bytes()[:400])
    data = coco_data(pictures, images=(str(tmp_path / "images"),), unreadable=0.1)
    recipe = tiny_recipe(pictures, root, run="torn", data=data)
    train(recipe, ALONE)
    said = capsys.readouterr().out
    assert "1 samples cannot be read, and count for nothing: " in said
    assert said.count("3.jpg: ") == 1, said
    (line,) = (json.loads(line) for line in (root / "runs/torn/unreadable.jsonl").read_text().splitlines())
    assert line["key"] == "3"
    (tmp_path / "images" / "5.jpg").write_bytes((pictures / "images" / "4.jpg").read_bytes()[:300])
    with pytest.raises(ValueError, match=r"2 samples cannot be read, the last because .*[35].jpg: .* data.unreadable"):
        train(dataclasses.replace(recipe, run="torn-twice"), ALONE)
    for file in (tmp_path / "images").iterdir():
        file.write_bytes(b"torn")
    in_workers = dataclasses.replace(recipe, run="all-torn", data=dataclasses.replace(data, workers=1))
    with pytest.raises(ValueError, match=r"^none of the 16 images can be read; the last is .*jpg: "):
        train(in_workers, ALONE)


def test_every_rank_reads_its_share_of_the_same_order(pictures):
    config = coco_data(pictures)
    truth = read_ground_truth(config)

    def read(rank: int, size: int, step: int) -> list[int]:
        data = TrainingImages(truth.train, TINY, config, World(rank, size, torch.device("cpu")))
        return [example.seed for example in data[step].examples]

    for step in range(6):
        assert read(0, 1, step) == read(0, 2, step) + read(1, 2, step)
    epoch = [seed for step in range(4) for seed in read(0, 1, step)]
    assert len(set(epoch)) == 16, "each image once an epoch"
    assert epoch != [seed for step in range(4, 8) for seed in read(0, 1, step)]


@pytest.mark.slow
def test_two_processes_compute_what_one_computes_and_one_goes_on_where_they_were_killed(root, pictures):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "detectors.train", *command_line(pictures, root, run="two")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len([line for line in result.stdout.splitlines() if line.startswith("step 6/6  anchors")]) == 1
    np.testing.assert_allclose(losses_of(root, "two"), losses_of(root, "whole"), rtol=1e-4)
    one, two = tensors_of(root, "whole"), tensors_of(root, "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    validations = [read_metrics(open_store(str(root)), run, "validation")[-1] for run in ("whole", "two")]
    assert validations[0] == pytest.approx(validations[1], abs=1e-6)

    for file in (root / "runs/two/step-0000006").iterdir():
        file.unlink()
    train(tiny_recipe(pictures, root, run="two"), ALONE)
    np.testing.assert_allclose(losses_of(root, "two"), losses_of(root, "whole"), rtol=1e-4)


@pytest.mark.slow
def test_kill_9_leaves_a_run_that_goes_on_to_the_same_bytes(root, pictures):
    changes = {"steps": 60, "save_every": 10, "log_every": 1}
    command = [sys.executable, "-m", "detectors.train", *command_line(pictures, root, run="shot", **changes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("step 37/"):
            child.send_signal(signal.SIGKILL)
            break
    assert child.wait(timeout=60) == -signal.SIGKILL
    assert checkpoints(open_store(str(root)), "shot")[-1].endswith("step-0000030")
    for run in ("shot", "not-shot"):
        command = [sys.executable, "-m", "detectors.train", *command_line(pictures, root, run=run, **changes)]
        subprocess.run(command, cwd=PROJECT, env=environment, check=True, capture_output=True, timeout=240)
    assert losses_of(root, "shot") == losses_of(root, "not-shot")
    files = [(root / "runs" / run / "weights.safetensors").read_bytes() for run in ("shot", "not-shot")]
    assert files[0] == files[1]


# --- where it starts, what is refused ---------------------------------------------------------------------------------


def test_torchvisions_resnet_gives_the_same_activations_from_our_pixels(tmp_path):
    torch.manual_seed(0)
    theirs = torchvision.models.resnet.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1]).eval()
    for norm in theirs.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2)
            norm.weight.data.uniform_(0.5, 1.5)
    save_file(theirs.state_dict(), tmp_path / "resnet.safetensors")
    torch.save(theirs.state_dict(), tmp_path / "resnet.pth")
    resnet = ResNetConfig(blocks=(1, 1, 1, 1), stride_in_1x1=False, stem_pool="torch")
    network = FasterRCNN.random_init(dataclasses.replace(TINY, resnet=resnet), 0)
    said = init_from(network, tmp_path / "resnet.safetensors")
    assert "its ResNet; new: proposal_generator.rpn_head.anchor_deltas" in said

    image = torch.randint(0, 256, (1, 3, 256, 256)).float()  # R, G, B
    mean, deviation = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    ours = image.flip(1) - torch.tensor((102.9801, 115.9465, 122.7717)).view(1, 3, 1, 1)
    with torch.inference_mode():
        first = theirs.bn1(theirs.conv1((image / 255 - mean) / deviation))
        inside = (..., slice(2, -2), slice(2, -2))  # outside an image theirs sees its mean, ours ours
        torch.testing.assert_close(network.backbone.stem.conv1(ours)[inside], first[inside], rtol=1e-4, atol=1e-4)
        x = theirs.maxpool(torch.relu(first))
        x = theirs.layer3(theirs.layer2(theirs.layer1(x)))
        middle = (..., slice(5, 11), slice(5, 11))
        torch.testing.assert_close(network.backbone(ours)[middle], x[middle], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(network.roi_heads.res5(x).shape[:2], theirs.layer4(x).shape[:2])
    plain = FasterRCNN.random_init(dataclasses.replace(TINY, resnet=dataclasses.replace(resnet, res5_dilated=False)), 0)
    init_from(plain, tmp_path / "resnet.pth")
    with torch.inference_mode():
        torch.testing.assert_close(plain.roi_heads.res5(x), theirs.layer4(x), rtol=1e-4, atol=1e-4)

    caffe = FasterRCNN.random_init(dataclasses.replace(TINY, resnet=dataclasses.replace(resnet, stride_in_1x1=True)), 0)
    with pytest.raises(ValueError, match="set network.resnet.stride_in_1x1=false"):
        init_from(caffe, tmp_path / "resnet.pth")
    deeper = FasterRCNN.random_init(
        dataclasses.replace(TINY, resnet=dataclasses.replace(resnet, blocks=(1, 1, 2, 1))), 0
    )
    with pytest.raises(ValueError, match=r"does not fit the ResNet of network.resnet: missing backbone.res4.1.conv1"):
        init_from(deeper, tmp_path / "resnet.pth")


def test_a_detector_for_other_classes_starts_from_all_layers_that_fit(root):
    file = root / "runs/whole/weights.safetensors"
    network = FasterRCNN.random_init(dataclasses.replace(TINY, num_classes=5), 1)
    said = init_from(network, file)
    assert "its ResNet, proposal_generator.rpn_head.anchor_deltas" in said
    assert "roi_heads.box_predictor.fc_attr; new: roi_heads.box_predictor.bbox_pred, " in said
    saved, found = load_file(file), network.state_dict()
    assert torch.equal(
        found["proposal_generator.rpn_head.conv.weight"], saved["proposal_generator.rpn_head.conv.weight"]
    )
    assert torch.equal(found["backbone.res4.0.conv1.weight"], saved["backbone.res4.0.conv1.weight"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["root="], "root is not set"),
        (["data.annotations=none"], "give either data.annotations=FILE"),
        (["data.objects=other.json"], "give either data.annotations=FILE"),
        (["data.annotations=absent.json"], "data.annotations is absent.json, and there is no such file"),
        (["data.images="], "data.images is not set"),
        (["data.attribute_names=none"], "the network has 3 attributes; give data.attribute_names"),
        (["network.num_attributes=0"], "the network has no attribute head"),
        (["random_init=false"], "the network has no weights to start from"),
        (["init_from=absent.pth"], "random_init is True; it must be false with init_from"),
        (["optimizer.kind=lion"], "it must be one of adamw, adam, sgd"),
        (["optimizer.schedule=step", "optimizer.decay_at=6"], "optimizer.decay_at names update 6, and the run has 6"),
        (["optimizer.rate=1"], "OptimizerConfig has no field 'rate'"),
        (["sampling.anchor_negative=0.8"], "anchor_negative is 0.8; it must be at most anchor_positive"),
        (["network.box_arithmetic=plus_one"], "boxes are learned as x2 - x1 wide"),
        (["network.num_classes=7"], "the data has 8 classes, the network 7; set network.num_classes=8"),
        (["data.held_out_last=24"], "data.held_out_last is 24, and there are 24 images"),
        (["data.images=absent"], "data.images names absent, which is no folder"),
    ],
)
def test_wrong_settings_end_with_one_line_that_says_what_to_do(pictures, tmp_path, fields, message):
    with pytest.raises(SystemExit) as ended:
        main(command_line(pictures, tmp_path) + fields)
    assert message in str(ended.value)
    assert "\n" not in str(ended.value)


def test_every_recipe_is_whole_but_for_its_files():
    for make in RECIPES.values():
        recipe = make()
        assert recipe.name == make.__name__
        with pytest.raises(ValueError, match="root is not set"):
            check_complete(recipe)
    published = detector_vg_resnet101()
    assert (published.network.num_classes, published.network.num_attributes) == (1600, 400)
    assert published.network.resnet.norm == "frozen"


# --- the demo's detector ----------------------------------------------------------------------------------------------


def drawn(folder: Path, scenes: int) -> DataConfig:
    """So many scenes that no detector has learnt from, all but one held out: the demo's data have another seed."""
    settings = DemoDataSettings(seed=1, train_scenes=scenes, held_out_scenes=0)
    coco = coco_file()
    for number, scene, _, rng in captioned_scenes(settings):
        draw_into(coco, folder, number, scene, rng, settings.jpeg_quality)
    file = folder / "annotations.json"
    file.write_text(json.dumps(coco))
    return DataConfig(annotations=str(file), images=(str(folder),), held_out_last=scenes - 1, workers=0)


def test_the_shipped_detector_is_small_of_its_recipe_and_finds_what_is_drawn(tmp_path):
    assert SHIPPED.stat().st_size <= 1_000_000
    recipe = detector_demo()
    config = read_config(SHIPPED)
    assert config.resnet == dataclasses.replace(recipe.network.resnet, norm="frozen")
    assert dataclasses.replace(config, resnet=recipe.network.resnet) == recipe.network
    network = FasterRCNN(config)
    assert load_weights(network, SHIPPED).classes == CATEGORIES
    truth = read_ground_truth(drawn(tmp_path, scenes=31))
    metrics, rows = validate(network, recipe, truth.held_out, truth.classes, ALONE)
    assert metrics["map50"] >= 0.85
    assert metrics["proposal_recall"] >= 0.95
    assert sum(row["objects"] for row in rows) == sum(len(image.labels) for image in truth.held_out)
