"""torchvision's operators and functions without its package."""

import subprocess
import sys

import pytest
import torch
import torchvision
from torchvision.io import ImageReadMode
from web import draw, encode

from training.operators import box_iou, clip_boxes, decode_jpeg, nms, roi_pool


def test_functions_on_boxes_give_what_torchvision_gives():
    generator = torch.Generator().manual_seed(0)
    boxes, others = (torch.rand(count, 2, 2, generator=generator).sort(1).values.flatten(1) * 90 for count in (40, 30))
    boxes[0, 2:] = boxes[0, :2]  # without area
    scores = torch.rand(40, generator=generator)
    assert torch.equal(box_iou(boxes, others), torchvision.ops.box_iou(boxes, others))
    assert torch.equal(nms(boxes, scores, 0.3), torchvision.ops.nms(boxes, scores, 0.3))
    for shape in ((40, 4), (2, 20, 4)):
        clipped = clip_boxes(boxes.view(shape) - 9, 50, 70)
        assert torch.equal(clipped, torchvision.ops.clip_boxes_to_image(boxes.view(shape) - 9, (50, 70)))
    maps, rois = torch.rand(2, 3, 9, 9, generator=generator), torch.cat([scores[:, None].round(), boxes], dim=1)
    assert torch.equal(roi_pool(maps, rois, 4, 0.1), torchvision.ops.roi_pool(maps, rois, 4, 0.1))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_is_decoded_to_what_torchvision_decodes(mode: str):
    data = encode(draw(mode=mode, seed=3), "JPEG")
    theirs = torchvision.io.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    assert torch.equal(decode_jpeg(data), theirs)
    with pytest.raises(RuntimeError):
        decode_jpeg(data[:200])


def test_the_modules_of_a_training_do_not_import_torchvision():
    program = (
        "import sys, vlbert.train, vlbert.predict.command; print({*sys.modules} & {'torchvision', 'torch._dynamo'})"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
