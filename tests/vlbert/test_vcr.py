import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY_MODEL, commit_samples, tiny_recipe, tiny_sample
from vcr_files import BOXES, WORDS, urls, write_vcr

from training.distributed import World
from vlbert.config import DataConfig
from vlbert.data.batch import Batch, Example, collate
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets.vcr import CLASSES, hits, instance_mask, read_submission
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import TaskModel
from vlbert.tasks.vcr import VCR, VCRSettings
from vlbert.tasks.vcr_text import PEOPLE, truncate
from vlbert.train import train


@pytest.fixture
def samples() -> list:
    return [tiny_sample(i) for i in range(3)]


@pytest.fixture
def task(tmp_path, samples) -> VCR:
    """Persons are called persons, so that texts are the same whatever was drawn."""
    write_vcr(tmp_path / "vcr", samples)
    # The tiny model's res5 gives 2 x 2 cells.
    return VCR(VCRSettings(str(tmp_path / "vcr"), names="class", mask_size=2, max_tokens=40), WORDS, 8)


def changed(task: VCR, **settings: object) -> VCR:
    return VCR(dataclasses.replace(task.settings, **settings), WORDS, 8)


def asked(
    task: VCR, samples: list, number: int = 0, flip: bool = False, seed: int = 0, held_out: bool = False
) -> Example:
    questions = task.examples(urls(samples), "val" if held_out else None)
    sample = samples[questions.samples[number]]
    seen = prepare_image(sample, TINY_MODEL.regions, flip)
    return task.example(sample, seen, questions.annotations[number], np.random.default_rng(seed))


def batch_of(task: VCR, samples: list) -> Batch:
    return collate([asked(task, samples, number, seed=number) for number in range(2)])


def texts(example: Example) -> list[str]:
    return [WORDS.decode(words.tokens) for words in example.texts]


def test_the_choices_of_a_question_are_four_texts_about_one_picture(task, samples):
    example = asked(task, samples)
    question = "[CLS] why is person and dog holding cup ? [SEP]"
    choices = ["no", "person is nearby", "the dog", "person"]
    assert texts(example) == [f"{question} {choice} [SEP]" for choice in choices]
    assert [bool(words.labels["right"][0]) for words in example.texts] == [False, False, True, False]
    assert example.texts[1].segments.tolist() == [0] * 11 + [1] * 5
    # A name carries the look of its object, whose region is its number + 1; `and` and all else that of the whole image.
    assert example.texts[1].token_region.tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 4, 0, 0, 3, 0, 0, 0, 0]
    about = {name: example.metadata[name] for name in ("annot_id", "subtask", "conditioned_on", "label")}
    assert about == {"annot_id": "a-0", "subtask": "answer", "conditioned_on": -1, "label": 2}


def test_a_rationale_is_asked_for_behind_the_question_and_its_right_answer(task, samples):
    example = asked(changed(task, subtask="rationale"), samples)
    question = "[CLS] why is person and dog holding cup ? the dog [SEP]"
    choices = ["because dog is nearby", "no", "no no", "because"]
    assert texts(example) == [f"{question} {choice} [SEP]" for choice in choices]
    assert [bool(words.labels["right"][0]) for words in example.texts] == [True, False, False, False]
    assert example.text.token_region.tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 4, 0, 0, 2, 0, 0, 2, 0, 0, 0, 0]


def test_every_item_is_asked_about_its_own_picture(task, samples):
    questions = task.examples(urls(samples[::-1]), None)
    assert questions.samples.tolist() == [2, 1]
    assert [ask.item.annot_id for ask in questions.annotations] == ["a-0", "a-1"]
    assert task.examples(urls(samples), "val").samples.tolist() == [2]
    with pytest.raises(ValueError, match="1 of 2 images of .* are in no region shard, such as 000001.jpg"):
        task.examples(urls(samples[:1]), None)


def tagged(number_of_pieces: int, region: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(number_of_pieces), np.full(number_of_pieces, region)


@pytest.mark.parametrize(
    ("question", "answer", "choice", "left"),
    [
        (5, None, 5, (5, 5)),  # fits
        (9, None, 3, (7, 3)),  # the longer loses its end ...
        (3, None, 9, (3, 7)),  # ... whichever it is
        (4, 3, 6, (2, 3, 5)),  # 4 + 3 and 3 + 3 are no shorter than 6, 2 + 3 are
        (2, 9, 1, (1, 8, 1)),  # of the question one piece stays
        (1, 2, 20, (1, 2, 7)),
    ],
)
def test_what_is_too_long_loses_its_end(question, answer, choice, left):
    parts = [tagged(question, 1)] + ([tagged(answer, 2)] if answer else [])
    ((before, last),) = truncate(parts, [tagged(choice, 3)], 10, shared=True)
    assert (len(before[0]), len(last[0])) == (sum(left[:-1]), left[-1])
    of_parts = [(pieces[:size], regions[:size]) for (pieces, regions), size in zip(parts, left, strict=False)]
    for found, wanted in zip(before, zip(*of_parts, strict=True), strict=True):
        np.testing.assert_array_equal(found, np.concatenate(wanted))
    for found, whole in zip(last, tagged(choice, 3), strict=True):
        np.testing.assert_array_equal(found, whole[: left[-1]])
    ((before, last),) = truncate([tagged(6, 1)], [tagged(6, 3)], 9, shared=False)
    assert (len(before[0]), len(last[0])) == (4, 5), "of two as long the question is cut"


def lengths(rows: list) -> list[tuple[int, int]]:
    return [(len(before[0]), len(choice[0])) for before, choice in rows]


def test_one_long_choice_shortens_the_question_of_all_rows_or_its_own_alone():
    question, choices = [tagged(6, 1)], [tagged(2, 2), tagged(9, 3), tagged(4, 4), tagged(1, 5)]
    assert lengths(truncate(question, choices, 10, shared=False)) == [(6, 2), (5, 5), (6, 4), (6, 1)]
    assert lengths(truncate(question, choices, 10, shared=True)) == [(5, 2), (5, 5), (5, 4), (5, 1)]


@given(
    question=st.integers(1, 20),
    answer=st.integers(0, 20),
    choices=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    most=st.integers(4, 40),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_shared_question_is_what_four_loops_over_one_list_leave_of_it(question, answer, choices, most):
    """The description, word for word: lists that lose their last piece, and rows that are made at last."""
    parts = [list(range(question)), *([list(range(100, 100 + answer))] if answer else [])]
    texts = [list(range(200, 200 + count)) for count in choices]
    asked, offered = ([(np.array(text), np.zeros(len(text))) for text in some] for some in (parts, texts))
    found = truncate(asked, offered, most, shared=True)
    for text in texts:
        while sum(map(len, parts)) + len(text) > most:
            if len(text) > sum(map(len, parts)):
                text.pop()
            elif len(parts[0]) > 1 or len(parts) == 1:
                parts[0].pop()
            else:
                parts[1].pop()
    rows = [([*before[0].tolist()], choice[0].tolist()) for before, choice in found]
    assert rows == [(sum(parts, []), text) for text in texts]
    each = truncate(asked, offered, most, shared=False)
    alone = [truncate(asked, [choice], most, shared=True)[0] for choice in offered]
    assert lengths(each) == lengths(alone), "each as if it were the only one"


def test_a_recipe_says_whose_question_a_long_choice_shortens(task, samples):
    rows = {
        rule: [one.segments.tolist() for one in asked(changed(task, truncation=rule, max_tokens=9), samples).texts]
        for rule in ("shared", "each")
    }
    before = {rule: [segments.count(0) - 2 for segments in found] for rule, found in rows.items()}
    assert before == {"shared": [5, 5, 5, 5], "each": [8, 5, 7, 8]}, "of nine pieces"


@pytest.mark.parametrize("scale", [1, 2.5])
def test_the_regions_are_the_annotated_objects_whatever_the_shard_holds(task, samples, tmp_path, scale):
    write_vcr(tmp_path / "vcr", samples, scale)
    picture = asked(task, samples).image
    assert picture.boxes.tolist() == [[0, 0, 95, 63], *BOXES]
    assert picture.classes.tolist() == [0, 1, 17, 1, 42], "COCO's, from 1 on"
    mirrored = asked(task, samples, flip=True).image
    assert mirrored.boxes[1].tolist() == [75, 0, 95, 40]
    assert not picture.masked.any()


def test_instance_masks_follow_their_objects_through_a_mirror(task, samples):
    cells = asked(changed(task, mask_size=14), samples).image.cells
    assert cells.shape == (5, 14, 14)
    assert cells[0].all(), "the whole image is all covered"
    assert cells[1][0, :13].all(), "the triangle's upper edge"
    assert cells[1][:13, 0].all(), "and its left one"
    assert not cells[1][8:, 8:].any()
    mirrored = asked(changed(task, mask_size=14), samples, flip=True).image.cells
    np.testing.assert_array_equal(mirrored, cells[:, :, ::-1])
    assert asked(changed(task, instance_masks=False), samples).image.cells is None


@pytest.mark.parametrize("swapped", [True, False])
def test_the_texts_of_a_mirrored_picture_have_their_sides_swapped_or_not(task, samples, tmp_path, swapped):
    file = tmp_path / "vcr" / "val.jsonl"
    file.write_text(file.read_text().replace('"holding"', '"Left"').replace('["no"]', '["right"]'))
    words = [line for line in WORDS.text().splitlines()]
    settings = dataclasses.replace(task.settings, subtask="rationale", swap_left_right=swapped)
    task = VCR(settings, Vocabulary([*words, "left", "right"]), 8)
    (ask,) = task.examples(urls(samples), "val").annotations
    texts = {}
    for flip in (False, True):
        seen = prepare_image(samples[2], TINY_MODEL.regions, flip)
        example = task.example(samples[2], seen, ask, np.random.default_rng(0))
        texts[flip] = [task.vocabulary.decode(one.tokens) for one in example.texts]
        assert "Left" in example.metadata["question"], "what is written of it stays as it is asked"
    assert "left" in texts[False][1]
    assert texts[False][1].endswith("right [SEP]")
    swap = {"left": "right", "right": "left"} if swapped else {}
    assert texts[True] == [" ".join(swap.get(word, word) for word in text.split()) for text in texts[False]]


def test_an_object_in_two_parts_covers_both_and_one_without_polygons_its_box():
    box = np.array([0.0, 0, 13, 13])  # inclusive: 14 x 14 pixels, a cell each
    left, right = (np.array([[x, 0], [x + 3, 0], [x + 3, 13], [x, 13]], float) for x in (0, 7))
    mask = instance_mask([left, right], box, 14)
    assert mask[0].tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert instance_mask([], box, 14).all()
    whole = np.array([[0, 0], [14, 0], [14, 14], [0, 14]], float)
    assert instance_mask([whole], box, 14).sum() == 13 * 13, "as scikit-image 0.16; 0.26 has 14 * 14"


def test_people_get_names_in_turn_that_depend_on_the_sample_alone(task, samples):
    neutral = changed(task, names="neutral")
    found = set()
    for seed in range(30):
        first, third = (asked(neutral, samples, seed=seed).texts[i].tokens for i in (0, 1))
        names = WORDS.tokens[first[3]], WORDS.tokens[third[11]]
        assert PEOPLE[(PEOPLE.index(names[0]) + 1) % 13] == names[1], "the next person gets the next name"
        assert texts(asked(neutral, samples, seed=seed)) == texts(asked(neutral, samples, seed=seed))
        assert "dog" in WORDS.decode(first)
        found.add(names[0])
    assert len(found) > 5
    assert len(set(PEOPLE)) == 13


def test_mentions_look_at_the_whole_image_by_the_papers_rule(task, samples):
    plain = asked(changed(task, mention_visual_embedding="image"), samples)
    assert texts(plain) == texts(asked(task, samples))
    assert not any(words.token_region.any() for words in plain.texts)


def test_hidden_regions_are_asked_for_in_training_and_none_is_in_validation(task, samples):
    hiding = changed(task, masked_regions=0.5)
    found = [asked(hiding, samples, seed=seed).image for seed in range(40)]
    share = np.mean([picture.masked[1:] for picture in found])
    assert 0.35 < share < 0.65
    for picture in found:
        assert not picture.masked[0], "the whole image is never hidden"
        np.testing.assert_array_equal(picture.label_masks["region_label_mask"], picture.masked)
    assert not asked(changed(task, masked_regions=1.0), samples, held_out=True).image.masked.any()
    batch = batch_of(changed(task, masked_regions=1.0), samples)
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), changed(task, masked_regions=1.0))
    assert model(batch)["regions"][1] == 2 * 4 * 4, "four objects in four texts of two pictures"
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task)
    assert model(batch_of(task, samples))["regions"][1] == 2 * 4 * 5, "in sight, the whole image is asked for too"


@pytest.mark.parametrize(
    ("settings", "answers", "regions"),
    [
        ({}, 8, 40),
        ({"loss": "softmax", "pooled": False, "mention_visual_embedding": "image", "instance_masks": False}, 2, 40),
        ({"classifier": "two_layers", "region_loss": "appearance"}, 8, 10),
        ({"region_loss": "appearance", "masked_regions": 0.5}, 8, None),
        ({"region_loss": "none", "subtask": "rationale"}, 8, 0),
    ],
)
def test_losses_are_finite_over_what_they_count(task, samples, settings, answers, regions):
    torch.manual_seed(0)
    task = changed(task, **settings)
    model, batch = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task), batch_of(task, samples)
    losses = model(batch)
    assert losses["answers"][1] == answers
    assert ("regions" in losses) == (regions != 0)
    if regions is None:
        regions = int(batch.region_masked[batch.image_rows].sum())
    assert losses.get("regions", (0, 0))[1] == regions
    sum(loss for loss, _ in losses.values()).backward()
    assert all(torch.isfinite(loss) for loss, _ in losses.values())
    trained = [parameter for parameter in model.head.parameters() if parameter.grad is not None]
    assert len(trained) == len(list(model.head.parameters())), "nothing in the head idles"
    assert (model.head.pooler is not None) == task.settings.pooled
    if task.settings.region_loss != "none":
        assert model.head.region_classifier.out_features == CLASSES == 81


class First(torch.nn.Module):
    """A head that scores a text by the first channel of its first piece; a region's channels are its classes."""

    def scores(self, text: torch.Tensor) -> torch.Tensor:
        return text[:, 0, :1]

    def classes(self, regions: torch.Tensor) -> torch.Tensor:
        return regions


@pytest.mark.parametrize("region_loss", ["contextual", "appearance"])
@pytest.mark.parametrize("masked", [0.0, 0.5])
def test_every_region_that_is_asked_for_is_asked_for_its_own_class(task, samples, region_loss, masked):
    task = changed(task, region_loss=region_loss, masked_regions=masked)
    batch = batch_of(task, samples)
    sure = 100 * torch.nn.functional.one_hot(batch.region_classes, CLASSES).float()  # (rows, regions, classes)
    encoded = Encoded(torch.zeros(8, 5, 1), sure, sure[batch.image_rows].flatten(0, 1))
    loss, count = task.losses(None, First(), encoded, batch)["regions"]
    assert count > 0
    assert float(loss) == pytest.approx(0, abs=1e-6)


def test_the_answer_losses_are_those_of_their_names(task, samples):
    batch = batch_of(task, samples)
    scores = torch.tensor([[3.0, -1, 0, 1], [0, 0, 2, 0]])
    encoded = Encoded(scores.view(8, 1, 1).expand(8, 5, 1), torch.zeros(8, 5, 1), torch.zeros(0))
    right = torch.tensor([[0.0, 0, 1, 0], [0, 0, 1, 0]])
    alone = changed(task, region_loss="none")
    loss, count = alone.losses(None, First(), encoded, batch)["answers"]
    assert float(loss / count) == pytest.approx(float(torch.nn.BCEWithLogitsLoss()(scores, right)))
    loss, count = changed(alone, loss="softmax").losses(None, First(), encoded, batch)["answers"]
    assert float(loss / count) == pytest.approx(float(torch.nn.CrossEntropyLoss()(scores, torch.tensor([2, 2]))))
    known, asked = alone.losses(None, First(), encoded, batch)["accuracy"]
    assert (int(known), asked) == (1, 2)
    rows = task.predictions(None, First(), encoded, batch)
    assert [(row["annot_id"], row["score"], row["label"]) for row in rows] == [("a-0", 0, 2), ("a-1", 1, 2)]
    assert rows[0]["probabilities"] == pytest.approx(scores[0].softmax(0).tolist())
    assert task.metrics(rows) == {"answer_accuracy": 0.5, "chance": 0.25}


def test_segment_b_starts_as_segment_a_from_a_pre_trained_model_alone(task):
    def starts(settings: dict, started_from: str | None) -> bool:
        model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), changed(task, **settings))
        before = model.vlbert.embedding.segments.weight.detach().clone()
        model.task.begin(model.vlbert, model.head, started_from)
        after = model.vlbert.embedding.segments.weight
        assert torch.equal(after[[0, 2]], before[[0, 2]])
        assert torch.equal(after[1], before[1]) or torch.equal(after[1], before[0])
        return torch.equal(after[1], before[0])

    assert starts({}, "PretrainingSettings")
    assert not starts({}, "VCRSettings")
    assert not starts({}, None)
    assert not starts({"copies_segment": False}, "PretrainingSettings")


def test_a_run_trains_and_validates_on_region_shards(task, tmp_path, samples):
    root = tmp_path / "root"
    commit_samples(root, "vcr", samples)
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    recipe = tiny_recipe(
        root,
        random_init=True,
        task=dataclasses.replace(task.settings, names="neutral"),
        data=DataConfig(root=str(root), dataset="vcr", held_out="vcr", batch=2, workers=0, flip=0.5),
        vocabulary=str(tmp_path / "vocab.txt"),
        steps=2,
    )
    metrics = train(recipe, World(0, 1, torch.device("cpu")))
    assert metrics["chance"] == 0.25
    (row,) = map(json.loads, (root / "runs" / "tiny" / "predictions.jsonl").read_text().splitlines())
    assert (row["annot_id"], row["label"]) == ("a-2", 2)
    assert sum(row["probabilities"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[:90] + "\n", r"train.jsonl line 2 is no item of VCR: .*; fetch the file again"),
        (lambda line: line.replace('"answer_label"', '"label"'), "line 2 .*answer_label is None and rationale"),
        (lambda line: line.replace('"answer_label": 2', '"answer_label": 4'), "answer_label is 4 and rationale"),
        (lambda line: line.replace("[[0]]], ", "]], "), "line 2 is no item"),
        (lambda line: line.replace('["no"], [[2]', "[[2]"), r"\(3, 4\) choices"),
        (lambda line: line.replace("[0, 1]", "[0, 4]"), "question mentions object 4 of 4"),
        (lambda line: line.replace("[0, 1]", "[-1, 1]"), "question mentions object -1 of 4"),
    ],
)
def test_a_bad_line_is_named(task, tmp_path, samples, change, message):
    file = tmp_path / "vcr" / "train.jsonl"
    first, second = file.read_text().splitlines(keepends=True)
    assert change(second) != second
    file.write_text(first + change(second))
    with pytest.raises(ValueError, match=message):
        task.examples(urls(samples), None)


def test_missing_and_foreign_metadata_are_named(task, tmp_path, samples):
    file = tmp_path / "vcr" / "vcr1images" / "movie" / "000000.json"
    good = json.loads(file.read_text())
    for change, message in (
        ({"names": ["person", "dog", "person", "dog"]}, "line 1 and .*000000.json list different objects"),
        ({"names": ["person", "dog", "person", "unicorn"]}, "000000.json is not in .* an object of class unicorn"),
        ({"segms": good["segms"][:3]}, "4 names, 4 boxes and 3 segms"),
        ({"boxes": good["boxes"][:3] + [[1, 2]]}, "000000.json is not in the format of VCR's metadata"),
    ):
        file.write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=message):
            asked(task, samples)
    file.write_text(json.dumps(good)[:50])
    with pytest.raises(ValueError, match=r"000000.json is not JSON, or is torn"):
        asked(task, samples)
    file.unlink()
    with pytest.raises(ValueError, match=r"1 metadata files are missing, such as .*000000.json; fetch vcr1images"):
        task.examples(urls(samples), None)
    with pytest.raises(ValueError, match=r"there is no .*train.jsonl; set task.folder"):
        changed(task, folder=str(tmp_path)).examples(urls(samples), None)


def test_a_model_that_the_masks_or_regions_do_not_fit_is_refused_at_once(task):
    with pytest.raises(ValueError, match="task.mask_size is 14, the model's res5 gives 2 x 2 cells; set it to 2"):
        changed(task, mask_size=14).head(TINY_MODEL)
    changed(task, mask_size=14, instance_masks=False).head(TINY_MODEL)
    kept = dataclasses.replace(TINY_MODEL, regions=dataclasses.replace(TINY_MODEL.regions, features="precomputed"))
    with pytest.raises(ValueError, match="set model.regions.features=end_to_end"):
        task.head(kept)
    with pytest.raises(ValueError, match="masked_regions is 1.5"):
        VCRSettings(masked_regions=1.5)
    with pytest.raises(ValueError, match="max_tokens is 1"):
        VCRSettings(max_tokens=1)
    with pytest.raises(ValueError, match="task.max_tokens is 60, the model has room for 59"):
        changed(task, max_tokens=60).head(TINY_MODEL)
    changed(task, max_tokens=59).head(TINY_MODEL)


# --- behind every answer, without labels, joined, and for the leaderboard ---------------------------------------------


def without_labels(folder: Path, split: str, of: str) -> None:
    lines = (folder / f"{of}.jsonl").read_text().splitlines()
    items = [{name: value for name, value in json.loads(line).items() if "label" not in name} for line in lines]
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))


def examples_of(task: VCR, samples: list, split: str | None, seed: int = 0) -> list[Example]:
    questions = task.examples(urls(samples), split)
    return [
        task.example(samples[i], prepare_image(samples[i], TINY_MODEL.regions, False), ask, np.random.default_rng(seed))
        for i, ask in zip(questions.samples, questions.annotations, strict=True)
    ]


def rows_for(task: VCR, examples: list[Example], scores: list[list[float]]) -> list[dict]:
    """The predictions of a model that scores the choices of each example so."""
    encoded = Encoded(torch.tensor(scores).view(-1, 1, 1).expand(-1, 5, 1), torch.zeros(0), torch.zeros(0))
    return task.predictions(None, First(), encoded, collate(examples))


ANSWERS = ["no", "person is nearby", "the dog", "person"]


def test_rationales_are_asked_for_behind_every_answer_where_the_leaderboard_wants_it(task, samples, tmp_path):
    rationales = changed(task, subtask="rationale")
    assert [question.conditioned_on for question in rationales.examples(urls(samples), "val").annotations] == [2], (
        "the right one alone"
    )
    every = changed(rationales, **VCR.evaluation)
    assert [question.conditioned_on for question in every.examples(urls(samples), None).annotations] == [2, 2], (
        "training learns from these"
    )
    found = examples_of(every, samples, "val")
    assert [example.metadata["conditioned_on"] for example in found] == [0, 1, 2, 3]
    question = "[CLS] why is person and dog holding cup ?"
    for example, answer in zip(found, ANSWERS, strict=True):
        assert texts(example)[1] == f"{question} {answer} [SEP] no [SEP]"
    assert [example.metadata["label"] for example in found] == [None, None, 0, None]
    right = [[bool(words.labels["right"][0]) for words in example.texts] for example in found]
    assert right == [[False] * 4, [False] * 4, [True, False, False, False], [False] * 4]
    without_labels(tmp_path / "vcr", "test", of="val")
    assert [question.conditioned_on for question in rationales.examples(urls(samples), "test").annotations] == [
        0,
        1,
        2,
        3,
    ]
    (example,) = examples_of(task, samples, "test")
    assert (example.metadata["label"], texts(example)) == (None, texts(asked(task, samples, held_out=True)))


def test_a_row_says_in_words_what_was_asked_and_what_was_said(task, samples):
    examples = examples_of(changed(task, subtask="rationale", names="neutral"), samples, "val")
    (row,) = rows_for(task, examples, [[1.0, 3, 3, 2]])
    assert row["question"] == "Why is person 1 and dog 2 holding cup 4? the dog 2"
    assert (row["answer"], row["ground_truth"], row["score"], row["label"]) == ("no", "because dog 2 is nearby", 0.0, 0)
    assert [one["answer"] for one in row["ranking"]] == ["no", "no no", "because", "because dog 2 is nearby"]
    assert [one["probability"] for one in row["ranking"]] == sorted(row["probabilities"], reverse=True)
    assert row["probability"] == max(row["probabilities"])
    assert (row["annot_id"], row["split"], row["subtask"], row["conditioned_on"]) == ("a-2", "val", "rationale", 2)
    assert row["boxes"] == [
        {"name": "person 1", "box": BOXES[0], "region": 1},
        {"name": "dog 2", "box": BOXES[1], "region": 2},
        {"name": "cup 4", "box": BOXES[3], "region": 4},
    ], "person 3 is not mentioned"
    (row,) = rows_for(task, examples_of(task, samples, "val"), [[0.0, 0, 0, 1]])
    assert (row["answer"], row["ground_truth"], [box["name"] for box in row["boxes"]][2]) == (
        "person 1",
        "the dog 2",
        "person 3",
    )


@pytest.mark.parametrize("scale", [0.5, 4])
def test_the_boxes_of_a_row_are_those_of_the_stored_picture(task, samples, tmp_path, scale):
    write_vcr(tmp_path / "vcr", samples, scale)
    (row,) = rows_for(task, examples_of(task, samples, "val"), [[0.0, 0, 0, 1]])
    assert [box["box"] for box in row["boxes"]] == BOXES


def evaluated(task: VCR, samples: list, split: str, answers: list[int], rationales: list[list[int]]) -> list[dict]:
    """Rows of both runs: of each item which answer they find likeliest, and which rationale behind each."""
    both = (answers, [one for of_item in rationales for one in of_item])
    rows = []
    for kind, chosen in zip(("answer", "rationale"), both, strict=True):
        of_kind = changed(task, subtask=kind, every_answer=True)
        examples = examples_of(of_kind, samples, split)
        rows += rows_for(of_kind, examples, [[2.0 * (i == one) for i in range(4)] for one in chosen])
    return rows


def test_two_runs_joined_give_all_three_accuracies(task, samples, tmp_path):
    train = tmp_path / "vcr" / "train.jsonl"
    (tmp_path / "vcr" / "both.jsonl").write_text(train.read_text())  # answer 2 is right, and rationale 0
    rows = evaluated(task, samples, "both", [2, 2], [[1, 1, 0, 1], [0, 0, 3, 0]])
    assert task.metrics(rows) == {
        "answer_accuracy": 1.0,
        "rationale_accuracy": 0.5,
        "joint_accuracy": 0.5,
        "joint_chance": 0.0625,
        "chance": 0.25,
    }, "behind wrong answers nobody says what is right"
    found = task.metrics(evaluated(task, samples, "both", [2, 1], [[1, 1, 1, 1], [1, 1, 0, 1]]))
    assert (found["answer_accuracy"], found["rationale_accuracy"], found["joint_accuracy"]) == (0.5, 0.5, 0)
    rationales = [row for row in rows if row["subtask"] == "rationale"]
    assert task.metrics(rationales) == {"rationale_accuracy": 0.5, "chance": 0.25}
    one_missing = [row for row in rows if (row["annot_id"], row["subtask"]) != ("a-1", "answer")]
    assert task.metrics(one_missing)["joint_accuracy"] == 1, "of the items with both"
    assert pa.Table.from_pylist(rows).num_rows == 10
    assert set(task.reported("val")) == {"answer_accuracy", "rationale_accuracy", "joint_accuracy"}
    assert task.reported("val")["joint_accuracy"] == "55.2 base, 58.9 large"
    assert task.reported("test")["answer_accuracy"] == "75.8 large"


def test_what_is_submitted_is_scored_as_the_metrics_say(task, samples, tmp_path):
    folder = tmp_path / "vcr"
    (folder / "both.jsonl").write_text((folder / "train.jsonl").read_text())
    rows = evaluated(task, samples, "both", [2, 3], [[1, 1, 0, 2], [0, 0, 3, 0]])
    ((name, file),) = task.submission(rows[::-1]).items()
    (folder / name).write_bytes(file)
    scored = hits(folder / "both.jsonl", folder / name)
    assert [row["annot_id"] for row in scored] == ["a-0", "a-1"]
    metrics = task.metrics(rows)
    for hit, metric in (("answer_hit", "answer"), ("rationale_hit", "rationale"), ("joint_hit", "joint")):
        assert np.mean([row[hit] for row in scored]) == metrics[f"{metric}_accuracy"]
    behind = read_submission(folder / name)["a-0"].argmax(axis=1).tolist()
    assert behind == [2, 1, 1, 0, 2]
    without_labels(folder, "test", of="both")
    unlabelled = evaluated(task, samples, "test", [2, 3], [[1, 1, 0, 2], [0, 0, 3, 0]])
    assert task.submission(unlabelled) == {name: file}
    assert task.metrics(unlabelled) == {}
    assert {(row["ground_truth"], row["score"], row["label"]) for row in unlabelled} == {(None, None, None)}
    with pytest.raises(ValueError, match="2 of 2 items, such as a-0, lack probabilities of rationales"):
        task.submission(rows[:2])
    with pytest.raises(ValueError, match="1 ids of both miss in the predictions, such as a-1"):
        task.submission([row for row in rows if row["annot_id"] == "a-0"])


def test_nothing_is_learnt_where_nobody_says_what_is_right(task, samples, tmp_path):
    without_labels(tmp_path / "vcr", "test", of="val")
    torch.manual_seed(0)
    for change in ({}, {"loss": "softmax", "region_loss": "appearance"}, {"masked_regions": 0.5}):
        one = changed(task, **change)
        model = TaskModel(VLBert(dataclasses.replace(TINY_MODEL, dropout=0.0), len(WORDS)), one)
        learnt, unlabelled = asked(one, samples, 0), examples_of(one, samples, "test")[0]
        expected, found = model(collate([learnt])), model(collate([unlabelled, learnt]))
        assert expected.keys() == found.keys()
        for name, (loss, count) in expected.items():
            assert found[name][1] == count
            assert found[name][0].detach() == pytest.approx(float(loss.detach()), rel=1e-4)
        assert all(count == 0 for _, count in model(collate([unlabelled])).values())


def test_what_cannot_be_learnt_from_is_left_out_by_name_and_asked_when_held_out(task, samples, tmp_path):
    folder = tmp_path / "vcr"
    first, second = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    wordless = first.replace('["no"], [[2]', '[" ", []], [[2]')
    assert wordless != first
    (folder / "train.jsonl").write_text(wordless + second)
    questions = task.examples(urls(samples), None)
    assert questions.samples.tolist() == [1]
    (line,) = questions.skipped
    assert line.endswith("train.jsonl line 1: it has no word in its answer_choices[0]")
    (folder / "odd.jsonl").write_text(wordless)
    questions = task.examples(urls(samples), "odd")
    assert (len(questions), questions.skipped, len(questions.invalid)) == (1, (), 1)
    assert texts(examples_of(task, samples, "odd")[0])[0].endswith("holding cup ? [SEP] [SEP]")
    without_labels(folder, "test", of="val")
    both = changed(task, train_on=("train", "test")).examples(urls(samples), None)
    assert (both.samples.tolist(), len(both.skipped)) == ([1], 2)
    with pytest.raises(ValueError, match="none of the 1 examples of test of .*test.jsonl line 1: it has no labels"):
        changed(task, train_on=("test",)).examples(urls(samples), None)


def test_an_empty_question_is_asked_and_gives_a_finite_answer(task, samples, tmp_path):
    (tmp_path / "vcr" / "val.jsonl").write_text(
        (tmp_path / "vcr" / "val.jsonl").read_text().replace('["Why", "is", [0, 1], "holding", [3], "?"]', "[]")
    )
    (example,) = examples_of(task, samples, "val")
    assert texts(example)[2] == "[CLS] [SEP] the dog [SEP]"
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task).eval()
    assert np.isfinite(model.predict(collate([example]))[0]["probabilities"]).all()


def test_a_question_of_six_hundred_words_is_cut_to_what_fits(task, samples, tmp_path):
    file = tmp_path / "vcr" / "val.jsonl"
    file.write_text(file.read_text().replace('"Why"', ", ".join(['"why"'] * 600)))
    for change in ({}, {"subtask": "rationale"}):
        (example,) = examples_of(changed(task, **change), samples, "val")
        assert max(len(words.tokens) for words in example.texts) == 43, "40 pieces, [CLS] and two [SEP]"
        assert len({int((words.segments == 0).sum()) for words in example.texts}) == 1, "all have what is left of it"
        assert [text.split("[SEP]")[1].strip() for text in texts(example)] == (
            ["because dog is nearby", "no", "no no", "because"] if change else ANSWERS
        )
        model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task).eval()
        assert np.isfinite(model.predict(collate([example]))[0]["probabilities"]).all()


def test_an_object_without_area_is_not_learnt_from_and_held_out_it_is_one_pixel(task, samples, tmp_path):
    for number in (0, 2):
        file = tmp_path / "vcr" / "vcr1images" / "movie" / f"{number:06d}.json"
        metadata = json.loads(file.read_text())
        metadata["boxes"][1] = [30, 10, 30, 30, 0.9]
        file.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match="000000.json: the box of object 1 has no area"):
        asked(task, samples, 0)
    example = asked(task, samples, held_out=True)
    assert example.image.boxes[2].tolist() == [30, 10, 31, 11]
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task).eval()
    assert np.isfinite(model.predict(collate([example]))[0]["probabilities"]).all()


def names_in(example: Example) -> list[str]:
    return [word for word in texts(example)[1].split() if word in PEOPLE]


def test_held_out_all_questions_about_a_picture_use_the_same_names_wherever_they_are_asked(task, samples):
    neutral = changed(task, names="neutral")
    (answers,) = examples_of(neutral, samples, "val", seed=1)
    first, third = names_in(answers)
    assert PEOPLE[(PEOPLE.index(first) + 1) % 13] == third
    every = changed(neutral, subtask="rationale", every_answer=True)
    for seed in range(3):
        for example in examples_of(every, samples, "val", seed):
            assert set(names_in(example)) <= {first, third}
            assert names_in(example)[0] == first
    elsewhere = [dataclasses.replace(sample, key=f"other-{i}") for i, sample in enumerate(samples)]
    assert texts(examples_of(neutral, elsewhere, "val", seed=5)[0]) == texts(answers)
    assert len({names_in(examples_of(neutral, samples, None, seed)[0])[0] for seed in range(30)}) > 5, "in training"
    file = Path(task.settings.folder) / "val.jsonl"
    line = file.read_text()
    file.write_text("".join(line.replace("a-2", f"a-2-{i}") for i in range(4)))
    of_one_picture = examples_of(neutral, samples, "val")
    assert [texts(example) for example in of_one_picture] == [texts(answers)] * 4, "other questions about it"
    several = [dataclasses.replace(samples[2], url=f"http://example.org/{i:06d}.jpg") for i in range(20)]
    write_vcr(Path(task.settings.folder), several)
    file.write_text((Path(task.settings.folder) / "train.jsonl").read_text())
    assert len({names_in(example)[0] for example in examples_of(neutral, several, "val")}) > 4, "another picture"


# --- a question of one's own ------------------------------------------------------------------------------------------


def own(task: VCR, sample: object, *question: object) -> Example:
    return task.example(
        sample,
        prepare_image(sample, TINY_MODEL.regions, False),
        task.annotation_for(*question),
        np.random.default_rng(0),
    )


def test_a_question_of_ones_own_is_about_the_regions_of_the_sample(task):
    sample = tiny_sample(7, regions=3)
    neutral = changed(task, names="neutral")
    words = Vocabulary([*WORDS.tokens, "object"])
    example = own(VCR(neutral.settings, words, 8), sample, "Why is [1] near [2, 3]?", ["no", "[3] is", "the [2]", "no"])
    decoded = [words.decode(text.tokens) for text in example.texts]
    assert decoded[1] == "[CLS] why is object near object and object ? [SEP] object is [SEP]"
    assert example.texts[1].token_region.tolist() == [0, 0, 0, 1, 0, 2, 0, 3, 0, 0, 3, 0, 0]
    assert example.image.boxes.shape == (4, 4)
    np.testing.assert_array_equal(example.image.boxes[1:], prepare_image(sample, TINY_MODEL.regions, False).boxes[1:])
    assert example.image.cells.all()
    assert not any(text.labels["right"].any() for text in example.texts)
    (row,) = rows_for(neutral, [example], [[0.0, 0, 5, 1]])
    assert (row["question"], row["answer"], row["ground_truth"]) == (
        "Why is object 1 near object 2 and object 3?",
        "the object 2",
        None,
    )
    assert [box["name"] for box in row["boxes"]] == ["object 1", "object 2", "object 3"]
    model = TaskModel(VLBert(TINY_MODEL, len(words)), VCR(neutral.settings, words, 8)).eval()
    assert sum(model.predict(collate([example]))[0]["probabilities"]) == pytest.approx(1)


def test_a_model_of_rationales_is_asked_behind_an_answer(task):
    rationales = changed(task, subtask="rationale")
    example = own(rationales, tiny_sample(7), "Why?", ["because", "no", "the", "is [2]"], "no [1]")
    assert texts(example)[0] == "[CLS] why ? no [UNK] [SEP] because [SEP]"
    assert (example.metadata["subtask"], example.metadata["question"]) == ("rationale", "Why? no object 1")
    assert example.text.token_region.tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "question", "message"),
    [
        ("answer", ("why?", ["no"] * 3), "3 choices are given; VCR chooses between 4"),
        ("answer", ("why?", ()), "0 choices are given"),
        ("answer", (" ", ["no"] * 4), "the question or a choice has no word"),
        ("answer", ("why?", ["no", "no", " ", "no"]), "the question or a choice has no word"),
        ("answer", ("why?", ["no"] * 4, "no"), "this model chooses answers; give no answer beside the choices"),
        ("rationale", ("why?", ["no"] * 4), "this model chooses rationales; give the answer that they are for"),
        ("answer", ("why?", ["no"] * 4, "", (1,)), "VCR masks no regions; name none"),
        ("answer", ("why is [3]?", ["no"] * 4), "region 3 is mentioned; the image has 2, from 1"),
        ("answer", ("why is [0]?", ["no"] * 4), r"'\[0\]' in 'why is \[0\]\?' names no region: write numbers, from 1"),
        ("answer", ("why is [1", ["no"] * 4), r"'\[1' in 'why is \[1' names no region"),
        ("answer", ("why is 1]", ["no"] * 4), "']' in .* names no region"),
        ("answer", ("why?", ["no", "[-1] is", "no", "no"]), r"'\[-1\]' in '\[-1\] is' names no region"),
        ("rationale", ("why?", ["no"] * 4, "[person1]"), r"'\[person1\]' in .* names no region"),
        (
            "answer",
            ("why? " * 600, ["no"] * 4),
            "1200 tokens before the choices and 1 in the longest of them, more",
        ),
        ("answer", ("why?", [*["no"] * 3, "no " * 600]), "2 tokens before .* 600 in the longest of them, more"),
        ("rationale", ("why?", ["no"] * 4, "no " * 600), "602 tokens before the choices"),
    ],
)
def test_a_question_of_ones_own_that_cannot_be_asked_is_named(task, kind, question, message):
    with pytest.raises(ValueError, match=message):
        own(changed(task, subtask=kind), tiny_sample(7, regions=2), *question)
