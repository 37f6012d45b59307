"""The report of a demo run: a page made of real shards and hand-written runs, read as a browser would."""

import base64
import dataclasses
import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from demo_results import pipeline, trained
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from demo.charts import BOTTOM, LEFT, RIGHT, TOP, Line, chart, ticks
from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.report import annotated_boxes, write_report
from demo.tasks import STARTS, joint_folder
from detectors.annotated import AnnotatedDetector
from detectors.drawing import BOX_COLOURS, GREEN, RED, draw_boxes
from detectors.run import detect_shard
from storage.catalog import OK, Catalog, Row
from storage.download import read_captions
from storage.object_store import open_store
from storage.sample import Sample, sample_key
from vlbert.results_page import draw_answer

TINY = DemoDataSettings(
    train_scenes=3, held_out_scenes=10, broken_rows=0, text_lines=2, task_train=1, task_held_out=6, task_refs=1
)
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


def box_colour(image: np.ndarray, box: Sequence[float], colour: Sequence[int]) -> float:
    """Which part of the sides of the box (in pixels of a 224 x 168 image) has about this colour."""
    x1, y1, x2, y2 = (round(float(number) * image.shape[1] / 224) for number in box)
    x, y = slice(x1 + 6, x2 - 6), slice(y1 + 6, y2 - 6)
    strips = (image[y, x1 + 1 : x1 + 3], image[y, x2 - 2 : x2], image[y1 + 1 : y1 + 3, x], image[y2 - 2 : y2, x])
    return float(np.mean([(np.abs(strip - colour).max(axis=-1) < 60).mean() for strip in strips]))


def pixels(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2]))).convert("RGB"), np.int64)


def images_in(page: str) -> list[np.ndarray]:
    return [pixels(uri) for uri in re.findall(r'<img src="(data:[^"]+)"', page)]


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
    assert Catalog(open_store(str(root)), dataset).commit("images", "00000", samples, [*ok, *failed], {"source": {}})


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
        kinds = {"vqa-with": (0.75, 0.4375), "vqa-without": (0.25, 0.4375)}
        for one in finetuned:
            values = kinds.get(one.run.removesuffix(seed), ())
            one.metrics.update(zip(("accuracy/what color is the", "accuracy/how many"), values, strict=False))
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
    assert re.findall(r"(right image|another image|random guess) (\d+)", shown) == [
        *(("right image", "94"), ("another image", "14"), ("random guess", "17")),
    ]
    assert "30 masked words, after 40 steps" in shown
    helped = between(text, "Does pre-training help?", "Images downloaded")
    names = [("with pre-training", "81"), ("without", "42"), ("chance", "27")]
    names += [("with pre-training", "55"), ("without", "33"), ("chance", "14")]
    assert re.findall(r"(with pre-training|without|chance) (\d+)\s%", helped) == names
    assert "6 held-out questions" in helped
    assert "3 of 6 rows of the caption list" in text
    assert "0.84 mAP@0.5 Of the detector on 10 held-out scenes, 4 classes." in text
    classes = "red star 0.99, blue ring 0.50, red ring 0.25, blue ring 0.50, red ring 0.25, blue star 0.12"
    assert f"0.844 0.828 96.9 % {classes}" in text
    assert re.findall(r"[+-]?\d+\.\d", between(text, "grounding gap", "What the model got")) == [
        *("93.8", "14.1", "+79.7"),
        *("81.2", "68.8", "+12.5"),
        *("56.2", "6.2", "+50.0"),
    ]
    got = between(text, "the paper, on photographs", "Drawn scenes are easier")
    assert re.findall(r"(\d+\.\d)\s%", got) == [
        *("81.2", "42.2", "26.6"),
        *("54.7", "32.8", "14.1"),
        *("43.8", "43.8"),
        *("75.0", "25.0"),
    ]
    assert "val 79.88 base" in got.partition("VQA")[0]
    assert "test-dev2015 71.16 base" in got.partition("VQA")[2]
    assert re.findall(r"(download|pre-training) (\d+\.\d) s", text) == [("download", "4.2"), ("pre-training", "131.5")]
    assert "trained with other seeds" not in text


def test_every_status_has_its_count_its_meaning_and_its_first_row(page: str):
    rows = between(text_of(page), "What was downloaded", "Images the model never")
    assert "captions to learn from: 3 of 6 rows stored" in rows
    assert "held-out to measure on: 10 of 10 rows stored" in rows
    order = re.findall(r"(ok|http_404|bad_url) (\d+) ", rows)
    assert order[:3] == [("ok", "3"), ("http_404", "2"), ("bad_url", "1")]
    assert "HTTP 404 Not Found http://127.0.0.1:8791/broken/404/000099.jpg HTTP 404 Not Found" in rows
    assert "?second" not in rows


def test_hostile_strings_are_words_and_the_page_asks_nobody_for_anything(page: str):
    text = text_of(page)
    for words in (HOSTILE, "javascript:alert(1)//<i>", '<b onclick="x()">'):
        assert words in text
    assert "<b onclick" not in page
    assert not re.search(r"<(script|link|iframe|object|embed|base|form)\b", page)
    assert not re.search(r'(src|href|data|action)="(?!data:image/jpeg)', page)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_a_scene_shows_what_was_found_beside_what_was_drawn(page: str, made: tuple[Path, DemoData, list]):
    root, data, results = made
    section = between(text_of(page), "with their regions", "How it learned")
    stage = f"regions/{results[0].pretrained.detector}"
    samples, truth = list(Catalog(open_store(str(root)), "held-out").read(stage, "00000")), annotated_boxes(data)
    shown = images_in(page)
    for sample, found, drawn in zip(samples, shown[:16:2], shown[1:16:2], strict=False):
        boxes = truth[sample.url.rpartition("/")[2]]
        assert ", ".join(f"{name} 1.00" for _, name in boxes) in section
        for image, where in ((found, sample.regions.boxes), (drawn, [box for box, _ in boxes])):
            for box, colour in zip(where, BOX_COLOURS, strict=False):
                assert box_colour(image, box, colour) > 0.5  # names and later boxes may cover parts
    assert len(shown) == 16 + 6 + 2


def test_examples_are_the_first_right_and_the_first_wrong_ones(page: str):
    section = between(text_of(page), "Drawn scenes are easier", "Time, files").partition("VQA")[0]
    assert re.findall(r"question (\d) ([✓✗])", section) == [
        *(("0", "✓"), ("2", "✓"), ("3", "✓"), ("4", "✓"), ("1", "✗"), ("5", "✗")),
    ]
    assert re.findall(r"Without pre-training: (\w+)", section) == ["wrong", "right", "wrong", "wrong", "wrong", "wrong"]
    vqa = between(text_of(page), "Drawn scenes are easier", "Time, files").partition("VQA")[2]
    assert "question 1 ✗ score 0.30 answer region 1 (0.625) ground truth region 2" in vqa


@pytest.mark.parametrize(
    ("score", "chosen", "other"), [(1.0, GREEN, None), (0.0, RED, GREEN), (None, BOX_COLOURS[0], BOX_COLOURS[1])]
)
def test_a_chosen_box_is_green_where_it_is_right_and_red_where_it_is_wrong(made: tuple, score, chosen, other):
    root, _, results = made
    stage = f"regions/{results[0].finetuned[0].detector}"
    sample = next(Catalog(open_store(str(root)), "coco").read(stage, "00000"))
    first, second = sample.regions.boxes[:2]
    boxes = [{"name": "region 1", "box": first.tolist()}, {"name": "ground truth", "box": second.tolist()}]
    drawn = pixels(draw_answer(sample, {"answer": "region 1", "score": score, "boxes": boxes}))
    assert box_colour(drawn, first, chosen) > 0.5
    assert (box_colour(drawn, second, other or GREEN) > 0.5) == (other is not None)
    broken = dataclasses.replace(sample, image=b"no image")
    assert draw_answer(broken, {"answer": "", "score": score, "boxes": []}) is None


def test_the_regions_of_the_sample_are_drawn_beside_a_chosen_one_of_them_alone(made: tuple):
    root, _, results = made
    samples = Catalog(open_store(str(root)), "coco").read(f"regions/{results[0].finetuned[0].detector}", "00000")
    sample = next(sample for sample in samples if len(sample.regions) > 1)
    own, annotated = sample.regions.boxes[0], sample.regions.boxes[0] + [0, 0, 2, 2]
    for box, beside in ((own, True), (annotated, False)):
        row = {"answer": "region 1", "score": 1.0, "boxes": [{"name": "region 1", "box": box.tolist()}]}
        assert (draw_answer(sample, row) != draw_answer(sample, row | {"candidates": 2})) == beside
    assert draw_answer(sample, row | {"candidates": 0, "boxes": []}) is not None


@pytest.mark.parametrize(
    "box", [(223.9, 10, 224, 60), (10, 167.9, 60, 168), (0, 0, 0.1, 168), (0, 0, 224, 0.1), (0, 0, 224, 168)]
)
def test_a_sliver_at_the_edge_is_drawn(made: tuple, box: tuple):
    sample = next(Catalog(open_store(str(made[0])), "held-out").read("images", "00000"))
    drawn = np.asarray(draw_boxes(sample, [(np.array(box, np.float32), RED, "x")])).astype(int)
    assert (np.abs(drawn - RED).max(axis=-1) < 60).sum() > 50


def test_charts_hold_every_point_and_end_with_the_numbers_of_the_legend(page: str):
    charts = re.findall(r'<h3>([^<]*)</h3>\n<ul class="legend">(.*?)</ul>\n<svg(.*?)</svg>', page, flags=re.DOTALL)
    assert [title for title, _, _ in charts] == [
        *("Pre-training: losses", "Pre-training: colour and shape words filled in"),
        *("RefCOCO+: loss", "RefCOCO+: accuracy", "VQA: loss", "VQA: accuracy"),
    ]
    lines = [
        [
            (colour, len(points.split()))
            for colour, points in re.findall(r'polyline class="(\w+)" points="([^"]*)"', svg)
        ]
        for _, _, svg in charts
    ]
    assert lines[0] == [("blue", 2), ("aqua", 2), ("violet", 2)]
    assert lines[1] == lines[3] == lines[5] == [("blue", 1), ("orange", 1), ("muted", 2)]
    assert lines[4] == [("blue", 2), ("orange", 2)]
    assert re.findall(r"</i>([^<]*) <b>([^<]*)<", charts[1][1] + charts[5][1]) == [
        *(("right image", "94%"), ("another image", "14%"), ("random guess", "17%")),
        *(("with pre-training", "55%"), ("without", "33%"), ("chance", "14%")),
    ]
    assert re.findall(r"<b>([^<]*)<", charts[0][1]) == ["2.50", "2.00", "3.00"]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6)), min_size=1, max_size=9))
def test_a_chart_keeps_the_order_of_its_points_within_its_axes(points: list[tuple[int, float]]):
    drawn = chart("title", "nats", [Line("a", "blue", points), Line("none", "aqua", [])])
    (line,) = drawn["lines"]
    for (step, value), (x, y) in zip(points, line["points"], strict=True):
        assert LEFT <= x <= RIGHT
        assert TOP <= y <= BOTTOM
        for (other_step, other_value), (other_x, other_y) in zip(points, line["points"], strict=True):
            assert (step <= other_step) <= (x <= other_x)
            assert (value <= other_value) <= (y >= other_y)


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_equally_far_apart(most: float):
    found = ticks(most)
    assert 3 <= len(found) <= 6
    assert found[0] == 0 < found[-1] <= most * (1 + 1e-6)
    np.testing.assert_allclose(np.diff(found), found[1], rtol=1e-6)


def test_the_page_says_where_the_files_are_and_how_to_go_on(page: str, made: tuple[Path, DemoData, list]):
    root = made[0]
    section = between(page, "Time, files", "</html>")
    paths = re.findall(r"<code>([^<]*)</code>", section)
    assert {"data", "captions/images", "coco/images", "runs/pretrain-seed0", "runs/vqa-without-seed0"} <= set(paths)
    assert all((root / path).exists() for path in paths)
    for command in ("make ui ROOT=", "make demo ROOT=", "-m storage.catalog status "):
        assert f"{command}'{root}'" in html.unescape(section)


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
