"""webdataset: https://docs.pytorch.org/data/0.11/torchdata.stateful_dataloader.html, which reads batches again."""

import webdataset
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.resume import machine


class Loader(machine.Loader):
    def open(self, folder, rank, world, workers):
        tars, split = sorted(map(str, folder.glob("*.tar"))), webdataset.split_by_node
        data = webdataset.WebDataset(tars, shardshuffle=100, detshuffle=True, seed=0, nodesplitter=split)
        data = data.map(lambda sample: sample["txt"].decode())
        return StatefulDataLoader(data, machine.BATCH // world, num_workers=workers)

    @staticmethod
    def write(folder, shard, texts):
        with webdataset.TarWriter(f"{folder}/{shard:05d}.tar") as tar:
            for text in texts:
                tar.write({"__key__": text, "txt": text})
