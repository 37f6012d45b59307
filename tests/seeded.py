"""Samples that depend on their seed alone: on no library's random numbers and no library's JPEG encoder."""

import base64
import contextlib
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage.sample
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.digests import BLANK, OWN_SHA256, write_digest
from storage.manifests import Row
from storage.object_store import ObjectStore
from storage.runs import CHECKPOINT_VERSION, file_hash, json_with_digest
from storage.sample import Regions, Sample, sample_key

# A grey image of 16 x 8 pixels.
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDACgcHiMeGSgjISMtKygwPGRBPDc3PHtYXUlkkYCZlo+AjIqgtObDoKrarYqMyP/L2u71////m8H////6"
    "/+b9//j/wAALCAAIABABAREA/8QAFQABAQAAAAAAAAAAAAAAAAAABAX/xAAfEAABBAAHAAAAAAAAAAAAAAADAAECBBEUIjEycfD/2gAIAQEAAD8A"
    "NVFsqBiZWpIjc30w7f2K/9k="
)
DETECTOR = "0123456789ab"
REGIONS = f"regions/{DETECTOR}"


def seeded_fractions(seed: str, *shape: int) -> np.ndarray:
    """float32 of this shape, multiples of 1/256 in [0, 1): exact in every format that we store."""
    raw = hashlib.shake_256(seed.encode()).digest(int(np.prod(shape)))
    return np.frombuffer(raw, np.uint8).reshape(shape).astype(np.float32) / 256


def seeded_regions(seed: int, count: int, everything: bool = False) -> Regions:
    """`count` regions in an image of 16 x 8 pixels, 5 classes; everything: with attributes and features too."""
    corner = seeded_fractions(f"corner {seed}", count, 2) * np.float32([8, 4])
    side = np.float32([8, 4]) * (1 + seeded_fractions(f"side {seed}", count, 2)) / 2
    regions = Regions(
        boxes=np.concatenate([corner, corner + side], axis=1),
        scores=np.sort(seeded_fractions(f"score {seed}", count))[::-1],
        labels=np.arange(count, dtype=np.int32) % 5 + 1,
        detector=DETECTOR,
        class_probs=seeded_fractions(f"class {seed}", count, 6).astype(np.float16),
    )
    if not everything:
        return regions
    return dataclasses.replace(
        regions,
        background=5,
        labels=regions.labels % 5,
        attributes=np.arange(count, dtype=np.int32)[::-1] * 7,
        attribute_scores=seeded_fractions(f"attribute {seed}", count),
        features=seeded_fractions(f"feature {seed}", count, 3).astype(np.float16),
    )


def seeded_sample(seed: int, regions: Regions | None = None) -> Sample:
    caption, url = f"caption {seed}: a café, naïve \N{SNOWMAN}", f"http://example.org/images/{seed:06d}.jpg"
    return Sample(
        key=sample_key(url, caption),
        image=JPEG + hashlib.shake_256(f"image {seed}".encode()).digest(seed % 700),  # what follows EOI is ignored
        caption=caption,
        url=url,
        width=16,
        height=8,
        sha256=hashlib.sha256(f"web {seed}".encode()).hexdigest(),
        flags=("exif_rotated", "resized")[: seed % 3],
        regions=regions,
    )


@contextlib.contextmanager
def another_writer() -> Iterator[None]:
    """Shards are written meanwhile as by a program that checks nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.sample, "check_sample", lambda sample: None)
        yield


def shard_of(number: int, regions: bool = False) -> tuple[list[Sample], list[Row]]:
    """Six rows, of which every third failed, and the samples of the others."""
    samples, rows = [], []
    for i in range(6 * number, 6 * number + 6):
        sample = seeded_sample(i, seeded_regions(i, 2 + i % 3) if regions else None)
        if i % 3 == 1:
            rows.append(Row(i, sample.key, "http_404", f"answer {i}", sample.url))
        else:
            rows.append(Row(i, sample.key, "ok", "", sample.url))
            samples.append(sample)
    return samples, rows


def commit(catalog: Catalog, number: int, stage: str = "images", **meta: object) -> bool:
    """Commit shard `number`, its rows and samples those of shard_of; whether it was the first."""
    return commit_shard(catalog, stage, f"{number:05d}", *shard_of(number, regions=stage != "images"), meta)


def detect(catalog: Catalog, number: int) -> bool:
    return commit(catalog, number, REGIONS, source=catalog.manifest("images", f"{number:05d}").as_source())


def as_dict(sample: Sample) -> dict:
    """All that a sample says, for comparison with ==: arrays as (dtype, shape, bytes)."""

    def plain(value: object) -> object:
        return (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value

    return dataclasses.asdict(sample, dict_factory=lambda items: {name: plain(value) for name, value in items})


def sealed_parquet(table: pa.Table, metadata: dict[str, str]) -> bytes:
    """The file of these rows and these words in its footer, with its own digest: what a wrong writer would commit."""
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**metadata, OWN_SHA256: BLANK}), sink)
    data = bytearray(sink.getvalue())
    write_digest(data)
    return bytes(data)


def put_checkpoint(store: ObjectStore, folder: str, state: dict, files: dict[str, bytes] | None = None) -> None:
    for name, data in (files or {}).items():
        store.put(f"{folder}/{name}", data)
    hashes = {name: file_hash([data]) for name, data in (files or {}).items()}
    metadata = {"version": CHECKPOINT_VERSION, "step": int(folder[-7:])}
    store.put(f"{folder}/state.json", json_with_digest(metadata | state | {"files": hashes}))


def reseal(folder: Path) -> None:
    """As if the files that are in a checkpoint's folder now had been written so."""
    state = json.loads((folder / "state.json").read_text())
    hashes = {file.name: file_hash([file.read_bytes()]) for file in folder.iterdir() if file.name != "state.json"}
    (folder / "state.json").write_bytes(json_with_digest(state | {"files": hashes}))
