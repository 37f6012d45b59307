"""Write the demo's prefect.yaml: the project's deployments, with parameters for the demo data."""

import copy
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from demo.data import LABELS, ROWS_PER_SHARD, VISUAL_WORDS, DemoData
from demo.labels import (
    PRETRAINING_RUN,
    SIZE,
    WITH,
    WITHOUT,
    changes,
    folder_of,
    label_curves,
    quick_label_curves,
    run_name,
)
from demo.task_files import ANSWERS
from detectors.config import DetectionConfig, NetworkOverrides
from detectors.select import SelectionSettings
from flows.settings import (
    CompareSettings,
    Dataset,
    FinetuneSettings,
    PretrainSettings,
    Processes,
    TrainDetectorSettings,
)
from storage.collect.download import DownloadSettings

PIPELINE, TRAIN_DETECTOR, COMPARE = "pretrain-vlbert/default", "train-detector/default", "compare/default"
DETECTOR_RUN = "detector"
SHIPPED_DETECTOR = Path(__file__).parent / "detector.safetensors"  # docs/detector.md explains how it was made


def write_deployments(file: Path, parameters: dict, comparison: dict, data: DemoData) -> None:
    """Write the project's prefect.yaml to `file`, with `parameters` for `pretrain-vlbert` and schedules paused.

    `comparison`: parameters of `compare`.
    """
    project = yaml.safe_load((Path(__file__).parents[1] / "prefect.yaml").read_text())
    root, work, pretraining = (parameters[name] for name in ("root", "work", "pretraining"))
    first, finetuning = parameters["datasets"][0], parameters["finetunings"][0]
    by_flow = {
        "pretrain_vlbert": parameters,
        "collect_flow": {"root": root, "dataset": {name: first[name] for name in first if name != "detector"}},
        "detect_flow": {"root": root, "detector": first["detector"], "datasets": [first["name"]]},
        "pretrain_flow": {"root": root, "work": work, "settings": pretraining},
        "finetune_flow": {"root": root, "work": work, "settings": finetuning | {"pretraining": pretraining["run"]}},
        "compare_flow": comparison,
        "train_detector_flow": {"root": root, "settings": as_json(TrainDetectorSettings, make_detector_settings(data))},
    }
    for deployment in project["deployments"]:
        # Copied, so that the file has no YAML references between deployments.
        deployment["parameters"] = copy.deepcopy(by_flow[deployment["entrypoint"].rpartition(".")[2]])
        for schedule in deployment.get("schedules", ()):
            schedule["active"] = False
    file.write_text(yaml.safe_dump({name: project[name] for name in ("name", "deployments")}, sort_keys=False))


def make_detector_settings(data: DemoData) -> TrainDetectorSettings:
    return TrainDetectorSettings(
        recipe="detector_demo",
        run=DETECTOR_RUN,
        annotations=str(data.annotations),
        images=(str(data.images),),
        held_out_last=data.settings.held_out_scenes,
    )


def flow_parameters(
    root: Path, data: DemoData, seed: int, processes: int, weights: Path = SHIPPED_DETECTOR
) -> dict[str, Any]:
    """Return the parameters of the flow `pretrain-vlbert` as JSON values.

    Its runs are two of the plan in demo/labels.py: pre-training, and RefCOCO+ with the most labels.
    """
    detector = make_detection_config(weights, keep_features=True)
    datasets = [Dataset(name, **source, detector=detector) for name, source in make_sources(data).items()]
    pretraining = PretrainSettings(
        recipe=shlex.join(["pretrain_vlbert", *SIZE]),
        run=PRETRAINING_RUN.format(seed=seed),
        held_out=("held-out",),
        text=(str(data.text),),
        vocabulary_size=500,
        vocabulary_captions=(str(data.train_tsv),),
        monitored_words=VISUAL_WORDS,
        overrides=(f"--data.seed={seed}", *changes("pretraining", WITH)),
        processes=Processes(processes),
    )
    column = f"refcoco_{max(LABELS)}"
    finetuning = FinetuneSettings(
        task="refcoco",
        recipe=shlex.join(["finetune_refcoco", *SIZE]),
        run=run_name(column, WITH).format(seed=seed),
        folder=str((data.root / folder_of(column)).absolute()),  # as the comparison names it
        dataset="coco",
        overrides=(f"--data.seed={seed}", *changes("refcoco", WITH)),
        processes=Processes(processes),
    )
    return {
        "root": str(root),
        "work": str(root / "work"),
        "datasets": as_json(list[Dataset], datasets),
        "pretraining": as_json(PretrainSettings, pretraining),
        "finetunings": as_json(list[FinetuneSettings], [finetuning]),
    }


def comparison_parameters(root: Path, data: DemoData, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the parameters of the flow `compare` for that plan, after `pretrain-vlbert`, as JSON values.

    With one seed, the plan is the quick one. All seeds have the text and the vocabulary of that flow, whose seed is the
    first one.
    """
    text = root / "work" / "text" / PRETRAINING_RUN.format(seed=seeds[0])
    fields = [f"pretraining:data.text_corpus={shlex.quote(str(text))}"]
    fields += [f"{scope}:vocabulary={shlex.quote(str(text / 'vocab.txt'))}" for scope in ("pretraining", WITHOUT)]
    plan = label_curves if len(seeds) > 1 else quick_label_curves
    fields += [f"{column}:task.answers={count_answers(data)}" for column in plan().tasks if column.startswith("vqa")]
    settings = CompareSettings(plan=f"demo.labels:{plan.__name__}", seeds=tuple(seeds), fields=tuple(fields))
    return {"root": str(root), "settings": as_json(CompareSettings, settings)}


def count_answers(data: DemoData) -> int:
    """Return the number of answers in the demo's list of VQA answers."""
    return len((data.vqa / ANSWERS).read_text(encoding="utf-8").splitlines())


def make_detection_config(weights: Path, keep_features: bool = False) -> DetectionConfig:
    # A scene has at most five objects, so more proposals would only repeat them. The proposals' own boxes ground words
    # better than regressed ones (benchmarks/results/2026-11-21-grounding.json).
    return DetectionConfig(
        weights=str(weights),
        network=NetworkOverrides(post_nms=30),
        selection=SelectionSettings(minimum=3),
        boxes="proposals",
        keep_features=keep_features,
        batch=8,
    )


def make_sources(data: DemoData) -> dict[str, dict[str, Any]]:
    """Return the fields of each dataset's CollectSettings, by dataset name."""
    download = DownloadSettings(deadline=3.0, allowed_hosts=(f"127.0.0.1:{data.port}",))
    common = {"download": download, "rows_per_shard": ROWS_PER_SHARD}
    return {
        "captions": {"captions": str(data.train_tsv)} | common,
        "held-out": {"captions": str(data.held_out_tsv)} | common,
        "coco": {"images": str(data.task_images)} | common,
    }


def as_json(kind: type, value: object) -> Any:
    """Return a value of type `kind` as JSON values, the form of flow parameters."""
    return TypeAdapter(kind).dump_python(value, mode="json")
