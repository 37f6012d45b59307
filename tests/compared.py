"""A plan that trains in seconds, on tiny samples: its recipes read what `compared_root` writes."""

import dataclasses
from pathlib import Path

from refcoco_files import write_refcoco
from tiny import commit_samples, tiny_recipe, tiny_root, tiny_sample

from vlbert.comparison.plans import ComparedTask, Plan, Training, Variant
from vlbert.config import DataConfig, Recipe
from vlbert.tasks.refcoco import RefCOCOSettings

VOCABULARY = "--vocabulary={root}/text/vocab.txt"
FINETUNING = {"refcoco": Training("compared:finetuning", (VOCABULARY, "--task.folder={root}/refs"))}
TASKS = {"refcoco": ComparedTask("RefCOCO+", "val", "accuracy_published")}


def compared_root(folder: Path) -> Path:
    root, samples = tiny_root(folder), [tiny_sample(i, regions=2 + i % 2) for i in range(12)]
    commit_samples(root, "refcoco+", samples)
    write_refcoco(root / "refs", samples)
    return root


def pretraining() -> Recipe:
    return tiny_recipe(Path(), {"root": "", "text_corpus": None}, steps=2, save_every=2, vocabulary=None)


def finetuning() -> Recipe:
    data = DataConfig(datasets={"refcoco+": None}, held_out=("refcoco+",), batch=4, workers=0)
    return tiny_recipe(Path(), task=RefCOCOSettings(), data=data, steps=2, save_every=2, vocabulary=None)


def plan() -> Plan:
    return Plan(
        name="tiny",
        title="Tiny models",
        variants={
            "without": Variant("without pre-training", None, FINETUNING, {"refcoco": 62.7}),
            "words": Variant("masked words", pretrained("--task.regions.probability=0"), FINETUNING, {"refcoco": 69.1}),
        },
        tasks=TASKS,
        seeds=(0, 1),
        pretraining_metrics=("words_accuracy",),
        paper="a table",
    )


def pretrained(*changes: str) -> Training:
    return Training("compared:pretraining", (VOCABULARY, "--data.text_corpus={root}/text", *changes))


def broken() -> Plan:
    """The same, and a variant whose pre-training fails."""
    whole = plan()
    variant = Variant("broken", pretrained("--task.monitored_words=zebra"), FINETUNING)
    return dataclasses.replace(whole, variants={**whole.variants, "broken": variant})
