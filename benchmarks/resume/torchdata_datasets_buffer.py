"""As torchdata_datasets, with a shuffle buffer of 100 samples."""

from benchmarks.resume import torchdata_datasets


class Loader(torchdata_datasets.Loader):
    buffer = 100
    promises = {}
