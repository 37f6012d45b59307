"""Model cards and dataset cards as the Hugging Face hub has them, made from checkpoints, logs and manifests.

    vlbert card model CHECKPOINT [field=value ...]   # README.md in the checkpoint's folder, or in out=
    vlbert card data ROOT DATASET                    # ROOT/DATASET/README.md and croissant.json

CHECKPOINT is ROOT/runs/RUN (its newest), ROOT/runs/RUN/best or /step-*, or any folder with a model. Every number is
read from what the programs recorded. What nothing recorded is "not recorded". More in
docs/library.md and docs/download.md.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from huggingface_hub import DatasetCardData, EvalResult, ModelCardData

from storage.catalog import Catalog
from storage.inventory import Inventory
from storage.manifests import OK, Header
from storage.object_store import ObjectStore, open_store
from storage.programs import make_parser
from storage.safe_json import parse_json, printable
from storage.settings import add_fields, flat, from_assignments, to_json
from storage.snapshots import read_snapshot
from training.loading import EXPECTED
from training.log import by_dataset, read_heartbeat, read_metrics
from vlbert.checkpoint import Checkpoint, open_checkpoint
from vlbert.config import Recipe
from vlbert.croissant import CONFORMS, croissant
from vlbert.evaluation.evaluate import recipe_of
from vlbert.evaluation.results import METRICS, name_of, read_summary
from vlbert.tasks import settings_named
from vlbert.variants import rules_of

README, CROISSANT = "README.md", "croissant.json"
UNKNOWN = "not recorded"
_MADE_BY = "<!-- made by vlbert.hf.cards: a card with this line is replaced, any other is kept -->"
_BLANK = "- Code: [More Information Needed]"  # of the card that save_pretrained writes, before anybody filled it in
_HOSTS = 10  # in the table of a dataset card
_LICENCES = 5  # that are named
_SETTINGS_OF_DETECTOR = ("backend", "weights", "boxes", "selection", "precision", "keep_features", "random_init")
_PIPELINES = {"VQASettings": "visual-question-answering", "VCRSettings": "visual-question-answering"}
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


@dataclass(frozen=True)
class ModelCardSettings:
    out: str | None = None  # folder or s3://bucket/prefix for README.md; none: the checkpoint's own folder
    flops: bool = False  # count the FLOPs of the first step, where no comparison has: this computes it


# --- a model ----------------------------------------------------------------------------------------------------------


def model_card(path: str, flops: bool = False) -> str:
    """The README.md of a checkpoint, or of a model in any folder. ValueError where there is none.

    flops: compute the first step to count its operations; it needs the data of the run.
    """
    checkpoint = open_checkpoint(path)
    root, _, name = checkpoint.where.rpartition("/runs/")
    store = open_store(root, write=False) if root else None
    run = name.rpartition("/")[0]
    known = settings_named(checkpoint.config.get("task", "")) is not None and "recipe" in checkpoint.config
    recipe = recipe_of(checkpoint) if known else None
    metrics = _validation(checkpoint, store, run)
    evaluations = _evaluations(store, run, checkpoint) if store else []
    title = recipe.run_name if recipe else PurePosixPath(checkpoint.where).name
    lines = [f"# {title}", "", *_described(checkpoint, recipe), *_results(checkpoint, metrics, evaluations)]
    lines += _training(checkpoint, recipe)
    lines += _data_of(checkpoint, store)
    lines += _detector(checkpoint.config.get("detector") or {}, "##")
    lines += _cost(checkpoint, recipe, store, run, _flops(path) if flops else None)
    lines += _use(checkpoint)
    return _with_front_matter(_model_data(title, checkpoint, metrics, evaluations), lines)


def _model_data(
    title: str, checkpoint: Checkpoint, metrics: Mapping[str, float], evaluations: Sequence[dict]
) -> ModelCardData:
    task = checkpoint.config.get("task", "")
    kind = task.removesuffix("Settings").lower()
    held_out = ", ".join(one["dataset"] for one in checkpoint.state.get("held_out") or []) or UNKNOWN
    measured = [(held_out, name, value) for name, value in metrics.items() if "/" not in name]
    measured += [
        (f"{one['data']['dataset']}, {one['inputs']['split']}", name, value)
        for one in evaluations
        for name, value in one["metrics"].items()
        if "/" not in name and value is not None
    ]
    results = [
        EvalResult(
            task_type=kind or UNKNOWN, dataset_type=where, dataset_name=where, metric_type=name, metric_value=value
        )
        for where, name, value in measured
    ]
    return ModelCardData(
        model_name=title,
        library_name="vlbert",
        license="unknown",
        pipeline_tag=_PIPELINES.get(task),
        tags=["vision-language", "vl-bert", *([kind] if kind else [])],
        eval_results=results or None,
    )


def _described(checkpoint: Checkpoint, recipe: Recipe | None) -> list[str]:
    config = checkpoint.model_config
    task = checkpoint.config.get("task", "").removesuffix("Settings")
    features = "end to end from pixels" if config.regions.features == "end_to_end" else "on precomputed features"
    text = f"A visual-linguistic model, layers `{config.layers}`, {config.hidden_size} channels, {features}"
    text += f", trained for {task}." if task and recipe else f", with a head for {task}." if task else "."
    warnings = []
    if any(one.get("random_init") for one in checkpoint.state.get("data") or []):
        warnings.append("**The regions come from an untrained detector (random weights): results mean nothing.**")
    return [text, "", *(line for one in warnings for line in (one, ""))]


def _validation(checkpoint: Checkpoint, store: ObjectStore | None, run: str) -> dict[str, float]:
    """The metrics of the validation after the checkpoint's step or, where there was none, of the last one before."""
    if found := checkpoint.state.get("validation"):
        return dict(found)
    lines = read_metrics(store, run, "validation") if store else []
    before = [line for line in lines if line["step"] <= checkpoint.state["step"]]
    return {name: value for name, value in before[-1].items() if name != "kind"} if before else {}


def _evaluations(store: ObjectStore, run: str, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """What vlbert evaluate wrote of this checkpoint alone."""
    folders = [
        info.path.removesuffix(METRICS)
        for info in store.list(f"runs/{run}/evaluations/")
        if info.path.endswith(f"/{METRICS}")
    ]
    found = [read_summary(store, folder) for folder in sorted(folders)]
    return [one for one in found if one and one["inputs"]["checkpoints"] == [name_of(checkpoint.where)]]


def _results(checkpoint: Checkpoint, metrics: Mapping[str, float], evaluations: Sequence[dict]) -> list[str]:
    lines = ["## Results", ""]
    if not metrics and not evaluations:
        return [*lines, f"Metrics: {UNKNOWN}.", ""]
    if metrics:
        held_out = [f"{one['dataset']} (snapshot {one['snapshot']})" for one in checkpoint.state.get("held_out") or []]
        step = metrics.get("step", checkpoint.state.get("step"))
        lines += [f"Validation after step {step:,} on {', '.join(held_out) or UNKNOWN}.", ""]
        parts = {
            "": {name: v for name, v in metrics.items() if "/" not in name and name != "step"},
            **by_dataset(metrics),
        }
        for name, part in parts.items():
            lines += ([f"On {name}:", ""] if name else []) + _metrics_table(part)
    for one in evaluations:
        examples, data = one["examples"], one["data"]
        lines += [
            f"Evaluation on {one['inputs']['split']} of {data['dataset']} (snapshot {data['snapshot']}): "
            f"{examples['predicted']:,} of {examples['all']:,} examples"
            + (", on which it was trained." if one["trained_on_this_split"] else "."),
            "",
            *_metrics_table({name: value for name, value in one["metrics"].items() if "/" not in name}),
        ]
    return lines


def _metrics_table(metrics: Mapping[str, float | None]) -> list[str]:
    """Each metric beside the one with the image of another example, where the task has that."""
    shuffled, gap = "_shuffled", "_grounding_gap"
    own = [name for name in metrics if not name.endswith((shuffled, gap))]
    rows = [(name, *(_number(metrics.get(one)) for one in (name, name + shuffled, name + gap))) for name in own]
    if any(name.endswith(shuffled) for name in metrics):
        return _table(("metric", "value", "with another image", "grounding gap"), rows)
    return _table(("metric", "value"), [row[:2] for row in rows])


def _training(checkpoint: Checkpoint, recipe: Recipe | None) -> list[str]:
    if recipe is None:
        return ["## Training", "", f"Recipe: {UNKNOWN}.", ""]
    state, data, optimizer = checkpoint.state, recipe.data, recipe.optimizer
    rows = [
        ("recipe", recipe.name),
        ("variant", _variant(recipe)),
        ("steps done", f"{state['step']:,} of {recipe.steps:,}" if state else UNKNOWN),
        ("examples of a step", f"{data.batch:,} with an image, {data.text_batch:,} of text alone"),
        ("examples seen", f"{state['samples_consumed']:,} and {state['text_consumed']:,}" if state else UNKNOWN),
        ("optimizer", f"{optimizer.kind}, learning rate {optimizer.learning_rate:g}"),
        ("precision", recipe.precision),
        ("seed", str(data.seed)),
        ("starts from", _start(recipe)),
    ]
    return ["## Training", "", *_table(("setting", "value"), rows)]


def _variant(recipe: Recipe) -> str:
    """Which of the rules that paper and published code tell differently are as in the one or the other."""
    values, rules = flat(to_json(recipe)), rules_of(recipe)
    paper, published = (
        sum(values.get(rule.field) == getattr(rule, kind) for rule in rules) for kind in ("paper", "published")
    )
    for kind, count in (("paper", paper), ("published code", published)):
        if count == len(rules):
            return kind
    return f"of {len(rules)} rules {paper} are the paper's and {published} the published code's (docs/variants.md)"


def _start(recipe: Recipe) -> str:
    if recipe.init_from:
        return name_of(recipe.init_from) if "/runs/" in recipe.init_from else PurePosixPath(recipe.init_from).name
    return recipe.bert and f"BERT {PurePosixPath(recipe.bert).name}" or "random weights"


def _data_of(checkpoint: Checkpoint, store: ObjectStore | None) -> list[str]:
    lines, datasets = ["## Data", ""], checkpoint.state.get("data") or []
    if not datasets:
        return [*lines, f"Datasets: {UNKNOWN}.", ""]
    weights, rows = sum(one["weight"] for one in datasets), []
    for one in datasets:
        snapshots = "; ".join(
            f"{span['snapshot']}: {span['examples']:,} examples from epoch {span['epoch']} on"
            for span in one["snapshots"]
        )
        rows.append((one["dataset"], one["stage"], f"{one['weight'] / weights:.1%}", snapshots))
    lines += _table(("dataset", "regions", "share of the examples", "snapshots"), rows)
    lines += _before(checkpoint)
    rows = []
    for one in datasets:
        for stage in ("images", one["stage"]):
            catalog = Catalog(store, one["dataset"]) if store else None
            counts = _statuses(catalog.headers(stage).values()) if catalog else {}
            licences = _shown_licences(_licences(catalog, stage)) if catalog else UNKNOWN
            rows.append((one["dataset"], stage, _shown_counts(counts) if counts else UNKNOWN, licences))
    lines += [
        "Rows by status, of all that is committed now:",
        "",
        *_table(("dataset", "stage", "rows", "licences of its images"), rows),
    ]
    text = checkpoint.state.get("text")
    return lines + ([f"Text corpus: sha256 of its `corpus.json` {text}.", ""] if text else [])


def _before(checkpoint: Checkpoint) -> list[str]:
    """The runs that led to this one, the last first, and what they learned from."""
    rows, record = [], checkpoint.state.get("init_from")
    while record and "run" in record:
        names = ", ".join(f"{one['dataset']}/{one['stage']}" for one in record["data"])
        rows.append((record["run"], f"{record['step']:,}", f"{record['step'] * record['batch']:,}", names))
        record = record["init_from"]
    if record:
        rows.append((PurePosixPath(record["checkpoint"]).name, *[UNKNOWN] * 3))
    return ["Before it:", "", *_table(("run", "steps", "examples", "datasets"), rows)] if rows else []


def _cost(
    checkpoint: Checkpoint, recipe: Recipe | None, store: ObjectStore | None, run: str, flops: int | None
) -> list[str]:
    numbers = sum(tensor.numel() for tensor in checkpoint.model.values())
    beat = (read_heartbeat(store, run) if store else None) or {}
    speeds = [line["samples_per_second"] for line in (read_metrics(store, run, "training") if store else [])]
    flops = flops or (_counted_flops(store, run) if store else None)
    steps = checkpoint.state.get("step")
    rows = [
        ("numbers in model.safetensors", f"{numbers:,}"),
        ("FLOPs of a step", f"{flops:.3g}" if flops else UNKNOWN),
        (
            "FLOPs of the training, that of a step times the steps",
            f"{flops * steps:.3g}" if flops and steps else UNKNOWN,
        ),
        ("hardware, of the last process", f"{beat['processes']} x {beat['device']}" if "device" in beat else UNKNOWN),
        ("examples/s, median", f"{np.median(speeds):.1f}" if speeds else UNKNOWN),
    ]
    return ["## Cost", "", *_table(("what", "value"), rows)]


def _use(checkpoint: Checkpoint) -> list[str]:
    if "task" in checkpoint.config:
        code = ["from vlbert.predict.command import Predictor", "", 'predictor = Predictor("FOLDER")']
        code += ['print(predictor("photo.jpg", "TEXT").answer)']
    else:
        code = ["from vlbert import VLBert", "", 'model = VLBert.from_pretrained("FOLDER")']
    return ["## Use", "", "```python", *code, "```", ""]


def _counted_flops(store: ObjectStore, run: str) -> int | None:
    """What a comparison counted for this run (docs/results.md)."""
    for info in store.list("comparisons/"):
        if info.path.endswith(f"/costs/{run}.json"):
            found = parse_json(store.get(info.path), store.where(info.path)).get("flops")
            if found:
                return found
    return None


def _flops(path: str) -> int:
    """Of the first step, forward and backward, counted as vlbert/comparison does."""
    from torch.utils.flop_counter import FlopCounterMode

    from vlbert.evaluation.replay import load_model, replay

    found = replay(path, 1)
    model = load_model(found)
    with FlopCounterMode(display=False) as counter:
        losses = model(found.batch)
        sum(value for value, count in losses.values() if count and value.requires_grad).backward()
    return counter.get_total_flops()


# --- a dataset --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class StageFacts:
    """What the manifests of a stage say.

    hosts           of the URLs of its ok rows; "" of imported images, which have none
    licences        of its ok rows, as their list says; None where it does not
    width, height   int64, of its ok rows
    regions         mean number of regions of an ok row; None of images
    """

    stage: str
    headers: list[Header]
    hosts: Counter = field(default_factory=Counter)
    licences: Counter = field(default_factory=Counter)
    width: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    height: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    regions: float | None = None

    @property
    def statuses(self) -> dict[str, int]:
        return _statuses(self.headers)

    @property
    def tar_bytes(self) -> int:
        return sum(header.tar_bytes for header in self.headers)


def read_stage(catalog: Catalog, stage: str) -> StageFacts:
    """From the manifests alone; each is read twice."""
    found = StageFacts(stage, list(catalog.headers(stage).values()))
    sizes, regions = [], []
    for table in catalog.columns(stage, ["status", "url", "license", "width", "height", "num_regions"]):
        ok = table.filter(pc.equal(table["status"], OK))
        found.hosts.update(_host(url) for url in ok["url"].to_pylist())
        found.licences.update(_count(ok["license"]))
        sizes.append(np.stack([ok["width"].to_numpy(), ok["height"].to_numpy()]).astype(np.int64))
        regions += ok["num_regions"].drop_null().to_pylist()
    if sizes:
        found.width, found.height = np.concatenate(sizes, axis=1)
    found.regions = float(np.mean(regions)) if regions else None
    return found


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def data_card(store: ObjectStore, dataset: str) -> str:
    """The README.md of a dataset; ValueError where nothing of it is committed."""
    inventory, catalog = Inventory(store, dataset), Catalog(store, dataset)
    stages = [read_stage(catalog, stage) for _, stage in sorted(inventory.manifests)]
    samples = max(len(one.width) for one in stages)
    lines = [f"# {dataset}", "", f"{samples:,} images with captions, as WebDataset tars with Parquet manifests.", ""]
    rows = [
        (
            one.stage,
            f"{len(one.headers):,}",
            f"{sum(one.statuses.values()):,}",
            f"{one.tar_bytes / 1e6:,.1f}",
            _shown_licences(one.licences),
        )
        for one in stages
    ]
    lines += ["## Stages", "", *_table(("stage", "shards", "rows", "MB of tars", "licences of its images"), rows)]
    lines += ["## Rows by status", ""]
    rows = [(one.stage, name, f"{count:,}") for one in stages for name, count in one.statuses.items()]
    lines += _table(("stage", "status", "rows"), rows)
    lines += ["## Images", "", *_sizes(stages), *_hosts(stages[0]), *_sources(stages[0])]
    for one in stages:
        if one.stage.startswith("regions/"):
            described = {"id": one.stage.partition("/")[2], "metadata": one.headers[0].meta.get("config")}
            lines += _detector(described, "##", one.regions)
    lines += _snapshots(inventory, store)
    lines += [f"`{CROISSANT}` beside this file describes the files for programs ({CONFORMS}).", ""]
    sources = DatasetCardData(
        pretty_name=dataset,
        license="unknown",
        size_categories=[next((name for limit, name in _SIZES if samples < limit), "n>10M")],
        tags=["image-text", "webdataset", "croissant"],
    )
    return _with_front_matter(sources, lines)


def _summary(store: ObjectStore, dataset: str) -> str:
    """A dataset in one line."""
    catalog, found = Catalog(store, dataset), []
    for _, stage in sorted(Inventory(store, dataset).manifests):
        headers = list(catalog.headers(stage).values())
        licences = _shown_licences(_licences(catalog, stage))
        found.append(f"{stage}: {_shown_counts(_statuses(headers))}; licences: {licences}")
    return f"Images with captions. {'. '.join(found)}."


def _sizes(stages: Sequence[StageFacts]) -> list[str]:
    largest = max(stages, key=lambda one: len(one.width))
    if not len(largest.width):
        return [f"Sizes: {UNKNOWN}.", ""]
    rows = [
        (name, *(f"{value:,.0f}" for value in np.percentile(values, (0, 5, 50, 95, 100))))
        for name, values in (("width", largest.width), ("height", largest.height))
    ]
    return _table(("pixels", "least", "5 %", "median", "95 %", "most"), rows)


def _hosts(stage: StageFacts) -> list[str]:
    total = stage.hosts.total()
    named = [(host, count) for host, count in stage.hosts.most_common() if host]
    if not named:
        return [f"Hosts: {UNKNOWN}; the images were imported.", ""]
    rows = [(host, f"{count:,}", f"{count / total:.1%}") for host, count in named[:_HOSTS]]
    return [
        f"{total:,} images from {len(named):,} hosts, of which these have most:",
        "",
        *_table(("host", "images", "share"), rows),
    ]


def _sources(stage: StageFacts) -> list[str]:
    """The lists that the rows come from."""
    sources = {
        json.dumps(header.meta.get("source"), sort_keys=True): header.meta.get("source") for header in stage.headers
    }
    lists = sorted({one["list"].partition(" ")[0] for one in sources.values() if one and "list" in one})
    return [f"Made of: {', '.join(PurePosixPath(one).name for one in lists) or UNKNOWN}.", ""]


def _snapshots(inventory: Inventory, store: ObjectStore) -> list[str]:
    found = [
        (stage, read_snapshot(store, info.path)[0])
        for (_, stage), infos in sorted(inventory.snapshots.items())
        for info in sorted(infos.values(), key=lambda one: (one.modified, one.path))
    ]
    if not found:
        return ["## Snapshots", "", "No training has pinned one.", ""]
    rows = [(one.id, stage, f"{len(one.shards):,}", f"{one.ok_rows:,}") for stage, one in found]
    return ["## Snapshots", "", *_table(("id", "stage", "shards", "samples"), rows)]


# --- both -------------------------------------------------------------------------------------------------------------


def _statuses(headers: Iterable[Header]) -> dict[str, int]:
    total: Counter = Counter()
    for header in headers:
        total.update(header.statuses)
    return dict(total.most_common())


def _shown_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _licences(catalog: Catalog, stage: str) -> Counter:
    """The licences of a stage's ok rows, as their list says; None where it does not."""
    found: Counter = Counter()
    for table in catalog.columns(stage, ["status", "license"]):
        found.update(_count(table.filter(pc.equal(table["status"], OK))["license"]))
    return found


def _count(column: pa.ChunkedArray) -> dict[str | None, int]:
    return {one["values"]: one["counts"] for one in pc.value_counts(column).to_pylist()}


def _shown_licences(counts: Counter) -> str:
    """The most frequent ones; a list may have one for each image."""
    known = Counter({printable(name)[:100]: count for name, count in counts.items() if name is not None})
    shown = {name: count for name, count in known.most_common(_LICENCES)}
    rest = {"others": known.total() - sum(shown.values()), UNKNOWN: counts[None]}
    return _shown_counts(shown | {name: count for name, count in rest.items() if count}) if known else UNKNOWN


def _detector(described: Mapping[str, Any], level: str, regions: float | None = None) -> list[str]:
    """The detector's id and settings: files by their names alone, since a path is that of one machine."""
    metadata = described.get("metadata") or {}
    named = {name: metadata[name] for name in _SETTINGS_OF_DETECTOR if name in metadata}
    rows = [("id", described.get("id") or UNKNOWN)]
    rows += [(name, _setting(value)) for name, value in flat(named).items()]
    rows += [("regions of an image, mean", f"{regions:.1f}")] if regions is not None else []
    return [f"{level} Detector", "", *_table(("setting", "value"), rows)]


def _setting(value: Any) -> str:
    return PurePosixPath(value).name if isinstance(value, str) and "/" in value else str(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [" | ".join(_cell(one) for one in row) for row in (heads, ["---"] * len(heads), *rows)]
    return [*(f"| {line} |" for line in lines), ""]


def _cell(text: str) -> str:
    """Names come from lists and files of others: no Markdown, no HTML."""
    text = " ".join(str(text).split())
    return "".join(f"\\{letter}" if letter in "|\\`*[]<>" else letter for letter in text)


def _with_front_matter(data: ModelCardData | DatasetCardData, lines: Sequence[str]) -> str:
    return "\n".join(["---", data.to_yaml(), "---", "", _MADE_BY, "", *lines])


def put_card(store: ObjectStore, folder: str, card: str) -> str:
    """Writes README.md, and returns where; ValueError where there is one that this program did not make."""
    path = f"{folder}/{README}" if folder else README
    before = store.get(path) if store.exists(path) else b""
    if before and not any(mark.encode() in before for mark in (_MADE_BY, _BLANK)):
        raise ValueError(
            f"{store.where(path)} is not a card of this program: move it away, or name another folder: out=FOLDER"
        )
    store.put(path, card.encode())
    return store.where(path)


def write_model_card(path: str, settings: ModelCardSettings = ModelCardSettings()) -> str:
    """Writes the README.md of a checkpoint, and returns where."""
    card = model_card(path, settings.flops)
    if settings.out:
        return put_card(open_store(settings.out), "", card)
    folder = open_checkpoint(path).folder
    return put_card(folder.store, folder.path, card)


def write_data_card(root: str, dataset: str) -> list[str]:
    """Writes README.md and croissant.json of a dataset, and returns where."""
    store = open_store(root)
    described = json.dumps(croissant(store, dataset, _summary(store, dataset)), indent=1, ensure_ascii=False) + "\n"
    found = [put_card(store, dataset, data_card(store, dataset))]
    store.put(f"{dataset}/{CROISSANT}", described.encode())
    return [*found, store.where(f"{dataset}/{CROISSANT}")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("vlbert card", __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    model = kinds.add_parser("model", help="of a checkpoint, or of a model in any folder")
    model.add_argument("checkpoint", metavar="CHECKPOINT", help="ROOT/runs/RUN, /best or /step-*, or a folder")
    add_fields(model, ModelCardSettings)
    data = kinds.add_parser("data", help="of a dataset, with croissant.json")
    data.add_argument("root", metavar="ROOT", help="a folder or s3://bucket/prefix")
    data.add_argument("dataset", metavar="DATASET", help="the name under which the images are stored")
    options = parser.parse_args(arguments)
    try:
        if options.kind == "model":
            settings = from_assignments(ModelCardSettings, options.fields)
            written = [write_model_card(options.checkpoint, settings)]
        else:
            written = write_data_card(options.root, options.dataset)
    except (*EXPECTED, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print("\n".join(f"written: {one}" for one in written))


if __name__ == "__main__":
    main()
