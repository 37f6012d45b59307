"""The report of a demo run, made of real shards and hand-written runs."""

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from demo_results import results
from PIL import Image

from demo.data import DemoDataSettings, draw_demo_data
from demo.labels import PRETRAINING_RUN, WITH, WITHOUT, run_name
from demo.report import detections, write_report
from detectors.annotated import AnnotatedDetector
from detectors.run import detect_shard
from flows.pipeline import PipelineResult
from flows.torchrun import Trained
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import OK, Row
from storage.object_store import open_store
from storage.safe_json import printable
from storage.sample import Regions, Sample, sample_key

TINY = DemoDataSettings(
    train_scenes=3, held_out_scenes=2, broken_rows=0, text_lines=2, task_train=1, task_val=2, task_test=4
)
HOSTILE = '<script>alert("caption")</script><img src=http://evil.example/x.png>\u202e'
CLASSES = [{"class": name, "average_precision": value} for name, value in (("red star", 0.5), ("blue ring", 0.995))]
METRICS = {"map50": 0.8437, "map50_weighted": 0.8281, "proposal_recall": 0.9688}
DETECTOR = {"weights": "detector.safetensors", "scenes": 10, "metrics": METRICS, "classes": CLASSES}
SCORES = {"refcoco": (0.8125, 0.4219), "vqa_60": (0.55, 0.4), "vqa_240": (0.6, 0.5), "vqa_1000": (0.7, 0.65)}


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def commit_images(root: Path, dataset: str, files: Sequence[Path], captions: Sequence[str], *failed: Row) -> None:
    """A shard of these images, then the rows that failed."""
    samples = [
        Sample(sample_key(file.name, caption), file.read_bytes(), caption, file.name, *Image.open(file).size, "ab")
        for file, caption in zip(files, captions, strict=True)
    ]
    rows = [*(Row(i, sample.key, OK, url=sample.url) for i, sample in enumerate(samples)), *failed]
    assert commit_shard(Catalog(open_store(str(root)), dataset), "images", "00000", samples, rows, {"source": {}})


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The page of one seed, and that of five."""
    root = tmp_path_factory.mktemp("demo") / "my root"
    data = draw_demo_data(root / "data", TINY)
    scenes, tasks = AnnotatedDetector(data.annotations), AnnotatedDetector(data.refcoco_instances)
    images, asked = sorted(data.images.iterdir()), sorted(data.task_images.iterdir())
    failed = Row(3, "c" * 20, "bad_url", '<b onclick="x()">', "javascript:alert(1)//<i>")
    commit_images(root, "captions", images[:3], ["a", "b", "c"], failed)
    commit_images(root, "held-out", images[3:], [HOSTILE, "e"])
    commit_images(root, "coco", asked, [""] * len(asked))
    for dataset, detector in (("captions", scenes), ("held-out", scenes), ("coco", tasks)):
        assert detect_shard(Catalog(open_store(str(root)), dataset), "00000", detector)
    keys = [sample.key for sample in Catalog(open_store(str(root)), "coco").read(f"regions/{tasks.id}", "00000")]
    masked = {f"{name}_accuracy{end}": 0.5 for name in ("words", "regions") for end in ("", "_shuffled")}
    masked |= {"monitored_accuracy": 0.9375, "monitored_accuracy_shuffled": 0.1406}
    answer = {"answer": "it", "probability": 0.625, "ground_truth": "it", "ranking": []}
    answer |= {"boxes": [{"name": "it", "box": [1, 1, 9, 9]}]}
    scored = zip(keys, (1, 0, 0.75), strict=False)
    answers = [answer | {"key": key, "question": f"question {score}", "score": score} for key, score in scored]
    losses, runs = {"loss_words": 5, "loss_text_words": 6, "loss_regions": 4, "loss_answers": 3}, {}
    for start, task, detector in (
        (WITH, "pretraining", scenes.id),
        *((start, column, tasks.id) for column in ("refcoco_1000", "vqa_1000") for start in (WITH, WITHOUT)),
    ):
        run = PRETRAINING_RUN if task == "pretraining" else run_name(task, start)
        run, scores = run.format(seed=0), {"accuracy": 0.5, "accuracy_published": 0.5}
        metrics = masked if task == "pretraining" else scores
        runs[start, task] = Trained(run, "recipe", detector, "snapshot", "", metrics, 1.0, 1)
        lines = [{"kind": "training", "step": 20} | losses, {"kind": "validation", "step": 40} | metrics]
        rows = [{"key": "k", "words": 7, "monitored": 3, "regions": 1}] * 10 if task == "pretraining" else answers
        (root / "runs" / run).mkdir(parents=True)
        for name, content in (("metrics.jsonl", lines), ("predictions.jsonl", rows)):
            text = "".join(json.dumps(row) + "\n" for row in content)
            (root / "runs" / run / name).write_text(text)
    pretrained = runs.pop((WITH, "pretraining"))
    pipeline = PipelineResult([], {}, pretrained, [run for (start, _), run in runs.items() if start == WITH], 1)
    several = (write_report(root, data, DETECTOR, pipeline, results(SCORES, seeds=seeds)) for seeds in ((0,), range(5)))
    return [file.read_text(encoding="utf-8") for file in several]


@pytest.fixture
def page(pages: list[str]) -> str:
    return pages[0]


def test_the_numbers_of_the_page_are_those_of_the_runs(page: str):
    text = text_of(page)
    assert re.search(r"Does it use the image\?.* right image 94\b.* 30 masked words of .*, after 40 steps", text)
    assert "RefCOCO+: with pre-training, 60 labels did what takes 1,000 without." in text
    assert "VQA: with pre-training, 60 labels did what takes 240 without." in text
    assert re.search(r"1,000 70\.0\s% 65\.0\s% \+5\.0 points 35\.0\s% 32\.0\s% 13\.0\s%", text)
    assert "One seed" in text
    assert "Images downloaded 3 of 4 rows " in text
    assert re.findall(r"question (\S+) ([✓✗])", text) == 2 * [("1", "✓"), ("0.75", "✓"), ("0", "✗")]


def test_with_several_seeds_numbers_have_intervals(pages: list[str]):
    text = text_of(pages[1])
    assert re.search(
        r"1,000 70\.0\s% 68\.0\s% to 72\.0\s% 65\.0\s% 63\.0\s% to 67\.0\s% \+5\.0 points \+3\.0 to \+7\.0", text
    )
    assert "Means of 5 seeds, with 95 % intervals" in text
    assert "One seed" not in text
    assert pages[0] != pages[1]


def test_hostile_strings_are_words_and_the_page_asks_nobody_for_anything(page: str):
    text = text_of(page)
    for words in (printable(HOSTILE), "javascript:alert(1)//<i>", '<b onclick="x()">'):
        assert words in text
    asks = r"""<b onclick|<(script|link|iframe|object|embed|base|form)\b|(src|href|data|action)="(?!data:image/)"""
    assert not re.search(asks + r"|url\(|@import|\u202e", page)
    assert "default-src 'none'" in page


def test_no_number_of_a_paper_stands_beside_those_of_the_demo(page: str):
    assert "paper" not in text_of(page)


def test_a_place_has_one_detection_and_only_if_the_detector_is_sure():
    boxes = np.array([[0, 0, 10, 10], [1, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10]], np.float32)
    scores, labels = np.array([0.6, 0.9, 0.7, 0.4], np.float32), np.array([1, 2, 3, 4], np.int32)
    found = detections(Regions(boxes=boxes, scores=scores, labels=labels, detector="x"))
    assert found.labels.tolist() == [2, 3]
    assert found.scores.tolist() == pytest.approx([0.9, 0.7])
