"""The order of samples is a function of seed and step alone, whatever the ranks and workers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from loaded import CPU, rows_in_order, training_data
from tiny import TINY_MODEL, tiny_root

from detectors.resnet import ResNetConfig
from storage.order import shuffled
from training.distributed import World
from training.loading import batches
from vlbert.config import DataConfig, RegionConfig
from vlbert.data.loading import ValidationData, check_shares
from vlbert.data.order import CAPTIONS
from vlbert.recipes import RECIPES


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tiny_root(tmp_path_factory.mktemp("data"), samples=20)


def test_the_order_of_an_epoch_never_changes():
    # Checkpoints depend on it: the same on every machine.
    assert shuffled(np.arange(12), 0, CAPTIONS, 0, 12).tolist() == [7, 0, 6, 10, 1, 3, 11, 4, 2, 8, 5, 9]


def test_workers_change_nothing_and_masks_differ_between_epochs(root):
    data = training_data(root)
    steps = [rows_in_order(data[step][0]) for step in range(5)]
    for workers in (0, 2):
        found = batches(training_data(root), range(1, 5), workers, CPU)
        assert [rows_in_order(parts[0]) for parts in found] == steps[1:]
    accumulated = training_data(root, gradient_accumulation=2)
    assert [sorted(sum(map(rows_in_order, accumulated[step]), [])) for step in range(5)] == [*map(sorted, steps)]
    first, later = dict(sum(steps[:3], [])), dict(sum(steps[3:], []))
    assert len([key for key in later if key in first and later[key][1] != first[key][1]]) > 5


def test_a_batch_that_a_step_cannot_share_is_refused():
    live, nothing = RECIPES["finetune_vcr"](variant="paper"), RegionConfig()
    two = "over 2 images, but need 4.* lower data.gradient_accumulation.*--model.regions.resnet.norm=frozen"
    with pytest.raises(ValueError, match=two):
        check_shares(live.data, 8, live.model.regions)
    check_shares(replace(live.data, gradient_accumulation=2), 8, live.model.regions)
    check_shares(live.data, 8, replace(live.model.regions, resnet=ResNetConfig(norm="frozen")))
    for sizes, processes, named in (
        ({"batch": 8, "text_batch": 0}, 3, "data.batch = 8 cannot be split over 3 processes.*choose a multiple of 3"),
        ({"text_batch": 4, "gradient_accumulation": 8}, 1, "data.text_batch = 4 .*data.gradient_accumulation = 8"),
    ):
        with pytest.raises(ValueError, match=named):
            check_shares(DataConfig(**sizes), processes, nothing)


def test_every_line_of_text_comes_once_in_an_epoch_of_its_own(root):
    data = training_data(root)  # 20 lines, 4 a step
    lines = [key for step in range(10) for key in data[step][0].keys if key.startswith("text-")]
    everything = {f"text-{line}" for line in range(20)}
    assert set(lines[:20]) == set(lines[20:]) == everything
    assert lines[:20] != lines[20:]


def validation(root, size: int) -> tuple[list, list]:
    """Over all ranks of such a world: the rows, and those with other images."""
    source, rows = training_data(root).source(), ([], [])
    given = source.samples, source.examples, source.task, source.config, TINY_MODEL
    for rank in range(size):
        for both, _, unreadable in ValidationData(*given, World(rank, size, CPU), 7):
            assert not unreadable
            assert torch.equal(both[0].tokens, both[1].tokens)
            for found, batch in zip(rows, both, strict=True):
                found += rows_in_order(batch)
    return rows


def test_shuffled_validation_pairs_every_text_with_another_image_the_same_in_every_world(root):
    own, others = validation(root, 1)
    assert [key for key, _ in own] == [key for key, _ in others]
    assert len(dict(own)) == len(own) == 7
    boxes, shown = ([row[2] for _, row in rows] for rows in (own, others))
    assert all(one != other for one, other in zip(boxes, shown, strict=True))
    assert sorted(boxes) == sorted(shown), "each image is shown once"
    for size in (3, 8):
        assert validation(root, size) == (own, others)
