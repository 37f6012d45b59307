"""Settings of the flows, the deployments that give them, and what is checked of them before any work."""

import dataclasses
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from places import PROJECT
from prefect.exceptions import ParameterTypeError
from prefect.flows import load_flow_from_entrypoint

from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.deployments import flow_parameters, write_deployments
from detectors.config import DetectionConfig
from flows import finetune, pretrain
from flows.check import check
from flows.pipeline import pretrain_vlbert
from flows.settings import Dataset, FinetuneSettings, PretrainSettings, Processes
from flows.torchrun import make_arguments
from storage.collect.plan import CollectSettings
from storage.settings import override

Pipeline = tuple[list[Dataset], PretrainSettings, list[FinetuneSettings]]


@pytest.fixture(scope="module")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    settings = DemoDataSettings(
        train_scenes=2, held_out_scenes=1, broken_rows=0, text_lines=1, task_train=24, task_held_out=0
    )
    return draw_demo_data(tmp_path_factory.mktemp("data"), settings)


@pytest.fixture(scope="module")
def parameters(demo_data: DemoData) -> dict:
    return flow_parameters(Path("r"), demo_data, seed=0, processes=1)


@pytest.fixture
def pipeline(parameters: dict) -> Pipeline:
    """That of the demo."""
    read = pretrain_vlbert.validate_parameters(parameters)
    return read["datasets"], read["pretraining"], read["finetunings"]


def changed(
    pipeline: Pipeline, dataset: dict | None = None, pretraining: dict | None = None, finetuning: dict | None = None
):
    """The pipeline with other fields of its first dataset, its pre-training and its first fine-tuning."""
    datasets, first, finetunings = pipeline
    return (
        [dataclasses.replace(datasets[0], **dataset or {}), *datasets[1:]],
        dataclasses.replace(first, **pretraining or {}),
        [dataclasses.replace(finetunings[0], **finetuning or {}), *finetunings[1:]],
    )


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"), [({"count": 0}, ["count", "0"]), ({"nodes": 2}, ["nodes", "2", "launcher", "srun"])]
)
def test_processes_that_cannot_be_started_are_refused(fields: dict, named: list[str]):
    with pytest.raises(ValueError) as refused:
        Processes(**fields)
    assert [word for word in named if word not in str(refused.value)] == []


@pytest.mark.parametrize("path", [("datasets", 0, "detector"), ("pretraining", "processes"), ("finetunings", 0)])
def test_the_flow_refuses_a_misspelt_setting(demo_data: DemoData, path: tuple):
    parameters = flow_parameters(Path("r"), demo_data, seed=0, processes=1)
    at = parameters
    for step in path:
        at = at[step]
    at["misspelt"] = 1
    with pytest.raises(ParameterTypeError, match=".".join(map(str, path)) + ".misspelt: Unexpected"):
        pretrain_vlbert.validate_parameters(parameters)


def test_the_form_in_the_flow_ui_describes_every_setting():
    forms = pretrain_vlbert.parameters.definitions
    assert {"Dataset", "DetectionConfig", "NetworkOverrides", "DownloadSettings", "FinetuneSettings"} <= set(forms)
    fields = {f"{form}.{name}": field for form in forms for name, field in forms[form]["properties"].items()}
    assert [name for name, field in fields.items() if not field.get("description")] == []


# --- the whole pipeline -----------------------------------------------------------------------------------------------

REFUSED = [
    ({"dataset": {"name": "held-out"}}, ["datasets", "held-out"]),
    ({"dataset": {"captions": "no.tsv"}}, ["dataset captions: captions", "no.tsv"]),
    ({"dataset": {"captions": None, "images": "no"}}, ["dataset captions: images", "no"]),
    ({"dataset": {"captions": None, "webdataset": "no"}}, ["dataset captions", "no is not a folder", "tars"]),
    ({"dataset": {"columns": ("url", "alt")}}, ["dataset captions", "train.tsv", "no column 'url'"]),
    (
        {"dataset": {"detector": DetectionConfig("annotated", annotations="a.json")}},
        ["dataset captions: detector.annotations", "a.json"],
    ),
    (
        {"dataset": {"detector": DetectionConfig(preset="demo", weights="no.safetensors")}},
        ["dataset captions: detector.weights", "no.safetensors"],
    ),
    (
        {"pretraining": {"datasets": {"caption": None}}},
        ["pretraining.datasets", "'caption'", "captions, held-out, coco"],
    ),
    ({"pretraining": {"held_out": ("held",)}}, ["pretraining.datasets", "'held'"]),
    ({"pretraining": {"text": ("no.txt",)}}, ["pretraining.text", "no.txt"]),
    ({"pretraining": {"vocabulary_captions": ("no.tsv",)}}, ["pretraining.vocabulary_captions", "no.tsv"]),
    ({"pretraining": {"vocabulary": "no.txt"}}, ["pretraining.vocabulary", "no.txt"]),
    ({"pretraining": {"recipe": "finetune_refcoco --size demo"}}, ["pretraining.recipe", "finetune_refcoco"]),
    ({"pretraining": {"run": "refcoco-with"}}, ["runs", "refcoco-with"]),
    (
        {"pretraining": {"recipe": "pretrain_vlbert --features precomputed", "overrides": ()}},
        ["captions does not keep", "keep_features"],
    ),
    ({"pretraining": {"overrides": ("--data.root=x",)}}, ["override --data.root=x", "the flow's root"]),
    ({"finetuning": {"dataset": "refcoco"}}, ["finetunings[0].dataset", "'refcoco'"]),
    ({"finetuning": {"folder": "no"}}, ["finetunings[0].folder", "no/refs(unc).p"]),
    ({"finetuning": {"overrides": ("--no_random_init",)}}, ["override --no_random_init", "the setting checkpoint"]),
]


def test_the_pipeline_of_the_demo_passes(pipeline: Pipeline):
    check(*pipeline)
    check(
        *changed(pipeline, pretraining={"datasets": {"captions": 3.0, "coco": 0.8}, "held_out": ("held-out", "coco")})
    )


@pytest.mark.parametrize("held_out", [(), ("a", "b")])
def test_a_pre_training_says_to_the_program_on_which_datasets(monkeypatch: pytest.MonkeyPatch, held_out: tuple):
    """Without held-out data it does not validate on those of its recipe."""
    given = []
    monkeypatch.setattr(pretrain, "train", lambda root, settings, fields, *rest: given.append(fields))
    settings = PretrainSettings("pretrain_vlbert --size demo", datasets={"sbu": 0.8, "cc": 3.0}, held_out=held_out)
    assert settings.resolved_recipe.data.held_out == ("held-out",)
    pretrain.pretrain("r", "w", settings, "abc")
    _, _, _, *arguments = make_arguments(settings, given[0])
    data = override(settings.resolved_recipe, arguments).data
    assert (data.datasets, data.held_out) == ({"sbu": 0.8, "cc": 3.0}, held_out or None)


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_a_pipeline_that_cannot_work_is_refused(pipeline: Pipeline, changes: dict, named: list[str]):
    with pytest.raises(ValueError) as refused:
        check(*changed(pipeline, **changes))
    assert [word for word in named if word not in str(refused.value)] == []


def test_a_task_without_a_file_of_its_own_is_refused(pipeline: Pipeline, tmp_path: Path):
    datasets, pretraining, _ = pipeline
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "vcr1images").mkdir()
    datasets.append(dataclasses.replace(datasets[-1], name="vcr"))
    tuning = FinetuneSettings("vcr", folder=str(tmp_path), evaluate=("val",))
    check(datasets, pretraining, [tuning])
    with pytest.raises(ValueError, match=rf"finetunings\[0\].evaluate: test: there is no {tmp_path}/test.jsonl"):
        check(datasets, pretraining, [dataclasses.replace(tuning, evaluate=("val", "test"))])
    (tmp_path / "vcr1images").rmdir()
    with pytest.raises(ValueError, match=rf"finetunings\[0\].folder: there is no {tmp_path}/vcr1images"):
        check(datasets, pretraining, [tuning])


@pytest.mark.parametrize(
    ("stage", "settings"), [(pretrain, PretrainSettings), (finetune, FinetuneSettings)], ids=["pretrain", "finetune"]
)
def test_a_stage_alone_refuses_an_override_of_what_it_sets(tmp_path: Path, stage: ModuleType, settings: type):
    run = getattr(stage, stage.__name__.rpartition(".")[2])
    for field, source in stage.SETTINGS.items():
        for name in (field, field.replace("_", "-")):
            with pytest.raises(ValueError, match=f"override --{name}=x: .* {source}"):
                run(str(tmp_path), str(tmp_path), settings(overrides=(f"--{name}=x",)))


# --- deployments ------------------------------------------------------------------------------------------------------

NAMES = {
    *("pretrain-vlbert/default", "collect-captions/default", "pretrain/default", "finetune/default"),
    *("detect-regions/default", "detect-regions/scheduled", "train-detector/default"),
    "compare/default",
}


@pytest.mark.parametrize("of", ["project", "demo"])
def test_deployments_fit_their_flows(demo_data: DemoData, parameters: dict, tmp_path: Path, of: str):
    file = PROJECT / "prefect.yaml"
    if of == "demo":
        file = tmp_path / "prefect.yaml"
        write_deployments(file, parameters, demo_data)
    read, deployments = {}, yaml.safe_load(file.read_text())["deployments"]
    active = [schedule.get("active", True) for one in deployments for schedule in one.get("schedules", ())]
    assert active == [of == "project"], "the demo starts nothing by the clock"
    for deployment in deployments:
        flow = load_flow_from_entrypoint(deployment["entrypoint"])
        assert set(flow.parameters.required) <= set(deployment["parameters"]) <= set(flow.parameters.properties)
        read[f"{flow.name}/{deployment['name']}"] = flow.validate_parameters(deployment["parameters"])
    assert set(read) == NAMES
    pipeline = read["pretrain-vlbert/default"]
    dataset, pretraining = pipeline["datasets"][0], pipeline["pretraining"]
    assert isinstance(dataset, Dataset)
    fields = [field.name for field in dataclasses.fields(CollectSettings)]
    collected = CollectSettings(**{name: getattr(dataset, name) for name in fields})
    assert read["collect-captions/default"]["dataset"] == collected
    for name in ("detect-regions/default", "detect-regions/scheduled"):
        assert (read[name]["detector"], read[name]["datasets"]) == (dataset.detector, (dataset.name,))
    assert read["pretrain/default"]["settings"] == pretraining
    assert read["finetune/default"]["settings"].pretraining == pretraining.resolved_recipe.run


def test_the_deployments_of_several_machines_fit_their_flows():
    for deployment in yaml.safe_load((PROJECT / "docker" / "prefect.yaml").read_text())["deployments"]:
        load_flow_from_entrypoint(deployment["entrypoint"]).validate_parameters(deployment["parameters"])


def test_the_pipeline_of_the_tasks_page_fits_its_flow():
    page = (PROJECT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (pipeline,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    read = pretrain_vlbert.validate_parameters(pipeline | {"root": "r", "work": "w", "pretraining": {}})
    assert {one.task for one in read["finetunings"]} == {"refcoco", "vqa", "vcr"}
    assert {one.dataset_name for one in read["finetunings"]} == {dataset.name for dataset in read["datasets"]}
    runs = [one.resolved_recipe.run for one in read["finetunings"]]
    assert len(runs) == len(set(runs))
