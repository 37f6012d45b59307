"""The whole pipeline, in order: collect, detect, pretrain, fine-tune. Read this first.

    make serve                                              # server, worker and the deployments of prefect.yaml
    prefect deployment run pretrain-vlbert/default --watch  # in another terminal

Every stage is a flow of its own file and runs alone as well; beside each flow stands the plain function that it calls.
What is done is what the storage says: a second run collects and detects only what is missing, and training goes on from
its last checkpoint.
"""

import dataclasses
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from prefect import flow

from flows.artifacts import Stages, name_run, reason_of
from flows.collect import Collected, collect_flow
from flows.detect import SILENCE, Detected, detect_flow
from flows.finetune import finetune_flow
from flows.pretrain import pretrain_flow
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.torchrun import Trained, name_training
from storage.manifests import OK


@dataclass(frozen=True)
class PipelineResult:
    """The result of each stage."""

    collected: list[Collected]
    detected: dict[str, Detected]  # by dataset
    pretrained: Trained
    finetuned: list[Trained]
    peak_bytes: int  # memory of the process that ran the flows, without its children


@flow(name="pretrain-vlbert", flow_run_name="{pretraining.recipe}", persist_result=True)
def pretrain_vlbert(
    root: str,
    work: str,
    datasets: list[Dataset],
    pretraining: PretrainSettings,
    finetunings: list[FinetuneSettings],
    detection_silence: float | None = SILENCE,
) -> PipelineResult:
    """From caption lists to fine-tuned models.

    Args:
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        work: A folder of this machine, for tokenised text and copies of vocabularies.
        datasets: What is collected, and how regions are found in it.
        pretraining: On which of the datasets, and how.
        finetunings: One after the other, from the checkpoint of the pre-training; one that fails keeps no other from
            running, and the whole fails at the end.
        detection_silence: Seconds without a finished shard after which a detector hangs and is ended.
    """
    from flows.check import check  # here, because it imports torch, and whoever deploys this flow needs none

    check(datasets, pretraining, finetunings)
    names, run = [dataset.name for dataset in datasets], pretraining.made.run
    runs = [run, *(settings.made.run for settings in finetunings)]
    stages = Stages(run, [f"{stage} {name}" for stage in ("collect", "detect") for name in names] + runs)
    collected = [
        stages.run(f"collect {dataset.name}", partial(collect_flow, root, dataset), describe_images)
        for dataset in datasets
    ]
    detected: dict[str, Detected] = {}
    for dataset in datasets:
        find = partial(detect_flow, root, dataset.detector, (dataset.name,), detection_silence)
        detected |= stages.run(f"detect {dataset.name}", find, describe_regions)

    detector = detected[min(pretraining.datasets)].detector  # of all of them: vlbert.resume checks it
    recipe = pretraining.made.name
    name_run(f"{recipe} on {detector}", f"recipe:{recipe}", f"detector:{detector}")
    pretrained = stages.run(run, partial(pretrain_flow, root, work, pretraining, detector), describe_training)
    name_training(pretrained.recipe, pretrained.run, pretrained.detector, pretrained.snapshot)

    def started(settings: FinetuneSettings) -> Trained:
        settings = dataclasses.replace(
            settings,
            pretraining=settings.pretraining or pretrained.run,
            detector=settings.detector or detected[settings.dataset_name].detector,
        )
        tune = partial(finetune_flow, root, work, settings)
        return stages.run(settings.made.run, tune, describe_training)

    finetuned, failed = each_in_turn(finetunings, started)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if failed:
        reasons = "; ".join(f"{run}: {reason}" for run, reason in failed.items())
        raise RuntimeError(
            f"{len(failed)} of {len(finetunings)} fine-tunings failed, each in a flow of its own: {reasons}"
        )
    return PipelineResult(collected, detected, pretrained, finetuned, peak_bytes)


def each_in_turn(
    finetunings: Sequence[FinetuneSettings], start: Callable[[FinetuneSettings], Trained]
) -> tuple[list[Trained], dict[str, str]]:
    """Start one after the other, also where one fails: the results and, by run, why one failed. A signal ends all."""
    finetuned, failed = [], {}
    for settings in finetunings:
        try:
            finetuned.append(start(settings))
        except Exception as error:  # noqa: BLE001  of whatever kind: the other tasks are not to be lost by it
            failed[settings.made.run] = reason_of(error)
    return finetuned, failed


# The results of stages for the table of stages; the artifacts of each stage have more.


def describe_images(collected: Collected) -> str:
    return f"{collected.counts.get(OK, 0):,} images in {collected.shards:,} shards"


def describe_regions(detected: dict[str, Detected]) -> str:
    return "; ".join(f"{one.regions:,} regions in {one.images:,} images by {one.detector}" for one in detected.values())


def describe_training(trained: Trained) -> str:
    whole = {name: value for name, value in trained.metrics.items() if "accuracy" in name and "/" not in name}
    return ", ".join(f"{name} {value:.3f}" for name, value in whole.items()) or trained.checkpoint
