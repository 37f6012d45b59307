"""Bad images, colours and batches: what a detector makes of them."""

import dataclasses
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from seeded import another_writer
from tiny_detector import commit_images, image_file, image_sample, lively_norms, rectangles, seeded
from torch import Tensor, nn

from demo.serve import png_bomb
from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import DEMO, FasterRCNN
from detectors.preprocess import decode_bgr, resize, to_input
from detectors.resnet import ResNetConfig
from detectors.run import detect_shard, stage_of
from storage.sample import Regions

SIZES = {"num_classes": 5, "num_attributes": 3, "rpn_channels": 8, "short_side": 84, "long_side": 112, "post_nms": 40}
SMALL = dataclasses.replace(DEMO, resnet=ResNetConfig(blocks=(1, 1, 1, 1), width=4), **SIZES)
COLOURS = dataclasses.replace(SMALL, num_classes=2, num_attributes=2, anchor_sizes=(16, 32), post_nms=300)
BLUE, RED, GREEN, DARK = (0, 0, 255), (255, 0, 0), (0, 255, 0), (10, 10, 10)


def halves(height: int, width: int, left: tuple, right: tuple, top: float = 0) -> np.ndarray:
    """Two colours side by side, dark above the share `top`."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:, : width // 2], pixels[:, width // 2 :], pixels[: int(top * height)] = left, right, DARK
    return pixels


def colour_network(**changes: object) -> FasterRCNN:
    """It calls what is blue class 0 and attribute 0, and what is red class 1 and attribute 1.

    Channel 0 carries blue minus its mean, channel 1 red, channel 2 green; what exceeds green's mean overflows. Blue
    moves and scales the anchors. No sum has more than one term, so that batches change no bit.
    """
    network = FasterRCNN.random_init(dataclasses.replace(COLOURS, **changes), 0)
    heads, rpn = network.roi_heads.box_predictor, network.proposal_generator.rpn_head
    blocks = [stage[0] for stage in (network.backbone.res2, network.backbone.res3, network.backbone.res4)]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        for channel, (colour, gain) in enumerate(((0, 1), (2, 1), (1, 1e30))):
            network.backbone.stem.conv1.weight[channel, colour, 3, 3] = gain
        for block in (*blocks, *network.roi_heads.res5.children()):
            block.shortcut.weight[[0, 1], [0, 1]] = 1
            block.shortcut.weight[2, 2] = 1e20
        rpn.conv.weight[0, 0, 1, 1] = 1
        shape = rpn.anchor_deltas.weight[:, 0, 0, 0].shape
        rpn.anchor_deltas.weight[:, 0, 0, 0] = torch.linspace(-0.003, 0.003, *shape)
        rpn.objectness_logits.weight[:, 0, 0, 0] = torch.linspace(0.001, 0.002, network.config.num_anchors)
        heads.cls_score.weight[[0, 1], [0, 1]] = 0.1
        heads.fc_attr.weight[[0, 1], [0, 1]] = 1
        heads.attr_score.weight[[0, 1], [0, 1]] = 0.1
    return network


def noisy_network() -> FasterRCNN:
    """Random weights, norms that do something, and outputs that differ by more than rounding does."""
    network = lively_norms(FasterRCNN.random_init(SMALL, 3))
    rpn, heads = network.proposal_generator.rpn_head, network.roi_heads.box_predictor
    with torch.no_grad():
        for layer in (rpn.conv, rpn.objectness_logits, heads.cls_score, heads.attr_score):
            layer.weight *= 5
    return network


def detector_of(network: FasterRCNN, **settings: object) -> FasterRCNNDetector:
    return FasterRCNNDetector(network, {"random_init": True, "seed": 0}, DetectorSettings(**settings))


def arrays_of(regions: Regions) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in vars(regions).items() if isinstance(value, np.ndarray)}


GOOD = {
    0: halves(84, 112, BLUE, RED),
    2: halves(84, 112, BLUE, BLUE),
    4: halves(84, 112, RED, BLUE),
    7: halves(84, 112, BLUE, BLUE, top=0.5),
    9: halves(140, 100, RED, DARK),
    13: halves(84, 112, DARK, BLUE),
    16: halves(84, 112, RED, RED, top=0.3),
    18: halves(84, 112, RED, DARK),
    19: halves(100, 140, BLUE, RED),
}
JPEG = image_file(GOOD[0])
# Number: image, the size in its record, and the row that it gets.
BAD = {
    1: (b"<html>not found</html>", (84, 112), "bad_image: UnidentifiedImageError: "),
    3: (JPEG[: len(JPEG) // 2], (84, 112), "bad_image: OSError: "),
    5: (png_bomb(), (30_000, 30_000), "bad_image: DecompressionBombError: "),
    8: (image_file(Image.new("CMYK", (112, 84))), (84, 112), "bad_image: ValueError: its mode is CMYK"),
    10: (image_file(np.zeros((84, 112), np.uint16), "png"), (84, 112), "bad_image: ValueError: its mode is I;16"),
    11: (JPEG, (112, 84), "bad_image: is 112x84, but its record has 84x112"),
    12: (image_file(np.full((1, 1, 3), 50, np.uint8)), (1, 1), "no_regions: the network proposes no box"),
    14: (image_file(halves(84, 112, GREEN, GREEN)), (84, 112), "not_finite: the network's "),
    15: (image_file(halves(84, 112, BLUE, GREEN)), (84, 112), "not_finite: the network's "),
    17: (image_file(np.zeros((2, 2000, 3), np.uint8)), (2, 2000), "bad_image: 2000x2 is too narrow: "),
    # A format that no shard has, but Pillow knows: the errors of its readers are of every kind, so none is opened.
    6: (b"DDS " + struct.pack("<I", 124) + bytes(120), (84, 112), "bad_image: UnidentifiedImageError: "),
}
# Those that no reader of a shard lets through: no JPEG, a bomb, another size than recorded.
BAD_SAMPLES = {1, 5, 6, 10, 11}
# They have regions, however few.
NARROW = {20: halves(20, 800, BLUE, RED), 21: halves(800, 20, BLUE, RED)}


@pytest.mark.parametrize(("batch", "workers"), [(1, 1), (4, 3)])
def test_a_shard_with_every_kind_of_bad_image_completes_and_its_rows_say_why(tmp_path: Path, batch: int, workers: int):
    samples = [image_sample(n, pixels) for n, pixels in (GOOD | NARROW).items()]
    samples += [image_sample(n, file, size) for n, (file, size, _) in BAD.items()]
    samples.sort(key=lambda sample: sample.key)
    with another_writer():
        catalog = commit_images(tmp_path, [samples])
    # Boxes of 4 stored pixels at least: there are none in 1x1, which the network gets as large as others.
    detector = detector_of(colour_network(minimum_side=4), batch=batch, keep_features=True)
    detector.workers = workers
    assert detect_shard(catalog, "00000", detector)

    manifest = catalog.manifest(stage_of(detector), "00000")
    rows = manifest.table.to_pylist()
    assert [(row["row"], row["key"], row["url"]) for row in rows] == [
        (number, sample.key, sample.url) for number, sample in enumerate(samples)
    ]
    for number, row in enumerate(rows):
        reason = f"{row['status']}: {row['detail']}"
        expected = f"bad_sample: sample {row['key']}" if number in BAD_SAMPLES else BAD.get(number, ("", "", "ok: "))[2]
        assert reason.startswith(expected), f"image {number}: {reason}"
        assert not re.search("0x[0-9a-f]{6}", reason), "an address in memory: another manifest in each run"
    found = list(catalog.read(stage_of(detector), "00000"))
    assert [int(sample.key, 16) for sample in found] == sorted(GOOD | NARROW)
    for sample in found:
        original = samples[int(sample.key, 16)]
        assert dataclasses.replace(sample, regions=None) == original
        (alone,) = detector.detect([original])
        assert arrays_of(sample.regions) == arrays_of(alone)
    assert len({sample.regions.boxes.tobytes() for sample in found}) == len(found)


@pytest.mark.parametrize(
    ("colour", "bias", "named"), [(GREEN, 0, "activations"), (BLUE, np.inf, "class probabilities")]
)
def test_a_shard_in_which_the_network_overflows_everywhere_stops_the_run(tmp_path: Path, colour, bias, named):
    samples = [image_sample(n, halves(84, 112, colour, colour, top=n / 10)) for n in range(3)]
    samples.append(image_sample(3, *BAD[1][:2]))  # which it does not see
    with another_writer():
        catalog = commit_images(tmp_path, [samples])
    network = colour_network()
    nn.init.constant_(network.roi_heads.box_predictor.cls_score.bias, bias)
    detector = detector_of(network)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"not all finite numbers, .* of all 3 images .* Nothing was committed"):
        detect_shard(catalog, "00000", detector)
    assert sorted(tmp_path.rglob("*")) == before
    assert catalog.pending("images", stage_of(detector)) == ["00000"]
    assert named in str(detector.detect(samples[:1])[0])


@pytest.mark.parametrize("resize", ["pil", "caffe"])
def test_a_jpegs_blue_is_blue_to_the_network_and_its_red_red(resize: str):
    samples = [image_sample(n, GOOD[n]) for n in (0, 4)]  # blue and red, red and blue
    for swapped, regions in enumerate(detector_of(colour_network(resize=resize)).detect(samples)):
        left, right = regions.boxes[:, 2] < 50, regions.boxes[:, 0] > 64
        for side, colour in ((left, 0), (right, 1)):
            assert side.any()
            assert set(regions.labels[side]) == {colour ^ swapped}
            assert set(regions.attributes[side]) == {colour ^ swapped}
            assert regions.scores[side].min() > 0.9


PAIR = [image_sample(n, rectangles(84, 112, seed=n)) for n in (0, 2)]


@torch.inference_mode()
def stages(network: FasterRCNN) -> list[Tensor]:
    """C4 maps of the two images, what the RPN says of them, features of some boxes, and heads."""
    corners = torch.rand(31, 2, generator=seeded(0)) * 80
    c4 = network.backbone(to_input(np.stack([resize(decode_bgr(one.image), network.config) for one in PAIR])))
    features = network.roi_features(c4, torch.cat([corners, corners + 24], dim=1).split([20, 11]))
    outputs = network.roi_heads.box_predictor(features)
    return [c4, *network.rpn(c4), features, outputs.class_logits, outputs.box_deltas, outputs.attribute_logits]


def test_the_network_for_inference_computes_what_it_was_made_of_and_leaves_that_as_it_was():
    network = noisy_network()
    network.train().backbone.freeze(2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    learns = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
    plain = stages(network)
    detector_of(network, precision="bf16-res5", device="cpu").detect(PAIR[:1])
    for ours, theirs in zip(stages(network.for_inference("fp32", 16)), plain, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
    assert {name: parameter.requires_grad for name, parameter in network.named_parameters()} == learns
    assert all(module.training for module in network.modules())
    assert all(torch.equal(*pair) for pair in zip(stages(network), plain, strict=True))
