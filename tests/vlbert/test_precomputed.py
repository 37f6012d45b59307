"""From a detector that keeps its features to a model that trains on them: no pixel is decoded on the way."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from tiny import TINY_MODEL, tiny_recipe, tiny_sample

from detectors.detect import DetectorSettings, FasterRCNNDetector
from detectors.faster_rcnn import DEMO, FasterRCNN
from detectors.run import detect_pending, stage_of, stage_size
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.manifests import Row
from storage.object_store import open_store
from training.distributed import World
from training.log import read_metrics
from vlbert.config import RegionConfig
from vlbert.train import train

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight drawn images with the regions and features of an untrained detector."""
    root = tmp_path_factory.mktemp("precomputed")
    catalog = Catalog(open_store(str(root)), "captions")
    samples = [dataclasses.replace(tiny_sample(i), regions=None) for i in range(8)]
    rows = [Row(i, sample.key, "ok", url=sample.url) for i, sample in enumerate(samples)]
    assert commit_shard(catalog, "images", "00000", samples, rows, {})
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
    monkeypatch.setattr("vlbert.data.images._decode", lambda sample: pytest.fail("an image was decoded"))
    train(recipe, ALONE)
    lines = read_metrics(open_store(str(root)), recipe.run_name, "training")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line[name]) for line in lines for name in ("loss_words", "loss_regions"))
