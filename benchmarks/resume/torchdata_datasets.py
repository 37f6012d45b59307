"""torchdata's StatefulDataLoader over a streaming dataset of Hugging Face's datasets.

Shards are shuffled. There is no shuffle buffer, because the documentation says that its samples are lost.
"""

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

    def open(self, folder, rank, world, workers):
        files = sorted(map(str, folder.glob("*.parquet")))
        data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        data = split_dataset_by_node(data.shuffle(0, buffer_size=1), rank, world)
        return StatefulDataLoader(data, machine.BATCH // world, num_workers=workers)

    @classmethod
    def write(cls, folder, shards):
        folder.mkdir(exist_ok=True)
        for shard in shards:
            pq.write_table(pa.table({"text": cls.texts(shard)}), folder / f"{shard:05d}.parquet")
