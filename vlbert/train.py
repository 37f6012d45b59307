"""Train: recipe -> data -> model -> task -> loop.

    torchrun --nproc-per-node N -m vlbert.train RECIPE [field=value ...]

RECIPE is a function of vlbert/recipes.py; fields are those of vlbert/config.py, such as data.root=s3://bucket/vlbert or
optimizer.learning_rate=1e-4. A run that was stopped goes on from its last checkpoint; a finished one says so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from storage.catalog import Catalog
from storage.object_store import ObjectStore, open_store
from storage.reading import ShardSamples
from storage.runs import checkpoints
from storage.settings import override
from storage.shuffle import mix
from training import distributed
from training.checkpoint_files import load_optimizer, settle
from training.distributed import World
from training.log import last_metrics
from training.loop import EXPECTED, Losses, Run, batches, find_recipe, run_program, train_steps
from training.optimizer import make_optimizer
from training.precision import autocast, in_precision_of
from training.writer import Writer
from vlbert.checkpoint import (
    Checkpoint,
    open_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from vlbert.config import DataConfig, Recipe
from vlbert.data.batch import Batch
from vlbert.data.corpus import TextCorpus
from vlbert.data.loading import SnapshotSpan, TrainingData, check_shares
from vlbert.data.samples import any_readable, newer_snapshot, open_cache, open_samples
from vlbert.data.vocabulary import Vocabulary
from vlbert.initial_weights import check_complete, choose_vocabulary, make_model
from vlbert.model.execution import compiled_graphs, execute_as
from vlbert.model.heads import count_parameters
from vlbert.recipes import RECIPES
from vlbert.tasks import make_task, task_of
from vlbert.tasks.base import Examples, TaskModel
from vlbert.validate import validate

Observe = Callable[[int, Sequence[Batch]], None]


@dataclass(eq=False, kw_only=True)
class VLBertRun(Run):
    """All that one process needs to train: made by `prepare`.

    observe(step, this process's parts) sees what each step, from 0 on, is computed from.
    """

    recipe: Recipe
    model: TaskModel
    data: TrainingData
    held_out: tuple[ShardSamples, Examples] | None
    vocabulary: Vocabulary
    num_classes: int
    pinned: dict  # what a checkpoint records of the data, without its spans: they are in `data`
    detector: dict | None  # see detector_of
    observe: Observe = lambda step, parts: None
    reported: set[str] = field(default_factory=set)  # why new shards could not enter

    @property
    def samples_per_step(self) -> int:
        return self.recipe.data.batch + self.recipe.data.text_batch

    @property
    def most_unreadable(self) -> float:
        return self.recipe.data.unreadable * len(self.data.source.samples)

    def batches(self) -> Iterator[Sequence[Batch]]:
        """New shards enter at boundaries of epochs."""
        done, steps = self.step, self.recipe.steps
        while done < steps:
            ahead = iter(batches(self.data, range(done, steps), self.recipe.data.workers, self.world.device))
            for step in range(done, steps):
                boundary = self.data.boundary(step)
                if boundary is not None and enter_new_shards(self, step, boundary):
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
        return self._validate if self.held_out else None

    def _validate(self) -> tuple[dict[str, float], list[dict]]:
        skipped = []  # those in `unreadable` are of training steps, and counted in its next line
        found = validate(self.model, self.recipe, *self.held_out, self.world, skipped)
        self.note_unreadable(skipped)
        return found

    def save(self, done: int, validation: Mapping[str, float], loop_state: Mapping[str, Any]) -> None:
        recipe = self.recipe
        consumed = {"samples_consumed": done * recipe.data.batch, "text_consumed": done * recipe.data.text_batch}
        data = self.pinned["data"] | {"snapshots": [asdict(span) for span in self.data.spans]}
        state = self.pinned | {"data": data, "seed": recipe.data.seed} | consumed
        state |= {"validation": dict(validation), "loop": loop_state}
        save_checkpoint(
            self.writer,
            recipe.run_name,
            done,
            recipe,
            self.model,
            self.optimizer,
            self.vocabulary,
            self.num_classes,
            state,
            self.detector,
        )


def train(recipe: Recipe, world: World, observe: Observe = lambda step, parts: None) -> dict[str, float]:
    """The whole run, or the rest of it; returns the metrics of the last validation. observe: see VLBertRun."""
    check_shares(recipe.data, world.size)
    run = prepare(recipe, world, print if world.first else lambda *_: None)
    if run is None:
        return last_metrics(open_store(recipe.data.root, write=False), recipe.run_name)
    run.observe = observe
    run.model.train()
    with in_precision_of(recipe), run.writer:
        metrics = train_steps(run)
    if world.first and recipe.compile:
        print(f"torch.compile made {compiled_graphs()} graphs", flush=True)
    if world.first:
        print(f"on the real data: {run.data.source.task.paper}", flush=True)
    return metrics


def enter_new_shards(run: VLBertRun, step: int, boundary: int) -> bool:
    """Pin a newer snapshot, if there is one, from sample `boundary` on; returns whether there was."""
    world, store = run.world, run.writer.store
    dataset, stage = run.pinned["data"]["dataset"], run.pinned["data"]["stage"]
    before = run.data.spans[-1]
    pinned = run.data.source.samples.index.snapshot
    cache = run.data.source.samples.cache  # from now on filled with the tars of that snapshot
    found, samples = None, None
    if world.first:
        try:
            found = newer_snapshot(store, dataset, pinned)
            samples = found and open_samples(store, dataset, None, _pins(run, found), world, cache)[0]
        except (*EXPECTED, OSError) as error:  # the run goes on without the new shards
            found = None
            if str(error) not in run.reported:
                run.reported.add(str(error))
                print(f"no new shards enter in step {step + 1}, the next boundary looks again: {error}", flush=True)
    found = distributed.from_first(found, world)
    if found is None:
        return False
    samples = samples or open_samples(store, dataset, None, _pins(run, found), world, cache)[0]
    run.data.enter(samples, run.data.source.task.examples(samples, None), found, boundary)
    now = run.data.spans[-1]
    if run.log:
        run.log.event("snapshot", step + 1, asdict(now))  # that of the first step that uses it
        print(
            f"new shards enter in step {step + 1}, at the beginning of epoch {now.epoch}: {now.examples} examples an "
            f"epoch instead of {before.examples}, {dataset}/{stage} (snapshot {found})",
            flush=True,
        )
    return True


def _pins(run: VLBertRun, snapshot: str) -> dict:
    """What a checkpoint would pin if this were the run's snapshot."""
    return run.pinned["data"] | {"snapshot": snapshot}


def prepare(recipe: Recipe, world: World, report: Callable[[str], None]) -> VLBertRun | None:
    """Open the data and make the model: a new one, or that of the run's last checkpoint; None where it is complete."""
    store = open_store(recipe.data.root)
    saved = distributed.from_first(checkpoints(store, recipe.run_name), world)
    resumed = read_checkpoint(store, saved[-1]) if saved else None
    state = resumed.state if resumed else {"step": 0, "data": None, "held_out": None, "text": None}
    check_complete(recipe, resumed)
    if resumed and world.first:  # it may have been killed before it came to that
        metric = task_of(recipe.task).best_metric(recipe.task)
        settle(store, recipe.run_name, recipe.keep_checkpoints, metric)
    if resumed and (complete := _complete(recipe, resumed)):
        report(complete)
        return None
    if resumed:
        report(f"{recipe.run_name} goes on from {resumed.where}, step {state['step']} of {recipe.steps}")
        steps = resumed.config["recipe"]["steps"]
        if steps != recipe.steps:
            report(f"it had {steps} steps, now it has {recipe.steps}: the learning rate goes on as in a run of so many")

    config = recipe.data
    spans = spans_of(resumed) if resumed else []
    before = state["data"] | {"snapshot": spans[-1].snapshot} if resumed else None
    cache = open_cache(store, config)
    samples, pinned = open_samples(store, config.dataset, config.detector, before, world, cache)
    held_out, held_out_pinned = None, None
    if config.held_out:
        held_out, held_out_pinned = _open_held_out(store, config, state["held_out"], world, bool(resumed))
    init_from = open_checkpoint(recipe.init_from) if recipe.init_from and not resumed else None
    vocabulary = choose_vocabulary(recipe, resumed or init_from, samples, world)
    num_classes = resumed.num_classes if resumed else any_readable(samples).regions.num_classes
    task = make_task(recipe.task, vocabulary, num_classes)
    corpus = TextCorpus(config.text_corpus, vocabulary) if config.text_batch else None
    if resumed and corpus and corpus.hash != state["text"]:
        raise ValueError(
            f"{config.text_corpus} is not the corpus that {resumed.where} was trained with; give that one, or start "
            "another run: run=NAME"
        )
    examples = task.examples(samples, None)
    spans = spans or [SnapshotSpan(0, 0, len(examples), pinned["snapshot"])]
    if len(examples) != spans[-1].examples:
        raise ValueError(
            f"{resumed.where} was trained on {spans[-1].examples} examples, now there are {len(examples)}: the "
            "files of the task have changed; put them back, or start another run: run=NAME"
        )
    model = make_model(recipe, task, vocabulary, init_from, resumed, report).to(world.device)
    execute_as(recipe, model.vlbert)
    optimizer = make_optimizer(model, recipe.optimizer)
    if resumed:
        load_optimizer(resumed.folder, model, optimizer)

    total, trainable = count_parameters(model)
    report(
        f"{recipe.run_name}: {len(examples)} examples on {len(samples)} samples of "
        f"{pinned['dataset']}/{pinned['stage']} (snapshot {pinned['snapshot']}), {total / 1e6:.2f} M parameters, "
        f"{trainable / 1e6:.2f} M trained, on {world.size} x {world.device.type}"
    )
    if pinned["random_init"]:
        report("WARNING: the regions come from an UNTRAINED detector (random weights)")
    if not held_out:
        report("there will be no validation: data.held_out names no dataset")
    for line in examples.skipped:
        report(f"left out: {line}")
    return VLBertRun(
        recipe=recipe,
        world=world,
        writer=Writer(store),
        step=state["step"],
        model=model,
        optimizer=optimizer,
        data=TrainingData(samples, examples, task, config, recipe.model.regions, world, corpus, spans),
        held_out=(held_out, task.examples(held_out, recipe.task.validate_on)) if held_out else None,
        vocabulary=vocabulary,
        num_classes=num_classes,
        pinned={
            "data": {name: pinned[name] for name in ("dataset", "stage", "random_init")},
            "held_out": held_out_pinned,
            "text": corpus.hash if corpus else None,
        },
        detector=detector_of(store, pinned["dataset"], samples) if world.first else None,
        metadata={"detector": pinned["stage"].removeprefix("regions/"), "snapshot": pinned["snapshot"]},
        loop_state=state.get("loop"),
    )


def _open_held_out(
    store: ObjectStore, config: DataConfig, before: Mapping[str, Any] | None, world: World, resumed: bool
) -> tuple[ShardSamples, dict]:
    try:
        return open_samples(store, config.held_out, config.detector, before, world)
    except ValueError as error:
        way_out = (
            "put its files back, or start another run: run=NAME"
            if resumed
            else "make it as docs/tasks.md says (Held-out data), or train without validation: data.held_out=none"
        )
        raise ValueError(f"{error}; data.held_out={config.held_out} names that dataset: {way_out}") from error


def _complete(recipe: Recipe, resumed: Checkpoint) -> str | None:
    """The message about a run that has no step left; None for any other."""
    step = resumed.state["step"]
    if step < recipe.steps:
        return None
    return f"{recipe.run_name} is complete: {resumed.where} has step {step} of {recipe.steps}"


def find_complete(name: str, assignments: Sequence[str], processes: int) -> str | None:
    """The message that this program, started with these arguments, would end with where the run is complete.

    None where a step is left, and where anything is wrong: the program itself then reports what. Loads no tensors.
    """
    try:
        recipe = override(find_recipe(name, RECIPES)(), list(assignments))
        check_complete(recipe)
        check_shares(recipe.data, processes)
        store = open_store(recipe.data.root)
        saved = checkpoints(store, recipe.run_name)
        if not saved:
            return None
        resumed = read_checkpoint(store, saved[-1], tensors=False)
        check_complete(recipe, resumed)
        complete = _complete(recipe, resumed)
        if complete:
            settle(store, recipe.run_name, recipe.keep_checkpoints, task_of(recipe.task).best_metric(recipe.task))
        return complete
    except (*EXPECTED, OSError):
        return None


def detector_of(store: ObjectStore, dataset: str, samples: ShardSamples) -> dict:
    """The `id` of the detector whose regions these are, and its `metadata`: None where no manifest has them."""
    stage = samples.index.snapshot.stage
    catalog = Catalog(store, dataset)
    committed = catalog.shards(stage)[:1]
    metadata = catalog.headers(stage, committed)[committed[0]].meta.get("config") if committed else None
    return {"id": stage.partition("/")[2], "metadata": metadata}


def spans_of(resumed: Checkpoint) -> list[SnapshotSpan]:
    """The spans of snapshots that a run has been trained on."""
    return [SnapshotSpan(**span) for span in resumed.state["data"]["snapshots"]]


def main(arguments: list[str] | None = None) -> None:
    run_program("torchrun -m vlbert.train", __doc__, RECIPES, check_complete, train, arguments)


if __name__ == "__main__":
    main()
