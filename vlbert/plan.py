"""Plan a pre-training on one page: images, GB, hours and euros of each stage, before anything is downloaded or rented.

    vlbert plan pretrain_vlbert --list captions.tsv --sample 1000 --card h100 --cards 8
    vlbert plan pretrain_vlbert --rows 3300000 --detector.device=cpu --detector.precision=bf16-res5

Fields of the recipe may be changed, too, as --data.batch 512.
Hours come from one table of rates, THROUGHPUT, and hold for the settings that are given. Where no rate is known, the
page says which command measures it.
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from detectors.config import DetectionConfig
from detectors.faster_rcnn import PRESETS
from detectors.resnet import without_values
from storage.collect.download import Downloader, DownloadSettings
from storage.collect.plan import CollectSettings, ListSample, sample_list
from storage.collect.spool import Spool
from storage.settings import check, parse, parse_known
from storage.tables import aligned
from training.program import make_recipe, split_recipe
from vlbert.config import Recipe
from vlbert.data.loading import check_shares
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.recipes import RECIPES, all_recipes
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import PretrainingSettings

PROGRAM = "vlbert plan"
GB = 1e9
SAMPLE = 1000  # rows of the list that are read for the length of their texts
_SEED = 0  # of the rows that are drawn
_TAR_MEMBER = 512 + 256  # header of a member, and half a block at its end
_MANIFEST_ROW = 120  # bytes of a row of a manifest: its URL and key, compressed


@dataclass(frozen=True)
class Figure:
    """A number that no setting decides, and where it is from."""

    value: float
    unit: str
    source: str


SHARE = Figure(0.62, "of the rows", "URLs of CC12M that answered in October 2025, as reported; --sample measures")
IMAGE_BYTES = Figure(90e3, "bytes an image", "CC3M at most 1,024 pixels a side (Hugging Face, WeiChow/cc3m)")
COLLECTED = Figure(690, "rows/s", "CC12M in 5 hours, as img2dataset's examples report; --sample measures")


@dataclass(frozen=True)
class Throughput:
    """Pairs a second of a pre-training, or images a second of a detection, on one card.

    work is a recipe, or a preset of the detector.
    """

    card: str
    work: str
    precision: str
    per_second: float
    source: str


_GPU = "measured 2026-11-23: benchmarks/results/2026-11-23-gpu"
_PAPER = "rehearsed 2026-11-24 (docs/performance.md), not measured"
_CPU = "of one thread, measured 2026-11-21: benchmarks/results/2026-11-21-detect.json"
THROUGHPUT = (
    Throughput("h100", "pretrain_vlbert_base", "bf16", 259, _GPU),
    Throughput("h100", "pretrain_vlbert_large", "bf16", 204, _GPU),
    Throughput("h100", "pretrain_vlbert_base_precomputed", "bf16", 1979, _GPU),
    Throughput("h100", "pretrain_vlbert_base_precomputed", "tf32", 1241, _GPU),
    Throughput("h100", "pretrain_vlbert_base_precomputed", "fp32", 551, _GPU),
    Throughput("h100", "pretrain_vlbert_large_precomputed", "bf16", 903, _GPU),
    Throughput("h100", "pretrain_unicoder_vl_base", "bf16", 2272, _GPU),
    Throughput("h100", "pretrain_unicoder_vl_base", "fp32", 855, _GPU),
    Throughput("h100", "pretrain_vilbert_base", "bf16", 547, _GPU),
    Throughput("h100", "pretrain_vilbert_base", "fp32", 555, _GPU),
    Throughput("h200", "pretrain_vlbert_base", "bf16", 329, _PAPER),
    Throughput("h200", "pretrain_vlbert_base_precomputed", "bf16", 3463, _PAPER),
    Throughput("h200", "pretrain_unicoder_vl_base", "bf16", 3541, _PAPER),
    Throughput("h200", "pretrain_vilbert_base", "bf16", 1639, _PAPER),
    Throughput("h100", "vg_resnet101", "bf16-res5", 228, _PAPER),
    Throughput("h200", "vg_resnet101", "bf16-res5", 263, _PAPER),
    Throughput("cpu", "vg_resnet101", "bf16-res5", 1 / 3.4, _CPU),
    Throughput("cpu", "vg_resnet101", "fp32", 1 / 13.4, _CPU),
)
CARDS = {"h100": 2.5, "h200": 3.5}  # euros an hour


@dataclass(frozen=True)
class Stage:
    """What a stage leaves in the root, in bytes, and what it takes; hours are None where no rate is known."""

    name: str
    bytes: float
    hours: float | None
    price: float  # euros an hour
    source: str

    @property
    def euros(self) -> float | None:
        return None if self.hours is None else self.hours * self.price


def rate_of(card: str, work: str | None, precision: str) -> Throughput | None:
    found = [one for one in THROUGHPUT if (one.card, one.work, one.precision) == (card, work, precision)]
    return found[0] if found else None


def pretraining_rate(recipe: Recipe, card: str) -> Throughput | None:
    """Return the rate of a recipe that computes the same as this one; batch, data and run may differ."""
    if recipe.activation_checkpointing or recipe.compile:
        return None
    measured = {one.work for one in THROUGHPUT}
    same = [name for name, one in all_recipes().items() if name in measured and one.model == recipe.model]
    rates = [rate for name in same if (rate := rate_of(card, name, recipe.precision))]
    return rates[0] if rates else None


def checkpoint_bytes(recipe: Recipe, num_classes: int) -> int:
    """Return the bytes of a checkpoint's model and optimizer."""
    vocabulary = Vocabulary.read(recipe.vocabulary) if recipe.vocabulary else None
    words = [f"w{n}" for n in range(recipe.vocabulary_size - len(SPECIALS))]
    vocabulary = vocabulary or Vocabulary([*SPECIALS, *words])
    task = make_task(dataclasses.replace(recipe.task, monitored_words=()), vocabulary, num_classes)
    with without_values():
        model = TaskModel(VLBert(recipe.model, len(vocabulary)), task)
    moments = 1 if recipe.optimizer.kind == "sgd" else 2
    learned = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    return sum(one.nbytes for one in model.state_dict().values()) + moments * learned


def region_bytes(config: DetectionConfig, regions: float) -> float:
    """Return the bytes that the regions of an image take: boxes, scores, classes, attributes and, if kept, features."""
    network = dataclasses.replace(PRESETS[config.preset or "vg_resnet101"], **config.network_overrides)
    one = 16 + 4 + 4 + 2 * (1 + network.num_classes) + (8 if network.num_attributes else 0)
    return regions * (one + (2 * network.resnet.res5_channels if config.keep_features else 0)) + _TAR_MEMBER


def download_sample(listed: ListSample, settings: CollectSettings) -> tuple[Counter[str], float, float]:
    """Download the rows of a sample as a collection does, and keep none.

    Returns rows by status, bytes of a stored image, and rows a second. Raises ValueError if none gave an image.
    """

    async def download(spool: Spool) -> list:
        async with Downloader(settings.download) as downloader:
            return await downloader.download(listed.examples, spool)

    begin = time.monotonic()
    with Spool() as spool:
        found = asyncio.run(download(spool))
        sizes = [one.image.length for one in found if one.image]
    seconds, statuses = time.monotonic() - begin, Counter(str(one.status) for one in found)
    counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    if not sizes:
        raise ValueError(
            f"none of {len(found)} URLs of {settings.origin} gave an image ({counts}; docs/download.md). Check this "
            "machine's network and --download.allowed_hosts HOST:PORT, or plan without --sample"
        )
    return statuses, sum(sizes) / len(sizes), len(found) / max(seconds, 1e-3)


@dataclass(frozen=True)
class PlanSettings:
    """What is planned, beside the recipe. Give `list`, or `rows`."""

    list: str | None = None  # caption list (docs/download.md)
    rows: int | None = None  # length of a list, in its place
    sample: int | None = None  # request so many URLs of the list
    columns: tuple[str, ...] = ()  # of the list, as `vlbert collect` takes them
    download: DownloadSettings = DownloadSettings()
    # Of the weights only the preset decides anything here. Features are kept where the recipe reads them.
    detector: DetectionConfig = DetectionConfig(
        preset="vg_resnet101", random_init=True, device="cuda", precision="bf16-res5"
    )
    regions: float | None = None  # of an image (the middle of what the selection allows)
    card: Literal["h100", "h200"] = "h100"
    cards: int = 1  # how many; threads with --detector.device=cpu
    price: float | None = None  # euros an hour of a card (that of the table)
    cpu_price: float = 0.2  # euros an hour of a machine without a card
    json: Path | None = None  # write the plan to this file, and print nothing

    def __post_init__(self):
        if (self.list is None) == (self.rows is None):
            raise ValueError("give --list FILE or --rows N, one of them")
        if self.sample is not None and self.list is None:
            raise ValueError("--sample needs --list FILE")
        for name in ("cards", "rows", "sample"):
            check(self, getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        check(self, 0 <= (self.regions or 0) <= self.detector.selection.maximum, "regions", "what the detector keeps")


def plan(recipe: Recipe, settings: PlanSettings) -> dict[str, Any]:
    """Return the numbers of the page. Raises ValueError if the recipe is no pre-training or cannot run on the cards."""
    if not isinstance(recipe.task, PretrainingSettings):
        names = ", ".join(name for name in RECIPES if name.startswith("pretrain_"))
        raise ValueError(f"recipe {recipe.name} is no pre-training; name one of {names}")
    check_shares(recipe.data, settings.cards)
    stored = recipe.model.regions.features == "precomputed"
    detection = dataclasses.replace(settings.detector, keep_features=settings.detector.keep_features or stored)
    collection = CollectSettings(
        "captions", settings.list or "captions.tsv", settings.columns, download=settings.download
    )
    share, image, collected = SHARE, IMAGE_BYTES, COLLECTED
    listed = ListSample(settings.rows or 0, 0, [])
    if settings.list:
        try:
            listed = sample_list(collection, settings.sample or SAMPLE, _SEED)
        except OSError as error:
            raise ValueError(f"--list {settings.list} cannot be read: {error.strerror}; or give --rows N") from error
    if settings.sample is not None:
        statuses, size, rate = download_sample(listed, collection)
        source = f"a sample of {statuses.total()} URLs"
        share = Figure(statuses["ok"] / statuses.total(), "of the rows", f"{source}: {dict(statuses)}")
        image, collected = Figure(size, "bytes an image", source), Figure(rate, "rows/s", source)
    texts = [len(row.caption.encode()) + len(row.url.encode()) for row in listed.examples] or [225]
    selection = detection.selection
    regions = (selection.minimum + selection.maximum) / 2 if settings.regions is None else settings.regions
    images = round((listed.rows - listed.duplicates) * share.value)
    plain = 2 * _TAR_MEMBER + image.value + 250 + sum(texts) / len(texts)

    card, cards = settings.card, settings.cards
    device = card if detection.device.startswith("cuda") else detection.device
    detecting, training = rate_of(device, detection.preset, detection.precision), pretraining_rate(recipe, card)
    price = CARDS[card] if settings.price is None else settings.price
    pairs = recipe.steps * recipe.data.batch
    num_classes = PRESETS[detection.preset or "vg_resnet101"].num_classes
    kept = (recipe.keep_checkpoints or 1) * checkpoint_bytes(recipe, num_classes)
    on_cpu = settings.cpu_price if device == "cpu" else price
    collecting = Throughput("", "", "", collected.value, collected.source)
    stages = [
        _stage("collect", images * plain + listed.rows * _MANIFEST_ROW, listed.rows, collecting, settings.cpu_price),
        _stage("detect", images * (plain + region_bytes(detection, regions)), images, detecting, on_cpu, cards),
        _stage("pre-train", kept, pairs, training, price, cards),
    ]
    return {
        "recipe": recipe.name,
        "rows": listed.rows,
        "duplicates": listed.duplicates,
        "images": images,
        "epochs": pairs / max(1, images),
        "stages": [dataclasses.asdict(one) | {"euros": one.euros} for one in stages],
        "figures": {"share": dataclasses.asdict(share), "image": dataclasses.asdict(image)} | {"regions": regions},
    }


def _stage(name: str, size: float, work: float, rate: Throughput | None, price: float, cards: int = 1) -> Stage:
    if rate is None:
        command = {"detect": "benchmarks.detect", "pre-train": "benchmarks.rehearsal"}[name]
        return Stage(name, size, None, price, f"nothing known of these settings: python -m {command}")
    source = f"{rate.per_second:,.3g}/s x {cards}, {rate.source}"
    return Stage(name, size, work / rate.per_second / cards / 3600, price * cards, source)


def page(plan: dict[str, Any]) -> str:
    """Return the plan in words: a table of the stages, and where its numbers are from."""
    share, image = plan["figures"]["share"], plan["figures"]["image"]
    rows = []
    for one in plan["stages"]:
        hours, euros = ("?" if one[name] is None else f"{one[name]:,.1f}" for name in ("hours", "euros"))
        rows.append((one["name"], f"{one['bytes'] / GB:,.3g}", hours, euros, one["source"]))
    lines = [
        f"{plan['recipe']}: {plan['rows']:,} rows, of them {plan['duplicates']:,} repeated",
        f"{plan['images']:,} images: {share['value']:.1%} of the rows, {share['source']}",
        f"{image['value']:,.0f} {image['unit']}: {image['source']}",
        f"{plan['figures']['regions']:g} regions an image; {plan['epochs']:,.1f} epochs",
        "",
        *aligned(("stage", "GB", "hours", "EUR", "at"), rows),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    recipe_name, given = split_recipe(arguments, PROGRAM, __doc__, RECIPES)
    if {"-h", "--help"} & {*given}:
        parse(PlanSettings, ["--help"], f"{PROGRAM} {recipe_name}")
    try:
        settings, fields = parse_known(PlanSettings, given)
        found = plan(make_recipe(recipe_name, fields, RECIPES), settings)
        if settings.json:
            settings.json.write_text(json.dumps(found, indent=1) + "\n")
    except (ValueError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    if not settings.json:
        print(page(found))
