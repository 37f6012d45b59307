"""Every task on every architecture, what tasks read of ViLBERT and Unicoder-VL, and their authors' reader."""

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from family import MODELS, SAMPLES, TASKS, examples_of, new_model, pretraining, refcoco, vcr, vqa
from places import DATA
from tiny import CHANNELS, CLASSES, UNICODER_VL, VILBERT

from storage.sample import Sample
from vlbert.config import ModelConfig
from vlbert.data.batch import collate
from vlbert.data.images import PreparedImage, prepare_image
from vlbert.data.masking import WordMasking
from vlbert.data.vocabulary import Vocabulary
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings


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


# --- RefCOCO+ ---------------------------------------------------------------------------------------------------------


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


def test_berts_learning_rate_is_that_of_the_text_layers_alone(tmp_path):
    task, _ = pretraining(tmp_path)
    names = new_model(task, VILBERT).bert_parameters
    assert [int(name.split(".")[3]) for name in names if ".layers." in name] == [0, 2], "T of TXTVX"
    assert all(name.startswith(("vlbert.embedding.", "vlbert.encoder.")) for name in names), "no head"
