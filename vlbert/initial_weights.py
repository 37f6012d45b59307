"""Check the settings of a new run, and make its vocabulary and its model with initial weights."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from storage.order import mix
from storage.reading import ShardSamples
from storage.settings import differing_fields
from training import distributed
from training.distributed import World
from vlbert.checkpoint import Checkpoint, check_saved, load_model, vocabulary_of
from vlbert.config import Recipe, architecture
from vlbert.data.samples import load_captions
from vlbert.data.vocabulary import Vocabulary
from vlbert.model.bert import bert_vocabulary, init_from_bert
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import Task, TaskModel
from vlbert.tasks.pretraining import PretrainingSettings


def check_complete(recipe: Recipe) -> None:
    """Raise ValueError if the recipe lacks a setting that every run needs, or would validate on training data."""
    if not recipe.data.root:
        raise ValueError("data.root is not set; give --data.root=FOLDER or --data.root=s3://bucket/prefix")
    if recipe.data.text_batch and not recipe.data.text_corpus:
        raise ValueError(
            f"data.text_corpus is not set, but data.text_batch is {recipe.data.text_batch}; make a corpus with "
            "`vlbert corpus` and give --data.text_corpus=FOLDER, or train without text-only rows: "
            "--data.text_batch=0"
        )
    regions = recipe.model.regions
    if regions.features == "end_to_end" and not (regions.weights or regions.random_init or recipe.init_from):
        raise ValueError(
            "the Fast R-CNN has no weights to start from; give --model.regions.weights=FILE (a detector's safetensors) "
            "or --init_from=CHECKPOINT, or start from random weights: --model.regions.random_init"
        )
    if not (isinstance(recipe.task, PretrainingSettings) or recipe.init_from or recipe.bert or recipe.random_init):
        raise ValueError(
            "the fine-tuning has no model to start from; give --init_from=CHECKPOINT or --bert=FOLDER, or start from "
            "random weights: --random_init"
        )
    check_one_dataset(recipe)
    held_out = recipe.task.validate_on if recipe.data.held_out else None
    if held_out in recipe.task.train_on:
        raise ValueError(
            f"--task.validate_on={held_out} is also in task.train_on={','.join(recipe.task.train_on)}; validate on "
            "another split, or train without validation: --data.held_out=None"
        )


def check_one_dataset(recipe: Recipe) -> None:
    """Raise ValueError if the recipe's task has splits, but several training or held-out datasets are named."""
    for name, given in (("datasets", recipe.data.datasets), ("held_out", recipe.data.held_out or ())):
        if recipe.task.validate_on is not None and len(given) > 1:
            raise ValueError(
                f"data.{name} has {len(given)} names, {', '.join(given)}; a task with splits reads the images of one "
                f"dataset. Give only that one: --data.{name} NAME"
            )


def choose_vocabulary(
    recipe: Recipe, checkpoint: Checkpoint | None, datasets: Sequence[ShardSamples], world: World
) -> Vocabulary:
    """Return the vocabulary of `checkpoint`, recipe.vocabulary or recipe.bert, or build one from the captions."""
    if checkpoint:
        return vocabulary_of(checkpoint, recipe.vocabulary)
    if recipe.vocabulary:
        return Vocabulary.read(recipe.vocabulary)
    if recipe.bert:
        return bert_vocabulary(recipe.bert)
    tokens = None
    if world.first:  # building reads every sample: one rank does it for all
        lines = [line for samples in datasets for line in load_captions(samples)]
        tokens = Vocabulary.build(lambda: lines, recipe.vocabulary_size).tokens
    return Vocabulary(distributed.broadcast(tokens, world))


def make_model(
    recipe: Recipe,
    task: Task,
    vocabulary: Vocabulary,
    init_from: Checkpoint | None,
    resumed: Checkpoint | None,
    report: Callable[[str], None],
) -> TaskModel:
    """Make the model of a run. A resumed run gets the weights of `resumed`, a new run its recipe's initial weights.

    `init_from` is the checkpoint that recipe.init_from names. `report` prints where the initial weights come from.
    """
    torch.manual_seed(mix(recipe.data.seed, 0xC0FFEE) % 2**63)  # the same new weights on every rank
    model = TaskModel(VLBert(recipe.model, len(vocabulary)), task)
    if resumed:
        check_saved(task, resumed)
        load_model(model, resumed.model, resumed.uri)
        return model
    trained_for = init_from.config.get("task") if init_from else None
    weights, fast_rcnn = recipe.model.regions.weights, model.vlbert.fast_rcnn
    if weights and fast_rcnn and not init_from:
        from detectors.weights.files import load_resnet

        load_resnet(fast_rcnn.backbone, fast_rcnn.res5, Path(weights))
        report(f"Fast R-CNN from {weights}")
    if recipe.bert:
        report(init_from_bert(model.vlbert, model.head, recipe.bert, vocabulary))
    if init_from:
        differing = differing_fields(architecture(recipe.model), architecture(init_from.model_config))
        if differing:
            raise ValueError(
                f"{init_from.uri} has another architecture than recipe {recipe.name}: model.{differing[0][0]} is "
                f"{differing[0][2]} in the checkpoint and {differing[0][1]} in the recipe"
            )
        load_model(model.vlbert, init_from.part("vlbert."), init_from.uri)
        loaded = start_head(task, model.head, init_from, same_task=trained_for == type(recipe.task).__name__)
        report(f"VL-BERT from {init_from.uri}, parts of its head: {loaded}")
        if loaded == "all":
            check_saved(task, init_from)
            return model
    task.on_start(model.vlbert, model.head, trained_for)
    return model


def start_head(task: Task, head: torch.nn.Module, init_from: Checkpoint, same_task: bool) -> str:
    """Load the checkpoint's whole head if its task and shapes match, else only the parts in task.pretrained_parts.

    Returns the names of the loaded parts, joined by commas, or "all" or "none".
    """
    saved = init_from.part("head.")
    shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    if same_task and {name: tensor.shape for name, tensor in saved.items()} == shapes:
        load_model(head, saved, init_from.uri)
        return "all"
    loaded = []
    for part, source in task.pretrained_parts(head).items():
        tensors = init_from.part(f"head.{source}.")
        if tensors:  # only pre-training checkpoints have these parts
            tensors = task.convert_pretrained(part, tensors)
            if tensors.keys() != head.get_submodule(part).state_dict().keys():
                raise ValueError(
                    f"{source} of {init_from.uri} does not fit this head: only one of them has a LayerNorm. Set "
                    "task.classifier to regions, regions_norm or linear (VCR: --task.region_loss=none)"
                )
            load_model(head.get_submodule(part), tensors, init_from.uri)
            loaded.append(source)
    return ", ".join(loaded) or "none"
