"""Train a recipe: data -> model -> task -> loop.

    vlbert train RECIPE [--field value ...]
    torchrun --nproc-per-node N -m vlbert.train RECIPE [--field value ...]

The first is one process, on one GPU if there is any; the second one process for each of N GPUs. RECIPE is a function of
vlbert/recipes/; fields are those of vlbert/config.py, such as --data.root s3://bucket/vlbert. A run that was stopped
goes on from its last checkpoint; a finished one says so.
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
from training.checkpoint import Writer
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
from vlbert.resume import OpenedData, start_or_resume
from vlbert.tasks.base import TaskModel
from vlbert.validate import validate

Observe = Callable[[int, Sequence[Batch]], None]


@dataclass(eq=False, kw_only=True)
class VLBertRun(Run):
    """A training in one process, made by `prepare`.

    observe(step, this process's parts) sees what each step, from 0 on, is computed from.
    """

    recipe: Recipe
    model: TaskModel
    opened: OpenedData
    data: TrainingData
    detector: dict | None  # see detector_of
    observe: Observe = lambda step, parts: None

    @property
    def samples_per_step(self) -> int:
        return self.recipe.data.batch + self.recipe.data.text_batch

    @property
    def max_unreadable(self) -> float:
        return self.recipe.data.unreadable * sum(len(dataset.samples) for dataset in self.data.datasets)

    def batches(self) -> Iterator[Sequence[Batch]]:
        """New shards enter at boundaries of epochs."""
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
            del ahead  # what was loaded in advance is of the old shards, and so are the workers

    def prepare(self, step: int) -> None:
        super().prepare(step)
        # Dropout: a resumed run draws the same.
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
        skipped = []  # those in `unreadable` are of training steps, and counted in its next line
        found = validate(self.model, self.recipe, self.opened.held_out, self.world, skipped)
        self.note_unreadable(skipped)
        return found

    def save(self, done: int, validation: Mapping[str, float], loop_state: Mapping[str, Any]) -> None:
        recipe = self.recipe
        consumed = {"samples_consumed": done * recipe.data.batch, "text_consumed": done * recipe.data.text_batch}
        data = [
            {**one.pinned, "weight": one.weight, "snapshots": [asdict(span) for span in one.spans]}
            for one in self.data.datasets
        ]
        state = self.opened.pinned | {"data": data, "seed": recipe.data.seed} | consumed
        state |= {"validation": dict(validation), "loop": loop_state}
        save_checkpoint(
            self.writer,
            recipe.run,
            done,
            recipe,
            self.model,
            self.optimizer,
            self.opened.vocabulary,
            self.opened.num_classes,
            state,
            self.detector,
        )


def train(recipe: Recipe, world: World, observe: Observe = lambda step, parts: None) -> dict[str, float]:
    """Train the whole run, or the rest of it; return the metrics of the last validation. observe: see VLBertRun."""
    check_shares(recipe.data, world.size)
    run = prepare(recipe, world, print if world.first else lambda *_: None)
    if run is None:
        return last_metrics(open_store(recipe.data.root, write=False), recipe.run)
    run.observe = observe
    run.model.train()
    with recipe_precision(recipe), run.writer:
        metrics = train_steps(run)
    if world.first:
        print(f"Reported in the paper: {run.data.task.paper}", flush=True)
    return metrics


def enter_new_shards(run: VLBertRun, step: int, number: int, boundary: int) -> bool:
    """Pin a newer snapshot of a dataset, if there is one, from its sample `boundary` on; return whether there was.

    It has new shards, or others in a newer revision: with rows that were requested again, or without samples that were
    withdrawn.
    """
    world, store, dataset = run.world, run.writer.store, run.data.datasets[number]
    name, stage, before = dataset.pinned["dataset"], dataset.pinned["stage"], dataset.spans[-1]
    pinned = dataset.samples.index.snapshot
    cache = dataset.samples.cache  # from now on filled with the tars of that snapshot
    found, samples = None, None

    def opened(snapshot: str) -> ShardSamples:
        return open_samples(store, name, None, {**dataset.pinned, "snapshot": snapshot}, world, cache)[0]

    if world.first:
        try:
            found = pin_newer_snapshot(store, name, pinned)
            samples = found and opened(found)
        except (*EXPECTED, OSError) as error:  # the run goes on without the new shards
            found = None
            print(f"no new shards enter in step {step + 1}, the next boundary looks again: {error}", flush=True)
    found = distributed.broadcast(found, world)
    if found is None:
        return False
    samples = samples or opened(found)
    run.data.switch_snapshot(number, samples, run.data.task.examples(samples, None), found, boundary)
    now = dataset.spans[-1]
    if run.log:
        run.log.event("snapshot", step + 1, {"dataset": name, **asdict(now)})  # that of the first step that uses it
        new = samples.index.snapshot.shards != pinned.shards
        what = "new shards enter" if new else "revised shards enter"
        print(
            f"{what} in step {step + 1}, at the beginning of epoch {now.epoch}: {now.examples} examples an "
            f"epoch instead of {before.examples}, {name}/{stage} (snapshot {found})",
            flush=True,
        )
    return True


def prepare(recipe: Recipe, world: World, report: Callable[[str], None]) -> VLBertRun | None:
    """Return the run, new or from its last checkpoint (vlbert/resume.py); None if it is complete."""
    store = open_store(recipe.data.root)
    start = start_or_resume(recipe, store, world, report)
    if start is None:
        return None
    data = start.data
    training = TrainingData(data.datasets, data.task, recipe.data, recipe.model.regions, world, data.corpus)
    stage = data.datasets[0].pinned["stage"]  # of all
    snapshots = [dataset.spans[-1].snapshot for dataset in data.datasets]
    return VLBertRun(
        recipe=recipe,
        world=world,
        writer=Writer(store),
        step=start.step,
        model=start.model,
        optimizer=start.optimizer,
        opened=data,
        data=training,
        detector=detector_of(store, data.datasets[0].pinned["dataset"], stage) if world.first else None,
        metadata={
            "detector": stage.removeprefix("regions/"),
            "snapshot": " + ".join(snapshots),
        },
        loop_state=start.loop_state,
    )


def detector_of(store: ObjectStore, dataset: str, stage: str) -> dict:
    """Return the `id` of the detector whose regions a stage has, and its `metadata`, None if no manifest has it."""
    catalog = Catalog(store, dataset)
    committed = catalog.shards(stage)[:1]
    metadata = catalog.headers(stage, committed)[committed[0]].meta.get("config") if committed else None
    return {"id": stage.partition("/")[2], "metadata": metadata}


def main(arguments: list[str] | None = None) -> None:
    run_program("vlbert train", __doc__, RECIPES, check_complete, train, arguments)


if __name__ == "__main__":
    main()
