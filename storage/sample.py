"""Sample and Regions, the types that all stages share, and their encoding as members of a WebDataset tar.

docs/formats.md specifies the bytes: member names, dtypes, byte order and version. `from_members` checks untrusted
members, so code that receives a Sample need not check it. `to_members` writes only what `from_members` accepts.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass

import msgpack
import numpy as np

from storage.digests import check_version
from storage.safe_json import parse_json, printable, short_repr

SAMPLE_VERSION = 1
MAX_PIXELS = 100_000_000
"""Maximum number of pixels of a sample's image. A decoded pixel takes three bytes."""

# dtype and shape of each array of Regions in the .mp member: little-endian, C order. None: number of regions; -1: any.
_ARRAYS = {
    "boxes": ("<f4", (None, 4)),
    "scores": ("<f4", (None,)),
    "labels": ("<i4", (None,)),
    "class_probs": ("<f2", (None, -1)),
    "attributes": ("<i4", (None,)),
    "attribute_scores": ("<f4", (None,)),
    "features": ("<f2", (None, -1)),
}
_REQUIRED = ("boxes", "scores", "labels")
# Fields of Sample in the .json member, next to `version` and, if the sample has it, `extra`.
_JSON_FIELDS = ("caption", "url", "width", "height", "sha256", "flags")
# More than any .mp member needs. Without limits, a few bytes can request arrays of gigabytes.
_LIMITS = {"max_map_len": 32, "max_array_len": 3, "max_str_len": 1000, "max_ext_len": 0}


@dataclass(frozen=True, eq=False)
class Regions:
    """The N regions of one image, in descending order of score.

    Attributes:
        boxes: float32 [N, 4], x1 y1 x2 y2 in pixels of the stored image, continuous, 0 <= x1 < x2 <= width
        scores: float32 [N], largest foreground probability (1 for annotations)
        labels: int32 [N], class as a column index of class_probs; never `background`
        detector: id of the detector, including its weights and settings (detectors.Detector.id)
        background: column index of the background class in class_probs
        class_probs: float16 [N, 1 + C], probabilities of all classes and the background; None if not stored
        attributes: int32 [N], attribute index; None if the detector has no attribute head
        attribute_scores: float32 [N], probability of the attribute; None if the detector has no attribute head
        features: float16 [N, D], precomputed RoI features; None if not stored
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    detector: str
    background: int = 0
    class_probs: np.ndarray | None = None
    attributes: np.ndarray | None = None
    attribute_scores: np.ndarray | None = None
    features: np.ndarray | None = None

    def __post_init__(self):
        n = len(self.boxes)
        for name, (dtype, shape) in _ARRAYS.items():
            array = getattr(self, name)
            if array is None:
                if name in _REQUIRED:
                    raise ValueError(f"Regions.{name} is missing")
                continue
            # Kept fast, because every sample that training reads is checked here.
            fits = array.ndim == len(shape) and len(array) == n and shape[-1] in (None, -1, array.shape[-1])
            if array.dtype != dtype or not fits:
                expected = tuple(n if s is None else s for s in shape)
                raise ValueError(f"Regions.{name} is {array.dtype} {array.shape}, not {dtype} {expected}")

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def num_classes(self) -> int:
        """Number of classes without the background (C). Raises ValueError if class_probs is None."""
        if self.class_probs is None:
            raise ValueError(f"regions of detector {self.detector} have no class_probs; use those of another detector")
        return self.class_probs.shape[1] - 1

    def class_probs_background_first(self) -> np.ndarray:
        """Return class_probs as float32 [N, 1 + C], with the background in column 0 as in the model's heads."""
        columns = self.num_classes + 1
        assert self.class_probs is not None  # num_classes has checked it
        order = [self.background] + [c for c in range(columns) if c != self.background]
        return self.class_probs[:, order].astype(np.float32)

    def labels_background_first(self) -> np.ndarray:
        """Return `labels` as column indices of `class_probs_background_first` (int32 [N])."""
        return np.where(self.labels < self.background, self.labels + 1, self.labels).astype(np.int32)

    def take(self, indices: np.ndarray) -> "Regions":
        """Return the regions selected by `indices`, an int or bool array."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return dataclasses.replace(self, **{k: None if a is None else a[indices] for k, a in arrays.items()})


@dataclass(frozen=True)
class Sample:
    """An image with its caption and, in region stages, its regions.

    Attributes:
        image: complete JPEG file, RGB or grey, with its EXIF orientation already applied
        width: width of `image` in pixels
        height: height of `image` in pixels
        sha256: sha256 of the downloaded bytes, before they were normalised into `image`
        flags: changes made by the normalisation ("exif_rotated", "resized", ...)
        extra: values of further columns of the caption list (CollectSettings.columns), by name; None if there are none
    """

    key: str
    image: bytes
    caption: str
    url: str
    width: int
    height: int
    sha256: str
    flags: tuple[str, ...] = ()
    regions: Regions | None = None
    extra: dict[str, str | int | float | bool | None] | None = None

    def require_regions(self) -> Regions:
        """Return `regions`. Raises ValueError, naming the sample, if it has none."""
        if self.regions is None:
            raise ValueError(f"sample {self.key} has no regions; run the detection stage on its shard first")
        return self.regions


class BadSample(ValueError):
    """Raised for a sample that violates docs/formats.md, or returned in place of the sample."""

    def __init__(self, message: str, key: str):
        super().__init__(message, key)
        self.key = key

    def __str__(self) -> str:
        return self.args[0]


def sample_key(url: str, caption: str) -> str:
    """Return the first 20 hex digits of sha256(url, NUL, caption). The same row has the same key in every run."""
    return hashlib.sha256(url.encode() + b"\0" + caption.encode()).hexdigest()[:20]


def to_members(sample: Sample) -> dict[str, bytes]:
    """Encode a sample as tar members, keyed by extension: jpg, json and, if it has regions, mp.

    Raises BadSample if `from_members` would refuse a field.
    """
    check_sample(sample)
    metadata = {"version": SAMPLE_VERSION} | {name: getattr(sample, name) for name in _JSON_FIELDS}
    if sample.extra is not None:
        metadata["extra"] = sample.extra
    members = {"jpg": sample.image, "json": json.dumps(metadata, ensure_ascii=False).encode()}
    if sample.regions is not None:
        members["mp"] = pack_regions(sample.regions)
    return members


def from_members(key: str, members: dict[str, bytes | memoryview]) -> Sample:
    """Decode a sample from its tar members, keyed by extension. Raises BadSample if they violate docs/formats.md.

    The JPEG is not decoded here, so decoding it may still fail.
    """
    try:
        for name in ("jpg", "json"):
            if name not in members:
                raise ValueError(f"there is no .{name} member, only {sorted(members)}")
        metadata = parse_json(members["json"], "the .json member")
        if missing := {"version", *_JSON_FIELDS} - metadata.keys():
            raise ValueError(f"{min(missing)} is missing in the .json member")
        if unknown := metadata.keys() - {"version", *_JSON_FIELDS, "extra"}:
            raise ValueError(f"{short_repr(min(unknown))} is not a field of the .json member")
        check_version(metadata.pop("version"), SAMPLE_VERSION, "it")
        flags = metadata.pop("flags")
        sample = Sample(
            key=key,
            image=bytes(members["jpg"]),
            flags=tuple(flags) if type(flags) is list else flags,
            regions=unpack_regions(members["mp"]) if "mp" in members else None,
            **metadata,
        )
        _check(sample)
    except ValueError as error:
        raise BadSample(f"sample {key}: {error}", key) from error
    return sample


def check_sample(sample: Sample) -> None:
    """Raise BadSample if `from_members` would refuse a field of the sample."""
    try:
        _check(sample)
        extra = sample.extra or {}
        for text in (sample.caption, sample.url, sample.sha256, *sample.flags, *extra, *map(str, extra.values())):
            text.encode()  # the .json member is UTF-8
    except ValueError as error:
        raise BadSample(f"sample {sample.key}: {error}", sample.key) from error


def _check(sample: Sample) -> None:
    width, height, flags = sample.width, sample.height, sample.flags
    if not type(sample.caption) is type(sample.url) is type(sample.sha256) is str:
        name = next(name for name in ("caption", "url", "sha256") if type(getattr(sample, name)) is not str)
        raise ValueError(f"{name} is {short_repr(getattr(sample, name))}, not a string")
    if type(flags) is not tuple or (flags and not all(type(flag) is str for flag in flags)):
        raise ValueError(f"flags is {short_repr(flags)}, not a list of strings")
    if sample.extra is not None:
        _check_extra(sample.extra)
    size = jpeg_size(sample.image)
    if type(width) is not int or type(height) is not int or (width, height) != size:
        raise ValueError(f"width and height are {short_repr(width)} and {short_repr(height)}, but its JPEG has {size}")
    if width * height > MAX_PIXELS:
        raise ValueError(f"width and height are {width} and {height}: over {MAX_PIXELS} pixels, too large to decode")
    if sample.regions is not None:
        _check_regions(sample.regions, width, height)


def _check_extra(extra: dict) -> None:
    if type(extra) is not dict:
        raise ValueError(f"extra is {short_repr(extra)}, not an object")
    for name, value in extra.items():
        if type(name) is not str or type(value) not in (str, int, float, bool, type(None)):
            raise ValueError(
                f"extra has {short_repr(name)} {short_repr(value)}, not a name with a string, number or boolean"
            )
        if type(value) is float and not math.isfinite(value):
            raise ValueError(f"extra has {short_repr(name)} {value}, which JSON cannot hold")


def _check_regions(regions: Regions, width: int, height: int) -> None:
    """Raise ValueError if a value in the regions is out of range."""
    detector, background, probs = regions.detector, regions.background, regions.class_probs
    if type(detector) is not str or not detector:
        raise ValueError(f"regions.detector is {short_repr(detector)}, not an id")
    columns = 1 << 31 if probs is None else probs.shape[1]
    if type(background) is not int or not 0 <= background < columns:
        raise ValueError(f"regions.background is {short_repr(background)}, not a column of {columns}")
    if (regions.attributes is None) != (regions.attribute_scores is None):
        raise ValueError("regions have only one of attributes and attribute_scores")
    if not len(regions):
        return
    # Each array is read only once, because training checks every sample.
    _check_boxes(regions.boxes, width, height)
    labels = regions.labels.tolist()
    if min(labels) < 0 or max(labels) >= columns or background in labels:
        number = next(i for i, label in enumerate(labels) if not 0 <= label < columns or label == background)
        problem = f"not one of {columns} columns, or it is the background {background}"
        raise ValueError(f"regions.labels[{number}] is {labels[number]}, {problem}")
    _check_fractions("scores", regions.scores)
    if probs is not None:
        _check_fractions("class_probs", probs)
    if regions.attributes is not None and regions.attribute_scores is not None:
        _check_fractions("attribute_scores", regions.attribute_scores)
        if np.minimum.reduce(regions.attributes) < 0:
            raise ValueError(f"regions.attributes[{int(regions.attributes.argmin())}] is negative")
    features = regions.features
    if features is not None and features.size:
        bits = features.ravel().view(np.uint16)
        # As integers, infinities and NaNs are larger than all finite numbers of the same sign.
        if np.maximum.reduce(bits.view(np.int16)) >= _INFINITY or np.maximum.reduce(bits) >= _MINUS_INFINITY:
            index = np.argwhere(~np.isfinite(features))[0].tolist()
            raise ValueError(f"regions.features{index} is {features[tuple(index)]}")


def _check_boxes(boxes: np.ndarray, width: int, height: int) -> None:
    low, high = boxes[:, :2], boxes[:, 2:]
    fits = (low >= 0) & (low < high) & (high <= (width, height))  # False for a NaN
    if not fits.all():
        number = int(fits.all(axis=1).argmin())
        problem = f"which has no area inside the {width} x {height} pixels"
        raise ValueError(f"regions.boxes[{number}] is {boxes[number].tolist()}, {problem}")


_ONES = {np.dtype(kind): int(np.ones(1, kind).view(f"u{kind[-1]}")[0]) for kind in ("f2", "f4")}
_INFINITY, _MINUS_INFINITY = np.array([np.inf, -np.inf], "f2").view("u2").tolist()


def _check_fractions(name: str, array: np.ndarray) -> None:
    """Raise ValueError if a value of the array is not between 0 and 1. `name` is used in the message."""
    # The bits of a negative or non-finite number, read as an unsigned integer, are larger than those of 1.0. Comparing
    # integers takes one pass, and is ten times as fast as comparing floats.
    if array.size and np.maximum.reduce(array.ravel().view(f"u{array.itemsize}")) > _ONES[array.dtype]:
        index = np.argwhere(~((array >= 0) & (array <= 1) & ~np.signbit(array)))[0].tolist()
        raise ValueError(f"regions.{name}{index} is {array[tuple(index)]}, not from 0 to 1")


def jpeg_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) in pixels from a JPEG's frame header. Raises ValueError if it has none.

    The header is found in the same way as libjpeg finds it, so that decoders agree on the size.
    """
    if data[:2] != b"\xff\xd8":
        raise ValueError("the .jpg member is not a JPEG")
    offset = 2
    try:
        while True:
            if data[offset] != 0xFF:  # stray bytes between two markers
                offset = data.index(b"\xff", offset)
            while (marker := data[offset]) == 0xFF:
                offset += 1
            offset += 1
            if marker == 0 or marker == 1 or 0xD0 <= marker <= 0xD7:  # markers without content
                continue
            length = data[offset] << 8 | data[offset + 1]
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                height, width = data[offset + 3] << 8 | data[offset + 4], data[offset + 5] << 8 | data[offset + 6]
                if not width or not height:
                    raise ValueError("the .jpg member has no pixels according to its header")
                return width, height
            if length < 2 or 0xD8 <= marker <= 0xDA:  # start or end of an image, or its data: no frame header follows
                break
            offset += length
    except IndexError:
        pass
    raise ValueError("the .jpg member is truncated: it has no frame header with a size")


def pack_regions(regions: Regions) -> bytes:
    """Encode regions as a msgpack map: version, detector, background, and each array as [dtype, shape, raw bytes]."""
    packed = {"version": SAMPLE_VERSION, "detector": regions.detector, "background": regions.background}
    for name, (dtype, _) in _ARRAYS.items():
        array = getattr(regions, name)
        if array is not None:
            packed[name] = [dtype, list(array.shape), np.ascontiguousarray(array, dtype=dtype).tobytes()]
    return msgpack.packb(packed)


def unpack_regions(data: bytes | memoryview) -> Regions:
    """Decode the output of `pack_regions`. The arrays are read-only, and their values are not checked.

    Raises ValueError for an invalid name, type or shape.
    """
    try:
        packed = msgpack.unpackb(data, **_LIMITS)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"the .mp member cannot be read: {printable(error)}") from error
    if type(packed) is not dict:
        raise ValueError(f"the .mp member holds {short_repr(packed)}, not a map")
    check_version(packed.pop("version", None), SAMPLE_VERSION, "the .mp member")
    for name in ("detector", "background", *_REQUIRED):
        if name not in packed:
            raise ValueError(f"regions.{name} is missing")
    detector, background = packed.pop("detector"), packed.pop("background")
    unknown = packed.keys() - _ARRAYS.keys()
    if unknown:
        raise ValueError(f"regions have unknown arrays {short_repr(sorted(unknown, key=repr))}")
    arrays = {}
    for name, stored in packed.items():
        try:
            dtype, shape, raw = stored
            if dtype != _ARRAYS[name][0]:
                raise ValueError(f"it is stored as {short_repr(dtype)}, not {_ARRAYS[name][0]}")
            sides = type(shape) is list and all(type(side) is int and side >= 0 for side in shape)
            if not sides or len(shape) != len(_ARRAYS[name][1]):
                raise ValueError(f"its shape is {short_repr(shape)}, not one of {len(_ARRAYS[name][1])} sizes")
            arrays[name] = np.frombuffer(raw, dtype=dtype).reshape(shape)
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"regions.{name} cannot be read: {printable(error)}") from error
    return Regions(detector=detector, background=background, **arrays)
