"""Nineteen real photographs through the pipeline: a web server, collect, detect, pre-training on two processes."""

import dataclasses
import functools
import http.server
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from places import SHARED
from tiny import TINY_MODEL, as_overrides, tiny_recipe

from detectors.config import DetectionConfig, NetworkOverrides
from flows.detect import detect
from flows.pretrain import pretrain
from flows.settings import Dataset, PretrainSettings, Processes
from storage.catalog import Catalog
from storage.collect.download import DownloadSettings
from storage.collect.run import collect
from storage.object_store import open_store
from training.log import read_metrics
from vlbert.recipes import RECIPES

PHOTOGRAPHS = SHARED / "images"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PHOTOGRAPHS.is_dir(), reason="the photographs lie in ../shared, which is not here"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(PHOTOGRAPHS))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


@pytest.mark.timeout(400)
def test_photographs_go_through_the_whole_pipeline(server, tmp_path):
    root, lines = str(tmp_path / "root"), []
    pairs = [line.split("\t") for line in (PHOTOGRAPHS / "captions.tsv").read_text().splitlines()]
    captions, text = tmp_path / "captions.tsv", tmp_path / "text.txt"
    captions.write_text("".join(f"{caption}\thttp://{server}/{file}\n" for caption, file in pairs))
    text.write_text("".join(f"{caption}\n" for caption, _ in pairs))
    dataset = Dataset(
        "captions",
        # Small, for the processors' sake: the network is whole, ResNet-50 with its dilated res5.
        detector=DetectionConfig(
            preset="vg_resnet50", random_init=True, network=NetworkOverrides(short_side=160, post_nms=12)
        ),
        captions=str(captions),
        download=DownloadSettings(allowed_hosts=(server,)),
        rows_per_shard=10,
    )

    collected = collect(root, dataset)
    assert (collected.shards, collected.counts) == (2, {"ok": 19})
    catalog = Catalog(open_store(root), "captions")
    rows = [row for shard in catalog.shards("images") for row in catalog.manifest("images", shard).table.to_pylist()]
    assert [(row["row"], row["status"]) for row in rows] == [(i, "ok") for i in range(19)]

    detected = detect(root, dataset.name, dataset.detector, lines.append)
    assert detected.random_init
    assert any("WARNING" in line and "random weights" in line for line in lines)
    samples = [sample for shard in ("00000", "00001") for sample in catalog.read(detected.stage, shard)]
    assert [sample.caption for sample in samples] == [caption for caption, _ in pairs]
    for sample in samples:
        boxes = sample.regions.boxes
        assert 10 <= len(boxes) <= 100
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] <= [sample.width, sample.height]).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        assert sample.regions.class_probs.shape == (len(boxes), 1601)
        np.testing.assert_allclose(sample.regions.class_probs.astype(np.float32).sum(1), 1, atol=0.01)

    base = tiny_recipe(tmp_path)
    recipe = dataclasses.replace(
        base,
        model=dataclasses.replace(TINY_MODEL, max_positions=160),
        data=dataclasses.replace(RECIPES["pretrain_vlbert"]("demo").data, batch=10, text_batch=2, workers=0),
        steps=20,
        vocabulary=None,
        save_every=20,
    )
    settings = PretrainSettings(
        recipe="pretrain_vlbert --size demo",
        run="photographs",
        text=(str(text),),
        vocabulary_size=400,
        overrides=tuple(as_overrides(recipe, RECIPES["pretrain_vlbert"]("demo"))),
        processes=Processes(count=2, threads=1),
    )
    trained = pretrain(root, str(tmp_path / "work"), settings)
    assert trained.checkpoint.endswith("runs/photographs/step-0000020")
    lines = read_metrics(open_store(root), "photographs", "training")
    assert [line["step"] for line in lines] == list(range(1, 21))
    for name in ("loss_words", "loss_regions"):
        curve = np.array([line[name] for line in lines])
        assert np.isfinite(curve).all()
        assert curve[-5:].mean() < curve[:5].mean()
