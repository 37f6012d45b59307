"""Estimate the storage (GB), time (hours) and cost (euros) of each stage of a pre-training run.

    vlbert plan pretrain_vlbert --list captions.tsv --sample 1000 --card h100 --cards 8

Fields of the recipe can be set too, such as --data.batch 512. Hours are computed from the rates in THROUGHPUT. A rate
holds only for the settings with which it was measured. If a rate is unknown, the output names a command to measure it.
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
_TAR_MEMBER = 512 + 256  # bytes: the header of a tar member, and half a block of padding
_MANIFEST_ROW = 120  # bytes per row of a manifest: its URL and key, compressed


@dataclass(frozen=True)
class Figure:
    """A measured or reported number, and its source."""

    value: float
    source: str


# Share of the rows whose URL gives an image, bytes per image, and rows collected per second.
SHARE = Figure(0.62, "reported for URLs of CC12M in October 2025; --sample measures yours")
IMAGE_BYTES = Figure(90e3, "CC3M at most 1,024 pixels a side (Hugging Face, WeiChow/cc3m)")
COLLECTED = Figure(690, "img2dataset's examples: CC12M in 5 hours; --sample measures yours")

_GPU = "measured 2026-11-23: benchmarks/results/2026-11-23-gpu"
_PAPER = "rehearsed 2026-11-24 (docs/performance.md), not measured"
_CPU = "one thread, measured 2026-11-21: benchmarks/results/2026-11-21-detect.json"
# Pairs or images per second, by card, recipe or detector preset, and precision.
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
PRICES = {"h100": 2.5, "h200": 3.5, "cpu": 0.2}  # euros per hour for a card, or for a machine without one
_DETECTOR = DetectionConfig(preset="vg_resnet101", random_init=True, device="cuda", precision="bf16-res5")


def pretraining_rate(recipe: Recipe, card: str) -> Figure | None:
    """Return the pre-training rate in image-caption pairs per second, or None if it is unknown.

    The rate holds for the recipe's model and precision. The batch size and the data may have been different.
    """
    if recipe.activation_checkpointing or recipe.compile:
        return None
    same = (name for name, other in all_recipes().items() if other.model == recipe.model)
    rates = (THROUGHPUT.get((card, name, recipe.precision)) for name in same)
    return next(filter(None, rates), None)


def checkpoint_bytes(recipe: Recipe, num_classes: int) -> int:
    """Return the size in bytes of the model and optimizer in a checkpoint of the recipe."""
    words = [f"w{n}" for n in range(recipe.vocabulary_size - len(SPECIALS))]
    vocabulary = Vocabulary.read(recipe.vocabulary) if recipe.vocabulary else Vocabulary([*SPECIALS, *words])
    task = make_task(dataclasses.replace(recipe.task, monitored_words=()), vocabulary, num_classes)
    with torch.device("meta"):
        model = TaskModel(VLBert(recipe.model, len(vocabulary)), task)
    moments = 1 if recipe.optimizer.kind == "sgd" else 2
    trainable = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return sum(tensor.nbytes for tensor in model.state_dict().values()) + moments * trainable


@dataclass(frozen=True)
class PlanSettings:
    """Settings of a plan, in addition to the recipe. Either `list` or `rows` must be given."""

    list: str | None = None  # caption list (docs/images.md)
    rows: int | None = None  # number of rows, instead of a list
    sample: int | None = None  # number of URLs of the list to request, to measure share, image size and rate
    columns: tuple[str, ...] = ()  # columns of the list, as for `vlbert collect`
    download: DownloadSettings = DownloadSettings()
    # Weights are not read: their preset is enough. Features are counted if they are kept or the recipe reads them.
    detector: DetectionConfig = _DETECTOR
    regions: float | None = None  # regions per image; None: midway between the selection's minimum and maximum
    card: Literal["h100", "h200"] = "h100"  # GPU to plan for
    cards: int = 1  # number of cards, or of threads with --detector.device=cpu
    price: float | None = None  # euros per hour for a card; None: the price in vlbert/plan.py
    json: bool = False  # print the plan as JSON

    def __post_init__(self):
        if (self.list is None) == (self.rows is None) or (self.sample is not None and self.list is None):
            raise ValueError("give either --list FILE or --rows N; --sample needs --list FILE")
        for name in ("cards", "rows", "sample"):
            check(self, getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        most = self.detector.selection.maximum
        check(self, 0 <= (self.regions or 0) <= most, "regions", f"from 0 to {most}, the detector's maximum")


def plan(recipe: Recipe, settings: PlanSettings) -> dict[str, Any]:
    """Return the plan in the form that --json prints.

    Raises ValueError if the recipe does not pre-train, or if its batch cannot be split evenly over the cards.
    """
    if not isinstance(recipe.task, PretrainingSettings):
        raise ValueError(f"recipe {recipe.name} does not pre-train; give one of pretrain_*")
    check_shares(recipe.data, settings.cards, recipe.model.regions)
    stored = recipe.model.regions.features == "precomputed"
    detection = dataclasses.replace(settings.detector, keep_features=settings.detector.keep_features or stored)
    preset, on_card = detection.preset or "vg_resnet101", detection.device.startswith("cuda")
    network = dataclasses.replace(PRESETS[preset], **detection.network_overrides)
    channels = network.resnet.res5_channels if detection.keep_features else 0
    region_bytes = 16 + 4 + 4 + 2 * (1 + network.num_classes + channels) + (8 if network.num_attributes else 0)
    rows, drawn = settings.rows or 0, []
    if settings.list:
        file = Path(settings.list)
        size = settings.sample or 1000  # without a sample: to measure the length of texts
        rows, drawn = sample_rows(read_rows(file, find_reading(file, settings.columns)), size)
    share, image, collected = SHARE, IMAGE_BYTES, COLLECTED
    if settings.sample is not None:
        share, image, collected = asyncio.run(download_sample(drawn, settings))
    texts = [len(row.caption.encode()) + len(row.url.encode()) for row in drawn if not row.status] or [225]
    least, most = detection.selection.minimum, detection.selection.maximum
    regions = (least + most) / 2 if settings.regions is None else settings.regions
    images = round(rows * share.value)
    plain = 2 * _TAR_MEMBER + image.value + 250 + sum(texts) / len(texts)
    with_regions = plain + (regions * region_bytes + _TAR_MEMBER)
    detecting = THROUGHPUT.get((settings.card if on_card else "cpu", preset, detection.precision))
    price = PRICES[settings.card] if settings.price is None else settings.price
    detecting_price = price if on_card else PRICES["cpu"]
    pairs, training = recipe.steps * recipe.data.batch, pretraining_rate(recipe, settings.card)
    bytes_each = checkpoint_bytes(recipe, network.num_classes)
    kept = recipe.keep_checkpoints + (recipe.steps // recipe.keep_every if recipe.keep_every else 0)
    return {
        "recipe": recipe.name,
        "rows": rows,
        "images": images,
        "epochs": pairs / max(1, images),
        "stages": [
            _stage("collect", images * plain + rows * _MANIFEST_ROW, rows, collected, PRICES["cpu"], 1),
            _stage("detect", images * with_regions, images, detecting, detecting_price, settings.cards),
            _stage("pre-train", kept * bytes_each, pairs, training, price, settings.cards),
        ],
        "share": dataclasses.asdict(share),
        "image": dataclasses.asdict(image),
        "regions": regions,
    }


def sample_rows(rows: Iterable[CaptionRow], size: int) -> tuple[int, list[CaptionRow]]:
    """Return the number of rows, and a random sample of up to `size` rows. The random seed is fixed."""
    count, drawn, generator = 0, [], random.Random(0)
    for count, row in enumerate(rows, 1):
        if len(drawn) < size:
            drawn.append(row)
        elif (index := generator.randrange(count)) < size:
            drawn[index] = row
    return count, drawn


async def download_sample(rows: list[CaptionRow], settings: PlanSettings) -> list[Figure]:
    """Download sampled rows. Return the share that gave a distinct image, bytes per image, and rows per second."""
    distinct = list({row.key: row for row in rows if not row.status}.values())
    begin = time.monotonic()
    with Spool() as spool:
        async with Downloader(settings.download) as downloader:
            done = await downloader.download(distinct, spool)
        sizes = [row.image.length for row in done if row.image]
    seconds = max(time.monotonic() - begin, 1e-3)
    counts = ", ".join(f"{count} {status}" for status, count in Counter(str(row.status) for row in done).most_common())
    if not sizes:
        raise ValueError(
            f"none of {len(done)} URLs of {settings.list} gave an image ({counts}; docs/images.md). Check this "
            "machine's network and --download.allowed_hosts HOST:PORT, or plan without --sample"
        )
    values = len(sizes) / len(rows), sum(sizes) / len(sizes), len(done) / seconds
    return [Figure(value, f"a sample of {len(done)} URLs: {counts}") for value in values]


def _stage(name: str, size: float, work: float, rate: Figure | None, price: float, cards: int) -> dict[str, Any]:
    """Return a stage's name, bytes, hours, euros and rate source. If `rate` is None, hours and euros are None."""
    if rate is None:
        command = {"detect": "benchmarks.detect", "pre-train": "benchmarks.rehearsal"}[name]
        source, hours = f"no rate known for these settings; measure it: python -m {command}", None
    else:
        source, hours = f"{rate.value:,.3g}/s x {cards}, {rate.source}", work / rate.value / cards / 3600
    return {"name": name, "bytes": size, "hours": hours, "euros": hours and hours * price * cards, "source": source}


def format_plan(plan: dict[str, Any]) -> str:
    """Return the plan as text: a summary with the sources of its numbers, and a table of the stages."""
    share, image, rows = plan["share"], plan["image"], []
    for stage in plan["stages"]:
        hours, euros = ("?" if stage[name] is None else f"{stage[name]:,.1f}" for name in ("hours", "euros"))
        rows.append((stage["name"], f"{stage['bytes'] / 1e9:,.3g}", hours, euros, stage["source"]))
    head = [
        f"{plan['recipe']}: {plan['rows']:,} rows",
        f"{plan['images']:,} images: {share['value']:.1%} of the rows, {share['source']}",
        f"{image['value']:,.0f} bytes per image: {image['source']}",
        f"{plan['regions']:g} regions per image; {plan['epochs']:,.1f} epochs",
        "",
    ]
    return "\n".join([*head, *aligned(("stage", "GB", "hours", "EUR", "rate"), rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    recipe_name, given = split_recipe(arguments, PROGRAM, __doc__, RECIPES)
    if {"-h", "--help"} & {*given}:
        parse(PlanSettings, ["--help"], f"{PROGRAM} {recipe_name}")
    try:
        settings, fields = parse_known(PlanSettings, given)
        numbers = plan(make_recipe(recipe_name, fields, RECIPES), settings)
    except (ValueError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")
    print(json.dumps(numbers, indent=1) if settings.json else format_plan(numbers))
