"""Megatron-Energon: https://nvidia.github.io/Megatron-Energon/basic/save_restore.html, with a state for each rank."""

import subprocess
import sys

import webdataset
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

from benchmarks.resume import machine


class Loader(machine.Loader):
    shards, per_shard = 3, 24  # which all ranks and workers share

    def __init__(self, folder, rank, world, workers, states):
        shared = {"shuffle_buffer_size": 12, "max_samples_per_sequence": 12, "batch_size": machine.BATCH // world}
        config = WorkerConfig(rank=rank, world_size=world, num_workers=workers)
        self.loader = get_savable_loader(get_train_dataset(folder, worker_config=config, **shared))
        if states:
            self.loader.restore_state_rank(states[rank])
        self.batches = (batch.text for batch in self.loader)

    def save(self):
        return self.loader.save_state_rank()

    @staticmethod
    def write(folder, shard, texts):
        with webdataset.TarWriter(f"{folder}/{shard:05d}.tar") as tar:
            for text in texts:
                tar.write({"__key__": text, "txt": text})
        command = [f"{sys.prefix}/bin/energon", "prepare", "--non-interactive", "--force-overwrite"]
        command += ["--sample-type", "TextSample", "--field-map", '{"text": "txt"}', "--split-ratio", "1,0,0"]
        subprocess.run([*command, str(folder)], check=True, capture_output=True)
