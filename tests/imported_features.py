"""Files of boxes and features as other projects write them, made from seeds."""

import base64
import csv
import functools
import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import lmdb
import msgpack
import numpy as np

BOTTOM_UP = ["image_id", "image_w", "image_h", "num_boxes", "boxes", "features"]
LXMERT = ["img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf"]
LXMERT += ["num_boxes", "boxes", "features"]
CLASSES, ATTRIBUTES = 8, 3


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """What a detector found in an image; class_probs has the background in column 0."""

    name: str
    width: int
    height: int
    boxes: np.ndarray
    features: np.ndarray
    class_probs: np.ndarray
    attribute_probs: np.ndarray

    def by_name(self, background_last: bool = False) -> dict[str, Any]:
        """Every field of every format; the names of the formats are those of their projects."""
        count, shift = len(self.boxes), -1 if background_last else 0
        classes, attributes = self.class_probs[:, 1:], self.attribute_probs[:, 1:]
        found = {"num_boxes": count, "boxes": self.boxes, "features": self.features}
        for names, value in (
            (("image_id", "img_id"), self.name),
            (("image_w", "img_w"), self.width),
            (("image_h", "img_h"), self.height),
            (("classes", "cls_prob"), np.roll(self.class_probs, shift, axis=1)),
            (("attrs",), np.roll(self.attribute_probs, shift, axis=1)),
            (("objects_id", "obj_id"), classes.argmax(axis=1)),
            (("objects_conf", "obj_conf"), classes.max(axis=1)),
            (("attrs_id", "attr_id"), attributes.argmax(axis=1)),
            (("attrs_conf", "attr_conf"), attributes.max(axis=1)),
        ):
            found |= dict.fromkeys(names, value)
        return found


def image_features(
    name: str, seed: int, size: tuple[int, int] = (192, 128), boxes: int = 5, channels: int = 16
) -> ImageFeatures:
    """size: width and height."""
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(0, 1, (boxes, 2, 2)), axis=1).reshape(boxes, 4) * [*size, *size]
    probs = [rng.dirichlet(np.full(1 + count, 0.3), boxes) for count in (CLASSES, ATTRIBUTES)]
    features = rng.exponential(1.0, (boxes, channels))
    return ImageFeatures(name, *size, *(array.astype(np.float32) for array in (corners, features, *probs)))


def as_base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def encoded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: as_base64(one) if isinstance(one, np.ndarray) else one for name, one in fields.items()}


def write_tsv(
    file: Path,
    images: Sequence[ImageFeatures],
    columns: Sequence[str] = BOTTOM_UP,
    changes: dict[str, Any] | None = None,
    header: bool = False,
) -> Path:
    """changes: fields of the last image."""
    with open(file, "w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, delimiter="\t", extrasaction="ignore")
        if header:
            writer.writeheader()
        for image in images:
            changed = (changes or {}) if image is images[-1] else {}
            writer.writerow(encoded(image.by_name() | changed))
    return file


def write_json(
    target: Path,
    images: Sequence[ImageFeatures],
    changes: dict[str, Any] | None = None,
    packed: int = zipfile.ZIP_STORED,
) -> Path:
    """A zip or, without the extension, a folder; changes: fields of the last image, ... where it is left out."""
    texts = {}
    for image in images:
        fields = image.by_name() | ((changes or {}) if image is images[-1] else {})
        names = ["image_id", "image_w", "image_h", "num_boxes", "boxes", "classes", "attrs", "features"]
        texts[f"{image.name}.json"] = json.dumps(encoded({n: fields[n] for n in names if fields[n] is not ...}))
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w", packed) as archive:
            for name, text in texts.items():
                archive.writestr(f"frcnn/{name}", text)
        return target
    target.mkdir(exist_ok=True)
    for name, text in texts.items():
        (target / name).write_text(text)
    return target


def write_lmdb(
    folder: Path,
    images: Sequence[ImageFeatures],
    changes: dict[str, Any] | None = None,
    arrays: bool = True,
    protocol: int = 4,
    raw: bytes | None = None,
) -> Path:
    """arrays: pickled as such, else as base64. raw: the last image's value."""
    with lmdb.open(str(folder), map_size=2**26) as database, database.begin(write=True) as writing:
        for image in images:
            last = image is images[-1]
            fields = image.by_name() | ((changes or {}) if last else {})
            names = ["image_id", "image_w", "image_h", "num_boxes", "boxes", "features", "cls_prob"]
            fields = {name: fields[name] for name in names if fields[name] is not ...}
            if arrays:
                fields["image_w"] = np.int64(fields["image_w"])
            else:
                fields = {n: f.encode() if isinstance(f, str) else f for n, f in encoded(fields).items()}
            value = pickle.dumps(fields, protocol)
            writing.put(image.name.encode(), raw if last and raw else value)
        writing.put(b"keys", pickle.dumps([image.name.encode() for image in images]))
    return folder


TENSORPACK = "features,class_probs,boxes,num_boxes,image_h,image_w,image_id,caption"


def write_tensorpack(file: Path, images: Sequence[ImageFeatures], as_msgpack: bool = False, raw: bytes = b"") -> Path:
    """A file of lists, as tensorpack's LMDBSerializer writes it: pickled or msgpack. raw: the last image's value."""

    def packed(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            kind = value.dtype.str
            return {b"nd": True, b"type": kind, b"kind": b"", b"shape": value.shape, b"data": value.tobytes()}
        assert isinstance(value, np.integer), value
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}

    write = functools.partial(msgpack.packb, default=packed) if as_msgpack else pickle.dumps
    with lmdb.open(str(file), map_size=2**26, subdir=False) as database, database.begin(write=True) as writing:
        keys = [f"{number:08}".encode() for number in range(len(images))]
        for key, image in zip(keys, images, strict=True):
            fields = image.by_name() | {"class_probs": image.class_probs, "caption": "a caption"}
            fields["image_w"] = np.int64(image.width)
            value = write([fields[name] for name in TENSORPACK.split(",")])
            writing.put(key, raw if raw and image is images[-1] else value)
        writing.put(b"__keys__", write(keys))
    return file


def write_h5(file: Path, images: Sequence[ImageFeatures], changes: dict[str, Any] | None = None) -> Path:
    """As detectron2 orders classes: the background last."""
    with h5py.File(file, "w") as stream:
        for image in images:
            fields = image.by_name(background_last=True) | ((changes or {}) if image is images[-1] else {})
            names = ["img_w", "img_h", "boxes", "features", "cls_prob", "obj_id", "obj_conf", "attr_id", "attr_conf"]
            for name in names:
                if fields[name] is not ...:
                    stream[f"{image.name}/{name}"] = fields[name]
    return file


def hostile_pickle() -> bytes:
    """A dict whose value would call os.system when it is unpickled."""

    class Call:
        def __reduce__(self) -> tuple:
            return eval, ("1",)

    stream = io.BytesIO()
    pickle.dump({"features": Call()}, stream)
    return stream.getvalue()
