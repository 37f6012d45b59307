"""Committed samples, read by number."""

from tiny import DETECTOR

from storage.cache import ShardCache
from storage.catalog import Catalog
from storage.object_store import ObjectStore
from storage.reading import ShardSamples
from storage.sample import Sample

COUNT = 40  # samples, 16 a shard
STAGE = f"regions/{DETECTOR}"


def samples_of(store: ObjectStore, **settings: ShardCache | float) -> ShardSamples:
    catalog = Catalog(store, "captions")
    return ShardSamples(store, catalog.pinned(STAGE, catalog.pin(STAGE).id), **settings)


def identity(sample: Sample | ValueError) -> tuple:
    assert isinstance(sample, Sample), sample
    regions = sample.regions.boxes.tobytes(), sample.regions.class_probs.tobytes()
    return sample.key, sample.image, sample.caption, *regions
