"""The whole road, in order: collect, detect, pretrain, fine-tune. Read this first.

    python -m flows.pipeline PARAMETERS.json

Every stage is a flow of its own file and runs alone as well; beside each flow stands the plain function that it calls.
What is done is what the storage says: a second run collects and detects only what is missing, and training goes on from
its last checkpoint.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from prefect import flow

from flows.collect import Collected, collect_flow
from flows.detect import Detected, detect_flow
from flows.finetune import finetune_flow
from flows.pretrain import pretrain_flow
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.training import Trained


@dataclass(frozen=True)
class Road:
    """What each stage came to."""

    collected: list[Collected]
    detected: dict[str, Detected]  # by dataset
    pretrained: Trained
    finetuned: list[Trained]


@flow(name="pretrain-vlbert", flow_run_name="{pretraining.recipe} {pretraining.run}")
def pretrain_vlbert(
    root: str,  # of the storage: a folder or s3://bucket/prefix
    work: str,  # folder of this machine for tokenised text
    datasets: list[Dataset],
    pretraining: PretrainSettings,
    finetunings: list[FinetuneSettings],
) -> Road:
    """From caption lists to fine-tuned models."""
    collected = [collect_flow(root, dataset) for dataset in datasets]
    detected = {dataset.name: detect_flow(root, dataset) for dataset in datasets}

    detector = detected[pretraining.dataset].detector
    pretrained = pretrain_flow(root, work, pretraining, detector)

    finetuned = []
    for settings in finetunings:
        start_from = pretrained.checkpoint if settings.pretrained else None
        detector = detected[settings.dataset].detector
        finetuned.append(finetune_flow(root, settings, start_from, detector, pretrained.vocabulary))
    return Road(collected, detected, pretrained, finetuned)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.pipeline", description="Run the flow pretrain-vlbert.")
    parser.add_argument("parameters", type=Path, help="JSON with root, work, datasets, pretraining and finetunings")
    pretrain_vlbert(**json.loads(parser.parse_args().parameters.read_text()))


if __name__ == "__main__":
    main()
