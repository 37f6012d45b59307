"""The order of samples is a function of seed and step alone, whatever the ranks and workers."""

import numpy as np
import pytest
import torch
from loaded import ALONE, CPU, captions, rows_in_order, training_data
from tiny import DETECTOR, TINY_MODEL, commit_samples, tiny_root, tiny_sample

from storage.object_store import open_store
from storage.order import mix, shuffled
from training.distributed import World
from training.loading import batches
from vlbert.config import DataConfig
from vlbert.data.batch import Batch
from vlbert.data.loading import ValidationData, check_shares
from vlbert.data.order import CAPTIONS
from vlbert.data.samples import open_samples, region_stage

STAGE = f"regions/{DETECTOR}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tiny_root(tmp_path_factory.mktemp("data"), samples=20)


def rows_of(batch: Batch) -> dict[str, tuple]:
    """Everything that one sample became, by key; of a batch that has none twice."""
    return dict(rows_in_order(batch))


def test_each_epoch_holds_every_sample_once_in_another_order(root):
    data = training_data(root)  # 20 samples, 8 a step: the epoch ends in the middle of the third step
    keys = [key for step in range(5) for key in captions(data[step][0])]
    first, second = keys[:20], keys[20:40]
    everything = {data.source().samples.sample(i).key for i in range(20)}
    assert set(first) == everything
    assert set(second) == everything
    assert first != second


def epoch_of(seed: int, stream: int, epoch: int, n: int) -> list[int]:
    return shuffled(np.arange(n), seed, stream, epoch, n).tolist()


def test_the_order_of_an_epoch_never_changes():
    # Checkpoints depend on it: the same on every machine.
    assert epoch_of(0, CAPTIONS, 0, 12) == [7, 0, 6, 10, 1, 3, 11, 4, 2, 8, 5, 9]
    assert mix(1, 2, 3) == 9812528628958509896


def test_masks_differ_between_epochs_and_not_between_runs(root):
    data = training_data(root)
    first = {key: row for step in range(3) for key, row in rows_of(data[step][0]).items()}
    again = {key: row for step in range(3) for key, row in rows_of(training_data(root)[step][0]).items()}
    assert first == again
    later = {key: row for step in range(3, 5) for key, row in rows_of(data[step][0]).items()}
    differing = [key for key in later if key in first and later[key][1] != first[key][1]]
    assert len(differing) > 5


def test_workers_change_nothing_and_keep_the_order(root):
    data = training_data(root)
    alone = [rows_of(parts[0]) for parts in batches(data, range(1, 5), 0, CPU)]
    with_workers = [rows_of(parts[0]) for parts in batches(data, range(1, 5), 2, CPU)]
    assert alone == with_workers == [rows_of(data[step][0]) for step in range(1, 5)]


def test_a_batch_that_the_world_cannot_share_is_refused():
    with pytest.raises(ValueError, match="data.batch = 8 cannot be split over 3 processes.*choose a multiple of 3"):
        check_shares(DataConfig(batch=8), world_size=3)
    with pytest.raises(ValueError, match="data.text_batch = 4 .*data.gradient_accumulation = 8"):
        check_shares(DataConfig(batch=8, text_batch=4, gradient_accumulation=8), world_size=1)


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
    shown = [row for _, other in validation(root) for row in rows_of(other).items()]
    assert [
        row for rank in range(size) for _, other in validation(root, rank, size) for row in rows_of(other).items()
    ] == shown


def test_shuffled_validation_pairs_every_text_with_another_image(root):
    image_of, others = {}, []
    for right, _ in validation(root):
        for i, key in enumerate(right.keys):
            image_of[key] = right.boxes[i][right.region_mask[i]].tolist()
    for right, other in validation(root):
        assert other.keys == right.keys
        assert torch.equal(other.tokens, right.tokens)
        for i, key in enumerate(other.keys):
            boxes = other.boxes[i][other.region_mask[i]].tolist()
            assert boxes != image_of[key]
            others.append(boxes)
    assert sorted(others) == sorted(image_of.values()), "each image is shown once"


def test_a_torn_or_missing_tar_is_found_before_the_first_step(tmp_path):
    commit_samples(tmp_path, "captions", [tiny_sample(i) for i in range(16)])
    store = open_store(str(tmp_path))
    tars = sorted((tmp_path / "captions" / "regions" / "00000000beef").glob("*.tar"))
    whole = tars[1].read_bytes()
    tars[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError, match=f"{tars[1].name} has .* bytes, but its manifest needs .*: it is torn or missing"
    ):
        open_samples(store, "captions", None, None, ALONE)
    tars[1].unlink()
    with pytest.raises(ValueError, match=f"{tars[1].name} has 0 bytes"):
        open_samples(store, "captions", None, None, ALONE)


def test_the_regions_of_one_detector_are_chosen_by_name(tmp_path):
    store = open_store(str(tmp_path))
    with pytest.raises(ValueError, match="has no region shards; run the detection stage"):
        region_stage(store, "captions", None)
    commit_samples(tmp_path, "captions", [tiny_sample(0)])
    assert region_stage(store, "captions", None) == STAGE
    with pytest.raises(ValueError, match="no detector ffff, only 00000000beef"):
        region_stage(store, "captions", "ffff")
