"""The checkpoint as a format: a golden one must stay readable and be written again byte for byte.

It is made by `PYTHONPATH=.:tests python tests/vlbert/test_checkpoint.py`,
only when a format gets a new version; docs/formats.md describes them.
"""

import json
import re
import shutil

import pytest
import torch
from places import DATA
from safetensors.torch import load

from detectors.resnet import ResNetConfig
from storage.inventory import Inventory
from storage.object_store import open_store
from storage.runs import CHECKPOINT_VERSION, json_with_digest, open_folder, read_state
from storage.verify import verify
from training.checkpoint import Writer, load_optimizer
from training.optimizer import make_optimizer
from vlbert.checkpoint import load_model, read_checkpoint, read_model, save_checkpoint
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

GOLDEN = DATA / "golden" / "checkpoint"
FOLDER = "runs/golden/step-0000003"
WORDS = Vocabulary([*SPECIALS, "red", "##dish"])
RECIPE = Recipe(
    name="golden",
    task=PretrainingSettings(),
    model=ModelConfig(
        layers="J",
        hidden_size=8,
        num_heads=2,
        intermediate_size=8,
        max_positions=8,
        geometry_channels=8,
        regions=RegionConfig(resnet=ResNetConfig(blocks=(1, 1, 1, 1), width=1), random_init=True, frozen_stages=0),
    ),
    data=DataConfig(root="somewhere"),
)
STATE = {
    "validation": {"words_accuracy": 0.5},
    "seed": 5,
    "samples_consumed": 384,
    "text_consumed": 0,
    "data": [
        {
            "dataset": "captions",
            "stage": "regions/00000000beef",
            "random_init": False,
            "weight": 128.0,
            "snapshots": [{"epoch": 0, "consumed": 0, "examples": 128, "snapshot": "0123456789abcdef"}],
        }
    ],
    "held_out": [],
    "text": None,
}


def model_and_optimizer() -> tuple[TaskModel, torch.optim.Optimizer]:
    """Every number a multiple of 1/64 that its place decides, so that no random generator matters."""
    model = TaskModel(VLBert(RECIPE.model, len(WORDS)), Pretraining(RECIPE.task, WORDS, 3))
    optimizer = make_optimizer(model, RECIPE.optimizer)

    def count(like: torch.Tensor, start: int) -> torch.Tensor:
        return ((torch.arange(like.numel()) + start) % 127 / 64).reshape(like.shape).to(like.dtype)

    with torch.no_grad():
        for i, tensor in enumerate(model.state_dict().values()):
            tensor.copy_(count(tensor, i))
        for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            optimizer.state[parameter] = {"step": torch.tensor(3.0)}
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][name] = torch.empty_like(parameter).copy_(count(parameter, i))
    return model, optimizer


def test_a_golden_checkpoint_is_read_to_the_exact_values():
    saved = read_checkpoint(open_store(str(GOLDEN)), FOLDER)
    assert saved.model_config == RECIPE.model
    assert saved.vocabulary.tokens == WORDS.tokens
    assert saved.num_classes == 3
    hashes = saved.state["files"]
    about = {"version": CHECKPOINT_VERSION, "step": 3, "files": hashes, "metric": "words_accuracy"}
    assert saved.state == about | STATE
    assert sorted(hashes) == ["config.json", "model.safetensors", "optimizer.safetensors", "vocab.txt"]
    expected, optimizer = model_and_optimizer()
    model = TaskModel(VLBert(saved.model_config, len(saved.vocabulary)), Pretraining(RECIPE.task, WORDS, 3))
    load_model(model, saved.model, saved.uri)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    fresh = make_optimizer(model, RECIPE.optimizer)
    load_optimizer(saved.folder, model, fresh)
    for ours, theirs in zip(expected.parameters(), model.parameters(), strict=True):
        for quantity, value in optimizer.state[ours].items():
            found = fresh.state[theirs][quantity]
            assert (torch.equal(found, value), found.stride()) == (True, value.stride())


def test_todays_code_writes_the_golden_bytes(tmp_path):
    model, optimizer = model_and_optimizer()
    with Writer(open_store(str(tmp_path))) as writer:
        folder = save_checkpoint(writer, 3, RECIPE, model, optimizer, STATE)
    assert folder == FOLDER
    configs, states = [], []
    for root in (tmp_path, GOLDEN):
        configs.append(json.loads((root / folder / "config.json").read_text()) | {"recipe": None})
        states.append(read_state(open_store(str(root)), folder))
        del states[-1]["files"]["config.json"]  # of the recipe, too
    assert configs[0] == configs[1]
    assert states[0] == states[1], "with the hashes of all other files"


@pytest.mark.parametrize("version", [1, CHECKPOINT_VERSION + 1])
def test_a_checkpoint_of_another_version_is_refused_and_never_offered_for_removal(tmp_path, version):
    store, named = open_store(str(tmp_path)), []
    for step in (100, 200):
        name = f"runs/run/step-{step:07d}/state.json"
        store.put(name, json_with_digest({"version": version, "step": step, "files": {}}))
        named.append(f"{store.uri(name)} has version {version}, but this code reads {CHECKPOINT_VERSION}: use")
    for read in (read_checkpoint, open_folder, read_state):
        with pytest.raises(ValueError, match=re.escape(named[1])):
            read(store, "runs/run/step-0000200")
    for line, start in zip(verify(Inventory(store)), named, strict=True):
        assert line.startswith(start)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    model, _ = model_and_optimizer()
    tensors = load((GOLDEN / FOLDER / "model.safetensors").read_bytes())
    wide = tensors | {"head.word_bias": torch.zeros(9), "head.more": torch.zeros(1)}
    del wide["vlbert.embedding.norm.bias"]
    wrong = "missing vlbert.embedding.norm.bias", "unexpected head.more", r"head.word_bias .*\[9\], but .* has \[7\]"
    with pytest.raises(ValueError, match="(?s)file does not fit the model.*" + ".*".join(wrong)):
        load_model(model, wide, "file")


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("config.json", lambda data: data.replace(b"{\n", b'{"files": 3,', 1), "damaged: files is 3"),
        ("model.safetensors", lambda data: data[:-1], "truncated"),
        ("model.safetensors", lambda data: b"", "truncated"),
        ("model.safetensors", lambda data: b"\xff" * 8 + data[8:], "truncated"),
    ],
)
def test_a_folder_that_holds_no_whole_model_says_what_is_wrong(tmp_path, file, change, says):
    folder = shutil.copytree(GOLDEN / FOLDER, tmp_path / "model")
    (folder / "state.json").unlink()
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(ValueError, match=f"{folder}/{file} is {says}"):
        read_model(folder)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    golden_model, golden_optimizer = model_and_optimizer()
    with Writer(open_store(str(GOLDEN))) as writer:
        save_checkpoint(writer, 3, RECIPE, golden_model, golden_optimizer, STATE)
