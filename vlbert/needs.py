"""What the road from a caption list to a pre-trained model needs: bytes, requests, hours, and what does not fit.

`make_plan` computes it from settings, without downloading or training. What no setting decides stands in FIGURES, with
its source; seconds on a card are those of vlbert/rehearsal.py. `vlbert plan` prints it.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from detectors.config import DetectionConfig
from detectors.detect import describe_detector
from detectors.faster_rcnn import PRESETS, FasterRCNNConfig
from detectors.resnet import without_values
from storage.claims import RENEWAL
from storage.collect.download import image_config
from storage.collect.plan import CollectSettings
from storage.collect.rows import CaptionRow
from storage.collect.run import IMAGES, SAVE_SECONDS, SHARDS_AT_ONCE
from storage.manifests import OK, Row, manifest_bytes
from storage.sample import Regions, pack_regions, sample_key
from storage.shards import Span
from vlbert.config import Recipe
from vlbert.data.loading import check_shares
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.recipes import RECIPES
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import PretrainingSettings

if TYPE_CHECKING:
    from training.cards import Card

GB = 1e9
MOST_SHARDS = 100_000  # of a catalog: their names have five digits
_PAGE = 1000  # objects in one answer of a list
_PART = 8 << 20  # bytes of one request of a large put, as boto3 cuts it, and of a tar that a cache fetches
_SAVED = 4 << 20  # bytes of images in progress in one object, at least where there are so many
_BEAT = 10.0  # seconds between two heartbeats of a training
_NEAR = 64 << 10  # bytes between two samples of a batch that one request reads
_SNAPSHOT = 350, 1500  # bytes of a snapshot beside its rows: of a shard, and of its schema
SEED = 0  # of the rows that are sampled
_SHARED_INDEX = 1_000_000  # samples from which on a machine's processes share an index file, 16 bytes a sample


@dataclass(frozen=True)
class Figure:
    """A number that no setting decides, and who says so."""

    value: float
    unit: str
    source: str


FIGURES = {
    "share": Figure(0.62, "of the rows", "URLs of CC12M that answered in October 2025, as reported; --sample measures"),
    "image": Figure(
        90e3, "bytes", "3.0 M images of CC3M, at most 1,024 pixels a side, take 271 GB (Hugging Face, WeiChow/cc3m)"
    ),
    "text": Figure(225, "bytes", "URL and caption of a row of CC12M (Hugging Face, conceptual_12m: 2.79 GB of 12.4 M)"),
    "wait": Figure(1.5, "s a URL", "img2dataset's examples: CC12M in 5 hours with 16 x 64 URLs in flight"),
    "decode": Figure(250, "images/s a decode thread", "docs/download.md: 500 images/s with two"),
    "prepare": Figure(13e-3, "CPU-s an image", "decode, resize and select: benchmarks/results/2026-11-21-detect.json"),
    "load": Figure(7e-3, "CPU-s a pair", "docs/performance.md: decode, mask and collate"),
    "load_features": Figure(4.3e-3, "CPU-s a pair", "the same less 2.7 ms of docs/reading.md: no image is decoded"),
    "forward": Figure(0.34, "of a step", "docs/performance.md: 406 of 1,183 GFLOP a pair"),
    "context": Figure(2e9, "bytes", "assumed: what CUDA and fragments of memory take beside a rehearsed peak"),
    "tar": Figure(4e9, "bytes", "assumed: memory for one tar of a bucket, which detection reads as a whole"),
}


def figure(name: str) -> float:
    return FIGURES[name].value


class Rehearsed(Protocol):
    """As vlbert/rehearsal.py has it. peak: bytes."""

    peak: int

    def seconds(self, card: "Card") -> float: ...


@dataclass(frozen=True)
class Machine:
    """What is rented. card: a GPU; prices in euros an hour; bandwidth in bytes a second; disk in bytes, None: unknown.

    rehearse_training: of (recipe, pairs, text rows); rehearse_detection: of (network, images, precision, tf32)
    """

    card: "Card"
    cards: int
    price: float
    cpu_price: float
    bandwidth: float
    disk: float | None
    rehearse_training: Callable[[Recipe, int, int], Rehearsed]
    rehearse_detection: Callable[[FasterRCNNConfig, int, str, bool], Rehearsed]

    def __post_init__(self):
        for name, value, way_out in (
            ("--cards", self.cards, "give how many GPUs there are"),
            ("--bandwidth", self.bandwidth, "give megabits a second"),
            ("--disk", 1 if self.disk is None else self.disk, "give the GB that are free, or leave it out"),
        ):
            if value <= 0:
                raise ValueError(f"{name} must be over 0; {way_out}")
        for name, value in (("--price", self.price), ("--cpu-price", self.cpu_price)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value:g}; give euros an hour, 0 or more")


@dataclass(frozen=True)
class CaptionList:
    """A list, or one of which only the length is known. examples: rows from all over it."""

    rows: int
    duplicates: int
    examples: Sequence[CaptionRow]


@dataclass(frozen=True)
class Survival:
    """How many rows become images. low, high: of a sample, within which the share is with 95 %.

    statuses         of the sample, by name
    image            bytes of a stored image, on average
    rows_per_second  that nine tenths of the sample were downloaded with; None: no sample
    tail             seconds that the slowest tenth took after them: of a longer list, others go on beside them
    """

    share: float
    source: str
    image: float
    low: float
    high: float
    statuses: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rows_per_second: float | None = None
    tail: float = 0.0


# --- bytes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Bytes. Of a sample in a tar, and of a manifest: a row's and what else it holds; of a checkpoint's two tensors."""

    image: float
    region: float  # with the image, as the recipe needs it
    region_bare: float
    region_features: float
    manifest: tuple[float, float]
    region_manifest: tuple[float, float]
    model: int
    optimizer: int


def sizes_of(
    recipe: Recipe,
    listed: CaptionList,
    image: float,
    regions: float,
    settings: CollectSettings,
    config: DetectionConfig,
) -> Sizes:
    """Texts and regions as this code writes them; of a JPEG the last block of the tar is half full."""
    network = network_of(config)
    texts = [len(_json(row)) for row in listed.examples]
    plain = 2 * 512 + image + 256 + sum(-(-size // 512) * 512 for size in texts) / len(texts)
    bare, full = (plain + 512 + 256 + _packed(network, regions, keep) for keep in (False, True))
    made = describe_detector(network, {"random_init": True, "seed": 0}, config, None, config.backend)
    collected = {"config": image_config(settings.download)[0], "source": {"list": "0" * 80}}
    detected = {"config": made[1], "config_hash": made[0], "source": {"manifest_sha256": "0" * 64}}
    return Sizes(
        plain,
        full if config.keep_features else bare,
        bare,
        full,
        _manifest(listed.examples, IMAGES, collected, None),
        _manifest(listed.examples, f"regions/{made[0]}", detected, round(regions)),
        *checkpoint_of(recipe, network.num_classes),
    )


def network_of(config: DetectionConfig) -> FasterRCNNConfig:
    if config.preset is None:
        raise ValueError("detection.preset is not set; give --preset, one of " + ", ".join(PRESETS))
    return dataclasses.replace(PRESETS[config.preset], **config.network_overrides)


def _json(row: CaptionRow) -> bytes:
    fields = {"version": 1, "caption": row.caption, "url": row.url, "width": 1000, "height": 1000, "sha256": "0" * 64}
    return json.dumps(fields | {"flags": []}, ensure_ascii=False).encode()


def _packed(network: FasterRCNNConfig, regions: float, features: bool) -> float:
    """Bytes of the regions of an image, with so many on average."""

    def packed(n: int) -> int:
        attributes = {"attributes": np.zeros(n, np.int32), "attribute_scores": np.zeros(n, np.float32)}
        stored = Regions(
            boxes=np.zeros((n, 4), np.float32),
            scores=np.zeros(n, np.float32),
            labels=np.zeros(n, np.int32),
            detector="0" * 12,
            background=network.num_classes,
            class_probs=np.zeros((n, 1 + network.num_classes), np.float16),
            features=np.zeros((n, network.resnet.res5_channels), np.float16) if features else None,
            **attributes if network.num_attributes else {},
        )
        return len(pack_regions(stored))

    return packed(10) + (regions - 10) * (packed(100) - packed(10)) / 90


def _manifest(examples: Sequence[CaptionRow], stage: str, meta: dict, regions: int | None) -> tuple[float, float]:
    """(bytes a row, bytes of the rest) of a manifest of these rows, from one of them all and one of half of them."""

    def size(rows: Sequence[CaptionRow]) -> int:
        rng = np.random.default_rng(SEED)
        lengths = rng.integers(20_000, 200_000, len(rows)).tolist()
        keys = [sample_key(row.url, row.caption) for row in rows]
        spans = [Span(key, sum(lengths[:n]), lengths[n]) for n, key in enumerate(keys)]
        facts = [(*rng.integers(400, 1024, 2).tolist(), regions) for _ in rows]
        metadata = {"stage": stage, "shard": "00000", "tar": "0" * 22, "tar_sha256": "0" * 64, "tar_bytes": 10**8}
        table = [Row(row.row, key, OK, url=row.url) for row, key in zip(rows, keys, strict=True)]
        return len(manifest_bytes(table, spans, facts, metadata | {"meta": meta}))

    if len(examples) < 2:
        return 0.0, float(size(examples))
    whole, half = size(examples), size(examples[: len(examples) // 2])
    row = (whole - half) / (len(examples) - len(examples) // 2)
    return row, whole - row * len(examples)


def checkpoint_of(recipe: Recipe, num_classes: int) -> tuple[int, int]:
    """Bytes of model.safetensors and of optimizer.safetensors, without their headers."""
    tokens = recipe.vocabulary_size
    vocabulary = Vocabulary.read(recipe.vocabulary) if recipe.vocabulary else None
    vocabulary = vocabulary or Vocabulary([*SPECIALS, *(f"w{n}" for n in range(tokens - len(SPECIALS)))])
    task = make_task(dataclasses.replace(recipe.task, monitored_words=()), vocabulary, num_classes)
    with without_values():
        model = TaskModel(VLBert(recipe.model, len(vocabulary)), task)
    moments = 1 if recipe.optimizer.kind == "sgd" else 2
    learned = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    return sum(one.nbytes for one in model.state_dict().values()), moments * learned


# --- stages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What a stage needs. bytes: that it leaves in the root; bound: what its hours are spent on."""

    name: str
    hours: float
    euros: float
    bytes: float
    requests: int
    bound: str


@dataclass(frozen=True)
class Check:
    """Whether something fits; fits: None where what there is is not known. way_out: what to do if it does not."""

    what: str
    needed: float
    available: float | None
    unit: str
    way_out: str

    @property
    def fits(self) -> bool | None:
        return None if self.available is None else self.needed <= self.available


@dataclass(frozen=True)
class Plan:
    recipe: str
    card: str
    cards: int
    rows: int
    duplicates: int
    survival: Survival
    images: int
    shards: int
    epochs: float
    pairs_per_second: float
    stages: tuple[Stage, ...]
    bytes: Mapping[str, float]  # by what they are
    checks: tuple[Check, ...]

    def to_json(self) -> dict[str, Any]:
        checks = [dataclasses.asdict(check) | {"fits": check.fits} for check in self.checks]
        figures = {name: dataclasses.asdict(one) for name, one in FIGURES.items()}
        return dataclasses.asdict(self) | {"checks": checks, "figures": figures}


@dataclass(frozen=True)
class Work:
    """What the stages share. rows: of a full shard, of which `images` survive in all shards together."""

    recipe: Recipe
    collection: CollectSettings
    detection: DetectionConfig
    machine: Machine
    survival: Survival
    sizes: Sizes
    rows: int
    images: int
    shards: int

    def stage_bytes(self, sample: float, manifest: tuple[float, float], rows: int) -> tuple[float, float]:
        """Of all tars and all manifests of a stage; a tar ends with two blocks and is a multiple of 10,240 bytes."""
        return self.images * sample + self.shards * (1024 + 5120), rows * manifest[0] + self.shards * manifest[1]

    @property
    def snapshot(self) -> float:
        """Bytes; its rows are as those of a manifest."""
        return self.images * self.sizes.region_manifest[0] + self.shards * _SNAPSHOT[0] + _SNAPSHOT[1]

    def tar(self, sample: float) -> float:
        """Of a full shard."""
        return min(self.collection.rows_per_shard, self.rows) / self.rows * self.images * sample

    @property
    def pages(self) -> int:
        """Requests of a list of a stage, which has a tar and a manifest a shard."""
        return max(1, -(-2 * self.shards // _PAGE))


def _put(size: float) -> int:
    """Requests of a put of a file: in parts where it is large, with one before and one after."""
    return 1 if size < _PART else 2 + math.ceil(size / _PART)


def collecting(work: Work) -> Stage:
    settings, machine, share = work.collection, work.machine, work.survival.share
    download = settings.download
    rates = {
        f"waiting for servers, {download.concurrency} URLs in flight": download.concurrency / figure("wait"),
        "bandwidth": machine.bandwidth / (share * work.survival.image),
        f"decoding, {download.decode_threads} threads": download.decode_threads * figure("decode") / share,
    }
    if work.survival.rows_per_second:
        rates = {"the rate of the sample": work.survival.rows_per_second}
    bound = min(rates, key=rates.get)
    seconds = work.rows / rates[bound] + work.survival.tail
    at_once = min(SHARDS_AT_ONCE, work.shards)
    in_progress = seconds / work.shards * at_once  # seconds that one shard is
    saves, tar = int(in_progress / SAVE_SECONDS), work.tar(work.sizes.image)
    saved = saves * math.ceil(tar / saves / _SAVED) if saves else 0
    # A shard: claim (list, clock, put), is it committed (2), what was saved (list), is there a manifest, tar, manifest,
    # is the tar there, saved images (list), end of the claim; each saved object is deleted; its manifest is read twice.
    one = 13 + _put(tar) + 2 * saved + int(in_progress / RENEWAL)
    groups = -(-work.shards // settings.shards_per_task)
    requests = work.shards * one + 2 * (1 + groups) + groups + 1 + 4 + 4 * work.pages  # groups: what was forgotten
    left = sum(work.stage_bytes(work.sizes.image, work.sizes.manifest, work.rows))
    hours = seconds / 3600
    return Stage("collection", hours, hours * machine.cpu_price, left, requests, bound)


def detecting(work: Work, rehearsed: Rehearsed) -> Stage:
    config, machine = work.detection, work.machine
    rates = {
        "the card": config.batch / rehearsed.seconds(machine.card),
        f"decoding, {config.workers} workers a card": config.workers / figure("prepare"),
    }
    bound = min(rates, key=rates.get)
    processes = min(machine.cards, work.shards)
    seconds = work.images / rates[bound] / processes
    # A shard: claim (3), is it pending (2 lists), manifest (2), revisions and what was forgotten (2 lists), tar, commit
    # (3 and the tar), two manifests for the report (4), end of the claim.
    one = 18 + _put(work.tar(work.sizes.region)) + int(seconds * processes / work.shards / RENEWAL)
    # A process: the root, what is pending (3 lists), and at its end every manifest.
    each = 2 + 2 * work.pages + 1 + 2 * work.pages + work.shards
    left = sum(work.stage_bytes(work.sizes.region, work.sizes.region_manifest, work.images))
    hours = seconds / 3600
    euros = hours * processes * machine.price
    return Stage(
        "detection",
        hours,
        euros,
        left,
        work.shards * one + processes * each,
        f"{bound}: {rates[bound]:.3g} images/s a card",
    )


def pretraining(work: Work, rehearsed: Rehearsed) -> tuple[Stage, float]:
    """The stage, and pairs a second."""
    recipe, machine, data = work.recipe, work.machine, work.recipe.data
    card = data.gradient_accumulation * rehearsed.seconds(machine.card)
    loading = loading_seconds(work)
    seconds = max(card, loading) if data.workers else card + loading
    bound = "the card" if data.workers == 0 or card >= loading else f"loading, {data.workers} workers a card"
    validations = -(-recipe.steps // recipe.validate_every) if data.held_out else 0
    samples = (recipe.validation_samples or 0) * len(data.held_out or ())
    # Each with its own image and with another.
    validating = 2 * samples * figure("forward") * seconds / data.batch
    hours = (recipe.steps * seconds + validations * validating) / 3600
    saves = -(-recipe.steps // recipe.save_every)
    cached, filling = cached_share(work)
    reads = recipe.steps * data.batch * alone(work, work.images) * (1 - cached) + validations * samples * alone(
        work, samples
    )
    requests = filling + round(reads / data.chunk)
    # The root, its detector (2), the snapshot (what was forgotten, every manifest, a put, four reads) and, in each
    # process, its index, and what was forgotten since (2 lists).
    requests += 2 + 2 * work.pages + 5 + work.shards + _put(work.snapshot) + machine.cards * (6 + work.pages)
    # A checkpoint: three small files and two large ones; logs (5); which is best, and what is to be deleted (15).
    requests += saves * (3 + _put(work.sizes.model) + _put(work.sizes.optimizer) + 5 + 15) + round(hours * 3600 / _BEAT)
    left = work.snapshot + kept(work.recipe) * (work.sizes.model + work.sizes.optimizer)
    rate = data.batch / seconds
    stage = Stage(
        "pre-training", hours, hours * machine.cards * machine.price, left, requests, f"{bound}: {rate:,.0f} pairs/s"
    )
    return stage, rate


def alone(work: Work, images: int) -> float:
    """The share of the samples of a batch, drawn from so many, that need a request of their own: one request reads
    those that lie near each other in a tar."""
    data = work.recipe.data
    together = data.batch / work.machine.cards / data.gradient_accumulation
    return max(0.0, 1 - together / max(1, images)) ** (1 + int(_NEAR / work.sizes.region))


def kept(recipe: Recipe) -> int:
    """Checkpoints that a run leaves at most: the newest, and one that validated best."""
    return min(-(-recipe.steps // recipe.save_every), recipe.keep_checkpoints + bool(recipe.data.held_out))


def loading_seconds(work: Work) -> float:
    """Of the pairs of a step, on each card's loading processes."""
    data = work.recipe.data
    features = work.recipe.model.regions.features == "precomputed"
    return data.batch / work.machine.cards * figure("load_features" if features else "load") / max(1, data.workers)


def cached_share(work: Work) -> tuple[float, int]:
    """The share of the samples that the folder of data.cache holds, and the requests that fill it."""
    if work.recipe.data.cache is None:
        return 0.0, 0
    tars = work.images * work.sizes.region
    held = min(tars, work.recipe.data.cache_gb * GB)
    return held / tars, math.ceil(held / _PART)


def checks_of(work: Work, training: Rehearsed, detection: Rehearsed) -> Iterator[Check]:
    settings, data, card = work.collection, work.recipe.data, work.machine.card
    memory, context = card.memory, figure("context")
    parts = math.ceil(training.peak / max(1.0, memory - context)) * data.gradient_accumulation
    way = f"about data.gradient_accumulation={parts}, or activation_checkpointing=true"
    yield Check("GPU memory, pre-training", (training.peak + context) / GB, memory / GB, "GB", way)
    way = "--detect batch=N, a smaller one"
    yield Check("GPU memory, detection", (detection.peak + context) / GB, memory / GB, "GB", way)
    way = f"--collect rows_per_shard={-(-work.rows // MOST_SHARDS)} or more"
    yield Check("shards of a catalog", work.shards, MOST_SHARDS, "shards", way)
    largest = max(work.tar(work.sizes.image), work.tar(work.sizes.region))
    fewer = max(1, int(settings.rows_per_shard * figure("tar") / largest))
    way = f"--collect rows_per_shard={fewer}, or less"
    yield Check("memory for a tar", largest / GB, figure("tar") / GB, "GB", way)
    tars, spool, disk = work.images * work.sizes.region / GB, temporary(work) / GB, work.machine.disk
    cached = min(data.cache_gb, tars) if data.cache else 0.0
    way = (
        f"data.cache_gb={math.floor(disk / GB - spool)}"
        if disk and cached
        else "a larger disk, or a smaller rows_per_shard"
    )
    yield Check("disk of a machine", spool + cached, disk and disk / GB, "GB", way)
    if data.cache:
        way = f"data.cache_gb={math.ceil(tars)}: what is not in the cache is one request a sample"
        yield Check("region shards in data.cache", tars, data.cache_gb, "GB", way)
    step = data.gradient_accumulation * training.seconds(card)
    needed = loading_seconds(work) * max(1, data.workers) / step
    way = f"data.workers={math.ceil(needed)}, and as many cores a card"
    if data.workers:
        yield Check("loading processes a card", needed, data.workers, "", way)


def temporary(work: Work) -> float:
    """Bytes that TMPDIR holds at most: images in progress, or a tar that is made, or a snapshot and the index."""
    at_once = min(SHARDS_AT_ONCE, work.shards)
    collected = (at_once + 1) * work.tar(work.sizes.image)
    index = 16 * work.images if work.images >= _SHARED_INDEX else 0
    return max(collected, work.tar(work.sizes.region), work.snapshot + index)


def make_plan(
    recipe: Recipe,
    listed: CaptionList,
    survival: Survival,
    collection: CollectSettings,
    detection: DetectionConfig,
    machine: Machine,
    regions: float | None = None,
) -> Plan:
    """regions: of an image, on average; None: the middle of what the selection allows.

    ValueError names the setting that is wrong.
    """
    check_pretraining(recipe)
    check_shares(recipe.data, machine.cards)
    network = network_of(detection)
    most = min(detection.selection.maximum, network.post_nms)
    if regions is not None and not 0 <= regions <= most:
        raise ValueError(f"--regions is {regions:g}; the detector keeps 0 to {most} of an image")
    regions = (min(detection.selection.minimum, most) + most) / 2 if regions is None else regions
    sizes = sizes_of(recipe, listed, survival.image, regions, collection, detection)
    images = round((listed.rows - listed.duplicates) * survival.share)
    shards = -(-listed.rows // collection.rows_per_shard)
    work = Work(recipe, collection, detection, machine, survival, sizes, listed.rows, max(1, images), shards)
    share = machine.cards * recipe.data.gradient_accumulation
    training = machine.rehearse_training(recipe, recipe.data.batch // share, recipe.data.text_batch // share)
    detected = machine.rehearse_detection(network, detection.batch, detection.precision, detection.tf32)
    stage, rate = pretraining(work, training)
    catalog = [
        work.stage_bytes(0, manifest, rows)[1]
        for manifest, rows in ((sizes.manifest, listed.rows), (sizes.region_manifest, images))
    ]
    return Plan(
        recipe=recipe.name,
        card=machine.card.name,
        cards=machine.cards,
        rows=listed.rows,
        duplicates=listed.duplicates,
        survival=survival,
        images=images,
        shards=shards,
        epochs=recipe.steps * recipe.data.batch / work.images,
        pairs_per_second=rate,
        stages=(collecting(work), detecting(work, detected), stage),
        bytes={
            "image shards": work.stage_bytes(sizes.image, sizes.manifest, 0)[0],
            "region shards": work.stage_bytes(sizes.region, sizes.manifest, 0)[0],
            "region shards without features": work.stage_bytes(sizes.region_bare, sizes.manifest, 0)[0],
            "region shards with features": work.stage_bytes(sizes.region_features, sizes.manifest, 0)[0],
            "catalog": sum(catalog) + work.snapshot,
            "checkpoint": sizes.model + sizes.optimizer,
            "checkpoints kept": kept(recipe) * (sizes.model + sizes.optimizer),
            "TMPDIR": temporary(work),
        },
        checks=tuple(checks_of(work, training, detected)),
    )


def check_pretraining(recipe: Recipe) -> None:
    if not isinstance(recipe.task, PretrainingSettings):
        names = ", ".join(name for name in RECIPES if name.startswith("pretrain_"))
        raise ValueError(f"recipe {recipe.name} is no pre-training; name one of {names}")
