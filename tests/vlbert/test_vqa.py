import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch
from tiny import TINY_MODEL, commit_samples, tiny_recipe, tiny_sample
from vqa_files import ANSWERS, ROOM, SAID, WORDS, coco, urls, write_vqa

from storage.settings import override
from training.distributed import World
from vlbert.config import DataConfig
from vlbert.data.batch import Example, collate
from vlbert.data.images import prepare_image
from vlbert.datasets.vqa import Question, read_answers, read_questions, soft_score
from vlbert.initial_weights import check_complete
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.recipes import RECIPES
from vlbert.tasks.base import TaskModel
from vlbert.tasks.vqa import VQA, VQASettings
from vlbert.train import train


@pytest.fixture
def samples() -> list:
    pictures = [tiny_sample(i) for i in range(4)]
    return [*coco(pictures, "train2014"), *coco(pictures[:2], "val2014")]


@pytest.fixture
def task(tmp_path) -> VQA:
    write_vqa(tmp_path / "vqa", "train2014", SAID)
    write_vqa(tmp_path / "vqa", "val2014", {10: ["no"] * 10})
    (tmp_path / "vqa" / "answers_vqa.txt").write_text("\n".join(ANSWERS) + "\n")
    return VQA(VQASettings(str(tmp_path / "vqa"), answers=len(ANSWERS), question_length=ROOM), WORDS, 8)


def changed(task: VQA, **settings: object) -> VQA:
    return VQA(dataclasses.replace(task.settings, **settings), WORDS, 8)


def asked(task: VQA, samples: list, number: int = 0, flip: bool = False) -> Example:
    questions = task.examples(urls(samples), None)
    sample = samples[questions.samples[number]]
    seen = prepare_image(sample, TINY_MODEL.regions, flip)
    return task.example(sample, seen, questions.annotations[number], np.random.default_rng(0))


def everything(task: VQA, samples: list) -> list[Example]:
    return [asked(task, samples, number) for number in range(len(SAID))]


def test_every_question_of_the_splits_is_asked_about_its_own_image(task, samples):
    questions = task.examples(urls(samples), None)
    assert [ask.question_id for ask in questions.annotations] == [10, 11, 20, 30]
    assert questions.samples.tolist() == [1, 1, 2, 3]
    held_out = task.examples(urls(samples), "val2014")
    assert held_out.samples.tolist() == [5], "image 1 of val2014"
    both = changed(task, train_on=("train2014", "val2014")).examples(urls(samples), None)
    assert both.samples.tolist() == [1, 1, 2, 3, 5]
    twice = SimpleNamespace(urls=[*urls(samples).urls, "http://elsewhere.org/COCO_train2014_000000000002.jpg"])
    with pytest.raises(
        ValueError, match="1 of 3 images .* in several samples, such as COCO_train2014_0+2.jpg, from http"
    ):
        task.examples(twice, None)
    escaped = SimpleNamespace(urls=[url.replace("COCO_", "%43OCO%5F") + "?size=9" for url in urls(samples).urls])
    assert task.examples(escaped, None).samples.tolist() == [1, 1, 2, 3]
    with pytest.raises(ValueError, match="1 of 3 images of .* are in no region shard, such as COCO_train2014_0+3.jpg"):
        task.examples(urls(samples[:3]), None)


def test_the_answer_is_asked_for_at_a_mask_behind_the_question(task, samples):
    example = asked(task, samples)
    assert WORDS.decode(example.text.tokens).startswith("[CLS] is it on the left [UNK] [UNK] ? [SEP] [MASK] [SEP]")
    assert example.text.segments.tolist() == [0] * 10 + [1, 1]
    assert example.text.tokens[example.text.label_masks["answer"]].tolist() == [WORDS.mask]
    assert example.text.labels["scores"][0].tolist() == pytest.approx([0, 0.3, 0, 1, 0.9, 0.6])
    assert not example.image.masked.any()
    assert len(example.image.boxes) == 1 + len(samples[1].regions)


def test_mirroring_swaps_the_sides_in_question_and_answers(task, samples):
    example = asked(task, samples, flip=True)
    assert "on the right [UNK]" in WORDS.decode(example.text.tokens)
    # "on the right" is no answer of the list, so the two of ten who said "on the left" now said nothing.
    assert example.text.labels["scores"][0].tolist() == pytest.approx([0, 0.3, 0, 0.9, 1, 0])


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
        changed(task, answers=3129).examples(urls(samples), None)
    (tmp_path / "vqa" / "list.json").write_text('["", "Left/Right"]')
    assert changed(task, answers=2, answer_list="list.json").answers == ["", "left right"]
    (tmp_path / "vqa" / "list.json").write_text('{"left": 0}')
    with pytest.raises(ValueError, match="list.json holds an object, not a list"):
        read_answers(tmp_path / "vqa" / "list.json", 1)


def test_losses_are_finite_and_those_of_the_rule_that_is_set(task, samples):
    torch.manual_seed(0)
    batch = collate(everything(task, samples))
    logits, scores = torch.randn(4, 6), batch.labels["scores"]
    encoded = Encoded(logits[:, None].expand(4, batch.tokens.shape[1], 6), torch.zeros(4, 3, 6), torch.zeros(0))
    loss, count = task.losses(None, torch.nn.Identity(), encoded, batch)["answers"]
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits, scores, reduction="none")
    assert count == 4
    assert float(loss / count) == pytest.approx(float(each.sum(1).mean())), "summed over answers, mean over questions"
    loss, count = changed(task, loss="cross_entropy").losses(None, torch.nn.Identity(), encoded, batch)["answers"]
    right = logits.log_softmax(1)[[0, 1, 2], [3, 2, 1]]
    assert count == 3, "the last question has no answer of the list"
    assert float(loss) == pytest.approx(-float(right.sum()))
    for settings in ({}, {"loss": "cross_entropy"}):
        worth, count = changed(task, **settings).losses(None, torch.nn.Identity(), encoded, batch)["accuracy"]
        best = [float(scores[row, logits[row].argmax()]) for row in range(4)]
        assert (float(worth), count) == (pytest.approx(sum(best)), 4)
    for settings in ({}, {"loss": "cross_entropy", "classifier": "linear"}, {"classifier": "two_layers"}):
        model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), changed(task, **settings))
        loss, _ = model(batch)["answers"]
        loss.backward()
        assert torch.isfinite(loss)


def predicted(task: VQA, examples: list[Example], classes: list[int]) -> list[dict]:
    """The rows where the head is surest of these answers."""
    batch = collate(examples)
    logits = torch.zeros(len(examples), 6)
    logits[range(len(classes)), classes] = 1
    n, t = batch.tokens.shape
    encoded = Encoded(logits[:, None].expand(n, t, 6), torch.zeros(n, 3, 6), torch.zeros(0))
    return task.predictions(None, torch.nn.Identity(), encoded, batch)


def test_predictions_have_the_columns_of_all_tasks_and_the_official_accuracy(task, samples):
    rows = predicted(task, everything(task, samples), [4, 2, 2, 1])
    assert [(row["question_id"], row["answer"]) for row in rows] == [(10, "right"), (11, "no"), (20, "no"), (30, "yes")]
    assert [row["score"] for row in rows] == pytest.approx([0.9, 1, 0, 0])
    assert [row["ground_truth"] for row in rows] == ["left", "no", "yes", "nobody knows"]
    first = rows[0]
    assert first["question"] == "Is it on the left, 10?"
    assert first["annotator_answers"] == SAID[10]
    assert (first["answer_type"], first["question_type"], first["split"]) == ("yes/no", "is it", "train2014")
    assert len(first["ranking"]) == 5
    assert first["ranking"][0] == {"answer": "right", "probability": first["probability"]}
    assert first["probability"] == pytest.approx(1 / (1 + np.exp(-1))), "bce: each answer by itself"
    assert first["boxes"] == []
    of_all = predicted(changed(task, loss="cross_entropy"), everything(task, samples), [4, 2, 2, 1])
    assert of_all[0]["probability"] == pytest.approx(np.e / (np.e + 5))
    pyarrow.Table.from_pylist(rows)


def test_metrics_are_means_over_all_and_over_each_type(task, samples):
    rows = predicted(task, everything(task, samples), [4, 2, 2, 1])
    assert task.metrics(rows) == pytest.approx(
        {
            "accuracy": 1.9 / 4,
            "soft_accuracy": 1.9 / 4,
            "soft_accuracy_upper_bound": 3 / 4,  # nobody can say what the last asks for
            "chance": 1.3 / 4,  # yes to all: of truths that are equally common the last in the alphabet
            "accuracy/yes/no": 1.9 / 3,
            "accuracy/other": 0.0,
            "accuracy/is it": 1.9 / 4,
        }
    )


def test_chance_is_saying_the_commonest_truth(task, tmp_path, samples):
    write_vqa(tmp_path / "vqa", "train2014", {10: ["yes"] * 10, 11: ["no"] * 10, 20: ["no"] * 10, 30: ["no"] * 10})
    assert task.metrics(predicted(task, everything(task, samples), [1, 1, 1, 1]))["chance"] == 0.75


def test_the_head_has_the_models_dropout_before_its_last_layer(task):
    head = task.head(dataclasses.replace(TINY_MODEL, dropout=0.5)).train()
    x = torch.randn(1, TINY_MODEL.hidden_size)
    assert not torch.equal(head(x), head(x))
    assert torch.equal(head.eval()(x), head(x))


def test_the_official_accuracy_normalises_and_the_soft_score_does_not(task, tmp_path, samples):
    write_vqa(tmp_path / "vqa", "train2014", {10: ["Left"] * 9 + ["the left"], 20: ["yes"] * 10})
    (row,) = predicted(task, [asked(task, samples)], [3])
    assert (row["answer"], row["score"], row["soft_score"], row["best_soft_score"]) == ("left", 1.0, 0.0, 0.0)


def test_a_split_without_annotations_is_answered_and_not_scored(task, tmp_path):
    folder = tmp_path / "vqa"
    write_vqa(folder, "test-dev2015", SAID)
    (folder / "v2_mscoco_test-dev2015_annotations.json").unlink()
    pictures = coco([tiny_sample(i) for i in range(4)], "test2015")
    questions = task.examples(urls(pictures), "test-dev2015")
    assert questions.samples.tolist() == [1, 1, 2, 3], "its pictures are named as those of test2015"
    seen = prepare_image(pictures[1], TINY_MODEL.regions, False)
    examples = [task.example(pictures[1], seen, ask, np.random.default_rng(0)) for ask in questions.annotations]
    rows = predicted(task, examples, [1, 2, 3, 4])
    assert {(row["ground_truth"], row["score"], row["soft_score"], row["best_soft_score"]) for row in rows} == {
        (None,) * 4
    }
    assert task.metrics(rows) == {}
    pyarrow.Table.from_pylist(rows)
    (name, data), *_ = task.submission(rows).items()
    assert name == "v2_OpenEnded_mscoco_test-dev2015_results.json"
    said = ["yes", "no", "left", "right"]
    assert json.loads(data) == [{"question_id": i, "answer": a} for i, a in zip(SAID, said, strict=True)]
    with pytest.raises(ValueError, match="task.train_on=test-dev2015: a test split has no answers to learn from"):
        changed(task, train_on=("test-dev2015",)).examples(urls(pictures), None)


def test_a_submission_holds_every_question_of_the_split_once(task, samples):
    rows = predicted(task, everything(task, samples), [4, 2, 2, 1])
    with pytest.raises(ValueError, match="1 ids of train2014 miss in the predictions, such as 20; they must match"):
        task.submission(rows[:2] + rows[3:])
    with pytest.raises(ValueError, match="1 ids of the predictions stand there more than once, such as 10"):
        task.submission([*rows, rows[0]])
    with pytest.raises(ValueError, match="1 ids of the predictions are not in train2014, such as 5"):
        task.submission([*rows, rows[0] | {"question_id": 5}])


LONG = "left " * 600


def test_empty_and_endless_questions_are_left_out_of_training_and_asked_where_all_must_be_answered(
    task, tmp_path, samples
):
    write_vqa(tmp_path / "vqa", "train2014", SAID, {11: " \n", 20: LONG})
    trained = task.examples(urls(samples), None)
    assert [ask.question_id for ask in trained.annotations] == [10, 30]
    assert trained.samples.tolist() == [1, 3]
    assert trained.skipped == (
        "question 11 of train2014: it has no words",
        "question 20 of train2014: it has 600 tokens, more than task.question_length = 58",
    )
    held_out = task.examples(urls(samples), "train2014")
    assert [ask.question_id for ask in held_out.annotations] == [10, 11, 20, 30]
    assert (held_out.skipped, held_out.invalid, trained.invalid) == ((), trained.skipped, ())
    write_vqa(tmp_path / "vqa", "train2014", SAID, dict.fromkeys(SAID, ""))
    with pytest.raises(
        ValueError, match="none of the 4 examples of train2014 of .* question 10 of train2014: it has no"
    ):
        task.examples(urls(samples), None)
    seen = prepare_image(samples[1], TINY_MODEL.regions, False)
    empty, endless = (task.example(samples[1], seen, held_out.annotations[i], np.random.default_rng(0)) for i in (1, 2))
    assert WORDS.decode(empty.text.tokens) == "[CLS] [SEP] [MASK] [SEP]"
    assert len(endless.text.tokens) == ROOM + 4
    assert WORDS.decode(endless.text.tokens[-4:]) == "left [SEP] [MASK] [SEP]"
    assert endless.text.label_masks["answer"].tolist() == [False] * (ROOM + 2) + [True, False]


def test_the_longest_question_fits_and_a_model_with_less_room_is_refused_at_once(task, samples):
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task).eval()
    seen = prepare_image(samples[1], TINY_MODEL.regions, False)
    endless = task.example(samples[1], seen, Question(1, "", LONG, ""), np.random.default_rng(0))
    assert model.predict(collate([endless]))[0]["answer"] in ANSWERS
    with pytest.raises(ValueError, match="task.question_length is 59, the model has room for 58: set that"):
        TaskModel(VLBert(TINY_MODEL, len(WORDS)), changed(task, question_length=59))
    for wrong in ({"question_length": 0}, {"answers": 0}):
        with pytest.raises(ValueError, match=f"{min(wrong)} is 0; it must be at least 1"):
            VQASettings(**wrong)


def test_a_persons_own_question_is_asked_like_any(task, samples):
    seen = prepare_image(samples[1], TINY_MODEL.regions, False)
    example = task.example(
        samples[1], seen, task.annotation_for("Is it left?", answer="left"), np.random.default_rng(0)
    )
    assert WORDS.decode(example.text.tokens) == "[CLS] is it left ? [SEP] [MASK] [SEP]"
    (row,) = predicted(task, [example], [3])
    assert (row["question"], row["answer"], row["ground_truth"]) == ("Is it left?", "left", "left")
    (row,) = predicted(
        task, [task.example(samples[1], seen, task.annotation_for("Is it?"), np.random.default_rng(0))], [3]
    )
    assert (row["ground_truth"], row["score"]) == (None, None)
    with pytest.raises(ValueError, match="VQA answers from its own list"):
        task.annotation_for("Is it?", choices=("yes", "no"))
    for text, told in ((" ", "has no words"), ("\u200b", "has no words"), (LONG, "has 600 tokens")):
        with pytest.raises(ValueError, match=f"is invalid: it {told}"):
            task.annotation_for(text)


def test_recipes_learn_from_train2014_alone_and_no_run_validates_on_what_it_learned_from():
    both = ["task.train_on=train2014,val2014", "data.root=/nowhere", "random_init=true", "bert=none"]
    for name in ("finetune_vqa_base", "finetune_vqa_large", "finetune_vqa_base_paper", "finetune_vqa_large_paper"):
        recipe = RECIPES[name]()
        assert recipe.task.train_on == ("train2014",)
        assert recipe.task.validate_on == "val2014"
        epoch = -(-443_757 // recipe.data.batch)
        assert (recipe.validate_every, recipe.steps % epoch) == (epoch, 0)
        both_splits = override(recipe, [*both, "model.regions.random_init=true"])
        with pytest.raises(ValueError, match="task.validate_on=val2014 is one of task.train_on"):
            check_complete(both_splits)
        check_complete(override(both_splits, ["data.held_out=none"]))
        check_complete(override(both_splits, ["task.train_on=train2014"]))


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
        random_init=True,
        task=task.settings,
        data=DataConfig(root=str(root), dataset="vqa", held_out="vqa", batch=4, workers=0, flip=0.5),
        vocabulary=str(tmp_path / "vocab.txt"),
        steps=2,
    )
    metrics = train(recipe, World(0, 1, torch.device("cpu")))
    assert metrics["soft_accuracy_upper_bound"] == 1
    (row,) = map(json.loads, (root / "runs" / "tiny" / "predictions.jsonl").read_text().splitlines())
    assert row["question_id"] == 10
    assert row["answer"] in ANSWERS


def test_files_that_are_missing_torn_or_do_not_fit_are_named(task, tmp_path, samples):
    folder = tmp_path / "vqa"
    with pytest.raises(ValueError, match=r"there is no .*v2_OpenEnded_mscoco_test2015_questions.json; .*task.folder"):
        read_questions(folder, "test2015")
    with pytest.raises(ValueError, match=r"there is no answer list .*other.txt; .*task.answer_list"):
        read_answers(folder / "other.txt", 6)
    write_vqa(folder, "one", {10: ["yes"] * 10})
    write_vqa(folder, "two", {10: ["yes"] * 10, 12: ["no"] * 10})
    annotations, questions = (
        folder / "v2_mscoco_one_annotations.json",
        folder / "v2_OpenEnded_mscoco_one_questions.json",
    )
    whole = annotations.read_text()
    annotations.write_text((folder / "v2_mscoco_two_annotations.json").read_text())
    with pytest.raises(
        ValueError, match=r"1 ids of .*one_annotations.json are not in .*one_questions.json, such as 12"
    ):
        read_questions(folder, "one")
    annotations.write_text(json.dumps({"annotations": []}))
    with pytest.raises(ValueError, match=r"1 ids of .*one_questions.json miss in .*one_annotations.json, such as 10"):
        read_questions(folder, "one")
    for before, after, told in (
        ("question_id", "id", r"annotations\[0\]: KeyError"),
        ("answer_type", "type", r"annotations\[0\]: KeyError"),
        ('"question_id": 10', '"question_id": [10]', r"annotations\[0\]: TypeError"),
        ('"multiple_choice_answer": "yes"', '"multiple_choice_answer": 1', r"annotations\[0\]: .* no text"),
    ):
        annotations.write_text(whole.replace(before, after))
        with pytest.raises(ValueError, match=rf"one_annotations.json is not in VQA 2.0's format, {told}"):
            read_questions(folder, "one")
    annotations.write_text(whole[:-9])
    with pytest.raises(ValueError, match=r"v2_mscoco_one_annotations.json is not JSON, or is torn"):
        read_questions(folder, "one")
    annotations.write_text(whole)
    asked = questions.read_text()
    for before, after, told in (
        ('"image_id": 1', '"image_id": 2', r"questions\[0\]: .*it is about image 2, its annotation about 1"),
        ("image_id", "image", r"questions\[0\]: KeyError\('image_id'\)"),
        ('"Is it on the left, 10?"', "7", r"questions\[0\]: .*the question is no text: 7"),
        ('"questions"', '"rows"', "questions: no such list"),
    ):
        questions.write_text(asked.replace(before, after))
        with pytest.raises(ValueError, match=rf"one_questions.json is not in VQA 2.0's format, {told}"):
            read_questions(folder, "one")
    (folder / "answers_vqa.txt").write_text("a\nb\nc\nd\ne\nf\n")
    with pytest.raises(ValueError, match="no question of train2014 has an answer of answers_vqa.txt"):
        changed(task).examples(urls(samples), None)
