"""Open one snapshot of a dataset for a run. Each sample has the regions that one detector found in its image."""

import functools
import os

import numpy as np

from storage.cache import ShardCache
from storage.catalog import Catalog
from storage.collect.rows import Reading
from storage.object_store import ObjectStore, StorageUnreachable
from storage.order import mix, shuffled
from storage.reading import Samples, ShardSamples
from storage.sample import Sample
from storage.snapshots import Snapshot, read_columns
from training.distributed import World, broadcast
from vlbert.config import DataConfig

SAMPLING = 3  # stream of random numbers, in addition to those of vlbert/data/order.py
MAX_UNREADABLE = 100  # if this many samples in a row cannot be read, the storage is broken

_SAMPLES_AT_ONCE = 256  # samples that `load_captions` reads at once


def region_stage(store: ObjectStore, dataset: str, detector: str | None) -> str:
    """Return the name of the stage with the regions of `detector` (None: the dataset's only detector).

    Raises ValueError if the dataset has no regions of the detector, or if it has several detectors and none is named.
    """
    prefix = f"{dataset}/regions/"
    uri = store.uri(f"{dataset}/regions")
    detectors = {info.path.removeprefix(prefix).split("/")[0] for info in store.list(prefix) if "/" in info.path}
    if detector is None and len(detectors) == 1:
        return f"regions/{detectors.pop()}"
    if detector in detectors:
        return f"regions/{detector}"
    if not detectors:
        raise ValueError(f"{uri} has no region shards; run the detection stage first")
    problem = "several detectors, set data.detector to one of" if detector is None else f"no detector {detector}, only"
    raise ValueError(f"{uri} has {problem} {', '.join(sorted(detectors))}")


def open_cache(store: ObjectStore, config: DataConfig) -> ShardCache | None:
    """Open this machine's shard cache, or return None if `config.cache` is None. The first process fills the cache."""
    if config.cache is None:
        return None
    cache = ShardCache(store, config.cache, int(config.cache_gb * 1e9))
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        cache.fill_in_background()
    return cache


def open_samples(
    store: ObjectStore,
    dataset: str,
    detector: str | None,
    pinned: dict | None,
    world: World,
    cache: ShardCache | None = None,
) -> tuple[ShardSamples, dict]:
    """Open a dataset. Return its samples, and a record of their snapshot to save in checkpoints.

    For a new run, `pinned` is None, and the samples are all that are committed now. For a resumed run, `pinned` is the
    record in its checkpoint, and the snapshot is the same. Rank 0 pins the snapshot for all ranks, because a detector
    may commit another shard at the same time.
    """
    catalog = Catalog(store, dataset)
    if pinned is None:
        if world.first:
            stage = region_stage(store, dataset, detector)
            snapshot = catalog.pin(stage)
            if not snapshot.ok_rows:
                uri = store.uri(f"{dataset}/{stage}")
                raise ValueError(f"{uri} has no samples; its manifests say what failed and why")
            pinned = {
                "dataset": dataset,
                "stage": stage,
                "random_init": bool(snapshot.random_init),
                "snapshot": snapshot.id,
            }
        pinned = broadcast(pinned, world)
    return ShardSamples(store, catalog.pinned(pinned["stage"], pinned["snapshot"]), cache), pinned


def pin_newer_snapshot(store: ObjectStore, dataset: str, before: Snapshot) -> str | None:
    """Pin the committed shards as a snapshot and return its id, or None if nothing is new since `before`.

    Also returns None if a shard of `before` is missing, which happens while a stage is being rebuilt.
    """
    catalog, shards = Catalog(store, dataset), set(before.shards)
    newest = catalog.newest(before.stage)
    if not shards <= newest.keys() or set(newest.values()) == set(before.manifests):
        return None
    snapshot = catalog.pin(before.stage)
    return snapshot.id if shards <= set(snapshot.shards) and snapshot.id != before.id else None


def sample_indices(n: int, *seeds: int) -> list[int]:
    """Return up to MAX_UNREADABLE distinct random indices below n."""
    # Neighbouring samples may be in the same damaged tar, random ones rarely are.
    return shuffled(np.arange(min(n, MAX_UNREADABLE)), mix(*seeds), SAMPLING, 0, n).tolist()


def find_readable(samples: Samples) -> Sample:
    """Return any readable sample. Raises ValueError if none is found in MAX_UNREADABLE attempts."""
    tried = sample_indices(len(samples))
    for number in tried:
        try:
            return samples.sample(number)
        except ValueError as error:
            last = error
    raise ValueError(f"none of {len(tried)} samples chosen at random can be read, the last because {last}") from last


def row_in_list(samples: Samples, number: int) -> str:
    """Return the place of a sample's caption in its list, or its dataset and row, or its URL if that is not known.

    If the storage is unreachable, its number in the snapshot is returned: a run does not end for want of a message.
    """
    if not isinstance(samples, ShardSamples):
        return samples.urls[number]
    try:
        rows, reading, origin = _input_rows(samples.index.store, samples.index.path)
    except StorageUnreachable:
        return f"sample {number} of {samples.index.path}"
    return reading.location(origin, int(rows[number]))


@functools.lru_cache(16)
def _input_rows(store: ObjectStore, path: str) -> tuple[np.ndarray, Reading, str]:
    """Return the number of each sample's row in its list, int32 [S], and how the list was read, and its name."""
    rows = [table["row"].to_numpy().astype(np.int32) for table in read_columns(store, path, ["row"])]
    dataset = path.partition("/")[0]
    catalog = Catalog(store, dataset)
    headers = catalog.headers("images", catalog.shards("images")[:1])
    source = next((header.meta.get("source") for header in headers.values()), None) or {}
    reading = Reading(**source.get("reading", {"form": ""}))
    return np.concatenate(rows), reading, source.get("list", dataset).rpartition(" sha256:")[0] or dataset


def load_captions(samples: Samples) -> list[str]:
    """Return the captions of all readable samples. Raises ValueError if most samples are unreadable."""
    captions, last = [], None
    for start in range(0, len(samples), _SAMPLES_AT_ONCE):
        for sample in samples.samples(range(start, min(start + _SAMPLES_AT_ONCE, len(samples)))):
            if isinstance(sample, ValueError):
                last = sample
            else:
                captions.append(sample.caption)
    if 2 * len(captions) < len(samples):
        missing = len(samples) - len(captions)
        raise ValueError(f"{missing} of {len(samples)} samples cannot be read, the last because {last}")
    return captions
