import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import SIZE, TINY_MODEL, commit_samples, tiny_recipe, tiny_sample

from detectors.distributed import World
from vlbert.batch import Batch, Example, collate
from vlbert.config import DataConfig
from vlbert.model import Encoded, TaskModel, VLBert
from vlbert.official.vcr import CLASSES, OBJECTS, instance_mask, read_items, read_scene
from vlbert.pictures import view
from vlbert.tasks.vcr import PEOPLE, VCR, VCRSettings
from vlbert.text import SPECIALS, Vocabulary
from vlbert.train import train

ORDINARY = ["why", "is", "hold", "##ing", "?", "the", "and", "person", "dog", "cup", "because", "near", "##by", "no"]
WORDS = Vocabulary([*SPECIALS, *ORDINARY, *PEOPLE])
OF_PICTURE = ["person", "dog", "person", "cup"]
BOXES = [[0, 0, 20, 40], [30, 10, 50, 30], [60, 0, 80, 60], [40, 40, 48, 48]]  # in the pixels of the stored picture
ITEM = {
    "objects": OF_PICTURE,
    "question": ["Why", "is", [0, 1], "holding", [3], "?"],
    "answer_choices": [["no"], [[2], "is", "nearby"], ["the", [1]], [[0]]],
    "answer_label": 2,
    "rationale_choices": [["because", [1], "is", "nearby"], ["no"], ["no", "no"], ["because"]],
    "rationale_label": 0,
}
CONFORMANCE = Path(__file__).parents[2] / "shared" / "conformance" / "vcr"
official = pytest.mark.skipif(
    not CONFORMANCE.is_dir(), reason="the official formats' samples lie in ../shared, which is not here"
)


def write_vcr(folder: Path, samples: list, scale: float = 1, **changes: object) -> None:
    """train.jsonl on all samples but the last and val.jsonl on the last, with metadata of pictures `scale` as large."""
    lines = []
    for i, sample in enumerate(samples):
        name = f"movie/{Path(sample.url).stem}"
        boxes = (np.array(BOXES) * scale).tolist()
        triangles = [[[[x1, y1], [x2, y1], [x1, y2]]] for x1, y1, x2, y2 in boxes]
        metadata = {"names": OF_PICTURE, "boxes": [[*box, 0.9] for box in boxes], "segms": triangles}
        metadata |= {"width": int(SIZE[0] * scale), "height": int(SIZE[1] * scale)}
        file = folder / "vcr1images" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(metadata))
        ids = {"annot_id": f"a-{i}", "img_fn": f"{name}.jpg", "metadata_fn": f"{name}.json"}
        lines.append(json.dumps(ITEM | ids | changes) + "\n")
    (folder / "train.jsonl").write_text("".join(lines[:-1]))
    (folder / "val.jsonl").write_text(lines[-1])


def urls(samples: list) -> SimpleNamespace:
    """All that the task asks of samples."""
    return SimpleNamespace(urls=[sample.url for sample in samples])


@pytest.fixture
def samples() -> list:
    return [tiny_sample(i) for i in range(3)]


@pytest.fixture
def task(tmp_path, samples) -> VCR:
    """Persons are called persons, so that texts are the same whatever was drawn."""
    write_vcr(tmp_path / "vcr", samples)
    # The tiny model's res5 gives 2 x 2 cells.
    return VCR(VCRSettings(str(tmp_path / "vcr"), names="class", mask_size=2), WORDS, 8)


def changed(task: VCR, **settings: object) -> VCR:
    return VCR(dataclasses.replace(task.settings, **settings), WORDS, 8)


def asked(
    task: VCR, samples: list, number: int = 0, flip: bool = False, seed: int = 0, held_out: bool = False
) -> Example:
    questions = task.questions(urls(samples), "val" if held_out else None)
    sample = samples[questions.samples[number]]
    seen = view(sample, TINY_MODEL.regions, flip)
    return task.example(sample, seen, questions.asks[number], np.random.default_rng(seed))


def batch_of(task: VCR, samples: list) -> Batch:
    return collate([asked(task, samples, number, seed=number) for number in range(2)])


def texts(example: Example) -> list[str]:
    return [WORDS.decode(words.tokens) for words in example.texts]


def test_the_choices_of_a_question_are_four_texts_about_one_picture(task, samples):
    example = asked(task, samples)
    question = "[CLS] why is person and dog holding cup ? [SEP]"
    choices = ["no", "person is nearby", "the dog", "person"]
    assert texts(example) == [f"{question} {choice} [SEP]" for choice in choices]
    assert [bool(words.asked["right"][0]) for words in example.texts] == [False, False, True, False]
    assert example.texts[1].segments.tolist() == [0] * 11 + [1] * 5
    # A name carries the look of its object, whose region is its number + 1; `and` and all else that of the whole image.
    assert example.texts[1].looks_at.tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 4, 0, 0, 3, 0, 0, 0, 0]
    assert example.about == {"annot_id": "a-0"}


def test_a_rationale_is_asked_for_behind_the_question_and_its_right_answer(task, samples):
    example = asked(changed(task, question="rationale"), samples)
    question = "[CLS] why is person and dog holding cup ? the dog [SEP]"
    choices = ["because dog is nearby", "no", "no no", "because"]
    assert texts(example) == [f"{question} {choice} [SEP]" for choice in choices]
    assert [bool(words.asked["right"][0]) for words in example.texts] == [True, False, False, False]
    assert example.words.looks_at.tolist() == [0, 0, 0, 1, 0, 2, 0, 0, 4, 0, 0, 2, 0, 0, 2, 0, 0, 0, 0]


def test_every_item_is_asked_about_its_own_picture(task, samples):
    questions = task.questions(urls(samples[::-1]), None)
    assert questions.samples.tolist() == [2, 1]
    assert [json.loads(ask.line)["annot_id"] for ask in questions.asks] == ["a-0", "a-1"]
    assert task.questions(urls(samples), "val").samples.tolist() == [2]
    with pytest.raises(ValueError, match="1 of 2 images of .* are in no region shard, such as 000001.jpg"):
        task.questions(urls(samples[:1]), None)


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
def test_what_is_too_long_loses_its_end(task, question, answer, choice, left):
    parts = [tagged(question, 1)] + ([tagged(answer, 2)] if answer else [])
    short = changed(task, max_pieces=10)
    kept, last = short._cut(parts, tagged(choice, 3))
    assert tuple(len(pieces) for pieces, _ in [*kept, last]) == left
    for (pieces, regions), before in zip([*kept, last], [*parts, tagged(choice, 3)], strict=True):
        np.testing.assert_array_equal(pieces, before[0][: len(pieces)])
        np.testing.assert_array_equal(regions, before[1][: len(pieces)])
    (kept,), last = changed(task, max_pieces=9)._cut([tagged(6, 1)], tagged(6, 3))
    assert (len(kept[0]), len(last[0])) == (4, 5), "of two as long the question is cut"
    untouched, _ = changed(task, max_pieces=None)._cut(parts, tagged(choice, 3))
    assert [len(pieces) for pieces, _ in untouched] == [question] + ([answer] if answer else [])


@pytest.mark.parametrize("scale", [1, 2.5])
def test_the_regions_are_the_annotated_objects_whatever_the_shard_holds(task, samples, tmp_path, scale):
    write_vcr(tmp_path / "vcr", samples, scale)
    picture = asked(task, samples).picture
    assert picture.boxes.tolist() == [[0, 0, 95, 63], *BOXES]
    assert picture.classes.tolist() == [0, 1, 17, 1, 42], "COCO's, from 1 on"
    mirrored = asked(task, samples, flip=True).picture
    assert mirrored.boxes[1].tolist() == [75, 0, 95, 40]
    assert not picture.hidden.any()


def test_instance_masks_follow_their_objects_through_a_mirror(task, samples):
    cells = asked(changed(task, mask_size=14), samples).picture.cells
    assert cells.shape == (5, 14, 14)
    assert cells[0].all(), "the whole image is all covered"
    assert cells[1][0, :13].all(), "the triangle's upper edge"
    assert cells[1][:13, 0].all(), "and its left one"
    assert not cells[1][8:, 8:].any()
    mirrored = asked(changed(task, mask_size=14), samples, flip=True).picture.cells
    np.testing.assert_array_equal(mirrored, cells[:, :, ::-1])
    assert asked(changed(task, instance_masks=False), samples).picture.cells is None


def test_an_object_in_two_parts_covers_both_and_one_without_polygons_its_box():
    box = np.array([0.0, 0, 13, 13])  # inclusive: 14 x 14 pixels, a cell each
    left, right = (np.array([[x, 0], [x + 3, 0], [x + 3, 13], [x, 13]], float) for x in (0, 7))
    mask = instance_mask([left, right], box, 14)
    assert mask[0].tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert instance_mask([], box, 14).all()


def test_people_get_names_in_turn_that_depend_on_the_sample_alone(task, samples):
    neutral = changed(task, names="neutral")
    found = set()
    for seed in range(30):
        first, third = (asked(neutral, samples, seed=seed).texts[i].tokens for i in (0, 1))
        names = WORDS.pieces[first[3]], WORDS.pieces[third[11]]
        assert PEOPLE[(PEOPLE.index(names[0]) + 1) % 13] == names[1], "the next person gets the next name"
        assert texts(asked(neutral, samples, seed=seed)) == texts(asked(neutral, samples, seed=seed))
        assert "dog" in WORDS.decode(first)
        found.add(names[0])
    assert len(found) > 5
    assert len(set(PEOPLE)) == 13


def test_mentions_look_at_the_whole_image_by_the_papers_rule(task, samples):
    plain = asked(changed(task, mentions_look_at="image"), samples)
    assert texts(plain) == texts(asked(task, samples))
    assert not any(words.looks_at.any() for words in plain.texts)


def test_hidden_regions_are_asked_for_in_training_and_none_is_in_validation(task, samples):
    hiding = changed(task, hidden_regions=0.5)
    found = [asked(hiding, samples, seed=seed).picture for seed in range(40)]
    share = np.mean([picture.hidden[1:] for picture in found])
    assert 0.35 < share < 0.65
    for picture in found:
        assert not picture.hidden[0], "the whole image is never hidden"
        np.testing.assert_array_equal(picture.targets["region_asked"], picture.hidden)
    assert not asked(changed(task, hidden_regions=1.0), samples, held_out=True).picture.hidden.any()
    batch = batch_of(changed(task, hidden_regions=1.0), samples)
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), changed(task, hidden_regions=1.0))
    assert model(batch)["regions"][1] == 2 * 4 * 4, "four objects in four texts of two pictures"
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task)
    assert model(batch_of(task, samples))["regions"][1] == 2 * 4 * 5, "in sight, the whole image is asked for too"


@pytest.mark.parametrize(
    ("settings", "answers", "regions"),
    [
        ({}, 8, 40),
        ({"loss": "softmax", "pooled": False, "mentions_look_at": "image", "instance_masks": False}, 2, 40),
        ({"classifier": "two_layers", "region_loss": "appearance"}, 8, 10),
        ({"region_loss": "appearance", "hidden_regions": 0.5}, 8, None),
        ({"region_loss": "none", "question": "rationale"}, 8, 0),
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
        regions = int(batch.region_hidden[batch.picture_rows].sum())
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
@pytest.mark.parametrize("hidden", [0.0, 0.5])
def test_every_region_that_is_asked_for_is_asked_for_its_own_class(task, samples, region_loss, hidden):
    task = changed(task, region_loss=region_loss, hidden_regions=hidden)
    batch = batch_of(task, samples)
    sure = 100 * torch.nn.functional.one_hot(batch.region_classes, CLASSES).float()  # (rows, regions, classes)
    encoded = Encoded(torch.zeros(8, 5, 1), sure, sure[batch.picture_rows].flatten(0, 1))
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
    rows = task.predictions(None, First(), encoded, batch)
    assert [(row["annot_id"], row["choice"], row["right"]) for row in rows] == [("a-0", 0, 2), ("a-1", 2, 2)]
    assert rows[0]["probabilities"] == pytest.approx(scores[0].softmax(0).tolist())
    assert task.metrics(rows) == {"accuracy": 0.5, "chance": 0.25}
    json.dumps(rows)


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
        from_scratch=True,
        task=dataclasses.replace(task.settings, names="neutral"),
        data=DataConfig(root=str(root), dataset="vcr", held_out="vcr", batch=2, workers=0, flip=0.5),
        vocabulary=str(tmp_path / "vocab.txt"),
        steps=2,
    )
    metrics = train(recipe, World(0, 1, torch.device("cpu")))
    assert metrics["chance"] == 0.25
    (row,) = map(json.loads, (root / "runs" / "tiny" / "predictions.jsonl").read_text().splitlines())
    assert (row["annot_id"], row["right"]) == ("a-2", 2)
    assert sum(row["probabilities"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[:90] + "\n", r"train.jsonl line 2 is no item of VCR: .*; fetch the file again"),
        (lambda line: line.replace('"answer_label"', '"label"'), "line 2 is no item of VCR: KeyError.'answer_label'"),
        (lambda line: line.replace('"answer_label": 2', '"answer_label": 4'), "of which 4 and 0 are right"),
        (lambda line: line.replace("[[0]]], ", "]], "), "line 2 is no item"),
        (lambda line: line.replace('["no"], [[2]', "[[2]"), r"\(3, 4\) choices"),
        (lambda line: line.replace("[0, 1]", "[0, 4]"), "it mentions object 4 of 4"),
        (lambda line: line.replace("[0, 1]", "[-1, 1]"), "it mentions object"),
    ],
)
def test_a_bad_line_is_named(task, tmp_path, samples, change, message):
    file = tmp_path / "vcr" / "train.jsonl"
    first, second = file.read_text().splitlines(keepends=True)
    assert change(second) != second
    file.write_text(first + change(second))
    with pytest.raises(ValueError, match=message):
        task.questions(urls(samples), None)


def test_missing_and_foreign_metadata_are_named(task, tmp_path, samples):
    file = tmp_path / "vcr" / "vcr1images" / "movie" / "000000.json"
    good = json.loads(file.read_text())
    for change, message in (
        ({"names": ["person", "dog", "person", "dog"]}, "line 1 and .*000000.json list different objects"),
        ({"names": ["person", "dog", "person", "unicorn"]}, "000000.json is not in .* an object of class unicorn"),
        ({"segms": good["segms"][:3]}, "4 names and 3 segms"),
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
        task.questions(urls(samples), None)
    with pytest.raises(ValueError, match=r"there is no .*train.jsonl; set task.folder"):
        changed(task, folder=str(tmp_path)).questions(urls(samples), None)


def test_a_model_that_the_masks_or_regions_do_not_fit_is_refused_at_once(task):
    with pytest.raises(ValueError, match="task.mask_size is 14, the model's res5 gives 2 x 2 cells; set it to 2"):
        changed(task, mask_size=14).head(TINY_MODEL)
    changed(task, mask_size=14, instance_masks=False).head(TINY_MODEL)
    kept = dataclasses.replace(TINY_MODEL, regions=dataclasses.replace(TINY_MODEL.regions, features="precomputed"))
    with pytest.raises(ValueError, match="set model.regions.features=end_to_end"):
        task.head(kept)
    with pytest.raises(ValueError, match="hidden_regions is 1.5"):
        VCRSettings(hidden_regions=1.5)
    with pytest.raises(ValueError, match="max_pieces is 0"):
        VCRSettings(max_pieces=0)


@official
def test_the_official_files_are_read_whole():
    ontology = json.loads((CONFORMANCE / "cocoontology.json").read_text())
    assert [row["name"] for _, row in sorted(ontology.items(), key=lambda pair: int(pair[0]))] == OBJECTS
    items = read_items(CONFORMANCE, "val", held_out=True)
    assert len(items) == 30
    for item in items:
        scene = read_scene(item.metadata)
        assert json.loads(item.line)["objects"] == scene.names
        for polygons, box in zip(scene.polygons, scene.boxes, strict=True):
            assert instance_mask(polygons, box, 14).any()
