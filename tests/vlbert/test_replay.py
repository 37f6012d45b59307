"""The batch of any step, made again from a checkpoint: against what the training itself was given, and its page."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import chromium
from loaded import rows_in_order
from programs import ended, launched
from refcoco_files import write_refcoco
from retrieval_files import retrieval_recipe, retrieval_root
from seeded import seeded_fractions
from tiny import (
    CHANNELS,
    SEPARATE,
    TINY_MODEL,
    as_overrides,
    commit_more,
    commit_samples,
    tiny_recipe,
    tiny_root,
    tiny_sample,
)
from vcr_files import write_vcr
from vqa_files import ANNOTATORS, ANSWERS, ROOM, coco, write_vqa

from storage.object_store import open_store
from storage.reading import ShardSamples
from training.distributed import World
from training.log import read_metrics
from vlbert.config import DataConfig, Recipe
from vlbert.data.batch import Batch
from vlbert.data.boxes import masked_pixels
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.evaluation.replay import (
    Replay,
    ReplaySettings,
    load_model,
    losses_of_rows,
    main,
    mean_losses,
    replay,
    write_replay,
)
from vlbert.evaluation.replay_page import seen_by_the_network
from vlbert.recipes import RECIPES
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings
from vlbert.train import train

ALONE = World(0, 1, torch.device("cpu"))


def observed(recipe: Recipe, on_step: Callable[[int], None] = lambda step: None) -> dict[int, list[Batch]]:
    """By step, from 0: what the training was given."""
    seen = {}

    def observe(step: int, parts: Sequence[Batch]) -> None:
        on_step(step)
        seen[step] = list(parts)

    train(recipe, ALONE, observe)
    return seen


def assert_equal(found: Any, wanted: Any, name: str = "batch") -> None:
    """Every tensor and every number of two batches."""
    assert type(found) is type(wanted), name
    if isinstance(found, torch.Tensor):
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found, wanted), name
    elif isinstance(found, dict):
        assert found.keys() == wanted.keys(), name
        for key in found:
            assert_equal(found[key], wanted[key], f"{name}.{key}")
    elif isinstance(found, tuple | list):
        assert len(found) == len(wanted), name
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            assert_equal(*pair, f"{name}[{number}]")
    elif dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            if field.name != "metadata":  # of the tasks' own kinds
                assert_equal(getattr(found, field.name), getattr(wanted, field.name), f"{name}.{field.name}")
    else:
        assert found == wanted, name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[Batch]]]:
    """A root with a run of six steps of every kind of row, in whose third step new shards enter; what it was given."""
    root = tiny_root(tmp_path_factory.mktemp("replay"), samples=20)
    task = PretrainingSettings(
        words=WordMasking(probability=0.3),
        regions=RegionMasking(probability=0.6, masked=0.5),
        text_length=12,
        relationship=True,
        mismatched=0.5,
    )
    recipe = tiny_recipe(root, run="run", task=task)
    data = dataclasses.replace(recipe.data, flip=0.5, new_shards_every=1)

    def detect(step: int) -> None:
        if step == 1:
            commit_more(root, "00009", range(100, 108))

    return root, observed(dataclasses.replace(recipe, data=data), detect)


def replayed(trained: tuple[Path, dict], step: int, **settings: Any) -> Replay:
    return replay(str(trained[0] / "runs/run"), step, ReplaySettings(**settings))


def test_every_step_has_the_batch_that_the_training_was_given(trained):
    for step, (batch,) in trained[1].items():
        assert_equal(replayed(trained, step + 1).batch, batch)
    found = replayed(trained, 3)
    assert {(span, epoch) for _, span, epoch, _ in found.slots} == {(0, 0), (1, 1)}, "the step over the new shards"
    assert_equal(replay(str(trained[0] / "runs/run/step-0000003"), 2).batch, trained[1][1][0])


def losses_of(model: TaskModel, batch: Batch) -> dict[str, float]:
    """The means over a whole batch, as a training logs them."""
    found = {name: (float(loss.detach()), n) for name, (loss, n) in model(batch).items() if loss.requires_grad}
    return {name: loss / n for name, (loss, n) in found.items() if n}


def test_the_losses_of_the_rows_add_up_to_those_of_the_batch(trained):
    found = replayed(trained, 4)
    model = load_model(found)
    rows = losses_of_rows(model, found.examples)
    whole = losses_of(model, found.batch)
    assert set(whole) == {"words", "regions", "text_words", "relationship"}
    assert mean_losses(rows) == pytest.approx(whole, rel=1e-4)
    assert [set(row) for row in rows[8:]] == [{"text_words"}] * 4


def test_labels_in_words_are_those_of_the_batch(trained):
    found = replayed(trained, 1)
    (batch,), names = trained[1][0], found.task.vocabulary.tokens
    labels = [found.task.labels_in_words(example, "class {}".format) for example in found.examples]
    words = [one.words for of_row in labels for one in of_row if one.text is not None and one.index is not None]
    assert words == [names[token] for token in batch.labels["words"].tolist()]
    for name, of_text in (("word_label_mask", True), ("region_label_mask", False)):
        width = batch.tokens.shape[1] if of_text else batch.boxes.shape[1]
        places = [
            row * width + one.index
            for row, of_row in enumerate(labels)
            for one in of_row
            if one.index is not None and (one.text is not None) == of_text
        ]
        assert places == batch.labelled[name].tolist()
    regions = [one.words for of_row in labels for one in of_row if one.text is None]
    classes = batch.labels["region_classes"].argmax(1).tolist()
    assert regions == [f"class {number} (1.00)" for number in classes]
    related = [
        one.words == "caption and image belong together" for of_row in labels for one in of_row if one.index is None
    ]
    assert related == batch.labels["related"].bool().tolist()
    assert len({*related}) == 2
    for example, of_row in zip(found.examples, labels, strict=True):
        sources = [found.source_of(example.image)[0].key] if example.image else []
        mismatched = any(one.words == "caption and image do not belong together" for one in of_row)
        assert all((key != example.key) == mismatched for key in sources)


def test_a_copied_folder_without_weights_is_enough(trained, tmp_path):
    folder = shutil.copytree(trained[0] / "runs/run/step-0000006", tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    (folder / "optimizer.safetensors").unlink()
    shutil.copytree(trained[0] / "text", tmp_path / "text")
    settings = ReplaySettings(text_corpus=str(tmp_path / "text"), out=str(tmp_path / "page.html"))
    text = write_replay(str(folder), 2, settings).read_text()
    assert "There are no losses" in text
    for example in replayed(trained, 2).examples:
        assert example.key in text


def test_the_program_writes_one_page_with_all_in_it(trained, tmp_path, capsys):
    main([str(trained[0] / "runs/run"), "3", f"out={tmp_path / 'page.html'}"])
    assert capsys.readouterr().out == f"written: {tmp_path / 'page.html'}\n"
    text = (tmp_path / "page.html").read_text()
    found = replayed(trained, 3)
    assert text.count('<img src="data:image/jpeg;base64,') == 8
    assert len(re.findall('class="token asked"', text)) == len(found.batch.labels["words"])
    assert "in eval mode (no dropout)" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text), "it asks nothing of the network"
    logged = read_metrics(open_store(str(trained[0])), "run", "training")[2]
    assert logged["step"] == 3
    assert f"{logged['loss_words']:.4f}" in text


def test_the_page_shows_each_row_as_the_training_was_given_it(trained, tmp_path):
    out = tmp_path / "page.html"
    text = write_replay(str(trained[0] / "runs/run"), 5, ReplaySettings(out=str(out), losses=False)).read_text()
    (batch,), names = trained[1][4], replayed(trained, 5).task.vocabulary.tokens
    figures = re.findall(r'<figure class="card" id="row-\d+">.*?</figure>', text, re.DOTALL)
    assert len(figures) == len(batch)
    labels = dict(zip(batch.labelled["word_label_mask"].tolist(), batch.labels["words"].tolist(), strict=True))
    length = batch.tokens.shape[1]
    for row, figure in enumerate(figures):
        shown = re.findall(r'<span class="token[^"]*"><span>(.*?)</span>(?:<b>(.*?)</b>)?</span>', figure)
        tokens = batch.tokens[row, : batch.sizes.tokens[row]].tolist()
        wanted = [
            (names[t], names[labels[at]] if (at := row * length + i) in labels else "") for i, t in enumerate(tokens)
        ]
        assert shown == wanted
        masked = re.findall(r"masked: ([\d, ]+)(?:, mirrored)?\.", figure)
        found = [int(number) for number in masked[0].split(", ")] if masked else []
        assert found == batch.region_masked[row].nonzero()[:, 0].tolist()


def test_masked_regions_are_drawn_as_the_network_sees_them(trained, tmp_path):
    """The mean colour under the hatching; all else as the training was given it."""
    found = replayed(trained, 5)
    (batch,) = trained[1][4]
    drawn = 0
    for number, example in enumerate(found.examples[:8]):
        seen = seen_by_the_network(found, example.image)
        height, width = seen.shape[:2]
        hole = masked_pixels(batch.boxes[None, number], batch.region_masked[None, number], height, width)[0].numpy()
        pixels = example.image.pixels.permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(seen[~hole], pixels[~hole])
        mean = np.array(TINY_MODEL.regions.pixel_mean[::-1]).astype(np.uint8)
        colours = {tuple(colour) for colour in seen[hole].tolist()}
        assert colours <= {tuple(mean.tolist()), (255, 255, 255)}
        drawn += len(colours) == 2
    assert drawn >= 2


def without_a_tar(root: Path) -> str:
    tar = next((root / "captions/regions").glob("*/00000-*.tar"))
    tar.unlink()
    return tar.name


def without_a_snapshot(root: Path) -> str:
    for file in (root / "captions/regions").glob("*/snapshots/*.parquet"):
        file.unlink()
    return "is gone; put it back"


def with_another_corpus(root: Path) -> str:
    file = root / "text/corpus.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"made_of": "another"}))
    return f"{root}/text is not the corpus that {root}/runs/run/step-0000006 was trained with; give that one$"


def unchanged(root: Path) -> str:
    return "step 7; name a step from 1 to 6, or a later checkpoint$"


@pytest.mark.parametrize(
    ("change", "step"),
    [(unchanged, 7), (lambda root: "step 0; name a step from 1 to 6", 0)]
    + [(change, 2) for change in (without_a_tar, without_a_snapshot, with_another_corpus)],
)
def test_what_cannot_be_replayed_is_one_line(trained, tmp_path, change: Callable[[Path], str], step: int):
    root = shutil.copytree(trained[0], tmp_path / "root")
    named, settings = change(root), [f"text_corpus={root}/text"]
    with pytest.raises(SystemExit, match=f"^vlbert replay: .*{named}") as refused:
        main([str(root / "runs/run"), str(step), *settings])
    assert "\n" not in str(refused.value)


# --- the other tasks --------------------------------------------------------------------------------------------------


def finetuning(root: Path, dataset: str, task: Any, **changes: Any) -> Recipe:
    data = DataConfig(str(root), datasets={dataset: None}, batch=4, workers=0, flip=0.5)
    values = {"run": "tuned", "task": task, "data": data, "steps": 2, "vocabulary": None, "random_init": True}
    return tiny_recipe(root, **values | {"vocabulary_size": 60} | changes)


def refcoco(folder: Path) -> Recipe:
    samples = [tiny_sample(i, regions=3) for i in range(8)]
    commit_samples(folder / "root", "refcoco+", samples)
    write_refcoco(folder / "files", samples)
    return finetuning(folder / "root", "refcoco+", RefCOCOSettings(str(folder / "files")))


def vqa(folder: Path) -> Recipe:
    samples = coco([tiny_sample(i) for i in range(4)], "train2014")
    commit_samples(folder / "root", "coco", samples)
    write_vqa(folder / "files", "train2014", ANNOTATORS)
    (folder / "files/answers_vqa.txt").write_text("\n".join(ANSWERS) + "\n")
    task = VQASettings(str(folder / "files"), answers=len(ANSWERS), question_length=ROOM)
    return finetuning(folder / "root", "coco", task)


def vcr(folder: Path) -> Recipe:
    samples = [tiny_sample(i) for i in range(6)]
    commit_samples(folder / "root", "vcr", samples)
    write_vcr(folder / "files", samples)
    task = VCRSettings(str(folder / "files"), mask_size=2, max_tokens=40, masked_regions=0.5)
    return finetuning(folder / "root", "vcr", task)


def retrieval(folder: Path) -> Recipe:
    recipe = retrieval_recipe(retrieval_root(folder))
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, held_out=None))


def precomputed(folder: Path) -> Recipe:
    """Unicoder-VL's: regions of precomputed features, whose images the page decodes all the same."""
    samples = [tiny_sample(i) for i in range(8)]
    features = [seeded_fractions(f"features of {i}", 2, CHANNELS).astype(np.float16) for i in range(8)]
    regions = [dataclasses.replace(one.regions, features=f) for one, f in zip(samples, features, strict=True)]
    samples = [dataclasses.replace(one, regions=r) for one, r in zip(samples, regions, strict=True)]
    commit_samples(folder / "root", "captions", samples)
    task = PretrainingSettings(regions=RegionMasking(probability=0.6))
    return finetuning(folder / "root", "captions", task, model=dataclasses.replace(SEPARATE, layers="JJ"))


LABELS = {
    refcoco: r"target 1\.00",
    vqa: r"yes 1\.00|no 1\.00|left 1\.00",
    vcr: "right",
    retrieval: "pair 1: the pair itself",
    precomputed: r"class \d \(1\.00\)",
}


@pytest.mark.slow
@pytest.mark.parametrize("make", LABELS, ids=lambda make: make.__name__)
def test_every_task_is_replayed_by_its_own_code(tmp_path, make: Callable[[Path], Recipe]):
    recipe = make(tmp_path)
    seen = observed(recipe)
    for step, (batch,) in seen.items():
        found = replay(str(tmp_path / "root/runs/tuned"), step + 1)
        assert_equal(found.batch, batch)
        model = load_model(found)
        rows = losses_of_rows(model, found.examples)
        assert mean_losses(rows) == pytest.approx(losses_of(model, batch), rel=1e-4)
    page = write_replay(
        str(tmp_path / "root/runs/tuned"), 1, ReplaySettings(out=str(tmp_path / "page.html"))
    ).read_text()
    assert re.search(rf">(?:\d( masked)?: )?{LABELS[make]}<", page)
    assert page.count("<img src=") == len(seen[0][0].image_rows)


# --- other worlds -----------------------------------------------------------------------------------------------------

RANK = """
import sys, torch
from storage.settings import override
from training.program import run_in_world
from vlbert.recipes import RECIPES
from vlbert.train import train

name, *given = sys.argv[1:]
recipe = override(RECIPES[name](), given)

def work(world):
    train(recipe, world, lambda step, parts: torch.save(list(parts), f"{step}-{world.rank}.pt"))

run_in_world("rank.py", work)
"""


def on_two(folder: Path, base: str, recipe: Recipe) -> dict[int, list[Batch]]:
    """By step: the batches of two processes, in the order of the slots."""
    status, _, errors = ended(launched(folder, RANK, base, *as_overrides(recipe, RECIPES[base]())))
    assert status == 0, errors[-3000:]
    found = {}
    for step in range(recipe.steps):
        ranks = [torch.load(folder / f"{step}-{rank}.pt", weights_only=False) for rank in range(2)]
        found[step] = [ranks[rank][part] for part in range(recipe.data.gradient_accumulation) for rank in range(2)]
    return found


def rows_with_labels(batch: Batch) -> list[tuple]:
    rows = rows_in_order(batch)
    for label, mask in (("words", "word_label_mask"), ("region_classes", "region_label_mask"), ("related", "related")):
        parts = batch.labels[label].split(batch.sizes.labelled[mask])
        rows = [(*row, part.tolist()) for row, part in zip(rows, parts, strict=True)]
    return rows


@pytest.mark.slow
def test_a_run_of_two_processes_is_replayed_by_one(tmp_path, trained):
    root = trained[0]
    task = PretrainingSettings(relationship=True, mismatched=0.5, text_length=12)
    recipe = tiny_recipe(root, run="two", task=task, steps=3, save_every=3)
    data = dataclasses.replace(recipe.data, flip=0.5, gradient_accumulation=2)
    recipe = dataclasses.replace(recipe, data=data, model=dataclasses.replace(TINY_MODEL, dropout=0.0))
    for step, batches in on_two(tmp_path, "pretrain_vlbert_demo", recipe).items():
        assert len(batches) == 4
        rows = [row for batch in batches for row in rows_with_labels(batch)]
        pairs, texts = ([row for row in rows if row[0].startswith("text-") == alone] for alone in (False, True))
        assert rows_with_labels(replay(str(root / "runs/two"), step + 1).batch) == pairs + texts


def pairs_of(batches: Sequence[Batch]) -> dict[tuple[int, int], tuple]:
    """(number of the pair in the step, role) -> the row's tokens and boxes."""
    found, first = {}, 0
    for batch in batches:
        labels = zip(batch.labels["anchor"].tolist(), batch.labels["role"].tolist(), strict=True)
        for row, (anchor, role) in enumerate(labels):
            tokens = batch.tokens[row, : batch.sizes.tokens[row]].tolist()
            found[first + anchor, role] = tokens, batch.boxes[row, : batch.sizes.regions[row]].tolist()
        first += len(batch.labels["right"])
    return found


@pytest.mark.slow
def test_pairs_of_two_processes_have_the_same_wrong_ones(tmp_path):
    recipe = retrieval(tmp_path)
    for step, batches in on_two(tmp_path, "finetune_retrieval_demo", recipe).items():
        found = replay(str(tmp_path / "root/runs/tuned"), step + 1)
        assert pairs_of([found.batch]) == pairs_of(batches)
        assert len(found.task.apart(found.examples)) == recipe.data.batch


@pytest.mark.slow
def test_the_page_fits_desktop_and_phone(trained, tmp_path):
    page = write_replay(str(trained[0] / "runs/run"), 3, ReplaySettings(out=str(tmp_path / "page.html")))
    with chromium() as browser:
        for width in (1280, 390):
            shown = browser.new_page(viewport={"width": width, "height": 800})
            errors = []
            shown.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            shown.on("console", lambda message, errors=errors: errors.append(message.text))
            shown.goto(f"file://{page}")
            assert shown.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
            assert shown.evaluate("[...document.images].every(one => one.complete && one.naturalWidth > 100)")
            first = shown.locator("figure").first.bounding_box()
            assert first["width"] > 300
            assert first["x"] + first["width"] <= width
            assert errors == []


def test_samples_that_cannot_be_read_leave_their_slots_empty(trained, tmp_path, monkeypatch):
    """As in the training: the others stay as they are, and the page says why."""
    whole = replayed(trained, 2)
    lost = whole.examples[3].key
    read = ShardSamples.samples

    def without(self: ShardSamples, numbers: Sequence[int]) -> list:
        return [ValueError(f"sample {lost} is damaged") if one.key == lost else one for one in read(self, numbers)]

    monkeypatch.setattr(ShardSamples, "samples", without)
    found = replayed(trained, 2)
    assert [example.key for example in found.examples] == [one.key for one in whole.examples if one.key != lost]
    assert [one.reason for one in found.unreadable] == [f"sample {lost} is damaged"]
    out = write_replay(str(trained[0] / "runs/run"), 2, ReplaySettings(out=str(tmp_path / "p.html"), losses=False))
    assert f"sample {lost} is damaged" in out.read_text()
