"""What the stages are told: typed, frozen, checked when made, and shown as a form in the flow UI."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from storage.download import DownloadSettings


@dataclass(frozen=True)
class DetectorSettings:
    """Which detector finds regions; what is None is left to `python -m detectors.run`."""

    backend: Literal["annotated", "faster_rcnn"] = "faster_rcnn"
    annotations: str | None = None  # annotated: file in COCO's detection format
    preset: str | None = None  # faster_rcnn: vg_resnet101, vg_resnet50 or demo
    weights: str | None = None  # faster_rcnn: safetensors file
    untrained: bool = False  # faster_rcnn: random weights, for trials
    minimum: int | None = None  # faster_rcnn: regions an image at least
    maximum: int | None = None  # faster_rcnn: regions an image at most
    threshold: float | None = None  # faster_rcnn: confidence that a region needs
    short_side: int | None = None  # faster_rcnn: pixels of the resized image's shorter side
    post_nms: int | None = None  # faster_rcnn: proposals an image
    device: str | None = None  # faster_rcnn: cpu or cuda
    threads: int | None = None  # faster_rcnn: of its process, on a CPU
    silence: float | None = 86_400.0  # seconds without a finished shard: it hangs

    def __post_init__(self):
        if self.backend == "annotated" and not self.annotations:
            raise ValueError("DetectorSettings: backend annotated needs annotations, a file in COCO's detection format")

    def flags(self) -> list[str]:
        """As `python -m detectors.run` takes them."""
        ours = ("backend", "untrained", "silence")
        values = [field.name for field in dataclasses.fields(self) if field.name not in ours]
        given = [(name, getattr(self, name)) for name in values if getattr(self, name) is not None]
        flags = [f"--backend={self.backend}", *(f"--{name.replace('_', '-')}={value}" for name, value in given)]
        return [*flags, "--untrained"] if self.untrained else flags


@dataclass(frozen=True)
class Dataset:
    """One folder of images in the storage, where they come from and how regions are found in them."""

    name: str  # the folder: captions, held-out, refcoco+, ...
    detector: DetectorSettings
    captions: str | None = None  # caption list to download, `caption TAB url` a line
    images: str | None = None  # or a local folder of image files to import
    download: DownloadSettings = DownloadSettings()
    rows_per_shard: int = 1000  # rows of the list, or image files, that make one shard
    shards_per_task: int = 10  # shards that one Prefect task downloads: more tasks, more to see and to store

    def __post_init__(self):
        if (self.captions is None) == (self.images is None):
            raise ValueError(f"Dataset {self.name}: set captions (a list to download) or images (a local folder)")
        for name in ("rows_per_shard", "shards_per_task"):
            if getattr(self, name) < 1:
                raise ValueError(f"Dataset {self.name}: {name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class Processes:
    """The processes that one training runs in, on this machine, and when to give them up."""

    count: int = 1  # one a GPU; on CPUs any number
    threads: int | None = None  # of each process, on a CPU; None: the cores divided by `count`
    timeout: float | None = None  # seconds that the training may take
    silence: float | None = 3600.0  # seconds without a line of output: it hangs

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(f"Processes.count is {self.count}; it must be at least 1")

    @property
    def environment(self) -> dict[str, str]:
        """For torchrun, which would otherwise give each of several processes one thread."""
        threads = self.threads or max(1, len(os.sched_getaffinity(0)) // self.count)
        return {"OMP_NUM_THREADS": str(threads)}


@dataclass(frozen=True)
class PretrainSettings:
    """One pre-training; fields of the recipe that `overrides` does not name stay as the recipe has them."""

    recipe: str = "pretrain_vlbert_base"  # of vlbert/recipes.py
    run: str = ""  # name under ROOT/runs; empty: the recipe's
    dataset: str = "captions"  # whose regions to learn from
    held_out: str | None = None  # dataset to validate on; None: none
    text: tuple[str, ...] = ()  # text-only corpus: files on this machine, one document a line; none: no text-only rows
    vocabulary: str | None = None  # vocab.txt; None: built from the corpus and `vocabulary_captions`
    vocabulary_size: int = 30_522  # at most so many pieces where it is built
    vocabulary_captions: tuple[str, ...] = ()  # caption lists whose words it must know, where it is built
    watched_words: tuple[str, ...] = ()  # words that only the picture tells: validation counts them apart
    overrides: tuple[str, ...] = ()  # field=value, as `python -m vlbert.train` takes them
    processes: Processes = Processes()


@dataclass(frozen=True)
class FinetuneSettings:
    """One fine-tuning on a task's own dataset."""

    recipe: str = "finetune_refcoco_base"  # of vlbert/recipes.py
    run: str = ""  # name under ROOT/runs; empty: the recipe's
    folder: str = ""  # the task's annotations, as its authors ship them, on this machine
    dataset: str = "refcoco+"  # whose regions to read
    pretrained: bool = True  # start from the checkpoint of pre-training; False: to see what that is worth
    overrides: tuple[str, ...] = ()  # field=value, as `python -m vlbert.train` takes them
    processes: Processes = Processes()


def quiet_prefect(home: Path) -> dict[str, str]:
    """Variables that every script sets before it imports prefect: a home of its own, and no word to anybody outside."""
    return {
        "PREFECT_HOME": str(home.absolute()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
