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

from prefect import flow

from flows.collect import Collected, collect_flow
from flows.detect import Detected, detect_flow
from flows.finetune import finetune_flow
from flows.pretrain import pretrain_flow
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.torchrun import Trained


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
) -> PipelineResult:
    """From caption lists to fine-tuned models.

    Args:
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        work: A folder of this machine, for tokenised text and copies of vocabularies.
        datasets: What is collected, and how regions are found in it.
        pretraining: On which of the datasets, and how.
        finetunings: One after the other, from the checkpoint of the pre-training; one that fails keeps no other from
            running, and the whole fails at the end.
    """
    from flows.check import check  # here, because it imports torch, and whoever deploys this flow needs none

    check(datasets, pretraining, finetunings)
    collected = [collect_flow(root, dataset) for dataset in datasets]
    detected: dict[str, Detected] = {}
    for dataset in datasets:
        detected |= detect_flow(root, dataset.detector, (dataset.name,))

    detector = detected[min(pretraining.datasets)].detector  # of all of them: vlbert.resume checks it
    pretrained = pretrain_flow(root, work, pretraining, detector)

    def start(settings: FinetuneSettings) -> Trained:
        settings = dataclasses.replace(
            settings,
            pretraining=settings.pretraining or pretrained.run,
            detector=settings.detector or detected[settings.dataset_name].detector,
        )
        return finetune_flow(root, work, settings)

    finetuned = each_in_turn(finetunings, start)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return PipelineResult(collected, detected, pretrained, finetuned, peak_bytes)


def each_in_turn(
    finetunings: Sequence[FinetuneSettings], start: Callable[[FinetuneSettings], Trained]
) -> list[Trained]:
    """Return the result of each; where one fails, the others are started, too. A signal ends all.

    Raises RuntimeError, which names those that failed.
    """
    finetuned, failed = [], []
    for settings in finetunings:
        try:
            finetuned.append(start(settings))
        except Exception as error:  # noqa: BLE001  of whatever kind: the other tasks are not to be lost by it
            failed.append(f"{settings.made.run}: {error}")
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(finetunings)} fine-tunings failed: {'; '.join(failed)}")
    return finetuned
