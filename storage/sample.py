"""Sample and Regions: the record that all stages share, and its form as members of a WebDataset tar.

The byte-level contract (member names, dtypes, byte order, version) is docs/formats.md.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass

import msgpack
import numpy as np

SAMPLE_VERSION = 1

# How each array of Regions lies in the .mp member: little-endian, C order. `None` in a shape is the number of regions.
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


@dataclass(frozen=True, eq=False)
class Regions:
    """The N regions of one image, best first.

    boxes             float32 [N, 4]      x1 y1 x2 y2 in pixels of the stored image, continuous, 0 <= x1 < x2 <= width
    scores            float32 [N]         confidence: the largest foreground probability (1 for annotations)
    labels            int32   [N]         the class, as a column of class_probs (so never `background`)
    detector          str                 id of the detector with its weights and settings (detectors.Detector.id)
    background        int                 which column of class_probs is the background
    class_probs       float16 [N, 1 + C]  the detector's whole distribution, background included; None where not kept
    attributes        int32   [N]         attribute index; None where the detector has no attribute head
    attribute_scores  float32 [N]         its probability; None likewise
    features          float16 [N, D]      precomputed RoI features; None unless asked for
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
            # Written out, for every sample that a training reads passes here.
            fits = array.ndim == len(shape) and len(array) == n and shape[-1] in (None, -1, array.shape[-1])
            if array.dtype != dtype or not fits:
                wanted = tuple(n if s is None else s for s in shape)
                raise ValueError(f"Regions.{name} is {array.dtype} {array.shape}, not {dtype} {wanted}")

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def num_classes(self) -> int:
        """C, the number of classes without the background; an error where no distribution was kept."""
        if self.class_probs is None:
            raise ValueError(f"regions of detector {self.detector} carry no class_probs; detect again, keeping them")
        return self.class_probs.shape[1] - 1

    def class_probs_background_first(self) -> np.ndarray:
        """float32 [N, 1 + C], background in column 0, whatever the detector's own order: the order of our heads."""
        self.num_classes  # noqa: B018  raises where there is no distribution
        order = [self.background] + [c for c in range(self.class_probs.shape[1]) if c != self.background]
        return self.class_probs[:, order].astype(np.float32)

    def labels_background_first(self) -> np.ndarray:
        """int32 [N]: `labels` as columns of `class_probs_background_first`."""
        return np.where(self.labels < self.background, self.labels + 1, self.labels).astype(np.int32)

    def take(self, indices: np.ndarray) -> "Regions":
        """The regions at `indices` (int or bool array), in that order."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return dataclasses.replace(self, **{k: None if a is None else a[indices] for k, a in arrays.items()})


@dataclass(frozen=True)
class Sample:
    """One image with its caption, and its regions once they were detected.

    image is a complete JPEG file (RGB or grey, EXIF orientation already applied); width and height are its pixels.
    sha256 is that of the bytes as they came from the web, before they were normalised into `image`.
    flags say what normalising did ("exif_rotated", "resized", ...).
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


def sample_key(url: str, caption: str) -> str:
    """First 20 hex digits of sha256(url, NUL, caption): the same row has the same key in every run."""
    return hashlib.sha256(url.encode() + b"\0" + caption.encode()).hexdigest()[:20]


def to_members(sample: Sample) -> dict[str, bytes]:
    """Extension -> bytes, in the order in which they stand in the tar: jpg, json, and mp where there are regions."""
    about = {
        "version": SAMPLE_VERSION,
        "caption": sample.caption,
        "url": sample.url,
        "width": sample.width,
        "height": sample.height,
        "sha256": sample.sha256,
        "flags": list(sample.flags),
    }
    members = {"jpg": sample.image, "json": json.dumps(about, ensure_ascii=False).encode()}
    if sample.regions is not None:
        members["mp"] = pack_regions(sample.regions)
    return members


def from_members(key: str, members: dict[str, bytes | memoryview]) -> Sample:
    """The inverse of to_members. ValueError names the sample where a member is missing or of another version."""
    missing = {"jpg", "json"} - members.keys()
    if missing:
        raise ValueError(f"sample {key} has no .{sorted(missing)[0]} member, only {sorted(members)}")
    about = json.loads(members["json"])
    if about.get("version") != SAMPLE_VERSION:
        raise ValueError(f"sample {key} is of version {about.get('version')}, this code reads {SAMPLE_VERSION}")
    return Sample(
        key=key,
        image=members["jpg"],
        caption=about["caption"],
        url=about["url"],
        width=about["width"],
        height=about["height"],
        sha256=about["sha256"],
        flags=tuple(about["flags"]),
        regions=unpack_regions(members["mp"]) if "mp" in members else None,
    )


def pack_regions(regions: Regions) -> bytes:
    """msgpack map: version, detector, background, and per array present [dtype, shape, raw little-endian bytes]."""
    packed = {"version": SAMPLE_VERSION, "detector": regions.detector, "background": regions.background}
    for name, (dtype, _) in _ARRAYS.items():
        array = getattr(regions, name)
        if array is not None:
            packed[name] = [dtype, list(array.shape), np.ascontiguousarray(array, dtype=dtype).tobytes()]
    return msgpack.packb(packed)


def unpack_regions(data: bytes | memoryview) -> Regions:
    """The inverse of pack_regions; arrays are read-only."""
    packed = msgpack.unpackb(data)
    version = packed.pop("version", None)
    if version != SAMPLE_VERSION:
        raise ValueError(f"regions are of version {version}, this code reads {SAMPLE_VERSION}")
    detector, background = packed.pop("detector"), packed.pop("background")
    unknown = packed.keys() - _ARRAYS.keys()
    if unknown:
        raise ValueError(f"regions hold unknown arrays {sorted(unknown)}")
    arrays = {}
    for name, (dtype, shape, raw) in packed.items():
        if dtype != _ARRAYS[name][0]:
            raise ValueError(f"regions.{name} is stored as {dtype}, not {_ARRAYS[name][0]}")
        arrays[name] = np.frombuffer(raw, dtype=dtype).reshape(shape)
    return Regions(detector=detector, background=background, **arrays)
