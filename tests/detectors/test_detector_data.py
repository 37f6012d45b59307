"""What the detector's training makes of lists, attributes, crowds and start files, and how a run of it ends."""

import dataclasses
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from released_detectors import milvlg, save_torch, vl_bert
from safetensors.torch import load_file, save_file
from tiny import CLASSES, as_overrides, tiny_sample
from tiny_detector import ALONE, TINY, annotated_boxes, boxes, coco_data, tiny_recipe

import detectors.train
import training.distributed
from detectors.average_precision import FALSE_POSITIVE, NOT_COUNTED, TRUE_POSITIVE, Detections, match_detections
from detectors.faster_rcnn import FasterRCNN, FasterRCNNConfig
from detectors.ground_truth import GroundTruth, read_ground_truth
from detectors.names import read_names
from detectors.recipes import SGD, DataConfig, DetectorRecipe, detector_vg_resnet101
from detectors.train import train
from detectors.validate import validate
from detectors.weights.files import ANCHORS, write_weights
from detectors.weights.init_from import init_from
from training.distributed import World, share_buffers

NAMES = ("red", "round", "old")


def write(file: Path, content: Any) -> str:
    """The file's name, with this text or JSON in it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(file)


# --- lists ------------------------------------------------------------------------------------------------------------


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


def test_an_id_is_no_file_name_though_another_images_file_is_called_like_it(tmp_path):
    images = {number: f"{number - 1}.png" for number in range(1, 7)}
    truth = read_ground_truth(coco(tmp_path, images, train_list="1\n3.png\n2\n", held_out_list="\ufeff5\n\n5.png\n"))
    assert ids(truth) == (["1", "2", "4"], ["5", "6"])
    assert truth.skipped == {}
    only = read_ground_truth(coco(tmp_path, images, held_out_list="3\n"))
    assert ids(only) == (["1", "2", "4", "5", "6"], ["3"])


def test_a_name_in_two_folders_is_refused_without_them_and_found_with_them(tmp_path):
    images = {1: "a/1.jpg", 2: "b/1.jpg", 3: "b/2.jpg", 4: "webp/4.webp"}
    lines = "b/1.jpg\n/anywhere/b/2.jpg 7\n4.webp\n"
    assert ids(read_ground_truth(coco(tmp_path, images, train_list=lines)))[0] == ["2", "3", "4"]
    with pytest.raises(ValueError, match=r"train_list.txt:2: 1.jpg is the name of 2 images; give their paths or ids"):
        read_ground_truth(coco(tmp_path, images, train_list="b/2.jpg\n1.jpg\n"))


def test_lines_that_name_no_image_are_counted_and_another_folders_image_is_not_taken_for_theirs(tmp_path):
    lines = "1\nval/2.jpg\n77\nabsent.jpg\n\n"
    truth = read_ground_truth(coco(tmp_path, {1: "train/1.jpg", 2: "train/2.jpg"}, train_list=lines))
    assert ids(truth)[0] == ["1"]
    assert truth.skipped == {"lines of train_list.txt that name no image": 3}


def test_two_entries_that_fall_on_one_file_are_refused(tmp_path):
    for images in ({1: "a/1.jpg", 2: "b/1.jpg"}, {1: "1.jpg", 2: "1.jpg"}):
        config = coco(tmp_path, images)
        for name in ("a/1.jpg", "b/1.jpg"):
            (tmp_path / "images" / name).unlink(missing_ok=True)
        write(tmp_path / "images" / "1.jpg", "")
        with pytest.raises(ValueError, match=r"images 1 and 2 would both be .*images/1.jpg"):
            read_ground_truth(config)
        listed = dataclasses.replace(config, train_list=write(tmp_path / "one.txt", "2\n"))
        assert ids(read_ground_truth(listed))[0] == ["2"], "the other is not read"


def test_images_that_no_list_names_may_be_absent(tmp_path):
    config = coco(tmp_path, {1: "1.jpg", 2: "2.jpg", 3: "3.jpg"}, train_list="1\n", held_out_list="2\n")
    (tmp_path / "images" / "3.jpg").unlink()
    truth = read_ground_truth(config)
    assert (ids(truth), truth.skipped) == ((["1"], ["2"]), {})
    (tmp_path / "images" / "2.jpg").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 images are absent from .*: 2.jpg"):
        read_ground_truth(config)


# --- Visual Genome ----------------------------------------------------------------------------------------------------


def an_object(number: int, **more: Any) -> dict[str, Any]:
    return {"object_id": number, "x": 5, "y": 5, "w": 20, "h": 20, "names": ["dog"], **more}


def genome(
    folder: Path, images: Mapping[int, Sequence[Any]], attributes: Sequence[Any] | None = None, **lists: str
) -> DataConfig:
    """Objects by image; attributes: the entries of image 1 in attributes.json, which is absent without them."""
    for image in images:
        write(folder / "images" / f"{image}.jpg", "")
    sizes = [{"image_id": image, "width": 90, "height": 60} for image in images]
    content = [{"image_id": image, "objects": found} for image, found in images.items()]
    told = [{"image_id": 1, "attributes": attributes}]
    return DataConfig(
        objects=write(folder / "objects.json", content),
        attributes=None if attributes is None else write(folder / "attributes.json", told),
        image_data=write(folder / "image_data.json", sizes),
        images=(str(folder / "images"),),
        classes=write(folder / "classes.txt", "dog\n"),
        attribute_names=write(folder / "names.txt", "\n".join(NAMES)),
        **{name: write(folder / f"{name}.txt", text) for name, text in lists.items()},
    )


def test_visual_genomes_lists_have_an_image_and_its_xml_in_a_line(tmp_path):
    images = {number: [an_object(number)] for number in (1, 2, 3)}
    val = "VG_100K_2/2.jpg xml/2.xml\nVG_100K/3.jpg xml/1.xml\n"
    assert ids(read_ground_truth(genome(tmp_path, images, held_out_list=val))) == (["1"], ["2", "3"])


def test_attributes_belong_to_an_object_by_its_id_and_by_the_ids_that_were_merged_into_it(tmp_path):
    found = [
        an_object(10),
        an_object(20, merged_object_ids=[21, 22]),
        an_object(30, merged_object_ids=[31], attributes=["old"]),
        an_object(40, merged_object_ids=None),
    ]
    told = [
        {"object_id": 10, "attributes": ["Red"]},
        {"object_id": 10, "attributes": None},
        {"object_id": 10},
        {"object_id": 20, "attributes": ["round"]},
        {"object_id": 22, "attributes": ["old", "round"]},
        {"object_id": 31, "attributes": ["red"]},
        {"object_id": 40, "attributes": []},
    ]
    truth = read_ground_truth(genome(tmp_path, {1: found}, told))
    assert truth.train[0].attributes == ((0,), (1, 2), (0, 2), ())
    assert truth.skipped == {}


def test_objects_that_the_attributes_do_not_have_are_counted_and_refused_where_it_has_none(tmp_path):
    images = {1: [an_object(10), an_object(11)], 2: [an_object(20)]}
    truth = read_ground_truth(genome(tmp_path, images, [{"object_id": 11, "attributes": ["red"]}]))
    assert [image.attributes for image in truth.train] == [((), (0,)), ((),)]
    assert truth.skipped == {"objects that data.attributes does not have": 2}
    with pytest.raises(
        ValueError, match=r"attributes.json has none of the objects of .*objects.json: take both of one"
    ):
        read_ground_truth(genome(tmp_path, images, [{"object_id": 12, "attributes": ["red"]}]))


# --- what is refused by name ------------------------------------------------------------------------------------------


def test_a_mark_at_the_beginning_of_a_list_of_names_is_no_part_of_the_first_name(tmp_path):
    config = genome(tmp_path, {1: [an_object(1, attributes=["red"])]})
    write(tmp_path / "classes.txt", "\ufeffdog,hound\ncat\n")
    write(tmp_path / "names.txt", "\ufeffred\n")
    truth = read_ground_truth(config)
    assert (truth.classes, truth.attribute_names) == (("dog", "cat"), ("red",))
    assert (truth.train[0].labels.tolist(), truth.train[0].attributes) == ([0], ((0,),))
    assert [names[0] for names in read_names(tmp_path / "classes.txt")] == ["dog", "cat"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("image_data", [{"image_id": 1, "width": -5, "height": 60}], r"image_data.json: \[0\] is -5x60 pixels"),
        ("image_data", [{"image_id": 1, "width": 90}], r"image_data.json: \[0\] has height None, no whole number"),
        ("attributes", [None], r"attributes.json: \[0\] has no list `objects` \(or `attributes`\)"),
        ("attributes", [{"image_id": 1, "attributes": [None]}], r"attributes.json: image 1, \[0\] has object_id None"),
        (
            "attributes",
            [{"image_id": 1, "attributes": [{"object_id": 1, "attributes": 5}]}],
            r"attributes.json: image 1, \[0\] has the attributes 5, no list",
        ),
        (
            "objects",
            [{"image_id": 1, "objects": [an_object(1, attributes="red")]}],
            r"objects.json: image 1, \[0\] has the attributes 'red', no list",
        ),
        (
            "objects",
            [{"image_id": 1, "objects": [an_object(1, merged_object_ids=2)]}],
            r"objects.json: image 1, \[0\] has the merged_object_ids 2, no list",
        ),
    ],
)
def test_a_bad_value_in_visual_genomes_files_is_named(tmp_path, name, content, message):
    config = genome(tmp_path, {1: [an_object(1)]}, [{"object_id": 1, "attributes": ["red"]}])
    write(tmp_path / f"{name}.json", content)
    with pytest.raises(ValueError, match=message):
        read_ground_truth(config)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"sample_key": "k"}, "image 2 has no file_name"),
        ({"sample_key": "k", "file_name": None}, "image 2 has no file_name"),
        ({}, "image 2 has no file_name"),
        ({"file_name": None}, "image 2 has the file_name None, not a text"),
    ],
)
def test_an_image_of_a_coco_file_without_a_file_is_named(tmp_path, image, message):
    config = coco(tmp_path, {1: "1.jpg"})
    content = json.loads(Path(config.annotations).read_text())
    content["images"].append({"id": 2, "width": 90, "height": 60} | image)
    write(Path(config.annotations), content)
    with pytest.raises(ValueError, match=f"coco.json: {message}"):
        read_ground_truth(config)


# --- crowds -----------------------------------------------------------------------------------------------------------


def judged(there: Any, *rows: tuple[float, ...]) -> list[int]:
    """Of these boxes of class 1, the surest first."""
    scores = np.linspace(0.9, 0.5, len(rows), dtype=np.float32)
    return match_detections(Detections(boxes(*rows).numpy(), scores, np.ones(len(rows), int)), there, 0.5).tolist()


def test_what_lies_in_a_crowd_of_its_class_is_not_counted_however_small():
    there = annotated_boxes((0, 0, 100, 100), (200, 0, 300, 100), labels=[1, 2], crowd=[1, 1])
    small = [(10, 10, 20, 20), (95, 0, 105, 10)]  # inside, and half inside
    wrong = [(96, 0, 106, 10), (210, 10, 220, 20), (400, 0, 410, 10)]  # less than half, another class's crowd, nowhere
    assert judged(there, *small, *wrong) == [NOT_COUNTED] * 2 + [FALSE_POSITIVE] * 3


def test_a_real_object_in_a_crowd_is_found_first_and_a_second_time_is_wrong():
    there = annotated_boxes((0, 0, 100, 100), (10, 10, 40, 40), labels=[1, 1], crowd=[1, 0])
    found = [(10, 10, 40, 39), (10, 10, 40, 40), (11, 10, 40, 40), (60, 60, 90, 90)]
    assert judged(there, *found) == [TRUE_POSITIVE, FALSE_POSITIVE, FALSE_POSITIVE, NOT_COUNTED]


# --- where a run starts -----------------------------------------------------------------------------------------------


def ours(folder: Path, config: FasterRCNNConfig = TINY, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A weight file as a training leaves it, of a network with other numbers than those that start from it."""
    metadata = {"network": dataclasses.asdict(config), "classes": CLASSES, "attributes": NAMES}
    file = folder / "ours.safetensors"
    write_weights(file, FasterRCNN.random_init(config, 7).state_dict() | (tensors or {}), metadata)
    return file


def taken(file: Path, config: FasterRCNNConfig = TINY, classes: Any = CLASSES, names: Any = NAMES) -> tuple[set, str]:
    """Which layers have the file's numbers afterwards, without the ResNet's; and what is said."""
    network = FasterRCNN.random_init(config, 1)
    said = init_from(network, file, classes, names)
    theirs, state = load_file(file), network.state_dict()
    assert torch.equal(state["backbone.res3.0.conv2.weight"], theirs["backbone.res3.0.conv2.weight"])
    layers = {name.removesuffix(".weight") for name in state if "backbone" not in name and "res5" not in name}
    return {
        layer.rpartition(".")[2]
        for layer in layers
        if f"{layer}.weight" in state and torch.equal(state[f"{layer}.weight"], theirs[f"{layer}.weight"])
    }, said


RPN = {"conv", "objectness_logits", "anchor_deltas"}
CLASS_HEADS = {"cls_score", "bbox_pred", "cls_embedding"}
EVERYTHING = RPN | CLASS_HEADS | {"fc_attr", "attr_score"}


def test_a_detector_of_the_same_names_and_anchors_is_taken_whole(tmp_path):
    own = FasterRCNN(TINY).proposal_generator.cell_anchors
    for tensors in ({}, {ANCHORS: own.clone()}):
        layers, said = taken(ours(tmp_path, tensors=tensors))
        assert layers == EVERYTHING
        assert said.endswith("new: ")


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        (CLASS_HEADS, {"classes": CLASSES[::-1]}),
        ({"attr_score"}, {"names": NAMES[::-1]}),
        (RPN, {"config": dataclasses.replace(TINY, anchor_sizes=(24, 48))}),
        (RPN, {"config": dataclasses.replace(TINY, anchor_ratios=(0.4, 1.0, 2.0))}),
        ({"bbox_pred"}, {"config": dataclasses.replace(TINY, box_weights=(1, 1, 1, 1))}),
    ],
)
def test_layers_of_the_same_shapes_that_mean_something_else_begin_anew_and_are_said(tmp_path, layers, changes):
    found, said = taken(ours(tmp_path), **changes)
    assert found == EVERYTHING - layers
    assert {name.rpartition(".")[2] for name in said.partition("new: ")[2].split(", ")} == layers


def test_anchors_in_a_file_that_are_not_ours_leave_the_proposals_new(tmp_path):
    other = FasterRCNN(TINY).proposal_generator.cell_anchors + 0.5
    layers, said = taken(ours(tmp_path, tensors={ANCHORS: other}))
    assert layers == EVERYTHING - RPN
    assert "new: proposal_generator.rpn_head.anchor_deltas, " in said


@pytest.mark.parametrize(
    ("name", "theirs", "word"),
    [("stride_in_1x1", True, "true"), ("stem_pool", "caffe", "caffe"), ("res5_dilated", True, "true")],
)
def test_a_resnet_that_is_wired_otherwise_is_refused_by_its_setting(tmp_path, name, theirs, word):
    resnet = dataclasses.replace(TINY.resnet, **{name: theirs})
    file = ours(tmp_path, dataclasses.replace(TINY, resnet=resnet))
    with pytest.raises(
        ValueError, match=rf"ours.safetensors was .* resnet.{name} = .* set network.resnet.{name}={word}"
    ):
        init_from(FasterRCNN(TINY), file)


@pytest.mark.parametrize("release", [vl_bert, milvlg])
def test_published_weights_are_to_be_converted_first(tmp_path, release):
    file = save_torch(tmp_path / "published.pth", release(), flat=release is vl_bert)
    with pytest.raises(ValueError, match=r"no ResNet of torchvision's .*: python -m detectors.weights .*published.pth"):
        init_from(FasterRCNN(TINY), file)


# --- how a run ends ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """12 pictures of coloured shapes, without attributes."""
    folder = tmp_path_factory.mktemp("drawn")
    content = {"images": [], "annotations": []}
    content["categories"] = [{"id": 1 + number, "name": name} for number, name in enumerate(CLASSES)]
    write(folder / "attributes.txt", "\n".join(NAMES))
    (folder / "images").mkdir()
    for number in range(12):
        sample = tiny_sample(number)
        (folder / "images" / f"{number}.png").write_bytes(sample.image)
        image = {"id": number, "file_name": f"{number}.png", "width": sample.width, "height": sample.height}
        content["images"].append(image)
        for (x1, y1, x2, y2), label in zip(sample.regions.boxes.tolist(), sample.regions.labels.tolist(), strict=True):
            box = [x1, y1, x2 - x1, y2 - y1]
            content["annotations"].append({"image_id": number, "category_id": label, "bbox": box})
    write(folder / "coco.json", content)
    return folder


def a_recipe(drawn: Path, root: Path, **changes: Any) -> DetectorRecipe:
    """Of two images a step, the last 4 held out."""
    data = coco_data(drawn, batch=2, held_out_last=4)
    return dataclasses.replace(tiny_recipe(drawn, root), **{"data": data, "steps": 2, "save_every": 2} | changes)


def told(root: Path) -> dict[str, Any]:
    """What the weight file of the run says of its training."""
    file = root / "runs/tiny/weights.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    return json.loads(json.loads(file.read_bytes()[8 : 8 + length])["__metadata__"]["trained"])


def test_a_new_run_that_ends_before_its_rate_falls_is_refused_and_one_that_has_begun_may_be_ended(drawn, tmp_path):
    decays = a_recipe(drawn, tmp_path, optimizer=dataclasses.replace(SGD, schedule="step", decay_at=(4,)))
    with pytest.raises(ValueError, match=r"optimizer.decay_at names update 4, and the run has 2 steps; set both"):
        train(decays, ALONE)
    assert not (tmp_path / "runs").exists()
    stopped_after(2, dataclasses.replace(decays, steps=6))
    assert not (tmp_path / "runs/tiny/weights.safetensors").exists()
    train(decays, ALONE)
    assert told(tmp_path)["steps"] == 2


def stopped_after(step: int, recipe: DetectorRecipe) -> None:
    """A run that ends as Ctrl-C would end it, right after it saved this step."""
    save = detectors.train.DetectorRun.save

    def save_and_stop(run: Any, done: int, *state: Any) -> None:
        save(run, done, *state)
        if done == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detectors.train.DetectorRun, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, ALONE)


def test_weights_are_those_of_the_step_that_they_name_however_often_a_run_is_ended(drawn, tmp_path, capsys):
    file = tmp_path / "runs/tiny/weights.safetensors"
    train(a_recipe(drawn, tmp_path), ALONE)
    early = told(tmp_path)
    assert early["steps"] == 2
    assert "map50" in early["validation"]
    stopped_after(4, a_recipe(drawn, tmp_path, steps=6))
    assert not file.exists(), "step 2's, which the run has left behind"
    capsys.readouterr()
    train(a_recipe(drawn, tmp_path, steps=4), ALONE)
    assert "tiny is complete" in capsys.readouterr().out
    assert told(tmp_path)["steps"] == 4
    assert told(tmp_path)["validation"] == {}, "the last one was step 2's"
    weights, checkpoint = load_file(file), load_file(tmp_path / "runs/tiny/step-0000004/model.safetensors")
    assert all(torch.equal(weights[name], checkpoint[name]) for name in weights)


def test_a_run_of_a_falling_rate_says_that_it_falls_to_another_end(drawn, tmp_path, capsys):
    linear = dataclasses.replace(SGD, learning_rate=2e-3, schedule="linear")
    stopped_after(2, a_recipe(drawn, tmp_path, steps=6, optimizer=linear))
    stopped_after(4, a_recipe(drawn, tmp_path, steps=6, optimizer=linear))
    assert "the learning rate goes on" not in capsys.readouterr().out
    train(a_recipe(drawn, tmp_path, steps=5, optimizer=linear), ALONE)
    assert "it had 6 steps, now it has 5: the learning rate goes on as in such a run" in capsys.readouterr().out


def test_a_narrow_image_is_passed_over_in_training_and_counted_in_validation(drawn, tmp_path, capsys):
    content = json.loads((drawn / "coco.json").read_text())
    folder = tmp_path / "images"
    folder.mkdir()
    # 10 rows become one, of which nothing is left; 24 become 3, which are enough.
    for number, height in ((0, 10), (1, 24), (10, 10), (11, 24)):
        content["images"][number].update(file_name=f"narrow-{number}.png", width=1000, height=height)
        Image.new("RGB", (1000, height), (120, 120, 120)).save(folder / f"narrow-{number}.png")
        content["annotations"].append({"image_id": number, "category_id": 1, "bbox": [0, 0, 500, height]})
    network = dataclasses.replace(TINY, short_side=96, long_side=128)
    folders = (str(folder), str(drawn / "images"))
    data = coco_data(drawn, annotations=write(tmp_path / "coco.json", content), images=folders, unreadable=0.2)
    data = dataclasses.replace(data, batch=4, held_out_last=4)
    metrics = train(a_recipe(drawn, tmp_path, network=network, data=data), ALONE)
    said = capsys.readouterr().out
    assert "1 samples cannot be read, and count for nothing: " in said
    assert "narrow-0.png: is too narrow: 128x1 of 1000x10 when it is resized" in said
    assert "cannot validate on" in said
    assert "narrow-10.png: is too narrow" in said
    assert "narrow-1.png" not in said
    assert "narrow-11.png" not in said
    assert metrics["unreadable_images"] == 1
    (line,) = (json.loads(line) for line in (tmp_path / "runs/tiny/unreadable.jsonl").read_text().splitlines())
    assert line["key"] == "0"


# --- several processes ------------------------------------------------------------------------------------------------


def norms_at_validation(recipe: DetectorRecipe, rank: int, folder: Path) -> None:
    """Train as one of two processes; leave this one's norms as it trained them, and those with which it validated."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)

    def keep(network: FasterRCNN, when: str) -> None:
        buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        save_file(buffers, folder / f"{rank}-{when}.safetensors")

    def share_and_keep(network: FasterRCNN, world: World) -> None:
        keep(network, "trained")
        share_buffers(network, world)

    def validate_and_keep(network: FasterRCNN, *rest: Any) -> Any:
        keep(network, "validated")
        return validate(network, *rest)

    training.distributed.share_buffers, detectors.train.validate = share_and_keep, validate_and_keep
    train(recipe, World(rank, 2, torch.device("cpu")))
    dist.destroy_process_group()


def test_live_norms_are_validated_and_saved_as_the_first_process_has_them(drawn, tmp_path):
    network = dataclasses.replace(TINY, resnet=dataclasses.replace(TINY.resnet, norm="batch"))
    recipe = a_recipe(drawn, tmp_path, network=network, frozen_stages=0)
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=norms_at_validation, args=(recipe, rank, tmp_path)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        child.kill()
    assert [child.exitcode for child in children] == [0, 0]
    trained, others, *validated = (
        load_file(tmp_path / f"{rank}-{when}.safetensors") for when in ("trained", "validated") for rank in range(2)
    )
    name = "backbone.res2.0.conv1.norm.running_mean"
    assert not torch.equal(trained[name], others[name])
    saved = load_file(tmp_path / "runs/tiny/step-0000002/model.safetensors")
    for buffers in (*validated, {name: tensor for name, tensor in saved.items() if name in trained}):
        assert all(torch.equal(buffer, trained[name]) for name, buffer in buffers.items())


# --- the stage --------------------------------------------------------------------------------------------------------


def test_the_stage_refuses_overrides_of_what_it_sets_itself(tmp_path):
    from flows.settings import TrainDetectorSettings
    from flows.train_detector import train_detector

    for override, instead in (
        ("root=elsewhere", "the flow's root"),
        ("run=other", "the setting run"),
        ("init_from=a.pth", "the setting init_from"),
        ("data.train_list=a.txt", "the setting train_list"),
    ):
        field = override.partition("=")[0]
        with pytest.raises(
            ValueError, match=f"override {override}: the stage sets {field} itself; use {instead} inste"
        ):
            train_detector(str(tmp_path), TrainDetectorSettings(overrides=("steps=2", override)))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_stage_trains_and_says_where_the_weights_are(drawn, tmp_path):
    from flows.settings import Processes, TrainDetectorSettings
    from flows.train_detector import train_detector

    recipe = a_recipe(drawn, tmp_path)
    given = {"root", "run", "data.annotations", "data.images", "data.attribute_names", "data.held_out_last"}
    overrides = [line for line in as_overrides(recipe, detector_vg_resnet101()) if line.partition("=")[0] not in given]
    settings = TrainDetectorSettings(
        run="staged",
        images=recipe.data.images,
        annotations=recipe.data.annotations,
        attribute_names=recipe.data.attribute_names,
        held_out_last=recipe.data.held_out_last,
        overrides=tuple(overrides),
        processes=Processes(threads=1, timeout=120),
    )
    lines = []
    trained = train_detector(str(tmp_path), settings, lines.append)
    assert trained.weights == str(tmp_path / "runs/staged/weights.safetensors")
    assert Path(trained.weights).is_file()
    assert (trained.run, trained.recipe) == ("staged", "detector_vg_resnet101")
    assert "map50" in trained.metrics
    assert trained.peak_bytes > 0
    assert any(line.startswith("staged: 8 images with 16 objects of 8 classes, 4 held out") for line in lines)
