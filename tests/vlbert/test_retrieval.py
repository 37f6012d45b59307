"""Image-text retrieval: ranks, split files, what a batch is made of, its losses and its scores."""

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from family import with_features
from loaded import ALONE
from PIL import Image
from retrieval_files import SPLIT_FILE, captions_of, image, retrieval_recipe, retrieval_root, write_retrieval
from tiny import CLASSES, TINY_MODEL, VILBERT, tiny_sample, urls

from storage.object_store import open_store
from storage.sample import Sample
from training.distributed import World
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, collate
from vlbert.data.images import prepare_image
from vlbert.data.loading import TrainingData, TrainingDataset
from vlbert.data.samples import open_samples
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.datasets.retrieval import folds, ranks, read_splits
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import TaskModel
from vlbert.tasks.retrieval import Caption, HeldOutImage, Retrieval, RetrievalSettings

WORDS = Vocabulary([*SPECIALS, "a", "and", "red", "green", "blue", "white", "square", "circle", "it", "##s", "##t"])


def make_task(**changes: object) -> Retrieval:
    return Retrieval(RetrievalSettings(**{"caption_length": 20} | changes), WORDS, len(CLASSES))


def test_a_rank_counts_the_better_ones_and_half_of_the_equals_rounded_up():
    scores = np.array([[3, 2, 2, 1, 2, 3]])
    found = [ranks(np.vstack([row, np.zeros(6)]), [0] * 5 + [1]).captions_of_image[0] for row in (scores, -scores)]
    assert found == [1, 0]
    assert ranks(np.ones((3, 3)), [0, 1, 2]).captions_of_image.tolist() == [1, 1, 1]
    assert ranks(np.ones((4, 4)), [0, 1, 2, 3]).image_of_caption.tolist() == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="1 of 6 scores are not finite"):
        ranks(np.array([[1, 2, 3], [4, np.nan, 6]]), [0, 0, 1])


def test_the_order_of_images_and_captions_changes_no_rank():
    rng = np.random.default_rng(0)
    scores, image_of = rng.integers(0, 4, (6, 12)).astype(float), np.repeat(np.arange(6), 2)
    found, images, captions = ranks(scores, image_of), rng.permutation(6), rng.permutation(12)
    other = ranks(scores[images][:, captions], np.argsort(images)[image_of[captions]])
    assert np.array_equal(other.captions_of_image, found.captions_of_image[images])
    assert np.array_equal(other.image_of_caption, found.image_of_caption[captions])


def test_training_has_one_example_a_caption_and_a_held_out_split_one_an_image(tmp_path: Path):
    samples = [tiny_sample(i) for i in range(4)]
    write_retrieval(tmp_path, samples, test=2)
    task = make_task(folder=str(tmp_path))
    training = task.examples(urls(samples), None)
    assert training.samples.tolist() == [0, 0, 1, 1]
    assert [one.text for one in training.annotations] == [*captions_of(samples[0]), *captions_of(samples[1])]
    held_out = task.examples(urls(samples), "test")
    assert held_out.samples.tolist() == [2, 3]
    candidates = [WORDS.decode(text) for text in held_out.annotations[1].candidates]
    assert candidates == [f"[CLS] {text} [SEP]" for sample in samples[2:] for text in captions_of(sample)]
    few = task.subset(held_out, np.array([1])).annotations[1]
    assert (held_out.annotations[1].first, few.first, len(few.candidates)) == (2, 0, 2)


def test_captions_without_words_are_left_out_by_name(tmp_path: Path):
    samples = [tiny_sample(i) for i in range(4)]
    names = [sample.url.rpartition("/")[2] for sample in samples]
    for split in ("train", "val"):
        given = zip(names, (["a"] * 7, [], ["", " "], ["a", "", "it"]), strict=True)
        images = [image(name, split, captions) for name, captions in given]
        (tmp_path / SPLIT_FILE).write_text(json.dumps({"images": images}))
        found = make_task(folder=str(tmp_path)).examples(urls(samples), None if split == "train" else "val")
        lacking = zip(names[1:], ("0 of its 0", "2 of its 2", "1 of its 3"), strict=True)
        assert found.skipped == tuple(f"{name}: {counts} captions have no words" for name, counts in lacking)
        assert found.samples.tolist() == ([0] * 5 + [3] * 2 if split == "train" else [0, 3]), "the first five of seven"
    assert read_splits(tmp_path / SPLIT_FILE)["val"][names[0]] == ["a"] * 7


@pytest.mark.parametrize(
    ("images", "named"),
    [
        ([], f"{SPLIT_FILE} has no split 'train'; it has none"),
        ([image("gone.jpg", "train", ["a"])], "1 of 1 images of train of .* no region shard, such as gone"),
        ([image("000000.jpg", "train", [])], "none of the 0 examples of train of .* can be used"),
        ([image("a.jpg", "test", ["a"])] * 2, f"{SPLIT_FILE}.* a.jpg is repeated"),
        ([image("a.jpg", "test", [7])], rf"{SPLIT_FILE}.* images\[0\]: .* not a string"),
        (None, f"{SPLIT_FILE} is not in Karpathy's format, "),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, images: list | None, named: str):
    (tmp_path / SPLIT_FILE).write_text(json.dumps({"images": images}))
    with pytest.raises(ValueError, match=named):
        make_task(folder=str(tmp_path)).examples(urls([tiny_sample(0)]), None)


def make_example(task: Retrieval, number: int, image_name: str = "") -> Example:
    sample = tiny_sample(number)
    image, caption = (
        prepare_image(sample, TINY_MODEL.regions, False),
        Caption(image_name or str(number), sample.caption),
    )
    return task.example(sample, image, caption, np.random.default_rng(number))


def shown(batch: Batch) -> dict[tuple[int, int], tuple[list[int], int]]:
    """(anchor, role) -> the tokens and a number of the image of each row."""
    rows = zip(batch.labels["anchor"].tolist(), batch.labels["role"].tolist(), strict=True)
    images = [int(batch.image(int(batch.image_of[row])).sum()) for row in range(len(batch))]
    tokens = [batch.tokens[row][batch.text_mask[row]].tolist() for row in range(len(batch))]
    return dict(zip(rows, zip(tokens, images, strict=True), strict=True))


def test_each_pair_meets_the_captions_and_images_of_the_next_three():
    task = make_task()
    examples = [make_example(task, number) for number in range(7)]
    batch = collate(task.collate_group(examples[:4], examples[4:]))
    assert (len(batch), len(batch.image_rows)) == (28, 7)
    rows = shown(batch)
    tokens, images = ([one.text.tokens.tolist() for one in examples], [int(e.image.pixels.sum()) for e in examples])
    for anchor in range(4):
        assert rows[anchor, 0] == (tokens[anchor], images[anchor])
        for distance in range(1, 4):
            assert rows[anchor, distance] == (tokens[anchor + distance], images[anchor])
            assert rows[anchor, 3 + distance] == (tokens[anchor], images[anchor + distance])
    task = make_task(wrong_captions=2, wrong_images=1)
    examples = [make_example(task, 0, "same.jpg"), make_example(task, 1, "same.jpg"), make_example(task, 2)]
    assert {*shown(collate(task.collate_group(examples[:1], examples[1:])))} == {(0, 0), (0, 2)}, "no other image"


def scored(task: Retrieval, table: dict[tuple[int, int], float]) -> dict[str, tuple[torch.Tensor, int]]:
    """The losses where (anchor, role) have these logits."""
    labels = {name: torch.tensor([key[i] for key in table]) for i, name in enumerate(("anchor", "role"))}
    labels["right"] = labels["role"][labels["role"] == 0]
    batch = SimpleNamespace(counted=torch.arange(len(table)), labels=labels)
    logits = torch.tensor([*table.values()], requires_grad=True)
    losses = task.losses(None, lambda encoded: logits, None, batch)
    sum(loss for loss, _ in losses.values() if loss.requires_grad).backward()
    assert logits.grad.isfinite().all()
    return losses


def test_the_hinge_is_that_of_the_hardest_of_three_each_way():
    """The example of the paper's formula: 0.80; wrong captions 0.10, 0.65, 0.20; wrong images 0.70, 0.30, 0.90."""
    values = torch.tensor([0.80, 0.10, 0.65, 0.20, 0.70, 0.30, 0.90], dtype=torch.float64).logit().tolist()
    first = {(0, role): value for role, value in enumerate(values)}
    found = scored(make_task(), first)
    assert found["pairs"][0].item() == pytest.approx(0.35)
    assert (found["pairs"][1], found["accuracy"][0].item()) == (1, 0)
    missing = scored(make_task(), first | {(1, 0): values[4], (1, 2): values[2]})  # a pair with one wrong caption
    assert missing["pairs"][0].item() == pytest.approx(0.35 + 0.15)
    assert (missing["pairs"][1], missing["accuracy"][0].item()) == (2, 1)


def test_the_cross_entropy_is_over_the_pair_and_all_wrong_ones():
    table = {(0, 0): 2.0, (0, 1): 1.0, (0, 2): -1.0, (0, 3): 0.5, (1, 0): 0.3, (1, 3): 0.3}
    found = scored(make_task(loss="cross_entropy", wrong_captions=2, wrong_images=1), table)
    first = -torch.tensor([2.0, 1.0, -1.0, 0.5]).log_softmax(0)[0].item()
    assert found["pairs"][0].item() == pytest.approx(first + np.log(2), rel=1e-6)
    assert found["accuracy"][0].item() == 1, "equal scores are no right answer"


def test_pairs_are_the_same_in_every_world(tmp_path: Path):
    folder = retrieval_root(tmp_path)
    samples, _ = open_samples(open_store(str(folder / "root")), "flickr30k", None, None, ALONE)
    task = make_task(folder=str(folder / "files"))
    examples = task.examples(samples, None)

    def rows_of(step: int, size: int, parts: int = 1) -> list[str]:
        config, rows = dataclasses.replace(retrieval_recipe(folder).data, gradient_accumulation=parts), []
        for rank in range(size):
            world, datasets = World(rank, size, torch.device("cpu")), [TrainingDataset(samples, examples)]
            for batch in TrainingData(datasets, task, config, TINY_MODEL, world)[step]:
                rows += [str((role, *what)) for (_, role), what in shown(batch).items()]
        return sorted(rows)

    for step in (0, 2):
        assert rows_of(step, 1) == rows_of(step, 2) == rows_of(step, 4) == rows_of(step, 1, parts=2)


@pytest.mark.parametrize("config", [TINY_MODEL, VILBERT], ids=["vlbert", "vilbert"])
def test_scores_are_those_of_each_pair_by_itself_whatever_the_block(config: ModelConfig):
    task = make_task(rows_at_once=7)
    torch.manual_seed(0)
    model = TaskModel(VLBert(config, len(WORDS)), task).eval()
    samples = [with_features(tiny_sample(number, regions=1 + number)) for number in range(3)]
    samples[1] = turned(samples[1])  # batches put tall ones first
    held_out = task.with_candidates([HeldOutImage(sample.url, tuple(captions_of(sample))) for sample in samples])
    examples = [
        task.example(sample, prepare_image(sample, config.regions, False), one, np.random.default_rng(0))
        for sample, one in zip(samples, held_out, strict=True)
    ]
    with torch.no_grad():
        found = [np.frombuffer(row["scores"], np.float32) for row in model.predict(collate(examples))]
        for example, scores in zip(examples, found, strict=True):
            for text, score in zip(held_out[0].candidates, scores, strict=True):
                own = dataclasses.replace(example.text, tokens=text, segments=text * 0, token_region=text * 0)
                pair = collate([dataclasses.replace(example, text=own)])
                assert score == pytest.approx(model.head(model.vlbert(pair)).item(), abs=1e-5)
    assert len({round(float(score), 4) for scores in found for score in scores}) > 9


def turned(sample: Sample) -> Sample:
    """The sample with its image and boxes turned over the diagonal: a tall one."""
    file, boxes = io.BytesIO(), sample.regions.boxes[:, [1, 0, 3, 2]]
    Image.open(io.BytesIO(sample.image)).transpose(Image.Transpose.TRANSPOSE).save(file, "JPEG")
    regions = dataclasses.replace(sample.regions, boxes=boxes)
    return dataclasses.replace(sample, image=file.getvalue(), width=sample.height, height=sample.width, regions=regions)


def test_scores_are_not_rounded_to_the_precision_of_the_run():
    task = make_task()
    torch.manual_seed(0)
    model = TaskModel(VLBert(TINY_MODEL, len(WORDS)), task).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = model.head(model.vlbert(collate([make_example(task, number) for number in range(8)])))
    assert scores.dtype == torch.float32
    assert (scores != scores.bfloat16().float()).any()


def scored_image(name: str, first: int, images: int, scores: np.ndarray | list[float]) -> dict:
    """A row of `predict`, of an image with two captions."""
    given = {"image": f"{name}.jpg", "captions": (f"{name}1", f"{name}2"), "first": first, "images": images}
    return {"key": name, "scores": np.array(scores, np.float32).tobytes()} | given


def test_images_that_cannot_be_read_take_their_captions_along():
    """Images 0, 1, 2 have 2, 1 and 2 captions; 1 is missing."""
    task = make_task()
    rows = [scored_image("a", 0, 3, [1, 4, 9, 3, 2]), scored_image("c", 3, 3, [5, 1, 9, 2, 4])]
    found = task.assemble(rows)
    columns = ("answer", "ground_truth", "caption_rank", "image_ranks", "found_images", "score")
    assert [[row[name] for name in columns] for row in found] == [
        ["a2", "a2", 1, [2, 1], ["c.jpg", "a.jpg"], (1 + 0.75) / 2],
        ["a1", "c2", 2, [2, 1], ["a.jpg", "c.jpg"], (0.5 + 0.75) / 2],
    ]
    assert found[0]["probability"] == pytest.approx(1 / (1 + np.exp(-4.0)))
    metrics = task.metrics(found)
    assert (metrics["image_r1"], metrics["caption_r1"], metrics["image_r5"]) == (0.5, 0.5, 1.0)
    assert (metrics["image_medr"], metrics["caption_meanr"], metrics["chance"]) == (1.0, 1.5, 0.5)


def test_folds_are_ranked_by_themselves():
    scores = np.random.default_rng(0).normal(size=(7, 14)).astype(np.float32)
    task, rows = make_task(fold=3), [scored_image(str(i), 2 * i, 7, of_image) for i, of_image in enumerate(scores)]
    found = task.assemble(rows)
    assert [row["fold"] for row in found] == [0, 0, 0, 1, 1, 1, None]
    parts = folds(scores, np.repeat(np.arange(7), 2), 2)
    images = np.concatenate([part.image_of_caption for part in parts])
    captions = np.concatenate([part.captions_of_image for part in parts])
    assert [row["caption_rank_fold"] for row in found[:6]] == (1 + captions).tolist()
    assert sum((row["image_ranks_fold"] for row in found[:6]), []) == (1 + images).tolist()
    assert task.metrics(found)["image_r1_fold"] == pytest.approx((images < 1).mean())
    assert "image_r1_fold" not in make_task().metrics(make_task().assemble(rows))
