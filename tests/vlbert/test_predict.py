"""Asking about a picture of one's own: for every task, from a file to the answer and its drawing."""

import dataclasses
import importlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features
from places import PROJECT
from seeded import put_checkpoint
from tiny import TINY_MODEL, tiny_recipe, tiny_sample

import vlbert.tasks
from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.drawing import colour_of
from detectors.examples import BAD_IMAGE, read_bgr
from detectors.faster_rcnn import DEMO, FasterRCNN
from detectors.ground_truth import LabelledImage
from detectors.rebuild import rebuild_detector
from detectors.run import detect_shard
from detectors.select import SelectionSettings
from detectors.weights.files import load_weights, read_config
from storage.catalog import Catalog, Row
from storage.object_store import open_store
from storage.sample import Sample
from training.distributed import World
from training.optimizer import make_optimizer
from training.writer import Writer
from vlbert.checkpoint import save_checkpoint
from vlbert.config import RegionConfig
from vlbert.data.batch import Example, TextInput, collate
from vlbert.data.corpus import make_corpus
from vlbert.data.image_file import read_image
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.predict import (
    Prediction,
    Predictor,
    _parser,
    main,
    output_files,
    predictions_of,
    region_names,
    with_class_names,
)
from vlbert.tasks import make_task
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings
from vlbert.train import train

WEIGHTS = PROJECT / "demo" / "detector.safetensors"
WORDS = Vocabulary([*SPECIALS, "a", "and", "red", "green", "blue", "white", "square", "circle", "why", "is", "object"])
TASKS = {
    "pretraining": PretrainingSettings(max_elements=24),
    "refcoco": RefCOCOSettings(regions="detected"),
    "vcr-answers": VCRSettings(mask_size=2, max_tokens=40),
    "vcr-rationales": VCRSettings(mask_size=2, max_tokens=40, subtask="rationale"),
}
STARTED = dataclasses.replace(  # its Fast R-CNN from the demo's detector
    TINY_MODEL,
    regions=dataclasses.replace(TINY_MODEL.regions, resnet=DEMO.resnet, random_init=False, weights=str(WEIGHTS)),
)
WORDLESS = TextInput(*(np.zeros(2, np.int64) for _ in range(3)))
FOUR = ("a red square", "a green square", "a blue circle", "a white circle")


def demo_detector(**settings: object) -> FasterRCNNDetector:
    """The demo's, as its stages run it."""
    network = FasterRCNN.random_init(dataclasses.replace(read_config(WEIGHTS), post_nms=30), seed=0)
    selection = SelectionSettings(minimum=3)
    return FasterRCNNDetector(network, load_weights(network, WEIGHTS).metadata, DetectorSettings(selection, **settings))


def recorded(detector: FasterRCNNDetector) -> dict:
    """What a checkpoint carries of a detector."""
    return {"id": detector.id, "metadata": json.loads(json.dumps(detector.metadata))}


def save_model(root: Path, run: str, task: object, detector: dict | None, **changes: object) -> Path:
    """A checkpoint with random weights and this task."""
    recipe = tiny_recipe(root, task=task, **changes)
    torch.manual_seed(0)
    made = make_task(task, WORDS, 36)
    model = TaskModel(VLBert(recipe.model, len(WORDS)), made)
    optimizer = make_optimizer(model, recipe.optimizer)
    with Writer(open_store(str(root)), log=lambda line: None) as writer:
        folder = save_checkpoint(writer, run, 1, recipe, model, optimizer, WORDS, 36, {}, detector)
    return root / folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a run a task, and with photo.jpg."""
    root = tmp_path_factory.mktemp("predict")
    detector = recorded(demo_detector())
    for run, task in TASKS.items():
        save_model(root, run, task, detector, model=STARTED)
    (root / "answers.txt").write_text("yes\nno\nred\n")
    vqa = VQASettings(str(root), answer_list="answers.txt", answers=3, question_length=58, answers_from_words=False)
    keeping = dataclasses.replace(TINY_MODEL, regions=RegionConfig(features="precomputed", resnet=DEMO.resnet))
    save_model(root, "vqa", vqa, recorded(demo_detector(keep_features=True)), model=keeping)
    (root / "photo.jpg").write_bytes(tiny_sample(3).image)
    return root


def predictor(root: Path, run: str, **options: object) -> Predictor:
    return Predictor(str(root / "runs" / run), **options)


@pytest.fixture(scope="module")
def pretrained(root: Path) -> Predictor:
    return predictor(root, "pretraining")


def test_the_regions_of_a_picture_are_those_that_the_run_learned_from(tmp_path):
    samples = [dataclasses.replace(tiny_sample(i), regions=None) for i in range(8)]
    store = open_store(str(tmp_path))
    catalog, detector = Catalog(store, "captions"), demo_detector()
    catalog.commit("images", "00000", samples, [Row(i, s.key, "ok", url=s.url) for i, s in enumerate(samples)], {})
    assert detect_shard(catalog, "00000", detector)
    (tmp_path / "lines.txt").write_text("a red square\n" * 20)
    make_corpus(tmp_path / "text", [tmp_path / "lines.txt"], vocabulary=None, size=60, captions=[])
    recipe = tiny_recipe(tmp_path, steps=1, model=STARTED)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, held_out=None))
    train(recipe, World(0, 1, torch.device("cpu")))
    asked = Predictor(str(tmp_path / "runs" / "tiny"))
    stored = {sample.key: sample for sample in catalog.read(f"regions/{detector.id}", "00000")}
    (tmp_path / "photo.jpg").write_bytes(samples[5].image)
    seen, learned = asked.detect(tmp_path / "photo.jpg").regions, stored[samples[5].key].regions
    np.testing.assert_array_equal(seen.boxes, learned.boxes)
    np.testing.assert_array_equal(seen.class_probs, learned.class_probs)
    assert seen.detector == detector.id


def test_masked_words_are_filled_in(root, pretrained):
    said = pretrained(root / "photo.jpg", "a [MASK] square and a [MASK] zebra")
    row = said.row
    assert row["question"] == "a [MASK] square and a [MASK] [UNK]", "a word that the vocabulary lacks is shown as such"
    assert re.fullmatch(r"a (\S+) square and a (\S+) \[UNK\]", said.answer)
    assert [mask["position"] for mask in row["masks"]] == [2, 6]
    probabilities = [one["probability"] for one in row["ranking"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert len(probabilities) == 5
    first, second = (mask["guesses"][0] for mask in row["masks"])
    assert said.answer == f"a {first['answer']} square and a {second['answer']} [UNK]"
    assert row["probability"] == pytest.approx(first["probability"] * second["probability"])
    assert row["ranking"][0] == {"answer": said.answer, "probability": row["probability"]}
    assert (row["ground_truth"], row["score"]) == (None, None)
    assert pretrained.task.metrics([row]) == {}, "nobody knows the truth"


def test_the_guess_is_the_models_own(root, pretrained):
    sample = pretrained.detect(root / "photo.jpg")
    seen = prepare_image(sample, pretrained.recipe.model.regions, flip=False)
    ask = pretrained.task.annotation_for("a [MASK] square")
    batch = collate([pretrained.task.example(sample, seen, ask, np.random.default_rng(0))])
    assert batch.tokens[0].tolist() == [WORDS.ids[w] for w in ("[CLS]", "a", "[MASK]", "square", "[SEP]")]
    with torch.no_grad():
        model = pretrained.model
        encoded = model.vlbert(batch)
        logits = model.head.words(model.vlbert, encoded.text[:, 2])[0]
    (mask,) = pretrained(sample, "a [MASK] square").row["masks"]
    assert mask["guesses"][0]["answer"] == WORDS.tokens[int(logits.argmax())]
    assert mask["guesses"][0]["probability"] == pytest.approx(float(logits.softmax(0).max()))


def test_hidden_regions_are_guessed_by_the_names_of_the_detectors_classes(root, pretrained):
    photo = Image.open(root / "photo.jpg")
    sample = pretrained.detect(
        encoded(photo.resize((3 * photo.width, 3 * photo.height)), "JPEG")
    )  # the model sees a third
    said = pretrained(sample, mask_regions=(2,))
    assert said.batch.region_masked.nonzero().tolist() == [[0, 2]], "region 0 is the whole image"
    (masked,) = said.row["masked_regions"]
    classes = pretrained.detector.metadata["classes"]
    assert masked["detected_name"] == classes[sample.regions.labels_background_first()[1] - 1]
    assert all(g["answer"] == ["nothing", *classes][g["class"]] for g in masked["guesses"])
    (box,) = said.row["boxes"]
    np.testing.assert_allclose(box["box"], sample.regions.boxes[1], atol=3.1)  # a box ends a pixel inside what is seen
    assert box["name"] == f"2: {masked['guesses'][0]['answer']}?"
    assert "masks" in said.row
    assert said.row["masks"] == []


def test_what_is_hidden_is_not_seen(root, pretrained):
    """The pixels of a hidden region may be anything: what is guessed there stays the same."""
    sample = pretrained.detect(root / "photo.jpg")
    region = dataclasses.replace(sample.regions.take(np.array([0])), boxes=np.array([[16, 16, 48, 48]], np.float32))
    pixels = np.asarray(Image.open(io.BytesIO(sample.image))).copy()
    said = []
    for colour in ((10, 20, 30), (240, 20, 30)):
        pixels[18:46, 18:46] = colour
        data = io.BytesIO()
        Image.fromarray(pixels).save(data, "PNG")
        file = root / "altered.png"
        file.write_bytes(data.getvalue())
        altered = dataclasses.replace(read_image(file), regions=region)
        said.append(
            pretrained(altered, "a [MASK]", mask_regions=(1,)).row["masked_regions"][0]["guesses"][0]["probability"]
        )
        said.append(pretrained(altered, "a [MASK]").row["masks"][0]["guesses"][0]["probability"])
    # JPEG lets a little of it through into the pixels around.
    assert abs(said[0] - said[2]) < abs(said[1] - said[3]) / 3


def test_words_that_the_vocabulary_lacks_are_told(root, pretrained):
    finder = predictor(root, "refcoco")
    told = [line for line, _ in finder(root / "photo.jpg", "the red zebra").lines()]
    assert told[:2] == ["the red zebra", "read as: [CLS] [UNK] red [UNK] [SEP]"]
    assert not any("read as" in line for line, _ in finder(root / "photo.jpg", "a red square").lines())


def test_an_expression_finds_a_region(root):
    finder = predictor(root, "refcoco")
    sample = finder.detect(root / "photo.jpg")
    said = finder(sample, "the red square")
    assert said.answer in said.names, "number and class"
    chosen = said.names.index(said.answer)
    np.testing.assert_allclose(said.row["boxes"][0]["box"], sample.regions.boxes[chosen], atol=0.01)
    assert said.row["boxes"][0]["name"] == said.answer
    assert len(said.row["ranking"]) == min(5, len(sample.regions))
    assert all(one["answer"] == said.names[one["region"] - 1] for one in said.row["ranking"])
    assert [line for line, sure in said.lines() if sure] == [one["answer"] for one in said.row["ranking"]]


def colours_in(picture: Image.Image, box: np.ndarray) -> set[tuple[int, ...]]:
    """Those in the middle of the left edge of a box, in pixels of a picture with nothing written below it."""
    left, middle = round(box[0]), round((box[1] + box[3]) / 2)
    pixels = np.asarray(picture)[middle, max(0, left - 1) : left + 5]
    return {tuple(map(int, pixel)) for pixel in pixels}


def plain_picture(boxes: list[list[float]]) -> Sample:
    """A grey sample of 800 x 400 pixels with these regions, drawn as large as it is."""
    sample = read_image(encoded(Image.new("RGB", (800, 400), (128, 128, 128)), "PNG"))
    regions = tiny_sample(1, len(boxes)).regions
    return dataclasses.replace(sample, regions=dataclasses.replace(regions, boxes=np.array(boxes, np.float32)))


def test_of_all_regions_the_likeliest_is_drawn_on_top():
    boxes = [[100, 100, 300, 300]] * 3 + [[500, 100, 700, 300]]
    drawn = Prediction(plain_picture(boxes), ["1", "2", "3", "4"]).draw()
    assert colour_of(1) in colours_in(drawn, boxes[0])
    assert not {colour_of(2), colour_of(3)} & colours_in(drawn, boxes[0])
    assert colour_of(4) in colours_in(drawn, boxes[3])


def test_the_regions_of_a_ranking_are_drawn_thinly_in_the_colours_of_their_numbers():
    boxes = [[20, 100, 120, 300], [200, 100, 300, 300], [400, 100, 500, 300], [600, 100, 700, 300]]
    ranking = [{"answer": f"region {n}", "probability": 0.5, "region": n} for n in (3, 1, 4)]
    row = {"question": "", "answer": "region 3", "ground_truth": None, "ranking": ranking}
    row |= {"boxes": [{"name": "region 3", "box": boxes[2]}]}
    named = with_class_names(row, ["1 a", "2 b", "3 c", "4 d"], ["a", "b", "c", "d"])
    assert [one["answer"] for one in named["ranking"]] == ["3 c", "1 a", "4 d"]
    assert (named["answer"], named["boxes"]) == ("3 c", [{"name": "3 c", "box": boxes[2], "region": 3}])
    assert with_class_names(row, ["1", "2", "3", "4"], None)["answer"] == "region 3"
    sample = plain_picture(boxes)
    batch = collate([Example("k", WORDLESS, prepare_image(sample, TINY_MODEL.regions, flip=False).to_input())])
    said = Prediction(sample, ["1 a", "2 b", "3 c", "4 d"], named, batch, [["[CLS]"]])
    drawn = said.draw()
    for number in (1, 3, 4):
        assert colour_of(number) in colours_in(drawn, boxes[number - 1]), number
    assert colours_in(drawn, boxes[1]) == {(128, 128, 128)}, "it is in no ranking"
    thick = [sum(tuple(map(int, p)) == colour_of(n) for p in np.asarray(drawn)[200, :750]) for n in (1, 3)]
    assert thick == [4, 8], "both edges of the others, and of the winner"


def test_a_question_is_answered_from_the_list_on_the_detectors_features(root):
    answerer = predictor(root, "vqa", detector=WEIGHTS)
    said = answerer(root / "photo.jpg", "is a square red")
    assert said.sample.regions.features.shape[1] == RegionConfig(resnet=DEMO.resnet).channels
    assert said.answer in ("yes", "no", "red")
    assert {one["answer"] for one in said.row["ranking"]} == {"yes", "no", "red"}


def test_a_choice_and_then_its_rationale_are_made(root, tmp_path, capsys):
    runs = f"{root}/runs/vcr-answers,{root}/runs/vcr-rationales"
    rationales = ("[1] is red", "[1] and [2] is red", "a square is green", "a circle")
    out = tmp_path / "chosen.png"
    main([runs, str(root / "photo.jpg"), "why is [1] red", "--choices", *FOUR, "--rationales", *rationales])
    printed = capsys.readouterr().out
    answers = predictor(root, "vcr-answers")(root / "photo.jpg", "why is [1] red", choices=FOUR)
    assert answers.answer in FOUR
    behind = predictor(root, "vcr-rationales")(answers.sample, "why is [1] red", rationales, answer=answers.answer)
    assert f"why is object 1 red {answers.answer}\n" in printed
    assert f"{behind.row['probability']:.3f}  {behind.answer}" in printed
    assert FOUR[answers.chosen] == answers.answer
    assert (root / "photo-answer.png").is_file()
    assert (root / "photo-answer-rationale.png").is_file()
    assert not out.exists()


def test_a_rationale_is_asked_behind_the_answer_as_it_was_written(root):
    """With its mentions: the pieces that name a region carry its look."""
    runs = f"{root}/runs/vcr-answers,{root}/runs/vcr-rationales"
    choices = [f"[2] is {colour}" for colour in ("red", "green", "blue", "white")]
    options = ["why", "--choices", *choices, "--rationales", *FOUR]
    (answers, behind), _ = predictions_of(_parser().parse_args([runs, str(root / "photo.jpg"), *options]))
    colour = answers.answer.split()[-1]
    assert (answers.answer, answers.row["question"]) == (f"object 2 is {colour}", "why")
    assert behind.tokens[0][:6] == ["[CLS]", "why", "object", "is", colour, "[SEP]"]
    assert behind.batch.token_region[0].tolist()[:6] == [0, 0, 2, 0, 0, 0]


def test_both_runs_speak_of_one_detectors_regions(root):
    other = recorded(demo_detector()) | {"id": "0123456789ab"}
    save_model(root, "vcr-elsewhere", TASKS["vcr-rationales"], other, model=STARTED)
    options = [str(root / "photo.jpg"), "why", "--choices", *FOUR, "--rationales", *FOUR]
    same, elsewhere = (
        _parser().parse_args([f"{root}/runs/vcr-answers,{root}/runs/{run}", *options])
        for run in ("vcr-rationales", "vcr-elsewhere")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        predictions_of(same)
    with pytest.warns(
        UserWarning, match="vcr-elsewhere/step-0000001 was trained on the regions of detector 0123456789"
    ):
        (answers, behind), _ = predictions_of(elsewhere)
    assert behind.sample is answers.sample


def test_without_a_text_the_regions_are_drawn_with_their_numbers(root, capsys):
    main([str(root / "runs/pretraining"), str(root / "photo.jpg")])
    printed = capsys.readouterr().out
    assert re.search(r"\d regions: 1 \w+ \w+, 2 ", printed)
    assert re.search(r"imports [\d.]+ s of CPU; work [\d.]+ s: loading [\d.]+, detector", printed)
    assert f"drawn: {root / 'photo-regions.png'}\n" in printed
    with Image.open(root / "photo-regions.png") as drawn:
        assert max(drawn.size) >= 800


def test_regions_are_named_by_the_detectors_classes(root, pretrained):
    regions, classes = pretrained.detect(root / "photo.jpg").regions, pretrained.detector.metadata["classes"]
    named = [f"{number} {classes[label]}" for number, label in enumerate(regions.labels, 1)]
    assert pretrained(root / "photo.jpg").names == named
    order = [36, *range(36)]
    first = dataclasses.replace(
        regions, class_probs=regions.class_probs[:, order], labels=regions.labels + 1, background=0
    )
    assert region_names(first, classes) == named, "whatever the place of the background"
    assert region_names(first, None) == [str(number) for number in range(1, 1 + len(regions))]


def test_regions_are_numbered_from_1_whatever_is_asked(root):
    """What is drawn, what is typed and what is told."""
    chooser = predictor(root, "vcr-answers")
    sample = chooser.detect(root / "photo.jpg")
    assert [name.split()[0] for name in chooser(sample).names] == [str(n) for n in range(1, 1 + len(sample.regions))]
    said = chooser(sample, "why is [2] red", choices=FOUR)
    assert said.row["question"] == "why is object 2 red"
    assert 2 in said.batch.token_region[0], "row 0 is the whole image"
    (box,) = said.row["boxes"]
    np.testing.assert_allclose(box["box"], sample.regions.boxes[1], atol=0.01)
    assert (box["name"], box["region"]) == ("object 2", 2)


def test_what_was_hidden_alone_is_what_is_said(root, pretrained):
    said = pretrained(root / "photo.jpg", mask_regions=(2, 3))
    assert said.answer == said.row["masked_regions"][0]["guesses"][0]["answer"] != ""
    assert [box["region"] for box in said.row["boxes"]] == [2, 3]


def test_the_right_answer_that_was_given_is_told(root):
    told = predictor(root, "vqa", detector=WEIGHTS)(root / "photo.jpg", "is a square red", answer="yes").lines()
    assert ("ground truth: yes", None) in told


WRONG = {
    "nothing to guess": (("a red square",), "write [MASK]"),
    "no text": (("  ",), "the text is empty"),
    "choices": (("a [MASK]", "--choices", "x", "y"), "takes no choices"),
    "no such region": (("a [MASK]", "--mask-regions", "99"), "there is no region 99 to mask: the image has"),
    "region 0": (("a [MASK]", "--mask-regions", "0"), "there is no region 0 to mask"),
    "600 words": (
        ("a red " * 300 + "[MASK]",),
        "the text is too long: it has 601 tokens, and 18 fit beside the image; shorten it",
    ),
    "out": (("a [MASK]", "--out", "nowhere/x.png"), "there is no folder nowhere"),
    "kind of out": (("a [MASK]", "--out", "x.html"), "name a .png or .jpg file"),
    "field": (("a [MASK]", "--set", "task.nonsense=1"), "nonsense"),
    "no detector": (("--detector", "gone.safetensors"), "there is no file gone.safetensors"),
    "heads": (("a [MASK]", "--heads", "2.0"), "there is no 2.0; the model has layers 0 to 1 of heads 0 to 3"),
    "attention of nothing": (("--attention",), "--attention needs a text"),
    "choices of nothing": (("--choices", "x"), "--choices needs a text"),
    "rationales": (("a [MASK]", "--rationales", "x"), "--rationales: this checkpoint is none for VCR"),
    "recipe": (("a [MASK]", "--recipe", "nowhere:none"), "nowhere cannot be imported"),
    "no heads": (("a [MASK]", "--heads", "x"), "'x' is no layer.head"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_asked_is_one_clear_error(root, case, capsys):
    arguments, expected = WRONG[case]
    with pytest.raises(SystemExit) as stopped:
        main([str(root / "runs/pretraining"), str(root / "photo.jpg"), *arguments])
    assert expected in str(stopped.value)
    assert "\n" not in str(stopped.value)
    assert capsys.readouterr().out == "", "nothing is told before it"


def test_the_image_itself_is_never_overwritten(root):
    before = (root / "photo.jpg").read_bytes()
    with pytest.raises(SystemExit, match="is the image itself; name another file"):
        main([str(root / "runs/pretraining"), str(root / "photo.jpg"), "--out", str(root / "photo.jpg")])
    assert (root / "photo.jpg").read_bytes() == before


def test_a_long_text_that_leaves_room_for_few_regions_says_so(root, pretrained):
    with pytest.raises(ValueError, match=r"there is no region 9 to mask: the image has \d+, from 1$"):
        pretrained(root / "photo.jpg", "a [MASK]", mask_regions=(9,))
    sample = pretrained.detect(root / "photo.jpg")
    many = dataclasses.replace(sample, regions=sample.regions.take(np.zeros(30, int)))
    with pytest.raises(ValueError, match="has 30, from 1, of which the first 11 fit beside the text"):
        pretrained(many, "a " * 9 + "[MASK]", mask_regions=(20,))
    told = [line for line, _ in pretrained(many, "a " * 9 + "[MASK]").lines()]
    assert "11 of 30 regions are used: the text leaves no room for more" in told
    assert not any("were seen" in line for line, _ in pretrained(sample, "a [MASK]").lines())


def test_a_text_longer_than_the_models_positions_says_so(root):
    model = dataclasses.replace(STARTED, max_positions=16)
    task = PretrainingSettings(max_elements=None)
    short = Predictor(str(save_model(root, "short", task, recorded(demo_detector()), model=model)))
    assert short(root / "photo.jpg", "a " * 11 + "[MASK]").answer  # with [CLS] and [SEP] 14 pieces
    with pytest.raises(ValueError, match=r"it has 15 tokens with \[CLS\] and \[SEP\], the model has room for 14"):
        short(root / "photo.jpg", "a " * 12 + "[MASK]")


def test_a_vcr_question_needs_four_choices(root):
    with pytest.raises(ValueError, match="2 choices are given; VCR chooses between 4"):
        predictor(root, "vcr-answers")(root / "photo.jpg", "why", choices=FOUR[:2])
    with pytest.raises(SystemExit, match="name both checkpoints, joined by a comma"):
        main([f"{root}/runs/vcr-answers", f"{root}/photo.jpg", "why", "--choices", *FOUR, "--rationales", *FOUR])
    with pytest.raises(SystemExit, match="2 checkpoints: two are for VCR alone"):
        main([f"{root}/runs/vcr-answers,{root}/runs/vcr-rationales", f"{root}/photo.jpg", "why", "--choices", *FOUR])


MISUSED = {
    "rationales of answers": (
        "vcr-answers",
        ("--rationales", *FOUR),
        "this checkpoint chooses answers; give --choices",
    ),
    "choices of rationales": (
        "vcr-rationales",
        ("--choices", *FOUR),
        "--choices: this checkpoint chooses rationales; give --answer and --rationales",
    ),
    "an answer beside choices": ("vcr-answers", ("--choices", *FOUR, "--answer", "x"), "--answer: this checkpoint"),
    "swapped": (
        "vcr-rationales,{}/runs/vcr-answers",
        ("--choices", *FOUR, "--rationales", *FOUR),
        "the checkpoints are the other way round: name that for answers first",
    ),
    "no VCR": (
        "pretraining,{}/runs/vcr-rationales",
        ("--choices", *FOUR, "--rationales", *FOUR),
        "VCR takes one for answers and one for rationales",
    ),
    "an answer beside two": (
        "vcr-answers,{}/runs/vcr-rationales",
        ("--choices", *FOUR, "--rationales", *FOUR, "--answer", "x"),
        "--answer: this checkpoint chooses answers",
    ),
    "600 words": ("vcr-answers", ("--choices", *FOUR[:3], "red " * 600), "600 in the longest of them, more than task"),
    "[0]": ("vcr-answers", ("--choices", "[0]", *FOUR[:3]), "'[0]' in '[0]' names no region"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_an_option_that_a_checkpoint_does_not_use_is_refused(root, case):
    run, options, expected = MISUSED[case]
    with pytest.raises(SystemExit) as stopped:
        main([f"{root}/runs/{run.format(root)}", str(root / "photo.jpg"), "why", *options])
    assert expected in str(stopped.value)


OWN_TASK = """
from dataclasses import dataclass, replace
from tiny import TINY_MODEL
from vlbert.recipes import finetune_refcoco_demo
from vlbert.tasks import TASKS
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

@dataclass(frozen=True)
class OwnSettings(PretrainingSettings):
    pass

def own():
    return replace(finetune_refcoco_demo(), task=OwnSettings(), model=TINY_MODEL)

TASKS[OwnSettings] = Pretraining
"""


def test_a_task_of_ones_own_is_asked_by_its_recipe(root, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vlbert.tasks, "TASKS", {})
    settings = importlib.import_module("own_task").OwnSettings(max_elements=24)
    folder = save_model(tmp_path, "own", settings, recorded(demo_detector()))
    asked = [str(folder), str(root / "photo.jpg"), "a [MASK]", "--out", str(tmp_path / "out.png")]
    asked += ["--detector", str(WEIGHTS)]
    monkeypatch.setattr(vlbert.tasks, "TASKS", {})  # as in a new process
    del sys.modules["own_task"]
    with pytest.raises(SystemExit, match="OwnSettings"):
        main(asked)
    with pytest.raises(SystemExit, match="was trained for another task than recipe finetune_refcoco_demo"):
        main([*asked, "--recipe", "finetune_refcoco_demo"])
    main([*asked, "--recipe", "own_task:own"])
    assert capsys.readouterr().out.startswith("a [MASK]\n")
    del sys.modules["own_task"]


def test_a_checkpoint_that_cannot_be_asked_is_named(root, tmp_path):
    VLBert(TINY_MODEL, len(WORDS), WORDS).save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match="headless holds a VL-BERT without the head of a task"):
        Predictor(str(tmp_path / "headless"))
    with pytest.raises(ValueError, match="holds no model: it has no config.json"):
        Predictor(str(tmp_path))
    put_checkpoint(open_store(str(tmp_path)), "runs/detector/step-0000001", {}, {"optimizer.safetensors": b""})
    with pytest.raises(ValueError, match="step-0000001 holds no model: it has no config.json"):
        Predictor(str(tmp_path / "runs/detector"))
    copied = tmp_path / "without-words"
    copied.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copied / name).write_bytes((root / "runs/pretraining/step-0000001" / name).read_bytes())
    config = json.loads((copied / "config.json").read_text())
    config["recipe"]["vocabulary"] = None
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="came without a vocabulary; give its own with vocabulary=vocab.txt"):
        Predictor(str(copied))


# --- images -----------------------------------------------------------------------------------------------------------


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def big_endian(picture: Image.Image) -> bytes:
    """A TIFF as Motorola's machines wrote it."""
    swapped = np.asarray(picture).astype(">u2")
    return encoded(Image.frombuffer("I;16B", picture.size, swapped.tobytes(), "raw", "I;16B", 0, 1), "TIFF")


def test_pictures_of_any_format_are_taken_as_ingest_takes_them():
    colours = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    assert (read_image(encoded(colours, "JPEG", exif=turned)).width, colours.width) == (60, 90)
    for kind in ("TIFF", *(["AVIF"] if features.check("avif") else [])):
        assert read_image(encoded(colours, kind, exif=turned)).width == 60, kind
    assert "alpha" in read_image(encoded(Image.new("RGBA", (90, 60), (255, 0, 0, 90)), "PNG")).flags
    sixteen = Image.fromarray(np.linspace(0, 65535, 5400).reshape(60, 90).astype(np.uint16))
    for kind in ("PNG", "TIFF"):
        grey = np.asarray(Image.open(io.BytesIO(read_image(encoded(sixteen, kind)).image)))
        assert (grey.shape, int(grey[0, 0]), int(grey[-1, -1])) == ((60, 90), 0, 255)
    wide = Image.fromarray(np.asarray(sixteen).astype(np.int32))
    for mode, data in (("I;16B", big_endian(sixteen)), ("I", encoded(wide, "TIFF"))):
        assert Image.open(io.BytesIO(data)).mode == mode
        grey = np.asarray(Image.open(io.BytesIO(read_image(data).image))).astype(int)
        np.testing.assert_allclose(grey, np.asarray(sixteen) / 257, atol=3, err_msg=mode)
    assert max(vars(read_image(encoded(colours.resize((1500, 1000)), "WEBP")))[n] for n in ("width", "height")) == 1024


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            b"no picture at all",
            "TIFF: 17 bytes",
        ),
        (encoded(Image.new("RGB", (90, 60)), "TIFF")[:400], "(truncated)"),
        (encoded(Image.new("F", (90, 60), 0.5), "TIFF"), "its pixels are floating-point numbers; save it with 8 or 16"),
        (encoded(Image.new("I", (90, 60), 65536), "TIFF"), "its pixels are 32-bit numbers, 65536 to 65536; save it"),
        (encoded(Image.new("I", (90, 60), -1), "TIFF"), "its pixels are 32-bit numbers, -1 to -1; save it"),
        (encoded(Image.new("RGB", (90, 60)), "JPEG")[:400], "(truncated)"),
        (encoded(Image.new("RGB", (20, 20)), "PNG"), "the shorter side is under 32"),
        (encoded(Image.new("RGB", (900, 40)), "PNG"), "one side is over 8 times the other"),
        (encoded(Image.new("1", (9000, 9000)), "TIFF", compression="group4"), "9000x9000, more than 50000000"),
        (encoded(Image.new("1", (9000, 9000)), "PNG"), "9000x9000, more than 50000000"),
    ],
    ids=["text", "torn TIFF", "F", "I", "negative", "torn", "tiny", "banner", "huge TIFF", "huge"],
)
def test_a_picture_that_cannot_be_taken_is_one_clear_error(tmp_path, data, expected):
    file = tmp_path / "photo.any"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(expected)) as stopped:
        read_image(file)
    assert str(file) in str(stopped.value)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_image(tmp_path / "gone.jpg")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_image(tmp_path)


def test_ghostscript_is_never_started(tmp_path, monkeypatch):
    """An EPS by another name: Pillow would hand it to `gs`, which is a program that runs programs."""
    mark, gs = tmp_path / "ran", tmp_path / "bin" / "gs"
    gs.parent.mkdir()
    gs.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", str(gs.parent), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    file = tmp_path / "photo.jpg"
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(ValueError, match="photo.jpg cannot be taken: none of JPEG, PNG"):
        read_image(file)
    with pytest.raises(BAD_IMAGE):
        read_bgr(LabelledImage("a", file, 100, 100, *(np.zeros(0),) * 3, ()))
    assert not mark.exists()
    with pytest.raises(subprocess.CalledProcessError), Image.open(file) as opened:  # it is hostile
        opened.load()
    assert mark.exists()


@pytest.mark.parametrize("kind", ["path", "text", "bytes", "pillow", "grey", "alpha"])
def test_a_picture_may_be_a_file_its_bytes_or_pillows(root, kind):
    file = root / "photo.jpg"
    picture = Image.open(file)
    given = {
        "path": file,
        "text": str(file),
        "bytes": file.read_bytes(),
        "pillow": picture,
        "grey": picture.convert("L"),
        "alpha": picture.convert("RGBA"),
    }[kind]
    read, wanted = read_image(given), given if kind == "grey" else picture
    assert (read.width, read.height) == picture.size
    found = np.asarray(Image.open(io.BytesIO(read.image))).astype(int)
    assert np.abs(found - np.asarray(wanted).astype(int)).mean() < 3


def test_pillows_picture_that_cannot_be_taken_is_one_clear_error():
    torn = Image.open(io.BytesIO(encoded(Image.new("RGB", (90, 60)), "PNG")[:50]))
    empty = [
        (Image.new(mode, size), "has no pixels") for mode in ("RGB", "I", "L") for size in ((0, 0), (0, 9), (9, 0))
    ]
    for picture, says in (
        (Image.new("F", (90, 60)), "floating-point"),
        (Image.new("L", (20, 20)), "the shorter side"),
        (torn, r"\(truncated\)"),
        *empty,
    ):
        with pytest.raises(ValueError, match=f"the image cannot be taken: .*{says}"):
            read_image(picture)


def test_a_prediction_shows_itself_in_a_line_and_in_a_notebook(root, pretrained):
    asked, seen = pretrained(root / "photo.jpg", "a [MASK] star"), pretrained(Image.open(root / "photo.jpg"))
    for prediction in (asked, seen):
        assert len(repr(prediction)) < 200
        assert f"{len(prediction.names)} regions" in repr(prediction)
        shown = Image.open(io.BytesIO(prediction._repr_png_()))
        assert np.array_equal(np.asarray(shown), np.asarray(prediction.draw()))
    assert asked.answer in repr(asked)


def test_a_folder_that_cannot_be_written_to_names_out(tmp_path):
    options = _parser().parse_args(["checkpoint", "/proc/self/exe"])  # in a folder that not even root can write to
    with pytest.raises(ValueError, match=r"/proc/self cannot be written to .*--out FILE"):
        output_files(options, 1)
    options = _parser().parse_args(["checkpoint", "/proc/self/exe", "--out", str(tmp_path / "a.png")])
    assert output_files(options, 1) == [tmp_path / "a.png"]
    assert not list(tmp_path.iterdir()), "the trial leaves nothing"


# --- the detector -----------------------------------------------------------------------------------------------------


def test_another_weight_file_is_refused_by_its_hash(root, tmp_path):
    other = tmp_path / "other.safetensors"
    data = bytearray(WEIGHTS.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    with pytest.raises(ValueError, match=r"other.safetensors \(sha256 \w+...\) is not what .* learned from: detector"):
        predictor(root, "pretraining", detector=other).detect(root / "photo.jpg")


def test_another_setting_is_told_by_name():
    there = recorded(demo_detector())
    there["metadata"] |= {"rules_version": 1}
    there["id"] = "0" * 12
    with pytest.warns(UserWarning, match="of detector 000000000000, .*: rules_version is 3 here and 1 there$"):
        rebuild_detector(there, WEIGHTS, "the run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rebuild_detector(recorded(demo_detector(batch=4)), WEIGHTS, "the run")


def test_a_run_without_a_weight_file_takes_that_of_the_run_that_it_started_from(root, tmp_path):
    first = save_model(tmp_path, "first", TASKS["pretraining"], recorded(demo_detector()), model=STARTED)
    fine = dataclasses.replace(STARTED, regions=dataclasses.replace(STARTED.regions, weights=None))
    for run, before in (("second", "first"), ("third", "second")):
        before = f"{tmp_path}/runs/{before}"
        save_model(tmp_path, run, TASKS["refcoco"], recorded(demo_detector()), model=fine, init_from=before)
    assert Predictor(f"{tmp_path}/runs/third").detect(root / "photo.jpg").regions.detector == demo_detector().id
    first.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="and nothing says where that is; name it: --detector FILE"):
        Predictor(f"{tmp_path}/runs/third").detect(root / "photo.jpg")


def test_a_model_on_precomputed_features_gets_them_from_the_detector_that_is_named(root):
    settings = TASKS["refcoco"]
    about = {"id": "beef", "metadata": {"backend": "annotated", "random_init": False}}
    keeping = dataclasses.replace(TINY_MODEL, regions=RegionConfig(features="precomputed", resnet=DEMO.resnet))
    folder = save_model(root, "on-features", settings, about, model=keeping)
    with pytest.warns(UserWarning, match="may be of another kind"):
        said = Predictor(str(folder), detector=WEIGHTS)(root / "photo.jpg", "a red square")
    assert said.sample.regions.features.shape == (len(said.names), keeping.regions.channels)


def test_a_run_on_annotated_boxes_asks_for_a_detector(root):
    folder = save_model(
        root, "annotated", TASKS["refcoco"], {"id": "beef", "metadata": {"backend": "annotated", "random_init": False}}
    )
    with pytest.raises(ValueError, match="its regions came from annotated boxes; name a detector: --detector FILE"):
        Predictor(str(folder)).detect(root / "photo.jpg")
    with pytest.warns(UserWarning, match="may be of another kind"):
        assert len(Predictor(str(folder), detector=WEIGHTS)(root / "photo.jpg", "red").row["ranking"]) == 5


def test_a_checkpoint_that_names_no_detector_asks_for_one(root):
    folder = save_model(root, "nameless", TASKS["refcoco"], None)
    with pytest.raises(ValueError, match="it carries no detector's description; name a detector: --detector FILE"):
        Predictor(str(folder)).detect(root / "photo.jpg")


def test_a_detector_with_random_weights_is_made_again(root):
    network = FasterRCNN.random_init(DEMO, 7)
    selection = SelectionSettings(minimum=3)
    untrained = FasterRCNNDetector(network, {"random_init": True, "seed": 7}, DetectorSettings(selection))
    folder = save_model(root, "untrained", TASKS["refcoco"], recorded(untrained))
    seen = Predictor(str(folder)).detect(root / "photo.jpg")
    (found,) = untrained.detect([seen])
    assert seen.regions.detector == untrained.id
    np.testing.assert_array_equal(seen.regions.boxes, found.boxes)


def test_the_code_of_the_documents_runs_as_it_stands_there(root, tmp_path, monkeypatch, capsys):
    house = WEIGHTS.parents[1]
    (readme,) = re.findall(r"(?:    .*(?:predictor|Predictor).*\n)+", (house / "README.md").read_text())
    (guide,) = re.findall(r"```python\n(.*?)```", (house / "docs" / "predict.md").read_text(), re.DOTALL)
    (tmp_path / "photo.jpg").write_bytes((root / "photo.jpg").read_bytes())
    monkeypatch.chdir(tmp_path)
    for code in (textwrap.dedent(readme), guide):
        exec(code.replace("demo-root/runs/pretrain", str(root / "runs/pretraining")), {})
        assert re.search(r"^a (red )?\S+", capsys.readouterr().out)
    assert (tmp_path / "answer.png").is_file()


@pytest.mark.slow
def test_the_command_runs_as_the_readme_has_it(root):
    command = [sys.executable, "-m", "vlbert.predict", str(root / "runs/pretraining"), str(root / "photo.jpg")]
    run = subprocess.run([*command, "a [MASK] square"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "drawn: " in run.stdout
    run = subprocess.run([*command[:-1], str(root / "gone.jpg")], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr.count("\n")) == (1, 1), run.stderr
    assert "gone.jpg cannot be read: No such file" in run.stderr
