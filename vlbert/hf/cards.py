"""Write model cards and dataset cards for the Hugging Face Hub from checkpoints, logs and manifests.

    vlbert card model CHECKPOINT [--out FOLDER]   # README.md in the checkpoint's folder, or in FOLDER
    vlbert card data ROOT DATASET                 # ROOT/DATASET/README.md

CHECKPOINT is ROOT/runs/RUN (its newest checkpoint), ROOT/runs/RUN/best or /step-*, or any folder with a model. All
numbers are read from files. A missing number is written as "not recorded". The templates are model_card.md.j2 and
data_card.md.j2. See docs/library.md and docs/images.md.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from huggingface_hub import CardData, DatasetCard, DatasetCardData, ModelCard, ModelCardData, RepoCard

from storage.catalog import Catalog
from storage.inventory import Inventory
from storage.manifests import OK
from storage.object_store import ObjectStore, open_store
from storage.programs import Checkpoint as CheckpointName
from storage.programs import Command, Dataset, Root
from storage.safe_json import printable
from storage.settings import flat, to_json
from training.loading import EXPECTED
from training.log import read_metrics
from vlbert.checkpoint import Checkpoint, open_checkpoint
from vlbert.evaluation.evaluate import recipe_of
from vlbert.evaluation.results import METRICS, name_of, read_summary
from vlbert.hf.files import MADE_BY, README
from vlbert.tasks import settings_named

UNKNOWN = "not recorded"
_MAX_LICENCES = 5  # licences that a card names
_DETECTOR_SETTINGS = ("backend", "weights", "boxes", "selection", "precision", "keep_features", "random_init")
_COLUMNS = {"license": pa.string(), "num_regions": pa.int64()}


def model_card(path: str) -> str:
    """Return a model card's text. Raises ValueError if `path` is neither a checkpoint nor a folder with a model."""
    checkpoint = open_checkpoint(path, tensors=False)
    config, state, task = checkpoint.config, checkpoint.state, checkpoint.config.get("task") or ""
    root, _, name = checkpoint.uri.rpartition("/runs/")
    store, run = open_store(root, write=False) if root else None, name.rpartition("/")[0]
    recipe = recipe_of(checkpoint) if settings_named(task) is not None and "recipe" in config else None
    start = (recipe.init_from or recipe.bert) if recipe else None
    datasets, kind = state.get("data") or [], printable(task.removesuffix("Settings"))
    title = recipe.run if recipe else PurePosixPath(checkpoint.uri).name
    facts = {
        "title": title,
        "kind": kind,
        "model": to_json(checkpoint.model_config),
        "state": state,
        "results": _collect_results(checkpoint, store, run),
        "recipe": recipe and to_json(recipe),
        "start": start and _strip_folder(start),
        "before": _list_earlier_runs(state),
        "stages": [
            {"dataset": data["dataset"]} | stage_facts(Catalog(store, data["dataset"]), stage)
            for data in datasets
            for stage in ("images", data["stage"])
            if store
        ],
        "detector": _describe_detector(config.get("detector") or {}),
    }
    tags = ["vision-language", "vl-bert", *([kind.lower()] if kind else [])]
    data = ModelCardData(model_name=printable(title), library_name="vlbert", license="unknown", tags=tags)
    return _render_card(ModelCard, data, "model_card.md.j2", facts)


def _collect_results(checkpoint: Checkpoint, store: ObjectStore | None, run: str) -> list[dict[str, Any]]:
    """Return the title and metrics of the checkpoint's last validation and of each of its evaluations."""
    state, results = checkpoint.state, []
    lines = read_metrics(store, run, "validation") if store else []
    before = [line for line in lines if line["step"] <= state["step"]]
    if metrics := dict(state.get("validation") or (before[-1] if before else {})):
        metrics.pop("kind", None)
        step, held_out = metrics.pop("step", state.get("step")), state.get("held_out") or []
        datasets = ", ".join(f"{data['dataset']} (snapshot {data['snapshot']})" for data in held_out) or UNKNOWN
        results.append({"title": f"Validation after step {step:,} on {datasets}.", "metrics": metrics})
    if store is None:
        return results
    paths = [info.path for info in store.list(f"runs/{run}/evaluations/")]
    for path in sorted(path for path in paths if path.endswith(f"/{METRICS}")):
        summary = read_summary(store, path.removesuffix(METRICS))
        if summary and summary["inputs"]["checkpoints"] == [name_of(checkpoint.uri)]:
            split, examples, data = summary["inputs"]["split"], summary["examples"], summary["data"]
            title = f"Evaluation on {split} of {data['dataset']} (snapshot {data['snapshot']}): "
            title += f"{examples['predicted']:,} of {examples['all']:,} examples"
            title += ", on which the model was trained." if summary["trained_on_this_split"] else "."
            results.append({"title": title, "metrics": summary["metrics"]})
    return results


def _list_earlier_runs(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the records of the runs that led to this one through `init_from`, newest first."""
    records, record = [], state.get("init_from")
    while record:
        records.append(record | {"checkpoint": _strip_folder(record["checkpoint"])})
        record = record.get("init_from")
    return records


# --- a dataset --------------------------------------------------------------------------------------------------------


def data_card(store: ObjectStore, dataset: str) -> str:
    """Return the text of a dataset card. Raises ValueError if the dataset has no committed shards."""
    catalog = Catalog(store, dataset)
    stages = [stage_facts(catalog, stage) for _, stage in sorted(Inventory(store, dataset).manifests)]
    facts = {"dataset": dataset, "samples": max(stage["ok"] for stage in stages), "stages": stages}
    data = DatasetCardData(pretty_name=printable(dataset), license="unknown", tags=["image-text", "webdataset"])
    return _render_card(DatasetCard, data, "data_card.md.j2", facts)


def stage_facts(catalog: Catalog, stage: str) -> dict[str, Any]:
    """Return counts and metadata of one stage of a dataset ("images" or "regions/ID"), read from its manifests."""
    hosts, tables = Counter(), []
    for table in catalog.columns(stage, ["status", "url", *_COLUMNS]):
        ok = table.filter(pc.equal(table["status"], OK))
        hosts.update(map(_host, ok["url"].to_pylist()))
        tables.append(ok.select(list(_COLUMNS)).cast(pa.schema(_COLUMNS)))
    ok = pa.concat_tables([pa.schema(_COLUMNS).empty_table(), *tables])
    headers = list(catalog.headers(stage).values())
    statuses = Counter(catalog.counts(stage))
    lists = [source["list"] for header in headers if "list" in (source := header.meta.get("source") or {})]
    detector = {"id": stage.partition("/")[2], "metadata": headers[0].meta.get("config") if headers else {}}
    return {
        "stage": stage,
        "shards": len(headers),
        "rows": statuses.total(),
        "tar_bytes": sum(header.tar_bytes for header in headers),
        "statuses": statuses.most_common(),
        "ok": len(ok),
        "licences": _format_licences(ok["license"]),
        "hosts": [(host, count) for host, count in hosts.most_common() if host],
        "regions": pc.mean(ok["num_regions"]).as_py(),
        "lists": sorted({PurePosixPath(source.partition(" ")[0]).name for source in lists}),
        "detector": _describe_detector(detector) if detector["id"] else None,
    }


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _format_licences(column: pa.ChunkedArray) -> str:
    """Return the most frequent licences and their counts, as text. The rest are counted as "others"."""
    named: Counter[str] = Counter()
    for entry in pc.value_counts(column).to_pylist():
        named[printable(entry["values"])[:100] if entry["values"] else UNKNOWN] += entry["counts"]
    frequent = named.most_common(_MAX_LICENCES)
    frequent.append(("others", named.total() - sum(count for _, count in frequent)))
    return ", ".join(f"{name} {count:,}" for name, count in frequent if count) or UNKNOWN


# --- both -------------------------------------------------------------------------------------------------------------


def _describe_detector(detector: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) pairs for a card: the detector's id and settings."""
    metadata = detector.get("metadata") or {}
    settings = {name: metadata[name] for name in _DETECTOR_SETTINGS if name in metadata}
    return [("id", detector.get("id") or UNKNOWN), *((k, _strip_folder(str(v))) for k, v in flat(settings).items())]


def _strip_folder(path: str) -> str:
    """Shorten the path of a checkpoint to RUN/step-*, and any other path to its file name."""
    return name_of(path) if "/runs/" in path else PurePosixPath(path).name


def _render_card(kind: type[RepoCard], data: CardData, template: str, facts: Mapping[str, Any]) -> str:
    """Render a template as a card. All `facts` are escaped, because some are names from third-party lists and files."""
    path = str(Path(__file__).parent / template)
    card = kind.from_template(data, template_path=path, made_by=MADE_BY, unknown=UNKNOWN, **_escape(facts))
    return re.sub(r"\n{3,}", "\n\n", str(card)) + "\n"


def _escape(facts: Any) -> Any:
    """Escape Markdown, HTML and invisible characters in all strings of nested dicts and lists, each on one line."""
    if isinstance(facts, str):
        return re.sub(r"[|\\`*\[\]<>]", r"\\\g<0>", printable(" ".join(facts.split())))
    if isinstance(facts, Mapping):
        return {_escape(name): _escape(value) for name, value in facts.items()}
    return [_escape(value) for value in facts] if isinstance(facts, list | tuple) else facts


def put_card(store: ObjectStore, folder: str, card: str) -> None:
    """Write a card to `folder`/README.md. Raises ValueError if the file exists and was not written by this module."""
    path = f"{folder}/{README}" if folder else README
    before = store.get(path) if store.exists(path) else b""
    if before and MADE_BY.encode() not in before:
        raise ValueError(
            f"{store.uri(path)} was not written by this program; move it away, or give another folder: --out=FOLDER"
        )
    store.put(path, card.encode())
    print(f"written: {store.uri(path)}")


def write_model_card(checkpoint: CheckpointName, out: str | None = None) -> None:
    """Write the model card of a checkpoint or of any folder with a model.

    Args:
        out: folder or s3://bucket/prefix for README.md; by default the checkpoint's own folder
    """
    folder = open_checkpoint(checkpoint, tensors=False).folder
    store, path = (open_store(out), "") if out else (folder.store, folder.path)
    put_card(store, path, model_card(checkpoint))


def write_data_card(root: Root, dataset: Dataset) -> None:
    """Write a dataset card as ROOT/DATASET/README.md."""
    store = open_store(root)
    put_card(store, dataset, data_card(store, dataset))


main = Command("vlbert card", {"model": write_model_card, "data": write_data_card}, *EXPECTED)
