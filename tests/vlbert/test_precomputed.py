"""From a detector that keeps its features to a model that trains on them: no pixel is decoded on the way."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import TINY_MODEL, tiny_recipe, tiny_sample

from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import DEMO, FasterRCNN
from detectors.run import detect_pending, stage_of, stage_size
from storage.catalog import Catalog, Row
from storage.object_store import open_store
from storage.reading import ShardSamples
from training.distributed import World
from training.log import read_metrics
from vlbert.config import RegionConfig
from vlbert.data.images import prepare_image
from vlbert.train import train

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight drawn pictures with the regions and features of an untrained detector."""
    root = tmp_path_factory.mktemp("precomputed")
    catalog = Catalog(open_store(str(root)), "captions")
    samples = [dataclasses.replace(tiny_sample(i), regions=None) for i in range(8)]
    rows = [Row(i, sample.key, "ok", url=sample.url) for i, sample in enumerate(samples)]
    assert catalog.commit("images", "00000", samples, rows, {})
    config = dataclasses.replace(DEMO, short_side=64, long_side=96)
    settings = DetectorSettings(keep_features=True)
    detector = FasterRCNNDetector(FasterRCNN.random_init(config, 0), {"random_init": True, "seed": 0}, settings)
    detect_pending(catalog, detector, lambda report: None)
    assert stage_size(catalog, stage_of(detector))["keep_features"]
    return root


def test_a_model_trains_on_features_that_the_detector_kept(root: Path, monkeypatch: pytest.MonkeyPatch):
    resnet = DEMO.resnet
    model = dataclasses.replace(TINY_MODEL, regions=RegionConfig(features="precomputed", resnet=resnet))
    recipe = tiny_recipe(root, model=model, steps=3, vocabulary=None, vocabulary_size=120)
    recipe = dataclasses.replace(
        recipe, data=dataclasses.replace(recipe.data, text_batch=0, held_out=None, batch=4, flip=0.5)
    )
    monkeypatch.setattr("vlbert.data.images._decode", lambda sample: pytest.fail("a picture was decoded"))
    train(recipe, ALONE)
    lines = read_metrics(open_store(str(root)), recipe.run_name, "training")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line[name]) for line in lines for name in ("loss_words", "loss_regions"))


def test_what_the_model_sees_of_a_region_is_what_the_detector_kept(root: Path):
    catalog = Catalog(open_store(str(root)), "captions")
    stage = f"regions/{next(iter(root.glob('captions/regions/*'))).name}"
    samples = ShardSamples(catalog.store, catalog.pinned(stage, catalog.pin(stage).id))
    sample = samples.sample(3)
    config = RegionConfig(features="precomputed", resnet=DEMO.resnet)
    masked = np.zeros(1 + len(sample.regions), bool)
    masked[2] = True
    picture = prepare_image(sample, config, flip=True).to_input(masked)
    assert picture.pixels is None
    np.testing.assert_array_equal(picture.features[1:], sample.regions.features.astype(np.float32))
    others = np.delete(sample.regions.features.astype(np.float32), 1, axis=0)
    np.testing.assert_allclose(picture.features[0], others.mean(axis=0), rtol=1e-4)
    with pytest.raises(ValueError, match=r"carry features of \d+ channels, the model takes 2048"):
        prepare_image(sample, RegionConfig(features="precomputed"), flip=False)
