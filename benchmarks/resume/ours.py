"""This project: a run as vlbert.train starts and resumes it, without the steps of its model."""

import zlib
from dataclasses import replace

import torch._dynamo  # noqa: F401  an optimizer imports it, which takes longer than all else

from benchmarks.resume import machine
from benchmarks.synthetic import DETECTOR, commit_samples, make_sample
from detectors.resnet import ResNetConfig
from storage.catalog import Catalog
from storage.catalog.commit import withdraw_samples
from storage.object_store import open_store
from storage.sample import Sample
from storage.withdrawn import withdraw
from training.distributed import start
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.batch import Batch
from vlbert.data.corpus import make_corpus
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.train import prepare

RESNET = ResNetConfig(blocks=(1, 1, 1, 1), width=4)
REGIONS = RegionConfig(resnet=RESNET, short_side=48, long_side=64, random_init=True)
MODEL = ModelConfig("J", 32, 4, 32, geometry_channels=32, max_positions=64, regions=REGIONS)


class Loader(machine.Loader):
    docs, shards, per_shard = "https://github.com/OWNER/REPO/docs/formats.md", 4, 10
    promises = dict.fromkeys(machine.SCENARIOS, "exact")

    def __init__(self, folder, rank, world, workers, states):
        data = DataConfig(str(folder), batch=24, text_batch=24, text_corpus=f"{folder}/text", workers=workers, flip=0.5)
        data = replace(data, new_shards_every=1, gradient_accumulation=2)
        words = f"{folder}/text/vocab.txt"
        recipe = Recipe(name="resume", task=PretrainingSettings(), model=MODEL, data=data, vocabulary=words)
        self.run = prepare(recipe, start(), lambda line: None)
        self.batches = self.run.batches()

    def take(self):
        parts = next(self.batches)
        self.run.step += 1
        return [f"{key}:{digest(part, row)}" for part in parts for row, key in enumerate(part.keys)]

    def save(self):
        if self.run.world.first:
            self.run.save(self.run.step, {}, {})
            self.run.writer.finish()
        return [[span.__dict__ for span in dataset.spans] for dataset in self.run.data.datasets]

    @staticmethod
    def write(folder, shards):
        samples = {shard: [tiny_sample(number) for number in numbers] for shard, numbers in shards.items()}
        for shard, some in samples.items():
            commit_samples(str(folder), "captions", some, 10 * shard, shard)
        if 0 in shards:
            (folder / "lines.txt").write_text("".join(f"{sample.caption}\n" for sample in samples[0]))
            make_corpus(folder / "text", [folder / "lines.txt"], None, 300, [])

    @staticmethod
    def withdraw(folder, number):
        sample, store = tiny_sample(number), open_store(str(folder))
        withdraw(store, [sample.url])
        withdraw_samples(Catalog(store, "captions"), f"regions/{DETECTOR}", f"{number // 10:05d}")
        return sample.key


def tiny_sample(number: int) -> Sample:
    return make_sample(number, None, (64, 48), 3)


def digest(batch: Batch, row: int) -> int:
    """Hash what a sample became: its masked tokens, and its boxes and masked regions."""
    words, regions = batch.text_mask[row], batch.region_mask[row]
    found = batch.tokens[row][words], batch.boxes[row][regions], batch.region_masked[row][regions]
    return zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in found))
