"""This project: a run as vlbert.train starts and resumes it, without the steps of its model."""

from benchmarks.resume import machine
from benchmarks.synthetic import commit_samples, make_sample
from training.distributed import start
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.evaluation.withdraw import withdraw_images
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.train import prepare


class Loader(machine.Loader):
    shards, per_shard = 3, 10  # an epoch ends in the middle of a step

    def __init__(self, folder, rank, world, workers, states):
        data = DataConfig(str(folder), batch=12, gradient_accumulation=2, workers=workers, new_shards_every=1)
        model = ModelConfig("J", 8, 1, 8, geometry_channels=8, regions=RegionConfig(features="precomputed"))
        self.run = prepare(Recipe(name="resume", task=PretrainingSettings(), model=model, data=data), start(), print)
        self.batches = self.run.batches()

    def take(self):
        self.run.step, parts = self.run.step + 1, next(self.batches)  # a row becomes the sum of its ids; [PAD] is 0
        return [f"{key}:{ids}" for part in parts for key, ids in zip(part.keys, part.tokens.sum(1), strict=True)]

    def save(self):
        if self.run.world.first:
            self.run.save(self.run.step, {}, {})
            self.run.writer.finish()
        return self.run.data.datasets[0].spans

    @staticmethod
    def write(folder, shard, texts):
        samples = [make_sample(int(text), 2048, (64, 48), 3) for text in texts]
        commit_samples(str(folder), "captions", samples, 10 * shard, shard)

    @staticmethod
    def withdraw(folder, number):
        sample = make_sample(number, 2048, (64, 48), 3)
        withdraw_images(str(folder), (sample.url,))
        return sample.key
