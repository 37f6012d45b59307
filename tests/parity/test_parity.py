"""`python -m tests.parity`: what it finds in a folder, that no case is left out, and how it ends.

What the formats compare is tested in test_vlbert.py and test_detector.py.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from places import DATA, SHARED

from tests.parity import detector, vilbert, vlbert
from tests.parity.__main__ import main
from tests.parity.cases import Row

HERE = DATA / "parity"


def ends(*arguments: object) -> int | str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


def vqa_case(folder: Path, name: str = "vqa_prec") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in (".json", ".npz"):
        shutil.copy(HERE / f"vqa_prec{kind}", folder / f"{name}{kind}")
    return folder / f"{name}.json"


def test_the_command_prints_a_line_a_case_and_fails_where_one_differs(tmp_path: Path, capsys: pytest.CaptureFixture):
    vqa_case(tmp_path)
    status = ends(tmp_path)
    assert (type(status), status) == (int, 0)  # a shell sees 1 for anything else, even for numpy's False
    assert "1 of 1 VL-BERT cases pass" in capsys.readouterr().out

    arrays = dict(np.load(vqa_case(tmp_path / "below", "changed").with_suffix(".npz")))
    arrays["out/label_logits"][1, 7] += 1
    np.savez(tmp_path / "below" / "changed.npz", **arrays)
    (tmp_path / "other.json").write_text("[1]")  # no case
    (tmp_path / "lost.json").write_text("{")  # nor this one: no npz lies beside it
    (tmp_path / "empty").mkdir()
    assert ends(tmp_path) == 1
    printed = capsys.readouterr().out
    assert [(line.split()[0], " pass" in line) for line in printed.splitlines() if "e-0" in line] == [
        ("vqa_prec", True),
        ("below/changed", False),
    ]
    assert "\n1 of 2 VL-BERT cases pass" in printed


def test_a_folder_without_a_case_is_an_error(tmp_path: Path):
    assert f"no case in {tmp_path}" in ends(HERE, tmp_path)


# --- comparing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "passes"), [(1.0, True), (1.1, False), (np.inf, False), (np.nan, False), (None, False)]
)
def test_a_row_passes_within_all_its_bounds(difference: float | None, passes: bool):
    differences = {} if difference is None else {"near": 0.0, "far": difference}
    assert Row("case", "", differences, {"near": 5.0, "far": 1.0}).passes == passes


# --- ViLBERT ----------------------------------------------------------------------------------------------------------


def test_all_cases_of_vilbert_pass(capsys: pytest.CaptureFixture):
    """Their weights are converted as a released file is."""
    assert ends(DATA / "vilbert") == 0
    assert "8 of 8 ViLBERT cases pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("report", "name", "array", "index", "change"),
    [
        (vilbert.report, "vilbert/pretrain_paper", "inter/X0.regions", (1, 2, 3), 1e-3),
        (vilbert.report, "vilbert/refcoco_paper", "out/selected", (0,), 1),
        (vilbert.report, "vilbert/refcoco_paper", "grad/dot", (5,), 0.0135),
        (vilbert.report, "vilbert/vcr_paper", "out/choice_logits", (0, 1), 1e-3),
        (vlbert.report, "parity/vqa_prec", "out/label_logits", (1, 7), 3e-5),
        (vlbert.report, "parity/vqa_prec", "inter/encoder.input", (2, 3, 5), 3e-5),
        (vlbert.report, "parity/vqa_prec", "out/ans_loss", (), 0.1),
        (vlbert.report, "parity/vqa_prec", "grad/l2", (20,), 1.0),
        (vlbert.report, "parity/vqa_prec", "grad/dot", (20,), 1.0),
        (partial(vlbert.report, precision="bf16"), "parity/vqa_prec", "inter/encoder.input", (2, 3, 5), 0.3),
    ],
)
def test_a_case_that_differs_does_not_pass(
    tmp_path: Path, report: Callable, name: str, array: str, index: tuple, change: float
):
    arrays = dict(np.load(DATA / f"{name}.npz"))
    changed = arrays[array] = arrays[array].copy()
    changed[index] += change
    np.savez(tmp_path / "changed.npz", **arrays)
    shutil.copy(DATA / f"{name}.json", tmp_path / "changed.json")
    row = report(tmp_path / "changed.json", "changed")
    assert row.differences or "selected regions" in row.remark
    assert not row.passes, str(row)


def test_a_case_with_the_sum_of_the_poolers_is_another_computation(tmp_path: Path):
    case = json.loads((DATA / "vilbert/vqa_paper.json").read_text())
    case["config"]["fusion_method"] = "sum"
    (tmp_path / "changed.json").write_text(json.dumps(case))
    shutil.copy(DATA / "vilbert/vqa_paper.npz", tmp_path / "changed.npz")
    row = vilbert.report(tmp_path / "changed.json", "changed")
    assert not row.passes
    assert row.differences, row.remark


# --- switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "switch", "value"),
    [
        ("vilbert/vqa_paper", "config.fusion_method", "average"),
        ("vilbert/vqa_paper", "config.in_batch_pairs", True),
        ("vilbert/vqa_paper", "config.v_hidden_act", "relu"),
        ("vilbert/vqa_paper", "config.layer_norm_eps", 1e-5),
        ("vilbert/vqa_paper", "config.t_biattention_id", [1, 3]),
        ("vilbert/single_stream_paper", "config.model", "roberta"),
        ("vilbert/pretrain_paper", "config.objective", 2),
        ("vilbert/pretrain_paper", "program", "third"),
        ("parity/vqa_prec", "config.MODULE", "ResNetVLBERTForAttentionVis"),
        ("parity/vqa_prec", "config.NETWORK.NO_GROUNDING", True),
        ("parity/vqa_prec", "config.NETWORK.PIXEL_STDS", [58.0, 57.0, 57.0]),
        ("parity/vqa_prec", "config.NETWORK.ANS_LOSS_WEIGHT", 2.0),
        ("parity/vqa_prec", "config.NETWORK.IMAGE_FROZEN_BACKBONE_STAGES", [1, 2, 5]),
        ("parity/vqa_prec", "config.NETWORK.VLBERT.hidden_act", "relu"),
        ("parity/vqa_prec", "config.NETWORK.VLBERT.rotary", False),
        ("parity/vqa_prec", "config.TRAIN.LABEL_SMOOTHING", 0.1),
        ("parity/pretrain_multitask_prec", "config.DATASET.0.ADD_IMAGE_AS_A_BOX", False),
        ("detector/meta", "box_arithmetic", "plus_one"),
        ("detector/meta", "rpn.min_box", 16),
        ("detector/meta", "bn_eps", 1e-3),
        ("detector/meta", "rules.0.1", "uniform"),
    ],
)
def test_a_case_with_a_switch_that_is_not_known_is_refused(tmp_path: Path, name: str, switch: str, value: object):
    """Also one at another value than those known: it would be compared as if the switch were not there."""
    source = (SHARED / "parity" if name == "detector/meta" else DATA) / f"{name}.json"
    if not source.exists():
        pytest.skip("detectron2's figures lie in ../shared, which is not here")
    metadata = json.loads(source.read_text())
    *path, key = (int(part) if part.isdigit() else part for part in switch.split("."))
    section = metadata
    for part in path:
        section = section[part]
    section[key] = value
    (tmp_path / source.name).write_text(json.dumps(metadata))
    if name == "detector/meta":
        (row,) = detector.compare_folder(tmp_path, "case", plain=False)
    else:
        shutil.copy(source.with_suffix(".npz"), tmp_path)
        row = (vilbert if "vilbert" in name else vlbert).report(tmp_path / source.name, "case")
    named = "rule of backbone.stem.conv1.weight.kind" if switch == "rules.0.1" else switch.replace(".0", "")
    assert not row.differences
    assert f"{named} is {value!r}" in row.remark
