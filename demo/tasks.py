"""The tasks of the demo, each fine-tuned with and without pre-training, and the metrics of their runs."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flows.pipeline import PipelineResult


@dataclass(frozen=True)
class DemoTask:
    """A task of the demo, with its metric and the gain that pre-training must bring."""

    title: str
    task: Literal["refcoco", "vqa", "vcr"]  # value of FinetuneSettings.task
    metric: str  # of the last validation; compared between runs, and with the metric `chance`
    loss: str  # training loss, in nats
    measures: str  # meaning of the metric, for the report
    question: str  # an example, for the report
    least_gain: float  # minimum gain over no pre-training and over chance, for one seed or the mean of three
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
DEFAULT_TASKS = ("refcoco", "vqa")  # tasks of `make demo`; `make demo-full` has all
STARTS = {"with": "latest", "without": "none"}  # with or without pre-training -> FinetuneSettings.checkpoint


def run_name(task: str, start: str) -> str:
    """Return the name of a task's run, without the seed suffix. `start` is a key of STARTS."""
    return f"{task}-{start}"


def strip_seed(run: str) -> str:
    """Return the name of a run without its seed suffix."""
    return re.sub(r"-seed\d+$", "", run)


def runs_by_role(pipeline: "PipelineResult") -> dict[str, str]:
    """Return the run names by role, which is the name without the seed suffix: `pretrain`, or task and start."""
    return {strip_seed(trained.run): trained.run for trained in (pipeline.pretrained, *pipeline.finetuned)}


def collect_numbers(pipeline: "PipelineResult") -> dict[str, float]:
    """Return the grounding gap, each fine-tuning run's metric by task and start, and the chance level by task.

    The grounding gap is the accuracy at colour and shape words, minus the accuracy with another image.
    """
    numbers = {"grounding": pipeline.pretrained.metrics["monitored_accuracy_grounding_gap"]}
    for trained in pipeline.finetuned:
        role = strip_seed(trained.run)
        task = role.rpartition("-")[0]
        numbers |= {role: trained.metrics[DEMO_TASKS[task].metric], task: trained.metrics["chance"]}
    return numbers


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def joint_folder(root: Path, answers_run: str) -> Path:
    """Return the folder for the joint evaluation of VCR's answer run and rationale run."""
    return root / "evaluations" / answers_run.replace("answers", "joint")
