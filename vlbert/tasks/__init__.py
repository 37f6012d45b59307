"""The registered tasks, each with its settings class.

To add a task, write a settings dataclass and a subclass of `Task` (base.py), and add both to TASKS
(see docs/your-own-task.md).
"""

from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks.base import Task, TaskSettings


def make_task(settings: TaskSettings, vocabulary: Vocabulary, num_classes: int) -> Task:
    """Create the task of these settings. `num_classes` is the number of detector classes, without the background."""
    return task_of(settings)(settings, vocabulary, num_classes)


def task_of(settings: TaskSettings) -> type[Task]:
    """Return the task class that is registered for the class of these settings."""
    return _tasks()[type(settings)]


def settings_named(name: str) -> type[TaskSettings] | None:
    """Return the settings class with this name, such as "VQASettings", or None if no registered task has it."""
    return next((kind for kind in _tasks() if kind.__name__ == name), None)


def _tasks() -> dict[type[TaskSettings], type[Task]]:
    from vlbert.tasks.labels import Labels, LabelSettings
    from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
    from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
    from vlbert.tasks.retrieval import Retrieval, RetrievalSettings
    from vlbert.tasks.vcr import VCR, VCRSettings
    from vlbert.tasks.vqa import VQA, VQASettings

    built_in = {
        LabelSettings: Labels,
        PretrainingSettings: Pretraining,
        RefCOCOSettings: RefCOCO,
        RetrievalSettings: Retrieval,
        VCRSettings: VCR,
        VQASettings: VQA,
    }
    return built_in | TASKS


TASKS: dict[type[TaskSettings], type[Task]] = {}  # for your own tasks: settings class -> task class
