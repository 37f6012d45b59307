"""The 10-100 rule against the official selection and against a plain restatement of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA, SHARED

from detectors.select import SelectionSettings, overlapping, select_regions, surviving_confidence
from tests.conformance.cases import selections


def random_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    corners = rng.uniform(0, 200, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(20, 150, (count, 2))], axis=1).astype(np.float32)


def random_probs(rng: np.random.Generator, count: int, classes: int, sharpness: float) -> np.ndarray:
    logits = rng.standard_normal((count, classes + 1)) * sharpness
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)[:, :-1]


def plain_rule(boxes: np.ndarray, probs: np.ndarray, settings: SelectionSettings) -> list[int]:
    """The rule, box by box and class by class, with nothing left out."""

    def iou(a: np.ndarray, b: np.ndarray) -> float:
        width, height = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
        intersection = max(0, width) * max(0, height)
        return intersection / (np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - intersection)

    confidence = [0.0] * len(boxes)
    for column in probs.T:
        kept = []
        for i in sorted(range(len(boxes)), key=lambda i: -column[i]):
            if all(iou(boxes[i], boxes[j]) <= settings.nms_threshold for j in kept):
                kept.append(i)
                confidence[i] = max(confidence[i], column[i])
    above = [
        i for i, c in enumerate(confidence) if c > settings.threshold or (c == settings.threshold != settings.strict)
    ]
    ranked = sorted(range(len(boxes)), key=lambda i: -confidence[i])
    if len(above) < settings.minimum:
        return ranked[: settings.minimum]
    return ranked[: settings.maximum] if len(above) > settings.maximum else above


@pytest.mark.parametrize("folder", [DATA / "rois", SHARED / "conformance" / "rois"])
def test_official_cases_are_matched(folder: Path):
    if not folder.is_dir():
        pytest.skip(f"the conformance data {folder} is not here")
    for _, ours, wanted, _ in selections(folder, json.loads((folder / "expected.json").read_text())):
        assert wanted
        assert ours == wanted


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
        exact = surviving_confidence(overlapping(boxes, SelectionSettings()), probs)
        assert np.array_equal(exact, data[f"c{case}_conf"]), case


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 40),
    classes=st.integers(1, 12),
    sharpness=st.sampled_from([0.2, 2.0, 6.0]),
    limits=st.sampled_from([(10, 100), (3, 8), (0, 100), (40, 40)]),
    threshold=st.sampled_from([0.02, 0.2, 0.5, 0.99]),
)
def test_the_rule_is_exact(seed, count, classes, sharpness, limits, threshold):
    """Leaving out pairs below the floor changes nothing."""
    rng = np.random.default_rng(seed)
    boxes, probs = random_boxes(rng, count), random_probs(rng, count, classes, sharpness)
    rule = SelectionSettings(*limits, threshold)
    chosen = select_regions(boxes, probs, rule)
    assert chosen.tolist() == plain_rule(boxes, probs, rule)


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
