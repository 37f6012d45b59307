"""mosaicml-streaming's StreamingDataLoader over a StreamingDataset."""

import torch.distributed
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory, merge_index

from benchmarks.resume import machine


class Loader(machine.Loader):
    requires = ("mosaicml-streaming==0.13.0",)
    docs = "https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training/fast_resumption.html"
    promises = {"nothing": "exact", "workers": "exact", "ranks": "exact"}

    def open(self, folder, rank, world, workers):
        if world > 1:
            torch.distributed.init_process_group("gloo")
        clean_stale_shared_memory()  # of killed processes
        sizes = {"batch_size": machine.BATCH // world, "num_canonical_nodes": 1}
        data = StreamingDataset(local=str(folder), shuffle=True, **sizes)
        return StreamingDataLoader(data, batch_size=machine.BATCH // world, num_workers=workers)

    @classmethod
    def write(cls, folder, shards):
        for shard in shards:
            with MDSWriter(out=f"{folder}/{shard:05d}", columns={"text": "str"}) as writer:
                for text in cls.texts(shard):
                    writer.write({"text": text})
        (folder / "index.json").unlink(missing_ok=True)
        merge_index(str(folder))
