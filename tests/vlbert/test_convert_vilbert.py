"""The checkpoints of ViLBERT's authors: all keys become ours and come back to the bit, and compute what theirs did."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from places import DATA
from released import (
    DECODER,
    MULTI_TASK,
    PRETRAINED,
    WORDS,
    needs_key_lists,
    needs_vilbert,
    small_state,
    vilbert_shapes,
    vilbert_state,
)
from tiny import TINY_MODEL
from torch import Tensor

from storage.settings import differing_fields, to_json
from tests.parity.cases import Case, weights
from tests.parity.vilbert import make_batch
from vlbert.checkpoint import load_model, model_files, open_checkpoint, read_model
from vlbert.config import ModelConfig, Recipe, RegionConfig, architecture
from vlbert.evaluation.evaluate import load_task_model
from vlbert.initial_weights import make_model
from vlbert.model.vlbert import VLBert
from vlbert.published.checkpoints import NO_HINTS, Hints
from vlbert.published.convert import KEPT, REPORT, main, to_ours, to_theirs, understand
from vlbert.published.vilbert import PublishedViLBert
from vlbert.recipes import all_recipes
from vlbert.tasks import make_task
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

pytestmark = needs_vilbert

WORD_TABLE = "bert.embeddings.word_embeddings.weight"
QUERY = "bert.encoder.c_layer.1.biattention.query2.weight"
DEAD = "bert.encoder.c_layer.2.biOutput.q_dense1.weight"


def older(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As older versions of their code and its wrapper named the keys."""
    found = {}
    for key, tensor in state.items():
        if "LayerNorm" in key:
            key = key.removesuffix("weight") + "gamma" if key.endswith("weight") else key.removesuffix("bias") + "beta"
        found[f"module.{key}"] = tensor
    return found


def encoder_alone(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("bert."): tensor for key, tensor in state.items() if key.startswith("bert.")}


VQA, ONE_LABEL = "vqa_paper_6layer", "one_label_paper_6layer"
FILES = {
    "6 layers": lambda: vilbert_state(),
    "older names, float16": lambda: older(vilbert_state(pairs=2, dtype=torch.float16)),
    "encoder alone": lambda: encoder_alone(vilbert_state(pairs=2)),
    "VQA": lambda: vilbert_state(VQA, pairs=2),
    "VCR": lambda: vilbert_state(ONE_LABEL, pairs=2),
    "RefCOCO+": lambda: vilbert_state(ONE_LABEL, pairs=2),
    "retrieval": lambda: vilbert_state(ONE_LABEL, pairs=2),
    "12-in-1, VQA": lambda: vilbert_state(MULTI_TASK, pairs=2),
    "12-in-1, zero-shot": lambda: vilbert_state(MULTI_TASK, pairs=2),
}
HINTS = {
    "VCR": Hints(task="vcr"),
    "RefCOCO+": Hints(task="refcoco"),
    "retrieval": Hints(task="retrieval"),
    "12-in-1, VQA": Hints(task="vqa", task_token=1),
    "12-in-1, zero-shot": Hints(task="pretraining", task_token=7),
}


LAST = {"vision_logit", "linguisic_logit"}
KEPT_HEADS = {  # first parts of the keys of heads that the task does not have
    "VQA": {"cls", "vil_logit"} | LAST,
    "VCR": {"cls", "vil_prediction"} | LAST,
    "RefCOCO+": {"bert", "cls", "vil_prediction", "vil_logit", "linguisic_logit"},  # bert.t_pooler and bert.v_pooler
    "retrieval": {"cls", "vil_prediction"} | LAST,
    "12-in-1, VQA": {"cls", "vil_prediction_gqa", "vil_binary_prediction", "vil_logit", "vil_tri_prediction"} | LAST,
    "12-in-1, zero-shot": {"vil_prediction", "vil_prediction_gqa", "vil_binary_prediction", "vil_tri_prediction"}
    | {"vil_logit"}
    | LAST,
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Tensor], Path, list[dict]]]:
    """Name of a file -> (its state dict, the folder that it became, the report)."""
    known = {}

    def convert(name: str) -> tuple[dict[str, Tensor], Path, list[dict]]:
        if name not in known:
            folder, state = tmp_path_factory.mktemp("vilbert"), FILES[name]()
            (folder / "vocab.txt").write_text(WORDS.text())
            torch.save(state, folder / "pytorch_model_9.bin")
            report = to_ours(
                folder / "pytorch_model_9.bin", folder / "ours", folder / "vocab.txt", HINTS.get(name, NO_HINTS)
            )
            known[name] = state, folder / "ours", report
        return known[name]

    return convert


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_a_model_and_the_report_names_every_key_once(converted, name):
    state, folder, report = converted(name)
    assert [entry["theirs"] for entry in report] == list(state)
    assert json.loads((folder / REPORT).read_text()) == report
    saved = read_model(folder)
    assert sorted(entry["ours"] for entry in report if "ours" in entry) == sorted(saved.model)
    assert {tensor.dtype for tensor in saved.model.values()} == {torch.float32}
    for entry in report:
        if "ours" in entry:
            assert torch.equal(saved.model[entry["ours"]], state[entry["theirs"]].float())
    kept = {entry["theirs"] for entry in report if "kept" in entry}
    assert {key for key in kept if "q_dense" in key} == {key for key in state if "q_dense" in key}
    assert len({key for key in kept if "q_dense" in key}) == 4 * saved.model_config.layers.count("X")
    assert {key.split(".")[0] for key in kept if "q_dense" not in key} == KEPT_HEADS.get(name, set())
    assert VLBert.from_pretrained(folder).vocabulary.tokens == WORDS.tokens
    if name != "encoder alone":
        load_task_model(open_checkpoint(str(folder)))  # the task's own head takes the rest


@pytest.mark.parametrize("name", FILES)
def test_there_and_back_every_bit_is_the_same(converted, tmp_path, name):
    state, folder, _ = converted(name)
    to_theirs(folder, tmp_path / "back.bin")
    back = torch.load(tmp_path / "back.bin", weights_only=True)
    assert list(back) == list(state)
    for key, tensor in state.items():
        assert back[key].dtype == tensor.dtype, key
        assert torch.equal(back[key], tensor), key


def test_what_no_tensor_tells_is_as_published(converted):
    saved = read_model(converted("6 layers")[1])
    assert saved.model_config == ModelConfig(
        layers="T" * 6 + "XTV" * 6,
        hidden_size=64,
        num_heads=1,
        intermediate_size=80,
        max_positions=80,
        embedding="separate",
        region_hidden_size=128,
        region_num_heads=1,
        region_intermediate_size=128,
        coattention_size=128,
        coattention_num_heads=1,
        whole_image="mean",
        pooler="product",
        regions=RegionConfig(
            features="precomputed",
            resnet=dataclasses.replace(RegionConfig().resnet, width=2),
            masked_features="zeros",
        ),
    )
    settings = saved.config["settings"]
    assert (settings["relationship"], settings["region_head"]) == (True, "transform_norm")
    assert saved.num_classes == 1600


@pytest.mark.parametrize(("pairs", "keys"), [(2, 325), (4, 429), (6, 533), (8, 637)])
def test_every_key_of_the_released_size_is_known(pairs, keys):
    shapes = vilbert_shapes(pairs=pairs)
    assert len(shapes) == keys
    what = PublishedViLBert.understand(shapes)
    heads = what.model.num_heads, what.model.region_num_heads, what.model.coattention_num_heads
    assert (heads, what.vocab_size, what.model.regions.channels) == ((12, 8, 8), 30522, 2048)
    ours = what.skeleton()
    known = {entry["theirs"]: entry for entry in what.standard(ours)}
    assert set(known) == set(shapes)
    for name, entry in known.items():
        if "repeats" not in entry:
            assert shapes[name] == tuple(entry["kept"] if "kept" in entry else ours[entry["ours"]].shape), name
    assert what.model.layers == "T" * (12 - pairs) + "XTV" * pairs
    if pairs == 6:
        for recipe in ("pretrain_vilbert_base", "pretrain_vilbert_base_multi_task", "finetune_vqa_vilbert_base"):
            assert not differing_fields(architecture(all_recipes()[recipe].model), architecture(what.model)), recipe
        dead = 6 * (1024 * 1024 + 1024 + 1024 * 768 + 768)
        assert sum(tensor.numel() for tensor in ours.values()) + dead == 250_044_029


@pytest.mark.slow
def test_a_file_of_the_released_size_comes_back_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.empty(shape).normal_(generator=generator) for name, shape in vilbert_shapes().items()}
    state[DECODER] = state[WORD_TABLE]
    torch.save(state, tmp_path / "pytorch_model_9.bin")
    report = to_ours(tmp_path / "pytorch_model_9.bin", tmp_path / "ours")
    assert len(report) == 533
    to_theirs(tmp_path / "ours", tmp_path / "back.bin")
    back = torch.load(tmp_path / "back.bin", weights_only=True)
    assert list(back) == list(state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


CASES = {"pretrain_paper": (4, 6, 8), "pretrain_multi_task_1601": (6, 4, 4), "single_stream_paper": (4,)}


@pytest.mark.parametrize("name", CASES)
def test_a_converted_file_computes_what_their_program_did(tmp_path, name):
    case = Case.read(DATA / "vilbert" / f"{name}.json")
    state = weights(case.metadata)
    state |= {DECODER: state[WORD_TABLE]}
    state = {key: tensor for key, tensor in state.items() if key.startswith(("bert.", "cls."))}
    torch.save(state, tmp_path / "released.bin")
    to_ours(tmp_path / "released.bin", tmp_path / "ours", hints=Hints(CASES[name]))
    model = VLBert.from_pretrained(tmp_path / "ours")
    head = understand(state, Hints(CASES[name])).head().eval()
    load_model(head, read_model(tmp_path / "ours").part("head."), "ours")
    batch = make_batch(case)
    with torch.no_grad():
        encoded = model(batch)
        words, regions = head.words(model, encoded.text), head.regions(encoded.regions)
        pairs = head.relationship(head.pooler(encoded.text, encoded.regions))
    text, boxes, one_stream = batch.text_mask, batch.region_mask, name.startswith("single")
    names = ("linguisic_prediction", "vision_prediction", "alignment")
    names = names if one_stream else ("prediction_scores_t", "prediction_scores_v", "seq_relationship_score")
    for ours, output, mask in zip((words, regions, pairs), names, (text, boxes, slice(None)), strict=True):
        torch.testing.assert_close(ours[mask], case.tensor(f"out/{output}")[mask], rtol=0, atol=1e-5)


FINE_TUNED = {
    "vqa_paper": ("vil_prediction", NO_HINTS),
    "vqa_multi_task": ("vil_prediction", Hints(task="vqa", task_token=1)),
    "vcr_paper": ("vil_logit", Hints(task="vcr")),
    "retrieval_paper": ("vil_logit", Hints(task="retrieval")),
    "refcoco_paper": ("vision_logit", Hints(task="refcoco")),
    "single_stream_paper": ("vil_logit", Hints(task="retrieval")),
}


@pytest.mark.parametrize("name", FINE_TUNED)
def test_a_converted_fine_tuned_file_computes_what_their_program_did(tmp_path, name):
    output, hints = FINE_TUNED[name]
    case = Case.read(DATA / "vilbert" / f"{name}.json")
    hints = dataclasses.replace(hints, num_heads=CASES.get(name, (4, 6, 8)))
    state = weights(case.metadata)
    torch.save(state | {DECODER: state[WORD_TABLE]}, tmp_path / "released.bin")
    to_ours(tmp_path / "released.bin", tmp_path / "ours", hints=hints)
    model = VLBert.from_pretrained(tmp_path / "ours")
    head = understand(state, hints).head().eval()
    load_model(head, read_model(tmp_path / "ours").part("head."), "ours")
    batch = make_batch(case)
    with torch.no_grad():
        encoded = model(batch)
        if hints.task == "refcoco":
            found = head(encoded.regions)
        elif hints.task == "vcr":
            found = head.scores(encoded.text, encoded.regions)
        else:
            found = head(encoded)[:, None] if hints.task == "retrieval" else head(encoded.text, encoded.regions)
    expected, real = case.tensor(f"out/{output}"), batch.region_mask if hints.task == "refcoco" else slice(None)
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------

FEATURES = "bert.v_embeddings.image_embeddings.weight"
WRONG = [  # changed tensors (None: missing), what is named
    ({"bert.adapter.weight": torch.zeros(1)}, "bert.adapter.weight: no model of this kind has it"),
    ({"vlbert.word_embeddings.weight": torch.zeros(1)}, "vlbert.word_embeddings.weight: no model of this kind has it"),
    ({QUERY: None}, f"{QUERY}: it is missing"),
    ({DEAD: None}, f"{DEAD}: it is missing"),
    ({DECODER: None}, f"{DECODER}: it is missing"),
    ({"cls.predictions.bias": None}, "cls.predictions.bias: it is missing"),
    ({"bert.v_pooler.dense.bias": None}, "bert.v_pooler.dense.bias: it is missing"),
    ({WORD_TABLE: None}, f"it has no {WORD_TABLE}, so it is no ViLBERT of the authors, or not a whole one"),
    ({WORD_TABLE: torch.zeros(3)}, rf"its {WORD_TABLE} is \(3,\) and should be a matrix"),
    ({QUERY: torch.zeros(128, 65)}, rf"{QUERY}: it is \[128, 65\] and should be \[128, 64\]"),
    ({DEAD: torch.zeros(3)}, rf"{DEAD}: it is \[3\] and should be \[128, 128\]"),
    ({QUERY: torch.full((128, 64), torch.nan)}, f"{QUERY}: it holds NaN or infinity"),
    ({DEAD: torch.full((128, 128), torch.inf)}, f"{DEAD}: it holds NaN or infinity"),
    ({QUERY: torch.zeros(128, 64).double()}, rf"{QUERY}: it is float64 \[128, 64\]; float32, float16 and"),
    ({DECODER: torch.zeros(200, 64)}, f"{DECODER}: it should repeat {WORD_TABLE}, and does not"),
    ({FEATURES: torch.zeros(128, 65)}, rf"{FEATURES}: it is \[128, 65\] and should be \[128, 64\]"),
    (
        {"bert.embeddings.LayerNorm.gamma": torch.zeros(64)},
        "bert.embeddings.LayerNorm.weight: the file has it under two names; bert.embeddings.LayerNorm.gamma: ",
    ),
    ({"bert.encoder.layer.12.output.dense.bias": torch.zeros(64)}, "layer.12.attention.self.query.weight: it is miss"),
    (
        {"bert.encoder.c_layer.3.biOutput.dense1.bias": torch.zeros(128)},
        "it has 12 layers of text, 3 of regions and 4 of co-attention; published models have",
    ),
]


@pytest.mark.parametrize(("changes", "named"), WRONG, ids=[named[:60] for _, named in WRONG])
def test_a_wrong_tensor_is_named(tmp_path, changes, named):
    state = {key: tensor for key, tensor in (vilbert_state(pairs=3) | changes).items() if tensor is not None}
    torch.save(state, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=named) as error:
        to_ours(tmp_path / "x.bin", tmp_path / "ours")
    assert str(tmp_path / "x.bin") in str(error.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("kind", "hints", "named"),
    [
        (PRETRAINED, Hints(task="vqa"), "it is pre-trained and has no heads of fine-tuned tasks: give no task"),
        (PRETRAINED, Hints(task_token=1), "it has no table of task tokens: give no task token"),
        (ONE_LABEL, NO_HINTS, r"it has the heads of VCR, RefCOCO\+ or retrieval, .*: name one, --task NAME"),
        (MULTI_TASK, Hints(task_token=1), "it has heads of several tasks, .*: name one, --task NAME"),
        (MULTI_TASK, Hints(task="vqa"), "it has a table of task tokens, .*: --task-token N"),
        (MULTI_TASK, Hints(task="vqa", task_token=20), "task_token"),
        (PRETRAINED, Hints((4,)), "the number of heads is needed of text, regions, co-attention; given are 1"),
        (PRETRAINED, Hints((4, 5, 2)), "region_num_heads"),
    ],
)
def test_what_the_tensors_do_not_tell_must_be_told_and_nothing_else(tmp_path, kind, hints, named):
    torch.save(vilbert_state(kind, pairs=2), tmp_path / "x.bin")
    with pytest.raises(ValueError, match=f"x.bin: .*{named}"):
        to_ours(tmp_path / "x.bin", tmp_path / "ours", hints=hints)


@needs_key_lists
def test_a_vl_bert_is_told_no_task(tmp_path):
    torch.save({"state_dict": small_state("vqa_base")}, tmp_path / "x.model")
    for hints, named in (
        (Hints(task="vqa"), "it is a VL-BERT, whose tensors tell its task"),
        (Hints((1, 1, 1)), "one num"),
    ):
        with pytest.raises(ValueError, match=f"x.model: .*{named}"):
            to_ours(tmp_path / "x.model", tmp_path / "ours", hints=hints)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vil_answers.weight": torch.zeros(1)}, "vil_answers.weight: no model of this kind has it"),
        ({"vil_prediction.main.0.bias": None}, "vil_prediction.main.0.bias: it is missing"),
        ({"vil_prediction.main.3.weight_g": torch.tensor(torch.nan)}, "main.3.weight_g: it holds NaN or infinity"),
        ({"vil_logit.bias": torch.tensor([torch.nan])}, "vil_logit.bias: it holds NaN or infinity"),
        ({"vil_prediction.main.3.weight_v": torch.zeros(3129, 9)}, r"main.3.weight_v: it is \[3129, 9\] and should be"),
    ],
)
def test_a_wrong_tensor_of_a_fine_tuned_file_is_named(tmp_path, changes, named):
    state = {key: tensor for key, tensor in (vilbert_state(VQA, pairs=2) | changes).items() if tensor is not None}
    torch.save(state, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=named):
        to_ours(tmp_path / "x.bin", tmp_path / "ours")


def test_a_file_of_neither_model_is_refused(tmp_path):
    torch.save({WORD_TABLE: torch.zeros(200, 64)}, tmp_path / "bert.bin")
    with pytest.raises(ValueError, match=f"bert.bin: it has keys such as {WORD_TABLE}, and none of a VL-BERT"):
        to_ours(tmp_path / "bert.bin", tmp_path / "ours")


def copy(folder: Path, to: Path, *without: str) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        if file.name not in without:
            (to / file.name).write_bytes(file.read_bytes())
    return to


def test_what_is_kept_is_checked_on_the_way_back(converted, tmp_path):
    _, folder, _ = converted("encoder alone")
    damaged = copy(folder, tmp_path / "damaged")
    data = bytearray((damaged / KEPT).read_bytes())
    data[-1] ^= 1
    (damaged / KEPT).write_bytes(data)
    with pytest.raises(ValueError, match=f"{KEPT} is damaged: its sha256"):
        to_theirs(damaged, tmp_path / "back.bin")
    with pytest.raises(ValueError, match=f"{KEPT} is gone"):
        to_theirs(copy(folder, tmp_path / "without", KEPT), tmp_path / "back.bin")
    assert not (tmp_path / "back.bin").exists()


def test_without_the_report_a_whole_file_is_written_with_zeros_for_what_nothing_reads(converted, tmp_path):
    state, folder, _ = converted("6 layers")
    to_theirs(copy(folder, tmp_path / "anew", REPORT), tmp_path / "back.bin")
    back = torch.load(tmp_path / "back.bin", weights_only=True)
    assert set(back) == set(state)
    for key, tensor in back.items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if "q_dense" in key else state[key]), key
    to_ours(tmp_path / "back.bin", tmp_path / "again")


@pytest.mark.parametrize("name", ["VQA", "VCR", "RefCOCO+", "retrieval", "12-in-1, VQA"])
def test_without_the_report_a_fine_tuned_file_has_the_heads_of_its_task_alone(converted, tmp_path, name):
    _, folder, report = converted(name)
    to_theirs(copy(folder, tmp_path / "anew", REPORT), tmp_path / "back.bin")
    back = torch.load(tmp_path / "back.bin", weights_only=True)
    dead = {key for key in back if "q_dense" in key}
    assert set(back) == {entry["theirs"] for entry in report if "kept" not in entry} | dead
    to_ours(tmp_path / "back.bin", tmp_path / "again", hints=HINTS.get(name, NO_HINTS))
    again, before = read_model(tmp_path / "again").model, read_model(folder).model
    assert again.keys() == before.keys()
    assert all(torch.equal(tensor, again[key]) for key, tensor in before.items())


def write_own(folder: Path, own: PublishedViLBert) -> None:
    """A model of our own, of zeros."""
    tensors = {name: torch.zeros(tensor.shape) for name, tensor in own.skeleton().items()}
    metadata = {"task": type(own.task).__name__, "settings": to_json(own.task), "num_classes": 1600}
    folder.mkdir()
    for name, data in model_files(tensors, own.model, len(WORDS), WORDS, metadata).items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"whole_image": "pooled"}, "their code has no such model: model.whole_image is pooled, theirs is mean"),
        ({"region_segment": True}, "model.region_segment is True, theirs is False"),
        ({"regions": TINY_MODEL.regions}, "it has nothing for vlbert.fast_rcnn."),
        ({"pooler": "tanh"}, "model.pooler is tanh, theirs is product"),
        ({"layers": "TTXV", "region_hidden_size": None}, None),
    ],
)
def test_a_model_that_their_code_cannot_have_is_not_written_as_theirs(converted, tmp_path, changes, named):
    saved = read_model(converted("encoder alone")[1])
    model = dataclasses.replace(saved.model_config, **changes)
    write_own(
        tmp_path / "ours", PublishedViLBert(PublishedViLBert.understand(vilbert_shapes()).task, model, len(WORDS))
    )
    if named is None:
        to_theirs(tmp_path / "ours", tmp_path / "back.bin")
        return
    with pytest.raises(ValueError, match=named):
        to_theirs(tmp_path / "ours", tmp_path / "back.bin")


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (
            VQASettings(reads="pair", classifier="linear", answers_from_words=False, question_length=20),
            "nothing for head.",
        ),
        (VQASettings(question_length=20), "it has nothing for head.transform.dense.weight"),
        (VCRSettings(pooled=False, instance_masks=False, max_tokens=20, region_loss="none"), "alone has head.pooler"),
        (RefCOCOSettings(regions="detected"), "it has nothing for head.transform.dense.weight"),
    ],
)
def test_a_head_that_their_code_cannot_have_is_not_written_as_theirs(converted, tmp_path, task, named):
    model = read_model(converted("encoder alone")[1]).model_config
    write_own(tmp_path / "ours", PublishedViLBert(task, model, len(WORDS)))
    with pytest.raises(ValueError, match=f"their code has no such model: .*{named}"):
        to_theirs(tmp_path / "ours", tmp_path / "back.bin")


# --- what is done with it ---------------------------------------------------------------------------------------------


def recipe_from(folder: Path, **changes: object) -> Recipe:
    start = read_model(folder)
    model = dataclasses.replace(start.model_config, **changes)
    settings = PretrainingSettings(relationship=True, region_head="transform_norm")
    return Recipe(name="pretrain", task=settings, model=model, init_from=str(folder))


@pytest.mark.parametrize("name", ["6 layers", "encoder alone"])
def test_a_run_starts_from_it(converted, name):
    _, folder, _ = converted(name)
    recipe, lines = recipe_from(folder), []
    task = make_task(recipe.task, WORDS, 1600)
    started = make_model(recipe, task, WORDS, read_model(folder), None, lines.append).state_dict()
    saved = read_model(folder).model
    taken = [key for key in started if name == "6 layers" or key.startswith("vlbert.")]
    assert all(torch.equal(started[key], saved[key]) for key in taken)
    assert lines == [f"VL-BERT from {folder}, of its head {'all' if name == '6 layers' else 'nothing'}"]


def test_another_architecture_is_refused_by_name(converted):
    _, folder, _ = converted("6 layers")
    recipe = recipe_from(folder, layers="T" * 4 + "XTV" * 8)
    task = make_task(recipe.task, WORDS, 1600)
    with pytest.raises(ValueError, match="has another architecture than recipe pretrain: model.layers is TTTTTTXTV"):
        make_model(recipe, task, WORDS, read_model(folder), None, print)


def test_the_command_prints_what_became_of_each_key(tmp_path, monkeypatch, capsys):
    def command(*arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["vlbert convert", *map(str, arguments)])
        main()
        return capsys.readouterr().out.splitlines()

    torch.save(vilbert_state(pairs=2), tmp_path / "released.bin")
    lines = command(tmp_path / "released.bin", tmp_path / "ours", "--num_heads", "1", "2", "4")
    assert f"{DECODER} -> repeats {WORD_TABLE}" in lines
    assert f"{DEAD.replace('.2.', '.1.')} -> not in our model: kept in published.safetensors" in lines
    assert lines[-1].endswith(f"ours: {len(vilbert_shapes(pairs=2))} keys")
    assert read_model(tmp_path / "ours").model_config.coattention_num_heads == 4
    assert lines[:-1] == command(tmp_path / "ours", tmp_path / "back.bin")[:-1]
    anew = command(copy(tmp_path / "ours", tmp_path / "anew", REPORT), tmp_path / "anew.bin")
    assert f"{DEAD.replace('.2.', '.1.')} -> not in our model: zeros" in anew
    with pytest.raises(SystemExit):
        command(tmp_path / "released.bin", tmp_path / "other", "--num_heads", "twelve")
    assert "twelve" in capsys.readouterr().err
