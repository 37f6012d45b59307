"""streaming: https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training/fast_resumption.html."""

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory, merge_index

from benchmarks.resume import machine


class Loader(machine.Loader):
    def open(self, folder, rank, world, workers):
        clean_stale_shared_memory()  # of killed processes
        size = machine.BATCH // world
        data = StreamingDataset(local=str(folder), shuffle=True, batch_size=size, num_canonical_nodes=1)
        return StreamingDataLoader(data, batch_size=size, num_workers=workers)

    @staticmethod
    def write(folder, shard, texts):
        with MDSWriter(out=f"{folder}/{shard:05d}", columns={"text": "str"}) as writer:
            for text in texts:
                writer.write({"text": text})
        (folder / "index.json").unlink(missing_ok=True)
        merge_index(str(folder))
