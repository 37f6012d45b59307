"""VL-BERT as a library: damaged models are refused by name, and the guide runs as it is written."""

import json
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from guides import blocks
from places import DATA, PROJECT
from quickstart import NOTEBOOK, as_text, executed, make_files
from released import MULTI_TASK, WORDS, needs_key_lists, save_released, small_state, vilbert_state

from training.program import make_recipe
from vlbert.commands import main as run_command
from vlbert.hf import VLBertModel
from vlbert.recipes import RECIPES


def test_importing_vlbert_takes_no_torch_and_its_names_do():
    code = "import sys, vlbert; assert 'torch' not in sys.modules; assert 'VLBert' in vlbert.__all__"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0
    import vlbert

    for name in vlbert.__all__:
        assert getattr(vlbert, name).__name__ == name
    with pytest.raises(AttributeError, match="vlbert has no attribute VLBart; it has Batch, "):
        vlbert.VLBart  # noqa: B018


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", None, "holds no model: it has no config.json"),
        ("model.safetensors", None, "holds no model: it has no model.safetensors"),
        ("config.json", b'{"version": 9}', "config.json has version 9, but this code reads 8: use the code that"),
        ("config.json", b'{"version": 8}', "config.json is damaged: model is None"),
        ("config.json", b'{"model_type": "bert", "layers": 3}', "config.json is not the configuration of a model"),
        ("config.json", {"memory": 3}, "config.json: ModelConfig has no field memory; .*another version"),
        ("config.json", {"hidden_size": "32"}, "config.json: ModelConfig.hidden_size is "),
        ("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n", "vocab.txt has 5 tokens, but the model has 7"),
        ("vocab.txt", b"\xff\xfe", "vocab.txt is not UTF-8"),
    ],
)
def test_a_folder_without_a_whole_model_is_refused(tmp_path, name, content, named):
    shutil.copytree(DATA / "golden/checkpoint/runs/golden/step-0000003", tmp_path, dirs_exist_ok=True)
    (tmp_path / "state.json").unlink()
    if content is None:
        (tmp_path / name).unlink()
    elif isinstance(content, dict):  # fields of the model
        config = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(config | {"model": config["model"] | content}))
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=named) as error:
        VLBertModel.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


@needs_key_lists
def test_the_commands_of_the_guide_run(tmp_path, monkeypatch):
    torch.save(vilbert_state(pairs=2), tmp_path / "pytorch_model_9.bin")
    torch.save(vilbert_state(MULTI_TASK, pairs=2), tmp_path / "multi_task_model.bin")
    save_released(tmp_path / "vl-bert-base-e2e.model", small_state("pretrain_base_e2e", torch.float16))
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    monkeypatch.chdir(tmp_path)
    ran = []
    for block in blocks("library.md", "bash"):
        for line in block.replace("\\\n", "").splitlines():
            program, command, *arguments = shlex.split(line, comments=True)
            ran.append(command)
            if program == "vlbert" and command != "train":
                run_command([command, *arguments])
            else:
                make_recipe(arguments[0], arguments[1:], RECIPES)
    assert ran.count("convert") == 4
    assert ran.count("train") >= 1
    assert (tmp_path / "back.bin").is_file()


def test_the_notebook_is_the_guide_with_what_it_prints(tmp_path):
    make_files(tmp_path)
    notebook = executed(tmp_path)
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code == [one.strip("\n") for one in blocks("library.md", "python")]
    assert NOTEBOOK.read_text() == as_text(notebook), "docs/library.md changed: PYTHONPATH=. python tests/quickstart.py"
    assert "torch.Size([2, 7, 32])" in NOTEBOOK.read_text()
    assert (tmp_path / "on-the-hub/model.safetensors").is_file()
