"""Snapshots: Parquet files that hold the rows with status `ok` of all shards of a stage at one point in time.

    ROOT/<dataset>/<stage>/snapshots/<id>.parquet

A training run pins a snapshot, and reads the offsets of its samples from that file only, except for shards from which
samples have since been withdrawn (storage/revised.py). docs/formats.md specifies the file.
"""

import contextlib
import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.digests import BLANK, OWN_SHA256, check_version, write_digest
from storage.manifests import PARQUET, SCHEMA, Header
from storage.object_store import ObjectMissing, ObjectStore, Ranges, StorageUnreachable
from storage.safe_json import parse_json

SNAPSHOT_VERSION = 5
# Columns that are copied from a manifest. The offset and the length come next to each other, so that one range request
# reads an index's columns of a row group.
FROM_MANIFEST = ("row", "offset", "length", "width", "height", "num_regions", "key", "url", "license")
SNAPSHOT_SCHEMA = pa.schema(
    [pa.field("shard", pa.int32(), nullable=False)]
    + [SCHEMA.field(name).with_nullable(name in ("num_regions", "license")) for name in FROM_MANIFEST]
)
_GROUP = 2**17  # rows per row group, which is decoded as a whole


@dataclass(frozen=True)
class Snapshot:
    """All committed shards of a stage at one moment."""

    id: str  # hash of the manifests, and so of every sample
    stage: str
    manifests: tuple[str, ...]  # names of the manifests, such as 00000 or 00000.r2
    ok_rows: int
    random_init: bool | None  # True if a shard's detector had random weights; None if no manifest records it (images)

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(map(shard_of, self.manifests))


def shard_of(manifest: str) -> str:
    """Return the shard of a manifest, given the manifest's name. For example, 00000.r2 belongs to shard 00000."""
    return manifest.partition(".")[0]


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Byte ranges of the S samples of a snapshot, sorted by shard and row. Takes 16 bytes of memory per sample.

    `shards.read_span` decodes a sample from ObjectStore.get_range(tars[shard], offset, length).

    Attributes:
        manifests: name of each tar's manifest; shards without a tar are left out
        tars: path of each tar relative to the root
        tar_sha256: sha256 of each tar, 64 hex digits
        tar_bytes: size of each tar
        shard: uint32 [S], index into `tars`
        offset: int64 [S], bytes
        length: int32 [S], bytes
        path: path of the snapshot's file in `store`
        withdrawn: index -> key of samples withdrawn after the snapshot; they cannot be read (storage/revised.py)
    """

    snapshot: Snapshot
    manifests: tuple[str, ...]
    tars: tuple[str, ...]
    tar_sha256: tuple[str, ...]
    tar_bytes: tuple[int, ...]
    shard: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    store: ObjectStore
    path: str
    withdrawn: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def folder(self) -> str:
        """Folder of the stage, relative to the root."""
        return self.path.rpartition("/snapshots/")[0]

    def urls(self) -> list[str]:
        """Read the URL of each sample, or the file name of an imported image. The list is long, and is not cached."""
        return [url for table in read_columns(self.store, self.path, ["url"]) for url in table["url"].to_pylist()]


def _snapshot(metadata: Mapping) -> Snapshot:
    shards = metadata["shards"]
    lines = "".join(f"{shard['manifest']} {shard['manifest_sha256']}\n" for shard in shards)
    return Snapshot(
        id=hashlib.sha256(lines.encode()).hexdigest()[:16],
        stage=metadata["stage"],
        manifests=tuple(shard["manifest"] for shard in shards),
        ok_rows=sum(shard["rows"] for shard in shards),
        random_init=metadata["random_init"],
    )


def write_snapshot(file: Path, stage: str, shards: Iterable[tuple[Header, pa.Table]]) -> Snapshot:
    """Write the snapshot file of a stage, and return the snapshot.

    `shards`, sorted by name, yields the header and the `ok` rows of each shard. Equal shards give identical files, as
    long as the version of pyarrow is the same.
    """
    random_init, entries = None, []
    with pq.ParquetWriter(
        file,
        SNAPSHOT_SCHEMA,
        use_dictionary=["shard", "license"],
        write_statistics=False,
        write_page_checksum=True,
        **PARQUET,
    ) as writer:
        waiting, rows = [], 0
        for header, table in shards:
            if "random_init" in header.meta:
                random_init = bool(random_init or header.meta["random_init"])
            entries.append(
                {
                    "manifest": header.name,
                    "manifest_sha256": header.sha256,
                    "rows": header.ok_rows,
                    "tar": header.tar and header.tar.rpartition("/")[2],
                    "tar_sha256": header.tar_sha256,
                    "tar_bytes": header.tar_bytes,
                }
            )
            number = pa.array(np.full(len(table), int(header.shard), np.int32))
            columns = [number, *(table[name] for name in FROM_MANIFEST)]
            waiting.append(pa.Table.from_arrays(columns, schema=SNAPSHOT_SCHEMA))
            rows += len(table)
            while rows >= _GROUP:
                joined = pa.concat_tables(waiting)
                writer.write_table(joined.slice(0, _GROUP), row_group_size=_GROUP)
                waiting, rows = [joined.slice(_GROUP)], rows - _GROUP
        if rows:
            writer.write_table(pa.concat_tables(waiting), row_group_size=_GROUP)
        metadata = {"version": SNAPSHOT_VERSION, "stage": stage, "random_init": random_init, "shards": entries}
        text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
        text_sha256 = hashlib.sha256(text.encode()).hexdigest()  # for readers that do not read the whole file
        writer.add_key_value_metadata({"snapshot": text, "sha256": text_sha256, OWN_SHA256: BLANK})
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as data:
        write_digest(data)
    return _snapshot(metadata)


def read_snapshot(store: ObjectStore, path: str) -> tuple[Snapshot, list[dict]]:
    """Read the footer of a snapshot file. Return the snapshot, and the entry of each shard (docs/formats.md).

    Raises ValueError if the file is missing, damaged, of another version, or not at the path where it was written.
    """
    with _open_parquet(store, path) as file:
        return _read_footer(file, store.uri(path), path)


def read_index(store: ObjectStore, path: str) -> ShardIndex:
    """Read the byte ranges of all samples from a snapshot file. Raises the same errors as `read_snapshot`."""
    with _open_parquet(store, path) as file:
        snapshot, shards = _read_footer(file, store.uri(path), path)
        shards = [shard for shard in shards if shard["tar"] is not None]
        offset, length = np.empty(snapshot.ok_rows, np.int64), np.empty(snapshot.ok_rows, np.int32)
        start = 0
        for table in _read_groups(file, store.uri(path), ["offset", "length"]):
            offset[start : start + len(table)] = table["offset"].to_numpy()
            length[start : start + len(table)] = table["length"].to_numpy()
            start += len(table)
    folder = path.rpartition("/snapshots/")[0]
    return ShardIndex(
        snapshot=snapshot,
        manifests=tuple(shard["manifest"] for shard in shards),
        tars=tuple(f"{folder}/{shard['tar']}" for shard in shards),
        tar_sha256=tuple(shard["tar_sha256"] for shard in shards),
        tar_bytes=tuple(shard["tar_bytes"] for shard in shards),
        shard=np.repeat(np.arange(len(shards), dtype=np.uint32), [shard["rows"] for shard in shards]),
        offset=offset,
        length=length,
        store=store,
        path=path,
    )


def read_columns(store: ObjectStore, path: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the given columns of a snapshot file, a table per row group. Raises the same errors as `read_snapshot`."""
    with _open_parquet(store, path) as file:
        yield from _read_groups(file, store.uri(path), columns)


def _read_groups(file: pq.ParquetFile, uri: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    for group in range(file.num_row_groups):
        with _read_errors(uri):
            table = file.read_row_group(group, columns=list(columns), use_threads=False)
        # The checksums cover a page's content, but not the number of rows in its header.
        if len(table) != min(_GROUP, file.metadata.num_rows - group * _GROUP):
            raise ValueError(f"{uri} is damaged: row group {group} has {len(table)} rows; {_HINT}")
        yield table


def _read_footer(file: pq.ParquetFile, uri: str, path: str) -> tuple[Snapshot, list[dict]]:
    footer = file.metadata.metadata or {}
    text = footer.get(b"snapshot", b"")
    if hashlib.sha256(text).hexdigest().encode() != footer.get(b"sha256"):
        raise ValueError(f"{uri} is damaged: its footer has changed since it was written; {_HINT}")
    metadata = parse_json(text, uri, fix=_HINT)
    check_version(metadata.get("version"), SNAPSHOT_VERSION, uri)
    snapshot = _snapshot(metadata)
    if not path.endswith(f"/{snapshot.stage}/snapshots/{snapshot.id}.parquet"):
        raise ValueError(f"{uri} is snapshot {snapshot.id} of {snapshot.stage}: move it back there")
    if file.metadata.num_rows != snapshot.ok_rows or not file.schema_arrow.equals(SNAPSHOT_SCHEMA):
        raise ValueError(f"{uri} is damaged: {file.metadata.num_rows} rows for {snapshot.ok_rows}; {_HINT}")
    return snapshot, metadata["shards"]


_HINT = "put it back as it was, or start another run, which pins a new snapshot"


@contextlib.contextmanager
def _open_parquet(store: ObjectStore, path: str) -> Iterator[pq.ParquetFile]:
    """Context manager that opens a Parquet file of the store. Raises ValueError, naming the file, if reading fails."""
    local = store.local_path(path)
    with _read_errors(store.uri(path)):
        # pre_buffer reads neighbouring columns with one request.
        source = {"source": Ranges(store, path), "pre_buffer": True} if local is None else {"source": local}
        yield pq.ParquetFile(**source, memory_map=local is not None, page_checksum_verification=True)


@contextlib.contextmanager
def _read_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except StorageUnreachable:
        raise
    except (ObjectMissing, FileNotFoundError) as error:
        raise ValueError(f"{uri} is missing; {_HINT}") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{uri} is damaged ({error}); {_HINT}") from error
