"""Write ROOT/report.html: the report of a demo run, as a single page without external files."""

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from demo.data import DemoData
from demo.deployments import make_detector_settings
from demo.scenes import COLOURS, SHAPES
from demo.tasks import DEMO_TASKS, STARTS, collect_numbers, joint_folder, mean, run_name, runs_by_role
from detectors.drawing import BOX_COLOURS, data_uri, draw_boxes
from detectors.faster_rcnn import FasterRCNN
from detectors.ground_truth import read_ground_truth
from detectors.recipes import detector_demo
from detectors.validate import validate
from detectors.weights.files import load_weights, read_config
from storage.catalog import Catalog
from storage.collect.statuses import Status
from storage.manifests import OK
from storage.object_store import ObjectStore, open_store
from storage.sample import Regions, Sample
from training import distributed
from training.curves import Lines, draw_panels
from training.log import read_metrics
from training.operators import nms
from vlbert.evaluation.results_page import draw_answer, render

if TYPE_CHECKING:
    from flows.pipeline import PipelineResult

DATASETS = {"captions": "for training", "held-out": "for validation", "coco": "images of the tasks"}
NAMES = {"with": "with pre-training", "without": "without"}  # of STARTS

SCENES, MAX_BOXES, MAX_NAMES = 8, 12, 6  # held-out scenes shown, and boxes and names drawn in each
RIGHT_SHOWN, WRONG_SHOWN = 5, 3  # maximum number of examples shown of a task
RANDOM_GUESS = (1 / len(COLOURS) + 1 / len(SHAPES)) / 2  # accuracy; captions name colours and shapes equally often


def evaluate_detector(data: DemoData, weights: Path) -> dict[str, Any]:
    """Measure a detector on the held-out scenes. Return its metrics, and the average precision of each class."""
    recipe, training = detector_demo(), make_detector_settings(data)
    images = {name: getattr(training, name) for name in ("annotations", "images", "held_out_last")}
    recipe = replace(recipe, network=read_config(weights), data=replace(recipe.data, **images))
    network = FasterRCNN(recipe.network)
    load_weights(network, weights)
    truth, world = read_ground_truth(recipe.data), distributed.World(0, 1, torch.device("cpu"))
    metrics, classes = validate(network, recipe, truth.held_out, truth.classes, world)
    return {"weights": weights.name, "scenes": len(truth.held_out), "metrics": metrics, "classes": classes}


def write_report(root: Path, data: DemoData, detector: dict[str, Any], pipelines: "Sequence[PipelineResult]") -> Path:
    """Write ROOT/report.html, and return its path. `detector` is the result of evaluate_detector.

    `pipelines` has one result per seed. The first one is shown in full; the others add only their numbers.
    """
    store, pipeline, runs = open_store(str(root), write=False), pipelines[0], runs_by_role(pipelines[0])
    seeds = [collect_numbers(each) for each in pipelines]
    shown = {name: task for name, task in DEMO_TASKS.items() if name in seeds[0]}
    log = {
        role: {kind: read_metrics(store, run, kind) for kind in ("training", "validation")}
        for role, run in runs.items()
    }
    predictions = {role: read_predictions(store, run) for role, run in runs.items()}
    values = {
        "data": data.settings,
        "datasets": {name: (purpose, count_statuses(store, name)) for name, purpose in DATASETS.items()},
        "meanings": {status: status.meaning for status in Status},
        "detector": detector,
        "grounding": make_grounding_rows(pipeline.pretrained.metrics, predictions["pretrain"]),
        "random_guess": RANDOM_GUESS,
        "steps": log["pretrain"]["validation"][-1]["step"],
        "scenes": draw_held_out_scenes(store, f"regions/{pipeline.pretrained.detector}"),
        "max_boxes": MAX_BOXES,
        "curves": {title: draw_panels({"": lines}, width=4.6) for title, lines in select_curves(shown, log).items()},
        "tasks": [
            {
                "name": name,
                "settings": task,
                "count": len(predictions[run_name(name, "with")]),
                "examples": draw_examples(store, pipeline, name, predictions),
            }
            for name, task in shown.items()
        ],
        "starts": NAMES,
        "numbers": seeds[0],
        "joint": read_joint_accuracies(root, pipelines) if "vcr-answers" in shown else [],
        "seeds": [*seeds, mean(seeds)] if len(seeds) > 1 else [],
        "root": shlex.quote(str(root)),
    }
    page = render(Path(__file__).parent / "report.html.j2", values, percent=format_percent, whole="{:,}".format)
    file = root / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


def read_predictions(store: ObjectStore, run: str) -> list[dict]:
    """Return the predictions of the run's last validation, one dict per example."""
    return [json.loads(row) for row in store.get(f"runs/{run}/predictions.jsonl").decode().splitlines()]


def count_statuses(store: ObjectStore, dataset: str) -> dict[str, dict]:
    """Return, for each status, a dataset's number of image rows, and the first one's URL and detail. `ok` is first."""
    catalog, entries = Catalog(store, dataset), {}
    for shard in catalog.shards("images"):
        for row in catalog.manifest("images", shard).table.select(["status", "detail", "url"]).to_pylist():
            entries.setdefault(row["status"], row | {"count": 0})["count"] += 1
    return dict(sorted(entries.items(), key=lambda item: (item[0] != OK, -item[1]["count"], item[0])))


def make_grounding_rows(metrics: dict[str, float], predictions: Sequence[dict]) -> list[dict]:
    """Return rows with the number `n` of masked words or regions, and the accuracy with the right and another image."""
    return [
        {
            "title": title,
            "right": metrics[f"{name}_accuracy"],
            "other": metrics[f"{name}_accuracy_shuffled"],
            "n": sum(row.get(name, 0) for row in predictions),
        }
        for name, title in (("monitored", "colour and shape words"), ("words", "all words"), ("regions", "regions"))
    ]


def read_joint_accuracies(root: Path, pipelines: "Sequence[PipelineResult]") -> list[dict[str, float]]:
    """Return the accuracy at VCR's Q→AR (answer and rationale both right) by start, and its chance level, per seed."""
    rows = []
    for runs in map(runs_by_role, pipelines):
        rows.append({})
        for start in STARTS:
            file = joint_folder(root, runs[run_name("vcr-answers", start)]) / "metrics.json"
            metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
            rows[-1] |= {start: metrics["joint_accuracy"], "chance": metrics["joint_chance"]}
    return rows


# --- scenes and examples ----------------------------------------------------------------------------------------------


def draw_held_out_scenes(store: ObjectStore, stage: str) -> list[dict]:
    """Draw the first held-out scenes with their detections: boxes in cycling colours, and names for the first few."""
    catalog, scenes = Catalog(store, "held-out"), []
    names = catalog.manifest(stage, catalog.shards(stage)[0]).meta["config"]["classes"]
    for sample in islice(read_samples(catalog, stage), SCENES):
        regions = detections(sample.require_regions())
        labels = [names[label - 1] for label in regions.labels_background_first().tolist()]
        boxes = [
            (box, BOX_COLOURS[i % len(BOX_COLOURS)], labels[i] if i < MAX_NAMES else "")
            for i, box in enumerate(regions.boxes[:MAX_BOXES])
        ]
        scores = zip(labels, regions.scores.tolist(), strict=True)
        scenes.append(
            {
                "image": data_uri(draw_boxes(sample, boxes)),
                "caption": sample.caption,
                "labels": [f"{label} {score:.2f}" for label, score in scores],
            }
        )
    return scenes


def detections(regions: Regions) -> Regions:
    """Return the regions with a score of 0.5 or more, and of those that overlap by half, only the most probable."""
    boxes, scores = torch.tensor(regions.boxes), torch.tensor(regions.scores)
    kept = [int(number) for number in nms(boxes, scores, 0.5) if scores[number] >= 0.5]
    fields = ("boxes", "scores", "labels", "class_probs")
    chosen = {name: value[kept] for name in fields if (value := getattr(regions, name)) is not None}
    return replace(regions, attributes=None, features=None, **chosen)


def draw_examples(
    store: ObjectStore, pipeline: "PipelineResult", task: str, predictions: dict[str, list[dict]]
) -> list[dict]:
    """Draw the first right and the first wrong answers of the task's run with pre-training."""
    rows = predictions[run_name(task, "with")]
    right, wrong = [row for row in rows if row["score"] >= 0.5], [row for row in rows if row["score"] < 0.5]
    chosen = right[:RIGHT_SHOWN] + wrong[:WRONG_SHOWN]
    detectors = {trained.run: trained.detector for trained in pipeline.finetuned}
    detector = detectors[runs_by_role(pipeline)[run_name(task, "with")]]
    keys = {row["key"] for row in chosen}
    stored = read_samples(Catalog(store, "coco"), f"regions/{detector}")
    samples = {sample.key: sample for sample in stored if sample.key in keys}
    return [{"row": row, "image": draw_answer(samples[row["key"]], row)} for row in chosen]


def read_samples(catalog: Catalog, stage: str) -> Iterator[Sample]:
    for shard in catalog.shards(stage):
        yield from catalog.read(stage, shard)


# --- curves -----------------------------------------------------------------------------------------------------------


def select_curves(tasks: Iterable[str], log: dict[str, dict[str, list[dict]]]) -> dict[str, Lines]:
    """Return the curves of each panel over optimizer steps, by title. A task's panels show both of its runs."""
    training, validation = (log["pretrain"][kind] for kind in ("training", "validation"))
    accuracies = {"right image": "monitored_accuracy", "another image": "monitored_accuracy_shuffled"}
    losses = {"words": "loss_words", "regions": "loss_regions", "words of text-only examples": "loss_text_words"}
    panels = {
        "Pre-training: loss at masked words and regions, nats": {
            name: select_values(training, metric) for name, metric in losses.items()
        },
        "Pre-training: accuracy at colour and shape words, held out": {
            name: select_values(validation, metric) for name, metric in accuracies.items()
        },
    }
    for name in tasks:
        task, runs = DEMO_TASKS[name], {NAMES[start]: log[run_name(name, start)] for start in STARTS}
        panels[f"{task.title}: loss, nats"] = {
            start: select_values(run["training"], task.loss) for start, run in runs.items()
        }
        panels[f"{task.title}: accuracy, held out"] = {
            start: select_values(run["validation"], task.metric) for start, run in runs.items()
        }
    return panels


def select_values(rows: Sequence[dict], metric: str) -> list[tuple[float, float]]:
    """Return (step, value) for each row of metrics.jsonl that has the metric."""
    return [(row["step"], row[metric]) for row in rows if metric in row]


# --- words ------------------------------------------------------------------------------------------------------------


def format_percent(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}\N{NARROW NO-BREAK SPACE}%"
