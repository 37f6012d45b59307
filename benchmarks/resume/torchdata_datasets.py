"""torchdata's StatefulDataLoader over a streaming dataset of Hugging Face's datasets, whose shards are shuffled."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.resume import machine


class Loader(machine.Loader):
    requires = ("torchdata==0.11.0", "datasets==5.2.0")
    docs = "https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration"
    promises = {"nothing": "exact"}
    buffer = 1  # samples that are shuffled; the documentation says that those of a larger buffer are lost

    def __init__(self, folder, rank, world, workers, states):
        files = sorted(map(str, folder.glob("*.parquet")))
        data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        self.data = split_dataset_by_node(data.shuffle(0, buffer_size=self.buffer), rank, world)
        self.loader = StatefulDataLoader(self.data, machine.BATCH // world, num_workers=workers)
        self.epoch, state = states[rank] if states else (0, None)
        self.data.set_epoch(self.epoch)
        if state:
            self.loader.load_state_dict(state)
        self.batches = self.epochs()

    def epochs(self):
        while True:
            yield from (batch["text"] for batch in self.loader)
            self.epoch += 1
            self.data.set_epoch(self.epoch)

    def save(self):
        return self.epoch, self.loader.state_dict()

    @staticmethod
    def write(folder, shards):
        folder.mkdir(exist_ok=True)
        for shard, numbers in shards.items():
            pq.write_table(pa.table({"text": [f"{n:06d}" for n in numbers]}), folder / f"{shard:05d}.parquet")
