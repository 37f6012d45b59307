"""This project: a run as vlbert.train starts and resumes it, without the steps of its model."""

from benchmarks.resume import machine
from benchmarks.synthetic import commit_samples, make_sample
from training.distributed import start
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.evaluation.withdraw import withdraw_images
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.train import prepare


class Loader(machine.Loader):
    shards, per_shard = 1, 13  # epochs end in the middle of steps

    def __init__(self, folder, rank, world, workers, states):
        data = DataConfig(str(folder), batch=12, gradient_accumulation=2, workers=workers, new_shards_every=1)
        model = ModelConfig("J", 8, 1, 8, geometry_channels=8, regions=RegionConfig(features="precomputed"))
        self.loader = prepare(Recipe(name="ours", task=PretrainingSettings(), model=model, data=data), start(), print)
        self.batches, self.folder = self.loader.batches(), folder  # ty: ignore

    def take(self):
        self.loader.step, parts = self.loader.step + 1, next(self.batches)  # rows as sums of their ids; [PAD] is 0
        return [f"{key}:{ids}" for part in parts for key, ids in zip(part.keys, part.tokens.sum(1), strict=True)]

    def save(self):
        if not self.loader.world.first:
            return ""
        self.loader.save(self.loader.step, {}, {})
        self.loader.writer.finish()
        return (self.folder / f"runs/ours/step-{self.loader.step:07d}/state.json").read_text()

    @staticmethod
    def write(folder, shard, texts):
        samples = [make_sample(int(text), 2048, (64, 48), 3) for text in texts]
        commit_samples(str(folder), "captions", samples, int(texts[0]), shard)

    @staticmethod
    def withdraw(folder, number):
        withdraw_images(str(folder), ((sample := make_sample(number, 2048, (64, 48), 3)).url,))
        return sample.key
