"""What official code says in a file expected*, and what ours makes of the inputs beside it: a function a kind of file.

A file is known by what it holds, its inputs by how their names end.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from detectors.select import SelectionSettings, find_overlaps, select_regions, surviving_confidence
from storage.collect.lists import read_captions
from vlbert.data.boxes import geometry_embedding
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.datasets import refcoco, retrieval, vcr, vqa
from vlbert.datasets.files import read_json
from vlbert.tasks.vqa import VQA, VQASettings

NUMBER_TOLERANCE = 1e-9
GEOMETRY_TOLERANCE = 1e-4  # sines of angles up to 100, in float32
CONVENTIONS = {"mattnet": "mattnet", "published": "vlbert", "plain": "plain"}  # ours -> in the names of expected values

# What is compared, our values and theirs by name, and how far two numbers may differ.
Compared = Iterator[tuple[str, Mapping, Mapping, float]]


def different(ours: Mapping, expected: Mapping, tolerance: float) -> list[str]:
    """Return a line for each value that differs or that stands on one side alone."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, tuple):
            return len(one) == len(other) and all(map(same, one, other))
        numbers = tolerance and isinstance(one, float) and isinstance(other, float | int)
        return math.isclose(one, other, rel_tol=0, abs_tol=tolerance) if numbers else one == other

    return [
        f"{name}: ours {ours.get(name, 'missing')!r}, expected {expected.get(name, 'missing')!r}"
        for name in {**expected, **ours}
        if name not in ours or name not in expected or not same(ours[name], expected[name])
    ]


def beside(folder: Path, pattern: str) -> Path:
    """Return the only such file in the folder. Raises ValueError if there is none, or several."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ValueError(f"{folder} holds {len(found)} files {pattern}; one is needed")
    return found[0]


def vqa_scores(folder: Path, expected: Any) -> Compared:
    """Accuracy per question, overall and per type, in percent of two decimals; and the questions with their answers."""
    annotations, file = beside(folder, "*annotations.json"), beside(folder, "*questions.json")
    answers = {row["question_id"]: row["answer"] for row in read_json(beside(folder, "*results.json"), "DIR", list)}
    questions = vqa.join_questions(file, annotations, "conformance")
    rows = [one.columns() | {"score": vqa.accuracy(answers[one.question_id], one.answers)} for one in questions]
    metrics = vqa.metrics(rows)
    types = {one: metrics[f"accuracy/{one}"] for row in rows for one in (row["answer_type"], row["question_type"])}
    made = {
        "perQuestionType": {row["question_type"]: types[row["question_type"]] for row in rows},
        "perQuestion": {row["question_id"]: row["score"] for row in rows},
        "perAnswerType": {row["answer_type"]: types[row["answer_type"]] for row in rows},
        "overall": {"overall": metrics["accuracy"]},
    }
    for key, wanted in expected.items():
        name = next((name for name in made if key.startswith(name)), None)
        if name:
            wanted = wanted if isinstance(wanted, dict) else {name: wanted}
            ours = {str(k): _percent(v) for k, v in made[name].items()}
            yield f"accuracy, {name}", ours, {k: f"{v:.2f}" for k, v in wanted.items()}, 0
    texts = {row["question_id"]: row["question"] for row in read_json(file, "DIR")["questions"]}
    yield "question with its answers", {one.question_id: one.text for one in questions if one.answers}, texts, 0


def _percent(share: float) -> str:
    """Return a share in percent, to two decimals, halves upwards as the official code's Python 2 has them."""
    return str(Decimal(100 * share).quantize(Decimal("0.01"), ROUND_HALF_UP))


def vqa_normalised(folder: Path, expected: Any) -> Compared:
    """Strings after punctuation, and after digits, articles and contractions too."""
    given = json.loads(beside(folder, "*inputs.json").read_bytes())
    yield "string to normalise", {text: True for text in given}, {row["input"]: True for row in expected}, 0
    for step, column in ((vqa.remove_punctuation, "after_punctuation"), (vqa.normalise, "after_digit_article")):
        ours = {text: step(text) for text in given}
        yield f"string {column.replace('_', ' ')}", ours, {row["input"]: row[column] for row in expected}, 0


def vqa_soft_targets(folder: Path, expected: Any) -> Compared:
    """What each answer of a vocabulary is worth, given what the annotators stated."""
    task = VQA(VQASettings(answers=len(expected["vocab"])), Vocabulary([*SPECIALS]), 1)
    task.answers = expected["vocab"]
    ours, wanted = {}, {}
    for number, case in enumerate(expected["cases"]):
        scores = zip(expected["vocab"], task.scores(case["answers"]).tolist(), strict=True)
        ours[f"cases[{number}]"] = {answer: round(score, 4) for answer, score in scores if score}
        wanted[f"cases[{number}]"] = {answer: round(score, 4) for answer, score in case["target"].items() if score}
    yield "soft targets of an answer list", ours, wanted, 0


def vcr_hits(folder: Path, expected: Any) -> Compared:
    """Which answers, rationales and both are right, and how many."""
    (items,) = [path for path in sorted(folder.glob("*.jsonl")) if vcr.read_items(path)[0].labels is not None]
    with open(beside(folder, "*.csv"), newline="", encoding="utf-8-sig") as lines:
        given = {row["annot_id"]: [float(row[name]) for name in vcr.COLUMNS[1:]] for row in csv.DictReader(lines)}
    rows, hits = [], {}
    for item in vcr.read_items(items):
        answer, rationale = item.labels
        groups = np.reshape(given[item.annot_id], (1 + vcr.CHOICES, vcr.CHOICES)).tolist()
        chosen = [vcr.ranked(probabilities)[0] for probabilities in groups]
        both = chosen[0] == answer, chosen[1 + answer] == rationale
        hits[item.annot_id] = {"answer_hit": both[0], "rationale_hit": both[1], "joint_hit": all(both)}
        for subtask, hit in zip(("answer", "rationale"), both, strict=True):
            rows.append({"annot_id": item.annot_id, "subtask": subtask, "score": float(hit)})
    for name in ("answer_hit", "rationale_hit", "joint_hit"):
        wanted = {row["annot_id"]: row[name] for row in expected["per_example"]}
        yield name.replace("_", " "), {one: row[name] for one, row in hits.items()}, wanted, 0
    metrics = vcr.metrics(rows)
    shares = {"Q_A": "answer_accuracy", "QA_R": "rationale_accuracy", "Q_AR": "joint_accuracy"}
    means = {share: metrics[name] for share, name in shares.items()}
    yield "share of hits", means, {share: expected[share] for share in means}, NUMBER_TOLERANCE
    yield "number of items", {"n": len(hits)}, {"n": expected["n"]}, 0


def refcoco_hits(folder: Path, expected: Any) -> Compared:
    """Overlap and hit of every predicted box under each convention, and which references are of which split."""
    refs = beside(folder, "**/refs(*).p")
    splits = refcoco.read_expressions(refs.parent, refs.name)
    found = {
        one.sentence_id: (split, one) for split, images in splits.items() for ones in images.values() for one in ones
    }
    predictions = {row["sent_id"]: row for row in json.loads(beside(folder, "*predictions.json").read_bytes())}
    ours = {number: _scored(*found[number], _corners(row["box_xywh"])) for number, row in predictions.items()}
    wanted = {row["sent_id"]: row | {"box": _corners(row["gt_box_xywh"])} for row in expected["per_expression"]}
    columns = {"referred box": ("box", "box")} | {f"{one} of an expression": (one, one) for one in ("split", "ref_id")}
    first = expected["per_expression"][0]
    for convention, prefix in CONVENTIONS.items():
        for what, name in (("iou", "IoU"), ("hit", "hit")):
            stated = next(key for key in first if key.startswith(f"{prefix}_{what}"))
            columns[f"{convention} {name}"] = (f"{prefix}_{what}", stated)
    for what, (column, stated) in columns.items():
        both = {number: row[column] for number, row in ours.items()}, {n: row[stated] for n, row in wanted.items()}
        yield what, *both, NUMBER_TOLERANCE
    parted = {n: True for n, row in ours.items() if len({row[f"{prefix}_hit"] for prefix in CONVENTIONS.values()}) > 1}
    stated = dict.fromkeys(expected["sent_ids_where_conventions_disagree"], True)
    yield "expression on which conventions differ", parted, stated, 0
    for name, stated in expected["splits"].items():
        # refer's rule: a name stands for all splits that it is a part of, as `test` for testA and testB
        references = {one.ref_id: True for split, one in found.values() if name in split}
        yield f"reference of {name}", references, dict.fromkeys(stated["ref_ids"], True), 0


def _scored(split: str, expression: refcoco.Expression, box: tuple[float, ...]) -> dict:
    row = {"split": split, "ref_id": expression.ref_id, "box": tuple(map(float, expression.box))}
    for convention, prefix in CONVENTIONS.items():
        overlap = refcoco.overlap(convention, np.array([box], np.float64), np.array(expression.box, np.float64))
        row |= {f"{prefix}_iou": float(overlap[0]), f"{prefix}_hit": bool(refcoco.is_hit(convention, overlap)[0])}
    return row


def _corners(xywh: Sequence[float]) -> tuple[float, ...]:
    x, y, w, h = map(float, xywh)
    return x, y, x + w, y + h


def retrieval_ranks(folder: Path, expected: Any) -> Compared:
    """Ranks and recalls both ways, over all images and within folds; captions of the images of split files."""
    images, captions = (np.load(beside(folder, f"{what}_embeddings.npy")) for what in ("image", "caption"))
    scores, image_of = images @ captions.T, np.arange(len(captions)) // (len(captions) // len(images))
    sizes = {"n_images": len(images), "n_captions": len(captions)}
    yield "number of images, captions", sizes, {name: expected[name] for name in sizes}, 0
    yield from _retrieved("all images", [retrieval.ranks(scores, image_of)], [expected["full"]])
    folds = next(value for name, value in expected.items() if name.endswith("folds"))
    found = retrieval.folds(scores, image_of, len(folds))
    yield from _retrieved(f"{len(folds)} folds", found, folds)
    each, mean = [_recalls(ranks) for ranks in found], _flat(expected["five_fold_mean"])
    means = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
    yield "recall, mean of the folds", means, mean, NUMBER_TOLERANCE
    for file in sorted(folder.glob("dataset_*.json")):
        splits = retrieval.read_splits(file, retrieval.CAPTIONS).items()
        ours = {(split, name): texts for split, images in splits for name, texts in images.items()}
        stated = {
            (one["split"], one["filename"]): [sentence["raw"] for sentence in one["sentences"][: retrieval.CAPTIONS]]
            for one in json.loads(file.read_bytes())["images"]
        }
        yield f"captions of an image, {file.name}", ours, stated, 0


def _recalls(ranks: retrieval.Ranks) -> dict[str, float]:
    both = {"i2t": ranks.captions_of_image, "t2i": ranks.image_of_caption}
    return _flat({way: retrieval.recalls(one) for way, one in both.items()})


def _flat(recalls: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{way} {name}": value for way in ("i2t", "t2i") for name, value in recalls[way].items()}


def _retrieved(what: str, found: Sequence[retrieval.Ranks], stated: Sequence[dict]) -> Compared:
    ranks, wanted_ranks, numbers, wanted = {}, {}, {}, {}
    for fold, (one, expected) in enumerate(zip(found, stated, strict=True)):
        for way, of in (("i2t", one.captions_of_image), ("t2i", one.image_of_caption)):
            ranks |= {f"fold {fold} {way} {i}": rank for i, rank in enumerate(of.tolist())}
            wanted_ranks |= {f"fold {fold} {way} {i}": rank for i, rank in enumerate(expected[f"{way}_rank0"])}
        recalls = _recalls(one)
        recalls["rsum"] = sum(value for name, value in recalls.items() if " r" in name)
        numbers |= {f"fold {fold} {name}": value for name, value in recalls.items()}
        flat = _flat(expected) | {"rsum": expected["rsum"]}
        wanted |= {f"fold {fold} {name}": value for name, value in flat.items()}
    yield f"rank, {what}", ranks, wanted_ranks, 0
    yield f"recall, {what}", numbers, wanted, NUMBER_TOLERANCE


def selections(folder: Path, expected: Any) -> Compared:
    """Which proposals become regions, index for index; of equally confident ones the order is nobody's intention."""
    ours, wanted = {}, {}
    for case in expected["cases"]:
        data = np.load(folder / case["case"])
        for threshold, stated in case["expected"].items():
            settings = SelectionSettings(threshold=float(threshold), strict=False, plus_one=True)
            boxes, probs = data["rois"][:, 1:] / data["im_scale"], data["cls_prob"][:, 1:]
            chosen = select_regions(boxes, probs, settings)
            name, kept = f"{case['case']} at {threshold}", stated["keep_indices"]
            confidence = surviving_confidence(find_overlaps(boxes, settings), probs)
            tied = sorted(chosen) == sorted(kept) and np.array_equal(confidence[chosen], confidence[kept])
            ours[name], wanted[name] = kept if tied else chosen.tolist(), kept
    yield "regions of an image", ours, wanted, 0


def geometry(folder: Path, expected: np.ndarray) -> Compared:
    """The coordinate embedding of boxes x1 y1 x2 y2 W H, [n, 4, channels / 4]."""
    boxes = torch.from_numpy(np.load(beside(folder, "boxes*.npy")))
    ours = geometry_embedding(boxes[:, :4], boxes[:, 4:], expected[0].size, corners=False).reshape(expected.shape)
    off = np.abs(ours.numpy() - expected).max(axis=(1, 2)).tolist()
    yield "embedding of a box, off by", dict(enumerate(off)), dict.fromkeys(range(len(off)), 0.0), GEOMETRY_TOLERANCE


def caption_rows(folder: Path, expected: Any) -> Compared:
    """Rows of a caption list."""
    ours = {row.row: (row.caption, row.url) for row in read_captions(beside(folder, "*.tsv"))}
    yield "row of a caption list", ours, {row["row"]: (row["caption"], row["url"]) for row in expected["rows"]}, 0


# What a file holds -> how it is compared: fields of an object, or of the first entry of a list or of the list below it.
KINDS: dict[tuple[str, str], Callable[[Path, Any], Compared]] = {
    ("perQuestion", ""): vqa_scores,
    ("", "after_punctuation"): vqa_normalised,
    ("cases", "target"): vqa_soft_targets,
    ("per_example", "answer_hit"): vcr_hits,
    ("per_expression", "sent_id"): refcoco_hits,
    ("full", ""): retrieval_ranks,
    ("cases", "expected"): selections,
    ("rows", "caption"): caption_rows,
}


def compare_file(file: Path) -> Compared:
    """Compare all that one file expected* holds. Raises an error if that cannot be done."""
    if file.suffix == ".npy":
        yield from geometry(file.parent, np.load(file))
        return
    expected = json.loads(file.read_bytes())
    for (name, field), compare in KINDS.items():
        entries = expected.get(name) if name and isinstance(expected, dict) else expected if not name else None
        if entries and (not field or (isinstance(entries, list) and field in entries[0])):
            yield from compare(file.parent, expected)
            return
    raise ValueError("it is of no kind that is known here")
