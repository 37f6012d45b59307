"""Predictions about a user's own image: for every task, from a file to the answer and its drawing."""

import dataclasses
import io
import re
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from places import PROJECT
from predicted import ON_FEATURES, WEIGHTS, WORDS, demo_detector, recorded, save_model
from tiny import TINY_MODEL, tiny_sample

import vlbert.tasks
from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import DEMO, FasterRCNN
from detectors.rebuild import rebuild_detector
from detectors.run import detect_shard
from detectors.select import SelectionSettings
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import Row
from storage.object_store import open_store
from storage.sample import Sample
from vlbert.commands import main as run_command
from vlbert.config import RegionConfig
from vlbert.data.batch import collate
from vlbert.predict.command import main
from vlbert.predict.predictor import Predictor, name_regions
from vlbert.tasks.refcoco import RefCOCOSettings

REFCOCO = RefCOCOSettings(regions="detected")
FOUR = ("a red square", "a green square", "a blue circle", "a white circle")
ANNOTATED = {"id": "beef", "metadata": {"backend": "annotated", "random_init": False}}


def predictor(models: Path, run: str, **options: object) -> Predictor:
    return Predictor(str(models / "runs" / run), **options)


@pytest.fixture(scope="module")
def pretrained(models: Path) -> Predictor:
    return predictor(models, "pretraining")


@pytest.fixture(scope="module")
def sample(models: Path, pretrained: Predictor) -> Sample:
    return pretrained.detect(models / "photo.jpg")


# --- what each task predicts ------------------------------------------------------------------------------------------


def test_the_regions_of_an_image_are_those_of_the_shards(tmp_path, models, pretrained):
    sample = dataclasses.replace(tiny_sample(1), regions=None)
    catalog, detector = Catalog(open_store(str(tmp_path)), "captions"), demo_detector()
    commit_shard(catalog, "images", "00000", [sample], [Row(0, sample.key, "ok", url=sample.url)], {})
    assert detect_shard(catalog, "00000", detector)
    (stored,) = (one.regions for one in catalog.read(f"regions/{detector.id}", "00000"))
    (tmp_path / "photo.jpg").write_bytes(sample.image)
    found = pretrained.detect(tmp_path / "photo.jpg").regions
    np.testing.assert_array_equal(found.boxes, stored.boxes)
    np.testing.assert_array_equal(found.class_probs, stored.class_probs)
    assert found.detector == detector.id


def test_masked_words_are_filled_in(pretrained, sample):
    prediction = pretrained(sample, "a [MASK] square and a [MASK] zebra")
    row = prediction.row
    assert row["question"] == "a [MASK] square and a [MASK] [UNK]", "a word that the vocabulary lacks"
    assert [mask["position"] for mask in row["masks"]] == [2, 6]
    probabilities = [one["probability"] for one in row["ranking"]]
    assert probabilities == sorted(probabilities, reverse=True)
    first, second = (mask["guesses"][0] for mask in row["masks"])
    assert prediction.answer == f"a {first['answer']} square and a {second['answer']} [UNK]"
    assert row["probability"] == pytest.approx(first["probability"] * second["probability"])
    batch = collate([pretrained.make_example(sample, pretrained.task.annotation_for(prediction.row["question"]))])
    with torch.no_grad():
        model = pretrained.model
        likely = model.head.words(model.vlbert, model.vlbert(batch).text[:, 2])[0].softmax(0)
    assert (first["answer"], first["probability"]) == (WORDS.tokens[int(likely.argmax())], pytest.approx(likely.max()))


def test_masked_regions_are_predicted_by_the_names_of_the_detectors_classes(models, pretrained):
    photo, file = Image.open(models / "photo.jpg"), io.BytesIO()
    photo.resize((3 * photo.width, 3 * photo.height)).save(file, "JPEG")
    larger = pretrained.detect(file.getvalue())
    prediction = pretrained(larger, mask_regions=(2, 3))
    assert prediction.batch.region_masked.nonzero().tolist() == [[0, 2], [0, 3]], "region 0 is the whole image"
    masked = prediction.row["masked_regions"]
    classes = pretrained.detector.metadata["classes"]
    assert masked[0]["detected_name"] == classes[larger.regions.labels_background_first()[1] - 1]
    for guess in masked[0]["guesses"]:
        assert guess["answer"] == ["background", *classes][guess["class"]]
    names = [f"{number} {classes[label]}" for number, label in enumerate(larger.regions.labels, 1)]
    background_first = dataclasses.replace(larger.regions, labels=larger.regions.labels + 1, background=0)
    assert prediction.names == name_regions(background_first, classes) == names
    assert name_regions(background_first, None) == [str(number) for number in range(1, 1 + len(names))]
    first, _ = prediction.row["boxes"]
    np.testing.assert_allclose(first["box"], larger.regions.boxes[1], atol=3.1)  # the model's image is a third as wide
    assert first["name"] == f"2: {masked[0]['guesses'][0]['answer']}?"
    assert prediction.row["masks"] == []
    assert prediction.answer == masked[0]["guesses"][0]["answer"] != ""
    assert [box["region"] for box in prediction.row["boxes"]] == [2, 3]


def test_an_expression_finds_a_region(models, sample):
    prediction = predictor(models, "refcoco")(sample, "the red zebra")
    chosen = prediction.names.index(prediction.answer)
    np.testing.assert_allclose(prediction.row["boxes"][0]["box"], sample.regions.boxes[chosen], atol=0.01)
    assert prediction.row["boxes"][0]["name"] == prediction.answer
    assert len(prediction.row["ranking"]) == min(5, len(sample.regions))
    assert all(one["answer"] == prediction.names[one["region"] - 1] for one in prediction.row["ranking"])
    lines = prediction.lines()
    assert [line for line, probability in lines if probability] == [one["answer"] for one in prediction.row["ranking"]]
    assert [line for line, _ in lines[:2]] == ["the red zebra", "read as: [CLS] [UNK] red [UNK] [SEP]"]


def test_a_question_is_answered_from_the_list_on_the_detectors_features(models):
    prediction = predictor(models, "vqa", detector=WEIGHTS)(models / "photo.jpg", "is a square red", answer="yes")
    assert prediction.sample.regions.features.shape[1] == RegionConfig(resnet=DEMO.resnet).channels
    assert {one["answer"] for one in prediction.row["ranking"]} == {"yes", "no", "red"}
    assert ("ground truth: yes", None) in prediction.lines()


def test_vcr_names_regions_by_their_numbers_from_1_and_rationales_explain_an_answer(models, sample, capsys, tmp_path):
    prediction = predictor(models, "vcr-answers")(sample, "why is [2] red", choices=FOUR)
    assert [name.split()[0] for name in prediction.names] == [str(n) for n in range(1, 1 + len(sample.regions))]
    assert prediction.row["question"] == "why is object 2 red"
    (box,) = prediction.row["boxes"]
    np.testing.assert_allclose(box["box"], sample.regions.boxes[1], atol=0.01)
    assert (box["name"], box["region"]) == ("object 2", 2)

    prediction = predictor(models, "vcr")(models / "photo.jpg", "why", FOUR, "[2] is red")
    assert prediction.tokens[0][:6] == ["[CLS]", "why", "object", "is", "red", "[SEP]"]
    assert prediction.batch.token_region[0].tolist()[:6] == [0, 0, 2, 0, 0, 0]
    arguments = [f"{models}/runs/vcr", f"{models}/photo.jpg", "why", "--answer", "[2] is red", "--choices", *FOUR]
    main([*arguments, "--out", str(tmp_path / "out.png"), "--attention"])
    printed = capsys.readouterr().out
    assert printed.startswith("why object 2 is red\n")
    assert f"{prediction.row['probability']:.3f}  {prediction.answer}" in printed
    assert {file.name for file in tmp_path.iterdir()} == {"out.png", "out-attention.png"}


def test_without_a_text_the_regions_are_drawn_with_their_numbers(models, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {*models.iterdir()}
    command = [str(models / "runs/pretraining"), str(models / "photo.jpg"), "--task.max_elements=30"]
    main(command)
    printed = capsys.readouterr().out
    assert re.search(r"^\d+ regions: 1 \w+ \w+, 2 ", printed)
    assert "drawn: photo-regions.png\n" in printed
    with Image.open("photo-regions.png") as drawn:
        assert max(drawn.size) >= 800
    (tmp_path / "drawings").mkdir()
    main([*command, "--out", "drawings"])
    assert {str(file) for file in Path().rglob("*.png")} == {"photo-regions.png", "drawings/photo-regions.png"}
    assert {*models.iterdir()} == before, "nothing lands beside the image"


def test_vilbert_reads_as_many_regions_as_in_training(models):
    vilbert = predictor(models, "vilbert", detector=WEIGHTS)
    sample = vilbert.detect(models / "photo.jpg")
    many = dataclasses.replace(sample, regions=sample.regions.take(np.zeros(9, int)))
    prediction = vilbert(many, "a [MASK]")
    assert prediction.encoded.regions.shape[1] == 5
    assert "the model reads the first 4 of 9 regions" in [line for line, _ in prediction.lines()]
    with pytest.raises(ValueError, match="no region 5 to mask: the image has 9, from 1, of which the model reads the"):
        vilbert(many, "a [MASK]", mask_regions=(5,))


def test_lists_give_lists_in_batches(models, monkeypatch):
    asks = predictor(models, "pretraining", detector=WEIGHTS)
    photo, texts = models / "photo.jpg", ["a [MASK]", "a red [MASK] and a [MASK]", "[MASK] square"]
    one_by_one = [asks(photo, text) for text in texts]
    sizes, original = [], asks.task.predictions

    def counted(vlbert, head, encoded, batch):
        sizes.append(len(batch.keys))
        return original(vlbert, head, encoded, batch)

    monkeypatch.setattr(asks.task, "predictions", counted)
    for images in (photo, [photo] * 3, [asks.detect(photo)] * 3):
        together = asks(images, texts, batch_size=2)
        assert [found.answer for found in together] == [found.answer for found in one_by_one]
        assert [found.tokens for found in together] == [found.tokens for found in one_by_one]
        for found, alone in zip(together, one_by_one, strict=True):
            assert found.row["probability"] == pytest.approx(alone.row["probability"], rel=1e-4)
            assert found.lines()[0] == alone.lines()[0]
    assert sizes == [2, 1] * 3
    assert [found.answer for found in asks([photo, photo], texts[0])] == [one_by_one[0].answer] * 2
    assert [len(found.names) for found in asks([photo, photo])] == [len(one_by_one[0].names)] * 2
    assert asks([], []) == []
    choices = predictor(models, "vcr-answers", detector=WEIGHTS)([photo, photo], "why is [2] red", choices=FOUR)
    assert [len(found.tokens) for found in choices] == [4, 4]
    for call, named in (
        (lambda: asks([photo], texts), "there are 1 images and 3 texts"),
        (lambda: asks(photo, ["a [MASK]", None]), "a text of the list is None"),
        (lambda: asks([photo], texts[:1], attentions=True), "attentions are returned for one image and one text"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


def test_a_predictor_has_a_device_and_says_when_it_knows_drawn_shapes_only(models):
    asks = predictor(models, "pretraining", detector=WEIGHTS, device="cpu")
    assert asks.device == next(asks.model.parameters()).device == torch.device("cpu")
    with pytest.warns(
        UserWarning,
        match="the detector of .*runs/pretraining/step-0000001 knows drawn shapes only, such as a blue circle",
    ):
        assert asks.detector.settings.device == "cpu"
    assert asks.detector.id == recorded(demo_detector())["id"]
    with pytest.raises((RuntimeError, AssertionError)):
        predictor(models, "pretraining", device="cuda:99")


# --- refusals ---------------------------------------------------------------------------------------------------------

WRONG = [  # run, arguments, what is named
    ("pretraining", ("a red square",), "write [MASK]"),
    ("pretraining", ("a [MASK]", "--mask_regions", "99"), "there is no region 99 to mask: the image has"),
    ("pretraining", ("a red " * 300 + "[MASK]",), "the text is too long: it has 601 tokens, but 42 fit beside"),
    ("pretraining", ("a [MASK]", "--out", "nowhere/x.png"), "No such file or directory: 'nowhere/x.png'"),
    ("pretraining", ("a [MASK]", "--out", "ROOT/photo.jpg"), "is the image itself; name another file"),
    ("pretraining", ("--attention",), "give a text, and attentions=True"),
    ("pretraining", ("--detector", "gone.safetensors"), "gone.safetensors does not exist"),
    ("pretraining", ("--choices", "x"), "choices and answers belong to a question"),
    ("vcr-answers", ("why", "--choices", "[0]", *FOUR[:3]), "'[0]' in '[0]' names no region"),
]


@pytest.mark.parametrize(("run", "arguments", "named"), WRONG, ids=[f"{run} {named}" for run, _, named in WRONG])
def test_a_wrong_command_line_is_one_line(models, run, arguments, named, capsys):
    photo = (models / "photo.jpg").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        main([one.replace("ROOT", str(models)) for one in (f"ROOT/runs/{run}", "ROOT/photo.jpg", *arguments)])
    assert named in str(stopped.value)
    assert "\n" not in str(stopped.value) + capsys.readouterr().out, "and nothing is printed before it"
    assert (models / "photo.jpg").read_bytes() == photo


OWN = """
import dataclasses
from vlbert.tasks import TASKS
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings

@dataclasses.dataclass(frozen=True)
class OwnSettings(PretrainingSettings):
    pass

TASKS[OwnSettings] = Pretraining
"""


def test_a_task_that_only_a_file_knows_needs_that_file(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vlbert.tasks, "TASKS", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_task.py").write_text(OWN)
    named = ["--task_file", str(tmp_path / "own_task.py")]
    run_command(["recipes", *named])
    folder = save_model(
        tmp_path, "own", sys.modules.pop("own_task").OwnSettings(max_elements=24), recorded(demo_detector())
    )
    arguments = ["predict", str(folder), str(models / "photo.jpg"), "a [MASK]", "--out", f"{tmp_path}/out.png"]
    arguments += ["--detector", str(WEIGHTS)]
    vlbert.tasks.TASKS.clear()  # as in a new process
    with pytest.raises(SystemExit, match="OwnSettings; name the file of the task: --task_file FILE"):
        run_command(arguments)
    with pytest.raises(SystemExit, match="there is no --task_file gone.py"):
        run_command([*arguments, "--task-file=gone.py"])
    capsys.readouterr()
    run_command([*arguments, *named])
    assert capsys.readouterr().out.startswith("a [MASK]\n")


# --- the detector -----------------------------------------------------------------------------------------------------


def test_a_weight_file_with_another_hash_is_refused_and_a_setting_that_differs_is_named(models, tmp_path):
    other, data = tmp_path / "other.safetensors", WEIGHTS.read_bytes()
    other.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"other.safetensors \(sha256 \w+...\) is not the detector .*, detector"):
        predictor(models, "pretraining", detector=other).detect(models / "photo.jpg")
    there = recorded(demo_detector())
    there["metadata"] |= {"rules_version": 1}
    there["id"] = "0" * 12
    with pytest.warns(UserWarning, match="of detector 000000000000, .*: rules_version is 3 here but 1 there$"):
        rebuild_detector(there, WEIGHTS, "the run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rebuild_detector(recorded(demo_detector(batch=4)), WEIGHTS, "the run")


@pytest.mark.parametrize(
    ("detector", "model", "reason"),
    [
        (ANNOTATED, TINY_MODEL, "its regions came from annotated boxes"),
        (ANNOTATED, ON_FEATURES, "its regions came from annotated boxes"),
        (None, TINY_MODEL, "it has no description of a detector"),
    ],
)
def test_a_checkpoint_without_a_network_detector_needs_one_by_name(models, tmp_path, detector, model, reason):
    folder = save_model(tmp_path, "run", REFCOCO, detector, model=model)
    with pytest.raises(ValueError, match=f"{reason}; name a detector: detector=FILE"):
        Predictor(str(folder)).detect(models / "photo.jpg")
    with pytest.warns(UserWarning, match="may be of another kind"):
        prediction = Predictor(str(folder), detector=WEIGHTS)(models / "photo.jpg", "a red square")
    assert len(prediction.row["ranking"]) == 5
    assert (prediction.sample.regions.features is None) == (model is TINY_MODEL)


def test_a_detector_with_random_weights_is_made_again(models, tmp_path):
    network, selection = FasterRCNN.random_init(DEMO, 7), SelectionSettings(minimum=3)
    untrained = FasterRCNNDetector(network, {"random_init": True, "seed": 7}, DetectorSettings(selection))
    folder = save_model(tmp_path, "untrained", REFCOCO, recorded(untrained))
    sample = Predictor(str(folder)).detect(models / "photo.jpg")
    (found,) = untrained.detect([sample])
    assert sample.regions.detector == untrained.id
    np.testing.assert_array_equal(sample.regions.boxes, found.boxes)


# --- the documents ----------------------------------------------------------------------------------------------------


def test_the_code_of_the_documents_runs(models, tmp_path, monkeypatch, capsys):
    code = r"(    from vlbert.predict import Predictor\n(?:    .*\n|\n(?=    ))*)"
    blocks = [re.findall(code, (PROJECT / page).read_text()) for page in ("README.md", "docs/library.md")]
    (tmp_path / "photo.jpg").write_bytes((models / "photo.jpg").read_bytes())
    monkeypatch.chdir(tmp_path)
    for (block,) in blocks:
        code = textwrap.dedent(block).replace("demo-root/runs/pretrain-seed0", str(models / "runs/pretraining"))
        code = code.replace("demo-root/data/images/000823.jpg", "photo.jpg")  # which the demo draws
        exec(code.replace("demo/detector.safetensors", str(WEIGHTS)), {})
        assert re.search(r"^a (red )?\S+", capsys.readouterr().out)
    assert (tmp_path / "answer.png").is_file()
