"""torchdata's StatefulDataLoader over webdataset, which has no state: batches are read again and skipped."""

import webdataset
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.resume import machine


class Loader(machine.Loader):
    requires = ("torchdata==0.11.0", "webdataset==1.0.2")
    docs = "https://docs.pytorch.org/data/0.11/torchdata.stateful_dataloader.html"
    promises = {"nothing": "exact"}

    def open(self, folder, rank, world, workers):
        tars, split = sorted(map(str, folder.glob("*.tar"))), webdataset.split_by_node
        data = webdataset.WebDataset(tars, shardshuffle=100, detshuffle=True, seed=0, nodesplitter=split)
        data = data.map(lambda sample: sample["txt"].decode())
        return StatefulDataLoader(data, machine.BATCH // world, num_workers=workers)

    @classmethod
    def write(cls, folder, shards):
        folder.mkdir(exist_ok=True)
        for shard in shards:
            with webdataset.TarWriter(f"{folder}/{shard:05d}.tar") as tar:
                for text in cls.texts(shard):
                    tar.write({"__key__": text, "txt": text})
