"""The samples that a run reads: those of a snapshot of one stage, by number."""

import os

import numpy as np

from storage.cache import ShardCache
from storage.catalog import Catalog
from storage.object_store import ObjectStore
from storage.order import mix, shuffled
from storage.reading import Samples, ShardSamples
from storage.sample import Sample
from storage.snapshots import Snapshot
from training.distributed import World, broadcast
from vlbert.config import DataConfig

ANYWHERE = 3  # stream of randomness, beside those of vlbert/data/loading.py
MOST_UNREADABLE = 100  # where so many samples in a row cannot be read, the storage is at fault

_TOGETHER = 256  # samples that are read at a time, where all are read


def region_stage(store: ObjectStore, dataset: str, detector: str | None) -> str:
    """The stage with the regions of `detector`, or of the only detector there is. ValueError lists what there is."""
    prefix = f"{dataset}/regions/"
    where = store.uri(f"{dataset}/regions")
    found = {info.path.removeprefix(prefix).split("/")[0] for info in store.list(prefix) if "/" in info.path}
    if detector is None and len(found) == 1:
        return f"regions/{found.pop()}"
    if detector in found:
        return f"regions/{detector}"
    if not found:
        raise ValueError(f"{where} holds no region shards; run the detection stage first")
    wanted = "several detectors, set data.detector to one of" if detector is None else f"no detector {detector}, only"
    raise ValueError(f"{where} holds {wanted} {', '.join(sorted(found))}")


def open_cache(store: ObjectStore, config: DataConfig) -> ShardCache | None:
    """The folder for whole tars that the processes of this machine share, and the first of them fills; None: none."""
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
    """(samples, what a checkpoint pins): all that is committed now or, resuming, exactly the snapshot of `pinned`.

    Rank 0 looks for all ranks: a detector may commit another shard meanwhile.
    """
    catalog = Catalog(store, dataset)
    if pinned is None:
        found = None
        if world.first:
            stage = region_stage(store, dataset, detector)
            snapshot = catalog.pin(stage)
            if not snapshot.ok_rows:
                where = store.uri(f"{dataset}/{stage}")
                raise ValueError(f"{where} holds no sample; its manifests say what failed and why")
            found = {
                "dataset": dataset,
                "stage": stage,
                "random_init": bool(snapshot.random_init),
                "snapshot": snapshot.id,
            }
        pinned = broadcast(found, world)
    return ShardSamples(store, catalog.pinned(pinned["stage"], pinned["snapshot"]), cache), pinned


def newer_snapshot(store: ObjectStore, dataset: str, before: Snapshot) -> str | None:
    """Pin what is committed now and return the snapshot's id; None where no shard is new or in a newer revision.

    None too where a shard of before is missing, as while a stage is made again.
    """
    catalog, shards = Catalog(store, dataset), set(before.shards)
    now = catalog.newest(before.stage)
    if not shards <= now.keys() or set(now.values()) == set(before.manifests):
        return None
    found = catalog.pin(before.stage)
    return found.id if shards <= set(found.shards) and found.id != before.id else None


def sample_indices(n: int, *where: int) -> list[int]:
    """Up to MOST_UNREADABLE of n numbers, from all over: neighbours lie in one tar, which may be damaged."""
    return shuffled(np.arange(min(n, MOST_UNREADABLE)), mix(*where), ANYWHERE, 0, n).tolist()


def any_readable(samples: Samples) -> Sample:
    """A sample that can be read; ValueError where none is found."""
    tried = sample_indices(len(samples))
    for number in tried:
        try:
            return samples.sample(number)
        except ValueError as error:
            last = error
    raise ValueError(f"none of {len(tried)} samples from anywhere can be read, the last because {last}") from last


def captions(samples: Samples) -> list[str]:
    """The captions of all samples that can be read; ValueError where most cannot."""
    found, last = [], None
    for start in range(0, len(samples), _TOGETHER):
        for sample in samples.samples(range(start, min(start + _TOGETHER, len(samples)))):
            if isinstance(sample, ValueError):
                last = sample
            else:
                found.append(sample.caption)
    if 2 * len(found) < len(samples):
        missing = len(samples) - len(found)
        raise ValueError(f"{missing} of {len(samples)} samples cannot be read, the last because {last}")
    return found
