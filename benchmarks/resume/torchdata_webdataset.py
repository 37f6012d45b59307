"""torchdata's StatefulDataLoader over webdataset, which has no state: batches are read again and skipped."""

import webdataset
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.resume import machine


class Loader(machine.Loader):
    requires = ("torchdata==0.11.0", "webdataset==1.0.2")
    docs = "https://docs.pytorch.org/data/0.11/torchdata.stateful_dataloader.html"
    promises = {"nothing": "exact"}
    write = staticmethod(machine.write_tars)

    def __init__(self, folder, rank, world, workers, states):
        tars, split = sorted(map(str, folder.glob("*.tar"))), webdataset.split_by_node
        data = webdataset.WebDataset(tars, shardshuffle=100, detshuffle=True, seed=0, nodesplitter=split)
        data = data.map(lambda sample: sample["txt"].decode())
        self.loader = StatefulDataLoader(data, machine.BATCH // world, num_workers=workers)
        if states:
            self.loader.load_state_dict(states[rank])
        self.batches = machine.forever(self.loader)

    def save(self):
        return self.loader.state_dict()
