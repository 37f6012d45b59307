"""A pre-training on several datasets: the share of each, one order in every world, resume, new shards, validation."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loaded import ALONE, captions, training_data
from programs import losses
from safetensors.torch import load_file
from tiny import DETECTOR, TINY_MODEL, commit_samples, tiny_recipe, tiny_root, tiny_sample

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.inventory import Inventory
from storage.manifests import Row
from storage.object_store import open_store
from storage.runs import checkpoints, open_folder
from storage.sample import Sample
from training.log import read_metrics
from vlbert.config import DataConfig, Recipe
from vlbert.data.batch import Batch
from vlbert.data.loading import TrainingData, TrainingDataset
from vlbert.data.order import SnapshotSpan
from vlbert.tasks.base import Examples
from vlbert.tasks.pretraining import Pretraining
from vlbert.train import train

BOTH = {"captions": 3.0, "more": 1.0}
SAMPLES = {  # the first number and the count of those of each dataset
    name: [tiny_sample(first + i, regions=1 + i % 3) for i in range(count)]
    for name, first, count in (("captions", 0, 20), ("more", 200, 12), ("held-more", 2000, 6), ("new", 300, 6))
}


KEYS = {name: {sample.key for sample in samples} for name, samples in SAMPLES.items()}


def captions_in(keys: list[str]) -> list[str]:
    return [key for key in keys if not key.startswith("text-")]


def make_root(folder: Path) -> Path:
    root = tiny_root(folder, samples=20, held_out=4)
    commit_samples(root, "more", SAMPLES["more"])
    commit_samples(root, "held-more", SAMPLES["held-more"])
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_root(tmp_path_factory.mktemp("several"))


def test_each_dataset_has_its_share_and_epochs_of_its_own(root):
    data = training_data(root, weights=BOTH)
    keys = [key for step in range(10) for batch in data[step] for key in captions(batch)]
    counts = Counter("more" if key in KEYS["more"] else "captions" for key in keys)
    assert counts == {"captions": 60, "more": 20}
    ours = [key for key in keys if key in KEYS["captions"]]
    assert [{*ours[start : start + 20]} for start in (0, 20, 40)] == [KEYS["captions"]] * 3
    assert {*[key for key in keys if key in KEYS["more"]][:12]} == KEYS["more"]
    for step in range(10):
        assert sum(key in KEYS["more"] for key in keys[8 * step : 8 * step + 8]) in (1, 2, 3)


NUMBERS_AND_WEIGHTS = st.dictionaries(st.integers(1, 40), st.floats(0.05, 5), min_size=1, max_size=3)


@given(NUMBERS_AND_WEIGHTS, st.integers(1, 16), st.integers(1, 5))
def test_boundaries_are_beginnings_of_epochs_and_come_again(weights, batch, every):
    datasets = [TrainingDataset(None, Examples(np.arange(n)), weight=weight) for n, weight in weights.items()]
    config, steps = DataConfig(batch=batch, new_shards_every=every), 120
    data = TrainingData(datasets, SimpleNamespace(lookahead=0), config, TINY_MODEL, ALONE)
    found = [(step, *boundary) for step in range(steps) for boundary in data.boundaries(step)]
    for number, (n, weight) in enumerate(weights.items()):
        ours = [(step, boundary) for step, which, boundary in found if which == number]
        apart = every * batch * (weight / sum(weights.values()))
        assert all(boundary > 0 and boundary % n == 0 for _, boundary in ours)
        gaps = np.diff([0, *(boundary for _, boundary in ours)])
        assert (gaps >= apart).all(), "so many steps, in samples of the dataset"
        assert len(ours) >= steps * batch * weight / sum(weights.values()) // (apart + n + 1) - 2, "none is left out"


def commit(root: Path, dataset: str, shard: str, samples: list[Sample]) -> None:
    """Commit a region shard with the regions of the samples' detector."""
    rows = [Row(i, sample.key, "ok", url=sample.url) for i, sample in enumerate(samples)]
    catalog, detector = Catalog(open_store(str(root)), dataset), samples[0].regions.detector
    assert commit_shard(catalog, f"regions/{detector}", shard, samples, rows, {"random_init": False})


class Seen:
    """What a training computed from, by step; in step `at` a shard of `more` is committed, as by a detector."""

    def __init__(self, root: Path, at: int | None = None):
        self.root, self.at, self.steps = root, at, {}

    def __call__(self, step: int, parts: Sequence[Batch]) -> None:
        if step == self.at:
            commit(self.root, "more", "00009", SAMPLES["new"])
        self.steps[step] = [(batch.keys, batch.tokens.tolist()) for batch in parts]


def a_run(root: Path, name: str, datasets: dict[str, float | None], steps: int = 8, **changes) -> Recipe:
    recipe = tiny_recipe(root, run_name=name, steps=steps, save_every=1, keep_checkpoints=20)
    data = dataclasses.replace(recipe.data, datasets=datasets, new_shards_every=1, held_out=None)
    return dataclasses.replace(recipe, data=dataclasses.replace(data, **changes))


def weights_of(root: Path, run: str) -> dict[str, torch.Tensor]:
    return load_file(root / "runs" / run / "step-0000008" / "model.safetensors")


def saved(root: Path, run: str) -> list[dict]:
    store = open_store(str(root))
    return open_folder(store, checkpoints(store, run)[-1]).state["data"]


def test_new_shards_of_one_dataset_enter_at_its_epoch_and_a_resumed_run_repeats_it(tmp_path, capsys):
    root = make_root(tmp_path)
    whole, given = Seen(root, at=0), {"more": 1.0, "captions": 1.0}
    train(a_run(root, "whole", given), ALONE, whole)
    # 4 samples of each a step: the 12 of `more` end with step 3, the 20 of `captions` with step 5.
    printed = capsys.readouterr().out
    assert "new shards from step 4, the beginning of epoch 1: 18 examples per epoch instead of 12" in printed
    assert printed.count("50.0% of each step") == 2
    captioned, more = saved(root, "whole")
    spans = [
        [(span["epoch"], span["consumed"], span["examples"]) for span in one["snapshots"]] for one in (captioned, more)
    ]
    assert spans == [[(0, 0, 20)], [(0, 0, 12), (1, 12, 18)]]
    assert (captioned["dataset"], more["dataset"], more["weight"]) == ("captions", "more", 1.0)
    (event,) = read_metrics(open_store(str(root)), "whole", "snapshot")
    assert (event["dataset"], event["step"], event["snapshot"]) == ("more", 4, more["snapshots"][1]["snapshot"])
    keys = captions_in([key for step in range(8) for key in whole.steps[step][0][0]])
    first = [key for key in keys if key not in KEYS["captions"]]
    assert {*first[:12]} == KEYS["more"]
    assert {*first[12:30]} == KEYS["more"] | KEYS["new"]
    assert {*[key for key in keys if key in KEYS["captions"]][:20]} == KEYS["captions"]

    before, lines = weights_of(root, "whole"), losses(root, "whole")
    for step in (2, 3, 6):  # before the boundary, at it and behind it
        for folder in (root / "runs" / "whole").glob("step-*"):
            if int(folder.name[5:]) > step:
                (folder / "state.json").unlink()
        resumed = Seen(root)
        train(a_run(root, "whole", given, workers=step % 2), ALONE, resumed)
        assert resumed.steps == {number: parts for number, parts in whole.steps.items() if number >= step}
        after = weights_of(root, "whole")
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert losses(root, "whole") == lines
        assert len(read_metrics(open_store(str(root)), "whole", "snapshot")) == 1
    assert saved(root, "whole") == [captioned, more]

    # What gc keeps: snapshots of both datasets.
    pins = {(dataset, snapshot) for dataset, _, snapshot in Inventory(open_store(str(root))).pins()}
    assert pins == {(one["dataset"], span["snapshot"]) for one in (captioned, more) for span in one["snapshots"]}

    # Another world goes on with the same samples.
    spans = {one["dataset"]: [SnapshotSpan(**span) for span in one["snapshots"]] for one in (captioned, more)}
    ranks = [training_data(root, rank, 2, {"captions": 1.0, "more": 1.0}, spans) for rank in range(2)]
    for step in (4, 7):
        dealt = [key for data in ranks for key in captions(data[step][0])]
        assert dealt == captions_in(whole.steps[step][0][0])


def test_without_weights_each_dataset_has_those_of_its_size_at_the_beginning(tmp_path):
    root = make_root(tmp_path)
    seen = Seen(root, at=3)
    train(a_run(root, "sizes", {"captions": None, "more": None}, steps=5), ALONE, seen)
    assert [one["weight"] for one in saved(root, "sizes")] == [20.0, 12.0]
    again = Seen(root)
    train(a_run(root, "sizes", {"more": None, "captions": None}, steps=8), ALONE, again)
    assert [one["weight"] for one in saved(root, "sizes")] == [20.0, 12.0], "whatever entered since"
    keys = [key for step in range(4) for key in seen.steps[step][0][0]]
    assert {*captions_in(keys)} == KEYS["captions"] | KEYS["more"]


def test_every_held_out_dataset_has_metrics_of_its_own(root, monkeypatch):
    """Here the metric is the number of examples: so few steps teach nothing that could be compared."""
    monkeypatch.setattr(Pretraining, "metrics", lambda self, rows: {"words_accuracy": float(len(rows))})
    recipe = a_run(root, "validated", BOTH, steps=1, held_out=("held-out", "held-more"))
    metrics = train(recipe, ALONE)
    (line,) = read_metrics(open_store(str(root)), "validated", "validation")
    assert metrics.items() <= line.items()
    counts = {"": 10, "held-out/": 4, "held-more/": 6}
    assert {name: line[f"{name}words_accuracy"] for name in counts} == counts
    assert {name: line[f"{name}words_accuracy_shuffled"] for name in counts} == counts
    rows = [json.loads(row) for row in (root / "runs/validated/predictions.jsonl").read_text().splitlines()]
    assert Counter(row["dataset"] for row in rows) == {"held-out": 4, "held-more": 6}
    assert {row["key"] for row in rows if row["dataset"] == "held-more"} == KEYS["held-more"]
    one = dataclasses.replace(recipe.data, held_out=("held-more",))
    alone = train(dataclasses.replace(recipe, run_name="alone", data=one), ALONE)
    assert alone == {"words_accuracy": 6, "words_accuracy_shuffled": 6, "words_accuracy_grounding_gap": 0}


def test_bad_names_and_weights_and_datasets_that_do_not_fit_together_are_named(root):
    wrong = ("datasets", {}), ("datasets", {"a": 1.0, "b": 0.0}), ("datasets", {"a": 1.0, "b": None})
    for name, value in (*wrong, ("held_out", ("a", "a"))):
        with pytest.raises(ValueError, match=re.escape(f"DataConfig.{name} is {value}; it must be ")):
            DataConfig(**{name: value})
    for name, detector, classes in (("few", DETECTOR, 4), ("other", "0123456789ab", 8)):
        samples = []
        for sample in SAMPLES["new"]:
            labels, class_probs = sample.regions.labels % classes + 1, sample.regions.class_probs[:, : classes + 1]
            regions = dataclasses.replace(sample.regions, detector=detector, labels=labels, class_probs=class_probs)
            samples.append(dataclasses.replace(sample, regions=regions))
        commit(root, name, "00000", samples)
    for datasets, named in (
        ({"captions": 1, "nothing": 1}, r"nothing/regions has no region shards"),
        ({"captions": 1, "few": 1}, "the regions of few and captions differ in their number of classes, 4 and 8"),
        (
            {"captions": 1, "other": 1},
            "of other and captions differ in their detector, 0123456789ab and 0000000",
        ),
    ):
        with pytest.raises(ValueError, match=named):
            train(a_run(root, "refused", datasets), ALONE)
    assert not (root / "runs" / "refused").exists()


def test_a_resumed_run_keeps_its_datasets_and_their_weights(root):
    train(a_run(root, "kept", BOTH, steps=1), ALONE)
    for datasets, named in (
        ({"captions": 3.0}, "captions"),
        ({"captions": 3.0, "more": 2.0}, "captions:3.0 more:2.0"),
        (BOTH | {"third": 1.0}, "captions:3.0 more:1.0 third:1.0"),
    ):
        named = f"data.datasets=captions:3.0 more:1.0, but the recipe has {named}. Restore captions:3.0 more:1.0"
        with pytest.raises(ValueError, match=re.escape(named)):
            train(a_run(root, "kept", datasets, steps=2), ALONE)
    train(a_run(root, "kept", {"more": 1, "captions": 3}, steps=2), ALONE)
    train(a_run(root, "one", {"captions": None}, steps=1), ALONE)
    train(a_run(root, "one", {"captions": 5.0}, steps=2), ALONE)  # alone it has all, whatever its weight
