"""Files of boxes and features as other projects write them, made from seeds."""

import base64
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
LXMERT = ["img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf", *BOTTOM_UP[3:]]
CLASSES = 8


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """What a detector found in an image; class_probs has the background in column 0."""

    name: str
    width: int
    height: int
    boxes: np.ndarray
    features: np.ndarray
    class_probs: np.ndarray

    def by_name(self, background_last: bool = False) -> dict[str, Any]:
        """Every field of every format; the names of the formats are those of their projects."""
        values = {
            "num_boxes num_bbox": len(self.boxes),
            "features x": self.features,
            "boxes bbox": self.boxes,
            "image_id img_id": self.name,
            "image_w img_w": self.width,
            "image_h img_h": self.height,
            "classes cls_prob": np.roll(self.class_probs, -1, axis=1) if background_last else self.class_probs,
            "objects_id obj_id": self.class_probs[:, 1:].argmax(axis=1),
            "objects_conf obj_conf": self.class_probs[:, 1:].max(axis=1),
            "attrs_id attrs_conf": np.zeros(len(self.boxes)),  # which nobody reads
        }
        return {name: value for names, value in values.items() for name in names.split()}


def image_features(
    name: str, seed: int, size: tuple[int, int] = (192, 128), boxes: int = 5, channels: int = 16
) -> ImageFeatures:
    """size: width and height."""
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(0, 1, (boxes, 2, 2)), axis=1).reshape(boxes, 4) * [*size, *size]
    probs, features = rng.dirichlet(np.full(1 + CLASSES, 0.3), boxes), rng.exponential(1.0, (boxes, channels))
    return ImageFeatures(name, *size, *(array.astype(np.float32) for array in (corners, features, probs)))


def literal(value: bytes) -> str:
    """Return base64 as Python 3 writes str(bytes), with the line ends of base64.encodebytes."""
    return str(base64.encodebytes(base64.b64decode(value)))


def packed(array: np.ndarray) -> dict[bytes, Any]:
    """Return an array as the library msgpack_numpy packs it."""
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": array.shape, b"data": array.tobytes()}


def encoded(fields: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: np.ascontiguousarray(one) for name, one in fields.items() if isinstance(one, np.ndarray)}
    return fields | {name: base64.b64encode(array).decode() for name, array in arrays.items()}


def _fields(
    images: Sequence[ImageFeatures], names: Sequence[str], changes: dict[str, Any] | None, last: bool = False
) -> dict[str, dict[str, Any]]:
    """Fields by image; changes: fields of the last image, ... where it is left out."""
    found = {image.name: image.by_name(last) for image in images}
    found[images[-1].name] |= changes or {}
    return {image: {name: fields[name] for name in names if fields[name] is not ...} for image, fields in found.items()}


def write_tsv(
    file: Path,
    images: Sequence[ImageFeatures],
    columns: Sequence[str] = BOTTOM_UP,
    changes: dict[str, Any] | None = None,
    header: bool = False,
    literal: bool = False,
) -> Path:
    """literal: as Python 3 writes str(bytes)."""
    rows = [columns] if header else []
    for fields in _fields(images, columns, changes).values():
        arrays = {name for name, value in fields.items() if isinstance(value, np.ndarray)}
        rows.append([f"b'{v}'" if literal and name in arrays else str(v) for name, v in encoded(fields).items()])
    file.write_bytes(b"".join("\t".join(row).encode() + b"\r\n" for row in rows))
    return file


def write_json(
    target: Path, images: Sequence[ImageFeatures], changes: dict[str, Any] | None = None, literals: bool = False
) -> Path:
    """A zip or, without the extension, a folder; beside its files are those that macOS copies."""
    texts = {"._hidden.json": b"\x00\x05\x16\x07"}
    for name, fields in _fields(images, [*BOTTOM_UP, "classes"], changes).items():
        arrays = {name for name, value in fields.items() if isinstance(value, np.ndarray)}
        fields = {n: literal(v) if literals and n in arrays else v for n, v in encoded(fields).items()}
        texts[f"{name}.json"] = json.dumps(fields).encode()
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in texts.items():
                archive.writestr(f"frcnn/{name}", text)
        return target
    target.mkdir(exist_ok=True)
    for name, text in texts.items():
        (target / name).write_bytes(text)
    return target


def write_npz(
    folder: Path, images: Sequence[ImageFeatures], changes: dict[str, Any] | None = None, transposed: bool = False
) -> Path:
    """transposed: features [D, N], as OpenVQA's."""
    folder.mkdir()
    for name, fields in _fields(images, ["x", "bbox", "num_bbox", "image_w", "image_h"], changes).items():
        fields |= {"x": fields["x"].T} if transposed else {}
        np.savez_compressed(folder / f"{name}.npz", info=np.array({"objects_id": 1}, object), **fields)
    return folder


def write_lmdb(
    folder: Path,
    images: Sequence[ImageFeatures],
    changes: dict[str, Any] | None = None,
    arrays: bool = True,
    raw: bytes | None = None,
) -> Path:
    """arrays: pickled as such, else as base64. raw: the last image's value."""
    with lmdb.open(str(folder), map_size=2**28) as database, database.begin(write=True) as writing:
        for name, fields in _fields(images, [*BOTTOM_UP, "cls_prob", "obj_id"], changes).items():
            if arrays:
                fields |= {"image_w": np.int64(fields["image_w"])}
            else:
                fields = {n: f.encode() if isinstance(f, str) else f for n, f in encoded(fields).items()}
            writing.put(name.encode(), raw if raw and name == images[-1].name else pickle.dumps(fields))
        writing.put(b"keys", pickle.dumps([image.name.encode() for image in images]))
    return folder


def write_mmf(folder: Path, images: Sequence[ImageFeatures], background: bool = True, spare: int = 0) -> Path:
    """Write an LMDB as mmf's lmdb_conversion.py does: num_boxes says how many rows are boxes; `spare` more follow.

    background: without class probabilities, else those of the foreground alone.
    """
    with lmdb.open(str(folder), map_size=2**28) as database, database.begin(write=True) as writing:
        for image in images:
            probs = image.class_probs[:, 1:]
            arrays = {"features": image.features, "objects": probs.argmax(axis=1), "bbox": image.boxes}
            arrays |= {} if background else {"cls_prob": probs}
            row = {name: np.concatenate([array, array[:1].repeat(spare, axis=0)]) for name, array in arrays.items()}
            row |= {"image_height": image.height, "image_width": image.width, "num_boxes": len(image.boxes)}
            row |= {"feature_path": image.name} | ({"cls_prob": None} if background else {})
            writing.put(image.name.encode(), pickle.dumps(row))
    return folder


def write_uniter(folder: Path, images: Sequence[ImageFeatures], compressed: bool, **changes: Any) -> Path:
    """Write an LMDB as UNITER's convert_imgdir.py does. changes: of the last image's arrays."""
    with lmdb.open(str(folder), map_size=2**28) as database, database.begin(write=True) as writing:
        for image in images:
            corners = image.boxes / [image.width, image.height, image.width, image.height]
            row: dict[str, np.ndarray] = {
                "norm_bb": np.concatenate([corners, corners[:, 2:] - corners[:, :2]], axis=1),
                "features": image.features,
                "conf": image.class_probs[:, 1:].max(axis=1),
                "soft_labels": image.class_probs,
            }
            row |= changes if image is images[-1] else {}
            row = {name: array.astype(np.float16) for name, array in row.items()}
            stream = io.BytesIO()
            np.savez_compressed(stream, **row, allow_pickle=True)
            value = msgpack.packb({name: packed(array) for name, array in row.items()}, use_bin_type=True)
            writing.put(f"{image.name}.npz".encode(), stream.getvalue() if compressed else value)
        writing.put(b"__keys__", json.dumps([f"{image.name}.npz" for image in images]).encode())
    return folder


def write_h5(file: Path, images: Sequence[ImageFeatures], changes: dict[str, Any] | None = None) -> Path:
    """As detectron2 orders classes: the background last."""
    names = ["img_w", "img_h", "boxes", "features", "cls_prob", "obj_id", "obj_conf"]
    with h5py.File(file, "w") as stream:
        for image, fields in _fields(images, names, changes, last=True).items():
            for name, value in fields.items():
                stream[f"{image}/{name}"] = value
    return file
