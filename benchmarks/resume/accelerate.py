"""accelerate: https://huggingface.co/docs/accelerate/usage_guides/checkpoint, skip_first_batches."""

from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader

from benchmarks.resume import machine


class Loader(machine.Loader):
    def __init__(self, folder, rank, world, workers, states):
        texts = [line for file in sorted(folder.glob("*.txt")) for line in file.read_text().split()]
        loader = DataLoader(texts, machine.BATCH // world, shuffle=True, num_workers=workers)  # ty: ignore
        shared = {"num_processes": world, "process_index": rank}
        self.loader = prepare_data_loader(loader, **shared, use_seedable_sampler=True, data_seed=0)
        self.epoch, self.step = states[0] if states else (0, 0)
        self.batches = self.epochs()

    def epochs(self):
        while True:
            self.loader.set_epoch(self.epoch)
            for batch in skip_first_batches(self.loader, self.step) if self.step else self.loader:
                self.step += 1
                yield batch
            self.epoch, self.step = self.epoch + 1, 0

    def save(self):
        return self.epoch, self.step

    @staticmethod
    def write(folder, shard, texts):
        (folder / f"{shard:05d}.txt").write_text("\n".join(texts))
