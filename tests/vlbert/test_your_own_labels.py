"""docs/your-own-labels.md: one label, several, or a number for pairs of an image and a text, from a CSV file."""

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from guides import made_tiny, run_commands
from tiny import tiny_sample, urls

from storage.settings import from_json, to_json
from vlbert.commands import main
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.recipes.vlbert import finetune_labels
from vlbert.tasks import make_task
from vlbert.tasks.labels import Labels, LabelSettings

WORDS = Vocabulary([*SPECIALS, "which", "colour", "shape"])
SAMPLES = [tiny_sample(number, regions=1) for number in range(200)]
TEXTS = ("which colour", "which shape")


def one_of(colour: str, shape: str, text: str) -> str:
    """Neither image nor text alone tells it."""
    return {"which colour": "red" if colour == "red" else "other colour", "which shape": shape}[text]


def several_of(colour: str, shape: str, text: str) -> str:
    return f"{shape} | red" if colour == "red" else shape * (colour != "white")


def number_of(colour: str, shape: str, text: str) -> str:
    return f"{100 * (shape == 'square') + 10 * (colour == 'red') + 0.5}"


def write_csv(file: Path, rows: list[tuple[str, str, str]], delimiter: str = ",") -> None:
    with open(file, "w", newline="") as lines:
        csv.writer(lines, delimiter=delimiter).writerows([("image", "text", "label"), *rows])


def task_of(folder: Path, **settings: str) -> Labels:
    return make_task(LabelSettings(**({"train": "a.csv", "folder": str(folder)} | settings)), WORDS, 8)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_rows_that_cannot_be_used_are_named(tmp_path, delimiter):
    samples, text = urls([tiny_sample(number) for number in range(4)]), "which\ncolour"
    train = [("000000.jpg", text, "red"), ("000001.jpg", "which shape " * 40, "red"), ("x/000003.jpg", text, " blue ")]
    write_csv(tmp_path / "a.csv", [*train, ("000003.jpg", text, "")], delimiter)
    write_csv(tmp_path / "val.csv", [("000002.jpg", text, "red"), ("000001.jpg", text, "plaid")], delimiter)
    with (tmp_path / "val.csv").open("a") as file:
        file.write(f"000001.jpg{delimiter}which{delimiter} colour{delimiter}red\n")
    task = task_of(tmp_path, validate_on="val.csv")
    training, validation = task.examples(samples, None), task.examples(samples, "val.csv")
    assert (training.samples.tolist(), task.labels) == ([0, 3], ["blue", "red"])
    assert training.skipped == (
        "a.csv:4: it has 80 tokens, more than task.text_length = 60",
        "a.csv:8: its label is '', not one (task.label)",
    )
    assert validation.samples.tolist() == [2, 1, 1]
    assert validation.invalid == (
        "val.csv:5: no row to train on has the label 'plaid'",
        f"val.csv:6: it has more cells than columns; quote texts with {delimiter!r}",
    )


@pytest.mark.parametrize(
    ("content", "settings", "named"),
    [
        ("", {"train": ""}, "give --task.train FILE"),
        ("", {"train": "gone.csv"}, "there is no .*gone.csv"),
        ("image,text\n", {}, "a.csv has no column label"),
        ("image,text,label\nn.jpg,x,red\nm.jpg,x,red\n", {}, "a.csv needs rows with two different labels"),
        ("image,text,label\nn.jpg,x,1\nm.jpg,x,one\n", {"label": "number"}, "a.csv:3: its label is 'one', not number"),
        (
            "image,text,label\n" + "".join(f"{n},x,{n}\n" for n in range(9)),
            {},
            "8 of 8 images of a.csv of .* are in no region shard",
        ),
        ('image,text,label\n"a,x,1\n' + "x" * 200_000, {}, "a.csv:.* is not CSV: .*correct the row's quotes"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, content, settings, named):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=named):
        task_of(tmp_path, **settings).examples(urls([tiny_sample(number) for number in range(3)]), None)


def test_a_tenth_of_the_images_is_held_out_with_all_their_rows(tmp_path):
    rows = [(f"{number:06d}.jpg", text, "ab"[number % 2]) for number in range(100) for text in TEXTS]
    write_csv(tmp_path / "a.csv", rows)
    task, samples = task_of(tmp_path), urls([tiny_sample(number) for number in range(100)])
    training, held_out = (Counter(task.examples(samples, split).samples.tolist()) for split in (None, "held-out"))
    assert (len(training), len(held_out), {*training.values(), *held_out.values()}) == (90, 10, {2})
    assert not training.keys() & held_out.keys()
    whole = task_of(tmp_path, validate_on="b.csv")
    assert len(whole.examples(samples, None)) == 200
    # Whence reads the same rows, from the settings in a checkpoint.
    settings = from_json(LabelSettings, to_json(task.settings), "x").to_train()
    assert Counter(make_task(settings, WORDS, 8).examples(samples, None).samples.tolist()) == training
    assert settings.files == ("a.csv",)


@pytest.mark.parametrize(
    ("kind", "pairs", "expected"),
    [
        ("one", [("a", "a"), ("b", "a"), ("a", "b"), ("b", "b")], {"accuracy": 0.5, "chance": 0.5}),
        ("several", [("a|b", "b | a"), ("", ""), ("a", "a|b"), ("a", "")], {"f1": (1 + 1 + 2 / 3) / 4}),
        ("number", [("1", "1"), ("2", "4")], {"r2": 1 - 2 / 2.25, "rmse": 2**0.5}),
    ],
)
def test_metrics_are_those_of_their_definitions(tmp_path, kind, pairs, expected):
    task = task_of(tmp_path, label=kind)
    task.labels = [0.0, 1.0]
    rows = [{"answer": answer, "ground_truth": truth, "score": task._score(answer, truth)} for answer, truth in pairs]
    metrics = task.metrics(rows)
    assert expected.items() <= {name: pytest.approx(value) for name, value in metrics.items()}.items()
    assert task.best_metric(task.settings) in metrics
    assert task.metrics([{"answer": "", "ground_truth": None, "score": None}]) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "label_of", "metric"),
    [("one", one_of, "accuracy"), ("several", several_of, "f1"), ("number", number_of, "r2")],
)
def test_the_commands_of_the_page_train_on_labels_of_image_and_text(
    tmp_path, monkeypatch, capsys, kind: str, label_of: Callable, metric: str
):
    (tmp_path / "images").mkdir()
    rng, rows = np.random.default_rng(0), []
    for number, sample in enumerate(SAMPLES):
        _, colour, shape = sample.caption.split()
        text = TEXTS[rng.integers(2)]
        (tmp_path / "images" / f"{number:04d}.jpg").write_bytes(sample.image)
        rows.append((f"{number:04d}.jpg", text, label_of(colour, shape, text)))
    write_csv(tmp_path / "labels.csv", rows)
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    overrides = made_tiny(finetune_labels("demo", "precomputed"), 200, vocabulary="vocab.txt")
    replaced = {
        "pairs --weights": "pairs --selection.minimum 2 --selection.maximum 4 --weights",
        "--init_from demo-root/runs/pretrain-seed0": f"--task.label {kind} {overrides}",
    }
    ran = run_commands("your-own-labels.md", tmp_path, monkeypatch, replaced)
    assert ran[-2:] == ["vlbert.predict.command", "vlbert.evaluation.whence"]
    (place,) = (tmp_path / "my-root/runs/my-labels/evaluations").iterdir()
    summary = json.loads((place / "metrics.json").read_text())
    metrics = summary["metrics"]
    assert summary["examples"] == {"all": 20, "predicted": 20, "unreadable": 0, "skipped": 0, "invalid": 0}
    assert metrics[metric] >= metrics.get("chance", 0) + 0.1
    assert metrics[f"{metric}_grounding_gap"] >= 0.1, "only the image shows colour and shape"
    printed = capsys.readouterr().out
    assert "look what I made" in printed
    assert "my-labels: pairs, shard 00000, " in printed
    assert list(tmp_path.glob("*-answer.png"))
    main(["replay", "my-root/runs/my-labels", "1", "--out", "step.html"])
    assert Path("step.html").is_file()
    main(["withdraw", "my-root", "0002.jpg"])
    assert "my-labels" in capsys.readouterr().out
