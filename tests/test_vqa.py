import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import TINY_MODEL, commit_samples, tiny_recipe, tiny_sample

from detectors.distributed import World
from storage.sample import sample_key
from vlbert.batch import Example, collate
from vlbert.config import DataConfig
from vlbert.model import Encoded, TaskModel, VLBert
from vlbert.official import read_json
from vlbert.official.vqa import (
    accuracy,
    frequent_answers,
    main,
    normalise,
    read_annotations,
    read_answers,
    read_questions,
    read_results,
    score,
    soft_score,
    without_articles,
    without_punctuation,
)
from vlbert.pictures import view
from vlbert.tasks.vqa import VQA, VQASettings
from vlbert.text import SPECIALS, Vocabulary
from vlbert.train import train

WORDS = Vocabulary([*SPECIALS, "is", "it", "on", "the", "left", "right", "?", "yes", "no", "of", "##s"])
ANSWERS = ["<unk>", "yes", "no", "left", "right", "on the left"]
SAID = {  # per question what the ten said
    10: ["left"] * 4 + ["right"] * 3 + ["on the left"] * 2 + ["yes"],
    11: ["no"] * 9 + ["<unk>"],
    20: ["yes"] * 10,
    30: ["nobody knows"] * 10,
}
CONFORMANCE = Path(__file__).parents[2] / "shared" / "conformance" / "vqa"
official = pytest.mark.skipif(
    not CONFORMANCE.is_dir(), reason="the official formats' samples lie in ../shared, which is not here"
)


def write_vqa(folder: Path, split: str, said: dict[int, list[str]], texts: dict[int, str] | None = None) -> None:
    """Questions and annotations of a split in the official format; question 10 * i + k is about image i."""
    texts = {i: f"Is it on the left, {i}?" for i in said} | (texts or {})
    questions = [{"image_id": i // 10, "question_id": i, "question": texts[i]} for i in said]
    annotations = [
        {
            "image_id": i // 10,
            "question_id": i,
            "question_type": "is it",
            "answer_type": "yes/no" if set(answers) & {"yes", "no"} else "other",
            "multiple_choice_answer": max(answers, key=answers.count),
            "answers": [{"answer": a, "answer_confidence": "yes", "answer_id": 1 + k} for k, a in enumerate(answers)],
        }
        for i, answers in reversed(said.items())  # the files need not be in one order
    ]
    folder.mkdir(exist_ok=True)
    (folder / f"v2_OpenEnded_mscoco_{split}_questions.json").write_text(
        json.dumps({"data_subtype": split, "questions": questions})
    )
    (folder / f"v2_mscoco_{split}_annotations.json").write_text(json.dumps({"annotations": annotations}))


def coco(samples: list, split: str) -> list:
    """The samples, named as COCO's images: sample i is image i."""
    urls = [f"http://images.example.org/{split}/COCO_{split}_{i:012d}.jpg" for i in range(len(samples))]
    return [
        dataclasses.replace(sample, url=url, key=sample_key(url, sample.caption))
        for sample, url in zip(samples, urls, strict=True)
    ]


def urls(samples: list) -> SimpleNamespace:
    """All that the task asks of samples."""
    return SimpleNamespace(urls=[sample.url for sample in samples])


@pytest.fixture
def samples() -> list:
    pictures = [tiny_sample(i) for i in range(4)]
    return [*coco(pictures, "train2014"), *coco(pictures[:2], "val2014")]


@pytest.fixture
def task(tmp_path) -> VQA:
    write_vqa(tmp_path / "vqa", "train2014", SAID)
    write_vqa(tmp_path / "vqa", "val2014", {10: ["no"] * 10})
    (tmp_path / "vqa" / "answers_vqa.txt").write_text("\n".join(ANSWERS) + "\n")
    return VQA(VQASettings(str(tmp_path / "vqa"), answers=len(ANSWERS)), WORDS, 8)


def changed(task: VQA, **settings: object) -> VQA:
    return VQA(dataclasses.replace(task.settings, **settings), WORDS, 8)


def asked(task: VQA, samples: list, number: int = 0, flip: bool = False) -> Example:
    questions = task.questions(urls(samples), None)
    sample = samples[questions.samples[number]]
    seen = view(sample, TINY_MODEL.regions, flip)
    return task.example(sample, seen, questions.asks[number], np.random.default_rng(0))


def everything(task: VQA, samples: list) -> list[Example]:
    return [asked(task, samples, number) for number in range(len(SAID))]


def test_every_question_of_the_splits_is_asked_about_its_own_image(task, samples):
    questions = task.questions(urls(samples), None)
    assert [ask.question_id for ask in questions.asks] == [10, 11, 20, 30]
    assert questions.samples.tolist() == [1, 1, 2, 3]
    held_out = task.questions(urls(samples), "val2014")
    assert held_out.samples.tolist() == [5], "image 1 of val2014"
    both = changed(task, train_on=("train2014", "val2014")).questions(urls(samples), None)
    assert both.samples.tolist() == [1, 1, 2, 3, 5]
    with pytest.raises(ValueError, match="1 of 3 images of .* are in no region shard, such as COCO_train2014_0+3.jpg"):
        task.questions(urls(samples[:3]), None)


def test_the_answer_is_asked_for_at_a_mask_behind_the_question(task, samples):
    example = asked(task, samples)
    assert WORDS.decode(example.words.tokens).startswith("[CLS] is it on the left [UNK] [UNK] ? [SEP] [MASK] [SEP]")
    assert example.words.segments.tolist() == [0] * 10 + [1, 1]
    assert example.words.tokens[example.words.targets["answer_here"]].tolist() == [WORDS.mask]
    assert example.words.asked["scores"][0].tolist() == pytest.approx([0, 0.3, 0, 1, 0.9, 0.6])
    assert not example.picture.hidden.any()
    assert len(example.picture.boxes) == 1 + len(samples[1].regions)


def test_mirroring_swaps_the_sides_in_question_and_answers(task, samples):
    example = asked(task, samples, flip=True)
    assert "on the right [UNK]" in WORDS.decode(example.words.tokens)
    # "on the right" is no answer of the list, so the two of ten who said "on the left" now said nothing.
    assert example.words.asked["scores"][0].tolist() == pytest.approx([0, 0.3, 0, 0.9, 1, 0])


def test_a_soft_score_leaves_each_annotator_out_in_turn():
    for count in range(11):
        said = [True] * count + [False] * (10 - count)
        left_out = [min(1, sum(said[:i] + said[i + 1 :]) / 3) for i in range(10)]
        assert soft_score(count, 10) == pytest.approx(np.mean(left_out))


def test_the_answer_list_is_normalised_and_its_first_of_two_that_meet_counts(task, tmp_path, samples):
    (tmp_path / "vqa" / "answers_vqa.txt").write_text("<unk>\n Yes \nleft-right\nU.S.A.\nleft/right\n\n")
    fixed = changed(task, answers=6)
    assert fixed.answers == ["<unk>", "yes", "left right", "usa", "left right", ""]
    assert fixed.class_of["left right"] == 2
    assert "<unk>" not in fixed.class_of
    with pytest.raises(ValueError, match="holds 6 answers, task.answers is 3129"):
        changed(task, answers=3129).questions(urls(samples), None)


def test_losses_are_finite_and_those_of_the_rule_that_is_set(task, samples):
    torch.manual_seed(0)
    batch = collate(everything(task, samples))
    logits, scores = torch.randn(4, 6), batch.asked["scores"]
    encoded = Encoded(logits[:, None].expand(4, batch.tokens.shape[1], 6), torch.zeros(4, 3, 6), torch.zeros(0))
    loss, count = task.losses(None, torch.nn.Identity(), encoded, batch)["answers"]
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, scores, reduction="none")
    assert count == 4
    assert float(loss / count) == pytest.approx(float(each.sum(1).mean())), "summed over answers, mean over questions"
    loss, count = changed(task, loss="cross_entropy").losses(None, torch.nn.Identity(), encoded, batch)["answers"]
    right = logits.log_softmax(1)[[0, 1, 2], [3, 2, 1]]
    assert count == 3, "the last question has no answer of the list"
    assert float(loss) == pytest.approx(-float(right.sum()))
    for settings in ({}, {"loss": "cross_entropy", "classifier": "linear"}, {"classifier": "two_layers"}):
        model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), changed(task, **settings))
        loss, _ = model(batch)["answers"]
        loss.backward()
        assert torch.isfinite(loss)


def test_predictions_are_answers_with_their_score_and_metrics_their_means(task, samples):
    batch = collate(everything(task, samples))
    logits = torch.zeros(4, 6)
    logits[[0, 1, 2, 3], [4, 2, 2, 1]] = 1
    encoded = Encoded(logits[:, None].expand(4, batch.tokens.shape[1], 6), torch.zeros(4, 3, 6), torch.zeros(0))
    rows = task.predictions(None, torch.nn.Identity(), encoded, batch)
    assert [(row["question_id"], row["answer"]) for row in rows] == [(10, "right"), (11, "no"), (20, "no"), (30, "yes")]
    assert [row["score"] for row in rows] == pytest.approx([0.9, 1, 0, 0])
    assert task.metrics(rows) == {"accuracy": pytest.approx(1.9 / 4), "reachable": pytest.approx(3 / 4)}
    json.dumps(rows)


def test_answers_start_as_the_mean_of_their_words_where_that_is_asked_for(task):
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task)
    words, output = model.vlbert.embedding.words.weight, model.head.output
    torch.nn.init.ones_(output.bias)
    before = output.weight.detach().clone()
    changed(task, answers_from_words=False).begin(model.vlbert, model.head, None)
    assert torch.equal(output.weight, before)
    task.begin(model.vlbert, model.head, None)
    assert torch.equal(output.weight[1], words[WORDS.ids["yes"]])
    on_the_left = torch.stack([words[WORDS.ids[word]] for word in ("on", "the", "left")]).mean(0)
    torch.testing.assert_close(output.weight[5], on_the_left)
    assert not output.bias.any()
    two = changed(task, classifier="two_layers")
    with pytest.raises(ValueError, match="cannot start from words; set task.answers_from_words=false"):
        two.begin(model.vlbert, two.head(TINY_MODEL), None)


def test_an_answer_without_a_piece_keeps_its_first_weights(task, tmp_path):
    (tmp_path / "vqa" / "answers_vqa.txt").write_text("\nyes\n")
    empty = changed(task, answers=2)
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), empty)
    before = model.head.output.weight[0].detach().clone()
    empty.begin(model.vlbert, model.head, None)
    assert torch.equal(model.head.output.weight[0], before)


def test_a_run_trains_and_validates_on_region_shards(task, tmp_path, samples):
    root = tmp_path / "root"
    commit_samples(root, "vqa", samples)
    (tmp_path / "vocab.txt").write_text(WORDS.text())
    recipe = tiny_recipe(
        root,
        from_scratch=True,
        task=task.settings,
        data=DataConfig(root=str(root), dataset="vqa", held_out="vqa", batch=4, workers=0, flip=0.5),
        vocabulary=str(tmp_path / "vocab.txt"),
        steps=2,
    )
    metrics = train(recipe, World(0, 1, torch.device("cpu")))
    assert metrics["reachable"] == 1
    (row,) = map(json.loads, (root / "runs" / "tiny" / "predictions.jsonl").read_text().splitlines())
    assert row["question_id"] == 10
    assert row["answer"] in ANSWERS


def test_files_that_are_missing_torn_or_do_not_fit_are_named(task, tmp_path, samples):
    folder = tmp_path / "vqa"
    with pytest.raises(ValueError, match=r"there is no .*v2_OpenEnded_mscoco_test2015_questions.json; .*task.folder"):
        read_questions(folder, "test2015")
    with pytest.raises(ValueError, match=r"there is no answer list .*other.txt; .*task.answer_list"):
        read_answers(folder / "other.txt")
    write_vqa(folder, "one", {10: ["yes"] * 10})
    write_vqa(folder, "two", {10: ["yes"] * 10, 12: ["no"] * 10})
    annotations = folder / "v2_mscoco_one_annotations.json"
    whole = annotations.read_text()
    annotations.write_text((folder / "v2_mscoco_two_annotations.json").read_text())
    with pytest.raises(ValueError, match="do not fit: 1 stand in one alone or have no answer, such as question 12"):
        read_questions(folder, "one")
    annotations.write_text(whole.replace("question_id", "id"))
    with pytest.raises(ValueError, match=r"v2_mscoco_one_annotations.json is not in VQA 2.0's format: KeyError"):
        read_questions(folder, "one")
    annotations.write_text(whole[:-9])
    with pytest.raises(ValueError, match=r"v2_mscoco_one_annotations.json is not JSON, or is torn"):
        read_questions(folder, "one")
    (folder / "answers_vqa.txt").write_text("a\nb\nc\nd\ne\nf\n")
    with pytest.raises(ValueError, match="no question of train2014 has an answer of answers_vqa.txt"):
        changed(task).questions(urls(samples), None)


@official
def test_the_official_files_are_read_whole():
    questions = read_questions(CONFORMANCE, "synthetic")
    assert len(questions) == 200
    assert questions[0].question_id == 1001000
    assert questions[0].image == "COCO_val2014_000000001001.jpg"
    assert {len(question.answers) for question in questions} == {10}


@official
def test_punctuation_goes_as_in_the_official_evaluation():
    rows = read_json(CONFORMANCE / "expected_normalise.json", "")
    assert len(rows) == 149
    for row in rows:
        assert without_punctuation(row["input"]) == row["after_punctuation"], row["input"]


@official
def test_soft_scores_are_those_of_the_authors(tmp_path):
    expected = read_json(CONFORMANCE / "expected_vlbert_soft_targets.json", "")
    (tmp_path / "answers_vqa.txt").write_text("\n".join(expected["vocab"]) + "\n")
    task = VQA(VQASettings(str(tmp_path), answers=len(expected["vocab"])), WORDS, 1)
    assert len(expected["cases"]) == 48
    for case in expected["cases"]:
        scores = dict(zip(expected["vocab"], task.scores(case["answers"]).tolist(), strict=True))
        assert {answer: score for answer, score in scores.items() if score} == pytest.approx(case["target"])
