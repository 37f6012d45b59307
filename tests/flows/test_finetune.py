"""Where a fine-tuning starts, and its evaluation."""

import json
from pathlib import Path

import pytest
from seeded import put_checkpoint

from flows.finetune import find_checkpoint, finetune
from flows.settings import FinetuneSettings
from flows.supervisor import ChildFailed
from flows.torchrun import Evaluated, Trained, evaluate
from storage.object_store import open_store


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Pre-training x with two whole checkpoints and the first files of a third."""
    store = open_store(str(tmp_path / "root"))
    for step in ("step-0000010", "step-0000020"):
        put_checkpoint(store, f"runs/x/{step}", {}, {"vocab.txt": f"[PAD]\n{step}\n".encode()})
    store.put("runs/x/step-0000030/vocab.txt", b"[PAD]\n")
    return str(tmp_path / "root")


@pytest.mark.parametrize(
    ("checkpoint", "pretraining", "found"),
    [
        ("latest", "x", "{root}/runs/x/step-0000020"),
        ("step-0000010", "x", "{root}/runs/x/step-0000010"),
        ("none", "x", "{root}/runs/x/step-0000020"),  # for its vocabulary
        ("none", "", None),
        # Of another root, which need not be in reach here.
        ("s3://bucket/vl-root/runs/y/step-0000001", "x", "s3://bucket/vl-root/runs/y/step-0000001"),
    ],
)
def test_a_checkpoint_is_found_by_its_name(root: str, checkpoint: str, pretraining: str, found: str | None):
    settings = FinetuneSettings(checkpoint=checkpoint, pretraining=pretraining)
    assert find_checkpoint(root, settings) == (found and found.format(root=root))


@pytest.mark.parametrize(
    ("checkpoint", "pretraining", "named"),
    [
        ("latest", "", ["checkpoint is latest", "pretraining", "{root}/runs"]),
        ("step-0000030", "x", ["{root}/runs/x", "step-0000030", "step-0000010, step-0000020"]),
        ("latest", "y", ["{root}/runs/y", "none"]),
        ("none", "y", ["{root}/runs/y"]),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused(root: str, checkpoint: str, pretraining: str, named: list[str]):
    with pytest.raises(ValueError) as refused:
        find_checkpoint(root, FinetuneSettings(checkpoint=checkpoint, pretraining=pretraining))
    assert [word for word in named if word.format(root=root) not in str(refused.value)] == []


@pytest.fixture
def no_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, `training.launch` ends at once: with 1 or, where there is a file `well`, with 0."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").touch()
    (tmp_path / "training" / "launch.py").write_text("import os; raise SystemExit(not os.path.exists('well'))")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_torchrun")
def test_a_fine_tuning_starts_from_the_checkpoint_or_else_takes_its_vocabulary_alone(root: str, tmp_path: Path):
    def arguments_of(settings: FinetuneSettings) -> list[str]:
        with pytest.raises(ChildFailed) as failed:
            finetune(root, str(tmp_path / "work"), settings, lambda line: None)
        return failed.value.command[failed.value.command.index("vlbert.train") + 1 :]

    settings = {"pretraining": "x", "detector": "abc", "folder": "refs", "run": "r", "overrides": ("--steps=4",)}
    base = [f"--data.root={root}", "--run_name=r", "--data.datasets", "refcoco+", "--data.held_out", "refcoco+"]
    base += ["--data.detector=abc", "--task.folder=refs"]
    starts = arguments_of(FinetuneSettings(**settings))
    assert starts == ["finetune_refcoco", *base, f"--init_from={root}/runs/x/step-0000020", "--steps=4"]
    assert not (tmp_path / "work").exists()  # nothing to copy: a checkpoint has its vocabulary

    fresh = arguments_of(FinetuneSettings(**settings, checkpoint="none"))
    file = tmp_path / "work" / "vocabularies" / "x.txt"
    assert fresh == ["finetune_refcoco", *base, "--random_init", f"--vocabulary={file}", "--steps=4"]
    assert file.read_bytes() == b"[PAD]\nstep-0000020\n"


@pytest.mark.usefixtures("no_torchrun")
def test_a_split_is_evaluated_by_the_last_checkpoint_and_its_metrics_are_read_from_its_folder(root: str):
    """Also one that is there already: only the program knows whether by the same settings."""
    trained = Trained("tuned", "finetune_vqa_base", "abc", "s", f"{root}/runs/tuned/step-0000100", {}, 1.0, 7)
    fields, folder = {"data.datasets": {"vqa": None}}, "runs/tuned/evaluations/test2015-step-0000100"
    about = {"metrics": {"accuracy": None}, "paper": {"accuracy": "71.16"}, "submission": ["results.json"]}
    open_store(root).put(f"{folder}/metrics.json", json.dumps(about).encode())
    settings = FinetuneSettings("vqa", evaluate=("test2015",), overrides=("--model.layers=JJ",))
    with pytest.raises(ChildFailed) as failed:
        evaluate(root, settings, trained, fields, lambda line: None)
    command = failed.value.command
    assert command[command.index("vlbert.evaluation.evaluate") + 1 :] == [
        *("finetune_vqa", f"{root}/runs/tuned/step-0000100", "test2015"),
        *(f"--data.root={root}", "--data.datasets", "vqa", "--model.layers=JJ"),
    ]

    Path("well").touch()
    (found,) = evaluate(root, settings, trained, fields, lambda line: None).evaluated
    expected = ({"accuracy": None}, {"accuracy": "71.16"}, ("results.json",))
    assert found == Evaluated("test2015", f"{root}/{folder}", *expected)
