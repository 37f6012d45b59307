"""`vlbert detect`: detect regions in every image shard that this detector has not processed yet.

Prints the device and its speed, a line per shard, and a summary of the stage at the end.
Any number of processes may run at once, on any machines: each claims the shard that it processes (storage/claims.py),
and waits if all remaining shards are claimed. A stopped run resumes when it is started again.
Exit status: 0 if no shard is left; 1 if the input, a setting or a right is wrong, or if most images have no regions, so
that running again does not help; 75 (EX_TEMPFAIL) if the storage is unreachable or full, so that it may help later.
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
from storage.withdrawn import WITHDRAWN

if TYPE_CHECKING:
    from detectors.faster_rcnn import FasterRCNNConfig

IMAGES = "images"
# Statuses of an image: the network's outputs are not finite; no region is found.
NOT_FINITE, NO_REGIONS = "not_finite", "no_regions"
# More statuses: the sample is unreadable; its regions are invalid; its row in a feature file is unusable.
BAD_SAMPLE, BAD_REGIONS, BAD_FEATURES = "bad_sample", "bad_regions", "bad_features"
NO_IMAGE = "no_image"  # status of the rows of a shard without any image
_FAULTS = (NOT_FINITE, BAD_REGIONS, BAD_FEATURES)  # errors of the detector, not of the image
# Samples that a detector gets at a time: enough to form batches of equal size, few enough to fit in memory.
_GROUP = 32
_SEED = 0  # seed of random weights
_RANDOM = {"random_init": True, "seed": _SEED}
# Exit status for "try again later" in sysexits.h.
STORAGE_UNREACHABLE = os.EX_TEMPFAIL


def stage_of(detector: Detector) -> str:
    """Return the name of the stage (a folder of the dataset) in which this detector's regions are stored."""
    return f"regions/{detector.id}"


def detect_shard(catalog: Catalog, shard: str, detector: Detector) -> bool:
    """Detect the regions of one image shard, and commit them as a new shard. Return False if another writer was first.

    The new shard has one row for each ok row of the image shard, with status ok or the reason why there are no regions.
    If the image shard has no ok row, all its rows are copied with status `no_image`, so that it counts as finished.
    """
    manifest = catalog.manifest(IMAGES, shard)
    before = catalog.revisions(stage_of(detector), shard)[-1:]
    if before and before[0].meta.get("source") == manifest.as_source():
        return False
    rows, samples = [], []
    for row, result in _detect_rows(catalog, manifest, detector):
        status, _, detail = (OK if isinstance(result, Sample) else result).partition(": ")
        rows.append(Row(row["row"], row["key"], status, detail, row["url"], row["license"]))
        if isinstance(result, Sample):
            samples.append(result)
    processed = [row for row in rows if row.status in (OK, NO_REGIONS, *_FAULTS)]
    if len(processed) > 1 and all(row.status in _FAULTS for row in processed):
        raise ValueError(
            f"shard {shard}: {processed[0].detail}, and the regions of all {len(processed)} images that were processed "
            "are unusable. Nothing was committed; check that the weight or feature file is the right one"
        )
    if not rows:
        rows = [
            Row(r["row"], r["key"], NO_IMAGE, r["status"], r["url"], r["license"]) for r in manifest.table.to_pylist()
        ]
    meta = {
        "source": manifest.as_source(),
        "config": detector.metadata,
        "config_hash": detector.id,
        "random_init": detector.metadata["random_init"],
    }
    return commit_shard(catalog, stage_of(detector), shard, samples, rows, meta, before[0] if before else None)


def _detect_rows(catalog: Catalog, manifest: Manifest, detector: Detector) -> Iterator[tuple[dict, Sample | str]]:
    """Yield each row with status `ok`, and its sample with regions or the reason why there are no regions."""
    rows = manifest.ok().to_pylist()
    samples = catalog.read_each(manifest)
    for start in range(0, len(rows), _GROUP):
        group = list(islice(samples, _GROUP))
        readable = [sample for sample in group if isinstance(sample, Sample)]
        results = dict(zip([sample.key for sample in readable], detector.detect(readable), strict=True))
        for row, sample in zip(rows[start : start + _GROUP], group, strict=True):
            if isinstance(sample, Sample):
                yield row, _add_regions(sample, results[sample.key])
            else:
                # Without the tar's path, so that the manifest does not depend on where the root is mounted.
                yield row, f"{BAD_SAMPLE}: {sample.__cause__}"


def _add_regions(sample: Sample, regions: Regions | str) -> Sample | str:
    """Return the sample with its regions, or the reason why it has no valid regions."""
    if isinstance(regions, str):
        return regions
    detected = dataclasses.replace(sample, regions=regions)
    try:
        check_sample(detected)
    except ValueError as error:
        return f"{BAD_REGIONS}: {error}"
    return detected


def detect_pending(catalog: Catalog, detector: Detector, say: Callable[[str], object] = print) -> int:
    """Detect regions in all pending shards, and return how many shards this process committed.

    Returns only when no shard is pending. `say` is called with a progress line after each shard of this process, and
    with a line when this process waits for other processes. A progress line shows the regions and the rows by status of
    this process, and the finished shards of all processes. The first line of a network shows its device and speed.
    """
    if not catalog.shards(IMAGES):
        folder = catalog.store.uri(f"{catalog.dataset}/{IMAGES}")
        raise ValueError(f"no shard is committed in {folder}; collect the images first, or check the dataset's name")
    stage, started = stage_of(detector), time.monotonic()
    update = partial(catalog.pending, IMAGES, stage)
    pending, committed, counts = update(), 0, Counter(regions=0)
    if pending and (describe := getattr(detector, "describe_speed", None)):
        first = catalog.read_each(catalog.manifest(IMAGES, pending[0]))
        say(describe([sample for sample in islice(first, _GROUP) if isinstance(sample, Sample)]))
    with Claims(catalog.store, catalog.path(stage, "")) as claims, closing(claims.each(pending, update, say)) as ours:
        for shard, left in ours:
            if detect_shard(catalog, shard, detector):
                committed += 1
                manifest = catalog.manifest(stage, shard)
                counts.update(manifest.statuses)
                counts["regions"] += pc.sum(manifest.table["num_regions"]).as_py() or 0
            seconds, done = time.monotonic() - started, len(pending) - left
            say(progress_line(catalog.dataset, done, len(pending), "shards", counts, seconds))
    return committed


def check_found(catalog: Catalog, stage: str, say: Callable[[str], object] = print) -> None:
    """Say how many images of a stage have no regions, with an example. Raises ValueError if they are the most."""
    counts = Counter({name: n for name, n in catalog.counts(stage).items() if name not in (NO_IMAGE, WITHDRAWN)})
    images, missing = counts.total(), counts.total() - counts[OK]
    if not missing:
        return
    status = next(name for name, _ in counts.most_common() if name != OK)
    tables = (table.filter(pc.field("status") == status) for table in catalog.columns(stage, ["status", "detail"]))
    detail = next(table["detail"][0].as_py() for table in tables if len(table))
    message = f"{catalog.dataset}: {missing:,} of {images:,} images have no regions, such as {status}: {detail}"
    if 2 * missing > images:
        raise ValueError(f"{message}; check that the detector's files and settings are for these images")
    say(message)


# --- command line -----------------------------------------------------------------------------------------------------


def make_detector(config: DetectionConfig) -> Detector:
    """Make the detector that `config` describes, and load its weights."""
    if config.backend == "imported":
        from detectors.imported import ImportedDetector

        return ImportedDetector(config.imported, config.keep_features)
    if config.annotations:  # backend annotated
        from detectors.annotated import AnnotatedDetector

        return AnnotatedDetector(Path(config.annotations))
    # Imported here, because torch and torchvision take seconds to import and the annotated backend needs neither.
    from detectors.detect import FasterRCNNDetector, network_class
    from detectors.weights.files import load_weights

    network = network_class(config.backend).random_init(_network_config(config), _SEED)
    weights = load_weights(network, Path(config.weights)) if config.weights else _RANDOM
    return FasterRCNNDetector(network, weights, config, config.backend)


def identify(config: DetectionConfig) -> str:
    """Return the id of the detector that make_detector would make, without building a network or loading weights."""
    if config.backend in ("annotated", "imported"):
        return make_detector(config).id
    from detectors.detect import describe_detector  # here, as above
    from detectors.weights.files import describe_weights

    network = _network_config(config)
    weights = describe_weights(Path(config.weights), network) if config.weights else _RANDOM
    return describe_detector(network, weights, config, config.backend)[0]


def _network_config(config: DetectionConfig) -> "FasterRCNNConfig":
    """Return the network settings of the preset or the weight file, with the overrides in `config.network` applied."""
    from detectors.faster_rcnn import PRESETS
    from detectors.weights.files import read_config

    network = PRESETS[config.preset] if config.preset else read_config(Path(config.weights or ""))
    return dataclasses.replace(network, **config.network_overrides)


def detect(root: Root, dataset: Dataset, config: Annotated[DetectionConfig, Flat]) -> None:
    """Detect regions in every image shard that this detector has not processed yet.

    The detector is a network, an annotation file, or another project's feature files:

        vlbert detect ROOT DATASET --weights FILE
        vlbert detect ROOT DATASET --backend annotated --annotations FILE
        vlbert detect ROOT DATASET --backend imported --imported.files FILE --keep_features

    Args:
        dataset: name of the dataset with the collected images
    """
    exit_at_sigterm()
    say = partial(print, flush=True)
    try:
        open_store(root, write=False)  # a missing root is an error: its images are somewhere else
        catalog = Catalog(open_store(root), dataset)
        detector = make_detector(config)
        if detector.metadata["random_init"]:
            print("the network has random weights, so its regions are meaningless", file=sys.stderr)
        detect_pending(catalog, detector, say)
        stage = stage_of(detector)
        rows = ", ".join(f"{count:,} {status}" for status, count in catalog.counts(stage).items())
    except StorageUnreachable as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1 if error.lasts else STORAGE_UNREACHABLE)
    say(f"{dataset}: {stage}, all rows: {rows}")
    check_found(catalog, stage, say)


main = Command("vlbert detect", detect)
