"""Plan a pre-training on one page: images, GB, hours and euros of each stage, before anything is downloaded or rented.

    vlbert plan pretrain_vlbert --list captions.tsv --sample 1000 --card h100 --cards 8

Fields of the recipe may be changed, too, as --data.batch 512. Hours come from the table THROUGHPUT and hold for the
settings that are given; where no rate is known, the page says which command measures it.
"""

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from detectors.config import DetectionConfig
from detectors.faster_rcnn import PRESETS
from storage.collect.download import Downloader, DownloadSettings
from storage.collect.lists import find_reading, read_rows
from storage.collect.rows import CaptionRow
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
_TAR_MEMBER = 512 + 256  # header of a member, and half a block at its end
_MANIFEST_ROW = 120  # bytes of a row of a manifest: its URL and key, compressed


@dataclass(frozen=True)
class Figure:
    """A number that no setting decides, and where it is from."""

    value: float
    source: str


SHARE = Figure(0.62, "URLs of CC12M that answered in October 2025, as reported; --sample measures")  # of the rows
IMAGE_BYTES = Figure(90e3, "CC3M at most 1,024 pixels a side (Hugging Face, WeiChow/cc3m)")  # of an image
COLLECTED = Figure(690, "CC12M in 5 hours, as img2dataset's examples report; --sample measures")  # rows a second

_GPU = "measured 2026-11-23: benchmarks/results/2026-11-23-gpu"
_PAPER = "rehearsed 2026-11-24 (docs/performance.md), not measured"
_CPU = "of one thread, measured 2026-11-21: benchmarks/results/2026-11-21-detect.json"
# Pairs or images a second: by card, recipe or preset of the detector, and precision.
THROUGHPUT = {
    ("h100", "pretrain_vlbert_base", "bf16"): Figure(259, _GPU),
    ("h100", "pretrain_vlbert_large", "bf16"): Figure(204, _GPU),
    ("h100", "pretrain_vlbert_base_precomputed", "bf16"): Figure(1979, _GPU),
    ("h100", "pretrain_vlbert_base_precomputed", "fp32"): Figure(551, _GPU),
    ("h100", "pretrain_vlbert_large_precomputed", "bf16"): Figure(903, _GPU),
    ("h100", "pretrain_unicoder_vl_base", "bf16"): Figure(2272, _GPU),
    ("h100", "pretrain_vilbert_base", "fp32"): Figure(555, _GPU),
    ("h200", "pretrain_vlbert_base", "bf16"): Figure(329, _PAPER),
    ("h200", "pretrain_vlbert_base_precomputed", "bf16"): Figure(3463, _PAPER),
    ("h200", "pretrain_unicoder_vl_base", "bf16"): Figure(3541, _PAPER),
    ("h200", "pretrain_vilbert_base", "bf16"): Figure(1639, _PAPER),
    ("h100", "vg_resnet101", "bf16-res5"): Figure(228, _PAPER),
    ("h200", "vg_resnet101", "bf16-res5"): Figure(263, _PAPER),
    ("cpu", "vg_resnet101", "bf16-res5"): Figure(1 / 3.4, _CPU),
    ("cpu", "vg_resnet101", "fp32"): Figure(1 / 13.4, _CPU),
}
PRICES = {"h100": 2.5, "h200": 3.5, "cpu": 0.2}  # euros an hour of a card, or of a machine without one


def pretraining_rate(recipe: Recipe, card: str) -> Figure | None:
    """Return the rate of a recipe that computes the same as this one; batch, data and run may differ."""
    if recipe.activation_checkpointing or recipe.compile:
        return None
    same = (name for name, one in all_recipes().items() if one.model == recipe.model)
    rates = (THROUGHPUT.get((card, name, recipe.precision)) for name in same)
    return next(filter(None, rates), None)


def checkpoint_bytes(recipe: Recipe, num_classes: int) -> int:
    """Return the bytes of a checkpoint's model and optimizer."""
    words = [f"w{n}" for n in range(recipe.vocabulary_size - len(SPECIALS))]
    vocabulary = Vocabulary.read(recipe.vocabulary) if recipe.vocabulary else Vocabulary([*SPECIALS, *words])
    task = make_task(dataclasses.replace(recipe.task, monitored_words=()), vocabulary, num_classes)
    with torch.device("meta"):
        model = TaskModel(VLBert(recipe.model, len(vocabulary)), task)
    moments = 1 if recipe.optimizer.kind == "sgd" else 2
    learned = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    return sum(one.nbytes for one in model.state_dict().values()) + moments * learned


def region_bytes(config: DetectionConfig, regions: float) -> float:
    """Return the bytes that the regions of an image take: boxes, scores, classes, attributes and, if kept, features."""
    network = dataclasses.replace(PRESETS[config.preset or "vg_resnet101"], **config.network_overrides)
    one = 16 + 4 + 4 + 2 * (1 + network.num_classes) + (8 if network.num_attributes else 0)
    return regions * (one + (2 * network.resnet.res5_channels if config.keep_features else 0)) + _TAR_MEMBER


_DETECTOR = DetectionConfig(preset="vg_resnet101", random_init=True, device="cuda", precision="bf16-res5")


@dataclass(frozen=True)
class PlanSettings:
    """What is planned, beside the recipe. Give `list`, or `rows`."""

    list: str | None = None  # caption list (docs/images.md)
    rows: int | None = None  # length of a list, in its place
    sample: int | None = None  # request so many URLs of the list
    columns: tuple[str, ...] = ()  # of the list, as `vlbert collect` takes them
    download: DownloadSettings = DownloadSettings()
    # Of the weights only the preset decides anything here. Features are kept where the recipe reads them.
    detector: DetectionConfig = _DETECTOR
    regions: float | None = None  # of an image (the middle of what the selection allows)
    card: Literal["h100", "h200"] = "h100"
    cards: int = 1  # how many; threads with --detector.device=cpu
    price: float | None = None  # euros an hour of a card (that of the table)
    json: bool = False  # print the plan as JSON

    def __post_init__(self):
        if (self.list is None) == (self.rows is None) or (self.sample is not None and self.list is None):
            raise ValueError("give --list FILE or --rows N, one of them; --sample needs --list FILE")
        for name in ("cards", "rows", "sample"):
            check(self, getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        check(self, 0 <= (self.regions or 0) <= self.detector.selection.maximum, "regions", "what the detector keeps")


def plan(recipe: Recipe, settings: PlanSettings) -> dict[str, Any]:
    """Return the numbers of the page. Raises ValueError if the recipe is no pre-training or cannot run on the cards."""
    if not isinstance(recipe.task, PretrainingSettings):
        raise ValueError(f"recipe {recipe.name} is no pre-training; name one of pretrain_*")
    check_shares(recipe.data, settings.cards)
    stored = recipe.model.regions.features == "precomputed"
    detection = dataclasses.replace(settings.detector, keep_features=settings.detector.keep_features or stored)
    rows, drawn = settings.rows or 0, []
    if settings.list:
        file = Path(settings.list)
        size = settings.sample or 1000  # for the length of their texts
        rows, drawn = sample_rows(read_rows(file, find_reading(file, settings.columns)), size)
    share, image, collected = SHARE, IMAGE_BYTES, COLLECTED
    if settings.sample is not None:
        share, image, collected = download_sample(drawn, settings)
    texts = [len(row.caption.encode()) + len(row.url.encode()) for row in drawn if not row.status] or [225]
    least, most = detection.selection.minimum, detection.selection.maximum
    regions = (least + most) / 2 if settings.regions is None else settings.regions
    images = round(rows * share.value)
    plain = 2 * _TAR_MEMBER + image.value + 250 + sum(texts) / len(texts)
    with_regions = plain + region_bytes(detection, regions)
    preset, on_card = detection.preset or "vg_resnet101", detection.device.startswith("cuda")
    detecting = THROUGHPUT.get((settings.card if on_card else "cpu", preset, detection.precision))
    price = PRICES[settings.card] if settings.price is None else settings.price
    detecting_price = price if on_card else PRICES["cpu"]
    pairs, training = recipe.steps * recipe.data.batch, pretraining_rate(recipe, settings.card)
    kept = recipe.keep_checkpoints * checkpoint_bytes(recipe, PRESETS[preset].num_classes)
    return {
        "recipe": recipe.name,
        "rows": rows,
        "images": images,
        "epochs": pairs / max(1, images),
        "stages": [
            _stage("collect", images * plain + rows * _MANIFEST_ROW, rows, collected, PRICES["cpu"], 1),
            _stage("detect", images * with_regions, images, detecting, detecting_price, settings.cards),
            _stage("pre-train", kept, pairs, training, price, settings.cards),
        ],
        "share": dataclasses.asdict(share),
        "image": dataclasses.asdict(image),
        "regions": regions,
    }


def sample_rows(rows: Iterable[CaptionRow], size: int) -> tuple[int, list[CaptionRow]]:
    """Return how many rows there are, and up to so many of them, drawn at random."""
    count, drawn, generator = 0, [], random.Random(0)
    for count, row in enumerate(rows, 1):
        if len(drawn) < size:
            drawn.append(row)
        elif (place := generator.randrange(count)) < size:
            drawn[place] = row
    return count, drawn


def download_sample(rows: list[CaptionRow], settings: PlanSettings) -> tuple[Figure, Figure, Figure]:
    """Download rows and return the share that gives an image of its own, an image's bytes, and rows a second."""
    asked = list({row.key: row for row in rows if not row.status}.values())

    async def download(spool: Spool) -> list:
        async with Downloader(settings.download) as downloader:
            return await downloader.download(asked, spool)

    begin = time.monotonic()
    with Spool() as spool:
        found = asyncio.run(download(spool))
        sizes = [one.image.length for one in found if one.image]
    seconds = max(time.monotonic() - begin, 1e-3)
    counts = ", ".join(f"{count} {status}" for status, count in Counter(str(one.status) for one in found).most_common())
    if not sizes:
        raise ValueError(
            f"none of {len(found)} URLs of {settings.list} gave an image ({counts}; docs/images.md). Check this "
            "machine's network and --download.allowed_hosts HOST:PORT, or plan without --sample"
        )
    figures = len(sizes) / len(rows), sum(sizes) / len(sizes), len(found) / seconds
    return tuple(Figure(one, f"a sample of {len(found)} URLs: {counts}") for one in figures)


def _stage(name: str, size: float, work: float, rate: Figure | None, price: float, cards: int) -> dict[str, Any]:
    """Return what a stage leaves in the root, in bytes, and what it takes; hours are None if no rate is known."""
    if rate is None:
        command = {"detect": "benchmarks.detect", "pre-train": "benchmarks.rehearsal"}[name]
        source, hours = f"nothing known of these settings: python -m {command}", None
    else:
        source, hours = f"{rate.value:,.3g}/s x {cards}, {rate.source}", work / rate.value / cards / 3600
    return {"name": name, "bytes": size, "hours": hours, "euros": hours and hours * price * cards, "source": source}


def page(plan: dict[str, Any]) -> str:
    """Return the plan in words: a table of the stages, and where its numbers are from."""
    share, image, rows = plan["share"], plan["image"], []
    for one in plan["stages"]:
        hours, euros = ("?" if one[name] is None else f"{one[name]:,.1f}" for name in ("hours", "euros"))
        rows.append((one["name"], f"{one['bytes'] / 1e9:,.3g}", hours, euros, one["source"]))
    head = [
        f"{plan['recipe']}: {plan['rows']:,} rows",
        f"{plan['images']:,} images: {share['value']:.1%} of the rows, {share['source']}",
        f"{image['value']:,.0f} bytes an image: {image['source']}",
        f"{plan['regions']:g} regions an image; {plan['epochs']:,.1f} epochs",
        "",
    ]
    return "\n".join([*head, *aligned(("stage", "GB", "hours", "EUR", "at"), rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    recipe_name, given = split_recipe(arguments, PROGRAM, __doc__, RECIPES)
    if {"-h", "--help"} & {*given}:
        parse(PlanSettings, ["--help"], f"{PROGRAM} {recipe_name}")
    try:
        settings, fields = parse_known(PlanSettings, given)
        found = plan(make_recipe(recipe_name, fields, RECIPES), settings)
    except (ValueError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    print(json.dumps(found, indent=1) if settings.json else page(found))
