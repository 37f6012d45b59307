"""The selection of 10 to 100 regions at its borders; tests/conformance holds it against the official selection."""

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


def chosen(boxes: list, probs: list[float], minimum: int = 0, **rule) -> list[int]:
    settings = SelectionSettings(minimum, **rule)
    return select_regions(np.float32(boxes).reshape(-1, 4), np.float32(probs).reshape(-1, 1), settings).tolist()


def test_the_rule_at_its_borders():
    apart, half = [[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10]], [[0, 0, 10, 10], [5, 0, 10, 10]]
    found = [chosen(apart, [0.5, 0.75, 0.25], 1, threshold=0.5, strict=strict) for strict in (True, False)]
    assert found == [[1], [0, 1]], "the threshold itself passes only where not strict"
    found = [chosen(half, [0.9, 0.8], nms_threshold=iou) for iou in (0.5, 0.49)]
    assert found == [[0, 1], [0]], "an IoU equal to the threshold does not suppress"
    assert chosen([[0, 0, 10, 10]] * 2, [0.3, 0.4], 10) == [1, 0], "fewer than the minimum are all kept"
    assert chosen([], [], 10) == []
