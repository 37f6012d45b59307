"""The experiment of the demo: how many labels does pre-training save?

Models learn two tasks from few labels, with and without pre-training, in the same number of steps in all. Validation
chooses the checkpoint of each, which is then scored on a test split.
"""

from dataclasses import replace
from typing import Literal

from demo.data import LABELS, VISUAL_WORDS
from vlbert.comparison.plans import ComparedTask, Plan, Training, Variant

PLAN = "demo.labels:label_curves"
NAME = "labels"
PRETRAINING_RUN = "pretrain-seed{seed}"
WITH, WITHOUT = "with", "without"  # variants
PRETRAINING, FINETUNING = 600, 240  # steps of the demo's recipes
VALIDATIONS = 6  # of each fine-tuning
SIZE = ("--size=demo", "--features=precomputed")  # arguments of all recipes
TASKS: dict[Literal["refcoco", "vqa"], ComparedTask] = {
    "refcoco": ComparedTask("RefCOCO+", "testA", "accuracy_published", best=True),
    "vqa": ComparedTask("VQA", "eval2014", "accuracy", best=True),
}
COLUMNS = {f"{task}_{labels}": (task, labels) for task in TASKS for labels in LABELS}
GROUNDING = "monitored_accuracy_grounding_gap"  # at colour and shape words


def label_curves() -> Plan:
    """Return the plan: a column for each task and number of labels, a row with and one without pre-training.

    Requires the fields pretraining:data.text_corpus, pretraining:vocabulary, without:vocabulary and task.answers.
    """
    tasks = {
        column: replace(TASKS[task], title=f"{TASKS[task].title}, {labels:,} labels")
        for column, (task, labels) in COLUMNS.items()
    }

    def finetunings(variant: str, steps: int) -> dict[str, Training]:
        return {
            column: Training(
                f"finetune_{task}",
                (*SIZE, *finetuning_changes(task, steps), f"--task.folder={{root}}/data/{folder_of(column)}"),
                run_name(column, variant),
            )
            for column, (task, _) in COLUMNS.items()
        }

    pretraining = Training("pretrain_vlbert", (*SIZE, "--task.monitored_words", *VISUAL_WORDS), PRETRAINING_RUN)
    total = PRETRAINING + FINETUNING
    variants = {
        WITH: Variant(
            f"{PRETRAINING} steps of pre-training + {FINETUNING}", pretraining, finetunings(WITH, FINETUNING)
        ),
        WITHOUT: Variant(f"without pre-training, {total} steps", None, finetunings(WITHOUT, total)),
    }
    return Plan(NAME, "How many labels does pre-training save?", variants, tasks, (0, 1, 2, 3, 4), (GROUNDING,))


def finetuning_changes(task: str, steps: int) -> tuple[str, ...]:
    """Return the changes to a task's recipe. VQA is also scored with another scene's image."""
    every = steps // VALIDATIONS
    shuffled = ("--task.validate_shuffled",) * (task == "vqa")
    return f"--steps={steps}", f"--validate_every={every}", f"--save_every={every}", *shuffled


def folder_of(column: str) -> str:
    """Return the folder with a column's files, relative to the demo data."""
    return f"labels/{column.replace('_', '-')}"


def run_name(column: str, variant: str) -> str:
    """Return the name of a fine-tuning run, with {seed} in it."""
    return f"{column}-{variant}-seed{{seed}}"
