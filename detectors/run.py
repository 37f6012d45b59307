"""Detect regions in every image shard that has none yet from this detector.

    python -m detectors.run ROOT DATASET --backend annotated --annotations FILE
    python -m detectors.run ROOT DATASET --backend faster_rcnn --weights FILE

ROOT is a local folder or s3://bucket/prefix. Prints a line per shard, and one about the whole stage at the end; each is
a JSON object with --json.
Any number of these may run at once: each takes the shards in an order of its own and passes over those that another has
done since. A run that was stopped goes on where it was.
Exit status: 0 when no shard is left; 1 when the input or a setting is wrong, which running again does not change; 75
(EX_TEMPFAIL) when the storage is out of reach: run it again later.
"""

import argparse
import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from detectors import Detector
from storage.catalog import OK, Catalog, Manifest, Row
from storage.object_store import StorageUnreachable, open_store
from storage.progress import progress_line
from storage.sample import Regions, Sample, check_sample

if TYPE_CHECKING:
    from detectors.detect import DetectorSettings
    from detectors.faster_rcnn import FasterRCNNConfig

IMAGES = "images"
# Status of an image for which the network's numbers overflow, and of one in which there is nothing.
NOT_FINITE, NO_REGIONS = "not_finite", "no_regions"
# Of one that cannot be read, and of one whose regions no reader would take: a fault of the detector.
BAD_SAMPLE, BAD_REGIONS = "bad_sample", "bad_regions"
# Samples handed to a detector at a time: enough to find batches of equal size, and few decoded images in memory.
_GROUP = 32
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
            rows.append(Row(row["row"], row["key"], OK, url=row["url"]))
            samples.append(sample)
        else:
            status, _, detail = found.partition(": ")
            rows.append(Row(row["row"], row["key"], status, detail, row["url"]))
    judged = [row for row in rows if row.status in (OK, NO_REGIONS, NOT_FINITE, BAD_REGIONS)]
    if len(judged) > 1 and all(row.status in (NOT_FINITE, BAD_REGIONS) for row in judged):
        raise ValueError(
            f"shard {shard}: {judged[0].detail}, and so in all of the {len(judged)} images that the network saw: are "
            "these its weights? Nothing was committed"
        )
    if not rows:
        rows = [Row(r["row"], r["key"], "no_image", r["status"], r["url"]) for r in manifest.table.to_pylist()]
    meta = {
        "source": manifest.as_source(),
        "config": detector.metadata,
        "config_hash": detector.id,
        "random_init": detector.metadata["random_init"],
    }
    return catalog.commit(stage_of(detector), shard, samples, rows, meta, before[0] if before else None)


def _found(
    catalog: Catalog, manifest: Manifest, detector: Detector
) -> Iterator[tuple[dict, Sample | None, Regions | str]]:
    """Each ok row of the manifest, its sample, and what the detector says about it; None and why where it is none."""
    rows = manifest.table.filter(pc.equal(manifest.table["status"], OK)).to_pylist()
    samples = catalog.read_each(manifest)
    for start in range(0, len(rows), _GROUP):
        group = list(islice(samples, _GROUP))
        good = [sample for sample in group if isinstance(sample, Sample)]
        found = dict(zip([sample.key for sample in good], detector.detect(good), strict=True))
        for row, sample in zip(rows[start : start + _GROUP], group, strict=True):
            if isinstance(sample, Sample):
                yield row, sample, found[sample.key]
            else:
                # Without the place of the tar: the same shard gives the same manifest wherever its root is mounted.
                yield row, None, f"{BAD_SAMPLE}: {sample.__cause__}"


def detect_pending(
    catalog: Catalog,
    detector: Detector,
    on_shard: Callable[[dict], None],
    only: Sequence[str] | None = None,
) -> int:
    """Detect all shards that are pending, or those of `only` that are; the number that this process committed.

    on_shard gets, after each that was detected here: shard, images (looked at), regions (found), images_per_s, done
    (shards that are committed, by anyone) and of (shards that were pending), and by: `this` process, or `another` that
    was first to commit it. A shard that another has done before its turn here counts as done, without a report.
    """
    if not catalog.shards(IMAGES):
        where = catalog.store.where(f"{catalog.dataset}/{IMAGES}")
        raise ValueError(f"no shard is committed in {where}; collect the images first, or check the dataset's name")
    pending = catalog.pending(IMAGES, stage_of(detector))
    if only is not None:
        unknown = sorted(set(only) - set(catalog.shards(IMAGES)))
        if unknown:
            raise ValueError(f"no shards {', '.join(unknown)} are committed in {catalog.dataset}/{IMAGES}")
        pending = [shard for shard in pending if shard in set(only)]
    # Another order in each process. In one order, or in one that only begins elsewhere, a process that catches up with
    # another would begin every further shard together with it.
    random.Random().shuffle(pending)
    stage, committed = stage_of(detector), 0
    for done, shard in enumerate(pending, start=1):
        # A shard that another has begun is not passed over: it may never end.
        if not catalog.pending(IMAGES, stage, [shard]):
            continue
        started = time.monotonic()
        first = detect_shard(catalog, shard, detector)
        committed += first
        seconds = time.monotonic() - started
        table = catalog.manifest(stage, shard).table
        images = catalog.manifest(IMAGES, shard).ok_rows
        on_shard(
            {
                "shard": shard,
                "images": images,
                "regions": pc.sum(table["num_regions"]).as_py() or 0,
                "images_per_s": round(images / seconds, 2),
                "done": done,
                "of": len(pending),
                "by": "this" if first else "another",
            }
        )
    return committed


class Progress:
    """What `detect_pending` reports of shards, as lines for people; images and regions are those of this process."""

    def __init__(self, dataset: str):
        self.dataset, self.started = dataset, time.monotonic()
        self.shards = self.images = self.regions = 0  # that this process committed

    def line(self, report: Mapping[str, Any]) -> str:
        """Take down a report; the line about all so far."""
        ours = report["by"] == "this"
        self.shards += ours
        self.images += ours * report["images"]
        self.regions += ours * report["regions"]
        counts, seconds = {"images": self.images, "regions": self.regions}, time.monotonic() - self.started
        return progress_line(self.dataset, report["done"], report["of"], "shards", counts, seconds)


def size_line(size: Mapping[str, Any]) -> str:
    """What `stage_size` gives, for people."""
    per_1000 = f", {size['bytes_per_1000_images'] / 1e6:,.1f} per 1,000 images" if size["images"] else ""
    kept = "with" if size["keep_features"] else "without"
    return f"{size['bytes'] / 1e6:,.1f} MB in {size['stage']}{per_1000}, {kept} features"


def stage_size(catalog: Catalog, stage: str) -> dict:
    """What a detector's regions take where they are stored, images included, and whether features are among them.

    Bytes of tars and manifests, in all and per 1,000 images with regions (None while there are none).
    """
    listed = catalog.store.list(f"{catalog.dataset}/{stage}/")
    size = sum(info.size for info in listed if "/snapshots/" not in info.path)
    headers = catalog.headers(stage).values()
    images = sum(header.ok_rows for header in headers)
    return {
        "stage": stage,
        "shards": len(headers),
        "images": images,
        "keep_features": any(header.meta["config"].get("keep_features", False) for header in headers),
        "bytes": size,
        "bytes_per_1000_images": round(1000 * size / images) if images else None,
    }


# --- command line -----------------------------------------------------------------------------------------------------

# Which flags belong to which backend, by name of the setting; a flag of the other backend is refused, not ignored.
_CROWD = ("crowd",)
_SELECTION = ("minimum", "maximum", "threshold", "strict", "nms_threshold", "plus_one")
_NETWORK = ("short_side", "long_side", "post_nms", "roi_op", "resize", "box_arithmetic")
_REGIONS = ("boxes", "keep_features")
_RUNNING = ("device", "precision", "tf32", "threads", "batch", "workers")
_NETWORKS = ("preset", "weights", "untrained", "seed", *_SELECTION, *_NETWORK, *_REGIONS, *_RUNNING)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m detectors.run", description=__doc__.split("\n")[0])
    parser.add_argument("root", help="a folder or s3://bucket/prefix")
    parser.add_argument("dataset", help="the dataset below it, such as captions")
    parser.add_argument("--backend", choices=["annotated", "faster_rcnn", "detectron2"], required=True)
    parser.add_argument("--json", action="store_true", help="lines of JSON instead of those for people")
    parser.add_argument("--shard", action="append", help="only this one; may be given several times")

    annotated = parser.add_argument_group("annotated: regions from an annotation file; also those of --boxes given")
    annotated.add_argument("--annotations", type=Path, help="file in COCO's detection format")
    annotated.add_argument("--crowd", choices=["skip", "keep"], help="what becomes of iscrowd boxes (skip)")

    network = parser.add_argument_group("faster_rcnn, detectron2: regions found by the network")
    network.add_argument("--preset", help="vg_resnet101, vg_resnet50 or demo; needed where the weights do not say it")
    network.add_argument("--weights", type=Path, help="safetensors file")
    network.add_argument("--untrained", action="store_true", default=None, help="random weights instead: for trials")
    network.add_argument("--seed", type=int, help="of the random weights")
    network.add_argument("--minimum", type=int, help="regions an image at least (10)")
    network.add_argument("--maximum", type=int, help="regions an image at most (100)")
    network.add_argument("--threshold", type=float, help="confidence that a region needs (0.5)")
    network.add_argument("--strict", action=argparse.BooleanOptionalAction, help="more than that, or as much (strict)")
    network.add_argument("--nms-threshold", type=float, help="IoU above which regions suppress each other (0.3)")
    network.add_argument("--plus-one", action=argparse.BooleanOptionalAction, help="count widths as Caffe does (no)")
    network.add_argument("--short-side", type=int, help="pixels of the resized image's shorter side")
    network.add_argument("--long-side", type=int, help="pixels that its longer side may have")
    network.add_argument("--post-nms", type=int, help="proposals an image")
    network.add_argument("--roi-op", choices=["pool", "align1"], help="RoIPool, or RoIAlign with one sample")
    network.add_argument("--resize", choices=["pil", "caffe"], help="antialiased on 8 bits, or as cv2 does on floats")
    network.add_argument("--box-arithmetic", choices=["continuous", "plus_one"], help="widths x2 - x1, or 1 more")
    network.add_argument(
        "--boxes",
        choices=["proposals", "regressed", "given"],
        help="a region's box: the RPN's, or where the box head moves it for the region's class, or those of "
        "--annotations instead of any found (proposals)",
    )
    network.add_argument(
        "--keep-features",
        action=argparse.BooleanOptionalAction,
        help="store the regions' features, too, in float16 (no)",
    )
    network.add_argument("--device", help="cpu or cuda (cpu)")
    network.add_argument("--precision", choices=["fp32", "bf16-res5"], help="float32, or res5 in bfloat16 (fp32)")
    network.add_argument("--tf32", action="store_true", default=None, help="convolutions of a GPU in TF32 (float32)")
    network.add_argument("--threads", type=int, help="of one process on a CPU (1, the same bytes on every machine)")
    network.add_argument("--batch", type=int, help="images of equal size at a time (1; on a GPU try 8)")
    network.add_argument("--workers", type=int, help="threads that decode, resize and choose meanwhile (1)")
    return parser


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def make_detector(options: argparse.Namespace) -> Detector:
    """The detector that the command line asks for; ValueError where its flags contradict each other."""
    _check_flags(options)
    annotated = None
    if options.annotations is not None:
        from detectors.annotated import AnnotatedDetector

        annotated = AnnotatedDetector(options.annotations, **_given(options, _CROWD))
    return annotated if options.backend == "annotated" else _network_detector(options, annotated)


def identify(options: argparse.Namespace) -> str:
    """The id of that detector. Nothing is loaded for it: files are hashed, and of weights the header is read."""
    _check_flags(options)
    annotated = None
    if options.annotations is not None:
        from detectors.annotated import annotated_id

        annotated = annotated_id(options.annotations, **_given(options, _CROWD))
    if options.backend == "annotated":
        return annotated
    from detectors.detect import describe_detector  # here, as below
    from detectors.weights.files import describe_weights

    config, settings = _network_settings(options)
    random = {"random_init": True, "seed": options.seed or 0}
    weights = random if options.untrained else describe_weights(options.weights, config).metadata
    return describe_detector(config, weights, settings, annotated, options.backend)[0]


def _check_flags(options: argparse.Namespace) -> None:
    given = options.boxes == "given"
    if options.backend == "annotated":
        foreign, instead = _given(options, _NETWORKS), "--backend annotated"
    elif given:
        foreign, instead = _given(options, _SELECTION), "--boxes given, which keeps them all"
    else:
        foreign, instead = _given(options, ("annotations", *_CROWD)), f"--backend {options.backend}"
    if foreign:
        flags = ", ".join("--" + name.replace("_", "-") for name in foreign)
        raise ValueError(f"{flags}: not for {instead}; leave out")
    if (given or options.backend == "annotated") and options.annotations is None:
        raise ValueError(f"--{'boxes given' if given else 'backend annotated'} needs --annotations FILE")


def _network_settings(options: argparse.Namespace) -> "tuple[FasterRCNNConfig, DetectorSettings]":
    """Which network, and how it is run over images."""
    # Here, because torch and torchvision take seconds to import and the annotated backend needs neither.
    from detectors.detect import DetectorSettings
    from detectors.faster_rcnn import PRESETS
    from detectors.select import SelectionSettings
    from detectors.weights.files import read_config

    if (options.weights is None) == (options.untrained is None):
        raise ValueError(
            f"--backend {options.backend} needs --weights FILE or, for a trial on random weights, --untrained"
        )
    if options.untrained and options.preset is None:
        raise ValueError(f"--untrained needs --preset, the network that gets random weights: {', '.join(PRESETS)}")
    if options.preset not in PRESETS and options.preset is not None:
        raise ValueError(f"--preset is {options.preset}, must be one of {', '.join(PRESETS)}")
    if options.seed is not None and options.untrained is None:
        raise ValueError("--seed is for --untrained only; leave it out")
    preset = PRESETS[options.preset] if options.preset else read_config(options.weights)
    config = dataclasses.replace(preset, **_given(options, _NETWORK))
    selection = SelectionSettings(**_given(options, _SELECTION))
    return config, DetectorSettings(selection, **_given(options, _REGIONS + _RUNNING))


def _network_detector(options: argparse.Namespace, given: Detector | None) -> Detector:
    from detectors.detect import FasterRCNNDetector  # here, as above
    from detectors.faster_rcnn import FasterRCNN
    from detectors.weights.files import load_weights

    config, settings = _network_settings(options)
    kind = FasterRCNN
    if options.backend == "detectron2":
        from detectors.detectron2 import Detectron2FasterRCNN as kind
    seed = options.seed or 0
    network = kind.random_init(config, seed)
    if options.untrained:
        weights = {"random_init": True, "seed": seed}
    else:
        loaded = load_weights(network, options.weights)
        weights = loaded.metadata
        for difference in loaded.differences:
            print(f"not the same as in release {loaded.release}: {difference}", file=sys.stderr)
    return FasterRCNNDetector(network, weights, settings, given, options.backend)


def finished(catalog: Catalog, flags: Sequence[str]) -> dict | None:
    """What the program says of the whole stage where these flags leave it nothing to detect.

    None where a shard is left, and where anything is wrong: the program then says what. torch is imported only where
    some detector has been over every shard.
    """
    images = set(catalog.shards(IMAGES))
    stages = {"/".join(info.path.split("/")[1:3]) for info in catalog.store.list(f"{catalog.dataset}/regions/")}
    if not images or not any(images.issubset(catalog.shards(stage)) for stage in stages):
        return None
    try:
        options = _parser().parse_args([catalog.store.where(""), catalog.dataset, *flags])
        stage = f"regions/{identify(options)}"
        if stage not in stages or catalog.pending(IMAGES, stage):
            return None
    except (ValueError, OSError):
        return None
    return stage_size(catalog, stage)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        catalog = Catalog(open_store(options.root), options.dataset)
        detector = make_detector(options)
        if detector.metadata["random_init"]:
            print("the network has random weights: its regions mean nothing", file=sys.stderr)
        tell = (lambda report: json.dumps(report)) if options.json else Progress(options.dataset).line
        detect_pending(catalog, detector, lambda report: print(tell(report), flush=True), options.shard)
        size = stage_size(catalog, stage_of(detector))
        print(json.dumps(size) if options.json else f"{options.dataset}: {size_line(size)}", flush=True)
    except StorageUnreachable as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(STORAGE_UNREACHABLE)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
