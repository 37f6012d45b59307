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
from storage.order import mix
from storage.reading import ShardSamples
from storage.runs import checkpoints
from storage.settings import differing_fields, flat, override, to_json
from training import distributed
from training.checkpoints import load_optimizer, settle
from training.distributed import World
from training.log import last_metrics
from training.loop import EXPECTED, Losses, Run, batches, find_recipe, run_program, train_steps
from training.optimizer import make_optimizer
from training.precision import autocast, in_precision_of
from training.writer import Writer
from vlbert.checkpoint import (
    Checkpoint,
    best_by,
    check_kept,
    load_model,
    open_checkpoint,
    read_checkpoint,
    save_checkpoint,
    vocabulary_of,
)
from vlbert.config import Recipe, architecture
from vlbert.data.batch import Batch
from vlbert.data.corpus import TextCorpus
from vlbert.data.loading import SnapshotSpan, TrainingData, check_shares
from vlbert.data.samples import any_readable, captions, newer_snapshot, open_cache, open_samples
from vlbert.data.vocabulary import Vocabulary
from vlbert.model.bert import bert_vocabulary, init_from_bert
from vlbert.model.execution import compiled_graphs, execute_as
from vlbert.model.heads import count_parameters
from vlbert.model.vlbert import VLBert
from vlbert.recipes import RECIPES
from vlbert.tasks import make_task, splits_of, task_of, validation_split
from vlbert.tasks.base import Questions, Task, TaskModel
from vlbert.tasks.pretraining import PretrainingSettings
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
    held_out: tuple[ShardSamples, Questions] | None
    vocabulary: Vocabulary
    num_classes: int
    pinned: dict  # what a checkpoint records of the data, without its stretches: they are in `data`
    detector: dict | None  # see detector_of
    observe: Observe = lambda step, parts: None
    told: set[str] = field(default_factory=set)  # why new shards could not enter

    @property
    def samples_per_step(self) -> int:
        return self.recipe.data.batch + self.recipe.data.text_batch

    @property
    def most_unreadable(self) -> float:
        return self.recipe.data.unreadable * len(self.data.asked.samples)

    def batches(self) -> Iterator[Sequence[Batch]]:
        """At some borders of epochs new shards enter."""
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
    def validates(self) -> bool:
        return self.held_out is not None

    def validate(self) -> tuple[dict[str, float], list[dict]]:
        left_out = []  # those in `unreadable` are of training steps, and counted in its next line
        found = validate(self.model, self.recipe, *self.held_out, self.world, left_out)
        self.note_unreadable(left_out)
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
        print(f"on the real data: {run.data.asked.task.paper}", flush=True)
    return metrics


def enter_new_shards(run: VLBertRun, step: int, boundary: int) -> bool:
    """If more is committed than the run is pinned to, pin that, and let sample `border` and all after it be of that."""
    world, store = run.world, run.writer.store
    dataset, stage = run.pinned["data"]["dataset"], run.pinned["data"]["stage"]
    before = run.data.spans[-1]
    pinned = run.data.asked.samples.index.snapshot
    cache = run.data.asked.samples.cache  # from now on filled with the tars of that snapshot
    found, samples = None, None
    if world.first:
        try:
            found = newer_snapshot(store, dataset, pinned)
            samples = found and open_samples(store, dataset, None, _pins(run, found), world, cache)[0]
        except (*EXPECTED, OSError) as error:  # a look that nothing depends on ends no healthy training
            found = None
            if str(error) not in run.told:
                run.told.add(str(error))
                print(f"no new shards enter in step {step + 1}, the next border looks again: {error}", flush=True)
    found = distributed.from_first(found, world)
    if found is None:
        return False
    samples = samples or open_samples(store, dataset, None, _pins(run, found), world, cache)[0]
    run.data.enter(samples, run.data.asked.task.questions(samples, None), found, boundary)
    now = run.data.spans[-1]
    if run.log:
        run.log.event("snapshot", step + 1, asdict(now))  # that of the first step that uses it
        print(
            f"new shards enter in step {step + 1}, at the beginning of epoch {now.epoch}: {now.questions} questions an "
            f"epoch instead of {before.questions}, {dataset}/{stage} (snapshot {found})",
            flush=True,
        )
    return True


def _pins(run: VLBertRun, snapshot: str) -> dict:
    """What a checkpoint would pin if this were the run's snapshot."""
    return run.pinned["data"] | {"snapshot": snapshot}


def prepare(recipe: Recipe, world: World, say: Callable[[str], None]) -> VLBertRun | None:
    """Open the data and make the model: a new one, or that of the run's last checkpoint; None where it is complete."""
    store = open_store(recipe.data.root)
    saved = distributed.from_first(checkpoints(store, recipe.run_name), world)
    resumed = read_checkpoint(store, saved[-1]) if saved else None
    state = resumed.state if resumed else {"step": 0, "data": None, "held_out": None, "text": None}
    check_complete(recipe, resumed)
    if resumed and world.first:  # it may have been killed before it came to that
        metric = best_by(task_of(recipe.task), recipe.task)
        settle(store, recipe.run_name, recipe.keep_checkpoints, metric)
    if resumed and (complete := _complete(recipe, resumed)):
        say(complete)
        return None
    if resumed:
        say(f"{recipe.run_name} goes on from {resumed.where}, step {state['step']} of {recipe.steps}")
        steps = resumed.config["recipe"]["steps"]
        if steps != recipe.steps:
            say(f"it had {steps} steps, now it has {recipe.steps}: the learning rate goes on as in a run of so many")

    config = recipe.data
    spans = stretches_of(resumed) if resumed else []
    before = state["data"] | {"snapshot": spans[-1].snapshot} if resumed else None
    cache = open_cache(store, config)
    samples, pinned = open_samples(store, config.dataset, config.detector, before, world, cache)
    held_out, held_out_pinned = None, None
    if config.held_out:
        try:
            held_out, held_out_pinned = open_samples(store, config.held_out, config.detector, state["held_out"], world)
        except ValueError as error:
            way_out = (
                "put its files back, or start another run: run=NAME"
                if resumed
                else "make it as docs/operating.md says (Data that is held out), or train without validation: "
                "data.held_out=none"
            )
            raise ValueError(f"{error}; data.held_out={config.held_out} names that dataset: {way_out}") from error
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
    questions = task.questions(samples, None)
    spans = spans or [SnapshotSpan(0, 0, len(questions), pinned["snapshot"])]
    if len(questions) != spans[-1].questions:
        raise ValueError(
            f"{resumed.where} was trained on {spans[-1].questions} questions, now there are {len(questions)}: the "
            "files of the task have changed; put them back, or start another run: run=NAME"
        )
    model = make_model(recipe, task, vocabulary, init_from, resumed, say).to(world.device)
    execute_as(recipe, model.vlbert)
    optimizer = make_optimizer(model, recipe.optimizer)
    if resumed:
        load_optimizer(resumed.folder, model, optimizer)

    everything, trainable = count_parameters(model)
    say(
        f"{recipe.run_name}: {len(questions)} questions on {len(samples)} samples of "
        f"{pinned['dataset']}/{pinned['stage']} (snapshot {pinned['snapshot']}), {everything / 1e6:.2f} M parameters, "
        f"{trainable / 1e6:.2f} M trained, on {world.size} x {world.device.type}"
    )
    if pinned["random_init"]:
        say("WARNING: the regions come from an UNTRAINED detector (random weights)")
    if not held_out:
        say("there will be no validation: data.held_out names no dataset")
    for line in questions.left_out:
        say(f"left out: {line}")
    return VLBertRun(
        recipe=recipe,
        world=world,
        writer=Writer(store),
        step=state["step"],
        model=model,
        optimizer=optimizer,
        data=TrainingData(samples, questions, task, config, recipe.model.regions, world, corpus, spans),
        held_out=(held_out, task.questions(held_out, validation_split(recipe.task))) if held_out else None,
        vocabulary=vocabulary,
        num_classes=num_classes,
        pinned={
            "data": {name: pinned[name] for name in ("dataset", "stage", "random_init")},
            "held_out": held_out_pinned,
            "text": corpus.hash if corpus else None,
        },
        detector=detector_of(store, pinned["dataset"], samples) if world.first else None,
        loop_state=state.get("loop"),
    )


def _complete(recipe: Recipe, resumed: Checkpoint) -> str | None:
    """What is said of a run that has no step left; None of any other."""
    step = resumed.state["step"]
    if step < recipe.steps:
        return None
    return f"{recipe.run_name} is complete: {resumed.where} has step {step} of {recipe.steps}"


def find_complete(name: str, assignments: Sequence[str], processes: int) -> str | None:
    """What this program, started with these arguments, would say of a run that is complete; nothing is loaded for it.

    None where there is a step left to take, and where anything is wrong: the program then says what.
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
            settle(store, recipe.run_name, recipe.keep_checkpoints, best_by(task_of(recipe.task), recipe.task))
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


def stretches_of(resumed: Checkpoint) -> list[SnapshotSpan]:
    """Over which snapshots a run went."""
    return [SnapshotSpan(**span) for span in resumed.state["data"]["snapshots"]]


def make_model(
    recipe: Recipe,
    task: Task,
    vocabulary: Vocabulary,
    init_from: Checkpoint | None,
    resumed: Checkpoint | None,
    say: Callable[[str], None],
) -> TaskModel:
    """The model with the weights of the checkpoint that goes on or, in a new run, those that the recipe starts from."""
    torch.manual_seed(mix(recipe.data.seed, 0xC0FFEE) % 2**63)  # the same new weights on every rank
    model = TaskModel(VLBert(recipe.model, len(vocabulary)), task)
    if resumed:
        check_kept(task, resumed)
        load_model(model, resumed.model, resumed.where)
        return model
    if recipe.model.regions.weights and not init_from:
        from detectors.weights.files import load_resnet

        load_resnet(model.vlbert.fast_rcnn.backbone, model.vlbert.fast_rcnn.res5, recipe.model.regions.weights)
        say(f"Fast R-CNN from {recipe.model.regions.weights}")
    if recipe.bert:
        say(init_from_bert(model.vlbert, model.head, recipe.bert, vocabulary))
    if init_from:
        differing = differing_fields(architecture(recipe.model), architecture(init_from.model_config))
        if differing:
            raise ValueError(
                f"{init_from.where} has another architecture than recipe {recipe.name}: model.{differing[0][0]} is "
                f"{differing[0][2]} there and {differing[0][1]} here"
            )
        load_model(model.vlbert, init_from.part("vlbert."), init_from.where)
        taken = start_head(model.head, init_from, same_task=init_from.config.get("task") == type(recipe.task).__name__)
        say(f"VL-BERT from {init_from.where}, of its head {taken}")
        if taken == "all":
            check_kept(task, init_from)
            return model
    if hasattr(task, "begin"):
        task.begin(model.vlbert, model.head, init_from.config.get("task") if init_from else None)
    return model


def start_head(head: torch.nn.Module, init_from: Checkpoint, same_task: bool) -> str:
    """Take from a checkpoint the whole head, if it is one of the same task and size, else the parts that the head names
    in `init_from` (part of ours -> part of pre-training's); says what was taken."""
    found = init_from.part("head.")
    shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    if same_task and {name: tensor.shape for name, tensor in found.items()} == shapes:
        load_model(head, found, init_from.where)
        return "all"
    taken = []
    for part, source in getattr(head, "init_from", {}).items():
        tensors = init_from.part(f"head.{source}.")
        if tensors:  # a checkpoint of another task than pre-training has no such part
            load_model(getattr(head, part), tensors, init_from.where)
            taken.append(source)
    return ", ".join(taken) or "nothing"


def choose_vocabulary(recipe: Recipe, checkpoint: Checkpoint | None, samples: ShardSamples, world: World) -> Vocabulary:
    """That of the checkpoint, else of the file that is named, else BERT's, else one built from the captions."""
    if checkpoint:
        return vocabulary_of(checkpoint, recipe.vocabulary)
    if recipe.vocabulary:
        return Vocabulary.read(recipe.vocabulary)
    if recipe.bert:
        return bert_vocabulary(recipe.bert)
    pieces = None
    if world.first:  # it reads every sample, once is enough
        lines = captions(samples)
        pieces = Vocabulary.build(lambda: lines, recipe.vocabulary_size).pieces
    return Vocabulary(distributed.from_first(pieces, world))


def check_complete(recipe: Recipe, resumed: Checkpoint | None = None) -> None:
    """What no recipe can know and every run must say, and that a run goes on as it began; else a ValueError."""
    if not recipe.data.root:
        raise ValueError("data.root is not set; give data.root=FOLDER or data.root=s3://bucket/prefix")
    if recipe.data.text_batch and not recipe.data.text_corpus:
        raise ValueError(
            f"data.text_batch is {recipe.data.text_batch} and data.text_corpus is not set; make a corpus with "
            "`python -m vlbert.data.corpus` and give data.text_corpus=FOLDER, or train without text-only rows: "
            "data.text_batch=0"
        )
    regions = recipe.model.regions
    from_pixels = regions.features == "end_to_end"
    if from_pixels and not (regions.weights or regions.random_init or recipe.init_from or resumed):
        raise ValueError(
            "the Fast R-CNN has no weights to start from; give model.regions.weights=FILE (a detector's safetensors) "
            "or init_from=CHECKPOINT, or say that it shall start from random ones: model.regions.random_init=true"
        )
    if not (isinstance(recipe.task, PretrainingSettings) or recipe.init_from or recipe.bert or recipe.random_init):
        raise ValueError(
            "the fine-tuning has no model to start from; give init_from=CHECKPOINT or bert=FOLDER, or say that it "
            "shall start from random weights: random_init=true"
        )
    held_out = validation_split(recipe.task) if recipe.data.held_out else None
    learned = {part for split in getattr(recipe.task, "train_on", ()) for part in splits_of(recipe.task, split)}
    if held_out is not None and not learned.isdisjoint(splits_of(recipe.task, held_out)):
        raise ValueError(
            f"task.validate_on={held_out} is one of task.train_on={','.join(recipe.task.train_on)}, or shares "
            "questions with one: validation would measure memory; name another split, or train without validation: "
            "data.held_out=none"
        )
    if not resumed:
        return
    fixed = ("task", "model", "data", "optimizer", "init_from", "bert", "precision")
    free = {"data.root", "data.workers", "data.text_corpus", "data.new_shards_every", "data.cache", "data.cache_gb"}
    for name, now, before in differing_fields(flat(to_json(recipe)), flat(resumed.config["recipe"])):
        if name == "data.detector" and now is None:  # the only one that there was, or whichever it began with
            continue
        if name == "init_from" and now and before:  # the same checkpoint may lie under another root
            now, before = now.rpartition("/runs/")[2], before.rpartition("/runs/")[2]
        if name.split(".")[0] in fixed and name not in free and now != before:
            raise ValueError(
                f"{resumed.where} was trained with {name} = {before}, the recipe says {now}; set it back, or start "
                "another run: run=NAME"
            )


def main(arguments: list[str] | None = None) -> None:
    run_program("torchrun -m vlbert.train", __doc__, RECIPES, check_complete, train, arguments)


if __name__ == "__main__":
    main()
