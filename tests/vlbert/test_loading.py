"""The order of samples is a function of seed and step alone, whatever the ranks and workers."""

import numpy as np
import pytest
import torch
from loaded import CPU, rows_in_order, training_data
from tiny import TINY_MODEL, tiny_root

from storage.order import shuffled
from training.distributed import World
from training.loading import batches
from vlbert.config import DataConfig
from vlbert.data.batch import Batch
from vlbert.data.loading import ValidationData, check_shares
from vlbert.data.order import CAPTIONS


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tiny_root(tmp_path_factory.mktemp("data"), samples=20)


def rows_of(batch: Batch) -> dict[str, tuple]:
    """Everything that one sample became, by key; of a batch that has none twice."""
    return dict(rows_in_order(batch))


def test_the_order_of_an_epoch_never_changes():
    # Checkpoints depend on it: the same on every machine.
    assert shuffled(np.arange(12), 0, CAPTIONS, 0, 12).tolist() == [7, 0, 6, 10, 1, 3, 11, 4, 2, 8, 5, 9]


def test_workers_change_nothing_and_masks_differ_between_epochs(root):
    data = training_data(root)
    steps = [rows_of(data[step][0]) for step in range(5)]
    for workers in (0, 2):
        assert [rows_of(parts[0]) for parts in batches(training_data(root), range(1, 5), workers, CPU)] == steps[1:]
    first, later = steps[0] | steps[1] | steps[2], steps[3] | steps[4]
    assert len([key for key in later if key in first and later[key][1] != first[key][1]]) > 5


def test_a_batch_that_a_step_cannot_share_is_refused():
    for sizes, processes, named in (
        ({"batch": 8, "text_batch": 0}, 3, "data.batch = 8 cannot be split over 3 processes.*choose a multiple of 3"),
        ({"text_batch": 4, "gradient_accumulation": 8}, 1, "data.text_batch = 4 .*data.gradient_accumulation = 8"),
    ):
        with pytest.raises(ValueError, match=named):
            check_shares(DataConfig(**sizes), processes)


def test_every_line_of_text_comes_once_in_an_epoch_of_its_own(root):
    data = training_data(root)  # 20 lines, 4 a step
    lines = [key for step in range(10) for key in data[step][0].keys if key.startswith("text-")]
    everything = {f"text-{line}" for line in range(20)}
    assert set(lines[:20]) == set(lines[20:]) == everything
    assert lines[:20] != lines[20:]


def validation(root, rank: int = 0, size: int = 1, limit: int | None = 7) -> list[list[Batch]]:
    source = training_data(root).source()
    world = World(rank, size, CPU)
    data = ValidationData(source.samples, source.examples, source.task, source.config, TINY_MODEL.regions, world, limit)
    assert all(not unreadable for _, _, unreadable in data)
    return [batches for batches, _, _ in data]


@pytest.mark.parametrize("size", [3, 8])
def test_validation_examples_are_the_same_in_every_world(root, size):
    alone = [key for right, _ in validation(root) for key in right.keys]
    assert len(set(alone)) == len(alone) == 7
    assert [key for rank in range(size) for right, _ in validation(root, rank, size) for key in right.keys] == alone
    shown = [row for _, other in validation(root) for row in rows_in_order(other)]
    of_ranks = [other for rank in range(size) for _, other in validation(root, rank, size)]
    assert [row for other in of_ranks for row in rows_in_order(other)] == shown


def test_shuffled_validation_pairs_every_text_with_another_image(root):
    own, others = [], []
    for right, other in validation(root):
        assert other.keys == right.keys
        assert torch.equal(other.tokens, right.tokens)
        for batch, boxes in ((right, own), (other, others)):
            boxes += [batch.boxes[i][batch.region_mask[i]].tolist() for i in range(len(batch))]
    assert all(boxes != shown for boxes, shown in zip(own, others, strict=True))
    assert sorted(others) == sorted(own), "each image is shown once"
