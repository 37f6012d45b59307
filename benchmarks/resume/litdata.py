"""litdata's StreamingDataLoader over a StreamingDataset."""

import litdata
import torch.distributed

from benchmarks.resume import machine


class Loader(machine.Loader):
    requires = ("litdata==0.2.76",)
    docs = "https://github.com/Lightning-AI/litData#pause-resume"
    promises = {"nothing": "exact", "workers": "complete", "ranks": "complete"}

    def open(self, folder, rank, world, workers):
        if world > 1:
            torch.distributed.init_process_group("gloo")
        data = litdata.StreamingDataset(str(folder), shuffle=True)
        return litdata.StreamingDataLoader(data, batch_size=machine.BATCH // world, num_workers=workers, drop_last=True)

    @classmethod
    def write(cls, folder, shards):
        texts, mode = [text for shard in shards for text in cls.texts(shard)], None if 0 in shards else "append"
        litdata.optimize(str, texts, str(folder), chunk_size=12, mode=mode, start_method="fork")
