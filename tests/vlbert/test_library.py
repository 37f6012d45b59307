"""VL-BERT as a library: models are saved, loaded from a folder or the hub, and refused by name."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hub import Hub, serve_hub
from PIL import Image
from places import PROJECT
from quickstart import NOTEBOOK, as_text, executed, make_files
from released import MULTI_TASK, WORDS, needs_key_lists, save_released, small_state, vilbert_state
from tiny import TINY_MODEL

from training.program import make_recipe
from vlbert import Batch, Example, ImageInput, TextInput, VLBert, collate
from vlbert.commands import main as run_command
from vlbert.recipes import RECIPES

GUIDE = PROJECT / "docs" / "library.md"


def small_batch() -> Batch:
    """A caption with an image of three regions, and a text alone."""
    rng = np.random.default_rng(0)
    tokens = np.array([2, 7, 8, 9, 3])
    zeros = np.zeros_like(tokens)
    boxes = np.array([[0, 0, 95, 63], [5, 5, 40, 50], [30, 10, 90, 60]], np.float32)
    pixels = torch.from_numpy(rng.integers(0, 256, (3, 64, 96), dtype=np.uint8))
    image = ImageInput(boxes, np.array([False, False, True]), (96, 64), pixels)
    return collate(
        [Example("a", TextInput(tokens, zeros, zeros), image), Example("b", TextInput(tokens[:3], *[zeros[:3]] * 2))]
    )


@pytest.fixture(scope="module")
def model() -> VLBert:
    torch.manual_seed(0)
    return VLBert(TINY_MODEL, len(WORDS), WORDS).eval()


@pytest.fixture(scope="module")
def folder(model: VLBert, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


def equal(one: VLBert, other: VLBert) -> bool:
    batch = small_batch()
    with torch.no_grad():
        first, second = one(batch, attentions=True), other(batch, attentions=True)
    parts = [(getattr(first, name), getattr(second, name)) for name in ("text", "regions", "appearance")]
    return all(
        torch.equal(a, b)
        for a, b in [*parts, *zip(*([one.weights for one in e.attentions] for e in (first, second)), strict=True)]
    )


def test_importing_vlbert_takes_no_torch_and_its_names_do():
    code = "import sys, vlbert; assert 'torch' not in sys.modules; assert 'VLBert' in vlbert.__all__"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0
    import vlbert

    for name in vlbert.__all__:
        assert getattr(vlbert, name).__name__ == name
    with pytest.raises(AttributeError, match="vlbert has no VLBart; it has Batch, "):
        vlbert.VLBart  # noqa: B018


def test_a_saved_model_loads_again_and_computes_the_same(model, folder):
    assert {"config.json", "model.safetensors", "vocab.txt"} <= {file.name for file in folder.iterdir()}
    loaded = VLBert.from_pretrained(folder)
    assert not loaded.training
    assert loaded.config == TINY_MODEL
    assert loaded.vocabulary.tokens == WORDS.tokens
    assert equal(loaded, model)
    torch.manual_seed(1)
    assert not equal(VLBert(TINY_MODEL, len(WORDS)).eval(), model)


def test_a_model_saved_over_another_leaves_nothing_of_it(model, tmp_path):
    model.save_pretrained(tmp_path)
    other = VLBert(dataclasses.replace(TINY_MODEL, layers="J"), 7)
    other.save_pretrained(tmp_path)
    loaded = VLBert.from_pretrained(str(tmp_path))
    assert loaded.config.layers == "J"
    assert loaded.vocabulary is None
    assert not (tmp_path / "vocab.txt").exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a local server gives out as the hub does."""
    with serve_hub(tmp_path / "hub", monkeypatch) as root:
        yield root


def test_a_model_of_the_hub_is_fetched_once(model, hub, tmp_path):
    name, cache = "someone/vl-bert-tiny", tmp_path / "cache"
    model.save_pretrained(hub / name)
    loaded = VLBert.from_pretrained(name, cache_dir=cache)
    assert equal(loaded, model)
    assert loaded.vocabulary.tokens == WORDS.tokens
    files = sorted(one for one in Hub.requested if "/resolve/" in one)
    assert files == [  # whatever is pushed meanwhile, all files are of one commit
        f"/{name}/resolve/{Hub.commit}/{file}" for file in ("config.json", "model.safetensors", "vocab.txt")
    ]
    Hub.requested.clear()
    assert equal(VLBert.from_pretrained(name, cache_dir=cache, local_files_only=True), model)
    assert not Hub.requested


def test_a_name_that_is_no_model_is_refused(hub, tmp_path):
    (hub / "someone" / "other").mkdir(parents=True)
    for name in ("someone/none", "someone/other", "no name"):
        with pytest.raises(ValueError, match=f"{name} is neither a folder nor a model on the hub"):
            VLBert.from_pretrained(name, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="someone/vl-bert is neither a folder nor a model on the hub"):
        VLBert.from_pretrained("someone/vl-bert", cache_dir=tmp_path / "cache", local_files_only=True)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", None, "holds no model: it has no config.json"),
        ("model.safetensors", None, "holds no model: it has no model.safetensors"),
        ("config.json", b'{"version": 8}', "config.json is of version 8, this code reads 7: use the code that"),
        ("config.json", b'{"version": 7}', "config.json lacks model, vocab_size or `files`"),
        ("config.json", b'{"model_type": "bert", "layers": 3}', "config.json is not the configuration of a VL-BERT"),
        ("config.json", {"memory": 3}, "config.json: ModelConfig has no field memory; .* another version"),
        ("config.json", {"hidden_size": "32"}, "config.json: ModelConfig.hidden_size is "),
        ("model.safetensors", 0.5, "model.safetensors is damaged: its sha256 is"),
        ("vocab.txt", WORDS.text().removesuffix("word190\n").encode(), "vocab.txt has 199 tokens, the model 200"),
        ("vocab.txt", b"\xff\xfe", "vocab.txt is not UTF-8"),
    ],
)
def test_a_folder_without_a_whole_model_is_refused(folder, tmp_path, name, content, named):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if content is None:
        (tmp_path / name).unlink()
    elif isinstance(content, dict):  # fields of the model
        config = json.loads((folder / name).read_text())
        (tmp_path / name).write_text(json.dumps(config | {"model": config["model"] | content}))
    elif isinstance(content, float):
        whole = (folder / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: int(content * len(whole))])
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=named) as error:
        VLBert.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


@needs_key_lists
def test_the_guide_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    """Its blocks, one after the other, beside small files of theirs, a vocabulary and an image."""
    torch.save(vilbert_state(pairs=2), tmp_path / "pytorch_model_9.bin")
    torch.save(vilbert_state(MULTI_TASK, pairs=2), tmp_path / "multi_task_model.bin")
    save_released(tmp_path / "vl-bert-base-e2e.model", small_state("pretrain_base_e2e", torch.float16))
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    Image.effect_noise((200, 150), 60).convert("RGB").save(tmp_path / "dog.jpg")
    monkeypatch.chdir(tmp_path)
    names, ran = {}, []
    for language, block in re.findall(r"```(\w+)\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        if language == "python":
            exec(compile(block, f"{GUIDE.name}: {block[:40]}", "exec"), names)
            ran.append("python")
        for line in block.replace("\\\n", "").splitlines() if language == "bash" else ():
            program, command, *arguments = shlex.split(line, comments=True)
            ran.append(command)
            if program == "vlbert" and command != "train":
                run_command([command, *arguments])
            else:
                make_recipe(arguments[0], arguments[1:], RECIPES)
    assert ran.count("convert") == 4
    assert ran.count("train") >= 1
    assert ran.count("python") >= 3
    assert names["encoded"].text.shape[2] == 64
    assert (tmp_path / "back.bin").is_file()
    capsys.readouterr()


def test_the_notebook_is_the_guide_with_what_it_prints(tmp_path):
    make_files(tmp_path)
    notebook = executed(tmp_path)
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code == [one.strip("\n") for one in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)]
    assert NOTEBOOK.read_text() == as_text(notebook), "docs/library.md changed: PYTHONPATH=. python tests/quickstart.py"
    assert "torch.Size([2, 7, 32])" in NOTEBOOK.read_text()
    assert (tmp_path / "mine/model.safetensors").is_file()
