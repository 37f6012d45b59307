"""The checkpoints of the authors: each key of each kind of file becomes ours and comes back to the bit."""

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import NamedTuple

import pytest
import torch
from released import (
    MULTI_TASK,
    PRETRAINED,
    WORDS,
    base_shapes,
    needs_key_lists,
    resized_shapes,
    save_released,
    small_state,
    vilbert_shapes,
    vilbert_state,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from storage.settings import differing_fields
from vlbert.checkpoint import open_checkpoint, read_model
from vlbert.config import ModelConfig, architecture
from vlbert.evaluation.evaluate import load_task_model
from vlbert.published.checkpoints import NO_HINTS, Hints
from vlbert.published.convert import KEPT, REPORT, main, to_ours, to_theirs
from vlbert.published.vilbert import PublishedViLBert
from vlbert.published.vlbert import PublishedVLBert
from vlbert.recipes import all_recipes


class Released(NamedTuple):
    """A file of theirs."""

    state: Callable[[], dict[str, Tensor]]
    task: str | None
    save: Callable[[Path, dict[str, Tensor]], object] = save_released
    hints: Hints = NO_HINTS
    kept: tuple[str, ...] = ()  # first parts of the keys of heads that its task has not

    def load(self, file: Path) -> dict[str, Tensor]:
        back = torch.load(file, weights_only=True)
        return back["state_dict"] if self.save is not plain else back


def plain(file: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, file)


def older(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As older versions of ViLBERT's code and its wrapper named the keys."""
    kinds = {"weight": "gamma", "bias": "beta"}
    return {
        "module." + re.sub(r"(LayerNorm\d?\.)(\w+)", lambda found: found[1] + kinds[found[2]], key): tensor
        for key, tensor in state.items()
    }


def encoder_alone() -> dict[str, Tensor]:
    state = vilbert_state(pairs=2)
    return {key.removeprefix("bert."): tensor for key, tensor in state.items() if key.startswith("bert.")}


def vilbert(kind: str, task: str, hints: Hints, *kept: str) -> Released:
    return Released(partial(vilbert_state, kind, 2), task, plain, hints, kept)


half, old = torch.float16, partial(save_released, zipped=False)
VL_BERT = {
    "pretrain_base_e2e": Released(partial(small_state, "pretrain_base_e2e", half), "PretrainingSettings"),
    "pretrain_base_prec": Released(partial(small_state, "pretrain_base_prec", prefix=""), "PretrainingSettings", old),
    "pretrain_base_prec_withouttextonly": Released(
        partial(small_state, "pretrain_base_prec_withouttextonly"), "PretrainingSettings"
    ),
    "vcr_base_q2a": Released(partial(small_state, "vcr_base_q2a", half), "VCRSettings", old),
    "vqa_base": Released(partial(small_state, "vqa_base", half, ""), "VQASettings"),
    "refcoco_base": Released(partial(small_state, "refcoco_base"), "RefCOCOSettings"),
}
VQA, ONE_LABEL, LAST = "vqa_paper_6layer", "one_label_paper_6layer", ("vision_logit", "linguisic_logit")
OF_MULTI_TASK = ("vil_prediction_gqa", "vil_binary_prediction", "vil_logit", "vil_tri_prediction", *LAST)
VILBERT = {
    "6 layers": Released(vilbert_state, "PretrainingSettings", plain),
    "older names": Released(lambda: older(vilbert_state(pairs=2, dtype=half)), "PretrainingSettings", plain),
    "encoder alone": Released(encoder_alone, None, plain),
    "VQA": vilbert(VQA, "VQASettings", NO_HINTS, "cls", "vil_logit", *LAST),
    "VQA, summed": vilbert(VQA, "VQASettings", Hints(fusion_method="sum"), "cls", "vil_logit", *LAST),
    "VCR": vilbert(ONE_LABEL, "VCRSettings", Hints(task="vcr"), "cls", "vil_prediction", *LAST),
    "RefCOCO+": vilbert(
        ONE_LABEL,
        "RefCOCOSettings",
        Hints(task="refcoco"),
        *("bert", "cls", "vil_prediction", "vil_logit", "linguisic_logit"),  # bert.t_pooler and bert.v_pooler
    ),
    "retrieval": vilbert(ONE_LABEL, "RetrievalSettings", Hints(task="retrieval"), "cls", "vil_prediction", *LAST),
    "12-in-1, VQA": vilbert(MULTI_TASK, "VQASettings", Hints(task="vqa", task_token=1), "cls", *OF_MULTI_TASK),
    "12-in-1, zero-shot": vilbert(
        MULTI_TASK, "PretrainingSettings", Hints(task="pretraining", task_token=7), "vil_prediction", *OF_MULTI_TASK
    ),
}
FILES = VL_BERT | VILBERT
ALL = [*(pytest.param(name, marks=needs_key_lists) for name in VL_BERT), *VILBERT]
NOTHING_USES = ("num_batches_tracked", "q_dense1.weight", "q_dense1.bias", "q_dense2.weight", "q_dense2.bias")
Converted = Callable[[str], tuple[dict[str, Tensor], Path, list[dict]]]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Name of a file -> (its state dict, the folder that it became, the report)."""
    known = {}

    def convert(name: str) -> tuple[dict[str, Tensor], Path, list[dict]]:
        if name not in known:
            folder, released = tmp_path_factory.mktemp("converted"), FILES[name]
            state = released.state()
            (folder / "vocab.txt").write_text(WORDS.text())
            released.save(folder / "released", state)
            report = to_ours(folder / "released", folder / "ours", folder / "vocab.txt", released.hints)
            known[name] = state, folder / "ours", report
        return known[name]

    return convert


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ALL)
def test_a_file_becomes_a_model_and_comes_back_bit_for_bit(converted, tmp_path, name):
    state, folder, report = converted(name)
    assert [entry["theirs"] for entry in report] == list(state)
    assert json.loads((folder / REPORT).read_text()) == report
    saved, kept = read_model(folder), {entry["theirs"] for entry in report if "kept" in entry}
    assert {tensor.dtype for tensor in saved.model.values()} == {torch.float32}
    for entry in report:
        if "ours" in entry:
            assert torch.equal(saved.model[entry["ours"]], state[entry["theirs"]].float())
    for missing in saved.model.keys() - {entry.get("ours") for entry in report}:
        assert not saved.model[missing].any()
    used = {key for key in kept if not key.endswith(NOTHING_USES)}
    assert {key.split(".")[0] for key in used} == {*FILES[name].kept}
    assert kept - used == {key for key in state if key.endswith(NOTHING_USES)}
    assert saved.config.get("task") == FILES[name].task
    assert name not in VILBERT or saved.model_config.pooler == ("sum" if "summed" in name else "product")
    assert saved.vocabulary.tokens == WORDS.tokens
    if FILES[name].task:
        load_task_model(open_checkpoint(str(folder)))  # the task's own head takes the rest

    to_theirs(folder, tmp_path / "back")
    back = FILES[name].load(tmp_path / "back")
    assert list(back) == list(state)
    for key, tensor in state.items():
        assert back[key].dtype == tensor.dtype, key
        assert torch.equal(back[key], tensor), key


# --- the released sizes -----------------------------------------------------------------------------------------------


def full_shapes(kind: str, size: str) -> dict[str, tuple[int, ...]]:
    """The key list of BASE as it is; that of LARGE has twice the layers, and they are wider."""
    if size == "base":
        return base_shapes(kind)
    shapes = resized_shapes(kind, {768: 1024, 3072: 4096})
    upper = r"(?<=encoder\.layer\.)\d+", lambda found: f"{int(found[0]) + 12}"
    return shapes | {re.sub(*upper, name): shape for name, shape in shapes.items()}


def check_shapes(kind: type, shapes: Mapping[str, tuple[int, ...]], *recipes: str) -> ModelConfig:
    """All keys of a file are known, and the architecture is that of the recipes."""
    shapes = {kind.plain_name(name): shape for name, shape in shapes.items()}
    what = kind.from_shapes(shapes)
    assert what.vocab_size == 30522
    for name in recipes:
        assert not differing_fields(architecture(all_recipes()[name].model), architecture(what.model)), name
    known = {entry["theirs"]: entry for entry in what.entries()}
    assert known.keys() - {"bert.embeddings.position_ids"} == shapes.keys()
    for name, shape in shapes.items():
        entry = known[name]
        assert tuple(entry["kept"] if "kept" in entry else what.skeleton[entry["ours"]].shape) == shape, name
    return what.model


@needs_key_lists
@pytest.mark.parametrize(
    ("kind", "size", "recipes"),
    [
        ("pretrain_base_e2e", "base", ("pretrain_vlbert_base", "finetune_vcr_base", "finetune_refcoco_base")),
        ("pretrain_base_e2e", "large", ("pretrain_vlbert_large", "finetune_vcr_large", "finetune_refcoco_large")),
        ("pretrain_base_prec", "base", ("pretrain_vlbert_base_precomputed", "finetune_vqa_base")),
        ("pretrain_base_prec", "large", ("pretrain_vlbert_large_precomputed", "finetune_vqa_large")),
        ("vcr_base_q2a", "base", ("finetune_vcr_base",)),
        ("vqa_base", "large", ("finetune_vqa_large",)),
        ("refcoco_base", "base", ("finetune_refcoco_base",)),
    ],
)
def test_every_key_of_a_released_vl_bert_is_known(kind, size, recipes):
    regions = check_shapes(PublishedVLBert, full_shapes(kind, size), *recipes).regions
    expected = ("fixed", 600, 1200) if kind.startswith("vcr") else ("batch", 600, 1000)
    assert (regions.padding, regions.short_side, regions.long_side) == expected


@pytest.mark.parametrize(("pairs", "keys"), [(2, 325), (4, 429), (6, 533), (8, 637)])
def test_every_key_of_a_released_vilbert_is_known(pairs, keys):
    recipes = ("pretrain_vilbert_base", "pretrain_vilbert_base_multi_task", "finetune_vqa_vilbert_base")
    assert len(vilbert_shapes(pairs=pairs)) == keys
    model = check_shapes(PublishedViLBert, vilbert_shapes(pairs=pairs), *(recipes if pairs == 6 else ()))
    assert (model.num_heads, model.region_num_heads, model.coattention_num_heads) == (12, 8, 8)
    assert (model.layers, model.regions.channels) == ("T" * (12 - pairs) + "XTV" * pairs, 2048)


# --- what is refused --------------------------------------------------------------------------------------------------

V_QUERY, V_WORDS = "vlbert.encoder.layer.3.attention.self.query.weight", "vlbert.word_embeddings.weight"
V_DECODER = "vlbert.mlm_head.predictions.decoder.weight"
WORD_TABLE, DEAD = "bert.embeddings.word_embeddings.weight", "bert.encoder.c_layer.2.biOutput.q_dense1.weight"
V_CLASSIFIER = ("0.dense.weight", "0.dense.bias", "0.LayerNorm.weight", "0.LayerNorm.bias", "2.weight", "2.bias")
ONE = torch.zeros(1)
WRONG = [  # file, changed tensors (None: missing), what is named
    ("vqa_base", {"final_mlp.2.bias": None, "more": ONE}, "more: no model .*; final_mlp.2.bias: it is missing"),
    ("pretrain_base_prec", {"object_mask_visual_embedding.weight": None}, "object_mask_visual_.*weight: it is missing"),
    ("vcr_base_q2a", {"vlbert._module.pooler.dense.bias": None}, "vlbert.pooler.dense.bias: it is missing"),
    ("pretrain_base_prec", {V_DECODER: torch.zeros(200, 64)}, f"{V_DECODER}: it differs from its copy"),
    ("vqa_base", {V_QUERY: torch.zeros(64, 64).double()}, f"{V_QUERY}: it is float64; float32, float16, bfl"),
    ("vqa_base", {V_QUERY: torch.full((64, 64), torch.nan)}, f"{V_QUERY}: it holds NaN or infinity"),
    ("vqa_base", {V_WORDS: torch.zeros(3)}, rf"{V_WORDS} is \(3,\) and should be a matrix"),
    ("vqa_base", {V_WORDS: None}, f"has no {V_WORDS}, so it is not a VL-BERT of the authors"),
    ("vqa_base", {f"final_mlp.{name}": None for name in V_CLASSIFIER}, "neither pre-training's heads .* nor a classif"),
    ("older names", {WORD_TABLE: None}, f"it has no {WORD_TABLE}, so it is not a ViLBERT of the authors"),
    ("6 layers", {DEAD: torch.zeros(3)}, rf"{DEAD}: it is \[3\] and should be \[128, 128\]"),
    ("6 layers", {"bert.embeddings.LayerNorm.gamma": torch.zeros(64)}, "LayerNorm.weight: the file has it under two"),
    ("6 layers", {"bert.encoder.c_layer.6.biOutput.dense1.bias": torch.zeros(128)}, "6 region and 7 co-att"),
    ("VQA", {"vil_prediction.main.0.bias": None}, "vil_prediction.main.0.bias: it is missing"),
    ("VQA", {"vil_prediction.main.3.weight_v": torch.zeros(3129, 9)}, r"weight_v: it is \[3129, 9\] and should be"),
]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        pytest.param(*case, marks=needs_key_lists if case[0] in VL_BERT else (), id=f"{case[0]} {case[2][:60]}")
        for case in WRONG
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, name, changes, named):
    state = FILES[name].state()
    prefix = "module." if next(iter(state)).startswith("module.") else ""
    state = state | {f"{prefix}{key}": tensor for key, tensor in changes.items()}
    FILES[name].save(tmp_path / "x", {key: tensor for key, tensor in state.items() if tensor is not None})
    with pytest.raises(ValueError, match=named) as error:
        to_ours(tmp_path / "x", tmp_path / "ours", hints=FILES[name].hints)
    assert str(tmp_path / "x") in str(error.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("kind", "hints", "named"),
    [
        (PRETRAINED, Hints(task="vqa"), "it is pre-trained and has no heads of fine-tuned tasks: give no task"),
        (PRETRAINED, Hints(task_token=1), "it has no table of task tokens: give no task token"),
        (ONE_LABEL, NO_HINTS, r"it has the heads of VCR, RefCOCO\+ or retrieval, .*: name one, --task NAME"),
        (MULTI_TASK, Hints(task_token=1), "it has heads of several tasks, .*: name one, --task NAME"),
        (MULTI_TASK, Hints(task="vqa"), "it has a table of task tokens, .*--task-token N"),
        (PRETRAINED, Hints((4,)), "num_heads needs one number for each of text, regions, co-attention; 1 are given"),
        (PRETRAINED, Hints((4, 5, 2)), "region_num_heads"),
        pytest.param(None, Hints(task="vqa"), "it is a VL-BERT, whose tensors show its task", marks=needs_key_lists),
        pytest.param(None, Hints((1, 1, 1)), "num_heads must be one number; 3 are given", marks=needs_key_lists),
    ],
)
def test_what_the_tensors_do_not_tell_must_be_told_and_nothing_else(tmp_path, kind, hints, named):
    plain(tmp_path / "x.bin", vilbert_state(kind, pairs=2) if kind else small_state("vqa_base"))
    with pytest.raises(ValueError, match=f"x.bin: .*{named}"):
        to_ours(tmp_path / "x.bin", tmp_path / "ours", hints=hints)


@needs_key_lists
def test_what_is_wrapped_around_tensors_is_no_part_of_a_model(converted, tmp_path):
    state, folder, _ = converted("vqa_base")
    inner = {key.replace("vlbert.encoder.", "vlbert.encoder._orig_mod."): tensor for key, tensor in state.items()}
    wrapped = {f"module._orig_mod.{key}": tensor for key, tensor in inner.items()}
    torch.save({"epoch": 3, "model_state_dict": wrapped}, tmp_path / "wrapped")
    to_ours(tmp_path / "wrapped", tmp_path / "ours")
    assert_equal(load_file(tmp_path / "ours/model.safetensors"), load_file(folder / "model.safetensors"))
    to_theirs(tmp_path / "ours", tmp_path / "back.model")
    assert torch.load(tmp_path / "back.model")["state_dict"].keys() == wrapped.keys()


def renamed(prefix: str, inner: str = "") -> dict[str, Tensor]:
    state = vilbert_state(pairs=2)
    return {prefix + key.replace("encoder.", f"encoder.{inner}"): tensor.clone() for key, tensor in state.items()}


@pytest.mark.parametrize(
    ("save", "content", "trainer"),
    [
        (torch.save, {"model_state_dict": renamed("module.module.")}, None),
        (torch.save, {"model": renamed("_orig_mod.module.", inner="_checkpoint_wrapped_module.")}, None),
        (torch.save, {"model": renamed("model.")}, "mmf"),
        (torch.save, {"module": renamed("module."), "global_steps": 3}, "DeepSpeed"),
        (torch.save, {"state_dict": renamed("_forward_module.model.")}, "Lightning"),
        (save_file, renamed("_fsdp_wrapped_module.", inner="_fsdp_wrapped_module."), "FSDP"),
        (save_file, renamed("") | {"bert.embeddings.position_ids": torch.arange(80)[None]}, "transformers"),
    ],
)
def test_a_vilbert_of_any_trainer_is_converted_and_comes_back(tmp_path, save, content, trainer):
    plain(tmp_path / "plain", vilbert_state(pairs=2))
    save(content, tmp_path / "wrapped")
    for name in ("plain", "wrapped"):
        to_ours(tmp_path / name, tmp_path / f"{name}-ours")
    assert_equal(*(load_file(tmp_path / f"{name}-ours/model.safetensors") for name in ("wrapped", "plain")))
    to_theirs(tmp_path / "wrapped-ours", tmp_path / "back")
    state = content if save is save_file else next(iter(content.values()))
    assert_equal(torch.load(tmp_path / "back"), state)


def test_the_configuration_beside_a_hubs_weights_is_heeded(tmp_path):
    encoder = {f"vilbert.{key}": tensor.clone() for key, tensor in encoder_alone().items()}
    save_file(encoder, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"fusion_method": "sum"}')
    with pytest.raises(ValueError, match=r"config.json has fusion_method 'sum': give --fusion_method sum"):
        to_ours(tmp_path / "model.safetensors", tmp_path / "ours")
    to_ours(tmp_path / "model.safetensors", tmp_path / "ours", hints=Hints(fusion_method="sum"))
    assert read_model(tmp_path / "ours").model_config.pooler == "sum"


def test_what_does_not_fit_or_is_there_already_is_refused(converted, tmp_path):
    _, folder, _ = converted("older names")  # in float16
    plain(tmp_path / "x.bin", vilbert_state(pairs=2))
    (tmp_path / "vocab.txt").write_text(WORDS.text() + "more\n")
    changed, other = copytree(folder, tmp_path / "changed"), copytree(folder, tmp_path / "other")
    (changed / REPORT).write_text(json.dumps([{"theirs": "a", "dtype": "float32", "ours": "b"}]))
    tensors = load_file(other / "model.safetensors")
    tensors["head.pooler.dense.bias"] += 1e-5
    save_file(tensors, other / "model.safetensors")
    known = copytree(other, tmp_path / "known")
    config = json.loads((known / "config.json").read_text())
    del config["files"]
    (known / "config.json").write_text(json.dumps(config))
    torch.save([torch.zeros(1)], tmp_path / "list.bin")
    torch.save({"state_dict": {"a": torch.zeros(1)}, "more": os.system}, tmp_path / "hostile.bin")
    plain(tmp_path / "bert.bin", {WORD_TABLE: torch.zeros(200, 64)})
    gone, own = (copytree(folder, tmp_path / name, ignore=ignore_patterns(name)) for name in (KEPT, REPORT))
    for call, named in (
        (lambda: to_ours(tmp_path / "list.bin", tmp_path / "ours"), "list.bin has no state dict"),
        (lambda: to_ours(tmp_path / "hostile.bin", tmp_path / "ours"), "hostile.bin wants to load posix.system"),
        (lambda: to_ours(tmp_path / "bert.bin", tmp_path / "ours"), f"bert.bin: it has keys such as {WORD_TABLE}, and"),
        (lambda: to_ours(tmp_path / "x.bin", tmp_path / "ours", tmp_path / "vocab.txt"), "has 201 tokens, .* trained"),
        (lambda: to_ours(tmp_path / "x.bin", folder), "ours already exists"),
        (lambda: to_theirs(folder, tmp_path / "x.bin"), "x.bin already exists"),
        (lambda: to_ours(tmp_path / "other.bin", tmp_path / "ours"), "weight file .*other.bin does not exist"),
        (lambda: to_theirs(gone, tmp_path / "back.bin"), f"{KEPT} is missing"),
        (lambda: to_theirs(own, tmp_path / "back.bin"), f"has no {REPORT}: only converted checkpoints"),
        (lambda: to_theirs(changed, tmp_path / "back.bin"), f"{REPORT} is not of this model: it names b"),
        (lambda: to_theirs(other, tmp_path / "back.bin"), "/model.safetensors is damaged: .* `files` from its config"),
        (
            lambda: to_theirs(known, tmp_path / "back.bin"),
            "bias was float16, which cannot hold the current head.pooler",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    assert not list(tmp_path.glob("back.bin*"))


# --- what is done with it ---------------------------------------------------------------------------------------------


def test_the_command_converts_both_ways(tmp_path, capsys):
    state = vilbert_state(pairs=2)
    plain(tmp_path / "released.bin", state)
    main([f"{tmp_path}/released.bin", f"{tmp_path}/ours", "--num_heads", "1", "2", "4"])
    ours = read_model(tmp_path / "ours").model_config
    assert ours.coattention_num_heads == 4
    main([f"{tmp_path}/ours", f"{tmp_path}/back.bin"])
    assert torch.load(tmp_path / "back.bin", weights_only=True).keys() == state.keys()
    assert capsys.readouterr().out.endswith(f"back.bin: {len(state)} tensors, 8 of them without a counterpart here\n")
    with pytest.raises(SystemExit, match="weight file .*none.bin does not exist"):
        main([f"{tmp_path}/none.bin", f"{tmp_path}/other"])
