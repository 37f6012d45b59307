"""Pretrain: the text-only corpus is tokenised on this machine, then torchrun trains."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from prefect import flow, get_run_logger

from flows.artifacts import publish, table_of_metrics
from flows.settings import PretrainSettings
from flows.supervisor import run_child
from flows.training import Trained, check_overrides, train
from storage.objects import open_objects

# Fields of the recipe that this stage sets, each from what.
SETTINGS = {
    "run": "the setting run",
    "data.root": "the flow's root",
    "data.dataset": "the setting dataset",
    "data.held_out": "the setting held_out",
    "data.detector": "the dataset's detector",
    "data.text_corpus": "the setting text",
    "vocabulary": "the setting vocabulary",
    "task.watched_words": "the setting watched_words",
}
_VOCABULARY_SIZE = 30_522  # BERT's


def pretrain(
    root: str, work: str, settings: PretrainSettings, detector: str | None = None, say: Callable[[str], None] = print
) -> Trained:
    """Pre-train on the regions of `detector` (None: the only one there is). Only from the main thread.

    `work` is a folder of this machine for what a run keeps beside the storage: the tokenised corpus, the vocabulary.
    """
    check_overrides(settings.overrides, SETTINGS)
    corpus, vocabulary = None, settings.vocabulary
    if settings.text:
        corpus = Path(work) / "text" / (settings.run or settings.recipe)
        make_corpus(corpus, settings, say)
        vocabulary = str(corpus / "vocab.txt")
    fields = {
        "data.dataset": settings.dataset,
        "data.held_out": settings.held_out or "none",
        "data.detector": detector,
        "data.text_corpus": corpus,
        "data.text_batch": None if settings.text else 0,
        "vocabulary": vocabulary,
        "task.watched_words": ",".join(settings.watched_words) or None,
    }
    trained = train(root, settings.recipe, settings.run, fields, settings.overrides, settings.processes, say)
    return dataclasses.replace(trained, vocabulary=str(copy_vocabulary(root, trained, Path(work))))


def copy_vocabulary(root: str, trained: Trained, work: Path) -> Path:
    """The vocab.txt of the checkpoint, whoever made it, as a file of this machine: the root may be a bucket."""
    objects = open_objects(root)
    path = f"runs/{trained.run}/{trained.checkpoint.rpartition('/')[2]}/vocab.txt"
    file = work / "vocabularies" / f"{trained.run}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(objects.get(path))
    return file


def make_corpus(folder: Path, settings: PretrainSettings, say: Callable[[str], None]) -> None:
    """Tokenise the text into `folder` with `python -m vlbert.text`, which leaves a corpus of the same files alone."""
    command = [sys.executable, "-m", "vlbert.text", str(folder), *settings.text]
    if settings.vocabulary:
        command += ["--vocabulary", settings.vocabulary]
    else:
        command += [
            "--build",
            str(settings.vocabulary_size or _VOCABULARY_SIZE),
            "--captions",
            *settings.vocabulary_captions,
        ]
    run_child(command, say)


@flow(name="pretrain", flow_run_name="{settings.recipe} {settings.run}")
def pretrain_flow(root: str, work: str, settings: PretrainSettings, detector: str | None = None) -> Trained:
    """Pre-train VL-BERT on one dataset."""
    trained = pretrain(root, work, settings, detector, get_run_logger().info)
    publish("pretrain", trained.run, table_of_metrics(trained.metrics, f"`{trained.checkpoint}`"))
    return trained
