"""What a step costs a GPU, as golden numbers: they do not depend on the machine."""

import json
from pathlib import Path

import pytest
from places import DATA

from benchmarks.rehearse import main
from benchmarks.step_parts import PARTS, marked_step
from detectors.faster_rcnn import PRESETS
from storage.settings import override
from training.cards import CARDS
from vlbert.recipes import RECIPES
from vlbert.rehearsal import rehearse_detection, rehearse_ranking, rehearse_training

GOLDEN = json.loads((DATA / "rehearsed.json").read_text())
PAIRS = 8
SMALL = ["model.layers=JJ", "model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=64"]
SMALL += ["model.geometry_channels=32", "model.regions.resnet.blocks=1,1,1,1", "model.regions.resnet.width=8"]
SMALL += ["model.regions.roi_size=4", "model.regions.short_side=48", "model.regions.long_side=80"]
MOST = 0.02  # by which a number may change unsaid; a change that moves one further writes the new ones down


def counts(rehearsed) -> dict[str, int]:
    operations = [one for _, one in rehearsed.operations]
    return {
        "kernels": sum(one.kernels for one in operations),
        "waits": sum(one.waits for one in operations),
        "flops": sum(one.flops for one in operations),
        "bytes": sum(one.bytes for one in operations),
        "peak": rehearsed.peak,
    }


LONG = {"pretrain_vilbert_base", "pretrain_unicoder_vl_base"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow) if one in LONG else one for one in GOLDEN])
def test_a_step_costs_what_it_did(name):
    recipe = RECIPES[name]()
    rehearsed = rehearse_training(recipe, PAIRS, PAIRS if recipe.data.text_batch else 0, marked_step)
    found = counts(rehearsed)
    assert found == pytest.approx(GOLDEN[name], rel=MOST), f"now {json.dumps(found)}"
    assert found["waits"] <= 2
    parts = rehearsed.parts(CARDS["h100"])
    assert [part for part in PARTS if part in parts] == [part for part in PARTS if parts.get(part)]
    assert sum(part.kernels for part in parts.values()) == found["kernels"], "each operation belongs to a part"
    assert set(parts) <= {*PARTS}


def test_memory_grows_with_the_pairs_and_kernels_do_not():
    recipe = override(RECIPES["pretrain_vlbert_base"](), SMALL)
    few, some, many = (rehearse_training(recipe, pairs, pairs) for pairs in (16, 32, 64))
    assert counts(many)["kernels"] == pytest.approx(counts(few)["kernels"], rel=MOST)
    assert many.held == pytest.approx(few.held, rel=0.01)
    assert many.peak - some.peak == pytest.approx(2 * (some.peak - few.peak), rel=0.2)
    assert few.seconds(CARDS["h200"]) < few.seconds(CARDS["rtx4090"])


def test_a_recipe_of_another_task_is_refused():
    with pytest.raises(ValueError, match="finetune_vqa_base is no pre-training"):
        rehearse_training(RECIPES["finetune_vqa_base"](), 2)
    with pytest.raises(ValueError, match="pretrain_vlbert_base is no retrieval"):
        rehearse_ranking(RECIPES["pretrain_vlbert_base"](), 2, 2)


def test_detection_has_all_proposals_of_all_images():
    one, two = (rehearse_detection(PRESETS["demo"], batch, size=(160, 128)) for batch in (1, 2))
    assert counts(two)["flops"] == 2 * counts(one)["flops"] > 0
    assert {part for part, _ in two.operations} == {
        "transfer",
        "backbone",
        "rpn",
        "proposals",
        "pool and res5",
        "heads",
    }


def test_ranking_computes_every_pair_and_the_regions_of_an_image_once():
    recipe = override(RECIPES["finetune_retrieval_base"](), SMALL)
    few, many = (rehearse_ranking(recipe, 2, captions) for captions in (4, 8))
    images = sum(one.flops for _, one in few.operations if "conv" in one.name)
    assert images == sum(one.flops for _, one in many.operations if "conv" in one.name) > 0
    texts = [counts(one)["flops"] - images for one in (few, many)]
    assert texts[1] == pytest.approx(2 * texts[0], rel=0.15)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_tells_time_waits_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture):
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"parts": {"bf16": {"encoder": 2.0, "optimizer": 4.0}}}))
    given = ["--pairs", "4", "--gpus", "2", "--price", "2", "--device", "a100", "--memory", "--measured", str(measured)]
    main(["pretrain_vlbert_base", *given, "--json", str(tmp_path / "report.json"), *SMALL])
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    assert "4 pairs and 4 text rows a step on one A100 SXM 80GB" in printed
    rows = {line.split("  ")[0]: line.split() for line in printed.splitlines()}
    assert float(rows["encoder"][-2]) == 2.0
    assert float(rows["the step"][-2]) == 6.0
    hours = RECIPES["pretrain_vlbert_base"]().steps * 128 / (4 * 2) * report["seconds"] / 3600
    assert f"{hours:,.0f} hours of the recipe on 2 GPUs, {hours * 4:,.0f} euros at 2 an hour" in printed
    waits = sum(count for *_, count in report["waits"])
    assert f"the host waits {waits} times" in printed
    fits = [[int(cell.replace(",", "")) for cell in row[1:]] for row in report["pairs that fit"][1:]]
    assert all(row == sorted(row) and row[0] > 100 for row in fits)
    assert all(more > fewer for fewer, more in zip(*fits, strict=True)), "activation checkpointing makes room"


def test_the_command_predicts_this_cpu_and_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture):
    main(["--here", "--pairs", "1", "--rounds", "1", "--json", str(tmp_path / "report.json"), *SMALL])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["predicted"].keys() <= report["measured"].keys()
    assert {"backbone", "res5, backward", "encoder", "optimizer"} <= report["predicted"].keys()
    assert all(ms > 0 for ms in report["predicted"].values())


def test_the_command_rehearses_detection_and_ranking(capsys: pytest.CaptureFixture):
    main(["--detection", "demo", "--batch", "1"])
    assert "images/s" in capsys.readouterr().out
    main(["finetune_retrieval_base", "--ranking", *SMALL])
    assert "pairs/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--pairs", "0"], "--pairs 0"),
        (["--detection", "yolo"], "yolo: it is one of"),
        (["finetune_vqa_base"], "is no pre-training"),
        (["--measured", "missing.json", "--pairs", "1", *SMALL], "missing.json"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, named, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert named in f"{ended.value.code} {capsys.readouterr().err}"
