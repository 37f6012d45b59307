"""Write ROOT/report.html: what a demo run did and what the model learned, on one page that needs no network.

    python -m demo.report ROOT

Every number is read from the files below ROOT. What is not there yet is said in its place on the page.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from demo.data import DemoData, read_demo_data
from demo.evaluate_detector import FILE as DETECTOR_FILE
from demo.pictures import MOST_BOXES, Line, NotThereYet, chart, draw_answer, draw_regions, line
from demo.scenes import COLOURS, SHAPES
from demo.tasks import DEMO_TASKS, OF_DEMO, STARTS, joint_folder, run_of
from demo.tasks import ROLES as FINE_TUNINGS
from detectors.drawing import BOX_COLOURS, data_uri, draw_boxes
from storage.catalog import OK, Catalog
from storage.download import STATUSES
from storage.object_store import ObjectStore, open_store
from storage.runs import CONFIG, checkpoints, open_folder
from storage.sample import Sample
from training.log import read_metrics
from vlbert.data.samples import region_stage
from vlbert.recipes import RECIPES
from vlbert.tasks import task_of

CAPTIONS, HELD_OUT, TASKS = DATASETS = ("captions", "held-out", "coco")
DATASETS_ARE = {CAPTIONS: "to learn from", HELD_OUT: "to measure on", TASKS: "what the tasks ask about"}
STARTS_ARE = {"with": "with pre-training", "without": "without"}
ROLES = {"pretrain": "pre-training"} | {
    role: f"{DEMO_TASKS[task].title} {STARTS_ARE[start]}" for role, (task, start) in FINE_TUNINGS.items()
}

SCENES = 8  # held-out scenes that are shown
RIGHT_SHOWN, WRONG_SHOWN = 5, 3  # examples of a task; where there are fewer of one kind, more of the other
LONGEST_TEXT = 300  # characters of a caption, URL or detail
RANDOM_GUESS = (1 / len(COLOURS) + 1 / len(SHAPES)) / 2  # of one colour or one shape, which captions name equally often


@dataclass(frozen=True)
class Part:
    """One part of the page: what it shows or, in `missing`, why there is nothing to show."""

    content: Any = None
    missing: str = ""


@dataclass(frozen=True)
class Run:
    """What is read of one run: the lines of metrics.jsonl by kind, predictions.jsonl and its newest checkpoint.

    steps is the number that the recipe asks for and stage the held-out regions that were read; both are known from the
    first checkpoint on, and None before.
    """

    name: str
    training: list[dict]
    validations: list[dict]
    predictions: list[dict]
    steps: int | None
    stage: str | None

    @property
    def last(self) -> dict:
        if not self.validations:
            raise NotThereYet(f"run {self.name} has not validated yet")
        return self.validations[-1]

    @property
    def progress(self) -> str:
        """How far the numbers of `last` are from those of the finished run."""
        step = self.last["step"]
        if self.steps is None:
            return f"after {step:,} steps; the run has no checkpoint yet"
        return f"after {step:,} steps" if step >= self.steps else f"not finished: step {step:,} of {self.steps:,}"


def write_report(
    root: Path,
    data: DemoData,
    timings: list[tuple[str, float]],
    runs: dict[str, str],
    others: Sequence[dict[str, str]] = (),
) -> Path:
    """Write ROOT/report.html and, for later calls, ROOT/timings.json; returns the page.

    timings: (stage, seconds) in order. runs: `pretrain`, `refcoco-with` and so on -> name below ROOT/runs. others: the
    same runs with other seeds, of which the page has the numbers alone.
    """
    unknown = sorted({role for each in (runs, *others) for role in each} - ROLES.keys())
    if unknown:
        raise ValueError(f"runs has {', '.join(unknown)}; it takes {', '.join(ROLES)}")
    stages = [{"stage": stage, "seconds": seconds} for stage, seconds in timings]
    about = {"stages": stages, "runs": runs, "others": list(others)}
    _write(root / "timings.json", json.dumps(about, indent=1) + "\n")
    return write_page(root, data, timings, runs, others)


def write_page(
    root: Path,
    data: DemoData,
    timings: Sequence[tuple[str, float]],
    runs: dict[str, str],
    others: Sequence[dict[str, str]] = (),
) -> Path:
    """Write ROOT/report.html alone."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "cut": cut, "size": size_words, "whole": "{:,}".format}
    store = open_store(str(root), write=False)
    shown = [task for task in DEMO_TASKS if any(run_of(task, start) in runs for start in STARTS)] or OF_DEMO
    named = ["pretrain", *(run_of(task, start) for task in shown for start in STARTS)]
    read = {role: part(read_run, store, runs, role) for role in named}
    tables = {dataset: part(statuses, store, dataset) for dataset in DATASETS}
    page = environment.get_template("report.html.j2").render(
        data=data.settings,
        tables=tables,
        meanings=STATUSES,
        datasets_are=DATASETS_ARE,
        detector=part(measured_detector, root),
        grounding=part(grounding, read["pretrain"]),
        tasks=[task_results(store, task, read) for task in shown],
        starts=STARTS_ARE,
        seeds=part(seeds, store, shown, [runs, *others]) if others else None,
        seeds_columns=[(task, *(run_of(task, start) for start in STARTS)) for task in shown],
        joint=part(joint, root, [runs, *others]) if "vcr-answers" in shown else None,
        scenes=part(held_out_scenes, store, data, read),
        losses=part(loss_chart, read["pretrain"]),
        monitored=part(grounding_chart, read["pretrain"]),
        seconds=part(seconds, timings),
        places=places(root, data, runs),
        root=shlex.quote(str(root)),
    )
    file = root / "report.html"
    _write(file, page)
    return file


def part(build: Callable[..., Any], *arguments: Any) -> Part:
    """What `build` returns, or why it is not there yet; any other error is one of the program and is raised."""
    try:
        return Part(build(*(_content(argument) if isinstance(argument, Part) else argument for argument in arguments)))
    except NotThereYet as reason:
        return Part(missing=str(reason))


def _content(of: Part) -> Any:
    if of.missing:
        raise NotThereYet(of.missing)
    return of.content


# --- what the files say -----------------------------------------------------------------------------------------------


def read_run(store: ObjectStore, runs: dict[str, str], role: str) -> Run:
    if role not in runs:
        raise NotThereYet(f"no run is named for {ROLES[role]}")
    name = runs[role]
    training, validations = (read_metrics(store, name, kind) for kind in ("training", "validation"))
    if not training and not validations:
        raise NotThereYet(f"run {name} ({ROLES[role]}) has written no metrics")
    predictions, path = [], f"runs/{name}/predictions.jsonl"
    if store.exists(path):
        predictions = [json.loads(line) for line in store.get(path).decode().splitlines()]
    steps, stage, saved = None, None, checkpoints(store, name)
    if saved:
        folder = open_folder(store, saved[-1])
        steps = folder.json(CONFIG)["recipe"]["steps"]
        stage = (folder.state["held_out"] or {}).get("stage")
    return Run(name, training, validations, predictions, steps, stage)


def statuses(store: ObjectStore, dataset: str) -> dict:
    """Of a dataset's images: how many rows, how many stored, and by status the count and the first row."""
    catalog, found = Catalog(store, dataset), {}
    for shard in catalog.shards("images"):
        table = catalog.manifest("images", shard).table.select(["status", "detail", "url"])
        for row in table.to_pylist():
            entry = found.setdefault(row["status"], {"count": 0, "url": row["url"], "detail": row["detail"]})
            entry["count"] += 1
    if not found:
        raise NotThereYet(f"no image shard of {dataset} is committed")
    counts = dict(sorted(found.items(), key=lambda item: (item[0] != OK, -item[1]["count"], item[0])))
    rows, stored = (sum(e["count"] for s, e in counts.items() if s == OK or not only) for only in (False, True))
    return {"rows": rows, "stored": stored, "statuses": counts}


def grounding(run: Run) -> dict:
    """Accuracies at masked words and regions, with the right picture and with another's; and how many were asked."""
    rows = []
    for name, what in (("monitored", "colour and shape words"), ("words", "all words"), ("regions", "hidden regions")):
        metric = f"{name}_accuracy"
        if metric in run.last and f"{metric}_shuffled" in run.last:
            asked = sum(row.get(name, 0) for row in run.predictions)
            rows.append({"what": what, "right": run.last[metric], "other": run.last[f"{metric}_shuffled"], "n": asked})
    if not rows or "monitored_accuracy" not in run.last:
        raise NotThereYet(f"run {run.name} did not report colour and shape words (task.monitored_words)")
    return {"rows": rows, "random": RANDOM_GUESS, "progress": run.progress}


def task_results(store: ObjectStore, task: str, read: dict[str, Part]) -> dict:
    """All that the page shows of one task, trained with and without pre-training."""
    about, runs = DEMO_TASKS[task], {start: read[run_of(task, start)] for start in STARTS}
    return {
        "about": about,
        "scores": {start: part(score, run, about.metric) for start, run in runs.items()},
        "chance": part(chance, runs),
        "kinds": kinds(runs, about.metric),
        "paper": task_of(RECIPES[about.recipe]().task).paper,
        "losses": part(fine_tuning_chart, task, runs, "training", about.loss),
        "accuracies": part(fine_tuning_chart, task, runs, "validation", about.metric),
        "examples": part(examples, store, about.row_id, runs),
    }


def score(run: Run, metric: str) -> dict:
    """The number of a fine-tuned run; n: questions asked."""
    return {"accuracy": run.last[metric], "progress": run.progress, "n": len(run.predictions)}


def chance(runs: dict[str, Part]) -> float:
    """What guessing gets: the same for both runs."""
    for run in runs.values():
        if not run.missing and run.content.validations:
            return run.content.last["chance"]
    raise NotThereYet("no fine-tuning run has validated yet")


def kinds(runs: dict[str, Part], metric: str) -> list[dict]:
    """By kind of question, the number of each run; nothing where the task knows no kinds."""
    last = {
        start: {} if run.missing or not run.content.validations else run.content.last for start, run in runs.items()
    }
    names = {name for values in last.values() for name in values if name.startswith(f"{metric}/")}
    return [
        {"kind": name.partition("/")[2]} | {start: values.get(name) for start, values in last.items()}
        for name in sorted(names)
    ]


def seeds(store: ObjectStore, tasks: Sequence[str], runs: Sequence[dict[str, str]]) -> list[dict]:
    """The numbers of the same runs with several seeds, and at the end their means."""
    rows = []
    for each in runs:
        words = grounding(read_run(store, each, "pretrain"))["rows"][0]
        rows.append({"run": each["pretrain"], "grounding": words["right"] - words["other"]})
        for task in tasks:
            of = {start: read_run(store, each, run_of(task, start)).last for start in STARTS}
            rows[-1] |= {run_of(task, start): last[DEMO_TASKS[task].metric] for start, last in of.items()}
            rows[-1][task] = of["with"]["chance"]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0] if name != "run"}
    return [*rows, {"run": "mean"} | mean]


def joint(root: Path, runs: Sequence[dict[str, str]]) -> list[dict]:
    """VCR's Q→AR, answer and rationale right, of each seed with and without pre-training, and at the end the means."""
    rows = []
    for each in runs:
        rows.append({"run": each.get("pretrain", "")})
        for start in STARTS:
            role = run_of("vcr-answers", start)
            file = joint_folder(root, each[role]) / "metrics.json" if role in each else None
            if file is None or not file.is_file():
                raise NotThereYet(f"answers and rationales were not evaluated together ({file or role})")
            metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
            rows[-1] |= {start: metrics["joint_accuracy"], "chance": metrics["joint_chance"]}
    names = (*STARTS, "chance")
    means = {name: sum(row[name] for row in rows) / len(rows) for name in names}
    return [*rows, {"run": "mean"} | means] if len(rows) > 1 else rows


def measured_detector(root: Path) -> dict:
    """What demo.evaluate_detector found out about the detector."""
    file = root / DETECTOR_FILE
    if not file.is_file():
        raise NotThereYet(f"the detector has not been measured (no {DETECTOR_FILE})")
    found = json.loads(file.read_text(encoding="utf-8"))
    ranked = sorted(found["classes"], key=lambda one: -one["average_precision"])
    return found | {"best": ranked[:3], "worst": ranked[-3:]}


def seconds(timings: Sequence[tuple[str, float]]) -> dict:
    if not timings:
        raise NotThereYet("no stage was timed (timings.json names none)")
    longest = max(value for _, value in timings) or 1
    rows = [{"stage": stage, "seconds": value, "share": value / longest} for stage, value in timings]
    return {"rows": rows, "total": sum(value for _, value in timings)}


def places(root: Path, data: DemoData, runs: dict[str, str]) -> list[dict]:
    """What lies where below the root, with its size; only what exists."""
    found = [(os.path.relpath(data.root, root), "the demo data: pictures, caption lists, annotations, expressions")]
    for dataset in DATASETS:
        found.append(
            (f"{dataset}/images", f"{dataset}: downloaded pictures with their captions; manifests say the rest")
        )
        stages = sorted(path.name for path in (root / dataset / "regions").glob("*") if path.is_dir())
        found += [
            (f"{dataset}/regions/{name}", f"{dataset}: the same with regions of detector {name}") for name in stages
        ]
    found.append((DETECTOR_FILE, "how right the detector is on held-out scenes, class by class"))
    found += [
        (f"runs/{runs[role]}", f"{ROLES[role]}: checkpoints, metrics, predictions") for role in ROLES if role in runs
    ]
    found.append(("timings.json", "the seconds and names on this page"))
    rows = []
    for path, what in found:
        files = [f for f in [root / path, *(root / path).rglob("*")] if f.is_file()]
        if files:
            rows.append(
                {"path": path, "what": what, "files": len(files), "bytes": sum(f.stat().st_size for f in files)}
            )
    return rows


# --- scenes and examples ----------------------------------------------------------------------------------------------


def held_out_scenes(store: ObjectStore, data: DemoData, read: dict[str, Part]) -> dict:
    """The first held-out scenes with their regions drawn on, beside the truth where a network found these."""
    catalog, stage = Catalog(store, HELD_OUT), stage_of(store, HELD_OUT, read["pretrain"])
    names, by_whom = class_names(catalog, stage), origin(catalog, stage)
    truth = {} if by_whom["backend"] == "annotated" else annotated_boxes(data)
    shown = []
    for sample in islice(samples_of(catalog, stage), SCENES):
        regions = sample.regions
        labels = [names.get(label, f"class {label}") for label in regions.labels_background_first().tolist()]
        words = labels
        if truth:
            words = [f"{label} {score:.2f}" for label, score in zip(labels, regions.scores.tolist(), strict=True)]
        boxes = truth.get(sample.url.rpartition("/")[2], [])
        coloured = [(box, BOX_COLOURS[i % len(BOX_COLOURS)], name) for i, (box, name) in enumerate(boxes)]
        shown.append(
            {
                "picture": draw_regions(sample, labels),
                "truth": data_uri(draw_boxes(sample, coloured)) if truth else None,
                "caption": sample.caption,
                "labels": words,
            }
        )
    if not shown:
        raise NotThereYet(f"no scene of {HELD_OUT}/{stage} has regions")
    return {"shown": shown, "origin": by_whom, "most_boxes": MOST_BOXES}


def annotated_boxes(data: DemoData) -> dict[str, list[tuple[np.ndarray, str]]]:
    """Image file -> (box xyxy, category) of every object that was drawn into a captioned scene."""
    if not data.annotations.is_file():
        raise NotThereYet(f"there is no {data.annotations.name} in {data.root}, which says what was drawn")
    coco = json.loads(data.annotations.read_text(encoding="utf-8"))
    names = {category["id"]: category["name"] for category in coco["categories"]}
    files = {image["id"]: image["file_name"] for image in coco["images"]}
    boxes: dict[str, list[tuple[np.ndarray, str]]] = {file: [] for file in files.values()}
    for one in coco["annotations"]:
        x, y, width, height = one["bbox"]
        boxes[files[one["image_id"]]].append((np.array([x, y, x + width, y + height]), names[one["category_id"]]))
    return boxes


def examples(store: ObjectStore, row_id: str, runs: dict[str, Part]) -> dict:
    """Questions to the run with pre-training: the first right and the first wrong answers, drawn."""
    run = _content(runs["with"])
    if not run.predictions:
        raise NotThereYet(f"run {run.name} has written no predictions")
    without = {} if runs["without"].missing else {p[row_id]: p for p in runs["without"].content.predictions}
    catalog, stage = Catalog(store, TASKS), stage_of(store, TASKS, runs["with"])
    chosen = some_right_some_wrong(run.predictions)
    samples, wanted = {}, {prediction["key"] for prediction in chosen}
    for sample in samples_of(catalog, stage):
        if sample.key in wanted:
            samples[sample.key] = sample
        if len(samples) == len(wanted):
            break
    shown = []
    for prediction in chosen:
        sample, other = samples.get(prediction["key"]), without.get(prediction[row_id])
        if sample is None:
            raise NotThereYet(
                f"the picture of {row_id} {prediction[row_id]} of run {run.name} is not in {TASKS}/{stage}: the run "
                "belongs to other data"
            )
        shown.append(
            prediction
            | {
                "picture": draw_answer(sample, prediction),
                "right": is_right(prediction),
                "without_right": None if other is None else is_right(other),
            }
        )
    return {"shown": shown, "n": len(run.predictions), "origin": origin(catalog, stage)}


def is_right(prediction: dict) -> bool:
    return prediction["score"] >= 0.5


def some_right_some_wrong(predictions: Sequence[dict]) -> list[dict]:
    """The first right ones, then the first wrong ones, of each as many as there is room for."""
    right = [prediction for prediction in predictions if is_right(prediction)]
    wrong = [prediction for prediction in predictions if not is_right(prediction)]
    room = RIGHT_SHOWN + WRONG_SHOWN
    wrong = wrong[: max(WRONG_SHOWN, room - len(right))]
    return right[: room - len(wrong)] + wrong


def stage_of(store: ObjectStore, dataset: str, run: Part) -> str:
    """The regions that the run was measured on; before its first checkpoint, the only ones there are."""
    if not run.missing and run.content.stage:
        return run.content.stage
    try:
        return region_stage(store, dataset, None)
    except ValueError as error:
        raise NotThereYet(str(error)) from error


def samples_of(catalog: Catalog, stage: str) -> Iterator[Sample]:
    for shard in catalog.shards(stage):
        yield from catalog.read(stage, shard)


def origin(catalog: Catalog, stage: str) -> dict:
    """Who found the regions of a stage, as its manifests say."""
    shards = catalog.shards(stage)
    if not shards:
        raise NotThereYet(f"no shard of {catalog.dataset}/{stage} is committed")
    metas = [catalog.manifest(stage, shard).meta for shard in shards]
    config = metas[0]["config"]
    return {
        "backend": config["backend"],
        "minimum": (config.get("selection") or {}).get("minimum"),
        "boxes": config.get("boxes"),
        "random_init": any(meta["random_init"] for meta in metas),
        "stage": f"{catalog.dataset}/{stage}",
    }


def class_names(catalog: Catalog, stage: str) -> dict[int, str]:
    """Label with the background at 0 -> name, as far as the detector that found the regions knows them."""
    for shard in catalog.shards(stage):
        return dict(enumerate(catalog.manifest(stage, shard).meta["config"].get("classes") or [], start=1))
    return {}


# --- charts -----------------------------------------------------------------------------------------------------------


def loss_chart(run: Run) -> dict:
    names = {"loss_words": ("masked words", "blue"), "loss_regions": ("masked regions", "aqua")}
    names |= {"loss_text_words": ("masked words of text alone", "violet")}
    lines = [line(name, colour, run.training, metric, "{:.2f}") for metric, (name, colour) in names.items()]
    return chart("Pre-training: losses", lines, "nats per masked word or region")


def grounding_chart(run: Run) -> dict:
    grounding(run)  # says what is missing, if anything
    right = line("right picture", "blue", run.validations, "monitored_accuracy", "{:.0%}")
    other = line("another picture", "orange", run.validations, "monitored_accuracy_shuffled", "{:.0%}")
    steps = run.validations[0]["step"], run.last["step"]
    guess = Line("random guess", "muted", [(s, RANDOM_GUESS) for s in steps], f"{RANDOM_GUESS:.0%}", dashed=True)
    return chart("Pre-training: colour and shape words filled in", [right, other, guess], "% right, held out")


def fine_tuning_chart(task: str, read: dict[str, Part], kind: str, metric: str) -> dict:
    """Both runs of a task, or the one there is."""
    title, lines = DEMO_TASKS[task].title, []
    for start, colour in zip(STARTS, ("blue", "orange"), strict=True):
        if not read[start].missing:
            run = read[start].content
            values = run.training if kind == "training" else run.validations
            form = "{:.2f}" if kind == "training" else "{:.0%}"
            lines.append(line(STARTS_ARE[start], colour, values, metric, form))
    lines = [one for one in lines if one.points]
    if not lines:
        raise NotThereYet(f"no fine-tuning run for {title} has written its {metric}")
    if kind == "training":
        return chart(f"{title}: loss", lines, "nats")
    steps = [step for one in lines for step, _ in one.points]
    value = chance(read)
    lines.append(Line("chance", "muted", [(min(steps), value), (max(steps), value)], f"{value:.0%}", dashed=True))
    return chart(f"{title}: accuracy", lines, "% right, held out")


# --- words ------------------------------------------------------------------------------------------------------------


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}\N{NARROW NO-BREAK SPACE}%"


def cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " …"


def size_words(count: int) -> str:
    """Bytes in the unit that suits them."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def _write(file: Path, text: str) -> None:
    """At once, so that nobody opens half a page."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.report", description="Write ROOT/report.html anew.")
    parser.add_argument("root", type=Path, help="the folder of a demo run; ROOT/data holds the demo data")
    root = parser.parse_args(arguments).root
    about, file = {"stages": [], "runs": {}, "others": []}, root / "timings.json"
    if file.is_file():
        about = json.loads(file.read_text(encoding="utf-8"))
    else:
        print(f"there is no {file}, which names the runs and their seconds: the page will lack them", file=sys.stderr)
    try:
        data = read_demo_data(root / "data")
        timings = [(one["stage"], one["seconds"]) for one in about["stages"]]
        page = write_page(root, data, timings, about["runs"], about["others"])
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
