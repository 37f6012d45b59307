"""Settings of the flows and what is checked of them before any work: each fault is named at second 0."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from places import PROJECT

import demo.__main__ as demo
from demo.data import DemoData, DemoDataSettings, draw_demo_data
from detectors.config import DetectionConfig
from flows import finetune, pretrain
from flows.check import check
from flows.settings import Dataset, FinetuneSettings, PretrainSettings, Processes
from storage.collection_plan import CollectSettings
from storage.download import DownloadSettings
from vlbert.recipes import RECIPES


@pytest.fixture(scope="module")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> DemoData:
    settings = DemoDataSettings(
        train_scenes=2, held_out_scenes=1, broken_rows=0, text_lines=1, task_train=24, task_held_out=0
    )
    return draw_demo_data(tmp_path_factory.mktemp("data"), settings)


def collecting(dataset: Dataset) -> CollectSettings:
    """The part of a dataset that collecting takes."""
    names = [field.name for field in dataclasses.fields(CollectSettings)]
    return CollectSettings(**{name: getattr(dataset, name) for name in names})


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_that_contradict_each_other_are_refused():
    detector = DetectionConfig("annotated", annotations="a.json")
    with pytest.raises(ValueError, match="Dataset x: set captions .* or images"):
        Dataset("x", captions="a.tsv", images="folder", detector=detector)
    with pytest.raises(ValueError, match="Dataset x: set captions .* or images"):
        CollectSettings("x")
    with pytest.raises(ValueError, match="rows_per_shard is 0"):
        Dataset("x", captions="a.tsv", rows_per_shard=0, detector=detector)
    with pytest.raises(ValueError, match="count is 0"):
        Processes(0)
    with pytest.raises(ValueError, match=r"vocabulary_size: only for .* set text, too"):
        PretrainSettings(vocabulary_size=500)
    with pytest.raises(ValueError, match=r"vocabulary_captions: only for .* vocabulary names one already"):
        PretrainSettings(vocabulary_captions=("a.tsv",), vocabulary="vocab.txt")
    with pytest.raises(ValueError, match="vocabulary names one already"):
        PretrainSettings(text=("a.txt",), vocabulary_size=500, vocabulary="vocab.txt")


def as_json(demo_data: DemoData) -> dict:
    """A small pipeline as its JSON file has it."""
    detector = {"backend": "annotated", "annotations": str(demo_data.annotations)}
    random_init = ["model.regions.random_init=true"]
    return {
        "root": "r",
        "work": "w",
        "datasets": [
            {
                "name": "captions",
                "captions": str(demo_data.train_tsv),
                "detector": detector,
                "download": {"deadline": 3, "allowed_hosts": ["127.0.0.1:8791"]},
            }
        ],
        "pretraining": {"recipe": "pretrain_vlbert_demo", "processes": {"count": 1}, "overrides": random_init},
        "finetunings": [
            {
                "recipe": "finetune_refcoco_demo",
                "folder": str(demo_data.refcoco),
                "dataset": "captions",
                "overrides": random_init,
            }
        ],
    }


@pytest.mark.parametrize(
    "path",
    [
        ("datasets", 0),
        ("datasets", 0, "detector"),
        ("datasets", 0, "download"),
        ("pretraining",),
        ("pretraining", "processes"),
        ("finetunings", 0),
    ],
)
def test_the_flow_refuses_a_misspelt_setting(demo_data: DemoData, path: tuple):
    from prefect.exceptions import ParameterTypeError

    from flows.pipeline import pretrain_vlbert

    pipeline = as_json(demo_data)
    read = pretrain_vlbert.validate_parameters(pipeline)
    assert read["datasets"][0].download == DownloadSettings(deadline=3, allowed_hosts=("127.0.0.1:8791",))
    place = pipeline
    for step in path:
        place = place[step]
    place["misspelt"] = 1
    with pytest.raises(ParameterTypeError, match=".".join(map(str, path)) + ".misspelt: Unexpected"):
        pretrain_vlbert.validate_parameters(pipeline)


def test_collecting_refuses_a_detector_and_the_road_a_dataset_without_one(demo_data: DemoData):
    from prefect.exceptions import ParameterTypeError

    from flows.collect import collect_flow
    from flows.pipeline import pretrain_vlbert

    pipeline = as_json(demo_data)
    (dataset,) = pipeline["datasets"]
    with pytest.raises(ParameterTypeError, match="dataset.detector: Unexpected"):
        collect_flow.validate_parameters({"root": "r", "dataset": dataset})
    detector = dataset.pop("detector")
    assert collect_flow.validate_parameters({"root": "r", "dataset": dataset})["dataset"].name == "captions"
    with pytest.raises(ParameterTypeError, match="datasets.0.detector: Field required"):
        pretrain_vlbert.validate_parameters(pipeline)
    with pytest.raises(TypeError):
        Dataset("x", "a.tsv", None, DownloadSettings(), 10, 2, DetectionConfig(**detector))  # keyword-only


def test_the_form_in_the_flow_ui_has_words_for_every_setting():
    from flows.pipeline import pretrain_vlbert

    forms = pretrain_vlbert.parameters.definitions
    assert {
        "Dataset",
        "DetectionConfig",
        "SelectionSettings",
        "DownloadSettings",
        "PretrainSettings",
        "FinetuneSettings",
    } <= set(forms)
    wordless = {
        f"{name}.{field}"
        for name, form in forms.items()
        for field, about in form["properties"].items()
        if not about.get("description")
    }
    assert not wordless
    assert forms["NetworkOverrides"]["properties"]["post_nms"]["description"] == "Proposals an image, at most."


# --- the whole pipeline -----------------------------------------------------------------------------------------------


def a_pipeline(demo_data: DemoData) -> tuple[list[Dataset], PretrainSettings, list[FinetuneSettings]]:
    from flows.pipeline import pretrain_vlbert

    parameters = demo.flow_parameters(Path("r"), demo_data, seed=0, processes=1)
    pipeline = pretrain_vlbert.validate_parameters(parameters)
    return pipeline["datasets"], pipeline["pretraining"], pipeline["finetunings"]


def test_the_road_of_the_demo_passes(demo_data: DemoData):
    check(*a_pipeline(demo_data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "held-out"}, "two are named held-out"),
        ({"captions": "no.tsv"}, "dataset captions: captions: there is no file no.tsv"),
        ({"captions": None, "images": "no"}, "dataset captions: images: there is no folder no"),
        ({"captions": None, "images": str(PROJECT / "docs")}, "docs holds no image file; folders below it are not rea"),
        ({"captions": None, "img2dataset": "no"}, "dataset captions: img2dataset: there is no folder no"),
        (
            {"captions": None, "img2dataset": str(PROJECT / "docs")},
            "captions: img2dataset: .*docs holds no shard of img2",
        ),
        (
            {"detector": DetectionConfig("annotated", annotations="no.json")},
            "dataset captions: detector.annotations: there is no file no.json",
        ),
        (
            {"detector": DetectionConfig(preset="demo", weights="no.safetensors")},
            "dataset captions: detector.weights: there is no file no.safetensors",
        ),
        (
            {"detector": DetectionConfig(weights=str(PROJECT / "README.md"))},
            "dataset captions: detector.weights: .*README.md is not a safetensors file",
        ),
    ],
)
def test_a_dataset_that_cannot_work_is_refused(demo_data: DemoData, changes: dict, message: str):
    datasets, pretraining, finetunings = a_pipeline(demo_data)
    datasets[0] = dataclasses.replace(datasets[0], **changes)
    with pytest.raises(ValueError, match=message):
        check(datasets, pretraining, finetunings)


NO_TEXT = {"text": (), "vocabulary_size": None, "vocabulary_captions": ()}
BERT = "starts from bert-base-uncased, whose weights need BERT's own vocab.txt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "caption"}, "pretraining.dataset is 'caption', and datasets has only captions, held-out, coco"),
        ({"held_out": "held"}, "pretraining.held_out is 'held'"),
        ({"text": ("no.txt",)}, "pretraining.text: there is no file no.txt"),
        ({"vocabulary_captions": ("no.tsv",)}, "pretraining.vocabulary_captions: there is no file no.tsv"),
        (NO_TEXT | {"vocabulary": "no.txt"}, "pretraining.vocabulary: there is no file no.txt"),
        ({"recipe": "pretrain"}, "pretraining.recipe is 'pretrain'; it must be one of finetune_refcoco_base, "),
        ({"recipe": "finetune_refcoco_demo"}, "pretraining.recipe finetune_refcoco_demo is no pre-training"),
        ({"overrides": ("step=3",)}, "step=3: Recipe has no field 'step'"),
        ({"overrides": ("data.batch=0",)}, "DataConfig.batch is 0"),
        *(
            (
                {"overrides": (f"{field}=x",)},
                f"override {field}=x: the stage sets {field} itself; use {setting} instead",
            )
            for field, setting in pretrain.SETTINGS.items()
        ),
        (NO_TEXT | {"overrides": ("data.text_batch=4",)}, "data.text_batch=4, and there is no corpus; set text"),
        ({"recipe": "pretrain_vlbert_base"}, BERT),
        ({"overrides": ("bert=bert-base-uncased",)}, BERT),
        ({"run": "refcoco-with"}, "two runs are named refcoco-with"),
        (
            {"overrides": ("model.layers=JJ", "model.regions.random_init=true")},
            "has another architecture than the pre-training",
        ),
    ],
)
def test_a_pre_training_that_cannot_work_is_refused(demo_data: DemoData, changes: dict, message: str):
    datasets, pretraining, finetunings = a_pipeline(demo_data)
    with pytest.raises(ValueError, match=message):
        check(datasets, dataclasses.replace(pretraining, **changes), finetunings)


def test_a_text_corpus_goes_with_berts_own_vocabulary_or_with_none_of_its_weights(demo_data: DemoData, tmp_path: Path):
    datasets, pretraining, _ = a_pipeline(demo_data)
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    random_init = ("model.regions.random_init=true",)
    base = dataclasses.replace(
        pretraining,
        recipe="pretrain_vlbert_base",
        vocabulary_size=None,
        vocabulary_captions=(),
        overrides=random_init,
        processes=Processes(),
    )
    check(datasets, dataclasses.replace(base, vocabulary=str(tmp_path / "vocab.txt")), [])
    check(datasets, dataclasses.replace(base, overrides=("bert=none", *random_init)), [])
    check(datasets, dataclasses.replace(base, text=()), [])


def test_what_training_would_refuse_at_once_is_refused_before_anything_is_downloaded(demo_data: DemoData):
    datasets, pretraining, finetunings = a_pipeline(demo_data)
    bare = dataclasses.replace(pretraining, overrides=("model.regions.random_init=false",))
    with pytest.raises(ValueError, match=r"pretraining \(.*the Fast R-CNN has no weights to start from"):
        check(datasets, bare, [])
    alone = dataclasses.replace(finetunings[0], checkpoint="none", overrides=bare.overrides)
    with pytest.raises(ValueError, match=r"finetunings\[0\] \(.*the Fast R-CNN has no weights to start from"):
        check(datasets, pretraining, [alone])
    three = Processes(count=3)
    with pytest.raises(ValueError, match=r"pretraining \(.*data.batch = 32 cannot be shared by 3 processes"):
        check(datasets, dataclasses.replace(pretraining, processes=three), [])
    with pytest.raises(ValueError, match=r"finetunings\[0\] \(.*data.batch = 32 cannot be shared by 3 processes"):
        check(datasets, pretraining, [dataclasses.replace(finetunings[0], processes=three)])


def test_text_only_rows_need_not_be_shared_where_there_is_no_corpus(demo_data: DemoData):
    datasets, pretraining, _ = a_pipeline(demo_data)
    overrides = (*pretraining.overrides, "data.batch=30")
    three = dataclasses.replace(pretraining, overrides=overrides, processes=Processes(count=3))
    with pytest.raises(ValueError, match="data.text_batch = 8 cannot be shared by 3 processes"):
        check(datasets, three, [])
    check(datasets, dataclasses.replace(three, **NO_TEXT), [])


@pytest.fixture
def vcr(demo_data: DemoData, tmp_path: Path) -> tuple[list[Dataset], PretrainSettings, FinetuneSettings]:
    """A pipeline from BERT, on a vocabulary of BERT's, to VCR."""
    datasets, pretraining, _ = a_pipeline(demo_data)
    for name in ("vocab.txt", "train.jsonl", "val.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "vcr1images").mkdir()
    datasets.append(dataclasses.replace(datasets[-1], name="vcr"))
    pretraining = dataclasses.replace(
        pretraining,
        recipe="pretrain_vlbert_base",
        vocabulary=str(tmp_path / "vocab.txt"),
        vocabulary_size=None,
        vocabulary_captions=(),
        overrides=("model.regions.random_init=true",),
        processes=Processes(),
    )
    return datasets, pretraining, FinetuneSettings("vcr", folder=str(tmp_path))


@pytest.mark.parametrize("missing", ["train.jsonl", "val.jsonl", "vcr1images"])
def test_a_task_without_a_file_or_folder_of_its_own_is_refused(vcr: tuple, missing: str):
    datasets, pretraining, finetuning = vcr
    check(datasets, pretraining, [finetuning])
    path = Path(finetuning.folder) / missing
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(ValueError, match=rf"finetunings\[0\].folder: there is no (file|folder) {path}"):
        check(datasets, pretraining, [finetuning])


def test_a_split_to_be_evaluated_whose_files_are_not_there_is_refused(vcr: tuple):
    datasets, pretraining, finetuning = vcr
    check(datasets, pretraining, [dataclasses.replace(finetuning, evaluate=("val",))])
    missing = Path(finetuning.folder) / "test.jsonl"
    with pytest.raises(ValueError, match=rf"finetunings\[0\].evaluate: test: there is no file {missing}"):
        check(datasets, pretraining, [dataclasses.replace(finetuning, evaluate=("val", "test"))])


def test_a_task_reads_the_dataset_of_its_own_name(vcr: tuple):
    datasets, pretraining, finetuning = vcr
    with pytest.raises(
        ValueError, match=r"finetunings\[0\].dataset is 'vcr', and datasets has only captions, held-out"
    ):
        check(datasets[:-1], pretraining, [finetuning])


def test_weights_of_bert_go_with_no_vocabulary_that_the_road_builds(vcr: tuple):
    """VCR takes BERT's pooler, also where its vocabulary is that of the pre-training."""
    datasets, pretraining, finetuning = vcr
    scratch = {"vocabulary": None, "overrides": ("bert=none", *pretraining.overrides)}
    for changes in (scratch, scratch | {"text": ()}):
        own = dataclasses.replace(pretraining, **changes)
        message = r"finetunings\[0\]: recipe finetune_vcr_base takes weights from bert-base-uncased, .*: the override"
        with pytest.raises(ValueError, match=message):
            check(datasets, own, [finetuning])
        check(datasets, own, [dataclasses.replace(finetuning, overrides=("bert=none",))])
        check(datasets, own, [dataclasses.replace(finetuning, pretraining="another")])


def test_precomputed_features_come_from_a_detector_that_keeps_them_and_go_to_a_model_that_takes_them(
    vcr: tuple, tmp_path: Path
):
    datasets, pretraining, _ = vcr
    detector = DetectionConfig(preset="demo", random_init=True, keep_features=True)
    datasets = [dataclasses.replace(dataset, detector=detector) for dataset in datasets]
    datasets[-1] = dataclasses.replace(datasets[-1], name="vqa")
    vqa = FinetuneSettings("vqa", folder=str(tmp_path))
    for name in RECIPES[vqa.recipe_name]().task.files:
        (tmp_path / name).touch()
    precomputed = dataclasses.replace(pretraining, recipe="pretrain_vlbert_base_precomputed", overrides=())
    check(datasets, precomputed, [vqa])
    with pytest.raises(ValueError, match="model.regions.features is precomputed, there end_to_end"):
        check(datasets, pretraining, [vqa])
    datasets[-1] = dataclasses.replace(datasets[-1], detector=dataclasses.replace(detector, keep_features=False))
    with pytest.raises(ValueError, match=r"finetunings\[0\]: .* detector of dataset vqa keeps none; set its keep_feat"):
        check(datasets, precomputed, [vqa])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "refcoco"}, r"finetunings\[0\].dataset is 'refcoco'"),
        ({"folder": "no"}, r"finetunings\[0\].folder: there is no file no/refs\(unc\).p"),
        ({"folder": ""}, r"finetunings\[0\].folder is not set"),
        (
            {"recipe": "finetune_refcoco_demi"},
            r"finetunings\[0\].recipe is 'finetune_refcoco_demi'; it must be one of finetune_refcoco_base",
        ),
        ({"recipe": "finetune_refcoco_base"}, "has another architecture than the pre-training pretrain_vlbert_demo"),
        ({"overrides": ("optimizer.rate=3",)}, r"finetunings\[0\] .*OptimizerConfig has no field 'rate'"),
        ({"run": "pretrain"}, "two runs are named pretrain"),
        *(
            ({"overrides": (f"{field}=x",)}, f"the stage sets {field} itself; use {setting} instead")
            for field, setting in finetune.SETTINGS.items()
        ),
    ],
)
def test_a_fine_tuning_that_cannot_work_is_refused(demo_data: DemoData, changes: dict, message: str):
    datasets, pretraining, finetunings = a_pipeline(demo_data)
    finetunings[0] = dataclasses.replace(finetunings[0], **changes)
    with pytest.raises(ValueError, match=message):
        check(datasets, pretraining, finetunings)


def test_a_stage_alone_refuses_an_override_of_what_it_sets(tmp_path: Path):
    with pytest.raises(ValueError, match="use the setting run instead"):
        pretrain.pretrain(str(tmp_path), str(tmp_path), PretrainSettings(overrides=("run=x",)))
    with pytest.raises(ValueError, match="use the pre-training's vocabulary instead"):
        finetune.finetune(str(tmp_path), str(tmp_path), FinetuneSettings(overrides=("vocabulary=x",)))


# --- deployments ------------------------------------------------------------------------------------------------------


def deployments_of(file: Path) -> dict[str, dict]:
    """Flow/name -> what the file says of it and `read`, its parameters as its flow gets them."""
    from prefect.flows import load_flow_from_entrypoint

    found = {}
    for deployment in yaml.safe_load(file.read_text())["deployments"]:
        flow = load_flow_from_entrypoint(deployment["entrypoint"])
        given, known = deployment["parameters"], flow.parameters
        assert set(known.required) <= set(given) <= set(known.properties)
        found[f"{flow.name}/{deployment['name']}"] = deployment | {"read": flow.validate_parameters(given)}
    return found


NAMES = {
    *("pretrain-vlbert/default", "collect-captions/default", "pretrain/default", "finetune/default"),
    *("detect-regions/default", "detect-regions/scheduled", "train-detector/default"),
}


def test_the_projects_deployments_fit_their_flows():
    found = deployments_of(PROJECT / "prefect.yaml")
    assert set(found) == NAMES
    (dataset,) = found["pretrain-vlbert/default"]["read"]["datasets"]
    assert isinstance(dataset, Dataset)
    assert collecting(dataset) == (found["collect-captions/default"]["read"]["dataset"])
    for name in ("detect-regions/default", "detect-regions/scheduled"):
        assert found[name]["read"]["detector"] == dataset.detector
        assert found[name]["read"]["datasets"] == (dataset.name,)
    pretraining = found["pretrain-vlbert/default"]["read"]["pretraining"]
    assert found["pretrain/default"]["read"]["settings"] == pretraining
    assert found["finetune/default"]["read"]["settings"].pretraining == (pretraining.run or pretraining.recipe)


def test_the_pipeline_of_the_tasks_page_fits_its_flow():
    from flows.pipeline import pretrain_vlbert

    page = (PROJECT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (pipeline,) = (yaml.safe_load(block.partition("```")[0]) for block in page.split("```yaml\n")[1:])
    read = pretrain_vlbert.validate_parameters(pipeline | {"root": "r", "work": "w", "pretraining": {}})
    names = {dataset.name for dataset in read["datasets"]}
    assert {settings.task for settings in read["finetunings"]} == {"refcoco", "vqa", "vcr"}
    assert {settings.dataset_name for settings in read["finetunings"]} == names
    runs = [settings.run or settings.recipe_name for settings in read["finetunings"]]
    assert len(runs) == len(set(runs))


def test_the_demos_deployments_fit_their_flows_and_its_road_passes_the_check(demo_data: DemoData, tmp_path: Path):
    parameters = demo.flow_parameters(tmp_path, demo_data, seed=0, processes=1)
    demo.write_deployments(tmp_path / "prefect.yaml", parameters)
    found = deployments_of(tmp_path / "prefect.yaml")
    assert set(found) == NAMES
    pipeline = found["pretrain-vlbert/default"]["read"]
    check(pipeline["datasets"], pipeline["pretraining"], pipeline["finetunings"])
    captions = pipeline["datasets"][0]
    assert collecting(captions) == (found["collect-captions/default"]["read"]["dataset"])
    assert found["detect-regions/scheduled"]["read"]["detector"] == captions.detector
    assert found["detect-regions/scheduled"]["read"]["datasets"] == (captions.name,)
    assert found["pretrain/default"]["read"]["settings"] == pipeline["pretraining"]
    assert found["finetune/default"]["read"]["settings"] == dataclasses.replace(
        pipeline["finetunings"][0], pretraining=pipeline["pretraining"].run
    )
    assert [schedule["active"] for schedule in found["detect-regions/scheduled"]["schedules"]] == [False]
