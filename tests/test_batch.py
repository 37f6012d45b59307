import numpy as np
import pytest
import torch

from vlbert.batch import Example, Picture, Words, collate


def words(length: int, asked: list[int]) -> Words:
    zeros = np.zeros(length, np.int64)
    mask = np.isin(np.arange(length), asked)
    return Words(np.arange(1, length + 1), zeros, zeros, {"word_asked": mask}, {"words": np.array(asked, np.int64)})


def picture(regions: int, height: int, width: int) -> Picture:
    boxes = np.arange(4 * regions, dtype=np.float32).reshape(regions, 4)
    hidden = np.arange(regions) == 1
    return Picture(torch.full((3, height, width), regions, dtype=torch.uint8), boxes, hidden, {"region_asked": hidden})


def test_rows_keep_their_content_and_padding_is_marked():
    batch = collate(
        [
            Example("a", words(3, [1]), picture(2, 4, 6), {"n": 1}),
            Example("text", words(5, [0, 4])),
            Example("b", words(2, []), picture(3, 5, 2)),
        ]
    )
    assert batch.keys == ["a", "text", "b"]
    assert batch.about == [{"n": 1}, {}, {}]
    assert batch.text_mask.sum(1).tolist() == [3, 5, 2]
    assert batch.tokens[0].tolist() == [1, 2, 3, 0, 0]
    assert batch.region_mask.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert batch.boxes[2, 2].tolist() == [8, 9, 10, 11]
    assert batch.picture_rows.tolist() == [0, 2]
    assert batch.picture_sizes.tolist() == [[6, 4], [2, 5]], "(width, height)"
    assert tuple(batch.pixels.shape) == (2, 3, 5, 6)
    assert batch.pixels[0, 0].sum() == 2 * 4 * 6
    assert batch.pixels[1, 0, :, 2:].sum() == 0
    assert batch.targets["word_asked"].nonzero().tolist() == [[0, 1], [1, 0], [1, 4]]
    assert batch.asked["words"].tolist() == [1, 0, 4], "in the order of the rows, as the mask finds them"
    assert batch.targets["region_asked"].nonzero().tolist() == [[0, 1], [2, 1]]


def test_a_batch_of_text_alone_has_no_pictures():
    batch = collate([Example("a", words(3, [1])), Example("b", words(2, [0]))])
    assert tuple(batch.pixels.shape) == (0, 3, 0, 0)
    assert tuple(batch.region_mask.shape) == (2, 0)
    assert tuple(batch.boxes.shape) == (2, 0, 4)


def test_examples_that_ask_for_different_things_do_not_mix():
    other = Words(np.ones(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="carry different targets"):
        collate([Example("a", words(3, [1])), Example("b", other)])


def test_moving_a_batch_keeps_pixels_as_bytes():
    batch = collate([Example("a", words(3, [1]), picture(2, 4, 6))]).to(torch.device("cpu"))
    assert batch.pixels.dtype == torch.uint8
    assert batch.asked["words"].tolist() == [1]
