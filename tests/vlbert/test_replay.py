"""The batch of any step, made again from a checkpoint: against what the training itself was given, and its page."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import ALONE
from tiny import commit_more, tiny_recipe, tiny_root, tiny_sample

from storage.reading import ShardSamples
from vlbert.data.batch import Batch
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.evaluation.replay import Replay, ReplaySettings, main, replay, write_replay
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.train import train


def plain(value: Any) -> Any:
    """All numbers of a batch, to be compared; without metadata, which are of the tasks' own kinds."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if dataclasses.is_dataclass(value):
        return {
            one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value) if one.name != "metadata"
        }
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


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
    recipe = tiny_recipe(root, run_name="run", task=task)
    data, seen = dataclasses.replace(recipe.data, flip=0.5, new_shards_every=1), {}

    def observe(step: int, parts: Sequence[Batch]) -> None:
        if step == 1:
            commit_more(root, "00009", range(100, 108))
        seen[step] = list(parts)

    train(dataclasses.replace(recipe, data=data), ALONE, observe)
    return root, seen


def replayed(trained: tuple[Path, dict], step: int, **settings: Any) -> Replay:
    return replay(str(trained[0] / "runs/run"), step, ReplaySettings(**settings))


def test_every_step_has_the_batch_that_the_training_was_given(trained):
    for step, (batch,) in trained[1].items():
        assert plain(replayed(trained, step + 1).batch) == plain(batch)
    entered = {tiny_sample(number).key for number in range(100, 108)}
    assert 0 < len(entered & {*replayed(trained, 3).batch.keys}) < 8, "the third step goes over to the new shards"
    assert plain(replay(str(trained[0] / "runs/run/step-0000003"), 2).batch) == plain(trained[1][1][0])


def test_the_page_shows_what_was_masked_and_asked(trained, tmp_path):
    """From a copied folder."""
    folder = shutil.copytree(trained[0] / "runs/run/step-0000006", tmp_path / "copy")
    main([str(folder), "5", f"--root={trained[0]}", f"--text_corpus={trained[0]}/text", f"--out={tmp_path}/page.html"])
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page), "it asks nothing of the network"
    (batch,), names = trained[1][4], replayed(trained, 5).task.vocabulary.tokens
    figures = re.findall(r'<figure class="card">.*?</figure>', page, re.DOTALL)
    assert len(figures) == len(batch)
    assert ["<img" in figure for figure in figures] == (batch.image_of >= 0).tolist()
    for row, figure in enumerate(figures):
        tokens = batch.tokens[row, : batch.sizes.tokens[row]].tolist()
        assert re.findall(r"<span.*?>(.*?)</span>", figure) == [names[token] for token in tokens]
        own = batch.labelled["word_label_mask"] // batch.tokens.shape[1] == row
        words = [names[value] for value in batch.labels["words"][own].tolist()]
        assert re.findall('<p class="label">words: (.*?)</p>', figure) == ([", ".join(words)] if words else [])


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
    out = write_replay(str(trained[0] / "runs/run"), 2, ReplaySettings(out=str(tmp_path / "p.html")))
    assert f"sample {lost} is damaged" in out.read_text()


def without_a_tar(root: Path) -> str:
    tar = next((root / "captions/regions").glob("*/00000-*.tar"))
    tar.unlink()
    return f"{tar.name} has 0 bytes, but .*: it is truncated or missing"


def without_a_snapshot(root: Path) -> str:
    for file in (root / "captions/regions").glob("*/snapshots/*.parquet"):
        file.unlink()
    return "is missing; put it back"


def with_another_corpus(root: Path) -> str:
    file = root / "text/corpus.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"made_of": "another"}))
    return f"{root}/text is not the corpus that {root}/runs/run/step-0000006 was trained with; give that one$"


@pytest.mark.parametrize(
    ("change", "step"),
    [
        (lambda root: "step 7 cannot be replayed; give a step from 1 to 6, or a later checkpoint$", 7),
        (lambda root: "from 1 to 6", 0),
        (without_a_tar, 2),
        (without_a_snapshot, 2),
        (with_another_corpus, 2),
    ],
)
def test_what_cannot_be_replayed_is_one_line(trained, tmp_path, change: Callable[[Path], str], step: int):
    root = shutil.copytree(trained[0], tmp_path / "root")
    with pytest.raises(SystemExit, match=f"^vlbert replay: .*{change(root)}") as refused:
        main([str(root / "runs/run"), str(step), f"--text_corpus={root}/text"])
    assert "\n" not in str(refused.value)
