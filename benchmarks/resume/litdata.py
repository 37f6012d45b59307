"""litdata's StreamingDataLoader over a StreamingDataset."""

import litdata
import torch.distributed

from benchmarks.resume import machine


class Loader(machine.Loader):
    requires = ("litdata==0.2.76",)
    docs = "https://github.com/Lightning-AI/litData#pause-resume"
    promises = {"nothing": "exact", "workers": "complete", "ranks": "complete"}

    def __init__(self, folder, rank, world, workers, states):
        if world > 1:
            torch.distributed.init_process_group("gloo")
        data = litdata.StreamingDataset(str(folder), shuffle=True)
        self.loader = litdata.StreamingDataLoader(data, batch_size=machine.BATCH // world, num_workers=workers)
        if states:
            self.loader.load_state_dict(states[0])
        self.batches = machine.forever(self.loader)

    def save(self):
        return self.loader.state_dict()

    @staticmethod
    def write(folder, shards):
        numbers, mode = [number for some in shards.values() for number in some], None if 0 in shards else "append"
        litdata.optimize("{:06d}".format, numbers, str(folder), chunk_size=12, mode=mode, start_method="fork")
