"""Where a fine-tuning starts: which checkpoint, which regions, whose vocabulary. The training itself: test_flows."""

import json
from pathlib import Path

import pytest
from s3 import s3_server
from seeded import put_checkpoint

from flows.finetune import copy_vocabulary, find_checkpoint, finetune
from flows.settings import FinetuneSettings, Processes
from flows.supervisor import ChildFailed
from flows.torchrun import Evaluated, Trained, evaluate
from storage.object_store import open_store
from vlbert.recipes import RECIPES


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Pre-training x with two whole checkpoints and the first files of a third."""
    store = open_store(str(tmp_path / "root"))
    for step in ("step-0000010", "step-0000020"):
        put_checkpoint(store, f"runs/x/{step}", {}, {"vocab.txt": f"[PAD]\n{step}\n".encode()})
    store.put("runs/x/step-0000030/vocab.txt", b"[PAD]\n")
    return str(tmp_path / "root")


# --- the checkpoint ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "pretraining", "found"),
    [
        ("latest", "x", "{root}/runs/x/step-0000020"),
        ("step-0000010", "x", "{root}/runs/x/step-0000010"),
        ("none", "x", "{root}/runs/x/step-0000020"),  # for its vocabulary
        ("none", "", None),
        # Of another root, which need not be in reach here.
        ("s3://bucket/vl-root/runs/y/step-0000001", "x", "s3://bucket/vl-root/runs/y/step-0000001"),
        ("s3://bucket/vl-root/runs/y/step-0000001", "", "s3://bucket/vl-root/runs/y/step-0000001"),
    ],
)
def test_a_checkpoint_is_found_by_its_name(root: str, checkpoint: str, pretraining: str, found: str | None):
    settings = FinetuneSettings(checkpoint=checkpoint, pretraining=pretraining)
    assert find_checkpoint(root, settings) == (found and found.format(root=root))


@pytest.mark.parametrize("checkpoint", ["latest", "step-0000005"])
def test_a_run_that_goes_on_starts_from_what_it_began_with_even_if_that_is_gone(root: str, checkpoint: str):
    """Pre-training went on meanwhile, and removed its old checkpoints."""
    store = open_store(root)
    began = f"{root}/runs/x/step-0000005"
    config = json.dumps({"recipe": {"init_from": began}}).encode()
    settings = FinetuneSettings(run="tuned", checkpoint=checkpoint, pretraining="x")
    if checkpoint == "latest":  # no whole checkpoint yet: a new run
        assert find_checkpoint(root, settings) == f"{root}/runs/x/step-0000020"
    put_checkpoint(store, "runs/tuned/step-0000100", {}, {"config.json": config})
    assert find_checkpoint(root, settings) == began
    other = FinetuneSettings(run="tuned", checkpoint="step-0000010", pretraining="x")
    assert find_checkpoint(root, other) == f"{root}/runs/x/step-0000010", "asked for: training says what differs"


@pytest.mark.parametrize(
    ("checkpoint", "pretraining", "message"),
    [
        ("latest", "", "checkpoint is latest and pretraining names no run; name a run under {root}/runs, give "),
        ("step-0000010", "", "checkpoint is step-0000010 and pretraining names no run"),
        ("step-0000030", "x", "{root}/runs/x has no checkpoint step-0000030; it has step-0000010, step-0000020"),
        ("step-10", "x", "{root}/runs/x has no checkpoint step-10; it has step-0000010, step-0000020"),
        ("latest", "y", "{root}/runs/y has no checkpoint latest; it has none"),
        ("none", "y", "{root}/runs/y has no checkpoint"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_an_error_that_names_those_that_are(
    root: str, checkpoint: str, pretraining: str, message: str
):
    with pytest.raises(ValueError) as error:
        find_checkpoint(root, FinetuneSettings(checkpoint=checkpoint, pretraining=pretraining))
    assert f"finetune: {message.format(root=root)}" in str(error.value)


def told(root: str, work: Path, settings: FinetuneSettings) -> list[str]:
    """The fields that torchrun is given."""
    with pytest.raises(ChildFailed) as failed:
        finetune(root, str(work), settings, lambda line: None)
    return failed.value.command[failed.value.command.index("vlbert.train") + 1 :]


@pytest.fixture
def no_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, `python -m torch.distributed.run` ends at once."""
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    for name in ("__init__.py", "distributed/__init__.py"):
        (tmp_path / "torch" / name).touch()
    (tmp_path / "torch" / "distributed" / "run.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_torchrun")
def test_training_is_told_the_checkpoint_or_else_the_vocabulary_of_the_run_that_it_is_compared_with(
    root: str, tmp_path: Path
):
    settings = {"pretraining": "x", "detector": "abc", "folder": "refs", "run": "r", "overrides": ("steps=4",)}
    base = [f"data.root={root}", "run=r", "data.dataset=refcoco+", "data.held_out=refcoco+", "data.detector=abc"]
    starts = told(root, tmp_path / "work", FinetuneSettings(**settings))
    assert starts == [
        *("finetune_refcoco_base", *base, "task.folder=refs"),
        *(f"init_from={root}/runs/x/step-0000020", "steps=4"),
    ]
    assert not (tmp_path / "work").exists()  # nothing to copy: a checkpoint has its vocabulary

    fresh = told(root, tmp_path / "work", FinetuneSettings(**settings, checkpoint="none"))
    file = tmp_path / "work" / "vocabularies" / "x.txt"
    alone = ["task.folder=refs", "random_init=True", f"vocabulary={file}", "steps=4"]
    assert fresh == ["finetune_refcoco_base", *base, *alone]
    assert file.read_bytes() == b"[PAD]\nstep-0000020\n"

    alone = told(root, tmp_path / "work", FinetuneSettings(checkpoint="none", recipe="finetune_refcoco_demo"))
    assert alone == [
        *("finetune_refcoco_demo", f"data.root={root}", "run=finetune_refcoco_demo"),
        *("data.dataset=refcoco+", "data.held_out=refcoco+", "random_init=True"),
    ]


@pytest.mark.usefixtures("no_torchrun")
def test_a_split_is_evaluated_by_the_last_checkpoint_on_the_data_of_the_training(root: str):
    """Also one that is there already: only the program knows whether by the same settings."""
    trained = Trained("tuned", "finetune_vqa_base", "abc", "s", f"{root}/runs/tuned/step-0000100", {}, 1.0, 7)
    fields, processes = {"data.dataset": "vqa", "data.detector": None, "task.folder": "vqa"}, Processes()
    open_store(root).put("runs/tuned/evaluations/test2015-step-0000100/metrics.json", b"{}")
    for split in ("val2014", "test2015"):
        given = ("finetune_vqa_base", trained, [split], fields, ("model.layers=JJ",), processes, lambda line: None)
        with pytest.raises(ChildFailed) as failed:
            evaluate(root, *given)
        command = failed.value.command
        assert command[command.index("vlbert.evaluate") + 1 :] == [
            *("finetune_vqa_base", f"{root}/runs/tuned/step-0000100", split),
            *(f"data.root={root}", "data.dataset=vqa", "task.folder=vqa", "model.layers=JJ"),
        ]


def test_what_a_split_came_to_is_read_from_where_the_program_wrote_it(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "training").mkdir()
    for name in ("__init__.py", "launch.py"):
        (tmp_path / "training" / name).touch()
    monkeypatch.chdir(tmp_path)
    trained = Trained("tuned", "finetune_vqa_base", "abc", "s", f"{root}/runs/tuned/step-0000100", {}, 1.0, 7)
    about = {"metrics": {"accuracy": None}, "paper": {"accuracy": "71.16"}, "submission": ["results.json"]}
    place = "runs/tuned/evaluations/test2015-step-0000100"
    open_store(root).put(f"{place}/metrics.json", json.dumps(about).encode())
    given = ("finetune_vqa_base", trained, ["test2015"], {}, (), Processes(), lambda line: None)
    (found,) = evaluate(root, *given).evaluated
    told = ({"accuracy": None}, {"accuracy": "71.16"}, ("results.json",))
    assert found == Evaluated("test2015", f"{root}/{place}", *told)


def test_the_vocabulary_of_a_run_in_a_bucket_becomes_a_file(tmp_path: Path):
    with s3_server("bucket"):
        store = open_store("s3://bucket/root")
        put_checkpoint(store, "runs/x/step-0000010", {}, {"vocab.txt": b"old\n"})
        put_checkpoint(store, "runs/x/step-0000020", {}, {"vocab.txt": b"[PAD]\nred\n"})
        file = copy_vocabulary(store.where("runs/x/step-0000020"), tmp_path / "work")
    assert file.read_bytes() == b"[PAD]\nred\n"
    assert file.is_relative_to(tmp_path / "work")


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "checkpoint", ["", "newest", "step-", "step-12x", "x/step-0000010", "/runs/x/step-1", "root/runs/x", "None"]
)
def test_a_checkpoint_that_cannot_be_one_is_refused_at_once(checkpoint: str):
    with pytest.raises(ValueError, match="checkpoint is .*; say latest, a step such as step-0000400, ROOT/runs/RUN/"):
        FinetuneSettings(checkpoint=checkpoint)


def test_a_task_has_a_recipe_of_its_own_and_takes_no_other_tasks():
    assert FinetuneSettings().recipe_name == "finetune_refcoco_base"
    assert FinetuneSettings(recipe="finetune_refcoco_demo").recipe_name == "finetune_refcoco_demo"
    for recipe in ("pretrain_vlbert_base", "finetune_vqa_base", "finetune_refcoco"):
        with pytest.raises(ValueError, match=f"recipe {recipe} is none of task refcoco; choose a recipe finetune_ref"):
            FinetuneSettings(recipe=recipe)


def test_a_stage_alone_without_a_checkpoint_names_the_recipes_that_there_are(tmp_path: Path):
    settings = FinetuneSettings(recipe="finetune_refcoco_demi", checkpoint="none")
    with pytest.raises(ValueError, match="recipe is 'finetune_refcoco_demi'; it must be one of finetune_refcoco_base"):
        finetune(str(tmp_path), str(tmp_path), settings)


def test_a_dataset_that_is_not_named_is_that_of_the_recipe():
    ours = [name for name in RECIPES if name.startswith("finetune_") and not name.endswith("_demo")]
    for name in ours:  # the demo's tasks share one dataset, and name it
        data = RECIPES[name]().data
        settings = FinetuneSettings(task=name.split("_")[1], recipe=name)
        assert settings.dataset_name == data.dataset == data.held_out, name
    assert FinetuneSettings(task="vqa", dataset="elsewhere").dataset_name == "elsewhere"
