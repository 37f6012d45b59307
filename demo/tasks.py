"""The tasks that the demo fine-tunes on twice, with and without pre-training, and the numbers that come of it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flows.pipeline import PipelineResult


@dataclass(frozen=True)
class DemoTask:
    """A task of the demo data; its metric of the last validation is compared, and stands beside its `chance`."""

    title: str
    task: str  # of flows.settings.FinetuneSettings
    metric: str
    loss: str  # of the training, in nats
    measures: str  # what the metric is, for people
    question: str  # one, for people
    least_gain: float  # with pre-training, over without it and over chance: of one seed, or the mean of three
    overrides: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        return f"finetune_{self.task} --size demo"


DEMO_TASKS = {
    "refcoco": DemoTask(
        *("RefCOCO+", "refcoco", "accuracy_published", "loss_regions"),
        measures="expressions for which the right object was found (IoU ≥ 0.5)",
        question="“The small red star”: which of the boxes is meant?",
        least_gain=0.1,
    ),
    "vqa": DemoTask(
        *("VQA", "vqa", "accuracy", "loss_answers"),
        measures="questions answered right (official accuracy)",
        question="“What color is the star?”",
        least_gain=0.1,
    ),
    "vcr-answers": DemoTask(
        *("VCR, Q→A", "vcr", "answer_accuracy", "loss_answers"),
        measures="right answers of four",
        question="“How does [0] differ from [1]?” “[0] is red.”",
        least_gain=0.05,
        overrides=("--task.subtask=answer",),
    ),
    "vcr-rationales": DemoTask(
        *("VCR, QA→R", "vcr", "rationale_accuracy", "loss_answers"),
        measures="right rationales of four, the right answer given",
        question="“How does [0] differ from [1]?” “[0] is red.” “Because [1] is blue.”",
        least_gain=0.05,
        overrides=("--task.subtask=rationale",),
    ),
}
OF_DEMO = ("refcoco", "vqa")  # of `make demo`; `make demo-full` has all
STARTS = {"with": "latest", "without": "none"}  # how a run starts -> FinetuneSettings.checkpoint


def run_of(task: str, start: str) -> str:
    """Name of the run, to which one of several seeds adds its own."""
    return f"{task}-{start}"


def role_of(run: str) -> str:
    """The name without that of the seed."""
    return re.sub(r"-seed\d+$", "", run)


def runs_of(pipeline: "PipelineResult") -> dict[str, str]:
    """`pretrain`, or task and start -> name of the run."""
    return {role_of(one.run): one.run for one in (pipeline.pretrained, *pipeline.finetuned)}


def numbers_of(pipeline: "PipelineResult") -> dict[str, float]:
    """The grounding gap (accuracy at colour and shape words, less that with another image), the metric of each
    fine-tuning, and by task what chance gets."""
    numbers = {"grounding": pipeline.pretrained.metrics["monitored_accuracy_grounding_gap"]}
    for one in pipeline.finetuned:
        role = role_of(one.run)
        task = role.rpartition("-")[0]
        numbers |= {role: one.metrics[DEMO_TASKS[task].metric], task: one.metrics["chance"]}
    return numbers


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def joint_folder(root: Path, answers_run: str) -> Path:
    """Where the evaluation of VCR's runs of answers and of rationales together goes."""
    return root / "evaluations" / answers_run.replace("answers", "joint")
