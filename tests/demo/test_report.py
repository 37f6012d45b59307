"""The report of a demo run, made of real shards and hand-written runs."""

import dataclasses
import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from demo_results import pipeline, trained
from PIL import Image

from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.report import write_report
from demo.tasks import STARTS, joint_folder
from detectors.annotated import AnnotatedDetector
from detectors.run import detect_shard
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.collect.lists import read_captions
from storage.manifests import OK, Row
from storage.object_store import open_store
from storage.sample import Sample, sample_key

TINY = DemoDataSettings(train_scenes=3, held_out_scenes=10, broken_rows=0, text_lines=2, task_train=1, task_held_out=6)
HOSTILE = '<script>alert("caption")</script><img src=http://evil.example/x.png>'
STAGES = [("download", 4.25), ("pre-training", 131.5)]
DETECTOR = {
    "weights": "detector.safetensors",
    "scenes": 10,
    "metrics": {"map50": 0.8437, "map50_weighted": 0.8281, "proposal_recall": 0.9688},
    "classes": [
        {"class": name, "average_precision": value}
        for name, value in (("red star", 0.995), ("blue ring", 0.5), ("red ring", 0.25), ("blue star", 0.125))
    ],
}
NUMBERS = {"refcoco": (0.8125, 0.4219, 0.2656), "vqa": (0.5469, 0.3281, 0.1406)}
MASKED = {"monitored": (0.9375, 0.1406), "words": (0.8125, 0.6875), "regions": (0.5625, 0.0625)}


def text_of(page: str) -> str:
    """The words of the page, without its style."""
    words = re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL))
    return re.sub(r"\s+", " ", html.unescape(words))


def between(text: str, start: str, end: str) -> str:
    assert start in text
    assert end in text
    return text.partition(start)[2].partition(end)[0]


def commit_images(root: Path, dataset: str, rows: Sequence[tuple[str, str, bytes]], failed: Sequence[Row] = ()) -> None:
    """A shard of (caption, url, JPEG), then the rows that failed."""
    samples = [
        Sample(sample_key(url, caption), image, caption, url, *Image.open(io.BytesIO(image)).size, "ab")
        for caption, url, image in rows
    ]
    ok = [Row(i, sample.key, OK, url=sample.url) for i, sample in enumerate(samples)]
    assert commit_shard(
        Catalog(open_store(str(root)), dataset), "images", "00000", samples, [*ok, *failed], {"source": {}}
    )


def predictions(root: Path, stage: str, scores: Sequence[float]) -> list[dict]:
    """One for each of the first samples: region 1 is chosen, and region 2 is the right one where the score is low."""
    samples = list(Catalog(open_store(str(root)), "coco").read(stage, "00000"))
    rows = []
    for number, (sample, score) in enumerate(zip(samples, scores, strict=False)):
        boxes = sample.regions.boxes.tolist()
        rows.append(
            {
                "key": sample.key,
                "question": f"question {number}",
                "answer": "region 1",
                "probability": 0.625,
                "ranking": [],
                "ground_truth": "region 2" if score < 0.5 else "region 1",
                "score": score,
                "boxes": [{"name": "region 1", "box": boxes[0]}, {"name": "ground truth", "box": boxes[score < 0.5]}],
                "candidates": len(boxes),
            }
        )
    return rows


def write_run(root: Path, run: str, lines: Sequence[dict], rows: Sequence[dict]) -> None:
    """What a training leaves of a run, as far as the report reads it."""
    (root / "runs" / run).mkdir(parents=True)
    for name, content in (("metrics.jsonl", lines), ("predictions.jsonl", rows)):
        (root / "runs" / run / name).write_text("".join(json.dumps(row) + "\n" for row in content))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoData, list]:
    """A root with all shards and the runs of two seeds, and their results."""
    root = tmp_path_factory.mktemp("demo") / "my root"
    data = draw_demo_data(root / "data", TINY)

    def rows(tsv: Path) -> list[tuple[str, str, bytes]]:
        return [(r.caption, r.url, (data.images / r.url.rpartition("/")[2]).read_bytes()) for r in read_captions(tsv)]

    dead = "http://127.0.0.1:8791/broken/404/000099.jpg"
    failed = [
        Row(10, "a" * 20, "http_404", "HTTP 404 Not Found", dead),
        Row(11, "b" * 20, "http_404", "HTTP 404 Not Found", dead + "?second"),
        Row(12, "c" * 20, "bad_url", '<b onclick="x()">', "javascript:alert(1)//<i>"),
    ]
    held_out = rows(data.held_out_tsv)
    commit_images(root, "captions", rows(data.train_tsv), failed)
    commit_images(root, "held-out", [(HOSTILE, *held_out[0][1:]), *held_out[1:]])
    commit_images(root, "coco", [("", file.name, file.read_bytes()) for file in sorted(data.task_images.iterdir())])
    scenes, tasks = AnnotatedDetector(data.annotations), AnnotatedDetector(data.refcoco_instances)
    for dataset, detector in (("captions", scenes), ("held-out", scenes), ("coco", tasks)):
        assert detect_shard(Catalog(open_store(str(root)), dataset), "00000", detector)

    (root / "detector.json").touch()
    metrics = {
        f"{name}_accuracy{suffix}": value
        for name, values in MASKED.items()
        for suffix, value in zip(("", "_shuffled"), values, strict=True)
    }
    results = []
    for seed, gap in (("-seed0", 0.7969), ("-seed1", 0.6)):
        result = pipeline(
            gap, NUMBERS if not results else NUMBERS | {"refcoco": (0.6120, 0.4219, 0.2656)}, seed, **metrics
        )
        finetuned = [dataclasses.replace(one, detector=tasks.id) for one in result.finetuned]
        pretrained = dataclasses.replace(result.pretrained, detector=scenes.id)
        results.append(dataclasses.replace(result, pretrained=pretrained, finetuned=finetuned))
        losses = [
            {"loss_words": 5 / s, "loss_text_words": 6 / s, "loss_regions": 4 / s, "loss_answers": 3 / s}
            for s in (1, 2)
        ]
        lines = [{"kind": "training", "step": 20 * s} | loss for s, loss in enumerate(losses, 1)]
        scores = {"refcoco-with": [1, 0, 1, 1, 1, 0], "refcoco-without": [0, 0, 1, 0, 0, 0], "vqa-with": [1, 0.3]}
        for one in (pretrained, *finetuned):
            validation = {"kind": "validation", "step": 40} | one.metrics
            masked = [{"key": str(i), "words": 7, "monitored": 3, "regions": 1} for i in range(10)]
            how = scores.get(one.run.removesuffix(seed), [0, 0])
            rows_of = masked if one is pretrained else predictions(root, f"regions/{tasks.id}", how)
            write_run(root, one.run, [*lines, validation], rows_of)
    return root, data, results


@pytest.fixture(scope="module")
def page(made: tuple[Path, DemoData, list]) -> str:
    root, data, results = made
    return write_report(root, data, DETECTOR, STAGES, results[:1]).read_text(encoding="utf-8")


def test_the_numbers_of_the_page_are_those_of_the_run(page: str):
    text = text_of(page)
    shown = between(text, "Does it use the image?", "Does pre-training help?")
    assert re.findall(r"(right image|another image|random guess|right caption|another caption) (\d+)", shown) == [
        *(("right image", "94"), ("another image", "14"), ("random guess", "17")),
        *(("right caption", "56"), ("another caption", "6")),
    ]
    assert "30 masked words, after 40 steps" in shown
    assert re.search(r"\d+ masked regions; right is", shown)
    helped = between(text, "Does pre-training help?", "Images downloaded")
    names = [("with pre-training", "81"), ("without", "42"), ("chance", "27")]
    names += [("with pre-training", "55"), ("without", "33"), ("chance", "14")]
    assert re.findall(r"(with pre-training|without|chance) (\d+)\s%", helped) == names
    assert "6 held-out questions" in helped
    assert "Images downloaded 3 of 6 rows " in text
    assert "0.84 mAP@0.5 Of the detector on 10 held-out scenes, 4 classes." in text
    classes = "red star 0.99, blue ring 0.50, red ring 0.25, blue ring 0.50, red ring 0.25, blue star 0.12"
    assert f"0.844 0.828 96.9 % {classes}" in text
    assert re.findall(r"[+-]?\d+\.\d", between(text, "another image gap", "What the model got")) == [
        *("93.8", "14.1", "+79.7"),
        *("81.2", "68.8", "+12.5"),
        *("56.2", "6.2", "+50.0"),
    ]
    got = between(text, "the paper, on photographs", "Drawn scenes are easier")
    assert re.findall(r"(\d+\.\d)\s%", got) == [
        *("81.2", "42.2", "26.6"),
        *("54.7", "32.8", "14.1"),
    ]
    assert "val 79.88 base" in got.partition("VQA")[0]
    assert "test-dev2015 71.16 base" in got.partition("VQA")[2]
    assert re.findall(r"(download|pre-training) (\d+\.\d) s", text) == [("download", "4.2"), ("pre-training", "131.5")]
    assert "trained with other seeds" not in text


def test_hostile_strings_are_words_and_the_page_asks_nobody_for_anything(page: str):
    text = text_of(page)
    for words in (HOSTILE, "javascript:alert(1)//<i>", '<b onclick="x()">'):
        assert words in text
    assert "<b onclick" not in page
    assert not re.search(r"<(script|link|iframe|object|embed|base|form)\b", page)
    assert not re.search(r'(src|href|data|action)="(?!data:image/)', page)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_examples_are_the_first_right_and_the_first_wrong_ones(page: str):
    section = between(text_of(page), "Drawn scenes are easier", "Time, and how").partition("VQA")[0]
    assert re.findall(r"question (\d) ([✓✗])", section) == [
        *(("0", "✓"), ("2", "✓"), ("3", "✓"), ("4", "✓"), ("1", "✗"), ("5", "✗")),
    ]
    assert re.findall(r"Without pre-training: (\w+)", section) == ["wrong", "right", "wrong", "wrong", "wrong", "wrong"]
    vqa = between(text_of(page), "Drawn scenes are easier", "Time, and how").partition("VQA")[2]
    assert "question 1 ✗ score 0.30 answer region 1 (0.625) ground truth region 2" in vqa


def test_several_seeds_are_listed_with_their_means(made: tuple[Path, DemoData, list]):
    root, data, results = made
    text = text_of(write_report(root, data, DETECTOR, STAGES, results).read_text(encoding="utf-8"))
    table = between(text, "trained with other seeds", "Drawn scenes are easier").replace(" %", "")
    assert re.findall(r"(seed \d|mean) ([+-]\d+\.\d) points RefCOCO\+: (.*?); VQA: ([^a-z]*\d)", table) == [
        ("seed 1", "+79.7", "81.2, 42.2, 26.6", "54.7, 32.8, 14.1"),
        ("seed 2", "+60.0", "61.2, 42.2, 26.6", "54.7, 32.8, 14.1"),
        ("mean", "+69.8", "71.2, 42.2, 26.6", "54.7, 32.8, 14.1"),
    ]
    assert "94" in between(text, "Does it use the image?", "random guess")  # the first seed is shown in full


def test_vcrs_answers_and_rationales_are_joined_from_their_evaluation(made: tuple[Path, DemoData, list]):
    root, data, (first, _) = made
    runs = [f"vcr-{kind}-{start}" for kind in ("answers", "rationales") for start in STARTS]
    rows = predictions(root, f"regions/{first.finetuned[0].detector}", [1, 0])
    vcr = [
        trained(run, {"answer_accuracy": 0.5, "rationale_accuracy": 0.5, "chance": 0.25}, first.finetuned[0].detector)
        for run in runs
    ]
    for one in vcr:
        lines = [{"kind": kind, "step": 1, "loss_answers": 1.0} | one.metrics for kind in ("training", "validation")]
        write_run(root, one.run, lines, rows)
    for start, value in (("with", 0.4062), ("without", 0.0781)):
        folder = joint_folder(root, f"vcr-answers-{start}")
        folder.mkdir(parents=True)
        metrics = {"joint_accuracy": value, "joint_chance": 0.0625}
        (folder / "metrics.json").write_text(json.dumps({"metrics": metrics}))
    result = dataclasses.replace(first, finetuned=[*first.finetuned, *vcr])
    text = text_of(write_report(root, data, DETECTOR, STAGES, [result]).read_text(encoding="utf-8"))
    table = between(text, "answer and rationale right", "Drawn scenes are easier")
    assert re.findall(r"\d+\.\d", table) == ["40.6", "7.8", "6.2"]
