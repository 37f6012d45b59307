"""mosaicml-streaming's StreamingDataLoader over a StreamingDataset."""

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory, merge_index

from benchmarks.resume import machine


class Loader(machine.Loader):
    requires = ("mosaicml-streaming==0.13.0",)
    docs = "https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training/fast_resumption.html"
    promises = {"nothing": "exact", "workers": "exact", "ranks": "exact"}
    clean = staticmethod(clean_stale_shared_memory)

    def __init__(self, folder, rank, world, workers, states):
        size = machine.BATCH // world
        data = StreamingDataset(local=str(folder), shuffle=True, batch_size=size, num_canonical_nodes=1)
        self.loader = StreamingDataLoader(data, batch_size=size, num_workers=workers)
        if states:
            self.loader.load_state_dict(states[0])
        self.batches = (batch["text"] for batch in machine.forever(self.loader))

    def save(self):
        return self.loader.state_dict()

    @staticmethod
    def write(folder, shards):
        for shard, numbers in shards.items():
            with MDSWriter(out=f"{folder}/{shard:05d}", columns={"text": "str"}) as writer:
                for number in numbers:
                    writer.write({"text": f"{number:06d}"})
        merge_index(str(folder))
