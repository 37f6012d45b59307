"""Every task on every architecture, what tasks read of ViLBERT and Unicoder-VL, and their authors' reader."""

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from family import CAPTION_WORDS, MODELS, SAMPLES, TASKS, examples_of, new_model, pretraining, refcoco, vcr, vqa
from places import DATA
from tiny import CHANNELS, CLASSES, TINY_MODEL, UNICODER_VL, VILBERT

from storage.sample import Sample
from training.optimizer import make_optimizer
from vlbert.config import ModelConfig
from vlbert.data.batch import collate
from vlbert.data.images import PreparedImage, prepare_image
from vlbert.data.masking import WordMasking
from vlbert.data.vocabulary import Vocabulary
from vlbert.model.heads import Pooler
from vlbert.published.vilbert import map_names, map_task_names
from vlbert.recipes.vilbert import finetune_refcoco_vilbert, pretrain_vilbert
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.tasks.refcoco import RefCOCO
from vlbert.tasks.vcr import VCRHead, VCRSettings


def with_boxes(boxes: np.ndarray, size: tuple[int, int], caption: str, features: np.ndarray) -> Sample:
    count = len(boxes)
    regions = dataclasses.replace(
        SAMPLES[0].regions,
        boxes=boxes,
        scores=np.ones(count, np.float32),
        labels=np.ones(count, np.int32),
        class_probs=np.full((count, 1 + len(CLASSES)), 0.1, np.float16),
        features=features,
    )
    return dataclasses.replace(SAMPLES[0], caption=caption, width=size[0], height=size[1], regions=regions)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_every_task_trains_and_predicts_on_every_architecture(tmp_path, make: Callable, config: ModelConfig):
    task, samples = make(tmp_path)
    model, examples = new_model(task, config), examples_of(task, samples, config)
    losses = model(collate(examples))
    learned = [loss / max(1, count) for loss, count in losses.values() if loss.requires_grad]
    assert torch.isfinite(sum(learned))
    sum(learned).backward()
    without = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    assert without == []
    rows = model.eval().predict(collate(examples))
    assert [row["key"] for row in rows] == [example.key for example in examples]
    for example, row in zip(examples, rows, strict=True):
        (alone,) = model.predict(collate([example]))
        assert alone["probability"] == pytest.approx(row["probability"], abs=1e-5), "padding or another row changed it"


def test_an_answer_that_is_read_from_the_pair_has_no_mask(tmp_path):
    task, samples = vqa(tmp_path)
    for example in examples_of(task, samples, VILBERT):
        words = [task.vocabulary.tokens[token] for token in example.text.tokens]
        assert (words[0], words[-1], "[MASK]" in words) == ("[CLS]", "[SEP]", False)
    with pytest.raises(ValueError, match="answers_from_words is True; it must be false if reads is pair"):
        dataclasses.replace(task.settings, answers_from_words=True)


# --- precomputed features of VCR's objects ----------------------------------------------------------------------------


def test_objects_have_the_detected_regions_behind_them_that_none_took():
    """Two objects, the second overlaps nothing, among five regions."""
    boxes = np.array([[10 * i, 0, 10 * i + 8, 8] for i in range(5)], np.float32)
    features = np.arange(5)[:, None].repeat(CHANNELS, 1).astype(np.float32)
    whole = np.array([[0, 0, 95, 63]], np.float32)
    image = PreparedImage((96, 64), np.concatenate([whole, boxes]), (1.0, 1.0), False, None, features)
    objects = np.array([boxes[3], [80, 50, 90, 60]])
    found = image.with_matched_features(objects, keep_unmatched=True)
    assert found.features[:, 0].tolist() == [3, 0, 0, 1, 2], "three more, so that there are five"
    np.testing.assert_array_equal(found.boxes[3:], boxes[:3])
    assert len(image.with_matched_features(objects, keep_unmatched=False).boxes) == 3
    with pytest.raises(ValueError, match="no region whose features an object could take"):
        dataclasses.replace(image, boxes=whole, features=features[:0]).with_matched_features(objects, True)


def test_a_word_that_names_a_region_carries_its_embedding(tmp_path):
    task, samples = vcr(tmp_path)
    model = new_model(task, dataclasses.replace(UNICODER_VL, mentioned_regions=True)).eval().vlbert
    plain = new_model(task, UNICODER_VL).eval().vlbert
    batch = collate(examples_of(task, samples, UNICODER_VL)[:1])
    mentioned = batch.token_region > 0
    assert mentioned.any()
    with torch.no_grad():
        with_regions, without = (one.embedding(batch, one.appearance(batch)).text for one in (model, plain))
    changed = (with_regions - without).abs().amax(2) > 1e-4
    assert changed.tolist() == mentioned.tolist()


# --- the five numbers of a box ----------------------------------------------------------------------------------------


def five_numbers(boxes: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return the five numbers by the published formula: float32, of the stored image, no pixel added."""
    x1, y1, x2, y2 = boxes.astype(np.float32).T
    area = (x2 - x1) * (y2 - y1) / np.float32(width * height)
    return np.stack([x1 / width, y1 / height, x2 / width, y2 / height, area], axis=1)


def random_boxes(rng: np.random.Generator, count: int, width: int, height: int) -> np.ndarray:
    """Boxes inside an image; the first is all of it."""
    corners = np.sort(rng.uniform(0, 1, (count, 2, 2)), axis=1).reshape(count, 4) * [width, height, width, height]
    corners[:1] = [0, 0, width, height]
    return corners.astype(np.float32)


def read_locations(
    config: ModelConfig, task: Pretraining, samples: list[Sample], flip: bool = False
) -> list[np.ndarray]:
    """Return the input of the location layer, by sample."""
    rngs = [np.random.default_rng(number) for number in range(len(samples))]
    images = [prepare_image(sample, config.regions, flip) for sample in samples]
    batch = collate([task.example(*one, None, rng) for *one, rng in zip(samples, images, rngs, strict=True)])
    model, seen = new_model(task, config).vlbert, []
    model.embedding.location.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0].numpy()))
    model.embedding(batch, model.appearance(batch))
    return np.split(seen[0], np.cumsum([1 + len(sample.regions) for sample in samples])[:-1])


@pytest.mark.parametrize("flip", [False, True])
def test_the_five_numbers_of_a_box_are_those_of_the_stored_image(flip: bool):
    task, _ = pretraining(None, max_elements=None)
    rng, sizes = np.random.default_rng(0), [(640, 480), (333, 500), (1024, 683), (37, 900), (96, 64)]
    sizes += [(int(w), int(h)) for w, h in rng.integers(20, 1025, (15, 2))]
    boxes = [random_boxes(rng, 200, *size) for size in sizes]
    features = np.zeros((200, CHANNELS), np.float16)
    samples = [with_boxes(some, size, "a red", features) for some, size in zip(boxes, sizes, strict=True)]
    wide = dataclasses.replace(UNICODER_VL.regions, short_side=600, long_side=1000)
    for config in (UNICODER_VL, VILBERT):
        found = read_locations(dataclasses.replace(config, regions=wide), task, samples, flip)
        for mine, some, (width, height) in zip(found, boxes, sizes, strict=True):
            if flip:
                some = np.stack([width - some[:, 2], some[:, 1], width - some[:, 0], some[:, 3]], axis=1)
            np.testing.assert_array_equal(mine[:2], [[0, 0, 1, 1, 1]] * 2, "the whole image, and a region as large")
            np.testing.assert_array_equal(mine[1:], five_numbers(some, width, height))


def test_the_five_numbers_of_a_box_are_the_same_where_pixels_are_read():
    task, _ = pretraining(None)
    boxes = np.array([[0, 0, 96, 64], [8.5, 0, 96, 31.25]], np.float32)
    sample = with_boxes(boxes, (96, 64), "a red", np.zeros((2, CHANNELS), np.float16))
    config = dataclasses.replace(TINY_MODEL.regions, short_side=51, long_side=77)
    (found,) = read_locations(dataclasses.replace(MODELS["vilbert end to end"], regions=config), task, [sample])
    np.testing.assert_allclose(found[1:], five_numbers(boxes, 96, 64), rtol=3e-7)
    image = prepare_image(sample, dataclasses.replace(UNICODER_VL.regions, short_side=51), False)
    np.testing.assert_array_equal(five_numbers(image.place(boxes), *image.size), five_numbers(boxes, 96, 64))


@pytest.mark.parametrize("model", ["unicoder-vl", "vilbert end to end"])
def test_objects_of_vcr_have_the_five_numbers_of_their_own_boxes(tmp_path, model: str):
    config = MODELS[model]
    task, samples = vcr(tmp_path, region_loss="none", detected_regions=config.regions.features == "precomputed")
    regions = dataclasses.replace(config.regions, short_side=51, long_side=77)
    size_of = {sample.key: (sample.width, sample.height) for sample in samples}
    for example in examples_of(task, samples, dataclasses.replace(config, regions=regions)):
        objects = example.metadata["boxes"]
        found = example.image.boxes[[one["region"] for one in objects]]
        boxes = np.array([one["box"] for one in objects]).reshape(-1, 4)
        assert len(objects)
        found = five_numbers(found, *example.image.size)
        np.testing.assert_allclose(found, five_numbers(boxes, *size_of[example.key]), rtol=3e-7)


# --- RefCOCO+ ---------------------------------------------------------------------------------------------------------


def plus_one_iou(boxes: np.ndarray, box: np.ndarray) -> np.ndarray:
    """A box holds the pixels at its x2 and y2, as the reference tells."""
    width = (np.minimum(boxes[:, 2], box[2]) - np.maximum(boxes[:, 0], box[0]) + 1).clip(0)
    height = (np.minimum(boxes[:, 3], box[3]) - np.maximum(boxes[:, 1], box[1]) + 1).clip(0)
    areas = [(b[..., 2] - b[..., 0] + 1) * (b[..., 3] - b[..., 1] + 1) for b in (boxes, box)]
    return width * height / (areas[0] + areas[1] - width * height)


def soft_targets(boxes: np.ndarray, size: tuple[int, int], answer: np.ndarray, shipped: int = 1) -> np.ndarray:
    """The targets that our task gives the whole image and the regions, with the settings of ViLBERT's recipe.

    The data set's own image is `shipped` times as large as the stored one.
    """
    task = RefCOCO(finetune_refcoco_vilbert().task, CAPTION_WORDS, len(CLASSES))
    query = task.annotation_for("red")
    box = {"box": tuple((answer * shipped).tolist()), "image_size": (size[0] * shipped, size[1] * shipped)}
    query = dataclasses.replace(query, expression=dataclasses.replace(query.expression, **box))
    sample = with_boxes(boxes.astype(np.float32), size, "", np.zeros((len(boxes), CHANNELS), np.float16))
    regions = dataclasses.replace(UNICODER_VL.regions, short_side=600, long_side=1000)
    return task.example(sample, prepare_image(sample, regions, False), query, None).image.labels["target"]


def test_soft_targets_are_measured_in_the_stored_image_and_kept_at_one_half():
    box, answer = np.array([[19.3, 271.9, 307.0, 281.3]]), np.array([11.5, 270.8, 314.5, 287.1])
    assert soft_targets(box, (333, 500), answer)[1] == pytest.approx(288.7 * 10.4 / (304 * 17.3), rel=1e-6)
    half, whole = np.array([[10, 10, 19, 14], [10, 10, 19, 13]]), np.array([10.0, 10, 19, 19])
    for shipped in (1, 4):
        assert soft_targets(half, (64, 48), whole, shipped).tolist() == [0, 0.5, 0]
    assert soft_targets(half, (20, 9), np.array([0.0, 0, 20, 9]))[0] == 1, "the whole image is 0 0 W H"
    rng, above = np.random.default_rng(0), 0
    for width, height in rng.integers(20, 1025, (60, 2)).tolist():
        answer = random_boxes(rng, 2, width, height)[1].astype(float)
        sides = np.array([width, height] * 2)
        boxes = np.clip(answer + rng.normal(0, 0.1, (60, 4)) * sides, 0, sides)
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2])
        boxes = boxes.astype(np.float32).astype(float)
        overlaps = plus_one_iou(np.concatenate([[[0, 0, width, height]], boxes]), answer)
        found = soft_targets(boxes, (width, height), answer)
        np.testing.assert_allclose(found, np.where(overlaps >= 0.5, overlaps, 0), rtol=1e-6)
        above += int((found > 0).sum())
    assert 500 < above < 3000, "of 3,660"


def test_a_region_is_asked_for_its_overlap_with_the_answer(tmp_path):
    """Against the figures of ViLBERT's reader."""
    case = np.load(DATA / "vilbert" / "components.npz")
    boxes, (x, y, width, height) = case["refcoco/boxes"], case["refcoco/ref_xywh"]
    size = (int(boxes[:, 2].max()) + 2, int(boxes[:, 3].max()) + 2)
    sample = with_boxes(boxes, size, "", np.zeros((len(boxes), CHANNELS), np.float16))
    task, _ = refcoco(tmp_path, whole_image_competes=True)
    (query,) = [task.annotation_for("the left one")]
    expression = dataclasses.replace(query.expression, box=(x, y, x + width, y + height))
    query = dataclasses.replace(query, expression=expression)
    regions = dataclasses.replace(UNICODER_VL.regions, short_side=min(size), long_side=max(size))
    image = prepare_image(sample, regions, False)
    found = task.example(sample, image, query, np.random.default_rng(0)).image.labels["target"][1:]
    np.testing.assert_allclose(found, case["refcoco/target_train"], atol=1e-6)


# --- pre-training: the authors' reader, draw by draw ------------------------------------------------------------------


class Replay:
    """The numbers that the published reader drew, in their order; a drawn word is always the same."""

    def __init__(self, draws: np.ndarray, word: int):
        self.draws, self.word = list(draws), word

    def random(self, size: int | None = None) -> float | np.ndarray:
        taken = [self.draws.pop(0) for _ in range(1 if size is None else size)]
        return taken[0] if size is None else np.array(taken)

    def choice(self, among: np.ndarray, size: int) -> np.ndarray:
        assert self.word in among
        return np.full(size, self.word)


@pytest.mark.parametrize("program", ["paper", "multi_task"])
@pytest.mark.parametrize("record", range(3))
def test_a_pair_is_read_as_the_published_programs_read_it(program: str, record: int):
    """Words, masks, labels, which regions are masked and labelled, and the divisor of the whole image's vector."""
    facts = json.loads((DATA / "vilbert" / "components.json").read_text())
    case = np.load(DATA / "vilbert" / "components.npz")
    theirs = {name.rpartition("/")[2]: case[name][record] for name in case if name.startswith(f"reading_{program}/")}
    vocabulary = Vocabulary(facts["vocabulary"])
    mismatched = bool(theirs["is_next"])
    caption = facts["captions_to_draw_from"][facts["drawn_caption"]] if mismatched else facts["captions"][record]
    count = int(theirs["counts"])
    boxes = theirs["boxes"][:count]
    features = np.arange(1, 1 + count)[:, None].repeat(CHANNELS, 1).astype(np.float16)
    sample = with_boxes(boxes, facts["size"], caption, features)
    task = Pretraining(
        PretrainingSettings(
            words=WordMasking(whole_words=False),
            max_elements=None,
            max_regions=facts["region_len"],
            caption_length=facts["seq_len"] - 2,
            relationship=True,
            mismatched=0.5,
            mean_over="not_overlapping" if program == "multi_task" else "regions",
        ),
        vocabulary,
        len(CLASSES),
    )
    draws = theirs["draws"].copy()
    if program == "multi_task":
        draws[0] = 1 - draws[0]  # it replaces the caption above one half, the first program below
    image = prepare_image(sample, UNICODER_VL.regions, False)
    found = task.example(sample, image, None, Replay(draws, vocabulary.tokens.index(facts["drawn_word"])))
    assert found.metadata["mismatched"] == mismatched
    length = int(theirs["input_mask"].sum())
    assert found.text.tokens.tolist() == theirs["input_ids"][:length].tolist()
    labelled = theirs["lm_label_ids"][:length] >= 0
    assert found.text.label_masks["word_label_mask"].tolist() == labelled.tolist()
    assert found.text.labels["words"].tolist() == theirs["lm_label_ids"][:length][labelled].tolist()
    assert found.image.label_masks["region_label_mask"][1:].tolist() == (theirs["image_label"][:count] == 1).tolist()
    assert found.image.masked[1:].tolist() == (theirs["image_feat"][1 : 1 + count] == 0).tolist()
    divisor = count if found.image.averaged_over is None else found.image.averaged_over
    seen = features[~found.image.masked[1:], 0].astype(float).sum()
    assert seen / divisor == pytest.approx(float(theirs["image_feat"][0]), rel=1e-5)
    if program == "multi_task":
        assert divisor == facts["region_len"] - int(theirs["overlapped"].sum())


def test_the_kl_divergence_is_the_cross_entropy_less_the_entropy_and_learns_the_same(tmp_path):
    losses, gradients = {}, {}
    for kind in ("cross_entropy", "kl"):
        task, samples = pretraining(tmp_path, region_loss=kind)
        model = new_model(task, VILBERT).eval()
        batch = collate(examples_of(task, samples, VILBERT))
        batch.labels["region_classes"] = batch.labels["region_classes"] * 0.7 + 0.3 / (1 + len(CLASSES))
        loss, count = model(batch)["regions"]
        loss.backward()
        losses[kind], gradients[kind] = loss.detach(), model.head.region_classifier.weight.grad
    labels = batch.labels["region_classes"].double()
    entropy = -(labels * labels.log()).sum()
    assert float(losses["cross_entropy"] - losses["kl"]) == pytest.approx(float(entropy), rel=1e-5)
    torch.testing.assert_close(gradients["kl"], gradients["cross_entropy"])
    assert count == len(labels)


def test_the_loss_of_regions_is_a_mean_over_candidates_or_of_the_rows_sums(tmp_path):
    found = {}
    for over in ("rows", "regions"):
        task, samples = refcoco(tmp_path, loss_over=over)
        batch = collate(examples_of(task, samples, VILBERT))
        found[over] = new_model(task, VILBERT).eval()(batch)["regions"]
    assert found["rows"][1] == len(batch)
    assert found["regions"][1] == len(batch.labelled["candidate"])
    torch.testing.assert_close(found["rows"][0], found["regions"][0])


THEIR_VECTORS = ("bias", "LayerNorm.bias", "LayerNorm.weight")  # names with one of these are no matrices to them


@pytest.mark.parametrize(("program", "classifier"), [("paper", "weight_norm"), ("multi_task", "gelu_norm")])
def test_what_decays_is_what_the_published_programs_tell_by_its_name(tmp_path, program: str, classifier: str):
    config, (task, _) = pretrain_vilbert(variant=program).optimizer, vqa(tmp_path, classifier=classifier)
    model = new_model(task, VILBERT)
    optimizer = make_optimizer(model, config)
    decayed = {id(p): bool(group["decay"]) for group in optimizer.param_groups for p in group["params"]}
    parameters, inverted, told = dict(model.named_parameters()), program == "paper", 0
    for theirs, ours in (map_names(VILBERT.layers) | map_task_names(task.settings)).items():
        if ours in parameters:
            vector = any(part in theirs for part in THEIR_VECTORS)
            assert decayed[id(parameters[ours])] == (vector if inverted else not vector), theirs
            told += 1
    assert told > 0.9 * len(parameters)


def test_the_recipes_of_vilbert_name_the_rules_of_its_two_programs():
    found = {variant: pretrain_vilbert(variant=variant) for variant in ("paper", "multi_task")}
    assert {name: recipe.optimizer.zero_update for name, recipe in found.items()} == {
        "paper": "first", "multi_task": "last",
    }  # fmt: skip
    assert {recipe.task.words.random_from for recipe in found.values()} == {"all"}


def test_poolers_are_multiplied_or_added():
    text, regions = torch.randn(2, 3, VILBERT.hidden_size), torch.randn(2, 4, VILBERT.region_hidden_size)
    for kind, fuse in (("product", torch.mul), ("sum", torch.add)):
        pooler = Pooler(dataclasses.replace(VILBERT, pooler=kind)).eval()
        both = pooler.dense(text[:, 0]).relu(), pooler.region_dense(regions[:, 0]).relu()
        assert torch.equal(pooler(text, regions), fuse(*both))
        score = VCRHead(dataclasses.replace(VILBERT, pooler=kind, dropout=0.1), VCRSettings()).score
        assert score.dropout.p == 0, "the pooler has the dropout"


def test_berts_learning_rate_is_that_of_the_text_layers_alone(tmp_path):
    task, _ = pretraining(tmp_path)
    names = new_model(task, VILBERT).bert_parameters
    assert [int(name.split(".")[3]) for name in names if ".layers." in name] == [0, 2], "T of TXTVX"
    assert all(name.startswith(("vlbert.embedding.", "vlbert.encoder.")) for name in names), "no head"
