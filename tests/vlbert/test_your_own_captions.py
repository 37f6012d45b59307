"""docs/your-own-captions.md: from twenty images with captions to a checkpoint."""

import json

import pytest
from guides import run_commands

from demo.data import DemoData

PAGE = "your-own-captions.md"


@pytest.mark.slow
def test_the_commands_of_the_page_lead_to_a_checkpoint_that_answers(demo_data: DemoData, tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").mkdir()
    rows, lines = [line.split("\t") for line in demo_data.train_tsv.read_text().splitlines()], []
    whole = [row for row in rows if "/images/" in row[1]][:20]  # the others are broken on purpose
    for number, (caption, url) in enumerate(whole, 1):
        image = demo_data.images / url.rpartition("/")[2]
        (tmp_path / f"photos/{number:04d}.jpg").write_bytes(image.read_bytes())
        lines.append(f"{caption}\t{number:04d}.jpg\n")
    (tmp_path / "captions.tsv").write_text("".join(lines))
    ran = run_commands(PAGE, tmp_path, monkeypatch, {"--data.text_batch 0": "--data.text_batch 0 --steps 4"})
    assert ran.count("storage.collect.run") == ran.count("detectors.run") == 2
    lines = (tmp_path / "my-root/runs/pretrain_vlbert_demo/metrics.jsonl").read_text().splitlines()
    (validation,) = [line for line in map(json.loads, lines) if line["kind"] == "validation"]
    assert {"words_accuracy", "words_accuracy_shuffled"} <= validation.keys()
    printed = capsys.readouterr().out
    assert "captions: 1 new of 1 shards" in printed
    assert "all rows: 16 ok" in printed
    assert "all rows: 4 ok" in printed
    assert (tmp_path / "0001-answer.png").is_file()
    assert not (tmp_path / "photos/0001-answer.png").exists(), "it would be an image of the next collection"
