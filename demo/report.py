"""Write ROOT/report.html: the report of a demo run, as a single page without external files."""

import base64
import io
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from demo.data import LABELS, DemoData
from demo.deployments import make_detector_settings
from demo.labels import TASKS, WITH, WITHOUT, run_name
from demo.results import Column, Results, labels_saved
from demo.scenes import COLOURS, SHAPES
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
STARTS = {WITH: "with pre-training", WITHOUT: "without"}
BASELINES = {"another image": "another image", "blind": "blind answers", "chance": "chance"}  # of results.Column
MEASURES = {
    "refcoco": "expressions, such as “the small red star”, for which the right box was found (IoU ≥ 0.5)",
    "vqa": "questions, such as “What color is the star?”, answered right (official accuracy)",
}

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


def write_report(
    root: Path, data: DemoData, detector: dict[str, Any], pipeline: "PipelineResult", results: Results
) -> Path:
    """Write ROOT/report.html, and return its path. `detector` is the result of evaluate_detector."""
    store, pretrained = open_store(str(root), write=False), pipeline.pretrained
    by_task = {task: [column for column in results.columns if column.task == task] for task in TASKS}
    examples = {task: draw_examples(store, pipeline, task, results.seeds[0]) for task in TASKS}
    values = {
        "data": data.settings,
        "datasets": {name: (purpose, count_statuses(store, name)) for name, purpose in DATASETS.items()},
        "meanings": {status: status.meaning for status in Status},
        "detector": detector,
        "grounding": make_grounding_rows(pretrained.metrics, read_predictions(store, pretrained.run)),
        "random_guess": RANDOM_GUESS,
        "steps": read_metrics(store, pretrained.run, "validation")[-1]["step"],
        "scenes": draw_held_out_scenes(store, f"regions/{pretrained.detector}"),
        "max_boxes": MAX_BOXES,
        "label_curves": {task: draw_label_curve(columns) for task, columns in by_task.items()},
        "curves": {
            title: draw_panels({"": lines}, width=4.6)
            for title, lines in select_curves(store, pretrained.run, results.seeds[0]).items()
        },
        "tasks": by_task,
        "measures": MEASURES,
        "splits": {task: compared.split for task, compared in TASKS.items()},
        "saved": {task: labels_saved(columns) for task, columns in by_task.items()},
        "examples": examples,
        "starts": STARTS,
        "baselines": BASELINES,
        "seeds": results.seeds,
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


def draw_examples(store: ObjectStore, pipeline: "PipelineResult", task: str, seed: int) -> list[dict]:
    """Draw the first right and the first wrong answers of the model with pre-training and the most labels."""
    run = run_name(f"{task}_{max(LABELS)}", WITH).format(seed=seed)
    rows = read_predictions(store, run)
    right, wrong = [row for row in rows if row["score"] >= 0.5], [row for row in rows if row["score"] < 0.5]
    chosen = right[:RIGHT_SHOWN] + wrong[:WRONG_SHOWN]
    detector = pipeline.finetuned[0].detector
    keys = {row["key"] for row in chosen}
    stored = read_samples(Catalog(store, "coco"), f"regions/{detector}")
    samples = {sample.key: sample for sample in stored if sample.key in keys}
    return [{"row": row, "image": draw_answer(samples[row["key"]], row)} for row in chosen]


def read_samples(catalog: Catalog, stage: str) -> Iterator[Sample]:
    for shard in catalog.shards(stage):
        yield from catalog.read(stage, shard)


# --- curves -----------------------------------------------------------------------------------------------------------


def draw_label_curve(columns: Sequence[Column]) -> str:
    """Draw a task's accuracy over the number of labels, as an SVG in a data: URI. `columns` are those of the task.

    Bars are 95 % intervals over seeds and items. With one seed there are none.
    """
    from matplotlib import rc_context  # here, because the import takes half a second
    from matplotlib.figure import Figure

    file, labels = io.StringIO(), [column.labels for column in columns]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "labels", "font.size": 10}):
        figure = Figure(figsize=(4.6, 3.6), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for start, colour, above in ((WITH, "#2a78d6", 6), (WITHOUT, "#eb6834", -14)):
            found = [column.means[start] for column in columns]
            means = [100 * one["mean"] for one in found]
            bars = None
            if found[0]["low"] is not None:
                bars = [[abs(100 * one[end] - 100 * one["mean"]) for one in found] for end in ("low", "high")]
            axes.errorbar(labels, means, bars, label=STARTS[start], color=colour, marker="o", capsize=4)
            for place, mean in zip(labels, means, strict=True):
                axes.annotate(f"{mean:.0f}", (place, mean), (4, above), textcoords="offset points", color=colour)
        for name, style in (("another image", "-"), ("blind", "--"), ("chance", ":")):
            if name in columns[0].baselines:
                values = [100 * column.baselines[name] for column in columns]
                axes.plot(labels, values, label=BASELINES[name], color="#8a8a80", linestyle=style)
        axes.set(xlabel="labels", ylabel="accuracy, %", xscale="log", ylim=(0, None))
        axes.set_xticks(labels, [f"{number:,}" for number in labels])
        axes.minorticks_off()
        axes.spines[["right", "top"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue().encode()).decode()}"


def select_curves(store: ObjectStore, pretraining: str, seed: int) -> dict[str, Lines]:
    """Return the curves of each panel over optimizer steps, by title. A task's panel shows the most labels."""
    training, validation = (read_metrics(store, pretraining, kind) for kind in ("training", "validation"))
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
    for task, compared in TASKS.items():
        panels[f"{compared.title}, {max(LABELS):,} labels: accuracy, split val"] = {
            name: select_values(
                read_metrics(store, run_name(f"{task}_{max(LABELS)}", start).format(seed=seed), "validation"),
                compared.metric,
            )
            for start, name in STARTS.items()
        }
    return panels


def select_values(rows: Sequence[dict], metric: str) -> list[tuple[float, float]]:
    """Return (step, value) for each row of metrics.jsonl that has the metric."""
    return [(row["step"], row[metric]) for row in rows if metric in row]


# --- words ------------------------------------------------------------------------------------------------------------


def format_percent(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}\N{NARROW NO-BREAK SPACE}%"
