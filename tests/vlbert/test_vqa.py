"""VQA's task: examples, labels, losses, predictions."""

import json

import numpy as np
import pytest
import torch
from family import changed, examples_of
from tiny import TINY_MODEL, tiny_sample, urls
from vqa_files import ANNOTATORS, ANSWERS, ROOM, WORDS, coco, write_vqa

from vlbert.data.batch import Example, collate
from vlbert.data.images import prepare_image
from vlbert.datasets.vqa import Question
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import TaskModel
from vlbert.tasks.vqa import VQA, VQASettings

LONG = "left " * 600


@pytest.fixture
def samples() -> list:
    images = [tiny_sample(i) for i in range(4)]
    return [*coco(images, "train2014"), *coco(images[:2], "val2014")]


@pytest.fixture
def task(tmp_path) -> VQA:
    write_vqa(tmp_path / "vqa", "train2014", ANNOTATORS)
    write_vqa(tmp_path / "vqa", "val2014", {10: ["no"] * 10})
    (tmp_path / "vqa" / "answers_vqa.txt").write_text("\n".join(ANSWERS) + "\n")
    return VQA(VQASettings(str(tmp_path / "vqa"), answers=len(ANSWERS), question_length=ROOM), WORDS, 8)


def example_of(task: VQA, sample: object, question: Question, flip: bool = False) -> Example:
    return task.example(sample, prepare_image(sample, TINY_MODEL.regions, flip), question, np.random.default_rng(0))


def predicted(task: VQA, examples: list[Example], classes: list[int]) -> list[dict]:
    """The rows where these answers are the likeliest."""
    batch = collate(examples)
    logits = torch.zeros(len(examples), 6)
    logits[range(len(classes)), classes] = 1
    n, t = batch.tokens.shape
    encoded = Encoded(logits[:, None].expand(n, t, 6), torch.zeros(n, 3, 6), torch.zeros(0))
    return task.predictions(None, torch.nn.Identity(), encoded, batch)


def test_each_question_of_the_splits_is_an_example_of_its_own_image(task, samples):
    found = task.examples(urls(samples), None)
    assert [question.question_id for question in found.annotations] == [10, 11, 20, 30]
    assert found.samples.tolist() == [1, 1, 2, 3]
    assert task.examples(urls(samples), "val2014").samples.tolist() == [5], "image 1 of val2014"
    both = changed(task, train_on=("train2014", "val2014")).examples(urls(samples), None)
    assert both.samples.tolist() == [1, 1, 2, 3, 5]
    read = urls(samples)
    read.urls = [url.replace("COCO_", "%43OCO%5F") + "?size=9" for url in read.urls]
    assert task.examples(read, None).samples.tolist() == [1, 1, 2, 3]
    read.urls.append("http://elsewhere.org/COCO_train2014_000000000002.jpg")
    with pytest.raises(ValueError, match="1 of 3 images .* in several samples, such as COCO_train2014_0+2.jpg, from"):
        task.examples(read, None)


def test_the_label_is_at_a_mask_behind_the_question_and_mirroring_swaps_left_and_right(task, samples):
    example = examples_of(task, samples)[0]
    assert WORDS.decode(example.text.tokens).startswith("[CLS] is it on the left [UNK] [UNK] ? [SEP] [MASK] [SEP]")
    assert example.text.segments.tolist() == [0] * 10 + [1, 1]
    assert example.text.tokens[example.text.label_masks["answer"]].tolist() == [WORDS.mask]
    assert example.text.labels["scores"][0].tolist() == pytest.approx([0, 0.3, 0, 1, 0.9, 0.6])
    assert not example.image.masked.any()
    assert len(example.image.boxes) == 1 + len(samples[1].regions)
    mirrored = examples_of(task, samples, flip=True)[0]
    assert "on the right [UNK]" in WORDS.decode(mirrored.text.tokens)
    # "on the right" is not in the answer list: the two of ten annotators who wrote "on the left" count for nothing.
    assert mirrored.text.labels["scores"][0].tolist() == pytest.approx([0, 0.3, 0, 0.9, 1, 0])


def test_training_skips_empty_and_too_long_questions_and_evaluation_cuts_them(task, tmp_path, samples):
    write_vqa(tmp_path / "vqa", "train2014", ANNOTATORS, {11: " \n", 20: LONG})
    training, held_out = (task.examples(urls(samples), split) for split in (None, "train2014"))
    assert [question.question_id for question in training.annotations] == [10, 30]
    assert training.samples.tolist() == [1, 3]
    assert training.skipped == (
        "question 11 of train2014: it has no words",
        "question 20 of train2014: it has 600 tokens, more than task.question_length = 58",
    )
    assert [question.question_id for question in held_out.annotations] == [10, 11, 20, 30]
    assert (held_out.skipped, held_out.invalid, training.invalid) == ((), training.skipped, ())
    empty, long = (example_of(task, samples[1], held_out.annotations[i]) for i in (1, 2))
    assert WORDS.decode(empty.text.tokens) == "[CLS] [SEP] [MASK] [SEP]"
    assert len(long.text.tokens) == ROOM + 4
    assert WORDS.decode(long.text.tokens[-4:]) == "left [SEP] [MASK] [SEP]"
    assert long.text.label_masks["answer"].tolist() == [False] * (ROOM + 2) + [True, False]
    write_vqa(tmp_path / "vqa", "train2014", ANNOTATORS, dict.fromkeys(ANNOTATORS, ""))
    with pytest.raises(ValueError, match="none of the 4 examples of train2014 of .* question 10 of train2014: it has"):
        task.examples(urls(samples), None)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda task: changed(task, question_length=59).head(TINY_MODEL), "question_length is 59, the model has"),
        (lambda task: changed(task, answers=3129).examples(urls([]), None), "has 6 answers, but task.answers is 3129"),
        (lambda task: changed(task, answer_list="others.txt").examples(urls([]), None), "no question .* others.txt"),
        (lambda task: task.annotation_for("\u200b"), "is invalid: it has no words"),
        (lambda task: task.annotation_for(LONG), "is invalid: it has 600 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(task, tmp_path, call, named):
    (tmp_path / "vqa" / "others.txt").write_text("a\nb\nc\nd\ne\nf\n")
    with pytest.raises(ValueError, match=named):
        call(task)


def test_losses_are_those_of_their_names(task, samples):
    torch.manual_seed(0)
    batch = collate(examples_of(task, samples))
    logits, scores = torch.randn(4, 6), batch.labels["scores"]
    encoded = Encoded(logits[:, None].expand(4, batch.tokens.shape[1], 6), torch.zeros(4, 3, 6), torch.zeros(0))
    bce, cross_entropy = (
        changed(task, loss=loss).losses(None, torch.nn.Identity(), encoded, batch) for loss in ("bce", "cross_entropy")
    )
    loss, count = bce["answers"]
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, scores, reduction="none")
    assert count == 4
    assert float(loss / count) == pytest.approx(float(each.sum(1).mean())), "summed over answers, mean over questions"
    loss, count = cross_entropy["answers"]
    assert count == 3, "the last question has no answer of the list"
    assert float(loss) == pytest.approx(-float(logits.log_softmax(1)[[0, 1, 2], [3, 2, 1]].sum()))
    best = sum(float(scores[row, logits[row].argmax()]) for row in range(4))
    for losses in (bce, cross_entropy):
        total, count = losses["accuracy"]
        assert (float(total), count) == (pytest.approx(best), 4)


def test_answers_start_as_the_mean_of_their_words(task, tmp_path):
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task)
    words, output = model.vlbert.embedding.words.weight, model.head.output
    torch.nn.init.ones_(output.bias)
    before = output.weight.detach().clone()
    changed(task, answers_from_words=False).on_start(model.vlbert, model.head, None)
    assert torch.equal(output.weight, before)
    (tmp_path / "vqa" / "answers_vqa.txt").write_text("\nyes\nno\nleft\nright\non the left\n")
    task.on_start(model.vlbert, model.head, None)
    assert torch.equal(output.weight[0], before[0]), "an answer without a token keeps its first weights"
    assert torch.equal(output.weight[1], words[WORDS.ids["yes"]])
    on_the_left = torch.stack([words[WORDS.ids[word]] for word in ("on", "the", "left")]).mean(0)
    torch.testing.assert_close(output.weight[5], on_the_left)
    assert not output.bias.any()
    two = changed(task, classifier="two_layers")
    with pytest.raises(ValueError, match="as wide as words, which have 32 channels; set --task.no_answers_from_words"):
        two.on_start(model.vlbert, two.head(TINY_MODEL), None)


def test_a_prediction_has_the_official_accuracy(task, tmp_path, samples):
    rows = predicted(task, examples_of(task, samples), [4, 2, 2, 1])
    assert [row["question_id"] for row in rows] == [10, 11, 20, 30]
    assert [row["answer"] for row in rows] == ["right", "no", "no", "yes"]
    assert [row["score"] for row in rows] == pytest.approx([0.9, 1, 0, 0])
    assert [row["ground_truth"] for row in rows] == ["left", "no", "yes", "nobody knows"]
    first = rows[0]
    assert (first["question"], first["annotator_answers"]) == ("Is it on the left, 10?", ANNOTATORS[10])
    assert (len(first["ranking"]), first["boxes"]) == (5, [])
    assert first["ranking"][0] == {"answer": "right", "probability": first["probability"]}
    assert first["probability"] == pytest.approx(1 / (1 + np.exp(-1))), "bce: each answer by itself"
    softmax = predicted(changed(task, loss="cross_entropy"), examples_of(task, samples), [4, 2, 2, 1])
    assert softmax[0]["probability"] == pytest.approx(np.e / (np.e + 5))
    by_type = {"accuracy/yes/no": 1.9 / 3, "accuracy/other": 0.0, "accuracy/is it": 1.9 / 4}
    # Chance is yes to all: of equally common ground truths the last in the alphabet.
    assert task.metrics(rows) == pytest.approx({"accuracy": 1.9 / 4, "chance": 1.3 / 4} | by_type)
    write_vqa(tmp_path / "vqa", "train2014", {10: ["yes"] * 10, 11: ["no"] * 10, 20: ["no"] * 10, 30: ["no"] * 10})
    assert task.metrics(predicted(task, examples_of(task, samples), [1, 1, 1, 1]))["chance"] == 0.75


def test_a_split_without_annotations_is_answered_and_not_scored(task, tmp_path):
    folder = tmp_path / "vqa"
    write_vqa(folder, "test-dev2015", ANNOTATORS)
    (folder / "v2_mscoco_test-dev2015_annotations.json").unlink()
    images = coco([tiny_sample(i) for i in range(4)], "test2015")
    questions = task.examples(urls(images), "test-dev2015")
    assert questions.samples.tolist() == [1, 1, 2, 3], "its images are named as those of test2015"
    rows = predicted(task, [example_of(task, images[1], one) for one in questions.annotations], [1, 2, 3, 4])
    assert {(row["ground_truth"], row["score"]) for row in rows} == {(None, None)}
    assert task.metrics(rows) == {}
    answers = zip(ANNOTATORS, ["yes", "no", "left", "right"], strict=True)
    ((name, data),) = task.submission(rows).items()
    assert name == "v2_OpenEnded_mscoco_test-dev2015_results.json"
    assert json.loads(data) == [{"question_id": i, "answer": answer} for i, answer in answers]
    with pytest.raises(ValueError, match="1 ids of test-dev2015 are missing in the predictions, such as 20"):
        task.submission(rows[:2] + rows[3:])
    with pytest.raises(ValueError, match="train_on=test-dev2015 has a test split, which has no answers to learn from"):
        changed(task, train_on=("test-dev2015",)).examples(urls(images), None)
