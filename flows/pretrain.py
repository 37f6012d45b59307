"""Pretrain: tokenise the text-only corpus on this machine, then train with torchrun."""

import sys
from pathlib import Path

from prefect import flow

from flows.artifacts import stage_logger
from flows.settings import PretrainSettings
from flows.supervisor import run_child
from flows.torchrun import Log, Trained, Watch, check_overrides, drop_none, show_training, train

# Fields of the recipe that this stage sets, each with its source.
SETTINGS = {
    "run_name": "the setting run",
    "data.root": "the flow's root",
    "data.datasets": "the setting datasets",
    "data.held_out": "the setting held_out",
    "data.detector": "the datasets' detector",
    "data.text_corpus": "the setting text",
    "vocabulary": "the setting vocabulary",
    "task.monitored_words": "the setting monitored_words",
}
_VOCABULARY_SIZE = 30_522  # BERT's


def pretrain(
    root: str,
    work: str,
    settings: PretrainSettings,
    detector: str | None = None,
    log: Log = print,
    watch: Watch = lambda: None,
) -> Trained:
    """Pre-train on the regions of `detector` (an id). If `detector` is None, each dataset must have only one detector.

    The tokenised corpus is written to the local folder `work`. Call this function from the main thread only.
    """
    check_overrides(settings.overrides, SETTINGS)
    corpus, vocabulary = None, settings.vocabulary
    if settings.text:
        corpus = Path(work) / "text" / settings.resolved_recipe.run
        make_corpus(corpus, settings, log)
        vocabulary = str(corpus / "vocab.txt")
    fields = {
        "data.datasets": settings.datasets,
        "data.detector": detector,
        "data.text_corpus": str(corpus) if corpus else None,
        "data.text_batch": None if settings.text else 0,
        "vocabulary": vocabulary,
        "task.monitored_words": settings.monitored_words or None,
    }
    held_out = {"data.held_out": settings.held_out or None}  # None overrides the recipe, too
    return train(root, settings, drop_none(fields) | held_out, log, watch)


def make_corpus(folder: Path, settings: PretrainSettings, log: Log) -> None:
    """Tokenise the files `settings.text` into `folder`. An existing corpus of the same files is kept."""
    command = [sys.executable, "-m", "vlbert", "corpus", str(folder), *settings.text]
    if settings.vocabulary:
        command += ["--vocabulary", settings.vocabulary]
    else:
        size = settings.vocabulary_size or _VOCABULARY_SIZE
        command += [f"--vocabulary_size={size}", "--captions", *settings.vocabulary_captions]
    run_child(command, log)


@flow(name="pretrain", flow_run_name="{settings.recipe} {settings.run}", persist_result=False)
def pretrain_flow(root: str, work: str, settings: PretrainSettings, detector: str | None = None) -> Trained:
    """Pre-train VL-BERT on the regions of `detector` (an id). `work` is a local folder for the tokenised corpus."""
    log, run = stage_logger().info, settings.resolved_recipe.run
    return show_training("pretrain", root, run, log, lambda watch: pretrain(root, work, settings, detector, log, watch))
