"""Committed samples, and a store that counts what is read of it."""

from tiny import DETECTOR

from storage.cache import ShardCache
from storage.catalog import Catalog
from storage.object_store import ObjectStore
from storage.reading import ShardSamples
from storage.sample import Sample

COUNT = 40  # samples, 16 a shard


STAGE = f"regions/{DETECTOR}"


class Counted:
    """Real objects, whose range requests for tars are written down."""

    def __init__(self, store: ObjectStore):
        self._store, self.ranges = store, []

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        if path.endswith(".tar"):
            self.ranges.append((path, offset, length))
        return self._store.get_range(path, offset, length)


def samples_of(store: ObjectStore, **settings: ShardCache | float) -> ShardSamples:
    catalog = Catalog(store, "captions")
    return ShardSamples(store, catalog.pinned(STAGE, catalog.pin(STAGE).id), **settings)


def identity(sample: Sample | ValueError) -> tuple:
    assert isinstance(sample, Sample), sample
    return (
        sample.key,
        sample.image,
        sample.caption,
        sample.regions.boxes.tobytes(),
        sample.regions.class_probs.tobytes(),
    )
