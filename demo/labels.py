"""The experiment of the demo: how many labels does pre-training save?

Models learn two tasks from few labels, with and without pre-training, in the same number of steps in all. Validation
chooses the checkpoint of each, which is then scored on a test split.
"""

from collections.abc import Sequence
from dataclasses import replace

from demo.data import LABELS, VISUAL_WORDS
from vlbert.comparison.plans import ComparedTask, Plan, Training, Variant

NAME = "labels"
PRETRAINING_RUN = "pretrain-seed{seed}"
WITH, WITHOUT = "with", "without"  # variants
PRETRAINING, FINETUNING = 400, 120  # steps
VALIDATIONS = 6  # of each fine-tuning
SIZE = ("--size=demo", "--features=precomputed")  # arguments of all recipes
TASKS = {
    "refcoco": ComparedTask("RefCOCO+", "testA", "accuracy_published", best=True),
    "vqa": ComparedTask("VQA", "eval2014", "accuracy", best=True),
}
GROUNDING = "monitored_accuracy_grounding_gap"  # at colour and shape words


def label_curves(numbers: Sequence[int] = LABELS) -> Plan:
    """Return the plan: a column for each task and number of labels, a row with and one without pre-training.

    Requires the fields pretraining:data.text_corpus, pretraining:vocabulary, without:vocabulary and task.answers.
    """
    columns = {f"{task}_{labels}": (task, labels) for task in TASKS for labels in numbers}
    tasks = {
        column: replace(TASKS[task], title=f"{TASKS[task].title}, {labels:,} labels")
        for column, (task, labels) in columns.items()
    }

    def finetunings(variant: str) -> dict[str, Training]:
        return {
            column: Training(
                f"finetune_{task}",
                (*SIZE, *changes(task, variant), f"--task.folder={{root}}/data/{folder_of(column)}"),
                run_name(column, variant),
            )
            for column, (task, _) in columns.items()
        }

    pretrained = *SIZE, *changes("pretraining", WITH), "--task.monitored_words", *VISUAL_WORDS
    pretraining = Training("pretrain_vlbert", pretrained, PRETRAINING_RUN)
    total = PRETRAINING + FINETUNING
    variants = {
        WITH: Variant(f"{PRETRAINING} steps of pre-training + {FINETUNING}", pretraining, finetunings(WITH)),
        WITHOUT: Variant(f"without pre-training, {total} steps", None, finetunings(WITHOUT)),
    }
    return Plan(NAME, "How many labels does pre-training save?", variants, tasks, (0, 1, 2, 3, 4), (GROUNDING,))


def quick_label_curves() -> Plan:
    """Return the plan with the two largest numbers of labels, for `make demo`."""
    return label_curves(LABELS[1:])


def changes(task: str, variant: str) -> tuple[str, ...]:
    """Return the changes to the recipe of a task, or of "pretraining".

    With pre-training, VQA is also scored with another scene's image.
    """
    steps = {"pretraining": PRETRAINING}.get(task, FINETUNING if variant == WITH else PRETRAINING + FINETUNING)
    every = steps // (4 if task == "pretraining" else VALIDATIONS)
    shuffled = ("--task.validate_shuffled",) * (task == "vqa" and variant == WITH)
    return f"--steps={steps}", f"--validate_every={every}", f"--save_every={every}", *shuffled


def folder_of(column: str) -> str:
    """Return the folder with a column's files, relative to the demo data."""
    return f"labels/{column.replace('_', '-')}"


def run_name(column: str, variant: str) -> str:
    """Return the name of a fine-tuning run, with {seed} in it."""
    return f"{column}-{variant}-seed{{seed}}"


def parse_column(column: str) -> tuple[str, int]:
    """Return the task and the number of labels of a column."""
    task, _, labels = column.partition("_")
    return task, int(labels)
