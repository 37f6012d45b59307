"""Write ROOT/report.html: what a demo run did and what the model learned, on one page that needs no network."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from demo.data import DemoData
from demo.deployments import training_of_detector
from demo.scenes import COLOURS, SHAPES
from demo.tasks import DEMO_TASKS, STARTS, joint_folder, mean, numbers_of, run_of, runs_of
from detectors.drawing import BOX_COLOURS, data_uri, draw_boxes
from detectors.faster_rcnn import FasterRCNN
from detectors.ground_truth import read_ground_truth
from detectors.recipes import detector_demo
from detectors.validate import validate
from detectors.weights.files import load_weights, read_config
from flows.settings import resolve_recipe
from storage.catalog import Catalog
from storage.collect.statuses import Status
from storage.manifests import OK
from storage.object_store import ObjectStore, open_store
from storage.sample import Sample
from training import distributed
from training.curves import Lines, draw_panels
from training.log import read_metrics
from vlbert.evaluation.results_page import draw_answer, render
from vlbert.tasks import task_of

if TYPE_CHECKING:
    from flows.pipeline import PipelineResult

DATASETS = {"captions": "to learn from", "held-out": "to measure on", "coco": "what the tasks ask about"}
NAMES = {"with": "with pre-training", "without": "without"}  # of STARTS

SCENES, MOST_BOXES, MOST_NAMES = 8, 12, 6  # held-out scenes, and boxes and names drawn in one
RIGHT_SHOWN, WRONG_SHOWN = 5, 3  # examples of a task, at most
RANDOM_GUESS = (1 / len(COLOURS) + 1 / len(SHAPES)) / 2  # of one colour or one shape, which captions name equally often


def evaluate_detector(data: DemoData, weights: Path) -> dict[str, Any]:
    """Measure a detector on the held-out scenes: its metrics, and the classes by average precision."""
    recipe, training = detector_demo(), training_of_detector(data)
    images = {name: getattr(training, name) for name in ("annotations", "images", "held_out_last")}
    recipe = replace(recipe, network=read_config(weights), data=replace(recipe.data, **images))
    network = FasterRCNN(recipe.network)
    load_weights(network, weights)
    truth, alone = read_ground_truth(recipe.data), distributed.World(0, 1, torch.device("cpu"))
    metrics, classes = validate(network, recipe, truth.held_out, truth.classes, alone)
    return {"weights": weights.name, "scenes": len(truth.held_out), "metrics": metrics, "classes": classes}


def write_report(root: Path, data: DemoData, detector: dict[str, Any], pipelines: "Sequence[PipelineResult]") -> Path:
    """Write ROOT/report.html and return it.

    detector: what evaluate_detector found. pipelines: one for each seed; the first is shown in full, of the others only
    the numbers.
    """
    store, pipeline, runs = open_store(str(root), write=False), pipelines[0], runs_of(pipelines[0])
    seeds = [numbers_of(each) for each in pipelines]
    shown = {name: task for name, task in DEMO_TASKS.items() if name in seeds[0]}
    log = {
        role: {kind: read_metrics(store, run, kind) for kind in ("training", "validation")}
        for role, run in runs.items()
    }
    predictions = {role: read_predictions(store, run) for role, run in runs.items()}
    values = {
        "data": data.settings,
        "datasets": {name: (what, statuses(store, name)) for name, what in DATASETS.items()},
        "meanings": {status: status.meaning for status in Status},
        "detector": detector,
        "grounding": grounding(pipeline.pretrained.metrics, predictions["pretrain"]),
        "random_guess": RANDOM_GUESS,
        "steps": log["pretrain"]["validation"][-1]["step"],
        "scenes": held_out_scenes(store, f"regions/{pipeline.pretrained.detector}"),
        "most_boxes": MOST_BOXES,
        "curves": {title: draw_panels({"": lines}, width=4.6) for title, lines in curves_of(shown, log).items()},
        "tasks": [
            {
                "name": name,
                "about": task,
                "paper": task_of(resolve_recipe(task.recipe, "", ()).task).paper,
                "count": len(predictions[run_of(name, "with")]),
                "examples": examples(store, pipeline, name, predictions),
            }
            for name, task in shown.items()
        ],
        "starts": NAMES,
        "numbers": seeds[0],
        "joint": joint(root, pipelines) if "vcr-answers" in shown else [],
        "seeds": [*seeds, mean(seeds)] if len(seeds) > 1 else [],
        "root": shlex.quote(str(root)),
    }
    page = render(Path(__file__).parent / "report.html.j2", values, percent=percent, whole="{:,}".format)
    file = root / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


def read_predictions(store: ObjectStore, run: str) -> list[dict]:
    """What the run answered in its last validation."""
    return [json.loads(row) for row in store.get(f"runs/{run}/predictions.jsonl").decode().splitlines()]


def statuses(store: ObjectStore, dataset: str) -> dict[str, dict]:
    """By status, the rows of a dataset's images: how many, and the URL and detail of the first. `ok` comes first."""
    catalog, found = Catalog(store, dataset), {}
    for shard in catalog.shards("images"):
        for row in catalog.manifest("images", shard).table.select(["status", "detail", "url"]).to_pylist():
            found.setdefault(row["status"], row | {"count": 0})["count"] += 1
    return dict(sorted(found.items(), key=lambda item: (item[0] != OK, -item[1]["count"], item[0])))


def grounding(metrics: dict[str, float], predictions: Sequence[dict]) -> list[dict]:
    """Accuracies at masked words and regions, with the right image and with another's; n: how many were masked."""
    return [
        {
            "what": what,
            "right": metrics[f"{name}_accuracy"],
            "other": metrics[f"{name}_accuracy_shuffled"],
            "n": sum(row.get(name, 0) for row in predictions),
        }
        for name, what in (("monitored", "colour and shape words"), ("words", "all words"), ("regions", "regions"))
    ]


def joint(root: Path, pipelines: "Sequence[PipelineResult]") -> list[dict[str, float]]:
    """VCR's Q→AR, answer and rationale right, of each seed."""
    rows = []
    for runs in map(runs_of, pipelines):
        rows.append({})
        for start in STARTS:
            file = joint_folder(root, runs[run_of("vcr-answers", start)]) / "metrics.json"
            metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
            rows[-1] |= {start: metrics["joint_accuracy"], "chance": metrics["joint_chance"]}
    return rows


# --- scenes and examples ----------------------------------------------------------------------------------------------


def held_out_scenes(store: ObjectStore, stage: str) -> list[dict]:
    """The first held-out scenes with the regions that were found: boxes in turning colours, the first of them named."""
    catalog, shown = Catalog(store, "held-out"), []
    names = catalog.manifest(stage, catalog.shards(stage)[0]).meta["config"]["classes"]
    for sample in islice(samples_of(catalog, stage), SCENES):
        labels = [names[label - 1] for label in sample.regions.labels_background_first().tolist()]
        boxes = [
            (box, BOX_COLOURS[i % len(BOX_COLOURS)], labels[i] if i < MOST_NAMES else "")
            for i, box in enumerate(sample.regions.boxes[:MOST_BOXES])
        ]
        scores = zip(labels, sample.regions.scores.tolist(), strict=True)
        shown.append(
            {
                "image": data_uri(draw_boxes(sample, boxes)),
                "caption": sample.caption,
                "labels": [f"{label} {score:.2f}" for label, score in scores],
            }
        )
    return shown


def examples(
    store: ObjectStore, pipeline: "PipelineResult", task: str, predictions: dict[str, list[dict]]
) -> list[dict]:
    """Answers of the run with pre-training: the first right and the first wrong ones, drawn."""
    rows = predictions[run_of(task, "with")]
    right, wrong = [row for row in rows if row["score"] >= 0.5], [row for row in rows if row["score"] < 0.5]
    chosen = right[:RIGHT_SHOWN] + wrong[:WRONG_SHOWN]
    detector = {one.run: one.detector for one in pipeline.finetuned}[runs_of(pipeline)[run_of(task, "with")]]
    wanted = {row["key"] for row in chosen}
    found = samples_of(Catalog(store, "coco"), f"regions/{detector}")
    samples = {sample.key: sample for sample in found if sample.key in wanted}
    return [{"row": row, "image": draw_answer(samples[row["key"]], row)} for row in chosen]


def samples_of(catalog: Catalog, stage: str) -> Iterator[Sample]:
    for shard in catalog.shards(stage):
        yield from catalog.read(stage, shard)


# --- curves -----------------------------------------------------------------------------------------------------------


def curves_of(tasks: Sequence[str], log: dict[str, dict[str, list[dict]]]) -> dict[str, Lines]:
    """By title, the lines over optimizer steps; those of a task are of both its runs."""
    training, validation = (log["pretrain"][kind] for kind in ("training", "validation"))
    accuracies = {"right image": "monitored_accuracy", "another image": "monitored_accuracy_shuffled"}
    losses = {"words": "loss_words", "regions": "loss_regions", "words of text alone": "loss_text_words"}
    found = {
        "Pre-training: loss at masked words and regions, nats": {
            name: values(training, metric) for name, metric in losses.items()
        },
        "Pre-training: colour and shape words filled in right, held out": {
            name: values(validation, metric) for name, metric in accuracies.items()
        },
    }
    for task in tasks:
        about, runs = DEMO_TASKS[task], {NAMES[start]: log[run_of(task, start)] for start in STARTS}
        found[f"{about.title}: loss, nats"] = {name: values(run["training"], about.loss) for name, run in runs.items()}
        found[f"{about.title}: accuracy, held out"] = {
            name: values(run["validation"], about.metric) for name, run in runs.items()
        }
    return found


def values(rows: Sequence[dict], metric: str) -> list[tuple[float, float]]:
    """(step, value) of each line of metrics.jsonl that has one."""
    return [(row["step"], row[metric]) for row in rows if metric in row]


# --- words ------------------------------------------------------------------------------------------------------------


def percent(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}\N{NARROW NO-BREAK SPACE}%"
