"""The authors' checkpoints: every key of the six kinds becomes ours and comes back to the bit; all else is refused."""

import dataclasses
import json
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from released import KINDS, WORDS, base_shapes, needs_key_lists, resized_shapes, save_released, small_state
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertModel

from storage.object_store import open_store
from storage.settings import differing_fields
from training.optimizer import make_optimizer
from training.writer import Writer
from vlbert.checkpoint import read_model, save_checkpoint
from vlbert.config import Recipe, architecture
from vlbert.convert import REPORT, Refused, read_file, to_ours, to_theirs
from vlbert.initial_weights import make_model
from vlbert.model.vlbert import VLBert
from vlbert.published import plain_name, skeleton, standard, understand
from vlbert.recipes import RECIPES
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

pytestmark = needs_key_lists

# How the file of each kind is made here: precision, prefix of its keys, whether it is a zip file.
MADE = {
    "pretrain_base_e2e": (torch.float16, "module.", True),
    "pretrain_base_prec": (torch.float32, "", False),
    "pretrain_base_prec_withouttextonly": (torch.float32, "module.", True),
    "vcr_base_q2a": (torch.float16, "module.", False),
    "vqa_base": (torch.float16, "", True),
    "refcoco_base": (torch.float32, "module.", True),
}
TASKS = {
    "pretrain_base_e2e": "PretrainingSettings",
    "pretrain_base_prec": "PretrainingSettings",
    "pretrain_base_prec_withouttextonly": "PretrainingSettings",
    "vcr_base_q2a": "VCRSettings",
    "vqa_base": "VQASettings",
    "refcoco_base": "RefCOCOSettings",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Tensor], Path, list[dict]]]:
    """Kind -> (the state dict of a file, the folder that it became, the report)."""
    known = {}

    def convert(kind: str) -> tuple[dict[str, Tensor], Path, list[dict]]:
        if kind not in known:
            dtype, prefix, zipped = MADE[kind]
            state = small_state(kind, dtype, prefix)
            folder = tmp_path_factory.mktemp(kind)
            (folder / "vocab.txt").write_text(WORDS.text())
            file = save_released(folder / "released.model", state, zipped)
            known[kind] = state, folder / "ours", to_ours(file, folder / "ours", folder / "vocab.txt")
        return known[kind]

    return convert


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_becomes_a_model_and_the_report_names_every_key_once(converted, kind):
    state, folder, report = converted(kind)
    assert [entry["theirs"] for entry in report if "theirs" in entry] == list(state)
    assert json.loads((folder / REPORT).read_text()) == report
    saved = read_model(folder)
    assert sorted(entry["ours"] for entry in report if "ours" in entry) == sorted(saved.model)
    assert {tensor.dtype for tensor in saved.model.values()} == {torch.float32}
    for entry in report:
        if "theirs" not in entry:
            assert entry["zeros"]
            assert not saved.model[entry["ours"]].any()
        elif "ours" in entry:
            assert torch.equal(saved.model[entry["ours"]], state[entry["theirs"]].float())
        elif "repeats" in entry:
            prefix = "module." if entry["theirs"].startswith("module.") else ""
            assert torch.equal(state[f"{prefix}{entry['repeats']}"], state[entry["theirs"]])
        else:
            assert entry["counts"] == int(state[entry["theirs"]])
    assert saved.config["task"] == TASKS[kind]
    assert saved.vocabulary.tokens == WORDS.tokens
    assert saved.model_config.num_heads == 1  # of 64 channels
    model = VLBert.from_pretrained(folder)
    task = make_task(understand(shapes_of(state)).task, WORDS, 1600)
    TaskModel(model, task).load_state_dict(saved.model)  # the task's own head takes the rest


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_every_key_dtype_and_bit_is_the_same(converted, tmp_path, kind):
    state, folder, _ = converted(kind)
    to_theirs(folder, tmp_path / "back.model")
    back = torch.load(tmp_path / "back.model", weights_only=True)["state_dict"]
    assert list(back) == list(state)
    for key, tensor in state.items():
        assert back[key].dtype == tensor.dtype, key
        assert torch.equal(back[key], tensor), key
    if kind == "pretrain_base_e2e":  # tensors that repeat others are stored once, as in their files
        words, repeated = (
            back[f"module.vlbert.{n}.weight"] for n in ("word_embeddings", "mlm_head.predictions.decoder")
        )
        assert words.data_ptr() == repeated.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_report_all_that_their_code_saves_comes_back(converted, tmp_path, kind):
    state, folder, _ = converted(kind)
    for file in folder.iterdir():
        if file.name != REPORT:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    to_theirs(tmp_path, tmp_path / "back.model")
    back = torch.load(tmp_path / "back.model", weights_only=True)["state_dict"]
    more = {"module.aux_text_visual_embedding.weight"} if kind.endswith("withouttextonly") else set()
    assert set(back) == {f"module.{name}" for name in base_shapes(kind)} | more
    prefix = MADE[kind][1]
    for name in base_shapes(kind):
        if not name.endswith("num_batches_tracked"):  # theirs counted, and ours have not
            assert torch.equal(back[f"module.{name}"], state[f"{prefix}{name}"].float()), name
    again = to_ours(tmp_path / "back.model", tmp_path / "again")
    assert not [entry for entry in again if "missing" in entry or "refused" in entry]


def full_shapes(kind: str, size: str) -> dict[str, tuple[int, ...]]:
    """The key list of BASE as it is; that of LARGE has twice the layers, and they are wider."""
    if size == "base":
        return base_shapes(kind)
    shapes = resized_shapes(kind, {768: 1024, 3072: 4096})
    for name, shape in list(shapes.items()):
        for number in range(12):
            shapes[name.replace(f"encoder.layer.{number}.", f"encoder.layer.{number + 12}.")] = shape
    return shapes


@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, "base") for kind in KINDS), ("pretrain_base_e2e", "large"), ("vqa_base", "large")]
)
def test_every_key_and_shape_of_the_full_size_is_known(kind, size):
    shapes = full_shapes(kind, size)
    what = understand({plain_name(name): shape for name, shape in shapes.items()})
    assert what.model.layers == "J" * (24 if size == "large" else 12)
    assert what.model.num_heads == (16 if size == "large" else 12)
    assert what.vocab_size == 30522
    ours = skeleton(what)
    known = {entry["theirs"]: entry for entry in standard(what, ours)}
    more = {"aux_text_visual_embedding.weight"} if kind.endswith("withouttextonly") else set()
    assert set(known) == set(shapes) | more
    for name, shape in shapes.items():
        if "ours" in known[name]:
            assert tuple(ours[known[name]["ours"]].shape) == shape, name


def shapes_of(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {plain_name(key): tuple(tensor.shape) for key, tensor in state.items()}


def refused(tmp_path: Path, state: dict[str, Tensor]) -> Refused:
    """What is said of a file with this state dict; nothing is left of the attempt."""
    file = save_released(tmp_path / "released.model", state)
    with pytest.raises(Refused) as error:
        to_ours(file, tmp_path / "ours")
    assert str(file) in str(error.value)
    assert not (tmp_path / "ours").exists()
    return error.value


def test_a_key_that_no_such_model_has_is_refused_by_name(tmp_path):
    for key in ("module.vlbert.adapter.weight", "module.bn9.num_batches_tracked", "module.final_mlp.3.weight"):
        error = refused(tmp_path, small_state("vqa_base") | {key: torch.zeros(())})
        assert f"{key}: no model of this kind has it" in str(error)
        assert [entry["theirs"] for entry in error.report if "refused" in entry] == [key]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("pretrain_base_prec", "vlbert.mlm_head.predictions.bias"),
        ("pretrain_base_prec", "vlbert.mlm_head.predictions.decoder.weight"),
        ("pretrain_base_prec", "object_mask_visual_embedding.weight"),
        ("pretrain_base_prec", "vlbert.visual_ln_text.weight"),
        ("vcr_base_q2a", "image_feature_extractor.backbone.conv1.weight"),
        ("vcr_base_q2a", "image_feature_extractor.head.0.1.bn2.num_batches_tracked"),
        ("vcr_base_q2a", "vlbert._module.pooler.dense.bias"),
        ("vcr_base_q2a", "cnn_loss_reg.2.weight"),
        ("vqa_base", "final_mlp.0.dense.weight"),
        ("vqa_base", "vlbert.encoder.layer.7.output.LayerNorm.bias"),
    ],
)
def test_a_key_that_is_missing_is_named(tmp_path, kind, name):
    state = small_state(kind)
    del state[f"module.{name}"]
    error = refused(tmp_path, state)
    assert f"{name}: it is missing" in str(error)
    assert [entry["theirs"] for entry in error.report if "missing" in entry] == [name]


def test_what_is_no_vl_bert_at_all_is_said_to_be_none(tmp_path):
    bert = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    torch.save(bert.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="has no vlbert.word_embeddings.weight, so it is no VL-BERT of the authors"):
        to_ours(tmp_path / "pytorch_model.bin", tmp_path / "ours")
    state = {key: t for key, t in small_state("vqa_base").items() if "final_mlp" not in key}
    with pytest.raises(ValueError, match="neither pre-training's heads .* nor a classifier"):
        to_ours(save_released(tmp_path / "headless.model", state), tmp_path / "ours")


def test_a_key_that_should_repeat_another_and_does_not_is_refused(tmp_path):
    state, key = small_state("pretrain_base_prec"), "module.vlbert.mlm_head.predictions.decoder.weight"
    state[key] = state[key].clone()
    state[key][5, 5] += 1e-3
    assert f"{key}: it should repeat vlbert.word_embeddings.weight, and does not" in str(refused(tmp_path, state))


def test_another_shape_dtype_or_no_number_is_refused(tmp_path):
    state = small_state("vqa_base")
    key = "module.vlbert.encoder.layer.3.attention.self.query.weight"
    assert f"{key}: it is [64, 65] and should be [64, 64]" in str(refused(tmp_path, state | {key: torch.zeros(64, 65)}))
    double = refused(tmp_path, state | {key: torch.zeros(64, 64, dtype=torch.float64)})
    assert f"{key}: it is float64 [64, 64]; float32, float16 and bfloat16 are understood" in str(double)
    assert "it holds NaN or infinity" in str(refused(tmp_path, state | {key: torch.full((64, 64), torch.nan)}))
    wide = "module.vlbert.word_embeddings.weight"
    with pytest.raises(ValueError, match=r"vlbert.word_embeddings.weight is \(3,\) and should be a matrix"):
        to_ours(save_released(tmp_path / "flat.model", state | {wide: torch.zeros(3)}), tmp_path / "ours")


def test_keys_with_and_without_module_do_not_mix(tmp_path):
    state = small_state("vqa_base", prefix="")
    mixed = {key if i % 2 else f"module.{key}": tensor for i, (key, tensor) in enumerate(state.items())}
    with pytest.raises(ValueError, match="keys with and without module., such as module.image_feature_extractor"):
        read_file(save_released(tmp_path / "mixed.model", mixed))
    file = save_released(tmp_path / "twice.model", state | {f"module.{key}": t for key, t in state.items()})
    with pytest.raises(ValueError, match="keys with and without module."):
        read_file(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html><title>Google Drive - Virus scan warning</title>", "is a web page"),
        (b"\xef\xbb\xbf \n<html>", "is a web page"),
        (b"", "is empty"),
        (b'{"error": "quota exceeded"}', "fetch it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "fetch it again"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_called_what_it_is(tmp_path, content, said):
    file = tmp_path / "vl-bert-base-e2e.model"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"vl-bert-base-e2e.model .*{said}"):
        read_file(file)
    with pytest.raises(ValueError, match="there is no file"):
        read_file(tmp_path / "other.model")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torn_file_is_an_error_wherever_it_ends(tmp_path, zipped):
    whole = save_released(tmp_path / "whole.model", small_state("vqa_base"), zipped).read_bytes()
    for part in range(1, 20):
        torn = tmp_path / "torn.model"
        torn.write_bytes(whole[: len(whole) * part // 20])
        with pytest.raises(ValueError, match=r"torn.model (is|holds) .*; fetch it again|holds no state dict"):
            read_file(torn)


class Hostile:
    """A pickle of it makes the file `mark`."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("zipped", [True, False, None])
def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path, zipped):
    file, mark = tmp_path / "hostile.model", tmp_path / "mark"
    content = {"state_dict": {"a": torch.zeros(1)}, "more": Hostile(mark)}
    if zipped is None:
        file.write_bytes(pickle.dumps(content["more"], protocol=2))
        pickle.loads(file.read_bytes())
    else:
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
        torch.load(file, weights_only=False)
    assert mark.exists()  # whoever trusts the file runs it
    mark.unlink()
    with pytest.raises(ValueError, match="hostile.model wants to load posix.system.* do not trust it"):
        read_file(file)
    assert not mark.exists()


def test_a_file_without_a_state_dict_is_refused(tmp_path):
    file = tmp_path / "other.model"
    for content in ({"state_dict": {}}, {"epoch": 3}, [torch.zeros(1)], {0: torch.zeros(1)}, torch.zeros(2)):
        torch.save(content, file)
        with pytest.raises(ValueError, match=r"other\.model(: .* is no tensor but| holds no state dict)"):
            read_file(file)


def test_a_state_dict_that_nothing_wraps_is_read_too(tmp_path):
    state = small_state("vqa_base")
    torch.save(state, tmp_path / "bare.model")
    assert read_file(tmp_path / "bare.model").keys() == state.keys()


def test_a_vocabulary_of_another_size_is_refused(tmp_path):
    file = save_released(tmp_path / "released.model", small_state("vqa_base"))
    (tmp_path / "vocab.txt").write_text(WORDS.text() + "more\n")
    with pytest.raises(ValueError, match="vocab.txt has 201 pieces, .* was trained with 200"):
        to_ours(file, tmp_path / "ours", tmp_path / "vocab.txt")


def test_nothing_is_written_over(converted, tmp_path):
    _, folder, _ = converted("vqa_base")
    file = save_released(tmp_path / "released.model", small_state("vqa_base"))
    with pytest.raises(ValueError, match="released.model is there already"):
        to_theirs(folder, file)
    with pytest.raises(ValueError, match="ours is there already"):
        to_ours(file, folder)


def test_a_report_of_other_weights_is_refused(converted, tmp_path):
    _, folder, _ = converted("vqa_base")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["head.output.bias"] += 1e-5  # float16, which the file had, cannot hold that
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="/model.safetensors is damaged: .* `files` from its config"):
        to_theirs(tmp_path, tmp_path / "back.model")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["files"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="final_mlp.2.bias was float16, which cannot hold today's head.output.bias"):
        to_theirs(tmp_path, tmp_path / "back.model")
    assert not list(tmp_path.glob("back.model*"))


def test_a_model_that_their_code_cannot_have_is_not_written_as_theirs(converted, tmp_path):
    _, folder, _ = converted("pretrain_base_prec")
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["geometry"] = "corners"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="their code has no such model: model.geometry is corners, theirs is centre"):
        to_theirs(tmp_path, tmp_path / "back.model")
    del config["task"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json names no task"):
        to_theirs(tmp_path, tmp_path / "back.model")


def test_a_checkpoint_of_our_own_run_becomes_a_file_of_theirs(converted, tmp_path):
    _, folder, _ = converted("pretrain_base_prec")
    model = read_model(folder).model_config
    recipe = Recipe(name="run", task=PretrainingSettings(), model=model)
    for classes in (1600, 8):
        whole = TaskModel(VLBert(model, len(WORDS)), make_task(recipe.task, WORDS, classes))
        optimizer = make_optimizer(whole, recipe.optimizer)
        with Writer(open_store(str(tmp_path))) as writer:
            path = save_checkpoint(writer, "run", classes, recipe, whole, optimizer, WORDS, classes, {})
        if classes == 8:
            with pytest.raises(ValueError, match=r"head.region_classifier.bias as \(9,\), the model as \(1601,\)"):
                to_theirs(tmp_path / path, tmp_path / "small.model")
            continue
        to_theirs(tmp_path / path, tmp_path / "theirs.model")
        to_ours(tmp_path / "theirs.model", tmp_path / "again")
        again = read_model(tmp_path / "again").model
        assert again.keys() == whole.state_dict().keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in whole.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "pretrained", "part", "source"),
    [
        (RefCOCOSettings(), "pretrain_base_e2e", "transform", "region_transform"),
        (VCRSettings(max_tokens=32), "pretrain_base_e2e", "region_transform", "region_transform"),
        (
            VQASettings(answers_from_words=False, question_length=32),
            "pretrain_base_prec",
            "transform",
            "word_transform",
        ),
    ],
)
def test_fine_tuning_takes_vl_bert_and_one_transform_and_all_else_is_new(converted, settings, pretrained, part, source):
    _, folder, _ = converted(pretrained)
    start = read_model(folder)
    model = dataclasses.replace(
        start.model_config, regions=dataclasses.replace(start.model_config.regions, random_init=True)
    )
    recipe = Recipe(name="finetune", task=settings, model=model, init_from=str(folder))
    task = make_task(settings, WORDS, 1600)
    fresh = make_model(dataclasses.replace(recipe, init_from=None), task, WORDS, None, None, print)
    started = make_model(recipe, task, WORDS, start, None, print).state_dict()
    taken = {f"head.{part}.{name}": tensor for name, tensor in start.part(f"head.{source}.").items()}
    assert taken
    for name, tensor in started.items():
        if name.startswith("vlbert."):
            expected = start.model[name]
            if "segments" in name and isinstance(settings, VCRSettings):  # VCR makes sentence B of A
                expected, tensor = expected[[0, 2]], tensor[[0, 2]]
        else:
            expected = taken.pop(name, fresh.state_dict()[name])
        assert torch.equal(tensor, expected), name
    assert not taken


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    """`python -m vlbert.convert ...`: None or what it exits with."""
    monkeypatch.setattr(sys, "argv", ["vlbert.convert", *map(str, arguments)])
    monkeypatch.delitem(sys.modules, "vlbert.convert", raising=False)
    try:
        runpy.run_module("vlbert.convert", run_name="__main__")
    except SystemExit as stop:
        return stop.code
    return None


def test_the_command_converts_both_ways_and_says_what_became_of_each_key(tmp_path, monkeypatch, capsys):
    state = small_state("vqa_base")
    file = save_released(tmp_path / "released.model", state)
    assert command(monkeypatch, file, tmp_path / "ours") is None
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" -> ")[0] for line in lines if line.startswith("module.")] == list(state)
    assert "module.final_mlp.2.bias -> head.output.bias" in lines
    assert "(not in their file: zeros) -> vlbert.embedding.masked_appearance.weight" in lines
    assert lines[-1].endswith("ours: 211 keys")
    assert command(monkeypatch, tmp_path / "ours", tmp_path / "back.model") is None
    assert "module.final_mlp.2.bias -> head.output.bias" in capsys.readouterr().out.splitlines()
    assert torch.load(tmp_path / "back.model", weights_only=True)["state_dict"].keys() == state.keys()

    del state["module.final_mlp.2.bias"]
    file = save_released(tmp_path / "torn.model", state | {"module.more": torch.zeros(1)})
    said = command(monkeypatch, file, tmp_path / "other")
    assert "module.more: no model of this kind has it; final_mlp.2.bias: it is missing" in said
    lines = capsys.readouterr().out.splitlines()
    assert "module.more -> REFUSED: no model of this kind has it" in lines
    assert "final_mlp.2.bias -> MISSING" in lines
    assert len([line for line in lines if line.startswith("module.")]) == 211
    assert "there is no file" in command(monkeypatch, tmp_path / "none.model", tmp_path / "other")


def test_heads_of_other_than_64_channels_are_told(tmp_path):
    file = save_released(tmp_path / "released.model", small_state("vqa_base"))
    to_ours(file, tmp_path / "ours", num_heads=4)
    assert read_model(tmp_path / "ours").model_config == dataclasses.replace(
        understand(shapes_of(small_state("vqa_base"))).model, num_heads=4
    )


@pytest.mark.parametrize(
    ("kind", "size", "recipes"),
    [
        ("pretrain_base_e2e", "base", ("pretrain_vlbert_base", "finetune_vcr_base", "finetune_refcoco_base")),
        ("pretrain_base_e2e", "large", ("pretrain_vlbert_large", "finetune_vcr_large", "finetune_refcoco_large")),
        ("pretrain_base_prec", "base", ("pretrain_vlbert_base_precomputed", "finetune_vqa_base")),
        ("pretrain_base_prec", "large", ("pretrain_vlbert_large_precomputed", "finetune_vqa_large")),
        ("vcr_base_q2a", "base", ("finetune_vcr_base",)),
        ("vqa_base", "base", ("finetune_vqa_base",)),
        ("refcoco_base", "base", ("finetune_refcoco_base", "finetune_refcoco_base_detected")),
    ],
)
def test_a_converted_model_has_the_architecture_of_the_recipes_that_start_from_it(kind, size, recipes):
    what = understand({plain_name(name): shape for name, shape in full_shapes(kind, size).items()})
    for name in recipes:
        assert not differing_fields(architecture(RECIPES[name]().model), architecture(what.model)), name
    regions = what.model.regions
    found = regions.padding, regions.short_side, regions.long_side
    assert found == (("fixed", 600, 1200) if kind.startswith("vcr") else ("batch", 600, 1000))
