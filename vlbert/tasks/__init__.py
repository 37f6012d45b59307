"""The tasks: which there are, and which one the settings of a run belong to.

Adding one: a file with a settings dataclass and a class below `Task` (base.py), and a line in TASKS
(docs/your-own-task.md).
"""

from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks.base import Task, TaskSettings


def make_task(settings: TaskSettings, vocabulary: Vocabulary, num_classes: int) -> Task:
    """The task that the type of `settings` belongs to."""
    return task_of(settings)(settings, vocabulary, num_classes)


def task_of(settings: TaskSettings) -> type[Task]:
    """The class of the task that the type of `settings` belongs to."""
    return _tasks()[type(settings)]


def settings_named(name: str) -> type[TaskSettings] | None:
    """The type of settings of this name; None where no task has such."""
    return next((kind for kind in _tasks() if kind.__name__ == name), None)


def _tasks() -> dict[type[TaskSettings], type[Task]]:
    from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
    from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
    from vlbert.tasks.retrieval import Retrieval, RetrievalSettings
    from vlbert.tasks.vcr import VCR, VCRSettings
    from vlbert.tasks.vqa import VQA, VQASettings

    ours = {
        PretrainingSettings: Pretraining,
        RefCOCOSettings: RefCOCO,
        RetrievalSettings: Retrieval,
        VCRSettings: VCR,
        VQASettings: VQA,
    }
    return ours | TASKS


TASKS: dict[type[TaskSettings], type[Task]] = {}  # add your own: the type of its settings -> the task
