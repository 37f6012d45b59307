"""Detect regions in every image shard that has none yet from this detector: `vlbert detect`.

Prints a line per shard, and one about the whole stage at the end.
Any number of these may run at once, on any machines: each claims the shard that it is at work on (storage/claims.py).
One that finds no shard free waits for those of the others. A run that was stopped goes on where it was.
Exit status: 0 when no shard is left; 1 when the input or a setting is wrong, which running again does not change; 75
(EX_TEMPFAIL) when the storage is out of reach: run it again later.
"""

import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow.compute as pc

from detectors import Detector
from detectors.config import DetectionConfig
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.claims import Claims, exit_at_sigterm
from storage.manifests import OK, Manifest, Row
from storage.object_store import StorageUnreachable, open_store
from storage.programs import Command, Dataset, Flat, Root
from storage.progress import progress_line
from storage.sample import Regions, Sample, check_sample

if TYPE_CHECKING:
    from detectors.faster_rcnn import FasterRCNNConfig

IMAGES = "images"
# Status of an image for which the network's numbers overflow, and of one in which there is nothing.
NOT_FINITE, NO_REGIONS = "not_finite", "no_regions"
# Of one that cannot be read, of one whose regions no reader would take, and of one whose row of an imported file is
# unusable: faults of the detector, the last two.
BAD_SAMPLE, BAD_REGIONS, BAD_FEATURES = "bad_sample", "bad_regions", "bad_features"
_FAULTS = (NOT_FINITE, BAD_REGIONS, BAD_FEATURES)
# Samples handed to a detector at a time: enough to find batches of equal size, and few decoded images in memory.
_GROUP = 32
_SEED = 0  # of random weights
_RANDOM = {"random_init": True, "seed": _SEED}
# Exit status for "try again later", as sysexits.h has it.
STORAGE_UNREACHABLE = os.EX_TEMPFAIL


def stage_of(detector: Detector) -> str:
    """The stage that holds this detector's regions."""
    return f"regions/{detector.id}"


def detect_shard(catalog: Catalog, shard: str, detector: Detector) -> bool:
    """Detect one shard of `images` and commit it; False where another writer was first.

    The new shard has one row for each ok row of the old one, ok or saying why there are no regions. A shard without any
    ok row keeps all its rows, with status `no_image`, so that it is not taken for unfinished.
    """
    manifest = catalog.manifest(IMAGES, shard)
    before = catalog.revisions(stage_of(detector), shard)[-1:]
    if before and before[0].meta.get("source") == manifest.as_source():
        return False
    rows, samples = [], []
    for row, sample, found in _found(catalog, manifest, detector):
        if isinstance(found, Regions):
            sample = dataclasses.replace(sample, regions=found)
            try:
                check_sample(sample)
            except ValueError as error:
                found = f"{BAD_REGIONS}: {error}"
        if isinstance(found, Regions):
            rows.append(Row(row["row"], row["key"], OK, url=row["url"], license=row["license"]))
            samples.append(sample)
        else:
            status, _, detail = found.partition(": ")
            rows.append(Row(row["row"], row["key"], status, detail, row["url"], row["license"]))
    processed = [row for row in rows if row.status in (OK, NO_REGIONS, *_FAULTS)]
    if len(processed) > 1 and all(row.status in _FAULTS for row in processed):
        raise ValueError(
            f"shard {shard}: {processed[0].detail}, and so in all of the {len(processed)} images that the detector "
            "looked at: are these its weights, or is it the right file? Nothing was committed"
        )
    if not rows:
        rows = [
            Row(r["row"], r["key"], "no_image", r["status"], r["url"], r["license"]) for r in manifest.table.to_pylist()
        ]
    meta = {
        "source": manifest.as_source(),
        "config": detector.metadata,
        "config_hash": detector.id,
        "random_init": detector.metadata["random_init"],
    }
    return commit_shard(catalog, stage_of(detector), shard, samples, rows, meta, before[0] if before else None)


def _found(
    catalog: Catalog, manifest: Manifest, detector: Detector
) -> Iterator[tuple[dict, Sample | None, Regions | str]]:
    """Each ok row of the manifest, its sample and its regions; None and the reason where the sample is unreadable."""
    rows = manifest.ok().to_pylist()
    samples = catalog.read_each(manifest)
    for start in range(0, len(rows), _GROUP):
        group = list(islice(samples, _GROUP))
        good = [sample for sample in group if isinstance(sample, Sample)]
        found = dict(zip([sample.key for sample in good], detector.detect(good), strict=True))
        for row, sample in zip(rows[start : start + _GROUP], group, strict=True):
            if isinstance(sample, Sample):
                yield row, sample, found[sample.key]
            else:
                # Without the tar's path: a shard gives the same manifest wherever its root is mounted.
                yield row, None, f"{BAD_SAMPLE}: {sample.__cause__}"


def detect_pending(catalog: Catalog, detector: Detector, say: Callable[[str], object] = print) -> int:
    """Detect all shards that are pending, and return how many this process committed. It ends when none is pending.

    say: gets a line after each shard that was detected here, and lines about the shards of others that this process
    waits for. Images and regions in them are those that this process committed; shards are those of all.
    """
    if not catalog.shards(IMAGES):
        where = catalog.store.uri(f"{catalog.dataset}/{IMAGES}")
        raise ValueError(f"no shard is committed in {where}; collect the images first, or check the dataset's name")
    stage, started = stage_of(detector), time.monotonic()
    still = partial(catalog.pending, IMAGES, stage)
    pending, committed, counts = still(), 0, Counter(images=0, regions=0)
    with Claims(catalog.store, catalog.path(stage, "")) as claims, closing(claims.each(pending, still, say)) as ours:
        for shard, left in ours:
            if detect_shard(catalog, shard, detector):
                committed += 1
                counts["images"] += catalog.manifest(IMAGES, shard).ok_rows
                counts["regions"] += pc.sum(catalog.manifest(stage, shard).table["num_regions"]).as_py() or 0
            seconds, done = time.monotonic() - started, len(pending) - left
            say(progress_line(catalog.dataset, done, len(pending), "shards", counts, seconds))
    return committed


# --- command line -----------------------------------------------------------------------------------------------------


def make_detector(config: DetectionConfig) -> Detector:
    """Return the detector of this config, its weights loaded."""
    if config.backend == "imported":
        from detectors.imported import ImportedDetector

        return ImportedDetector(config.imported, config.keep_features)
    if config.backend == "annotated":
        from detectors.annotated import AnnotatedDetector

        return AnnotatedDetector(Path(config.annotations))
    # Here, because torch and torchvision take seconds to import and the annotated backend needs neither.
    from detectors.detect import FasterRCNNDetector, network_class
    from detectors.weights.files import load_weights

    network = network_class(config.backend).random_init(_network(config), _SEED)
    weights = _RANDOM if config.random_init else load_weights(network, Path(config.weights))
    return FasterRCNNDetector(network, weights, config, config.backend)


def identify(config: DetectionConfig) -> str:
    """Return the id of that detector. No network is made for it: of weights, the file is hashed and its header read."""
    if config.backend in ("annotated", "imported"):
        return make_detector(config).id
    from detectors.detect import describe_detector  # here, as above
    from detectors.weights.files import describe_weights

    network = _network(config)
    weights = _RANDOM if config.random_init else describe_weights(Path(config.weights), network)
    return describe_detector(network, weights, config, config.backend)[0]


def _network(config: DetectionConfig) -> "FasterRCNNConfig":
    """Which network: the preset's or that of the weight file, with the overrides."""
    from detectors.faster_rcnn import PRESETS
    from detectors.weights.files import read_config

    network = PRESETS[config.preset] if config.preset else read_config(Path(config.weights))
    return dataclasses.replace(network, **config.network_overrides)


def detect(
    root: Root,
    dataset: Dataset,
    config: Annotated[DetectionConfig, Flat],
) -> None:
    """Detect regions in every image shard that has none yet from this detector.

    It is a network, a file of annotations, or files of features that others have computed:

        vlbert detect ROOT DATASET --weights FILE
        vlbert detect ROOT DATASET --backend annotated --annotations FILE
        vlbert detect ROOT DATASET --backend imported --imported.files FILE --keep_features

    Args:
        dataset: the images, as they were collected
    """
    exit_at_sigterm()
    say = partial(print, flush=True)
    try:
        catalog = Catalog(open_store(root), dataset)
        detector = make_detector(config)
        if detector.metadata["random_init"]:
            print("the network has random weights: its regions mean nothing", file=sys.stderr)
        detect_pending(catalog, detector, say)
        stage = stage_of(detector)
        rows = ", ".join(f"{count:,} {status}" for status, count in catalog.counts(stage).items())
    except StorageUnreachable as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(STORAGE_UNREACHABLE)
    say(f"{dataset}: {stage}, all rows: {rows}")


main = Command("vlbert detect", detect)
