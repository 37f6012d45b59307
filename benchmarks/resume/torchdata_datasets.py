"""datasets: https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.resume import machine


class Loader(machine.Loader):
    def open(self, folder, rank, world, workers):
        files = sorted(map(str, folder.glob("*.parquet")))
        data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        data = split_dataset_by_node(data.shuffle(0, buffer_size=1), rank, world)  # a larger buffer is lost
        return StatefulDataLoader(data, machine.BATCH // world, num_workers=workers)

    @staticmethod
    def write(folder, shard, texts):
        pq.write_table(pa.table({"text": texts}), folder / f"{shard:05d}.parquet")
