import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import TINY_MODEL, tiny_sample

from vlbert.batch import collate
from vlbert.model import Encoded, TaskModel, VLBert
from vlbert.official.refcoco import read_expressions, read_plain_pickle
from vlbert.pictures import swap_sides, view
from vlbert.tasks.refcoco import RefCOCO, RefCOCOSettings
from vlbert.text import SPECIALS, Vocabulary

WORDS = Vocabulary([*SPECIALS, "the", "left", "right", "one"])
CONFORMANCE = Path(__file__).parents[2] / "shared" / "conformance" / "refcoco_plus"


def write_refcoco(folder: Path, samples: list, scale: int = 1) -> None:
    """refs(unc).p and instances.json on tiny samples, whose shipped images are `scale` times as large as the stored."""
    images, annotations, refs = [], [], []
    for i, sample in enumerate(samples):
        name = Path(sample.url).name
        images.append({"id": i, "file_name": name, "width": sample.width * scale, "height": sample.height * scale})
        for box in sample.regions.boxes * scale:
            x1, y1, x2, y2 = map(float, box)
            annotations.append({"id": len(annotations), "image_id": i, "bbox": [x1, y1, x2 - x1, y2 - y1]})
        split = "train" if i % 2 else "val"
        sentences = [{"sent_id": 10 * i + k, "sent": "the left one"} for k in range(2)]
        refs.append(
            {"ref_id": i, "image_id": i, "ann_id": len(annotations) - 1, "split": split, "sentences": sentences}
        )
    folder.mkdir(exist_ok=True)
    (folder / "instances.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    (folder / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=0))


def urls(samples: list) -> SimpleNamespace:
    """All that the task asks of samples."""
    return SimpleNamespace(urls=[sample.url for sample in samples])


@pytest.fixture
def samples() -> list:
    return [tiny_sample(i, regions=2 + i % 2) for i in range(4)]


@pytest.fixture
def task(tmp_path, samples) -> RefCOCO:
    write_refcoco(tmp_path / "refcoco+", samples)
    return RefCOCO(RefCOCOSettings(str(tmp_path / "refcoco+")), WORDS, 8)


def ask(task: RefCOCO, sample, expression, flip: bool = False):
    return task.example(sample, view(sample, TINY_MODEL.regions, flip), expression, np.random.default_rng(0))


def test_every_expression_of_the_split_is_asked_about_its_own_image(task, samples):
    questions = task.questions(urls(samples), None)
    assert questions.samples.tolist() == [1, 1, 3, 3]
    assert [expression.sentence_id for expression in questions.asks] == [10, 11, 30, 31]
    held_out = task.questions(urls(samples[::-1]), "val")
    assert held_out.samples.tolist() == [3, 3, 1, 1]
    with pytest.raises(ValueError, match=r"refs\(unc\).p has no split testA, only train, val"):
        task.questions(urls(samples), "testA")
    with pytest.raises(ValueError, match=r"1 of 2 images of train of .* in no region shard, such as 000003"):
        task.questions(urls(samples[:3]), None)


def test_the_right_region_is_the_objects_and_the_whole_image_does_not_compete(task, samples):
    question = task.questions(urls(samples), None).asks[0]
    example = ask(task, samples[1], question)
    assert example.picture.targets["right"].tolist() == [False, False, False, True], "the last box of sample 1"
    assert example.picture.targets["candidate"].tolist() == [False, True, True, True]
    assert example.picture.targets["iou"][3] == pytest.approx(1)
    assert not example.picture.hidden.any()
    task.settings = dataclasses.replace(task.settings, whole_image_competes=True)
    assert ask(task, samples[1], question).picture.targets["candidate"].all()


def test_boxes_of_the_shipped_image_are_brought_to_the_stored_one(tmp_path, samples):
    write_refcoco(tmp_path / "large", samples, scale=3)
    task = RefCOCO(RefCOCOSettings(str(tmp_path / "large")), WORDS, 8)
    question = task.questions(urls(samples), None).asks[0]
    assert ask(task, samples[1], question).picture.targets["iou"].tolist()[3] == pytest.approx(1)


def test_mirroring_swaps_the_sides_in_words_and_boxes(task, samples):
    question = task.questions(urls(samples), None).asks[0]
    example = ask(task, samples[1], question, flip=True)
    assert WORDS.decode(example.words.tokens) == "[CLS] the right one [SEP]"
    assert example.picture.targets["right"].tolist() == [False, False, False, True]
    assert swap_sides("left of the leftmost right") == "right of the leftmost left"


class Score(torch.nn.Module):
    """A head whose score of a region is the first channel of its vector."""

    def forward(self, regions):
        return regions[..., :1]


def test_padding_and_the_whole_image_never_win(task, samples):
    questions = task.questions(urls(samples), "val")
    batch = collate(
        [
            ask(task, samples[0], questions.asks[0]),  # 2 regions, so one padded
            ask(task, samples[1], dataclasses.replace(questions.asks[0], sentence_id=7)),
        ]
    )
    scores = torch.tensor([[9.0, -5, -6, 9], [9, -7, -5, -6]])
    encoded = Encoded(torch.zeros(2, 5, 1), scores[..., None], appearance=torch.zeros(0))
    rows = task.predictions(None, Score(), encoded, batch)
    assert [row["region"] for row in rows] == [0, 1]
    assert [row["candidates"] for row in rows] == [2, 3]
    assert [row["sentence_id"] for row in rows] == [0, 7]
    loss, count = task.losses(None, Score(), encoded, batch)["regions"]
    assert count == 5, "neither padding nor the whole image is scored"
    right = batch.targets["right"][batch.targets["candidate"]].float()
    kept = scores[batch.targets["candidate"]]
    assert float(loss) == pytest.approx(
        float(torch.nn.functional.binary_cross_entropy_with_logits(kept, right, reduction="sum"))
    )


def test_a_region_that_does_not_meet_the_object_is_not_exact(task, samples):
    question = task.questions(urls(samples), "val").asks[0]
    nowhere = dataclasses.replace(question, box=(0.0, 0.0, 0.5, 0.5))
    batch = collate([ask(task, samples[0], nowhere)])
    encoded = Encoded(torch.zeros(1, 5, 1), torch.zeros(1, 3, 1), appearance=torch.zeros(0))
    (row,) = task.predictions(None, Score(), encoded, batch)
    assert (row["iou"], row["exact"]) == (0.0, False)


def test_metrics_stand_beside_chance(task):
    rows = [
        {"iou": 1.0, "exact": True, "candidates": 2},
        {"iou": 0.5, "exact": False, "candidates": 4},
        {"iou": 0.49, "exact": False, "candidates": 4},
        {"iou": 0.0, "exact": False, "candidates": 1},
    ]
    assert task.metrics(rows) == {
        "accuracy": 0.5,
        "exact": 0.25,
        "chance": pytest.approx((1 / 2 + 1 / 4 + 1 / 4 + 1) / 4),
    }


def test_the_head_learns_to_point(task, samples):
    """Four expressions, trained by hand: what the loss asks for is what the metric counts."""
    torch.manual_seed(0)
    model = TaskModel(VLBert(dataclasses.replace(TINY_MODEL, dropout=0.0), len(WORDS)), task)
    questions = task.questions(urls(samples), None)
    batch = collate([ask(task, samples[i], e) for i, e in zip(questions.samples, questions.asks, strict=True)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss, count = model(batch)["regions"]
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    assert task.metrics(model.predict(batch))["accuracy"] == 1


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    (tmp_path / "refs(unc).p").write_bytes(pickle.dumps([Attack()]))
    with pytest.raises(ValueError, match="wants to load"):
        read_plain_pickle(tmp_path / "refs(unc).p")
    assert not (tmp_path / "owned").exists()


def test_a_missing_or_foreign_file_is_named(tmp_path, samples):
    with pytest.raises(ValueError, match=r"there is no .*refs\(unc\).p; set task.folder"):
        read_expressions(tmp_path)
    write_refcoco(tmp_path, samples)
    instances = json.loads((tmp_path / "instances.json").read_text())
    del instances["images"][2]
    (tmp_path / "instances.json").write_text(json.dumps(instances))
    with pytest.raises(ValueError, match="ref 2 names image 2"):
        read_expressions(tmp_path)


@pytest.mark.skipif(
    not CONFORMANCE.is_dir(), reason="the official formats' samples lie in ../shared, which is not here"
)
def test_the_official_files_give_the_official_splits():
    expected = json.loads((CONFORMANCE / "expected.json").read_text())
    found = read_expressions(CONFORMANCE / "data" / "refcoco+")
    for split in ("train", "val", "testA", "testB"):
        expressions = [e for of_image in found[split].values() for e in of_image]
        assert sorted({e.ref_id for e in expressions}) == sorted(expected["splits"][split]["ref_ids"])
    boxes = {e.sentence_id: e.box for split in found.values() for of_image in split.values() for e in of_image}
    for row in expected["per_expression"]:
        x, y, w, h = row["gt_box_xywh"]
        assert boxes[row["sent_id"]] == (x, y, x + w, y + h)
