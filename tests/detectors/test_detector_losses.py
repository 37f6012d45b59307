"""What a training computes: losses and steps as torchvision and torch have them, validation and average precision."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_detector import TINY, boxes, seeded
from torch import Tensor

import detectors.validate
from detectors.average_precision import (
    Detections,
    average_precision,
    class_results,
    match_detections,
    mean_average_precision,
)
from detectors.examples import make_example
from detectors.faster_rcnn import FasterRCNN, HeadOutputs
from detectors.ground_truth import LabelledImage
from detectors.losses import Example, Losses
from detectors.preprocess import PIXEL_MEAN_BGR
from detectors.recipes import DataConfig, DetectorRecipe, SamplingConfig
from detectors.validate import detect, validate
from training.distributed import ALONE

# Two anchors a cell. The thresholds, betas and numbers of proposals differ from each other and from the defaults, so
# that one in another's place is seen; so many anchors and regions are sampled that nothing is left to chance.
NETWORK = dataclasses.replace(
    TINY,
    anchor_sizes=(32,),
    anchor_ratios=(1.0, 0.5),
    box_weights=(10, 8, 5, 3),
    pre_nms=9,
    rpn_nms_threshold=0.4,
    post_nms=7,
)
SAMPLING = SamplingConfig(
    anchors=1000,
    rois=1000,
    anchor_positive=0.57,
    anchor_negative=0.25,
    roi_positive=0.42,
    pre_nms=20,
    post_nms=10,
    anchor_beta=0.3,
    roi_beta=0.9,
)


def lively() -> FasterRCNN:
    """A network whose layers say something else about each anchor and region."""
    network = FasterRCNN.random_init(NETWORK, 1)
    predictor, rpn = network.roi_heads.box_predictor, network.proposal_generator.rpn_head
    spreads = {rpn.objectness_logits: 0.3, rpn.anchor_deltas: 0.05, predictor.cls_score: 0.05}
    spreads |= {predictor.bbox_pred: 0.05, predictor.fc_attr: 0.05, predictor.attr_score: 0.3}
    for layer, spread in spreads.items():
        torch.nn.init.normal_(layer.weight, std=spread, generator=seeded(1))
        torch.nn.init.normal_(layer.bias, std=0.5, generator=seeded(2))
    return network


def image(seed: int, width: int, *objects: tuple[float, ...], labels: list, attributes: list) -> Example:
    noise = 20 * torch.randn(3, 64, width, generator=seeded(seed)).permute(1, 2, 0)
    known = torch.tensor(labels), torch.tensor(attributes, dtype=torch.float32)
    return Example("", noise + torch.tensor(PIXEL_MEAN_BGR), boxes(*objects), *known, seed)


def three_images() -> list[Example]:
    """Two sizes, in turns; the first image's first object is an anchor's box, its second one is narrower than any."""
    return [
        image(1, 96, (16, 16, 48, 48), (70, 14, 81, 60), labels=[3, 5], attributes=[[1, 0, 1, 0], [0, 0, 0, 1]]),
        image(2, 64, (9, 24, 52, 60), labels=[0], attributes=[[0, 1, 0, 0]]),
        image(3, 96, (1, 2, 40, 40), (30, 29, 67, 62), labels=[7, 7], attributes=[[1, 1, 1, 0], [0, 0, 1, 0]]),
    ]


# Sums of each loss over the three images, and what they are sums over, as torchvision's matcher, coder and losses gave
# them for this network.
OF_TORCHVISION = {
    "objectness": (28.48861, 97),
    "anchors": (5.721439, 97),
    "classes": (484.5787, 35),
    "boxes": (154.4771, 35),
    "attributes": (58.03820, 15),
}
INSIDE = {"objectness": (16.05064, 35), "anchors": (5.721439, 35)}


@pytest.mark.parametrize("inside", [True, False])
def test_the_five_losses_are_those_of_torchvisions_parts(inside: bool):
    network = lively()
    found = Losses(network, dataclasses.replace(SAMPLING, anchors_inside=inside))(three_images())
    expected = OF_TORCHVISION | (INSIDE if inside else {})
    assert found.keys() == expected.keys()
    for name, (loss, count) in found.items():
        assert count == expected[name][1], name
        assert float(loss.detach()) == pytest.approx(expected[name][0], rel=1e-4), name
    assert network.config == NETWORK, "the numbers of proposals are training's in training alone"


def test_no_more_anchors_and_regions_are_sampled_than_the_recipe_says_and_their_shares_are_its():
    network = lively()
    rpn, predictor = network.proposal_generator.rpn_head, network.roi_heads.box_predictor
    with torch.no_grad():
        for layer in (rpn.objectness_logits, predictor.cls_score):
            layer.weight.zero_()
        rpn.objectness_logits.bias.fill_(20)
        predictor.cls_score.bias.copy_(torch.eye(9)[8] * 50)
    few = {"anchors": 10, "anchor_foreground": 0.1, "rois": 4, "roi_foreground": 0.25, "anchors_inside": False}
    found = Losses(network, dataclasses.replace(SAMPLING, **few))(three_images())
    assert (found["objectness"][1], found["classes"][1]) == (3 * 10, 3 * 4)
    assert float(found["objectness"][0].detach()) == pytest.approx(3 * 9 * 20, rel=1e-4), "one of each is foreground"
    assert float(found["classes"][0].detach()) == pytest.approx(3 * 1 * 50, rel=1e-4), "and one region shows an object"


# One anchor a cell, a square of 32 pixels around its corner; four classes.
SQUARES = dataclasses.replace(
    TINY,
    resnet=dataclasses.replace(TINY.resnet, norm="batch"),
    num_classes=4,
    num_attributes=0,
    anchor_sizes=(32,),
    anchor_ratios=(1.0,),
)


def predicting(
    cells: dict[tuple[int, int], tuple[float, ...]],
    probabilities: list[tuple[float, ...]],
    deltas: dict[tuple[int, int], tuple[float, ...]],
) -> FasterRCNN:
    """A network that proposes its anchors at these cells (row, column), moved by dx, dy, dw, dh, in this order, and
    whose heads say so about them: probabilities of classes and background, and (proposal, class) -> dx, dy, dw, dh."""
    network = FasterRCNN.random_init(SQUARES, 0)

    def propose(module: torch.nn.Module, given: tuple[Tensor], output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits, moves = torch.full_like(output[0], -torch.inf), torch.zeros_like(output[1])
        for place, ((row, column), move) in enumerate(cells.items()):
            logits[0, 0, row, column] = -place
            moves[0, :, row, column] = torch.tensor(move)
        return logits, moves

    def predict(module: torch.nn.Module, given: tuple[Tensor], output: HeadOutputs) -> HeadOutputs:
        moves = torch.zeros_like(output.box_deltas)
        for (proposal, label), move in deltas.items():
            moves[proposal, label] = torch.tensor(move) * torch.tensor(SQUARES.box_weights)
        return HeadOutputs(torch.tensor(probabilities).log(), moves, None)

    network.proposal_generator.rpn_head.register_forward_hook(propose)
    network.roi_heads.box_predictor.register_forward_hook(predict)
    return network


def test_detections_are_moved_proposals_sure_enough_and_not_doubled_within_a_class(monkeypatch: pytest.MonkeyPatch):
    still = (0.0, 0.0, 0.0, 0.0)
    network = predicting(
        # 16 16 48 48       32 16 64 48      64 32 96 64
        {(2, 2): still, (2, 3): still, (3, 5): still},
        [(0.3, 0.04, 0.06, 0.2, 0.4), (0.4, 0.24, 0.02, 0.04, 0.3), (0.01, 0.04, 0.02, 0.9, 0.03)],
        {
            (0, 0): (0.25, 0, 0, 0),  # 24 16 56 48
            (1, 0): (-0.25, 0.125, 0, 0),  # 24 20 56 52: the same, surer
            (1, 1): (-0.25, 0.125, 0, 0),  # and as another class
            (0, 2): (0, 0, np.log(0.5), np.log(0.25)),  # 24 28 40 36
            (0, 3): (0, 0, np.log(2), 0),  # 0 16 64 48
            (2, 3): (0.5, 0.25, 0, 0),  # 80 40, and beyond both borders
        },
    )
    found, proposals = detect(network.eval(), torch.zeros(1, 3, 64, 96), 0.5)
    assert proposals.tolist() == [[16, 16, 48, 48], [32, 16, 64, 48], [64, 32, 96, 64]]
    assert found.labels.tolist() == [3, 0, 1, 3, 2]
    np.testing.assert_allclose(found.scores, [0.9, 0.4, 0.24, 0.2, 0.06], rtol=1e-5)
    expected = [[80, 40, 96, 64], [24, 20, 56, 52], [24, 20, 56, 52], [0, 16, 64, 48], [24, 28, 40, 36]]
    np.testing.assert_allclose(found.boxes, expected, atol=1e-3)

    # The two of class 0 overlap by 7/9, those of class 3 not at all.
    both, _ = detect(network, torch.zeros(1, 3, 64, 96), 0.8)
    assert both.labels.tolist() == [3, 0, 0, 1, 3, 2]
    monkeypatch.setattr(detectors.validate, "MOST_DETECTIONS", 2)
    surest, _ = detect(network, torch.zeros(1, 3, 64, 96), 0.5)
    assert surest.labels.tolist() == [3, 0]


def test_validation_scales_objects_by_each_side_and_leaves_the_network_as_it_was(tmp_path, monkeypatch):
    # 200 pixels wide and 7 high, which become 96 and 3: magnified by 0.48 across and 0.43 down.
    objects = boxes((100, 0, 200, 7), (0, 0, 50, 7)).numpy()
    strip = LabelledImage("strip", tmp_path / "strip.png", 7, 200, objects, np.array([3, 1]), ((), ()))
    Image.new("RGB", (200, 7), (120, 120, 120)).save(strip.file)
    example = make_example(strip, SQUARES, False, 0)
    np.testing.assert_allclose(example.boxes, [[48, 0, 96, 3], [0, 0, 24, 3]], rtol=1e-6)

    # It finds class 3 in the strip's right half, where it is, and class 1 in the left third: that ends at a quarter.
    proposed = {(0, 4): (0.25, 0, np.log(1.5), 0), (0, 1): (0.0, 0, 0, 0)}
    network = predicting(proposed, [(0.01, 0.01, 0.01, 0.9, 0.07), (0.01, 0.8, 0.01, 0.01, 0.17)], {})
    recipe = DetectorRecipe(name="strips", network=SQUARES, data=DataConfig(workers=0), random_init=True)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    monkeypatch.setattr(detectors.validate, "IOU_THRESHOLD", 0.9)
    for training in (True, False):
        metrics, rows = validate(network.train(training), recipe, [strip], ("a", "b", "c", "d"), ALONE)
        assert metrics == {"map50": 0.5, "map50_weighted": 0.5, "proposal_recall": 0.5}
        assert rows == [
            {"class": "b", "average_precision": 0, "objects": 1, "detections": 1},
            {"class": "d", "average_precision": 1, "objects": 1, "detections": 1},
        ]
        assert {module.training for module in network.modules()} == {training}
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("lowest", [0.9, 0.5])  # equal scores match in their order
def test_each_detection_is_right_or_wrong(lowest: float):
    objects = boxes((0, 0, 10, 10), (20, 0, 30, 10)).numpy()
    for found, expected in (
        ([(0, 0, 10, 9), (0, 0, 10, 10)], [True, False]),  # the more probable of two
        ([(20, 0, 30, 10)], [False]),  # an object of another class
        ([(0, 0, 10, 5)], [True]),  # half of an object
        ([(0, 0, 10, 4.9)], [False]),  # less than half
    ):
        scores = np.linspace(0.9, lowest, len(found), dtype=np.float32)
        detections = Detections(boxes(*found).numpy(), scores, np.ones(len(found), int))
        assert match_detections(detections, objects, np.array([1, 2]), 0.5).tolist() == expected


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
    labels, scores = np.array([0, 0, 2, 3]), np.array([0.9, 0.8, 0.7, 0.9])
    right = np.array([True, False, False, True])
    # Class 0: one of 4 found, first. Class 1: never detected. Class 2: not there. Class 3: all found.
    results = class_results(labels, scores, right, np.array([4, 2, 0, 1]))
    assert [tuple(row.values()) for row in results] == [(0, 0.25, 4, 2), (1, 0, 2, 0), (3, 1, 1, 1)]
    metrics = mean_average_precision(results)
    assert metrics["map50"] == pytest.approx(1.25 / 3)
    assert metrics["map50_weighted"] == pytest.approx((0.25 * 4 + 1) / 7)
    assert mean_average_precision([]) == {}
