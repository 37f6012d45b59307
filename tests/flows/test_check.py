"""Settings of the flows, the deployments that give them, and what is checked of them before any work."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from places import PROJECT
from prefect.exceptions import ParameterTypeError
from prefect.flows import load_flow_from_entrypoint

from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.deployments import (
    PIPELINE,
    SHIPPED_DETECTOR,
    TRAIN_DETECTOR,
    comparison_parameters,
    flow_parameters,
    write_deployments,
)
from flows import finetune, pretrain
from flows.check import check
from flows.pipeline import pretrain_vlbert
from flows.settings import Dataset, FinetuneSettings, PretrainSettings
from flows.torchrun import make_arguments
from storage.collect.plan import CollectSettings
from storage.settings import override


@pytest.fixture(scope="module")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    """With so many questions that an answer comes nine times, as the task of VQA needs."""
    settings = {"train_scenes": 2, "held_out_scenes": 1, "broken_rows": 0, "text_lines": 1, "task_train": 24}
    return draw_demo_data(tmp_path_factory.mktemp("data"), DemoDataSettings(**settings, task_val=0, task_test=0))


@pytest.fixture
def parameters(demo_data: DemoData) -> dict:
    return flow_parameters(Path("r"), demo_data, seed=0, processes=1)


def read(parameters: dict) -> tuple[list[Dataset], PretrainSettings, list[FinetuneSettings]]:
    found = pretrain_vlbert.validate_parameters(parameters)
    return found["datasets"], found["pretraining"], found["finetunings"]


def test_the_form_in_the_flow_ui_describes_every_setting():
    forms = pretrain_vlbert.parameters.definitions
    fields = {f"{form}.{name}": field for form in forms for name, field in forms[form]["properties"].items()}
    assert "Dataset.detector" in fields
    assert [name for name, field in fields.items() if not field.get("description")] == []


def test_labels_of_ones_own_are_a_task_of_the_pipeline():
    settings = FinetuneSettings("labels", overrides=("--task.train=labels.csv",))
    recipe = settings.resolved_recipe
    assert (recipe.name, recipe.task.files) == ("finetune_labels_base", ("labels.csv",))
    assert settings.dataset_name in recipe.data.datasets


WITHOUT_FEATURES = {"preset": "demo", "weights": str(SHIPPED_DETECTOR)}
REFUSED = [
    ("datasets", {"detector": {"misspelt": 1}}, r"datasets.0.detector.misspelt: Unexpected"),
    ("pretraining", {"processes": {"misspelt": 1}}, r"pretraining.processes.misspelt: Unexpected"),
    ("finetunings", {"misspelt": 1}, r"finetunings.0.misspelt: Unexpected"),
    ("pretraining", {"processes": {"count": 0}}, r"Processes.count is 0"),
    ("pretraining", {"processes": {"nodes": 2}}, r"Processes.nodes is 2, but launcher .* srun"),
    ("datasets", {"name": "held-out"}, r"datasets .*held-out"),
    ("datasets", {"captions": "no.tsv"}, r"dataset captions: captions: .* no.tsv"),
    ("datasets", {"captions": None, "images": "no"}, r"dataset captions: images: .* no$"),
    ("datasets", {"captions": None, "webdataset": "no"}, r"dataset captions: .*no is not a folder"),
    ("datasets", {"columns": ("url", "alt")}, r"dataset captions: .*train.tsv.* no column 'url'"),
    ("datasets", {"detector": {"backend": "annotated", "annotations": "a.json"}}, r"detector.annotations: .*a.json"),
    ("datasets", {"detector": {"preset": "demo", "weights": "a.safetensors"}}, r"detector.weights: .*a.safetensors"),
    ("pretraining", {"datasets": {"caption": None}}, r"pretraining.datasets .*'caption'.* captions, held-out, coco"),
    ("pretraining", {"held_out": ("held",)}, r"pretraining.datasets .*'held'"),
    ("pretraining", {"text": ("no.txt",)}, r"pretraining.text: .*no.txt"),
    ("pretraining", {"vocabulary_captions": ("no.tsv",)}, r"pretraining.vocabulary_captions: .*no.tsv"),
    ("pretraining", {"vocabulary": "no.txt"}, r"pretraining.vocabulary: .*no.txt"),
    ("pretraining", {"recipe": "finetune_refcoco --size demo"}, r"pretraining.recipe finetune_refcoco"),
    ("pretraining", {"run": "refcoco_1000-with-seed0"}, r"runs .*refcoco_1000"),
    ("datasets", {"detector": WITHOUT_FEATURES}, r"detector of captions does not keep .*keep_features"),
    ("pretraining", {"overrides": ("--data.root=x",)}, r"override --data.root=x.* the flow's root"),
    ("finetunings", {"dataset": "refcoco"}, r"finetunings\[0\].dataset .*'refcoco'"),
    ("finetunings", {"folder": "no"}, r"finetunings\[0\].folder: .*no/refs\(unc\).p"),
    ("finetunings", {"overrides": ("--no_random_init",)}, r"override --no_random_init.* the setting checkpoint"),
]


@pytest.mark.parametrize(("part", "fields", "named"), REFUSED)
def test_a_pipeline_that_cannot_work_is_refused(parameters: dict, part: str, fields: dict, named: str):
    changed = parameters[part] if part == "pretraining" else parameters[part][0]
    changed |= fields
    with pytest.raises((ValueError, ParameterTypeError), match=named):
        check(*read(parameters))


def test_the_pipeline_of_the_demo_passes(parameters: dict):
    check(*read(parameters))
    parameters["pretraining"] |= {"datasets": {"captions": 3.0, "coco": 0.8}, "held_out": ("held-out", "coco")}
    check(*read(parameters))


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


def test_a_task_without_a_file_of_its_own_is_refused(parameters: dict, tmp_path: Path):
    datasets, pretraining, _ = read(parameters)
    tuning = FinetuneSettings("vcr", folder=str(tmp_path), dataset="coco", evaluate=("val",))
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"finetunings\[0\].folder: there is no {tmp_path}/vcr1images"):
        check(datasets, pretraining, [tuning])
    (tmp_path / "vcr1images").mkdir()
    check(datasets, pretraining, [tuning])
    with pytest.raises(ValueError, match=rf"finetunings\[0\].evaluate: test: there is no {tmp_path}/test.jsonl"):
        check(datasets, pretraining, [dataclasses.replace(tuning, evaluate=("val", "test"))])


def test_a_stage_alone_refuses_an_override_of_what_it_sets():
    with pytest.raises(ValueError, match="override --data.held-out=x: .* the setting held_out"):
        pretrain.pretrain("r", "w", PretrainSettings(overrides=("--data.held-out=x",)))
    with pytest.raises(ValueError, match="override --init_from=x: .* the settings pretraining and checkpoint"):
        finetune.finetune("r", "w", FinetuneSettings(overrides=("--init_from=x",)))


@pytest.mark.parametrize("of", ["project", "demo"])
def test_deployments_fit_their_flows(demo_data: DemoData, parameters: dict, tmp_path: Path, of: str):
    file = PROJECT / "prefect.yaml"
    if of == "demo":
        file = tmp_path / "prefect.yaml"
        write_deployments(file, parameters, comparison_parameters(Path("r"), demo_data, [0]), demo_data)
    read, deployments = {}, yaml.safe_load(file.read_text())["deployments"]
    active = [schedule.get("active", True) for one in deployments for schedule in one.get("schedules", ())]
    assert active == [of == "project"], "the demo starts nothing by the clock"
    for deployment in deployments:
        flow = load_flow_from_entrypoint(deployment["entrypoint"])
        assert set(flow.parameters.required) <= set(deployment["parameters"]) <= set(flow.parameters.properties)
        read[f"{flow.name}/{deployment['name']}"] = flow.validate_parameters(deployment["parameters"])
    assert {TRAIN_DETECTOR, "compare/default"} < read.keys()
    pipeline = read[PIPELINE]
    dataset, pretraining = pipeline["datasets"][0], pipeline["pretraining"]
    collected = read["collect-captions/default"]["dataset"]
    assert collected == CollectSettings(**{name: getattr(dataset, name) for name in vars(collected)})
    for name in ("detect-regions/default", "detect-regions/scheduled"):
        assert (read[name]["detector"], read[name]["datasets"]) == (dataset.detector, (dataset.name,))
    assert read["pretrain/default"]["settings"] == pretraining
    assert read["finetune/default"]["settings"].pretraining == pretraining.resolved_recipe.run


def test_the_deployments_of_several_machines_and_the_pipeline_of_the_tasks_page_fit_their_flows():
    for deployment in yaml.safe_load((PROJECT / "docker" / "prefect.yaml").read_text())["deployments"]:
        load_flow_from_entrypoint(deployment["entrypoint"]).validate_parameters(deployment["parameters"])
    page = (PROJECT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (pipeline,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    read = pretrain_vlbert.validate_parameters(pipeline | {"root": "r", "work": "w", "pretraining": {}})
    assert {one.task for one in read["finetunings"]} == {"refcoco", "vqa", "vcr"}
    assert {one.dataset_name for one in read["finetunings"]} == {dataset.name for dataset in read["datasets"]}
    runs = [one.resolved_recipe.run for one in read["finetunings"]]
    assert len(runs) == len(set(runs))
