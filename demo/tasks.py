"""What the demo fine-tunes twice, with pre-training and without it: the difference is what pre-training is worth."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoTask:
    """A task of the demo data, and what is compared: a metric of the last validation, beside its `chance`."""

    title: str
    task: str  # of flows.settings.FinetuneSettings
    metric: str
    loss: str  # of the training, in the unit nats
    row_id: str  # the column of its predictions that tells one question from all others
    measures: str  # what the metric is, for people
    question: str  # one, for people
    least_gain: float  # with pre-training, over without it and over chance: of one seed, or the mean of three
    overrides: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        return f"finetune_{self.task}_demo"


DEMO_TASKS = {
    "refcoco": DemoTask(
        *("RefCOCO+", "refcoco", "accuracy_published", "loss_regions", "sentence_id"),
        measures="expressions for which the right object was found (IoU ≥ 0.5)",
        question="“The small red star”: which of the boxes is meant?",
        least_gain=0.1,
    ),
    "vqa": DemoTask(
        *("VQA", "vqa", "accuracy", "loss_answers", "question_id"),
        measures="questions answered right (official accuracy)",
        question="“What color is the star?”",
        least_gain=0.1,
    ),
    "vcr-answers": DemoTask(
        *("VCR, Q→A", "vcr", "answer_accuracy", "loss_answers", "annot_id"),
        measures="right answers of four",
        question="“How does [0] differ from [1]?” “[0] is red.”",
        least_gain=0.05,
        overrides=("task.question=answer",),
    ),
    "vcr-rationales": DemoTask(
        *("VCR, QA→R", "vcr", "rationale_accuracy", "loss_answers", "annot_id"),
        measures="right rationales of four, the right answer given",
        question="“How does [0] differ from [1]?” “[0] is red.” “Because [1] is blue.”",
        least_gain=0.05,
        overrides=("task.question=rationale",),
    ),
}
OF_DEMO = ("refcoco", "vqa")  # of `make demo`; `make demo-full` has all
STARTS = {"with": "latest", "without": "none"}  # how a run starts -> FinetuneSettings.checkpoint


def run_of(task: str, start: str) -> str:
    """Name of the run, to which one of several seeds adds its own."""
    return f"{task}-{start}"


ROLES = {run_of(task, start): (task, start) for task in DEMO_TASKS for start in STARTS}


def joint_folder(root: Path, answers_run: str) -> Path:
    """Where the evaluation of VCR's runs of answers and of rationales together goes."""
    return root / "evaluations" / answers_run.replace("answers", "joint")
