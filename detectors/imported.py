"""A detector that takes regions from other projects' feature files (detectors/feature_files.py).

`ImportedFeatures.match` sets how the row of an image is found. Boxes are scaled from the image size in the row to the
size of the stored image. If a row has no class probabilities, its objects_id gives the labels. If it has neither, all
regions get class 1 and score 1.
"""

import base64
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detectors import detector_id
from detectors.annotated import file_name_of
from detectors.config import ImportedFeatures
from detectors.feature_files import stem_of
from detectors.feature_reader import FeatureFile
from storage.safe_json import printable, short_repr
from storage.sample import Regions, Sample

# Part of the detector's id: raise it if a change here or in feature_files.py gives other regions for the same files.
_RULES_VERSION = 3
_MOST_BOXES = 1000
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
_SUM_TOLERANCE = 0.02  # for class probabilities, which may have been stored in float16

Fields = dict[str, Any]


class ImportedDetector:
    """A detector that looks up the regions of an image in feature files.

    Raises ValueError if a file is missing, has an unknown format, or has an unusable first row. An image without a
    usable row gets a status instead of regions.
    """

    def __init__(self, settings: ImportedFeatures, keep_features: bool):
        self._settings, self._keep_features = settings, keep_features
        self._files = [FeatureFile(Path(file)) for file in settings.files]
        # The rows of each image, by the value of `match`; takes 300 bytes per row.
        self._rows: dict[str | int, list[tuple[FeatureFile, int]]] = {}
        for file in self._files:
            for number, name in enumerate(file.names):
                if (value := self._match_value(name)) not in ("", None):
                    self._rows.setdefault(value, []).append((file, number))
        hashed = {
            "backend": "imported",
            "rules_version": _RULES_VERSION,
            "files_sha256": [file.sha256 for file in self._files],
            "match": settings.match,
            "background": settings.background,
            "num_classes": settings.num_classes,
            "keep_features": keep_features,
        }
        self.id = detector_id(hashed)
        self._widths: dict[str, int] = {}
        for file in self._files:
            self._check_first(file)
        self.metadata = hashed | {
            "random_init": False,
            "files": [file.path.name for file in self._files],
            "feature_channels": self._widths["features"] or None,
        }

    def detect(self, samples: Sequence[Sample]) -> list[Regions | str]:
        return [self._detect_one(sample) for sample in samples]

    def _match_value(self, name: str) -> str | int | None:
        """Return the part of `name` (a row's image id or a sample's file name, URL or key) that `match` compares."""
        if self._settings.match == "number":
            digits = re.search(r"(?<![0-9])[0-9]{1,100}$", stem_of(name))
            return int(digits[0]) if digits else None
        return stem_of(name) if self._settings.match == "file_name" else name

    def _check_first(self, file: FeatureFile) -> None:
        """Read the rows up to the first one with boxes. Raises ValueError if a row is unusable or no row has boxes."""
        for number in range(len(file.names)):
            try:
                _, regions = self._read(file, number)
            except ValueError as error:
                raise ValueError(f"{file.path}: its first row, {file.location(number)}, {printable(error)}") from error
            if len(regions):
                return
        raise ValueError(f"{file.path} has no row with boxes; download it again")

    def _detect_one(self, sample: Sample) -> Regions | str:
        match = self._settings.match
        name = {"url": sample.url, "key": sample.key}.get(match) or file_name_of(sample.url)
        rows = self._rows.get(self._match_value(name), [])
        if not rows:
            name = sample.key if match == "key" else printable(sample.url)
            first = printable(self._files[0].names[0])
            return f"no_features: no row has the {match} of {name}; the files begin with {first}"
        if len(rows) > 1:
            names = " and ".join(file.location(row) for file, row in rows[:2])
            return f"ambiguous_features: {names} have the same {match}"
        file, number = rows[0]
        try:
            size, regions = self._read(file, number)
        except ValueError as error:
            return f"bad_features: {file.location(number)} {printable(error)}"
        return _scale_to_sample(regions, size, sample, file.location(number))

    def _read(self, file: FeatureFile, number: int) -> tuple[tuple[int, int] | None, Regions]:
        """Return the (width, height) of a row's image, or None if its boxes are fractions, and its regions.

        Raises ValueError if the row is unusable.
        """
        try:
            return self._make_regions(file.read(number))
        except MemoryError as error:
            name = printable(file.names[number])
            raise MemoryError(f"{file.path}: {name}: {str(error) or 'out of memory'}") from error

    def _make_regions(self, fields: Fields) -> tuple[tuple[int, int] | None, Regions]:
        name = "norm_boxes" if "norm_boxes" in fields and "boxes" not in fields else "boxes"
        size = (_read_integer(fields, "image_w"), _read_integer(fields, "image_h")) if name == "boxes" else None
        boxes = _read_array(fields, name, np.float32)
        rows = len(boxes) if boxes.ndim == 2 else boxes.size // 4
        count = _read_integer(fields, "num_boxes", least=0) if "num_boxes" in fields else rows
        if count > _MOST_BOXES:
            raise ValueError(f"has {count} boxes, more than {_MOST_BOXES}")
        if boxes.ndim == 2 and count < rows:  # mmf's arrays have more rows than boxes
            fields = {
                n: f[:count] if isinstance(f, np.ndarray) and f.shape[:1] == (rows,) else f for n, f in fields.items()
            }
            boxes = boxes[:count]
        boxes = _reshape_per_box(name, boxes, count, 4 if size else None)[:, :4]
        _check_boxes(boxes, size)
        probs, labels, scores = _read_classes(fields, count, self._settings)
        features = None
        if self._keep_features:
            features = _read_array(fields, "features", np.float32)
            if features.ndim == 2 and features.shape[1] == count != len(features):  # OpenVQA's are [D, N]
                features = features.T
            features = _reshape_per_box("features", features, count)
            if not (np.abs(features) <= _LARGEST_FLOAT16).all():
                largest = np.abs(features).max()
                raise ValueError(f"has a feature of {largest:g}, but the largest float16 is {_LARGEST_FLOAT16:.0f}")
            features = features.astype(np.float16)
        arrays = {"class probabilities": probs, "features": features}
        widths = {name: 0 if array is None else array.shape[1] for name, array in arrays.items()}
        self._widths = self._widths or (widths if count else {})
        for name, width in widths.items():
            if count and width != self._widths[name]:
                first = self._widths[name] or "no"
                raise ValueError(f"has {width or 'no'} {name} per region, but the first row of the files has {first}")
        last = self._settings.background == "last" and probs is not None
        return size, Regions(
            boxes=boxes,
            scores=scores,
            labels=labels,
            detector=self.id,
            background=probs.shape[1] - 1 if last else 0,
            class_probs=None if probs is None else probs.astype(np.float16),
            features=features,
        )


def _scale_to_sample(regions: Regions, size: tuple[int, int] | None, sample: Sample, location: str) -> Regions | str:
    """Scale the regions of an image of `size` (width, height; None: fractions) to the sample's, and sort them by score.

    Returns `status: detail` if the proportions differ or no box has an area.
    """
    width, height = size or (1, 1)
    stored = np.array([sample.width, sample.height])
    # The same proportions may differ by a rounding error of one pixel per side.
    if size and ((stored - 1) / size).max() > ((stored + 1) / size).min():
        return (
            f"size_mismatch: {location} is for an image of {width}x{height}, which does not have the proportions of "
            f"the stored {sample.width}x{sample.height}"
        )
    scale = np.array([sample.width / width, sample.height / height] * 2)
    boxes = np.clip(regions.boxes * scale, 0, [sample.width, sample.height] * 2).astype(np.float32)
    kept = np.argsort(-regions.scores, kind="stable")
    kept = kept[(boxes[kept, 2:] > boxes[kept, :2]).all(axis=1)]
    if not len(kept):
        return f"no_regions: {location} has no box with an area"
    return dataclasses.replace(regions, boxes=boxes).take(kept)


# --- the fields of a row ----------------------------------------------------------------------------------------------


def _check_boxes(boxes: np.ndarray, size: tuple[int, int] | None) -> None:
    """Raise ValueError if boxes have swapped corners, or exceed an image of `size` (width, height) by over a pixel.

    They must be in pixels or, if `size` is None, in fractions.
    """
    if not len(boxes):
        return
    (width, height), slack = size or (1, 1), 1 if size else 0.01
    if max(width, height) > 2 and np.isfinite(boxes).all() and boxes.max() <= 1:
        raise ValueError("has boxes in fractions of the image; they must be in pixels")
    ordered = (boxes[:, 2:] >= boxes[:, :2]).all(axis=1)
    inside = (boxes >= -slack).all(axis=1) & (boxes <= [width + slack, height + slack] * 2).all(axis=1)
    wrong = np.flatnonzero(~(ordered & inside))  # a NaN fails every comparison
    if len(wrong):
        box = ", ".join(f"{number:g}" for number in boxes[wrong[0]])
        image = f"{width}x{height} image" if size else "image, in fractions"
        raise ValueError(f"has a bad box {wrong[0]} for its {image}: {box}")


def _read_classes(
    fields: Fields, count: int, settings: ImportedFeatures
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Return the class probabilities (None if unknown), labels and scores of a row's `count` boxes."""
    objects, shift = None, int(settings.background != "last")
    if "objects_id" in fields:
        objects = _reshape_per_box("objects_id", _read_array(fields, "objects_id", np.int64), count, 1)[:, 0]
        if not ((objects >= 0) & (objects < 2**31 - 1)).all():
            raise ValueError(f"has an objects_id that is not from 0 to {2**31 - 2}")
        objects = objects.astype(np.int32)
    if "class_probs" in fields:
        probs = _read_fractions(fields, "class_probs", count)
        others = {"first": slice(1, None), "last": slice(None, -1), "none": slice(None)}[settings.background]
        others = probs[:, others]
        if not others.shape[1]:
            raise ValueError("has class_probs of only one class")
        best, sums = others.argmax(axis=1).astype(np.int32), probs.sum(axis=1)
        if settings.background == "none":
            probs = np.concatenate([(1 - sums).clip(0, 1)[:, None], probs], axis=1)
            sums = sums.clip(min=1)
        if count and not np.allclose(sums, 1, atol=_SUM_TOLERANCE):
            raise ValueError(
                f"has class_probs with the sum {sums[0]:.3g}, not 1; if they do not include the background, set "
                "--imported.background=none"
            )
        if objects is not None and count and (best != objects).mean() > 0.5:
            raise ValueError(
                "has an objects_id that is not its most probable class; check whether imported.background should be "
                f"{'last' if shift else 'first'}"
            )
        return probs, best + shift, others.max(axis=1)
    scores = np.ones(count, np.float32)
    if objects is None:
        return None, np.ones(count, np.int32), scores
    if "objects_conf" in fields:
        scores = _read_fractions(fields, "objects_conf", count, 1)[:, 0]
    if not (classes := settings.num_classes):
        return None, objects + 1, scores
    if count and objects.max() >= classes:
        raise ValueError(f"has the objects_id {objects.max()}, but imported.num_classes is {classes}")
    labels = objects + shift
    return np.eye(1 + classes, dtype=np.float32)[labels], labels, scores


def _read_integer(fields: Fields, name: str, least: int = 1) -> int:
    """Return a field as an integer of at least `least`. Files may store it as text or as an array of one number."""
    value = fields.get(name, "")
    scalar = value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
    try:
        number = float(scalar.decode("latin1") if isinstance(scalar, bytes) else scalar)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if number % 1 or not least <= number < 2**31:
        raise ValueError(f"has the {name} {short_repr(value)}, not a whole number of at least {least}")
    return int(number)


def _read_array(fields: Fields, name: str, kind: type) -> np.ndarray:
    """Return a field as an array. Files may store it as an array or as base64 of little-endian numbers."""
    value = fields.get(name)
    dtype = np.dtype(kind).newbyteorder("<")
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in ("iu" if kind is np.int64 else "fiu"):
            raise ValueError(f"has {name} of type {value.dtype}, not {np.dtype(kind).name}")
        return value.astype(kind)
    if not isinstance(value, str):
        raise ValueError(f"has {name} {short_repr(value)}, which are neither an array nor base64")
    try:
        return np.frombuffer(base64.b64decode("".join(value.split()), validate=True), dtype)
    except ValueError as error:
        raise ValueError(f"has {name} that are not base64 of {np.dtype(kind).name}, or truncated ({error})") from error


def _reshape_per_box(name: str, array: np.ndarray, count: int, columns: int | None = None) -> np.ndarray:
    """Reshape an array to [count, columns]. If `columns` is None, it is inferred. Raises ValueError if this fails."""
    width = columns or (array.size // count if count else 0)
    if array.size != count * width or (count and not width) or (array.ndim > 1 and len(array) != count):
        raise ValueError(f"has {name} of shape {array.shape}, which does not fit {count} boxes")
    return array.reshape(count, width)


def _read_fractions(fields: Fields, name: str, count: int, columns: int | None = None) -> np.ndarray:
    """Return a field of values from 0 to 1 as float32 [count, columns]. Values up to 1.001 are clipped to 1."""
    array = _reshape_per_box(name, _read_array(fields, name, np.float32), count, columns)
    if not ((array >= 0) & (array <= 1.001)).all():
        raise ValueError(f"has {name} that are not all from 0 to 1")
    return np.minimum(np.abs(array), np.float32(1))
