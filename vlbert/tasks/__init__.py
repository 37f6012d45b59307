"""The tasks: which there are, and which one the settings of a run belong to.

Adding one: a file with a settings dataclass and a class below `Task` (base.py), and a line in TASKS
(docs/your-own-task.md).
"""

from typing import Any

from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks.base import Task


def make_task(settings: Any, vocabulary: Vocabulary, num_classes: int) -> Task:
    """The task that the type of `settings` belongs to."""
    return task_of(settings)(settings, vocabulary, num_classes)


def task_of(settings: Any) -> type[Task]:
    """The class of the task that the type of `settings` belongs to."""
    return _tasks()[type(settings)]


def settings_named(name: str) -> type | None:
    """The type of settings of this name; None where no task has such."""
    return next((kind for kind in _tasks() if kind.__name__ == name), None)


def _tasks() -> dict[type, type[Task]]:
    from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
    from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
    from vlbert.tasks.vcr import VCR, VCRSettings
    from vlbert.tasks.vqa import VQA, VQASettings

    return {PretrainingSettings: Pretraining, RefCOCOSettings: RefCOCO, VCRSettings: VCR, VQASettings: VQA} | TASKS


TASKS: dict[type, type[Task]] = {}  # those of your own: the type of the settings -> the task


def splits_of(settings: Any, split: str) -> set[str]:
    """The splits that one consists of: of most tasks itself."""
    find = getattr(task_of(settings), "splits_of", None)
    return set(find(split)) if find else {split}


def validation_split(settings: Any) -> str | None:
    """The split that training validates on, where the task has splits."""
    return getattr(settings, "validate_on", None)
