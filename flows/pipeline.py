"""Run the whole pipeline in order: collect, detect, pre-train, fine-tune. Read this file first.

    make serve                                              # server, worker and the deployments of prefect.yaml
    prefect deployment run pretrain-vlbert/default --watch  # in another terminal

Each stage is a flow that can also run separately. Its file has the flow and the plain function that the flow calls. The
storage records what is done: a second run collects and detects only what is missing, and training resumes from its last
checkpoint.
"""

import dataclasses
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefect import flow

from flows.artifacts import Artifact, escape, log_reason, make_metrics_table, stage_logger
from flows.collect import Collected, collect_flow
from flows.detect import Detected, detect_flow
from flows.finetune import finetune_flow
from flows.pretrain import pretrain_flow
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.torchrun import Trained


@dataclass(frozen=True)
class PipelineResult:
    """Results of a pipeline run, by stage."""

    collected: list[Collected]
    detected: dict[str, Detected]  # by dataset
    pretrained: Trained
    finetuned: list[Trained]
    peak_bytes: int  # peak memory of the process that ran the flows, without its children


@flow(name="pretrain-vlbert", flow_run_name="{pretraining.recipe}", persist_result=True, on_failure=[log_reason])
def pretrain_vlbert(
    root: str,
    work: str,
    datasets: list[Dataset],
    pretraining: PretrainSettings,
    finetunings: list[FinetuneSettings],
) -> PipelineResult:
    """Run all stages, from caption lists to fine-tuned models.

    Args:
        root: Storage root: a local folder, or s3://bucket/prefix.
        work: Local folder for tokenised text and copies of vocabularies.
        datasets: Datasets to collect, each with its detector.
        pretraining: Settings of the pre-training run, with the datasets to train on.
        finetunings: Settings of fine-tuning runs, which start one after another, by default from the pre-training
            checkpoint. If one fails, the others still run, and the flow fails at the end.
    """
    from flows.check import check  # here, because it imports torch, which is not needed to deploy this flow

    check(datasets, pretraining, finetunings)
    say, stages = stage_logger().info, 3 + len(finetunings)
    say("stage 1 of %s: collect %s", stages, ", ".join(dataset.name for dataset in datasets))
    collected = [collect_flow(root, dataset) for dataset in datasets]
    say("stage 2 of %s: detect regions", stages)
    detected: dict[str, Detected] = {}
    for dataset in datasets:
        detected |= detect_flow(root, dataset.detector, (dataset.name,))

    detector = detected[min(pretraining.datasets)].detector  # the same for all datasets: vlbert.resume checks this
    say("stage 3 of %s: pre-train", stages)
    pretrained = pretrain_flow(root, work, pretraining, detector)

    def start(settings: FinetuneSettings) -> Trained:
        say("stage %s of %s: fine-tune %s", 4 + finetunings.index(settings), stages, settings.resolved_recipe.run)
        settings = dataclasses.replace(
            settings,
            pretraining=settings.pretraining or pretrained.run,
            detector=settings.detector or detected[settings.dataset_name].detector,
        )
        return finetune_flow(root, work, settings)

    finetuned = run_finetunings(finetunings, start)
    results = "\n\n".join(map(make_result, [pretrained, *finetuned]))
    Artifact("pipeline", pretrained.run).show(lambda: results, now=True)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return PipelineResult(collected, detected, pretrained, finetuned, peak_bytes)


def make_result(trained: Trained) -> str:
    """Return the metrics of a run as Markdown: narrow, so that they are in view without scrolling."""
    return f"**{escape(trained.run)}**\n\n{make_metrics_table(trained.metrics)}"


def run_finetunings(
    finetunings: Sequence[FinetuneSettings], start: Callable[[FinetuneSettings], Trained]
) -> list[Trained]:
    """Call `start` with each fine-tuning run's settings, and return the results. If one fails, the others still run.

    At the end, raises RuntimeError if any run has failed. A signal stops all of them.
    """
    finetuned, failed = [], []
    for settings in finetunings:
        try:
            finetuned.append(start(settings))
        except Exception as error:  # noqa: BLE001  no error may prevent the other runs
            failed.append(f"{settings.resolved_recipe.run}: {error}")
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(finetunings)} fine-tuning runs failed: {'; '.join(failed)}")
    return finetuned
