"""Settings of the stages, as frozen dataclasses that check their values. Prefect's UI shows them as forms."""

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
from storage.settings import FORM, check

if TYPE_CHECKING:
    from vlbert.config import Recipe


@dataclass(frozen=True)
class Dataset(CollectSettings):
    """Settings of an image dataset: where its images come from, and the detector that finds their regions."""

    detector: DetectionConfig = field(kw_only=True)
    """Detector of the dataset's regions, and its settings."""


@dataclass(frozen=True)
class Processes:
    """Processes of one training run, on this machine or on the nodes of a cluster, and their time limits."""

    __pydantic_config__ = FORM

    count: int = 1
    """Processes per node: one per GPU; on CPUs, any number."""
    nodes: int = 1
    """Number of machines that train together; more than one needs a launcher."""
    launcher: tuple[str, ...] = ()
    """Command that runs another command once on each node, sets PET_RDZV_ENDPOINT for torchrun, and ends them all
    when it is ended: srun, --nodes=2, ..., bash, docker/slurm/rendezvous.sh; empty: train on this machine."""
    threads: int | None = None
    """CPU threads per process; None: cores / `count`."""
    timeout: float | None = None
    """Maximum duration of the training in seconds; None: no limit."""
    restarts: int = 0
    """Number of times that torchrun restarts all processes from the last checkpoint after one has died. An error in
    the data or settings recurs each time."""
    grace: float = GRACE
    """If the flow ends first: seconds between SIGTERM, on which the training saves, and SIGKILL. A cancelled run may
    continue for this long."""

    def __post_init__(self):
        for name, least in (("count", 1), ("nodes", 1), ("restarts", 0), ("grace", 0)):
            check(self, getattr(self, name) >= least, name, f"at least {least}")
        if self.nodes > 1 and not self.launcher:
            raise ValueError(
                f"Processes.nodes is {self.nodes}, but launcher is empty; on SLURM, set launcher to srun, "
                f"--nodes={self.nodes}, --ntasks-per-node=1, --wait=60, bash, docker/slurm/rendezvous.sh"
            )

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for torchrun: CPU threads, and the shutdown timeout (`grace`, but at least 30 s)."""
        variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(30, math.ceil(self.grace)))}
        return variables | ({"OMP_NUM_THREADS": str(self.threads)} if self.threads else {})

    def command(self, program: str, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs the module `program` with these arguments under torchrun."""
        nodes = "--standalone" if self.nodes == 1 else f"--nnodes={self.nodes}"
        options = [nodes, f"--nproc-per-node={self.count}", f"--max-restarts={self.restarts}"]
        return [*self.launcher, sys.executable, "-m", "training.launch", *options, "-m", program, *arguments]


@functools.cache
def resolve_recipe(recipe: str, run: str, overrides: tuple[str, ...]) -> "Recipe":
    """Return the recipe that a stage's settings describe. Raises ValueError if they are invalid."""
    from training.program import make_recipe  # here, because it imports torch, which other stages do not need
    from vlbert.recipes import RECIPES

    name, *arguments = shlex.split(recipe) or [""]
    return make_recipe(name, [*arguments, *([f"--run_name={run}"] if run else []), *overrides], RECIPES)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings that all training stages have."""

    __pydantic_config__ = FORM

    run: str = ""
    """Name of the run under ROOT/runs; empty: the recipe's name."""
    overrides: tuple[str, ...] = ()
    """Changed fields of the recipe, as arguments of `vlbert train` or `vlbert train-detector`: --field=value."""
    processes: Processes = Processes()
    """Processes of the training."""


@dataclass(frozen=True)
class TrainDetectorSettings(TrainingSettings, AnnotationConfig):
    """Settings for training a detector on annotated images.

    A setting that is None or empty keeps the recipe's value.
    """

    recipe: str = "detector_vg_resnet101"
    """Recipe of detectors/recipes.py."""
    init_from: str | None = None
    """Weight file to start from: of an ImageNet ResNet, or of a detector."""


@dataclass(frozen=True)
class PretrainSettings(TrainingSettings):
    """Settings of a pre-training run: a recipe, and changes to some of its fields."""

    recipe: str = "pretrain_vlbert"
    """Recipe of vlbert/recipes/, with its arguments, such as `pretrain_vlbert --size large`."""
    datasets: Mapping[str, float | None] = field(default_factory=lambda: {"captions": None})
    """Datasets to train on, each with its sampling weight; without weights: in proportion to their sizes."""
    held_out: tuple[str, ...] = ()
    """Datasets to validate on; empty: the share of `datasets` that the recipe holds out (data.held_out_share)."""
    text: tuple[str, ...] = ()
    """Text-only corpus: files on this machine, one document per line; empty: no text-only examples."""
    vocabulary: str | None = None
    """vocab.txt on this machine; None: built from the corpus and `vocabulary_captions`, or BERT's without a corpus."""
    vocabulary_size: int | None = None
    """Maximum number of tokens of a built vocabulary; None: 30,522."""
    vocabulary_captions: tuple[str, ...] = ()
    """Caption lists whose words a built vocabulary must contain."""
    monitored_words: tuple[str, ...] = ()
    """Words that can only be predicted from the image: validation reports separate metrics for them."""

    @property
    def resolved_recipe(self) -> "Recipe":
        """The recipe, with the run name and the overrides applied."""
        return resolve_recipe(self.recipe, self.run, self.overrides)


@dataclass(frozen=True)
class FinetuneSettings(TrainingSettings):
    """Settings of a fine-tuning run. The run starts from a pre-trained checkpoint or, for comparison, without one."""

    task: Literal["refcoco", "vqa", "vcr", "retrieval", "labels"] = "refcoco"
    """Task of vlbert/tasks."""
    recipe: str = ""
    """Recipe of vlbert/recipes/, with its arguments; empty: finetune_TASK."""
    folder: str = ""
    """Local folder with the task's annotations, as published by its authors."""
    dataset: str = ""
    """Dataset to train on; empty: refcoco+, vqa, vcr, flickr30k or pairs, according to the task."""
    detector: str | None = None
    """Id of the detector whose regions to read; None: the pipeline's, or the only one that exists."""
    pretraining: str = ""
    """Pre-training run under ROOT/runs; empty: the pipeline's."""
    checkpoint: str = "latest"
    """`latest` of that run, one of its steps (step-0000400), ROOT/runs/RUN/step-... of any root, or `none`."""
    evaluate: tuple[str, ...] = ()
    """Splits, named as in the task's files, to evaluate the last checkpoint on. Each evaluation writes predictions, a
    page, and the files for a leaderboard."""

    @property
    def dataset_name(self) -> str:
        """Name of the dataset: `dataset`, or the task's default if that is empty."""
        defaults = {"refcoco": "refcoco+", "retrieval": "flickr30k", "labels": "pairs"}
        return self.dataset or defaults.get(self.task, self.task)

    @property
    def recipe_name(self) -> str:
        """Name and arguments of the recipe: `recipe`, or the task's default if that is empty."""
        return self.recipe or f"finetune_{self.task}"

    @property
    def resolved_recipe(self) -> "Recipe":
        """The recipe, with the run name and the overrides applied."""
        return resolve_recipe(self.recipe_name, self.run, self.overrides)


@dataclass(frozen=True)
class CompareSettings:
    """Settings of a comparison of models that are trained on several tasks with several seeds (docs/results.md)."""

    __pydantic_config__ = FORM

    plan: str = "family_demo"
    """Plan of vlbert/comparison/plans.py, or MODULE:FUNCTION."""
    fields: tuple[str, ...] = ()
    """Changed fields of the training runs, as arguments of `vlbert compare`: [SCOPE:]field=value."""
    seeds: tuple[int, ...] = ()
    """Seeds to use instead of the plan's; empty: the plan's."""
    jobs: int | None = None
    """Number of concurrent training runs; None: one per GPU or, without GPUs, one per core."""
    grace: float = 60.0
    """If the flow ends first: seconds between SIGTERM, on which the training runs save, and SIGKILL."""


def quiet_prefect(home: Path) -> dict[str, str]:
    """Return environment variables that disable Prefect's telemetry and put its files into `home`.

    Set the variables before prefect is imported. They also exclude this machine from an HTTP proxy, so that Prefect's
    client reaches a local server. The user's own proxy exclusions are kept.
    """
    exemptions = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    exempt = "*" if exemptions == "*" else ",".join(filter(None, (exemptions, "127.0.0.1", "localhost")))
    return {
        "PREFECT_HOME": str(home.absolute()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": exempt,
        "no_proxy": exempt,
    }
