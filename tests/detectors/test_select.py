"""The 10-100 rule at its borders; tests/conformance holds it against the official selection."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import SHARED

from detectors.select import SelectionSettings, find_overlaps, select_regions, surviving_confidence


def test_every_parity_case_is_matched_index_for_index():
    folder = SHARED / "parity" / "detector"
    if not folder.is_dir():
        pytest.skip(f"the parity data {folder} is not here")
    data = np.load(folder / "selection.npz")
    metadata = json.loads((folder / "selection.json").read_text())
    for case in range(len(metadata["cases"])):
        boxes, probs = data[f"c{case}_boxes"], data[f"c{case}_probs"][:, :-1]
        for number, (threshold, minimum, maximum, strict) in enumerate(metadata["sets"]):
            chosen = select_regions(boxes, probs, SelectionSettings(minimum, maximum, threshold, strict))
            assert chosen.tolist() == data[f"c{case}_keep{number}"].tolist(), (case, number)
        exact = surviving_confidence(find_overlaps(boxes, SelectionSettings()), probs)
        assert np.array_equal(exact, data[f"c{case}_conf"]), case


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 40),
    sharpness=st.sampled_from([0.2, 2.0, 6.0]),
    minimum=st.sampled_from([0, 3, 10]),
    threshold=st.sampled_from([0.02, 0.2, 0.5, 0.99]),
)
def test_leaving_out_pairs_below_a_floor_changes_nothing(seed, count, sharpness, minimum, threshold):
    rng = np.random.default_rng(seed)
    corners, logits = rng.uniform(0, 200, (count, 2)), rng.standard_normal((count, 6)) * sharpness
    boxes = np.concatenate([corners, corners + rng.uniform(20, 150, (count, 2))], axis=1).astype(np.float32)
    probs = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(np.float32)[:, :-1]
    rule = SelectionSettings(minimum, threshold=threshold)
    confidence = surviving_confidence(find_overlaps(boxes, rule), probs)
    chosen = select_regions(boxes, probs, rule)
    assert len(chosen) == min(count, max(minimum, np.count_nonzero(confidence > threshold)))
    assert sorted(confidence[chosen]) == sorted(confidence)[count - len(chosen) :]


def test_the_threshold_itself_passes_only_where_not_strict():
    boxes = np.array([[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10]], np.float32)
    probs = np.array([[0.5], [0.75], [0.25]], np.float32)
    strict = select_regions(boxes, probs, SelectionSettings(minimum=1, threshold=0.5, strict=True))
    lax = select_regions(boxes, probs, SelectionSettings(minimum=1, threshold=0.5, strict=False))
    assert (strict.tolist(), lax.tolist()) == ([1], [0, 1])


def test_an_iou_equal_to_the_threshold_does_not_suppress():
    boxes = np.array([[0, 0, 10, 10], [5, 0, 10, 10]], np.float32)  # IoU 0.5
    probs = np.array([[0.9], [0.8]], np.float32)
    at = select_regions(boxes, probs, SelectionSettings(minimum=0, nms_threshold=0.5))
    below = select_regions(boxes, probs, SelectionSettings(minimum=0, nms_threshold=0.49))
    assert (len(at), len(below)) == (2, 1)


def test_fewer_boxes_than_the_minimum_are_all_kept_and_none_is_invented():
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 10]], np.float32)
    chosen = select_regions(boxes, np.array([[0.3], [0.4]], np.float32), SelectionSettings())
    assert chosen.tolist() == [1, 0]
    nothing = select_regions(np.zeros((0, 4), np.float32), np.zeros((0, 5), np.float32), SelectionSettings())
    assert nothing.size == 0
