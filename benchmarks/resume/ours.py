"""This project: a run as vlbert.train starts and resumes it, without the steps of its model."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.resume import machine
from benchmarks.synthetic import DETECTOR, commit_samples, make_sample
from detectors.resnet import ResNetConfig
from storage.catalog import Catalog
from storage.catalog.commit import withdraw_samples
from storage.object_store import open_store
from storage.withdrawn import withdraw
from training.distributed import start
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.corpus import make_corpus
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.train import prepare

RESNET = ResNetConfig(blocks=(1, 1, 1, 1), width=4)
REGIONS = RegionConfig(resnet=RESNET, short_side=48, long_side=64, random_init=True)
MODEL = ModelConfig("J", 32, 4, 32, geometry_channels=32, max_positions=64, regions=REGIONS)


class Loader(machine.Loader):
    docs = "docs/formats.md#checkpoint"
    promises = dict.fromkeys(machine.SCENARIOS, "exact")
    shards, per_shard = 4, 10  # an epoch ends in the middle of a step

    def __init__(self, folder, rank, world, workers, states):
        data = DataConfig(str(folder), batch=24, text_batch=24, flip=0.5, workers=workers, new_shards_every=1)
        data, words = replace(data, gradient_accumulation=2, text_corpus=f"{folder}/text"), f"{folder}/text/vocab.txt"
        recipe = Recipe(name="resume", task=PretrainingSettings(), model=MODEL, data=data, vocabulary=words)
        self.run: Any = prepare(recipe, start(), lambda line: None)
        self.batches = self.run.batches()

    def take(self):
        parts, samples = next(self.batches), []
        self.run.step += 1
        for part in parts:
            for row, key in enumerate(part.keys):
                words, regions = part.text_mask[row], part.region_mask[row]
                became = part.tokens[row][words], part.boxes[row][regions], part.region_masked[row][regions]
                samples.append(f"{key}:{zlib.crc32(repr([tensor.tolist() for tensor in became]).encode())}")
        return samples

    def save(self):
        if self.run.world.first:
            self.run.save(self.run.step, {}, {})
            self.run.writer.finish()
        return [dataset.spans for dataset in self.run.data.datasets]

    @classmethod
    def write(cls, folder, shards):
        for shard in shards:
            samples = [make_sample(int(text), None, (64, 48), 3) for text in cls.texts(shard)]
            commit_samples(str(folder), "captions", samples, shard * cls.per_shard, shard)
        make_corpus(folder / "text", [Path(__file__)], None, 300, [])

    @staticmethod
    def withdraw(folder, number):
        sample, store = make_sample(number, None, (64, 48), 3), open_store(str(folder))
        withdraw(store, [sample.url])
        withdraw_samples(Catalog(store, "captions"), f"regions/{DETECTOR}", f"{number // 10:05d}")
        return sample.key
