"""Our detector beside figures of detectron2's, which lie in ../shared/parity/detector."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from places import SHARED

from tests.parity.cases import Row
from tests.parity.detector import compare_folder

PARITY = SHARED / "parity" / "detector"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PARITY.is_dir(), reason="detectron2's figures lie in ../shared, which is not here"),
]


def failures(rows: dict[str, Row]) -> dict[str, Row]:
    return {stage: row for stage, row in rows.items() if not row.passes}


def test_every_stage_computes_what_detectron2_does_on_three_images():
    rows = list(compare_folder(PARITY, "public", plain=False))
    assert [str(row) for row in rows if not row.passes] == []
    assert len(rows) == 3 * 32
    assert max(row.differences["worst"] for row in rows) < 5e-6


@pytest.mark.parametrize("plain", [False, True], ids=["as it detects", "as it learns"])
def test_every_stage_of_the_full_network_computes_what_detectron2_does(plain: bool):
    rows = {row.stage: row for row in compare_folder(PARITY / "full_r101", "full", plain)}
    assert not failures(rows)
    assert len(rows) == 29
    float16 = {"c4", "prop_features"}
    assert {stage for stage, row in rows.items() if row.differences["worst"] > 5e-6} == float16


def test_whatever_number_is_changed_its_own_stage_fails(tmp_path: Path):
    metadata = json.loads((PARITY / "meta.json").read_text()) | {"images": [{"index": 0}]}
    (tmp_path / "meta.json").write_text(json.dumps(metadata))
    shutil.copy(PARITY / "img0_c4.npz", tmp_path)
    with np.load(PARITY / "img0.npz") as stored:
        arrays = {name: array.copy() for name, array in stored.items()}
    changed = set(arrays) - {"image_bgr", "given_boxes"}
    for number, name in enumerate(sorted(changed)):  # all at once: each stage is fed with theirs
        array = arrays[name]
        place = min(number, array.size - 1)
        array.reshape(-1)[place : place + 1] += 3e-4 * np.abs(array).max() if array.dtype.kind == "f" else 1
    np.savez(tmp_path / "img0.npz", **arrays)
    assert failures({row.stage: row for row in compare_folder(tmp_path, "here", plain=False)}).keys() >= changed
