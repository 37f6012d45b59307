"""The whole road, in order: collect, detect, pretrain, fine-tune. Read this first.

    make serve                                              # server, worker and the deployments of prefect.yaml
    prefect deployment run pretrain-vlbert/default --watch  # in another terminal

Every stage is a flow of its own file and runs alone as well; beside each flow stands the plain function that it calls.
What is done is what the storage says: a second run collects and detects only what is missing, and training goes on from
its last checkpoint.
"""

import dataclasses
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prefect import flow

from flows.artifacts import name_run, publish, table_of_stages
from flows.check import check
from flows.collect import Collected, collect_flow
from flows.detect import Detected, detect_flow
from flows.finetune import finetune_flow
from flows.pretrain import pretrain_flow
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.training import Trained
from storage.catalog import OK


@dataclass(frozen=True)
class Road:
    """What each stage came to."""

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
) -> Road:
    """From caption lists to fine-tuned models.

    Args:
        root: Of the storage: a folder of this machine, or s3://bucket/prefix.
        work: A folder of this machine, for tokenised text and copies of vocabularies.
        datasets: What is collected, and how regions are found in it.
        pretraining: On which of the datasets, and how.
        finetunings: One after the other, from the checkpoint of the pre-training; one that fails keeps no other from
            running, and the whole fails at the end.
    """
    check(datasets, pretraining, finetunings)
    collected = [collect_flow(root, dataset) for dataset in datasets]
    detected: dict[str, Detected] = {}
    for dataset in datasets:
        detected |= detect_flow(root, dataset.detector, (dataset.name,))

    detector = detected[pretraining.dataset].detector
    name_run(f"{pretraining.recipe} on {detector}", f"recipe:{pretraining.recipe}", f"detector:{detector}")
    pretrained = pretrain_flow(root, work, pretraining, detector)
    name_run(pretrained.name, *pretrained.tags)

    def started(settings: FinetuneSettings) -> Trained:
        settings = dataclasses.replace(
            settings,
            pretraining=settings.pretraining or pretrained.run,
            detector=settings.detector or detected[settings.dataset_name].detector,
        )
        return finetune_flow(root, work, settings)

    finetuned, failed = each_in_turn(finetunings, started)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    road = Road(collected, detected, pretrained, finetuned, peak_bytes)
    publish("road", pretrained.run, lambda: table_of_stages(came_to(road, failed)))
    if failed:
        reasons = "; ".join(f"{run}: {reason}" for run, (reason, _) in failed.items())
        raise RuntimeError(
            f"{len(failed)} of {len(finetunings)} fine-tunings failed, each in a flow of its own: {reasons}"
        )
    return road


def each_in_turn(
    finetunings: Sequence[FinetuneSettings], start: Callable[[FinetuneSettings], Trained]
) -> tuple[list[Trained], dict[str, tuple[str, float]]]:
    """Start one after the other, whatever becomes of it; what they came to and, by run, why one failed and after how
    many seconds. Signals end it all."""
    finetuned, failed = [], {}
    for settings in finetunings:
        began = time.monotonic()
        try:
            finetuned.append(start(settings))
        except Exception as error:  # noqa: BLE001  of whatever kind: the other tasks are not to be lost by it
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            failed[settings.run or settings.recipe_name] = reason, time.monotonic() - began
    return finetuned, failed


def came_to(road: Road, failed: Mapping[str, tuple[str, float]]) -> list[tuple[str, str, float]]:
    """(stage, what it came to, seconds), in order; the stages' own artifacts say more. `failed`: why, and seconds."""
    lines = [
        (f"collect {one.dataset}", f"{one.counts.get(OK, 0):,} images in {one.shards:,} shards", one.seconds)
        for one in road.collected
    ]
    lines += [
        (f"detect {one.dataset}", f"{one.regions:,} regions in {one.images:,} images by {one.detector}", one.seconds)
        for one in road.detected.values()
    ]
    for trained in (road.pretrained, *road.finetuned):
        whole = {name: value for name, value in trained.metrics.items() if "accuracy" in name and "/" not in name}
        numbers = ", ".join(f"{name} {value:.3f}" for name, value in whole.items())
        lines.append((trained.run, numbers or trained.checkpoint, trained.seconds))
    return lines + [(run, f"failed: {reason}", seconds) for run, (reason, seconds) in failed.items()]
