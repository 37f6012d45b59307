import json
from pathlib import Path

import numpy as np
import pytest

from vlbert.datasets.retrieval import folds, ranks, read_splits, recalls


def test_ranks_count_what_stands_before_the_best_caption_and_the_right_image():
    scores = np.array([[0.1, 0.9, 0.5, 0.8], [0.3, 0.2, 0.4, 0.6]])
    found = ranks(scores, [0, 0, 1, 1])
    assert found.captions_of_image.tolist() == [0, 0]
    assert found.image_of_caption.tolist() == [1, 0, 1, 1]
    found = ranks(scores, [1, 1, 0, 0])
    assert found.captions_of_image.tolist() == [1, 2], "the best of its captions counts"


def test_of_equal_scores_the_last_stands_first_as_a_stable_order_turned_round_has_it():
    scores = np.random.default_rng(0).integers(0, 4, (20, 20)).astype(float)
    turned = np.argsort(scores, axis=1, kind="stable")[:, ::-1]
    places = [int(np.flatnonzero(row == i)[0]) for i, row in enumerate(turned)]
    assert ranks(scores, range(20)).captions_of_image.tolist() == places
    assert ranks(np.ones((3, 3)), [0, 1, 2]).captions_of_image.tolist() == [2, 1, 0]
    assert ranks(np.ones((3, 3)), [0, 1, 2]).image_of_caption.tolist() == [2, 1, 0]


def test_images_may_have_different_numbers_of_captions():
    scores = np.eye(2)[:, [0, 0, 0, 1]]
    assert ranks(scores, [0, 0, 0, 1]).image_of_caption.tolist() == [0] * 4


def test_recalls_are_percent_and_ranks_are_counted_from_one_in_their_median_and_mean():
    assert recalls(np.array([0, 0, 4, 5, 9, 10, 11, 99])) == {
        "r1": 25.0,
        "r5": 37.5,
        "r10": 62.5,
        "medr": 8.0,  # floor of 7, which is 8 from one
        "meanr": 138 / 8 + 1,
    }
    assert recalls(np.array([0, 1]))["medr"] == 1.0, "halves are cut off, as in VSE++"


def test_folds_are_equal_parts_with_their_own_captions():
    scores = np.random.default_rng(0).random((7, 14))
    image_of = np.repeat(np.arange(7), 2)
    first, second = folds(scores, image_of, 2)  # three images each, the seventh is in none
    for fold, start in ((first, 0), (second, 3)):
        alone = ranks(scores[start : start + 3, 2 * start : 2 * start + 6], [0, 0, 1, 1, 2, 2])
        assert fold.captions_of_image.tolist() == alone.captions_of_image.tolist()
        assert fold.image_of_caption.tolist() == alone.image_of_caption.tolist()
    with pytest.raises(ValueError, match="7 images are too few for 8 folds"):
        folds(scores, image_of, 8)


def test_scores_that_fit_no_captions_or_are_no_numbers_are_refused():
    for image_of in ([0, 0], [0, 0, 0], [0, 1, 2]):
        with pytest.raises(ValueError, match="do not fit"):
            ranks(np.ones((2, 3)), image_of)
    with pytest.raises(ValueError, match="1 of 6 scores are no finite numbers"):
        ranks(np.array([[1, 2, 3], [4, np.nan, 6]]), [0, 0, 1])


def image(name: str, split: str, captions: int) -> dict:
    return {"filename": name, "split": split, "sentences": [{"raw": f"{name} {i}"} for i in range(captions)]}


def test_a_split_file_gives_the_first_five_captions_of_each_image(tmp_path: Path):
    file = tmp_path / "dataset_made.json"
    file.write_text(json.dumps({"images": [image("a.jpg", "test", 6), image("b.jpg", "restval", 5)]}))
    assert read_splits(file) == {
        "test": {"a.jpg": [f"a.jpg {i}" for i in range(5)]},
        "restval": {"b.jpg": [f"b.jpg {i}" for i in range(5)]},
    }
    for images, told in (
        ([image("a.jpg", "test", 4)], "a.jpg has 4 captions, 5 are needed"),
        ([image("a.jpg", "test", 5)] * 2, "a.jpg stands there twice"),
        ([{"filename": "a.jpg"}], r"images\[0\]: KeyError"),
        (None, "is no split file of Karpathy"),
    ):
        file.write_text(json.dumps({"images": images}))
        with pytest.raises(ValueError, match=told):
            read_splits(file)
