"""The whole road, in order: collect, detect, pretrain, fine-tune. Read this first.

    python -m flows.pipeline PARAMETERS.json          Prefect's home is .prefect, or PREFECT_HOME where that is set

Every stage is a flow of its own file and runs alone as well; beside each flow stands the plain function that it calls.
What is done is what the storage says: a second run collects and detects only what is missing, and training goes on from
its last checkpoint.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from flows.settings import Dataset, FinetuneSettings, PretrainSettings, quiet_prefect

if __name__ == "__main__":  # before prefect is imported, which reads them then
    os.environ.update(quiet_prefect(Path(os.environ.get("PREFECT_HOME") or ".prefect")))

from prefect import flow
from prefect.exceptions import ParameterBindError, ParameterTypeError, SignatureMismatchError
from prefect.utilities.callables import get_call_parameters

from flows.check import check
from flows.collect import Collected, collect_flow
from flows.detect import Detected, detect_flow
from flows.finetune import finetune_flow
from flows.pretrain import pretrain_flow
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
    check(datasets, pretraining, finetunings)
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


def read_parameters(file: Path) -> dict:
    """The flow's parameters from a JSON file; ValueError names the file, and the place in it that is wrong."""
    try:
        parameters = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}:{error.colno}: no JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not in UTF-8: {error}") from error
    if not isinstance(parameters, dict):
        raise ValueError(f"{file} holds no JSON object; README.md shows what it should hold")
    return parameters


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.pipeline", description="Run the flow pretrain-vlbert.")
    parser.add_argument("parameters", type=Path, help="JSON with root, work, datasets, pretraining and finetunings")
    file = parser.parse_args().parameters
    try:
        parameters = read_parameters(file)
        # As the flow itself does first; here without a server, and without Prefect's account of where it failed.
        checked = pretrain_vlbert.validate_parameters(get_call_parameters(pretrain_vlbert.fn, (), parameters))
        check(checked["datasets"], checked["pretraining"], checked["finetunings"])
    except (ParameterTypeError, ParameterBindError, SignatureMismatchError) as error:
        sys.exit(f"{file}: {error}")
    except ValueError as error:
        sys.exit(str(error))
    pretrain_vlbert(**parameters)


if __name__ == "__main__":
    main()
