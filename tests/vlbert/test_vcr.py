"""VCR's task: questions and choices as text, regions, losses, predictions, a user's own questions."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family import changed, examples_of, new_model
from hypothesis import given
from hypothesis import strategies as st
from tiny import SEPARATE, TINY_MODEL, tiny_sample, urls
from vcr_files import BOXES, WORDS, write_vcr

from vlbert.data.batch import Example, collate
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import Vocabulary
from vlbert.model.vlbert import Encoded
from vlbert.tasks.vcr import VCR, VCRSettings
from vlbert.tasks.vcr_text import PEOPLE, truncate


@pytest.fixture
def samples() -> list:
    return [tiny_sample(i) for i in range(3)]


@pytest.fixture
def task(tmp_path, samples) -> VCR:
    """A person is called person, so that texts do not depend on a random choice of names; res5 has 2 x 2 cells."""
    write_vcr(tmp_path, samples)
    return VCR(VCRSettings(str(tmp_path), names="class", mask_size=2, max_tokens=40), WORDS, 8)


def first(task: VCR, samples: list, split: str | None = None, **given: Any) -> Example:
    return examples_of(task, samples, split=split, **given)[0]


def texts(example: Example) -> list[str]:
    return [WORDS.decode(text.tokens) for text in example.texts]


def right(example: Example) -> list[bool]:
    return [bool(label) for text in example.texts for label in text.labels["right"]]


ANSWERS = ["no", "person is nearby", "the dog", "person"]
QUESTION = "[CLS] why is person and dog holding cup ?"


def test_the_choices_of_a_question_are_four_texts_about_one_image(task, samples):
    example = first(task, samples)
    assert texts(example) == [f"{QUESTION} [SEP] {choice} [SEP]" for choice in ANSWERS]
    assert right(example) == [False, False, True, False]
    assert example.texts[1].segments.tolist() == [0] * 11 + [1] * 5
    # A name carries the visual feature embedding of its object, region number + 1; all other tokens, `and` too, that of
    # the whole image.
    assert example.texts[1].token_region.tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 4, 0, 0, 3, 0, 0, 0, 0]
    expected = {"annot_id": "a-0", "subtask": "answer", "conditioned_on": -1, "label": 2}
    assert {name: example.metadata[name] for name in expected} == expected


def test_a_long_choice_shortens_the_question_of_all_rows_or_of_its_own(task, samples):
    for truncation, expected in (("shared", [5, 5, 5, 5]), ("each", [8, 5, 7, 8])):
        cut = first(changed(task, truncation=truncation, max_tokens=9), samples)
        assert [text.segments.tolist().count(0) - 2 for text in cut.texts] == expected


def tagged(tokens: int, region: int) -> np.ndarray:
    return np.stack([100 * region + np.arange(tokens), np.full(tokens, region)])


@given(
    question=st.integers(1, 20),
    answer=st.integers(0, 20),
    choices=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    limit=st.integers(4, 40),
)
def test_truncation_is_that_of_the_published_loop(question, answer, choices, limit):
    """The published code, word for word: lists that lose their last token, joined to rows at the end."""
    context = [tagged(question, 1), *([tagged(answer, 2)] if answer else [])]
    offered = [tagged(count, 3 + i) for i, count in enumerate(choices)]
    parts, loop = ([[*zip(*one, strict=True)] for one in some] for some in (context, offered))
    for text in loop:
        while sum(map(len, parts)) + len(text) > limit:
            if len(text) > sum(map(len, parts)):
                text.pop()
            elif len(parts[0]) > 1 or len(parts) == 1:
                parts[0].pop()
            else:
                parts[1].pop()
    shared = truncate(context, offered, limit, shared=True)
    rows = [tuple([*zip(*part, strict=True)] for part in row) for row in shared]
    assert rows == [(sum(parts, []), text) for text in loop]
    each = truncate(context, offered, limit, shared=False)
    alone = [truncate(context, [choice], limit, shared=True)[0] for choice in offered]
    for row, other in zip(each, alone, strict=True):
        assert [len(part[0]) for part in row] == [len(part[0]) for part in other], "each as if it were the only one"


def test_the_texts_of_a_mirrored_image_have_their_sides_swapped_or_not(task, samples, tmp_path):
    file = tmp_path / "val.jsonl"
    file.write_text(file.read_text().replace('"holding"', '"Left"'))
    words = Vocabulary([*WORDS.tokens, "left", "right"])
    for swapped, side in ((True, "right"), (False, "left")):
        one = VCR(dataclasses.replace(task.settings, swap_left_right=swapped), words, 8)
        straight, mirrored = (first(one, samples, "val", flip=flip) for flip in (False, True))
        assert "Left" in mirrored.metadata["question"], "a prediction has the text of the file"
        before, after = (words.decode(found.text.tokens) for found in (straight, mirrored))
        assert after == before.replace("left", side) != before.replace("left", "")


def names_in(example: Example) -> list[str]:
    return [word for word in texts(example)[1].split() if word in PEOPLE]


def test_people_get_names_in_turn_and_held_out_the_same_for_an_image(task, samples, tmp_path):
    neutral = changed(task, names="neutral")
    found = [names_in(first(neutral, samples, seed=seed)) for seed in range(12)]
    for person, another in found:
        assert PEOPLE[(PEOPLE.index(person) + 1) % len(PEOPLE)] == another, "the next person gets the next name"
    assert len({person for person, _ in found}) > 3
    assert "dog" in texts(first(neutral, samples))[1]
    expected = names_in(first(neutral, samples, "val", seed=1))
    for example in examples_of(changed(neutral, subtask="rationale"), samples, split="val", seed=2):
        assert set(names_in(example)) <= set(expected)
    renamed = [dataclasses.replace(sample, key=f"other-{i}") for i, sample in enumerate(samples)]
    assert names_in(first(neutral, renamed, "val", seed=5)) == expected
    several = [dataclasses.replace(samples[2], url=f"http://example.org/{i:06d}.jpg") for i in range(12)]
    write_vcr(tmp_path, several)
    (tmp_path / "val.jsonl").write_text((tmp_path / "train.jsonl").read_text())
    assert len({names_in(example)[0] for example in examples_of(neutral, several, split="val")}) > 2, "of other images"


@pytest.mark.parametrize("scale", [1, 2.5])
def test_the_regions_are_the_annotated_objects_with_their_masks_mirrored_or_not(task, samples, tmp_path, scale):
    write_vcr(tmp_path, samples, scale)
    image = first(task, samples).image
    assert image.boxes.tolist() == [[0, 0, 95, 63], *BOXES]
    assert image.classes.tolist() == [0, 1, 17, 1, 42], "COCO's, from 1"
    assert not image.masked.any()
    assert first(task, samples, flip=True).image.boxes[1].tolist() == [75, 0, 95, 40]
    (row,) = rows_for(task, examples_of(task, samples, split="val"), [[0.0, 0, 0, 1]])
    assert [box["box"] for box in row["boxes"]] == BOXES, "in pixels of the stored image"
    cells = first(changed(task, mask_size=14), samples).image.cells
    assert cells[0].all(), "of the whole image"
    assert cells[1][0, :13].all(), "the triangle's upper edge"
    assert cells[1][:13, 0].all(), "and its left one"
    assert not cells[1][8:, 8:].any()
    np.testing.assert_array_equal(first(changed(task, mask_size=14), samples, flip=True).image.cells, cells[:, :, ::-1])
    assert first(changed(task, instance_masks=False), samples).image.cells is None


def test_a_share_of_the_regions_is_masked_and_labelled_in_training_alone(task, samples):
    masking = changed(task, masked_regions=0.5)
    found = [first(masking, samples, seed=seed).image for seed in range(40)]
    assert 0.35 < np.mean([image.masked[1:] for image in found]) < 0.65
    for image in found:
        assert not image.masked[0], "the whole image is never masked"
        np.testing.assert_array_equal(image.label_masks["region_label_mask"], image.masked)
    every = changed(task, masked_regions=1.0)
    assert not first(every, samples, "val").image.masked.any()
    assert new_model(every)(collate(examples_of(every, samples)))["regions"][1] == 2 * 4 * 4


@pytest.mark.parametrize(
    ("settings", "answers", "regions"),
    [
        ({}, 8, 40),  # unmasked: four objects and the whole image, four texts, two images
        ({"loss": "softmax", "pooled": False, "mention_visual_embedding": "image", "instance_masks": False}, 2, 40),
        ({"classifier": "two_layers", "region_loss": "appearance"}, 8, 10),
        ({"region_loss": "appearance", "masked_regions": 0.5}, 8, None),
        ({"region_loss": "none", "subtask": "rationale"}, 8, 0),
    ],
)
def test_losses_are_finite_and_train_the_whole_head(task, samples, settings, answers, regions):
    task = changed(task, **settings)
    model, batch = new_model(task), collate(examples_of(task, samples))
    losses = model(batch)
    assert losses["answers"][1] == answers
    if regions is None:
        regions = int(batch.region_masked[batch.image_rows].sum())
    assert losses.get("regions", (0, 0))[1] == regions
    assert all(torch.isfinite(loss) for loss, _ in losses.values())
    sum(loss for loss, _ in losses.values()).backward()
    assert all(parameter.grad is not None for parameter in model.head.parameters())


# A head that scores a text by the first channel of its first token; a region's channels are its classes.
FIRST = SimpleNamespace(scores=lambda text, regions: text[:, 0, :1], classes=lambda regions: regions)


def test_the_answer_losses_are_those_of_their_names(task, samples):
    batch = collate(examples_of(task, samples))
    scores = torch.tensor([[3.0, -1, 0, 1], [0, 0, 2, 0]])
    encoded, alone = with_scores(scores.tolist()), changed(task, region_loss="none")
    loss, count = alone.losses(None, FIRST, encoded, batch)["answers"]
    label = torch.tensor([[0.0, 0, 1, 0], [0, 0, 1, 0]])
    assert float(loss / count) == pytest.approx(float(torch.nn.BCEWithLogitsLoss()(scores, label)))
    loss, count = changed(alone, loss="softmax").losses(None, FIRST, encoded, batch)["answers"]
    assert float(loss / count) == pytest.approx(float(torch.nn.CrossEntropyLoss()(scores, torch.tensor([2, 2]))))
    assert tuple(map(int, alone.losses(None, FIRST, encoded, batch)["accuracy"])) == (1, 2)
    rows = task.predictions(None, FIRST, encoded, batch)
    assert [(row["annot_id"], row["score"], row["label"]) for row in rows] == [("a-0", 0, 2), ("a-1", 1, 2)]
    assert rows[0]["probabilities"] == pytest.approx(scores[0].softmax(0).tolist())
    assert task.metrics(rows) == {"answer_accuracy": 0.5, "chance": 0.25}


def test_segment_b_starts_as_segment_a_from_a_pretrained_model_alone(task):
    starts = [({}, "PretrainingSettings", True), ({}, "VCRSettings", False), ({}, None, False)]
    for settings, init_from, copies in [*starts, ({"copies_segment": False}, "PretrainingSettings", False)]:
        model = new_model(changed(task, **settings))
        weight = model.vlbert.embedding.segments.weight
        before = weight.detach().clone()
        model.task.on_start(model.vlbert, model.head, init_from)
        assert torch.equal(weight, before[[0, 0 if copies else 1, 2]])


def without_labels(folder: Path, split: str, of: str) -> None:
    lines = (folder / f"{of}.jsonl").read_text().splitlines()
    items = [{name: value for name, value in json.loads(line).items() if "label" not in name} for line in lines]
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


def test_examples_without_labels_add_no_loss(task, samples, tmp_path):
    without_labels(tmp_path, "test", of="val")
    one = changed(task, loss="softmax", region_loss="appearance")
    model = new_model(one, dataclasses.replace(TINY_MODEL, dropout=0.0))
    labelled, unlabelled = first(one, samples), first(one, samples, "test")
    expected, found = model(collate([labelled])), model(collate([unlabelled, labelled]))
    assert expected.keys() == found.keys()
    for name, (loss, count) in expected.items():
        assert found[name][1] == count
        assert found[name][0].detach() == pytest.approx(float(loss.detach()), rel=1e-4)
    assert all(count == 0 for _, count in model(collate([unlabelled])).values())


def with_scores(scores: list[list[float]]) -> Encoded:
    """Return encoder outputs from which FIRST computes these scores of each example's choices."""
    return Encoded(torch.tensor(scores).view(-1, 1, 1).expand(-1, 5, 1), torch.zeros(8, 5, 1), torch.zeros(0))


def rows_for(task: VCR, examples: list[Example], scores: list[list[float]]) -> list[dict]:
    return task.predictions(None, FIRST, with_scores(scores), collate(examples))


def test_rationales_are_for_the_right_answer_or_where_that_is_unknown_for_each(task, samples, tmp_path):
    rationales = changed(task, subtask="rationale")
    (known,) = examples_of(rationales, samples, split="val")
    assert (known.metadata["conditioned_on"], known.metadata["label"]) == (2, 0)
    assert right(known) == [True, False, False, False]
    assert known.text.token_region.tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 4, 0, 0, 2, 0, 0, 2, 0, 0, 0, 0]
    without_labels(tmp_path, "test", of="val")
    found = examples_of(rationales, samples, split="test")
    assert [example.metadata["conditioned_on"] for example in found] == [0, 1, 2, 3]
    for example, answer in zip(found, ANSWERS, strict=True):
        assert texts(example)[1] == f"{QUESTION} {answer} [SEP] no [SEP]"
        assert (example.metadata["label"], right(example)) == (None, [])
    example = first(task, samples, "test")
    assert (example.metadata["label"], texts(example)) == (None, texts(first(task, samples, "val")))


def test_a_row_has_question_and_answers_in_words(task, samples):
    examples = examples_of(changed(task, subtask="rationale", names="neutral"), samples, split="val")
    (row,) = rows_for(task, examples, [[1.0, 3, 3, 2]])
    assert row["question"] == "Why is person 1 and dog 2 holding cup 4? the dog 2"
    assert (row["answer"], row["ground_truth"], row["score"], row["label"]) == ("no", "because dog 2 is nearby", 0.0, 0)
    assert [one["answer"] for one in row["ranking"]] == ["no", "no no", "because", "because dog 2 is nearby"]
    assert [one["probability"] for one in row["ranking"]] == sorted(row["probabilities"], reverse=True)
    assert row["probability"] == max(row["probabilities"])
    assert (row["annot_id"], row["split"], row["subtask"], row["conditioned_on"]) == ("a-2", "val", "rationale", 2)
    mentioned = [(box["name"], box["region"]) for box in row["boxes"]]
    assert mentioned == [("person 1", 1), ("dog 2", 2), ("cup 4", 4)], "person 3 is not mentioned"


def test_two_joined_runs_give_three_accuracies(task, samples):
    def joined(**likeliest: list[int]) -> list[dict]:
        """The rows of both runs, where these choices of each question are the likeliest."""
        rows = []
        for subtask, chosen in likeliest.items():
            run = changed(task, subtask=subtask)
            scores = [[2.0 * (i == one) for i in range(4)] for one in chosen]
            rows += rows_for(run, examples_of(run, samples, split="train"), scores)
        return rows

    rows = joined(answer=[2, 2], rationale=[0, 3])  # answer 2, rationale 0 are right
    accuracies = {"answer_accuracy": 1.0, "rationale_accuracy": 0.5, "joint_accuracy": 0.5}
    assert task.metrics(rows) == accuracies | {"joint_chance": 0.0625, "chance": 0.25}
    assert task.metrics(joined(answer=[2, 1], rationale=[1, 0]))["joint_accuracy"] == 0
    assert task.metrics(rows[2:]) == {"rationale_accuracy": 0.5, "chance": 0.25}
    one_missing = [row for row in rows if (row["annot_id"], row["subtask"]) != ("a-1", "answer")]
    assert task.metrics(one_missing)["joint_accuracy"] == 1, "of the items with both"


def test_invalid_items_are_skipped_in_training_and_answered_when_held_out(task, samples, tmp_path):
    one, another = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    wordless = one.replace('["no"], [[2]', '[" ", []], [[2]')
    (tmp_path / "train.jsonl").write_text(wordless + another)
    found = task.examples(urls(samples), None)
    assert found.samples.tolist() == [1]
    assert found.skipped[0].endswith("train.jsonl line 1: it has no word in its answer_choices[0]")
    (tmp_path / "odd.jsonl").write_text(wordless)
    found = task.examples(urls(samples), "odd")
    assert (len(found), found.skipped, len(found.invalid)) == (1, (), 1)
    assert texts(first(task, samples, "odd"))[0].endswith("holding cup ? [SEP] [SEP]")
    without_labels(tmp_path, "test", of="val")
    both = changed(task, train_on=("train", "test")).examples(urls(samples), None)
    assert (both.samples.tolist(), len(both.skipped)) == ([1], 2)
    with pytest.raises(ValueError, match="none of the 1 examples of test of .*test.jsonl line 1: it has no labels"):
        changed(task, train_on=("test",)).examples(urls(samples), None)


def own(task: VCR, sample: object, *question: object) -> Example:
    image = prepare_image(sample, TINY_MODEL.regions, False)
    return task.example(sample, image, task.annotation_for(*question), np.random.default_rng(0))


def test_a_users_question_is_about_the_regions_of_the_sample(task):
    """Beside tests/vlbert/test_predict.py: several regions in one place, and a region fills its box."""
    sample, words = tiny_sample(7, regions=3), Vocabulary([*WORDS.tokens, "object"])
    neutral = VCR(dataclasses.replace(task.settings, names="neutral"), words, 8)
    example = own(neutral, sample, "Why is [1] near [2, 3]?", ["no", "[3] is", "the [2]", "no"])
    question = "[CLS] why is object near object and object ? [SEP]"
    assert words.decode(example.texts[1].tokens) == f"{question} object is [SEP]"
    assert example.texts[1].token_region.tolist() == [0, 0, 0, 1, 0, 2, 0, 3, 0, 0, 3, 0, 0]
    assert example.image.cells.all()
    (row,) = rows_for(neutral, [example], [[0.0, 0, 5, 1]])
    assert row["question"] == "Why is object 1 near object 2 and object 3?"
    assert (row["answer"], row["ground_truth"], len(row["boxes"])) == ("the object 2", None, 3)


FOUR = ["no"] * 4


@pytest.mark.parametrize(
    ("settings", "given", "named"),
    [
        ({"mask_size": 14}, TINY_MODEL, "task.mask_size is 14, but res5 has 2 x 2 cells; set it to 2"),
        ({"max_tokens": 60}, TINY_MODEL, "task.max_tokens is 60, the model has positions for 59"),
        ({}, SEPARATE, "set --task.no_instance_masks --task.masked_regions=0"),
        ({"region_loss": "none", "detected_regions": True}, TINY_MODEL, "task.detected_regions needs precomputed"),
        ({}, ("why?", FOUR[:3]), "3 choices are given; give 4"),
        ({}, ("why?", FOUR, "no"), "this model chooses answers; give no answer"),
        ({"subtask": "rationale"}, ("why?", FOUR), "this model chooses rationales; give the answer that they are for"),
        ({}, ("why is [3]?", FOUR), "the text mentions region 3; the image has 2, from 1"),
        ({}, ("why is [0]?", FOUR), r"'\[0\]' in 'why is \[0\]\?' names no region; write numbers, from 1"),
        ({}, ("why? " * 600, FOUR), "1200 tokens before the choices and 1 in the longest choice exceed"),
    ],
)
def test_settings_and_users_questions_that_do_not_fit_are_refused(task, settings, given, named):
    other = changed(task, **settings)
    with pytest.raises(ValueError, match=named):
        own(other, tiny_sample(7, regions=2), *given) if isinstance(given, tuple) else other.head(given)
    changed(task, max_tokens=59, mask_size=14, instance_masks=False).head(TINY_MODEL)
