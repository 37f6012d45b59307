"""Train a recipe: data -> model -> task -> loop.

    vlbert train RECIPE [--field value ...]
    torchrun --nproc-per-node N -m vlbert.train RECIPE [--field value ...]

The first command runs one process, on a GPU if there is one. The second runs one process on each of N GPUs. RECIPE is a
function in vlbert/recipes/. Fields are those of vlbert/config.py, such as --data.root s3://bucket/vlbert. A stopped run
resumes from its last checkpoint. If the run is already complete, the program says so and exits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from storage.catalog import Catalog
from storage.object_store import ObjectStore, open_store
from storage.order import mix
from storage.reading import ShardSamples
from training import distributed
from training.checkpoint import Writer, claim_run
from training.distributed import World
from training.loading import EXPECTED, batches
from training.log import last_metrics
from training.loop import Run, train_steps
from training.metrics import Losses
from training.precision import autocast, recipe_precision
from training.program import run_program
from vlbert.checkpoint import save_checkpoint
from vlbert.config import Recipe
from vlbert.data.batch import Batch
from vlbert.data.loading import TrainingData, check_shares
from vlbert.data.samples import open_samples, pin_newer_snapshot
from vlbert.initial_weights import check_complete
from vlbert.recipes import RECIPES
from vlbert.resume import OpenedData, examples_of, start_or_resume
from vlbert.tasks.base import TaskModel
from vlbert.validate import validate

Observe = Callable[[int, Sequence[Batch]], None]


@dataclass(eq=False, kw_only=True)
class VLBertRun(Run):
    """One process's part of a training run. vlbert.train.prepare makes it."""

    recipe: Recipe
    model: TaskModel
    opened: OpenedData
    data: TrainingData
    detector: dict | None  # as returned by detector_of; None on ranks other than 0
    observe: Observe = lambda step, parts: None  # called before each step with its number, from 0, and its batches

    @property
    def samples_per_step(self) -> int:
        return self.recipe.data.batch + self.recipe.data.text_batch

    @property
    def max_unreadable(self) -> float:
        return self.recipe.data.unreadable * sum(len(dataset.samples) for dataset in self.data.datasets)

    def batches(self) -> Iterator[Sequence[Batch]]:
        """Yield the batches of each remaining step. New shards are added at epoch boundaries."""
        done, steps = self.step, self.recipe.steps
        while done < steps:
            ahead = iter(batches(self.data, range(done, steps), self.recipe.data.workers, self.world.device))
            for step in range(done, steps):
                if any([enter_new_shards(self, step, *boundary) for boundary in self.data.boundaries(step)]):
                    break
                parts = next(ahead)
                self.observe(step, parts)
                yield parts
                done = step + 1
            del ahead  # the workers, and the batches that they loaded in advance, use the old shards

    def prepare(self, step: int) -> None:
        super().prepare(step)
        # Seed dropout per step, so that a resumed run draws the same masks.
        torch.manual_seed(mix(self.recipe.data.seed, step, self.world.rank) % 2**63)

    def losses(self, model: torch.nn.Module, part: Batch) -> Losses:
        self.unreadable += part.unreadable
        with autocast(self.recipe, self.world):
            return model(part)

    def keys(self, part: Batch) -> Sequence[str]:
        return part.keys

    @property
    def validate(self) -> Callable[[], tuple[dict[str, float], list[dict]]] | None:
        return self._validate if self.opened.held_out else None

    def _validate(self) -> tuple[dict[str, float], list[dict]]:
        skipped = []  # not self.unreadable: that is counted in the next log line of training
        result = validate(self.model, self.recipe, self.opened.held_out, self.world, skipped)
        self.note_unreadable(skipped)
        return result

    def save(self, done: int, validation: Mapping[str, float], loop_state: Mapping[str, Any]) -> None:
        recipe = self.recipe
        consumed = {"samples_consumed": done * recipe.data.batch, "text_consumed": done * recipe.data.text_batch}
        data = [
            {**dataset.pinned, "weight": dataset.weight, "snapshots": [asdict(span) for span in dataset.spans]}
            for dataset in self.data.datasets
        ]
        state = self.opened.pinned | {"data": data, "seed": recipe.data.seed} | consumed
        state |= {"validation": dict(validation), "loop": loop_state}
        save_checkpoint(self.writer, done, recipe, self.model, self.optimizer, state, self.detector)


def train(recipe: Recipe, world: World, observe: Observe = lambda step, parts: None) -> dict[str, float]:
    """Train a new or resumed run. Returns the metrics of its last validation. `observe` is called before each step."""
    check_complete(recipe)
    check_shares(recipe.data, world.size, recipe.model.regions)
    store = open_store(recipe.data.root, write=False)
    with claim_run(store, recipe.run, world) as check:
        run = prepare(recipe, world, print if world.first else lambda *_: None)
        if run is None:
            return last_metrics(store, recipe.run)
        run.observe, run.writer.check = observe, check
        run.model.train()
        with recipe_precision(recipe), run.writer:
            metrics = train_steps(run)
    return metrics


def enter_new_shards(run: VLBertRun, step: int, number: int, boundary: int) -> bool:
    """Switch the dataset at index `number` to a newer snapshot. Returns False if there is none, or if opening it fails.

    A newer snapshot has new shards, or revised ones (images were requested again, or samples were withdrawn).
    `boundary` is the number of the new snapshot's first draw. Draws are numbered across epochs (vlbert/data/order.py).
    """
    world, store, dataset = run.world, run.writer.store, run.data.datasets[number]
    name, stage, before = dataset.pinned["dataset"], dataset.pinned["stage"], dataset.spans[-1]
    pinned = dataset.samples.index.snapshot
    cache = dataset.samples.cache  # from now on, it fetches the tars of the new snapshot
    newer, samples = None, None

    def opened(snapshot: str) -> ShardSamples:
        return open_samples(store, name, None, {**dataset.pinned, "snapshot": snapshot}, world, cache)[0]

    if world.first:
        try:
            newer = pin_newer_snapshot(store, name, pinned)
            samples = opened(newer) if newer else None
        except (*EXPECTED, OSError) as error:  # the run continues without the new shards
            newer = None
            print(f"no new shards in step {step + 1}; the next epoch boundary checks again: {error}", flush=True)
    newer = distributed.broadcast(newer, world)
    if newer is None:
        return False
    samples = samples or opened(newer)
    examples = examples_of(run.recipe, run.data.task, samples)
    run.data.switch_snapshot(number, samples, examples, newer, boundary)
    now = dataset.spans[-1]
    if run.log:
        run.log.event("snapshot", step + 1, {"dataset": name, **asdict(now)})  # the first step that uses it
        kind = "new shards" if samples.index.snapshot.shards != pinned.shards else "revised shards"
        print(
            f"{kind} from step {step + 1}, the beginning of epoch {now.epoch}: {now.examples} examples per "
            f"epoch instead of {before.examples}, {name}/{stage} (snapshot {newer})",
            flush=True,
        )
    return True


def prepare(recipe: Recipe, world: World, report: Callable[[str], None]) -> VLBertRun | None:
    """Start a run, or resume it from its last checkpoint (vlbert/resume.py). Returns None if the run is complete."""
    store = open_store(recipe.data.root)
    started = start_or_resume(recipe, store, world, report)
    if started is None:
        return None
    data, model, optimizer, state = started
    training = TrainingData(data.datasets, data.task, recipe.data, recipe.model, world, data.corpus)
    stage = data.datasets[0].pinned["stage"]  # the same in all datasets
    return VLBertRun(
        recipe=recipe,
        world=world,
        writer=Writer(store),
        step=state.get("step", 0),
        model=model,
        optimizer=optimizer,
        opened=data,
        data=training,
        detector=detector_of(store, data.datasets[0].pinned["dataset"], stage) if world.first else None,
        metadata={
            "detector": stage.removeprefix("regions/"),
            "snapshot": " + ".join(dataset.spans[-1].snapshot for dataset in data.datasets),
        },
        loop_state=state.get("loop"),
    )


def detector_of(store: ObjectStore, dataset: str, stage: str) -> dict:
    """Return the `id` and `metadata` of a region stage's detector. `metadata` is None if the stage has no shards."""
    catalog = Catalog(store, dataset)
    committed = catalog.shards(stage)[:1]
    metadata = catalog.headers(stage, committed)[committed[0]].meta.get("config") if committed else None
    return {"id": stage.partition("/")[2], "metadata": metadata}


def main(arguments: list[str] | None = None) -> None:
    run_program("vlbert train", __doc__, RECIPES, check_complete, train, arguments)


if __name__ == "__main__":
    main()
