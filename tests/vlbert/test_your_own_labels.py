"""docs/your-own-labels.md: a classifier of image and text from two CSV files, outside this package."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from guides import made_tiny, run_commands
from tiny import tiny_sample, urls

from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.tasks import make_task

PAGE = "your-own-labels.md"
WORDS = Vocabulary([*SPECIALS, "which", "colour", "shape"])


def label_of(number: int, text: str) -> str:
    """The colour or the shape of a sample's only object: neither image nor text alone tells it."""
    _, colour, shape = tiny_sample(number, regions=1).caption.split()
    return {"which colour": "red" if colour == "red" else "other colour", "which shape": shape}[text]


def write_csv(file: Path, rows: list[tuple[str, str, str]]) -> None:
    with open(file, "w", newline="") as lines:
        csv.writer(lines).writerows([("image", "text", "label"), *rows])


def test_rows_that_cannot_be_used_are_named(own_module, tmp_path):
    samples, labels = urls([tiny_sample(number) for number in range(3)]), own_module(PAGE, "labels")
    good, long = ("000000.jpg", "which colour", "red"), ("000001.jpg", "which shape " * 40, "red")
    write_csv(tmp_path / "train.csv", [good, long])
    write_csv(tmp_path / "val.csv", [("000002.jpg", "which colour", "red"), ("000001.jpg", "which colour", "plaid")])
    task = make_task(labels.LabelSettings(("red",), str(tmp_path)), WORDS, 8)
    training, validation = task.examples(samples, None), task.examples(samples, "val")
    assert training.samples.tolist() == [0]
    assert training.skipped == ("row 2 of train.csv: it has 80 tokens, more than task.text_length = 60",)
    assert validation.samples.tolist() == [2, 1]
    assert validation.invalid == ("row 2 of val.csv: 'plaid' is not in task.labels",)
    for text, named in (("image,text\n", "val.csv has no column label"), ("image,text,label\ngone,x,red\n", "gone")):
        (tmp_path / "val.csv").write_text(text)
        with pytest.raises(ValueError, match=named):
            task.examples(samples, "val")


@pytest.mark.slow
def test_the_commands_of_the_page_train_a_classifier_of_image_and_text(own_module, tmp_path, monkeypatch, capsys):
    labels = own_module(PAGE, "labels")
    (tmp_path / "images").mkdir()
    rng, rows = np.random.default_rng(0), {"train": [], "val": []}
    for number in range(200):
        name, text = f"{number:04d}.jpg", ("which colour", "which shape")[rng.integers(2)]
        (tmp_path / "images" / name).write_bytes(tiny_sample(number, regions=1).image)
        rows["train" if number < 160 else "val"].append((name, text, label_of(number, text)))
    for split, found in rows.items():
        write_csv(tmp_path / f"{split}.csv", found)
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    known = labels.LabelSettings(tuple(sorted({label for *_, label in rows["train"]})))
    overrides = made_tiny(labels.finetune_labels(), 100, task=known, vocabulary="vocab.txt")
    replaced = {
        "detector.safetensors\n": "detector.safetensors --selection.minimum 2 --selection.maximum 4\n",
        "--init_from demo-root/runs/pretrain": overrides,
        "finetune_labels val": f"finetune_labels val {overrides}",
        '"look what I made"': f'"look what I made" {overrides}',
    }
    ran = run_commands(PAGE, tmp_path, monkeypatch, replaced)
    assert ran[-1] == "vlbert.predict.command"
    (place,) = (tmp_path / "my-root/runs/finetune_labels/evaluations").iterdir()
    metrics = json.loads((place / "metrics.json").read_text())["metrics"]
    truths = Counter(label for *_, label in rows["val"])
    assert metrics["majority_accuracy"] == truths.most_common(1)[0][1] / 40
    assert metrics["accuracy"] >= metrics["majority_accuracy"] + 0.1
    assert metrics["accuracy_grounding_gap"] >= 0.1, "only the image shows colour and shape"
    assert "look what I made" in capsys.readouterr().out
    assert (tmp_path / "0001-answer.png").is_file()
