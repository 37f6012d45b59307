"""Settings of the stages: typed, frozen, checked when made, and shown as a form in the flow UI."""

import functools
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from detectors.config import AnnotationConfig, DetectionConfig
from flows.supervisor import GRACE
from storage.collect.plan import CollectSettings
from storage.settings import FORM

if TYPE_CHECKING:
    from vlbert.config import Recipe


@dataclass(frozen=True)
class Dataset(CollectSettings):
    """One folder of images in the storage, where they come from and how regions are found in them."""

    detector: DetectionConfig = field(kw_only=True)
    """How regions are found."""


@dataclass(frozen=True)
class Processes:
    """The processes that one training runs in, on this machine or on nodes of a cluster, and when to give them up."""

    __pydantic_config__ = FORM

    count: int = 1
    """On each node: one a GPU; on CPUs any number."""
    nodes: int = 1
    """Machines that train together; for more than one give the launcher."""
    launcher: tuple[str, ...] = ()
    """What runs a command once on each node, with PET_RDZV_ENDPOINT for torchrun, and ends it when it is ended: srun,
    --nodes=2, ..., bash, docker/slurm/rendezvous.sh; none: the training runs on this machine."""
    threads: int | None = None
    """CPU threads of each process; none: the cores divided by `count`."""
    timeout: float | None = None
    """Seconds that the training may take."""
    restarts: int = 0
    """How often torchrun starts all of them again, from the last checkpoint, when one has died. An error in data or
    settings comes again each time."""
    grace: float = GRACE
    """Seconds between SIGTERM, at which a training saves, and SIGKILL, where the flow ends first. Processes of a
    cancelled run may live for as long."""

    def __post_init__(self):
        for name, least in (("count", 1), ("nodes", 1), ("restarts", 0), ("grace", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"Processes.{name} is {getattr(self, name)}; it must be at least {least}")
        if self.nodes > 1 and not self.launcher:
            raise ValueError(
                f"Processes.nodes is {self.nodes} and there is no launcher; on SLURM launcher is srun, "
                f"--nodes={self.nodes}, --ntasks-per-node=1, --wait=60, bash, docker/slurm/rendezvous.sh"
            )

    @property
    def world(self) -> int:
        """How many there are on all nodes."""
        return self.count * self.nodes

    @property
    def environment(self) -> dict[str, str]:
        """For torchrun, which would otherwise give 30 s to save."""
        variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(30, math.ceil(self.grace)))}
        return variables | ({"OMP_NUM_THREADS": str(self.threads)} if self.threads else {})

    def command(self, program: str, arguments: Sequence[str]) -> list[str]:
        """The command that runs `python -m program arguments...` in them."""
        together = "--standalone" if self.nodes == 1 else f"--nnodes={self.nodes}"
        options = [together, f"--nproc-per-node={self.count}", f"--max-restarts={self.restarts}"]
        return [*self.launcher, sys.executable, "-m", "training.launch", *options, "-m", program, *arguments]


@functools.cache
def make_recipe_of(recipe: str, run: str, overrides: tuple[str, ...]) -> "Recipe":
    """Return the recipe that a stage's settings name, parsed once a process. ValueError as of `vlbert train`."""
    from training.program import make_recipe  # here, because it brings torch, which other stages do without
    from vlbert.recipes import RECIPES

    name, *own = shlex.split(recipe) or [""]
    return make_recipe(name, [*own, *([f"--run_name={run}"] if run else []), *overrides], RECIPES)


@dataclass(frozen=True)
class TrainDetectorSettings(AnnotationConfig):
    """One training of a detector on annotated images; what is None or empty stays as the recipe has it."""

    __pydantic_config__ = FORM

    recipe: str = "detector_vg_resnet101"
    """Of detectors/recipes.py."""
    run: str = ""
    """Name under ROOT/runs; empty: the recipe's."""
    init_from: str | None = None
    """Weight file to start from: an ImageNet ResNet's, or a detector's."""
    overrides: tuple[str, ...] = ()
    """--field=value, as `vlbert train-detector` takes them."""
    processes: Processes = Processes()
    """The processes that it runs in."""


@dataclass(frozen=True)
class PretrainSettings:
    """One pre-training; fields of the recipe that `overrides` does not name stay as the recipe has them."""

    __pydantic_config__ = FORM

    recipe: str = "pretrain_vlbert"
    """Recipe of vlbert/recipes/, with its arguments: `pretrain_vlbert --size large`."""
    run: str = ""
    """Name under ROOT/runs; empty: the recipe's."""
    datasets: Mapping[str, float | None] = field(default_factory=lambda: {"captions": None})
    """Datasets to train on, each with its weight; without weights: as many examples of each as it has."""
    held_out: tuple[str, ...] = ()
    """Datasets to validate on; none: no validation."""
    text: tuple[str, ...] = ()
    """Text-only corpus: files on this machine, one document a line; none: no text-only examples."""
    vocabulary: str | None = None
    """vocab.txt on this machine; none: built from the corpus and `vocabulary_captions`, or BERT's without a corpus."""
    vocabulary_size: int | None = None
    """Most tokens of a vocabulary that is built; none: 30,522."""
    vocabulary_captions: tuple[str, ...] = ()
    """Caption lists whose words a vocabulary that is built must hold."""
    monitored_words: tuple[str, ...] = ()
    """Words that only the image tells: validation has metrics of them alone."""
    overrides: tuple[str, ...] = ()
    """--field=value, as `vlbert train` takes them."""
    processes: Processes = Processes()
    """The processes that it runs in."""

    @property
    def made(self) -> "Recipe":
        """The recipe, with its overrides."""
        return make_recipe_of(self.recipe, self.run, self.overrides)


@dataclass(frozen=True)
class FinetuneSettings:
    """One fine-tuning on a task's own dataset, from a checkpoint of pre-training or, to compare, without one."""

    __pydantic_config__ = FORM

    task: Literal["refcoco", "vqa", "vcr", "retrieval"] = "refcoco"
    """Of vlbert/tasks."""
    recipe: str = ""
    """Recipe of vlbert/recipes/, with its arguments; empty: finetune_TASK."""
    run: str = ""
    """Name under ROOT/runs; empty: the recipe's."""
    folder: str = ""
    """The task's annotations, as its authors ship them, on this machine."""
    dataset: str = ""
    """Dataset to train on; empty: refcoco+, vqa, vcr or flickr30k, as the task is."""
    detector: str | None = None
    """Id of the detector whose regions to read; none: that of the pipeline, or the only one that there is."""
    pretraining: str = ""
    """Run of pre-training under ROOT/runs; empty: that of the pipeline."""
    checkpoint: str = "latest"
    """`latest` of that run, one of its steps (step-0000400), ROOT/runs/RUN/step-... of any root, or `none`."""
    evaluate: tuple[str, ...] = ()
    """Splits, as the task's files name them, to evaluate the last checkpoint on: predictions, a page, and the files for
    a leaderboard."""
    overrides: tuple[str, ...] = ()
    """--field=value, as `vlbert train` takes them."""
    processes: Processes = Processes()
    """The processes that it runs in."""

    @property
    def dataset_name(self) -> str:
        """The dataset, also where only the task is named."""
        return self.dataset or {"refcoco": "refcoco+", "retrieval": "flickr30k"}.get(self.task, self.task)

    @property
    def recipe_name(self) -> str:
        """The recipe, also where only the task is named."""
        return self.recipe or f"finetune_{self.task}"

    @property
    def made(self) -> "Recipe":
        """The recipe, with its overrides."""
        return make_recipe_of(self.recipe_name, self.run, self.overrides)


@dataclass(frozen=True)
class CompareSettings:
    """One comparison of variants x tasks x seeds (docs/results.md)."""

    __pydantic_config__ = FORM

    plan: str = "family_demo"
    """Of vlbert/comparison/plans.py, or MODULE:FUNCTION."""
    fields: tuple[str, ...] = ()
    """[SCOPE:]field=value, as `vlbert compare` takes them."""
    seeds: tuple[int, ...] = ()
    """In place of the plan's."""
    jobs: int | None = None
    """Trainings at a time; none: one a GPU or, without any, one a core."""
    grace: float = 60.0
    """Seconds between SIGTERM, at which trainings save, and SIGKILL, where the flow ends first."""


def quiet_prefect(home: Path) -> dict[str, str]:
    """Variables that every script sets before it imports prefect: a home of its own, and no telemetry.

    Prefect's client reaches its server on this machine past any HTTP proxy; the user's other exceptions stay.
    """
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    exempt = "*" if given == "*" else ",".join(filter(None, (given, "127.0.0.1", "localhost")))
    return {
        "PREFECT_HOME": str(home.absolute()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": exempt,
        "no_proxy": exempt,
    }
