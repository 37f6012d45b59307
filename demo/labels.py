"""The experiment of the demo: how many labels pre-training saves.

Each model is trained on few labels, with and without pre-training, for the same number of steps in all. Validation on
the split val chooses its checkpoint, which is scored on a test split.
"""

from demo.data import LABELS
from vlbert.comparison.plans import DEMO_WORDS, ComparedTask, Plan, Training, Variant

PRETRAINING, FINETUNING = 600, 140  # steps
_VALIDATIONS = 7
_COMMON = ("--size=demo", "--features=precomputed", "--vocabulary={root}/text/vocab.txt")
_TASKS = {"refcoco": ("RefCOCO+", "testA", "accuracy_published"), "vqa": ("VQA", "eval2014", "accuracy")}
_FIELDS = {"refcoco": (), "vqa": ("--task.answers=18",)}


def label_curves() -> Plan:
    """Return the plan: a column for each task and number of labels, a row with and one without pre-training."""
    columns = [(task, labels) for task in _TASKS for labels in LABELS]
    tasks = {
        f"{task}_{labels}": ComparedTask(f"{title}, {labels} labels", split, metric, best=True)
        for task, labels in columns
        for title, split, metric in [_TASKS[task]]
    }

    def finetunings(steps: int) -> dict[str, Training]:
        every = f"--validate_every={steps // _VALIDATIONS}", f"--save_every={steps // _VALIDATIONS}", f"--steps={steps}"
        return {
            f"{task}_{labels}": Training(
                f"finetune_{task}",
                (*_COMMON, *_FIELDS[task], *every, f"--task.folder={{root}}/data/labels/{task}-{labels}"),
            )
            for task, labels in columns
        }

    corpus = "--data.text_corpus={root}/text", "--task.monitored_words", *DEMO_WORDS, f"--steps={PRETRAINING}"
    variants = {
        "with": Variant("with pre-training", Training("pretrain_vlbert", (*_COMMON, *corpus)), finetunings(FINETUNING)),
        "without": Variant("without pre-training", None, finetunings(PRETRAINING + FINETUNING)),
    }
    metrics = ("monitored_accuracy", "monitored_accuracy_grounding_gap")
    return Plan("label_curves", "How many labels does pre-training save?", variants, tasks, (0, 1, 2, 3, 4), metrics)
