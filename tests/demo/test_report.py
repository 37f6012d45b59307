"""The report of a demo run: a page made of real shards and hand-written runs, read as a browser would."""

import base64
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from places import PROJECT
from seeded import put_checkpoint, reseal

from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.report import annotated_boxes, main, write_report
from demo.tasks import STARTS, joint_folder
from detectors.annotated import AnnotatedDetector
from detectors.drawing import BOX_COLOURS, GREEN, RED, draw_boxes
from detectors.run import detect_shard, stage_of
from storage.catalog import OK, Catalog, Row
from storage.download import read_captions
from storage.object_store import open_store
from storage.runs import sealed_json
from storage.sample import Sample, sample_key
from vlbert.datasets.refcoco import overlap, read_expressions
from vlbert.datasets.vqa import read_questions

TINY = DemoDataSettings(
    train_scenes=3, held_out_scenes=10, broken_rows=0, text_lines=2, task_train=1, task_held_out=6, task_refs=1
)
HOSTILE = '<script>alert("caption")</script><img src=http://evil.example/x.png>'
RUNS = {
    "pretrain": "first-run",
    "refcoco-with": "second-run",
    "refcoco-without": "third-run",
    "vqa-with": "fourth-run",
    "vqa-without": "fifth-run",
}
LINE = r'<path d="([^"]+)"[^>]*?stroke: var\(--(blue|orange|aqua|violet|muted)\)'
TIMINGS = [("download", 4.25), ("pre-training", 131.5)]
CLASSES = [("red star", 0.995), ("blue ring", 0.5), ("red ring", 0.25), ("blue star", 0.125)]


class Page(HTMLParser):
    """What is asserted about a page: its words, its attributes, what it would fetch, its pictures."""

    VOID = {"meta", "img", "br", "link", "input", "hr"}

    def __init__(self, file: Path):
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.pieces, self.fetched, self.tags, self.open, self.styles = [], [], [], [], []
        self.feed(self.source)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.pieces))
        self.pictures = [url for url in self.fetched if url.startswith("data:image/jpeg")]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "poster", "action"):
                self.fetched.append(value)
            self.styles += [value] if name == "style" or (value and "url(" in value) else []

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.styles if self.open and self.open[-1] == "style" else self.pieces).append(data)

    def between(self, start: str, end: str) -> str:
        return self.text.partition(start)[2].partition(end)[0]


def pixels(picture: str) -> np.ndarray:
    raw = base64.b64decode(picture.partition("base64,")[2])
    return np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"), np.int64)


def sides_near(drawn: np.ndarray, colour: Sequence[int], box: np.ndarray) -> list[float]:
    """Which part of each side of the box (in pixels of a 224 x 168 picture) has about this colour: 2 pixels deep."""
    x1, y1, x2, y2 = (round(float(number) * 480 / 224) for number in box)
    x, y = slice(x1 + 6, x2 - 6), slice(y1 + 6, y2 - 6)
    strips = (drawn[y, x1 + 1 : x1 + 3], drawn[y, x2 - 2 : x2], drawn[y1 + 1 : y1 + 3, x], drawn[y2 - 2 : y2, x])
    return [float((np.abs(strip - colour).max(axis=-1) < 60).mean()) for strip in strips]


def commit_images(
    root: Path, dataset: str, rows: Sequence[tuple[str, str, bytes | None]], failed: Sequence[Row]
) -> None:
    """A shard of (caption, url, JPEG), then the rows that failed."""
    samples = [
        Sample(sample_key(url, caption), image, caption, url, *Image.open(io.BytesIO(image)).size, "ab")
        for caption, url, image in rows
    ]
    ok = [Row(i, sample.key, OK, url=sample.url) for i, sample in enumerate(samples)]
    assert Catalog(open_store(str(root)), dataset).commit("images", "00000", samples, [*ok, *failed], {"source": {}})


def write_run(root: Path, run: str, lines: Sequence[dict], predictions: Sequence[dict], steps: int, stage: str) -> None:
    """What vlbert.train leaves of a run, as far as the report reads it."""
    checkpoint = root / "runs" / run / "step-0000040"
    config = json.dumps({"recipe": {"steps": steps}}).encode()
    state = {"held_out": {"stage": stage}}
    put_checkpoint(open_store(str(root)), f"runs/{run}/step-0000040", state, {"config.json": config})
    for name, rows in (("metrics.jsonl", lines), ("predictions.jsonl", predictions)):
        (checkpoint.parent / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def training(step: int, **losses: float) -> dict:
    return {"kind": "training", "step": step, "learning_rate": 0.1, "samples_per_second": 9.0} | losses


def asked(root: Path, demo_data: DemoData, stage: str, choose: Sequence[str]) -> list[dict]:
    """Predictions for the val expressions of the demo data, each `right` or `wrong`, as vlbert writes them."""
    samples = {Path(s.url).name: s for s in Catalog(open_store(str(root)), "coco").read(stage, "00000")}
    rows = []
    for (file, (expression,)), how in zip(read_expressions(demo_data.refcoco)["val"].items(), choose, strict=False):
        sample = samples[file]
        overlaps = overlap("plain", sample.regions.boxes, np.array(expression.box))
        region = int(overlaps.argmax() if how == "right" else overlaps.argmin())
        boxes = {f"region {1 + region}": sample.regions.boxes[region].tolist(), "truth": list(expression.box)}
        rows.append(
            {
                "key": sample.key,
                "asked": expression.text,
                "said": f"region {1 + region}",
                "probability": 0.5,
                "truth": "the box",
                "score": float(how == "right"),
                "boxes": [{"name": name, "box": box} for name, box in boxes.items()],
                "sentence_id": expression.sentence_id,
                "region": region,
                "iou": float(overlaps[region]),
                "candidates": len(sample.regions),
            }
        )
    return rows


def answered(root: Path, demo_data: DemoData, stage: str, choose: Sequence[float]) -> list[dict]:
    """Predictions for the first val questions of the demo data with these scores, as vlbert writes them."""
    samples = {Path(s.url).name: s for s in Catalog(open_store(str(root)), "coco").read(stage, "00000")}
    return [
        {
            "key": samples[question.image].key,
            "asked": question.text,
            "said": question.truth if score >= 0.5 else "purple",
            "probability": 0.625,
            "truth": question.truth,
            "score": score,
            "boxes": [],
            "question_id": question.question_id,
        }
        for question, score in zip(read_questions(demo_data.vqa, "val2014"), choose, strict=False)
    ]


def monitored(right: float, other: float) -> dict:
    accuracies = {"words": (0.8125, 0.6875), "monitored": (right, other), "regions": (0.5625, 0.0625)}
    return {
        f"{name}_accuracy{suffix}": value
        for name, values in accuracies.items()
        for suffix, value in zip(("", "_shuffled"), values, strict=True)
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoData]:
    """A root with all shards and all runs; copy it before changing anything."""
    root = tmp_path_factory.mktemp("demo") / "root"
    demo_data = draw_demo_data(root / "data", TINY)
    named = {
        row.url.rpartition("/")[2]: row
        for tsv in (demo_data.train_tsv, demo_data.held_out_tsv)
        for row in read_captions(tsv)
    }

    def rows(tsv: Path) -> list[tuple[str, str, bytes]]:
        return [
            (r.caption, r.url, (demo_data.images / r.url.rpartition("/")[2]).read_bytes()) for r in read_captions(tsv)
        ]

    assert len(named) == 13
    dead = "http://127.0.0.1:8791/broken/404/000099.jpg"
    failed = [
        Row(10, "a" * 20, "http_404", "HTTP 404 Not Found", dead),
        Row(11, "b" * 20, "http_404", "HTTP 404 Not Found", dead + "?second"),
        Row(12, "c" * 20, "bad_url", '<b onclick="x()">', "javascript:alert(1)//<i>"),
    ]
    commit_images(root, "captions", rows(demo_data.train_tsv), failed)
    held_out = rows(demo_data.held_out_tsv)
    commit_images(root, "held-out", [(HOSTILE, *held_out[0][1:]), *held_out[1:]], [])
    pictures = [("", file.name, file.read_bytes()) for file in sorted(demo_data.task_images.iterdir())]
    commit_images(root, "coco", pictures, [])
    store = open_store(str(root))
    scenes, referred = AnnotatedDetector(demo_data.annotations), AnnotatedDetector(demo_data.refcoco_instances)
    for dataset, detector in (("captions", scenes), ("held-out", scenes), ("coco", referred)):
        assert detect_shard(Catalog(store, dataset), "00000", detector)

    losses = [training(s, loss_words=5 / s, loss_text_words=6 / s, loss_regions=4 / s) for s in (10, 20, 30, 40)]
    lines = [
        *losses,
        {"kind": "validation", "step": 20} | monitored(0.25, 0.1875),
        {"kind": "validation", "step": 40} | monitored(0.9375, 0.1406),
    ]
    counts = [{"key": str(i), "words": 7, "monitored": 3, "regions": 1} for i in range(10)]
    write_run(root, "first-run", lines, counts, 40, stage_of(scenes))
    stage = stage_of(referred)
    for run, accuracy, how in (
        ("second-run", 0.8125, ["right", "wrong", "right", "right", "right", "wrong"]),
        ("third-run", 0.4219, ["wrong", "wrong", "right", "wrong", "wrong", "wrong"]),
    ):
        measured = {"kind": "validation", "step": 40, "accuracy_published": accuracy, "chance": 0.2656}
        lines = [*(training(s, loss_regions=0.7 / s) for s in (10, 20, 40)), measured]
        write_run(root, run, lines, asked(root, demo_data, stage, how), 40, stage)
    for run, accuracy, colours, scores in (
        ("fourth-run", 0.5469, 0.75, [1.0, 0.3]),
        ("fifth-run", 0.3281, 0.25, [0, 0]),
    ):
        kinds = {"accuracy/what color is the": colours, "accuracy/how many": 0.4375}
        measured = {"kind": "validation", "step": 40, "accuracy": accuracy, "chance": 0.1406} | kinds
        lines = [*(training(s, loss_answers=5 / s) for s in (10, 20, 30, 40)), measured]
        write_run(root, run, lines, answered(root, demo_data, stage, scores), 40, stage)
    measured = {
        "weights": "detector.safetensors",
        "scenes": 10,
        "metrics": {"map50": 0.8437, "map50_weighted": 0.8281, "proposal_recall": 0.9688},
        "classes": [{"class": name, "average_precision": value} for name, value in CLASSES],
    }
    (root / "detector.json").write_text(json.dumps(measured))
    return root, demo_data


@pytest.fixture
def root(made: tuple[Path, DemoData], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "root"))


@pytest.fixture
def demo_data(root: Path) -> DemoData:
    return DemoData(root / "data", TINY, 8791)


@pytest.fixture(scope="module")
def page(made: tuple[Path, DemoData]) -> Page:
    return Page(write_report(*made, TIMINGS, RUNS))


def test_the_numbers_of_the_page_are_those_of_the_files(page: Page):
    look = page.between("Does it look?", "Does that help?")
    assert re.findall(r"(right picture|another’s picture|random guess) (\d+)\s%", look) == [
        ("right picture", "94"),
        ("another’s picture", "14"),
        ("random guess", "17"),
    ]
    assert "30 hidden words, after 40 steps" in look
    helped = page.between("Does that help?", "Pictures downloaded")
    assert re.findall(r"(\d+)\s%", helped.partition("VQA")[0]) == ["81", "42", "27"]
    assert re.findall(r"(\d+)\s%", helped.partition("VQA")[2]) == ["55", "33", "14"]
    assert "3 of 6 rows of the caption list" in page.text
    assert page.between("Time of the last run", "Draw").startswith(" 136 seconds")
    assert "4.2" in page.between("Seconds, places", "where, below")
    assert "131.5" in page.between("Seconds, places", "where, below")
    table = page.between("difference", "What the model got")
    assert re.findall(r"[+-]?\d+\.\d", table) == [
        *("93.8", "14.1", "+79.7"),
        *("81.2", "68.8", "+12.5"),
        *("56.2", "6.2", "+50.0"),
    ]
    got = page.between("the paper, on photographs", "Drawn scenes are another task")
    assert re.findall(r"(\d+\.\d)\s%", got) == [
        *("81.2", "42.2", "26.6"),
        *("54.7", "32.8", "14.1"),
        *("43.8", "43.8"),
        *("75.0", "25.0"),
    ]
    assert "val 79.88 base" in got.partition("VQA")[0]
    assert "test-dev2015 71.16 base" in got.partition("VQA")[2]
    assert "6 held-out questions" in helped
    assert "0.84 mAP@0.5 Of the detector on 10 held-out scenes, 4 classes." in page.text
    table = page.between("best and worst classes", "How it learned")
    assert "detector.safetensors 0.844 0.828 96.9" in table
    ranked = [*CLASSES[:3], *CLASSES[1:]]
    assert ", ".join(f"{name} {value:.2f}" for name, value in ranked) in table
    assert "not there yet" not in page.text


def test_the_page_asks_nobody_for_anything(page: Page):
    assert page.fetched
    assert all(url.startswith(("data:image/", "#")) for url in page.fetched)
    addresses = re.findall(r"url\(([^)]*)\)", " ".join(page.styles))
    assert all(address.startswith("#") for address in addresses)
    assert "@import" not in page.source
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "default-src 'none'" in page.source


def test_every_reference_inside_the_page_leads_to_one_place(page: Page):
    ids = re.findall(r'\sid="([^"]+)"', page.source)
    assert len(ids) == len(set(ids))
    wanted = {url[1:] for url in page.fetched if url.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", page.source))
    assert wanted
    assert wanted <= set(ids)


def test_every_status_has_its_count_its_meaning_and_its_first_row(page: Page):
    rows = page.between("What was downloaded", "Pictures the model never")
    assert "captions to learn from: 3 of 6 rows stored" in rows
    assert "held-out to measure on: 10 of 10 rows stored" in rows
    order = re.findall(r"(ok|http_404|bad_url) (\d+) ", rows)
    assert order[:3] == [("ok", "3"), ("http_404", "2"), ("bad_url", "1")]
    assert "HTTP 404 Not Found http://127.0.0.1:8791/broken/404/000099.jpg HTTP 404 Not Found" in rows
    assert "?second" not in rows


def test_hostile_strings_stand_on_the_page_as_words(page: Page):
    assert HOSTILE in page.text
    assert "javascript:alert(1)//<i>" in page.text
    assert '<b onclick="x()">' in page.text
    assert "<script" not in page.source
    assert "<b onclick" not in page.source
    assert "evil.example" not in " ".join(page.fetched)


def test_scenes_show_their_boxes_names_and_where_these_come_from(page: Page, made: tuple[Path, DemoData]):
    root, demo_data = made
    section = page.between("with their regions", "How it learned")
    assert "ground truth from the annotation file" in section
    catalog = Catalog(open_store(str(root)), "held-out")
    (folder,) = (root / "held-out" / "regions").iterdir()
    samples = list(catalog.read(f"regions/{folder.name}", "00000"))
    coco = json.loads(demo_data.annotations.read_text())
    names = {c["id"]: c["name"] for c in coco["categories"]}
    first = [names[a["category_id"]] for a in coco["annotations"] if a["image_id"] == TINY.train_scenes]
    assert f"{len(first)} region" in section.partition(HOSTILE)[2][:20]
    assert section.partition(HOSTILE)[2].partition(": ")[2].startswith(", ".join(first))
    assert len(page.pictures) == 8 + 6 + 2
    alone = 0
    for sample, picture in zip(samples, page.pictures[:8], strict=False):
        drawn = pixels(picture)
        for box, colour in zip(sample.regions.boxes, BOX_COLOURS, strict=False):
            sides = sides_near(drawn, colour, box)
            assert sum(sides) / 4 > 0.5  # names and later boxes may cover parts
            if len(sample.regions) == 1:
                alone += 1
                assert min(sides) > 0.9
    assert alone


def test_examples_mark_what_was_chosen_and_what_is_meant(page: Page, made: tuple[Path, DemoData]):
    root, demo_data = made
    section = page.between("not picked by hand", "The first right and")
    assert re.findall(r"[✓✗] (\w+)", section) == ["right"] * 4 + ["wrong"] * 2
    assert re.findall(r"Without pre-training: (\w+)", section) == ["wrong", "right", "wrong", "wrong", "wrong", "wrong"]
    (stage,) = (root / "coco" / "regions").iterdir()
    how = ["right", "wrong", "right", "right", "right", "wrong"]
    rows = asked(root, demo_data, f"regions/{stage.name}", how)
    rows = [row for row in rows if row["score"]] + [row for row in rows if not row["score"]]
    samples = {s.key: s for s in Catalog(open_store(str(root)), "coco").read(f"regions/{stage.name}", "00000")}
    meant = {e.sentence_id: e.box for es in read_expressions(demo_data.refcoco)["val"].values() for e in es}
    for row, picture in zip(rows, page.pictures[8:14], strict=True):
        assert f"“{row['asked']}”" in section
        drawn = pixels(picture)
        chosen = samples[row["key"]].regions.boxes[row["region"]]
        boxes = [(meant[row["sentence_id"]], GREEN)] + ([] if row["score"] else [(chosen, RED)])
        for box, colour in boxes:
            assert sum(sides_near(drawn, colour, box)) / 4 > 0.5, (row, colour)


def test_examples_of_questions_say_the_answer_and_where_it_is_wrong_the_right_one(
    page: Page, made: tuple[Path, DemoData]
):
    root, demo_data = made
    section = page.between("not picked by hand", "Seconds, places").partition("not picked by hand")[2]
    (stage,) = (root / "coco" / "regions").iterdir()
    right, wrong = answered(root, demo_data, f"regions/{stage.name}", [1.0, 0.3])
    assert f"✓ right “{right['asked']}” said: {right['said']} (62" in section
    assert f"✗ wrong “{wrong['asked']}” said: purple (62" in section
    assert f"right: {wrong['truth']}. Without pre-training: wrong" in section
    assert f"right: {right['truth']}" not in section.partition("✗")[0]


def test_charts_hold_every_point_and_their_colours_follow_the_theme(page: Page):
    assert page.tags.count("svg") == 6
    charts = re.findall(r"<svg.*?</svg>", page.source, flags=re.DOTALL)
    points = [
        [(path.count("L") + 1, colour) for path, colour in re.findall(LINE, chart) if path.count("L")]
        for chart in charts
    ]
    assert points == [
        [(4, "blue"), (4, "aqua"), (4, "violet")],
        [(2, "blue"), (2, "orange"), (2, "muted")],
        [(3, "blue"), (3, "orange")],
        [(2, "muted")],
        [(4, "blue"), (4, "orange")],
        [(2, "muted")],
    ]
    assert not re.search(r"#0[1-6]0[1-6]0[1-6]", page.source)
    for unit in ("optimizer steps", "nats per masked word or region", "% right, held out", "nats"):
        assert unit in page.text
    assert re.findall(
        r"(right picture|another picture|random guess) (\d+%)", page.between("words filled in", "RefCOCO+: loss")
    ) == [
        ("right picture", "94%"),
        ("another picture", "14%"),
        ("random guess", "17%"),
    ]


def test_places_are_below_the_folder_of_the_page_and_exist(page: Page, made: tuple[Path, DemoData]):
    table = page.between("where, below the folder of this page", "How to go on")
    (stage,) = (made[0] / "held-out" / "regions").iterdir()
    for path in ("data", "captions/images", f"held-out/regions/{stage.name}", "runs/second-run", "timings.json"):
        assert f" {path} " in table
    assert str(made[0]) not in page.source.partition("How to go on")[0]


def test_a_root_without_anything_says_so_in_every_part(tmp_path: Path):
    page = Page(write_report(tmp_path, DemoData(tmp_path / "data", TINY, 8791), [], {}))
    assert page.tags.count("img") == page.tags.count("svg") == 0
    for words in (
        "no run is named for pre-training",
        "no run is named for RefCOCO+ with pre-training",
        "no run is named for VQA without",
        "no image shard of captions is committed",
        "no image shard of held-out is committed",
        "no fine-tuning run has validated yet",
        "the detector has not been measured (no detector.json)",
        "no stage was timed",
    ):
        assert f"not there yet: {words}" in page.text
    section = page.between("with their regions", "How it learned")
    where = tmp_path / "held-out" / "regions"
    assert f"not there yet: {where} holds no region shards; run the detection stage first" in section


def test_a_missing_run_is_named_and_leaves_the_rest_of_the_page(root: Path, demo_data: DemoData):
    shutil.rmtree(root / "runs" / "third-run")
    page = Page(write_report(root, demo_data, TIMINGS, RUNS))
    assert "not there yet: run third-run (RefCOCO+ without) has written no metrics" in page.text
    assert re.findall(r"(\d+)\s%", page.between("Does that help?", "VQA")) == ["81", "27"]
    assert len(page.pictures) == 16
    assert "Without pre-training:" not in page.between("not picked by hand", "The first right and")
    shutil.rmtree(root / "runs" / "second-run")
    page = Page(write_report(root, demo_data, TIMINGS, RUNS))
    assert len(page.pictures) == 8 + 2
    assert page.tags.count("svg") == 4
    assert "not there yet: run second-run (RefCOCO+ with pre-training) has written no metrics" in page.text


def test_a_run_that_is_not_finished_shows_how_far_it_is(root: Path, demo_data: DemoData):
    config = root / "runs" / "first-run" / "step-0000040" / "config.json"
    config.write_text(json.dumps({"recipe": {"steps": 1300}}))
    reseal(config.parent)
    metrics = root / "runs" / "second-run" / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if "validation" not in line))
    (root / "runs" / "second-run" / "predictions.jsonl").unlink()
    page = Page(write_report(root, demo_data, TIMINGS, RUNS))
    assert "not finished: step 40 of 1,300" in page.between("Does it look?", "Does that help?")
    assert "not there yet: run second-run has not validated yet" in page.text
    assert "not there yet: run second-run has written no predictions" in page.text
    assert "with pre-training 0.02" in page.between("RefCOCO+: loss", "RefCOCO+: accuracy")


def test_predictions_about_pictures_that_are_not_there_are_not_drawn(root: Path, demo_data: DemoData):
    file = root / "runs" / "second-run" / "predictions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | ({} if i else {"key": "0" * 20})) + "\n" for i, row in enumerate(rows)))
    page = Page(write_report(root, demo_data, TIMINGS, RUNS))
    assert "the run belongs to other data" in page.between("Drawn scenes are another task", "Seconds, places")
    assert len(page.pictures) == 8 + 2


def test_regions_of_random_weights_are_said_to_mean_nothing(root: Path, demo_data: DemoData):
    catalog = Catalog(open_store(str(root)), "held-out")
    known = AnnotatedDetector(demo_data.annotations)

    class Untrained:
        id = "0123456789ab"
        metadata = {"backend": "faster_rcnn", "random_init": True}

        def detect(self, samples: Sequence[Sample]) -> list:
            return [dataclasses.replace(regions, detector=self.id) for regions in known.detect(samples)]

    assert detect_shard(catalog, "00000", Untrained())
    state = root / "runs" / "first-run" / "step-0000040" / "state.json"
    held_out = {"held_out": {"stage": "regions/0123456789ab"}}
    state.write_bytes(sealed_json(json.loads(state.read_text()) | held_out))
    page = Page(write_report(root, demo_data, TIMINGS, RUNS))
    assert "These regions mean nothing." in page.between("with their regions", "How it learned")
    assert "held-out/regions/0123456789ab" in page.text
    shutil.rmtree(root / "runs" / "first-run")  # now nothing says which of the two detectors was used
    page = Page(write_report(root, demo_data, TIMINGS, RUNS))
    section = page.between("with their regions", "How it learned")
    both = ", ".join(sorted([Untrained.id, known.id]))
    where = root / "held-out" / "regions"
    assert f"not there yet: {where} holds several detectors, set data.detector to one of {both}" in section
    assert len(page.pictures) == 6 + 2


@pytest.mark.parametrize("classes", [None, ["a cat", "a dog"]])
def test_regions_are_named_by_the_detector_that_found_them(root: Path, demo_data: DemoData, classes: list[str] | None):
    known = AnnotatedDetector(demo_data.annotations)

    class Other:
        id = "0123456789ab"
        metadata = {"backend": "faster_rcnn", "random_init": False, "selection": {"minimum": 3}, "boxes": "proposals"}
        metadata |= {"classes": classes} if classes else {}

        def detect(self, samples: Sequence[Sample]) -> list:
            first = [regions.take(np.array([0])) for regions in known.detect(samples)]
            return [dataclasses.replace(regions, detector=self.id, labels=np.array([2], np.int32)) for regions in first]

    assert detect_shard(Catalog(open_store(str(root)), "held-out"), "00000", Other())
    state = root / "runs" / "first-run" / "step-0000040" / "state.json"
    held_out = {"held_out": {"stage": "regions/0123456789ab"}}
    state.write_bytes(sealed_json(json.loads(state.read_text()) | held_out))
    page = Page(write_report(root, demo_data, TIMINGS, RUNS))
    section = page.between("with their regions", "How it learned")
    assert section.count(f"1 region: {'a dog' if classes else 'class 2'} 1.00") == 8
    assert "found by a trained network, at least 3 a picture; they are its proposals" in section
    assert page.tags.count("img") == len(page.pictures) == 2 * 8 + 6 + 2  # found and drawn
    drawn = annotated_boxes(demo_data)
    samples = list(Catalog(open_store(str(root)), "held-out").read("regions/0123456789ab", "00000"))
    several = 0
    for sample, found, truth in zip(samples, page.pictures[:16:2], page.pictures[1:16:2], strict=False):
        boxes = [box for box, _ in drawn[sample.url.rpartition("/")[2]]]
        for picture, shown in ((found, boxes[:1]), (truth, boxes)):
            for box, colour in zip(shown, BOX_COLOURS, strict=False):
                assert sum(sides_near(pixels(picture), colour, box)) / 4 > 0.5
        several += len(boxes) > 1
        assert (found == truth) is False
    assert several


def test_runs_with_other_seeds_are_listed_with_their_means(root: Path, demo_data: DemoData):
    names = {role: f"{run}-seed1" for role, run in RUNS.items()}
    for role, run in RUNS.items():
        shutil.copytree(root / "runs" / run, root / "runs" / names[role])
    file = root / "runs" / names["refcoco-with"] / "metrics.jsonl"
    file.write_text(file.read_text().replace("0.8125", "0.6120"))
    page = Page(write_report(root, demo_data, TIMINGS, RUNS, [names]))
    table = page.between("trained again with other seeds", "Drawn scenes are another task")
    assert re.findall(r"(first-run|first-run-seed1|mean) \+(\d+\.\d) points ([^a-z]*\d)", table.replace(" %", "")) == [
        ("first-run", "79.7", "81.2, 42.2, 26.6 54.7, 32.8, 14.1"),
        ("first-run-seed1", "79.7", "61.2, 42.2, 26.6 54.7, 32.8, 14.1"),
        ("mean", "79.7", "71.2, 42.2, 26.6 54.7, 32.8, 14.1"),
    ]
    assert "trained again" not in Page(write_report(root, demo_data, TIMINGS, RUNS)).text
    shutil.rmtree(root / "runs" / names["vqa-without"])
    page = Page(write_report(root, demo_data, TIMINGS, RUNS, [names]))
    assert "not there yet: run fifth-run-seed1 (VQA without) has written no metrics" in page.text


def test_vcrs_answers_and_rationales_are_joined_from_their_evaluation(root: Path, demo_data: DemoData):
    names = {f"vcr-{kind}-{start}": f"vcr-{kind}-{start}" for kind in ("answers", "rationales") for start in STARTS}
    page = Page(write_report(root, demo_data, TIMINGS, RUNS | names))
    assert "not there yet: answers and rationales were not evaluated together" in page.text
    assert "no run" not in page.between("VCR, Q→A", "Seconds, places").partition("VCR, QA→R")[0][:20]
    for start, value in (("with", 0.4062), ("without", 0.0781)):
        folder = joint_folder(root, f"vcr-answers-{start}")
        folder.mkdir(parents=True)
        metrics = {"joint_accuracy": value, "joint_chance": 0.0625}
        (folder / "metrics.json").write_text(json.dumps({"metrics": metrics}))
    page = Page(write_report(root, demo_data, TIMINGS, RUNS | names))
    table = page.between("answer and rationale right", "Drawn scenes are another task")
    assert re.findall(r"\d+\.\d", table) == ["40.6", "7.8", "6.2"]
    assert "run vcr-answers-with (VCR, Q→A with pre-training) has written no metrics" in page.text


def test_two_expressions_of_one_picture_are_two_examples(root: Path, demo_data: DemoData):
    file = root / "runs" / "second-run" / "predictions.jsonl"
    first = json.loads(file.read_text().splitlines()[0])
    (stage,) = (root / "coco" / "regions").iterdir()
    samples = Catalog(open_store(str(root)), "coco").read(f"regions/{stage.name}", "00000")
    (boxes,) = (sample.regions.boxes for sample in samples if sample.key == first["key"])
    rows = [
        first | {"asked": f"number {i}", "sentence_id": i, "boxes": [{"name": first["said"], "box": box.tolist()}]}
        for i, box in enumerate(boxes[:2])
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report(root, demo_data, TIMINGS, RUNS))
    section = page.between("not picked by hand", "The first right and")
    assert re.findall("“(.*?)”", section) == ["number 0", "number 1"]
    shown = page.pictures[8:10]
    assert len(set(shown)) == 2  # the same picture, another box
    for picture, box in zip(shown, boxes, strict=False):
        assert sum(sides_near(pixels(picture), GREEN, box)) / 4 > 0.5


@pytest.mark.parametrize(
    "box", [(223.9, 10, 224, 60), (10, 167.9, 60, 168), (0, 0, 0.1, 168), (0, 0, 224, 0.1), (0, 0, 224, 168)]
)
def test_a_sliver_at_the_edge_is_drawn(made: tuple[Path, DemoData], box: tuple):
    catalog = Catalog(open_store(str(made[0])), "held-out")
    sample = next(catalog.read("images", "00000"))
    drawn = np.asarray(draw_boxes(sample, [(np.array(box, np.float32), RED, "x")])).astype(int)
    assert drawn.shape == (360, 480, 3)
    assert (np.abs(drawn - RED).max(axis=-1) < 60).sum() > 50


def test_the_commands_on_the_page_can_be_typed_as_they_stand(tmp_path: Path):
    root = tmp_path / "my root"
    root.mkdir()
    commands = Page(write_report(root, DemoData(root / "data", TINY, 8791), [], {})).between(
        "How to go on", "What this"
    )
    for command in ("make ui ROOT=", "make demo ROOT=", "-m storage.catalog status ", "-m demo.report "):
        assert f"{command}'{root}'" in commands


def test_a_damaged_shard_stops_the_report(root: Path, demo_data: DemoData):
    (tar,) = (root / "held-out" / "regions").glob("*/*.tar")
    tar.write_bytes(tar.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is damaged"):
        write_report(root, demo_data, TIMINGS, RUNS)


@pytest.mark.slow
def test_the_command_writes_the_same_page_again(root: Path, demo_data: DemoData):
    file = write_report(root, demo_data, TIMINGS, RUNS)
    before = file.read_bytes()
    file.unlink()
    run = subprocess.run([sys.executable, "-m", "demo.report", str(root)], capture_output=True, text=True, cwd=PROJECT)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == f"wrote {file}\n"
    assert file.read_bytes() == before
    assert json.loads((root / "timings.json").read_text())["runs"] == RUNS


def test_the_command_does_without_timings_but_not_without_a_world(root: Path, capsys: pytest.CaptureFixture):
    (root / "timings.json").unlink(missing_ok=True)
    main([str(root)])
    assert "which names the runs" in capsys.readouterr().err
    assert not (root / "timings.json").exists()
    assert "no run is named for pre-training" in Page(root / "report.html").text
    (root / "data" / "demo.json").unlink()
    with pytest.raises(SystemExit, match="holds no demo data"):
        main([str(root)])


def test_runs_that_the_page_has_no_place_for_are_refused(root: Path, demo_data: DemoData):
    with pytest.raises(
        ValueError, match="runs has without-pretraining; it takes pretrain, refcoco-with, refcoco-without"
    ):
        write_report(root, demo_data, TIMINGS, RUNS | {"without-pretraining": "x"})
