"""What a run of the demo's pipeline came to, without running it."""

from demo.tasks import DEMO_TASKS, STARTS, run_name
from flows.pipeline import PipelineResult
from flows.torchrun import Trained


def trained(run: str, metrics: dict[str, float], detector: str = "detector") -> Trained:
    return Trained(run, "recipe", detector, "snapshot", "", metrics, 1.0, 1)


def pipeline(gap: float, tasks: dict[str, tuple[float, float, float]], seed: str = "", **metrics: float):
    """A pipeline result. gap: of grounding; tasks: by name, the number with pre-training, without it and by chance;
    seed: behind the names of the runs; metrics: further ones of the pre-training."""
    finetuned = [
        trained(run_name(task, start) + seed, {DEMO_TASKS[task].metric: value, "chance": chance})
        for task, (*values, chance) in tasks.items()
        for start, value in zip(STARTS, values, strict=True)
    ]
    return PipelineResult(
        [], {}, trained(f"pretrain{seed}", {"monitored_accuracy_grounding_gap": gap, **metrics}), finetuned, 1
    )
