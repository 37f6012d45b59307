"""Where a fine-tuning starts, how torchrun may end, and the evaluation."""

import json
from pathlib import Path

import pytest
from seeded import put_checkpoint

from flows.finetune import find_checkpoint, finetune
from flows.settings import FinetuneSettings, Processes
from flows.supervisor import ChildFailed, ChildTimedOut
from flows.torchrun import Evaluated, Trained, TrainingStopped, evaluate, torchrun
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
        ("latest", "", ValueError("checkpoint is latest, but pretraining .*{root}/runs")),
        ("step-0000030", "x", ValueError("{root}/runs/x .*step-0000030.* step-0000010, step-0000020")),
        ("latest", "y", ValueError("{root}/runs/y .*none")),
        ("none", "y", ValueError("{root}/runs/y ")),
    ],
)
def test_a_checkpoint_is_found_by_its_name(root: str, checkpoint: str, pretraining: str, found: str | None | Exception):
    settings = FinetuneSettings(checkpoint=checkpoint, pretraining=pretraining)
    if isinstance(found, ValueError):
        with pytest.raises(ValueError, match=str(found).format(root=root)):
            find_checkpoint(root, settings)
    else:
        assert find_checkpoint(root, settings) == (found and found.format(root=root))


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that stands for `training.launch`, which starts torchrun; by itself it fails."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").touch()
    (tmp_path / "training" / "launch.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "training" / "launch.py"


@pytest.mark.parametrize(
    ("line", "status", "raised", "words"),
    [
        ("vlbert train r: stopped: after step 5 of 9", 75, TrainingStopped, "by SIGTERM .*after step 5 of 9"),
        ("vlbert train r: out of memory", 1, ChildFailed, r"  \| vlbert train r: out of memory"),
    ],
)
def test_a_flow_knows_a_stopped_training_from_a_failed_one(
    launcher: Path, line: str, status: int, raised: type, words: str
):
    launcher.write_text(f"print({line!r})\nraise SystemExit({status})")
    with pytest.raises(raised, match=words):
        torchrun("a.program", [], Processes(), lambda line: None)


# Asked to end, it takes half a second.
SLOW_TO_END = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: time.sleep(0.5) or sys.exit("saved"))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("grace", "printed"), [(0.1, ["ready"]), (20, ["ready", "saved"])])
def test_torchrun_gets_its_restarts_and_its_grace_to_save(launcher: Path, grace: float, printed: list[str]):
    launcher.write_text(SLOW_TO_END)
    with pytest.raises(ChildTimedOut) as failed:
        torchrun("no.program", [], Processes(restarts=3, grace=grace, timeout=1.5), lambda line: None)
    assert failed.value.tail == printed
    assert "--max-restarts=3" in failed.value.command
    assert Processes(grace=119.5).environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120"


@pytest.mark.usefixtures("launcher")
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


def test_a_split_is_evaluated_by_the_last_checkpoint_and_its_metrics_are_read_from_its_folder(
    root: str, launcher: Path
):
    """Also one that is there already: only the program knows whether by the same settings."""
    trained = Trained("tuned", "finetune_vqa_base", "abc", "s", f"{root}/runs/tuned/step-0000100", {}, 1.0, 7)
    fields, folder = {"data.datasets": {"vqa": None}}, "runs/tuned/evaluations/test2015-step-0000100"
    about = {"metrics": {"accuracy": None}, "submission": ["results.json"]}
    open_store(root).put(f"{folder}/metrics.json", json.dumps(about).encode())
    settings = FinetuneSettings("vqa", evaluate=("test2015",), overrides=("--model.layers=JJ",))
    with pytest.raises(ChildFailed) as failed:
        evaluate(root, settings, trained, fields, lambda line: None)
    command = failed.value.command
    assert command[command.index("vlbert.evaluation.evaluate") + 1 :] == [
        *("finetune_vqa", f"{root}/runs/tuned/step-0000100", "test2015"),
        *(f"--data.root={root}", "--data.datasets", "vqa", "--model.layers=JJ"),
    ]

    launcher.write_text("")
    (found,) = evaluate(root, settings, trained, fields, lambda line: None).evaluated
    expected = ({"accuracy": None}, ("results.json",))
    assert found == Evaluated("test2015", f"{root}/{folder}", *expected)
