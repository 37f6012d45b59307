"""litdata's StreamingDataLoader: https://github.com/Lightning-AI/litData#pause-resume."""

import litdata

from benchmarks.resume import machine


class Loader(machine.Loader):
    def open(self, folder, rank, world, workers):
        data = litdata.StreamingDataset(str(folder), shuffle=True)
        return litdata.StreamingDataLoader(data, batch_size=machine.BATCH // world, num_workers=workers, drop_last=True)

    @staticmethod
    def write(folder, shard, texts):
        litdata.optimize(str, texts, str(folder), chunk_size=6, mode="append" if shard else None, start_method="fork")
