"""The model, whatever its weights: padding, order of regions, masked pixels, what comes out."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import CLASSES, LETTERS, TINY_MODEL, tiny_recipe, tiny_sample

from detectors.faster_rcnn import DEMO, FasterRCNN
from vlbert.data.batch import Batch, Example, TextInput, collate
from vlbert.data.images import prepare_image
from vlbert.initial_weights import make_model
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

TASK = Pretraining(PretrainingSettings(), LETTERS, len(CLASSES))


def example(number: int, regions: int = 2) -> Example:
    sample = tiny_sample(number, regions)
    return TASK.example(sample, prepare_image(sample, TINY_MODEL.regions, False), None, np.random.default_rng(number))


@pytest.fixture(scope="module")
def model() -> TaskModel:
    torch.manual_seed(0)
    return TaskModel(VLBert(TINY_MODEL, len(LETTERS)), TASK).eval()


def encode(model: TaskModel, *examples: Example) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    batch = collate(examples)
    with torch.no_grad():
        encoded = model.vlbert(batch)
    return batch, encoded.text, encoded.regions


close = functools.partial(torch.testing.assert_close, rtol=0, atol=2e-6)


def test_masked_pixels_change_no_output(model):
    given = example(5, regions=2)
    x1, y1, x2, y2 = given.image.boxes[1].astype(int)
    painted = given.image.pixels.clone()
    painted[:, y1 : y2 + 1, x1 : x2 + 1] = torch.randint(0, 255, painted[:, y1 : y2 + 1, x1 : x2 + 1].shape).byte()
    for masked in (True, False):
        image = dataclasses.replace(given.image, masked=np.array([False, masked, False]))
        images = image, dataclasses.replace(image, pixels=painted)
        (_, *found), (_, *other) = (encode(model, dataclasses.replace(given, image=one)) for one in images)
        assert all(torch.equal(a, b) == masked for a, b in zip(found, other, strict=True))


def test_masked_pixels_show_the_mean_or_black(model):
    batch = collate([example(1)])
    batch.region_masked[:] = False
    batch.region_masked[0, 1] = True
    x1, y1 = batch.boxes[0, 1, :2].long().tolist()
    network = model.vlbert.fast_rcnn
    assert network.network_input(batch)[0][0, :, y1, x1].tolist() == [0, 0, 0]
    black = dataclasses.replace(TINY_MODEL, regions=dataclasses.replace(TINY_MODEL.regions, masked_pixels="black"))
    seen = VLBert(black, len(LETTERS)).fast_rcnn.network_input(batch)[0][0, :, y1, x1] * TINY_MODEL.regions.pixel_std
    close(seen, -torch.tensor([102.9801, 115.9465, 122.7717]), atol=1e-4)


def test_uncovered_cells_count_as_zero_in_the_mean(model):
    side = TINY_MODEL.regions.roi_size // 2  # the res5 of this network is not dilated, but strided
    shape = (3, side, side)
    given, network = example(1, regions=2), model.vlbert.fast_rcnn
    half = np.ones(shape, np.float32)
    half[2, :, : side // 2] = 0
    computed = []
    hook = network.res5.register_forward_hook(lambda *call: computed.append(call[2]))
    images = [dataclasses.replace(given.image, cells=cells) for cells in (None, np.ones(shape, np.float32), half)]
    with torch.no_grad():
        plain, whole, halved = (network(collate([Example("x", given.text, image)])) for image in images)
    hook.remove()
    close(whole, plain)
    close(halved[:2], plain[:2])
    cells = computed[0][2]  # (D, S, S)
    close(halved[2], cells[:, :, side // 2 :].sum((1, 2)) / side**2)
    assert float((halved[2] - plain[2]).abs().max()) > 1e-3


def test_texts_of_one_image_are_encoded_as_alone_and_its_regions_once(model):
    other, given = example(1, regions=3), example(5, regions=2)
    more = other.text, example(2).text
    rois = []
    hook = model.vlbert.fast_rcnn.res5.register_forward_hook(lambda *call: rois.append(len(call[2])))
    batch, text, regions = encode(model, other, dataclasses.replace(given, more=more))
    hook.remove()
    assert rois == [4 + 3], "the regions of two images, though four texts are about them"
    assert len(batch) == 4
    for row, words in enumerate((given.text, *more), start=1):
        alone, its_text, its_regions = encode(model, dataclasses.replace(given, text=words))
        close(text[row][batch.text_mask[row]], its_text[0][alone.text_mask[0]])
        close(regions[row][batch.region_mask[row]], its_regions[0][alone.region_mask[0]])


def test_the_fast_rcnn_starts_from_a_detectors_weights(tmp_path):
    network = FasterRCNN.random_init(DEMO, seed=3)
    file = tmp_path / "detector.safetensors"
    save_file(network.state_dict(), file)
    regions = dataclasses.replace(TINY_MODEL.regions, resnet=DEMO.resnet, weights=str(file), random_init=False)
    recipe = dataclasses.replace(tiny_recipe(tmp_path), model=dataclasses.replace(TINY_MODEL, regions=regions))
    started = make_model(recipe, TASK, LETTERS, None, None, print).vlbert.fast_rcnn
    for ours, theirs in ((started.backbone, network.backbone), (started.res5, network.roi_heads.res5)):
        assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    small = dataclasses.replace(regions, resnet=TINY_MODEL.regions.resnet)
    other = dataclasses.replace(recipe, model=dataclasses.replace(TINY_MODEL, regions=small))
    with pytest.raises(ValueError, match="detector.safetensors does not fit the network"):
        make_model(other, TASK, LETTERS, None, None, print)


def test_the_sample_whose_text_is_longer_than_the_position_table_is_named(model):
    short, long = (TextInput.of_one_sentence(LETTERS.encode("a " * count)) for count in (5, 70))
    examples = [Example("short", short, more=(short, short)), Example("wordy", short, more=(long,))]
    named = "^sample wordy has a text of 70 tokens, but the model reads at most 62; shorten the text$"
    with pytest.raises(ValueError, match=named):
        model.vlbert(collate([*examples, Example("last", short)]))
