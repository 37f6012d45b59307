"""Regions from files of boxes and features that other projects have computed (detectors/feature_files.py).

Every image is looked up by `ImportedFeatures.match`. Boxes are moved from the size that the row names to the size of
the stored image. Of a row without class probabilities, the labels are those of its objects_id; of one without either,
every region is of the one class 1 with score 1.
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
from detectors.feature_files import FeatureFile, open_feature_file, stem_of
from storage.safe_json import printable, short_repr
from storage.sample import Regions, Sample

# Part of the detector's id: raise it when this code or feature_files.py makes other regions of the same files.
_RULES_VERSION = 2
_MOST_BOXES = 1000
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
_SUM = 0.02  # by which class probabilities may miss 1: they may have been stored in float16

Fields = dict[str, Any]


class ImportedDetector:
    """Looks the regions of an image up in files of features.

    ValueError names a file that is missing, of no known format, or whose first row is unusable. What is wrong with
    another row, or missing, is the status of its image.
    """

    def __init__(self, settings: ImportedFeatures, keep_features: bool):
        self._settings, self._keep_features = settings, keep_features
        self._files = [open_feature_file(Path(file)) for file in settings.files]
        # Where the rows of an image lie: 300 bytes a row.
        self._rows: dict[str | int, list[tuple[FeatureFile, int]]] = {}
        for file in self._files:
            for number, name in enumerate(file.names):
                if (value := self._value(name)) not in ("", None):
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

    def _value(self, name: str) -> str | int | None:
        """Return what `match` compares of a row's image id, or of a file's name."""
        if self._settings.match == "number":
            digits = re.search(r"(?<![0-9])[0-9]{1,100}$", stem_of(name))
            return int(digits[0]) if digits else None
        return stem_of(name) if self._settings.match == "file_name" else name

    def _check_first(self, file: FeatureFile) -> None:
        """Raises ValueError if the first row with boxes is unusable, or there is none."""
        for number in range(len(file.names)):
            try:
                _, regions = self._read(file, number)
            except ValueError as error:
                raise ValueError(f"{file.path}: its first row, {file.location(number)}, {printable(error)}") from error
            if len(regions):
                return
        raise ValueError(f"{file.path} holds no row with boxes; fetch it again")

    def _detect_one(self, sample: Sample) -> Regions | str:
        match = self._settings.match
        name = {"url": sample.url, "key": sample.key}.get(match) or file_name_of(sample.url)
        found = self._rows.get(self._value(name), [])
        if not found:
            name = sample.key if match == "key" else printable(sample.url)
            first = printable(self._files[0].names[0])
            return f"no_features: no row has the {match} of {name}; the files begin with {first}"
        if len(found) > 1:
            names = " and ".join(file.location(row) for file, row in found[:2])
            return f"ambiguous_features: {names} have the same {match}"
        file, number = found[0]
        try:
            size, regions = self._read(file, number)
        except ValueError as error:
            return f"bad_features: {file.location(number)} {printable(error)}"
        return _moved(regions, size, sample, file.location(number))

    def _read(self, file: FeatureFile, number: int) -> tuple[tuple[int, int], Regions]:
        """The width and height of a row's image, and its regions in there; ValueError says what is wrong with them."""
        fields = file.read(number)
        size = _whole(fields, "image_w"), _whole(fields, "image_h")
        boxes = _array(fields, "boxes", np.float32)
        count = _whole(fields, "num_boxes", least=0) if "num_boxes" in fields else boxes.size // 4
        if count > _MOST_BOXES:
            raise ValueError(f"has {count} boxes, more than {_MOST_BOXES}")
        boxes = _per_box("boxes", boxes, count, 4)
        _check_boxes(boxes, *size)
        probs, labels, scores = _classes(fields, count, self._settings)
        features = None
        if self._keep_features:
            features = _per_box("features", _array(fields, "features", np.float32), count)
            if not (np.abs(features) <= _LARGEST_FLOAT16).all():
                largest = np.abs(features).max()
                raise ValueError(f"has a feature of {largest:g}; float16 holds {_LARGEST_FLOAT16:.0f} at most")
            features = features.astype(np.float16)
        arrays = {"class probabilities": probs, "features": features}
        widths = {name: 0 if array is None else array.shape[1] for name, array in arrays.items()}
        self._widths = self._widths or (widths if count else {})
        for name, width in widths.items():
            if count and width != self._widths[name]:
                first = self._widths[name] or "no"
                raise ValueError(f"has {width or 'no'} {name} a region, the first row of the files {first}")
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


def _moved(regions: Regions, size: tuple[int, int], sample: Sample, where: str) -> Regions | str:
    """Regions of an image of this width and height, moved to the sample's size, most probable first; or a status."""
    width, height = size
    if not _same_shape(size, (sample.width, sample.height)):
        return (
            f"size_mismatch: {where} is of an image of {width}x{height}, which is not that of "
            f"{sample.width}x{sample.height} resized"
        )
    scale = np.array([sample.width / width, sample.height / height] * 2)
    boxes = np.clip(regions.boxes * scale, 0, [sample.width, sample.height] * 2).astype(np.float32)
    kept = np.argsort(-regions.scores, kind="stable")
    kept = kept[(boxes[kept, 2:] > boxes[kept, :2]).all(axis=1)]
    if not len(kept):
        return f"no_regions: {where} has no box with an area"
    arrays = {name: getattr(regions, name) for name in ("scores", "labels", "class_probs", "features")}
    arrays = {name: array if array is None else array[kept] for name, array in arrays.items()}
    return dataclasses.replace(regions, boxes=boxes[kept], **arrays)


def _same_shape(size: tuple[int, int], stored: tuple[int, int]) -> bool:
    """Whether resizing an image of this size gives the stored one, whose sides were rounded."""
    least = max((side - 1) / before for side, before in zip(stored, size, strict=True))
    most = min((side + 1) / before for side, before in zip(stored, size, strict=True))
    return least <= most


# --- the fields of a row ----------------------------------------------------------------------------------------------


def _check_boxes(boxes: np.ndarray, width: int, height: int) -> None:
    """ValueError names a box with its corners swapped, or one that lies outside the image by more than a pixel."""
    if not len(boxes):
        return
    if max(width, height) > 2 and np.isfinite(boxes).all() and boxes.max() <= 1:
        raise ValueError("has boxes in fractions of the image; they must be in pixels")
    ordered = (boxes[:, 2:] >= boxes[:, :2]).all(axis=1)
    inside = (boxes >= -1).all(axis=1) & (boxes <= [width + 1, height + 1] * 2).all(axis=1)
    wrong = np.flatnonzero(~(ordered & inside))  # a NaN fails every comparison
    if len(wrong):
        box = ", ".join(f"{number:g}" for number in boxes[wrong[0]])
        raise ValueError(f"has in its {width}x{height} image the box {wrong[0]}: {box}")


def _classes(
    fields: Fields, count: int, settings: ImportedFeatures
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """Class probabilities, labels and scores of `count` boxes."""
    objects, shift = None, int(settings.background != "last")
    if "objects_id" in fields:
        objects = _per_box("objects_id", _array(fields, "objects_id", np.int64), count, 1)[:, 0]
        if not ((objects >= 0) & (objects < 2**31 - 1)).all():
            raise ValueError("has an objects_id that is no id from 0 on")
        objects = objects.astype(np.int32)
    if "class_probs" in fields:
        probs = _fractions(fields, "class_probs", count)
        others = {"first": slice(1, None), "last": slice(None, -1), "none": slice(None)}[settings.background]
        others = probs[:, others]
        if not others.shape[1]:
            raise ValueError("has probabilities of one class alone")
        best, sums = others.argmax(axis=1).astype(np.int32), probs.sum(axis=1)
        if settings.background == "none":
            probs = np.concatenate([(1 - sums).clip(0, 1)[:, None], probs], axis=1)
            sums = sums.clip(min=1)
        if count and not np.allclose(sums, 1, atol=_SUM):
            raise ValueError(
                f"has class_probs whose sum is {sums[0]:.3g}, not 1: where they lack the background's, set "
                "--imported.background=none"
            )
        if objects is not None and count and (best != objects).mean() > 0.5:
            raise ValueError(
                "has an objects_id that is not its most probable class: is imported.background to be "
                f"{'last' if shift else 'first'}?"
            )
        return probs, best + shift, others.max(axis=1)
    scores = np.ones(count, np.float32)
    if objects is None:
        return None, np.ones(count, np.int32), scores
    if "objects_conf" in fields:
        scores = _fractions(fields, "objects_conf", count, 1)[:, 0]
    if not (classes := settings.num_classes):
        return None, objects + 1, scores
    if count and objects.max() >= classes:
        raise ValueError(f"has the objects_id {objects.max()}, and imported.num_classes is {classes}")
    labels = objects + shift
    return np.eye(1 + classes, dtype=np.float32)[labels], labels, scores


def _whole(fields: Fields, name: str, least: int = 1) -> int:
    """A whole number; a file may have it as text, or as an array of one."""
    value = fields.get(name, "")
    plain = value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
    try:
        number = float(plain.decode("latin1") if isinstance(plain, bytes) else plain)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not number.is_integer() or not least <= number < 2**31:
        raise ValueError(f"has the {name} {short_repr(value)}, not a whole number from {least} on")
    return int(number)


def _array(fields: Fields, name: str, kind: type) -> np.ndarray:
    """An array, as the file has it or of the bytes that it has as base64, little-endian."""
    value = fields.get(name)
    dtype = np.dtype(kind).newbyteorder("<")
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in ("iu" if kind is np.int64 else "fiu"):
            raise ValueError(f"has {name} of {value.dtype}, which are no {np.dtype(kind).name}")
        return value.astype(kind)
    if not isinstance(value, str | bytes):
        raise ValueError(f"has {name} that are {short_repr(value)}, neither an array nor base64")
    try:
        return np.frombuffer(base64.b64decode(value, validate=True), dtype)
    except ValueError as error:
        raise ValueError(f"has {name} that are no base64 of {np.dtype(kind).name} ({error}): is it cut off?") from error


def _per_box(name: str, array: np.ndarray, count: int, columns: int | None = None) -> np.ndarray:
    """[count, columns] of an array of any shape; ValueError where the numbers do not fit the boxes."""
    width = columns or (array.size // count if count else 0)
    if array.size != count * width or (count and not width) or (array.ndim > 1 and len(array) != count):
        raise ValueError(f"has {name} of shape {array.shape}, which do not fit {count} boxes")
    return array.reshape(count, width)


def _fractions(fields: Fields, name: str, count: int, columns: int | None = None) -> np.ndarray:
    """float32 [count, columns], from 0 to 1; what rounding has put above 1 is 1."""
    array = _per_box(name, _array(fields, name, np.float32), count, columns)
    if not ((array >= 0) & (array <= 1.001)).all():
        raise ValueError(f"has {name} that are not all from 0 to 1")
    return np.minimum(np.abs(array), np.float32(1))
