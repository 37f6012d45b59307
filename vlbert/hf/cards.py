"""Model cards and dataset cards for the Hugging Face hub, made from checkpoints, logs and manifests.

    vlbert card model CHECKPOINT [--out FOLDER]   # README.md in the checkpoint's folder, or in FOLDER
    vlbert card data ROOT DATASET                 # ROOT/DATASET/README.md

CHECKPOINT is ROOT/runs/RUN (its newest), ROOT/runs/RUN/best or /step-*, or any folder with a model. Every number is
read from what the programs recorded; what nothing recorded is "not recorded". The templates are model_card.md.j2 and
data_card.md.j2. More in docs/library.md and docs/images.md.
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
from vlbert.tasks import settings_named

README = "README.md"
UNKNOWN = "not recorded"
_MADE_BY = "<!-- made by vlbert.hf.cards: a card with this line is replaced, any other is kept -->"
_LICENCES = 5  # that are named
_SETTINGS_OF_DETECTOR = ("backend", "weights", "boxes", "selection", "precision", "keep_features", "random_init")
_COLUMNS = {"license": pa.string(), "num_regions": pa.int64()}


def model_card(path: str) -> str:
    """Return the README.md of a checkpoint, or of a model in any folder. ValueError where there is none."""
    checkpoint = open_checkpoint(path, tensors=False)
    config, state, task = checkpoint.config, checkpoint.state, checkpoint.config.get("task") or ""
    root, _, name = checkpoint.uri.rpartition("/runs/")
    store, run = open_store(root, write=False) if root else None, name.rpartition("/")[0]
    recipe = recipe_of(checkpoint) if settings_named(task) is not None and "recipe" in config else None
    start = recipe and (recipe.init_from or recipe.bert)
    datasets, kind = state.get("data") or [], task.removesuffix("Settings")
    title = recipe.run if recipe else PurePosixPath(checkpoint.uri).name
    facts = {
        "title": title,
        "kind": kind,
        "model": to_json(checkpoint.model_config),
        "state": state,
        "results": _results(checkpoint, store, run),
        "recipe": recipe and to_json(recipe),
        "start": start and _without_folder(start),
        "before": _runs_before(state),
        "stages": [
            {"dataset": one["dataset"]} | stage_facts(Catalog(store, one["dataset"]), stage)
            for one in datasets
            for stage in ("images", one["stage"])
            if store
        ],
        "detector": _detector(config.get("detector") or {}),
    }
    tags = ["vision-language", "vl-bert", *([kind.lower()] if kind else [])]
    data = ModelCardData(model_name=title, library_name="vlbert", license="unknown", tags=tags)
    return _rendered(ModelCard, data, "model_card.md.j2", facts)


def _results(checkpoint: Checkpoint, store: ObjectStore | None, run: str) -> list[dict[str, Any]]:
    """The validation after the checkpoint's step or, where there was none, the last one before; and what vlbert
    evaluate wrote about this checkpoint alone."""
    state, found = checkpoint.state, []
    lines = read_metrics(store, run, "validation") if store else []
    before = [line for line in lines if line["step"] <= state["step"]]
    if metrics := dict(state.get("validation") or (before[-1] if before else {})):
        metrics.pop("kind", None)
        step, held_out = metrics.pop("step", state.get("step")), state.get("held_out") or []
        datasets = ", ".join(f"{one['dataset']} (snapshot {one['snapshot']})" for one in held_out) or UNKNOWN
        found.append({"about": f"Validation after step {step:,} on {datasets}.", "metrics": metrics})
    paths = [info.path for info in store.list(f"runs/{run}/evaluations/")] if store else []
    for path in sorted(path for path in paths if path.endswith(f"/{METRICS}")):
        one = read_summary(store, path.removesuffix(METRICS))
        if one and one["inputs"]["checkpoints"] == [name_of(checkpoint.uri)]:
            split, examples, data = one["inputs"]["split"], one["examples"], one["data"]
            about = f"Evaluation on {split} of {data['dataset']} (snapshot {data['snapshot']}): "
            about += f"{examples['predicted']:,} of {examples['all']:,} examples"
            about += ", on which it was trained." if one["trained_on_this_split"] else "."
            found.append({"about": about, "metrics": one["metrics"]})
    return found


def _runs_before(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is recorded of the runs that led to this one, the last first."""
    found, record = [], state.get("init_from")
    while record:
        found.append(record | {"checkpoint": _without_folder(record["checkpoint"])})
        record = record.get("init_from")
    return found


# --- a dataset --------------------------------------------------------------------------------------------------------


def data_card(store: ObjectStore, dataset: str) -> str:
    """Return the README.md of a dataset. ValueError where nothing of it is committed."""
    catalog = Catalog(store, dataset)
    stages = [stage_facts(catalog, stage) for _, stage in sorted(Inventory(store, dataset).manifests)]
    facts = {"dataset": dataset, "samples": max(one["ok"] for one in stages), "stages": stages}
    data = DatasetCardData(pretty_name=dataset, license="unknown", tags=["image-text", "webdataset"])
    return _rendered(DatasetCard, data, "data_card.md.j2", facts)


def stage_facts(catalog: Catalog, stage: str) -> dict[str, Any]:
    """Return what the manifests of a stage say; each is read twice, and no tar is."""
    hosts, tables = Counter(), []
    for table in catalog.columns(stage, ["status", "url", *_COLUMNS]):
        ok = table.filter(pc.equal(table["status"], OK))
        hosts.update(map(_host, ok["url"].to_pylist()))
        tables.append(ok.select(list(_COLUMNS)).cast(pa.schema(_COLUMNS)))
    ok = pa.concat_tables([pa.schema(_COLUMNS).empty_table(), *tables])
    headers = list(catalog.headers(stage).values())
    statuses: Counter = Counter()
    for header in headers:
        statuses.update(header.statuses)
    lists = [source["list"] for header in headers if "list" in (source := header.meta.get("source") or {})]
    described = {"id": stage.partition("/")[2], "metadata": headers[0].meta.get("config") if headers else {}}
    return {
        "stage": stage,
        "shards": len(headers),
        "rows": statuses.total(),
        "tar_bytes": sum(header.tar_bytes for header in headers),
        "statuses": statuses.most_common(),
        "ok": len(ok),
        "licences": _licences(ok["license"]),
        "hosts": [(host, count) for host, count in hosts.most_common() if host],
        "regions": pc.mean(ok["num_regions"]).as_py(),
        "lists": sorted({PurePosixPath(one.partition(" ")[0]).name for one in lists}),
        "detector": _detector(described) if described["id"] else None,
    }


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _licences(column: pa.ChunkedArray) -> str:
    """The most frequent licences, as the lists name them, with their counts; a list may have one for each image."""
    counts = {one["values"]: one["counts"] for one in pc.value_counts(column).to_pylist()}
    named = Counter({printable(name)[:100] if name else UNKNOWN: count for name, count in counts.items()})
    found = named.most_common(_LICENCES)
    found.append(("others", named.total() - sum(count for _, count in found)))
    return ", ".join(f"{name} {count:,}" for name, count in found if count) or UNKNOWN


# --- both -------------------------------------------------------------------------------------------------------------


def _detector(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The detector's id and settings."""
    metadata = described.get("metadata") or {}
    named = {name: metadata[name] for name in _SETTINGS_OF_DETECTOR if name in metadata}
    return [("id", described.get("id") or UNKNOWN), *((k, _without_folder(str(v))) for k, v in flat(named).items())]


def _without_folder(path: str) -> str:
    """RUN/step-* of a checkpoint, or the bare name: a folder is one of this machine."""
    return name_of(path) if "/runs/" in path else PurePosixPath(path).name


def _rendered(kind: type[RepoCard], data: CardData, template: str, facts: Mapping[str, Any]) -> str:
    """The card of a template, in which all facts are plain text: they have names from lists and files of others."""
    path = str(Path(__file__).parent / template)
    card = kind.from_template(data, template_path=path, made_by=_MADE_BY, unknown=UNKNOWN, **_escaped(facts))
    return re.sub(r"\n{3,}", "\n\n", str(card)) + "\n"


def _escaped(facts: Any) -> Any:
    """All texts of nested dicts and lists on one line, without Markdown and HTML."""
    if isinstance(facts, str):
        return re.sub(r"[|\\`*\[\]<>]", r"\\\g<0>", " ".join(facts.split()))
    if isinstance(facts, Mapping):
        return {_escaped(name): _escaped(value) for name, value in facts.items()}
    return [_escaped(one) for one in facts] if isinstance(facts, list | tuple) else facts


def put_card(store: ObjectStore, folder: str, card: str) -> None:
    """Write README.md. ValueError where there is one that this program did not make."""
    path = f"{folder}/{README}" if folder else README
    before = store.get(path) if store.exists(path) else b""
    if before and _MADE_BY.encode() not in before:
        raise ValueError(
            f"{store.uri(path)} is not a card of this program: move it away, or name another folder: --out=FOLDER"
        )
    store.put(path, card.encode())
    print(f"written: {store.uri(path)}")


def write_model_card(checkpoint: CheckpointName, out: str | None = None) -> None:
    """Write the model card of a checkpoint, or of a model in any folder.

    Args:
        out: folder or s3://bucket/prefix for README.md; by default the checkpoint's own folder
    """
    folder = open_checkpoint(checkpoint, tensors=False).folder
    store, path = (open_store(out), "") if out else (folder.store, folder.path)
    put_card(store, path, model_card(checkpoint))


def write_data_card(root: Root, dataset: Dataset) -> None:
    """Write the card of a dataset."""
    store = open_store(root)
    put_card(store, dataset, data_card(store, dataset))


main = Command("vlbert card", {"model": write_model_card, "data": write_data_card}, *EXPECTED)
