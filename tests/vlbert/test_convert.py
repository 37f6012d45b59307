"""The authors' checkpoints: each key of the six kinds becomes ours and comes back to the bit; all else is refused."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from released import KINDS, WORDS, base_shapes, needs_key_lists, resized_shapes, save_released, small_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from storage.object_store import open_store
from storage.settings import differing_fields
from training.checkpoint import Writer
from training.optimizer import make_optimizer
from vlbert.checkpoint import read_model, save_checkpoint
from vlbert.config import Recipe, architecture
from vlbert.initial_weights import make_model
from vlbert.model.vlbert import VLBert
from vlbert.published.checkpoints import Hints
from vlbert.published.convert import REPORT, main, read_file, to_ours, to_theirs
from vlbert.published.vlbert import PublishedVLBert
from vlbert.recipes import all_recipes
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
TASKS = {"pretrain": "PretrainingSettings", "vcr": "VCRSettings", "vqa": "VQASettings", "refcoco": "RefCOCOSettings"}


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
    assert saved.config["task"] == TASKS[kind.split("_")[0]]
    assert saved.vocabulary.tokens == WORDS.tokens
    assert saved.model_config.num_heads == 1  # of 64 channels
    model = VLBert.from_pretrained(folder)
    task = make_task(PublishedVLBert.understand(shapes_of(state)).task, WORDS, 1600)
    TaskModel(model, task).load_state_dict(saved.model)  # the task's own head takes the rest


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_every_bit_is_the_same(converted, tmp_path, kind):
    state, folder, _ = converted(kind)
    to_theirs(folder, tmp_path / "back.model")
    back = torch.load(tmp_path / "back.model", weights_only=True)["state_dict"]
    assert list(back) == list(state)
    for key, tensor in state.items():
        assert back[key].dtype == tensor.dtype, key
        assert torch.equal(back[key], tensor), key


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_report_a_model_comes_back_in_float32(converted, tmp_path, kind):
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
        if not name.endswith("num_batches_tracked"):  # ours do not count
            assert torch.equal(back[f"module.{name}"], state[f"{prefix}{name}"].float()), name
    to_ours(tmp_path / "back.model", tmp_path / "again")


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
    ("kind", "size", "recipes"),
    [
        ("pretrain_base_e2e", "base", ("pretrain_vlbert_base", "finetune_vcr_base", "finetune_refcoco_base")),
        ("pretrain_base_e2e", "large", ("pretrain_vlbert_large", "finetune_vcr_large", "finetune_refcoco_large")),
        ("pretrain_base_prec", "base", ("pretrain_vlbert_base_precomputed", "finetune_vqa_base")),
        ("pretrain_base_prec", "large", ("pretrain_vlbert_large_precomputed", "finetune_vqa_large")),
        ("pretrain_base_prec_withouttextonly", "base", ("pretrain_vlbert_base_precomputed",)),
        ("vcr_base_q2a", "base", ("finetune_vcr_base",)),
        ("vqa_base", "base", ("finetune_vqa_base",)),
        ("vqa_base", "large", ("finetune_vqa_large",)),
        ("refcoco_base", "base", ("finetune_refcoco_base",)),
    ],
)
def test_every_key_of_the_full_size_is_known_and_the_architecture_is_that_of_the_recipes(kind, size, recipes):
    shapes = full_shapes(kind, size)
    what = PublishedVLBert.understand({PublishedVLBert.plain_name(name): shape for name, shape in shapes.items()})
    assert what.vocab_size == 30522
    for name in recipes:
        assert not differing_fields(architecture(all_recipes()[name].model), architecture(what.model)), name
    regions = what.model.regions
    expected = ("fixed", 600, 1200) if kind.startswith("vcr") else ("batch", 600, 1000)
    assert (regions.padding, regions.short_side, regions.long_side) == expected
    ours = what.skeleton()
    known = {entry["theirs"]: entry for entry in what.standard(ours)}
    more = {"aux_text_visual_embedding.weight"} if kind.endswith("withouttextonly") else set()
    assert set(known) == set(shapes) | more
    for name, shape in shapes.items():
        if "ours" in known[name]:
            assert tuple(ours[known[name]["ours"]].shape) == shape, name


def shapes_of(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {PublishedVLBert.plain_name(key): tuple(tensor.shape) for key, tensor in state.items()}


QUERY, WORD_TABLE = "vlbert.encoder.layer.3.attention.self.query.weight", "vlbert.word_embeddings.weight"
DECODER = "vlbert.mlm_head.predictions.decoder.weight"
WRONG = [  # kind, changed tensors (None: missing), what is named
    ("vqa_base", {"vlbert.adapter.weight": torch.zeros(1)}, "vlbert.adapter.weight: no model of this kind has it"),
    ("vqa_base", {"bn9.num_batches_tracked": torch.tensor(1)}, "bn9.num_batches_tracked: no model of this kind has it"),
    ("vqa_base", {"final_mlp.3.weight": torch.zeros(1)}, "final_mlp.3.weight: no model of this kind has it"),
    (
        "vqa_base",
        {"final_mlp.2.bias": None, "more": torch.zeros(1)},
        "module.more: .*; final_mlp.2.bias: it is missing",
    ),
    *(
        (kind, {name: None}, f"{name}: it is missing")
        for kind, name in (
            ("pretrain_base_prec", "vlbert.mlm_head.predictions.bias"),
            ("pretrain_base_prec", DECODER),
            ("pretrain_base_prec", "object_mask_visual_embedding.weight"),
            ("pretrain_base_prec", "vlbert.visual_ln_text.weight"),
            ("vcr_base_q2a", "image_feature_extractor.backbone.conv1.weight"),
            ("vcr_base_q2a", "image_feature_extractor.head.0.1.bn2.num_batches_tracked"),
            ("vcr_base_q2a", "vlbert._module.pooler.dense.bias"),
            ("vcr_base_q2a", "cnn_loss_reg.2.weight"),
            ("vqa_base", "vlbert.encoder.layer.7.output.LayerNorm.bias"),
        )
    ),
    ("pretrain_base_prec", {DECODER: torch.zeros(200, 64)}, f"{DECODER}: it should repeat {WORD_TABLE}, and does not"),
    ("vqa_base", {QUERY: torch.zeros(64, 65)}, rf"{QUERY}: it is \[64, 65\] and should be \[64, 64\]"),
    ("vqa_base", {QUERY: torch.zeros(64, 64).double()}, rf"{QUERY}: it is float64 \[64, 64\]; float32, float16 and"),
    ("vqa_base", {QUERY: torch.full((64, 64), torch.nan)}, f"{QUERY}: it holds NaN or infinity"),
    ("vqa_base", {WORD_TABLE: torch.zeros(3)}, rf"{WORD_TABLE} is \(3,\) and should be a matrix"),
    ("vqa_base", {WORD_TABLE: None}, f"has no {WORD_TABLE}, so it is no VL-BERT of the authors"),
    (
        "vqa_base",
        {f"final_mlp.{name}": None for name in ("0.dense.weight", "0.dense.bias", "0.LayerNorm.weight")}
        | {f"final_mlp.{name}": None for name in ("0.LayerNorm.bias", "2.weight", "2.bias")},
        "neither pre-training's heads .* nor a classifier",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "named"), WRONG, ids=[f"{kind} {named}" for kind, _, named in WRONG])
def test_a_wrong_tensor_is_named(tmp_path, kind, changes, named):
    state = small_state(kind) | {f"module.{name}": tensor for name, tensor in changes.items()}
    file = save_released(tmp_path / "x.model", {name: tensor for name, tensor in state.items() if tensor is not None})
    with pytest.raises(ValueError, match=named) as error:
        to_ours(file, tmp_path / "ours")
    assert str(file) in str(error.value)
    assert not (tmp_path / "ours").exists()


def test_keys_with_and_without_module_do_not_mix(tmp_path):
    state = small_state("vqa_base", prefix="")
    mixed = {key if i % 2 else f"module.{key}": tensor for i, (key, tensor) in enumerate(state.items())}
    with pytest.raises(ValueError, match="keys with and without module., such as module.image_feature_extractor"):
        read_file(save_released(tmp_path / "mixed.model", mixed))


class Hostile:
    """A pickle of it makes the file `mark`."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


def test_a_hostile_pickle_does_not_run(tmp_path):
    file, mark = tmp_path / "hostile.model", tmp_path / "mark"
    torch.save({"state_dict": {"a": torch.zeros(1)}, "more": Hostile(mark)}, file)
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


def test_what_is_wrapped_around_tensors_is_no_part_of_a_model(tmp_path):
    state = small_state("vqa_base", prefix="")
    torch.save(state, tmp_path / "bare")
    save_file({key: tensor.clone() for key, tensor in state.items()}, tmp_path / "safetensors")
    compiled = {f"module._orig_mod.{key}": tensor for key, tensor in state.items()}
    torch.save({"state_dict": compiled}, tmp_path / "compiled")
    in_part = {key.replace("vlbert.encoder.", "vlbert.encoder._orig_mod."): tensor for key, tensor in state.items()}
    torch.save({"epoch": 3, "model_state_dict": in_part}, tmp_path / "in part")
    torch.save({"model": {f"module.module.{key}": tensor for key, tensor in state.items()}}, tmp_path / "twice")
    found = set()
    for name in ("bare", "safetensors", "compiled", "in part", "twice"):
        to_ours(tmp_path / name, tmp_path / f"{name} as ours")
        found.add((tmp_path / f"{name} as ours" / "model.safetensors").read_bytes())
    assert len(found) == 1
    to_theirs(tmp_path / "compiled as ours", tmp_path / "back.model")
    assert read_file(tmp_path / "back.model").keys() == compiled.keys()


def test_what_does_not_fit_or_is_there_already_is_refused(converted, tmp_path):
    _, folder, _ = converted("vqa_base")
    file = save_released(tmp_path / "released.model", small_state("vqa_base"))
    (tmp_path / "vocab.txt").write_text(WORDS.text() + "more\n")
    for call, named in (
        (lambda: to_ours(file, tmp_path / "ours", tmp_path / "vocab.txt"), "vocab.txt has 201 tokens, .* trained with"),
        (lambda: to_ours(file, folder), "ours is there already"),
        (lambda: to_theirs(folder, file), "released.model is there already"),
        (lambda: read_file(tmp_path / "other.model"), "there is no file"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


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


def test_the_command_converts_both_ways_and_prints_what_became_of_each_key(tmp_path, monkeypatch, capsys):
    def command(*arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["vlbert convert", *map(str, arguments)])
        main()
        return capsys.readouterr().out.splitlines()

    state = small_state("vqa_base")
    file = save_released(tmp_path / "released.model", state)
    lines = command(file, tmp_path / "ours")
    assert [line.split(" -> ")[0] for line in lines if line.startswith("module.")] == list(state)
    assert "module.final_mlp.2.bias -> head.output.bias" in lines
    assert "(not in their file: zeros) -> vlbert.embedding.masked_appearance.weight" in lines
    assert lines[-1].endswith("ours: 211 keys")
    assert "module.final_mlp.2.bias -> head.output.bias" in command(tmp_path / "ours", tmp_path / "back.model")
    assert torch.load(tmp_path / "back.model", weights_only=True)["state_dict"].keys() == state.keys()
    with pytest.raises(SystemExit, match="there is no file"):
        command(tmp_path / "none.model", tmp_path / "other")


def test_heads_of_other_than_64_channels_are_given(tmp_path):
    file = save_released(tmp_path / "released.model", small_state("vqa_base"))
    to_ours(file, tmp_path / "ours", hints=Hints(num_heads=(4,)))
    assert read_model(tmp_path / "ours").model_config == dataclasses.replace(
        PublishedVLBert.understand(shapes_of(small_state("vqa_base"))).model, num_heads=4
    )
