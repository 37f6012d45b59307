"""docs/your-own-task.md: its file, outside this package, trains, learns and is evaluated."""

import json

import pyarrow.parquet as pq
import pytest
from guides import made_tiny, run_commands
from tiny import COLOURS, commit_samples, tiny_sample

PAGE = "your-own-task.md"


@pytest.mark.slow
def test_the_commands_of_the_page_train_a_task_that_learns_from_the_image(own_module, tmp_path, monkeypatch):
    held_out = [tiny_sample(1000 + i, regions=1) for i in range(24)]
    commit_samples(tmp_path / "demo-root", "captions", [tiny_sample(i, regions=1) for i in range(48)])
    commit_samples(tmp_path / "demo-root", "held-out", held_out)
    overrides = made_tiny(own_module(PAGE, "colours").finetune_colours(), 60)
    replaced = {
        "--init_from demo-root/runs/pretrain-seed0": overrides,
        "finetune_colours held-out": f"finetune_colours held-out {overrides}",
    }
    run_commands(PAGE, tmp_path, monkeypatch, replaced)
    run = tmp_path / "demo-root/runs/finetune_colours"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (last,) = [line for line in map(json.loads, lines) if line["kind"] == "validation"]
    assert last["accuracy"] >= last["chance"] + 0.3
    assert last["accuracy_grounding_gap"] >= 0.3, "only the image shows the colour"
    assert not {"chance_shuffled", "chance_grounding_gap"} & last.keys(), "it does not depend on images"
    summary = json.loads((run / "evaluations/held-out-step-0000060/metrics.json").read_text())
    rows = pq.read_table(run / "evaluations/held-out-step-0000060/predictions.parquet").to_pylist()
    assert summary["examples"] == {"all": 24, "predicted": 24, "unreadable": 0, "skipped": 0, "invalid": 0}
    assert [row["key"] for row in rows] == [sample.key for sample in held_out]
    assert {row["ground_truth"] for row in rows} <= set(COLOURS)
    assert summary["metrics"]["accuracy"] == sum(row["answer"] == row["ground_truth"] for row in rows) / 24
    assert summary["metrics"]["accuracy"] >= summary["metrics"]["chance"] + 0.3
