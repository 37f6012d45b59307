"""A snapshot: the ok rows of all shards that a stage had at one moment, compacted into one Parquet file.

    ROOT/<dataset>/<stage>/snapshots/<id>.parquet

A training pins one and reads the offsets of its samples from that file alone. docs/formats.md is the contract.
"""

import contextlib
import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.digests import BLANK, OWN_SHA256, check_version, write_digest
from storage.manifests import Header
from storage.object_store import ObjectMissing, ObjectStore, Ranges, StorageUnreachable
from storage.safe_json import parse_json

SNAPSHOT_VERSION = 5
SNAPSHOT_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        # Neighbours, so that one range request gets the columns of an index from a row group.
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("num_regions", pa.int32()),
        pa.field("key", pa.string(), nullable=False),
        pa.field("url", pa.string(), nullable=False),
        pa.field("license", pa.string()),
    ]
)
FROM_MANIFEST = SNAPSHOT_SCHEMA.names[1:]  # columns of a manifest
_GROUP = 2**17  # rows of a row group, which are decoded together


@dataclass(frozen=True)
class Snapshot:
    """All shards of a stage at one moment; id is a hash of the manifests, and so of every sample.

    manifests: the name of each, 00000 or 00000.r2. random_init: whether the detector of one of them had random weights;
    None where no manifest tells, as of images.
    """

    id: str
    stage: str
    manifests: tuple[str, ...]
    ok_rows: int
    random_init: bool | None

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(map(shard_of, self.manifests))


def shard_of(manifest: str) -> str:
    """The shard of a manifest of this name."""
    return manifest.partition(".")[0]


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The spans of the S samples of a snapshot, by shard and then in the order of the rows: 16 bytes a sample.

    manifests   the name of the manifest of each tar; shards without a tar are left out
    tars        path of each tar relative to the root
    tar_sha256  of each tar, 64 hex
    tar_bytes   size of each tar
    shard       uint32 [S]  which of `tars`
    offset      int64  [S]  bytes
    length      int32  [S]  bytes: ObjectStore.get_range(tars[shard], offset, length) -> shards.read_span
    store, path the snapshot's file
    withdrawn   number -> key of the samples that were withdrawn since; they cannot be read (storage/revised.py)
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
        """That of the stage, relative to the root."""
        return self.path.rpartition("/snapshots/")[0]

    def urls(self) -> list[str]:
        """The URL of each sample (of imported images, the file name); a long list, so it is read at each call."""
        return [url for table in read_columns(self.store, self.path, ["url"]) for url in table["url"].to_pylist()]


def _metadata(stage: str, headers: Sequence[Header]) -> dict:
    """What the footer of a snapshot says: docs/formats.md."""
    recorded = [header.meta["random_init"] for header in headers if "random_init" in header.meta]
    return {
        "version": SNAPSHOT_VERSION,
        "stage": stage,
        "random_init": any(recorded) if recorded else None,
        "shards": [
            {
                "manifest": header.name,
                "manifest_sha256": header.sha256,
                "rows": header.ok_rows,
                "tar": header.tar and header.tar.rpartition("/")[2],
                "tar_sha256": header.tar_sha256,
                "tar_bytes": header.tar_bytes,
            }
            for header in headers
        ],
    }


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
    """Write a snapshot of these shards, each with its ok rows (columns of a manifest), sorted by shard.

    The same shards give the same bytes under one version of pyarrow, which writes its name into them.
    """
    headers = []
    with pq.ParquetWriter(
        file,
        SNAPSHOT_SCHEMA,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        use_dictionary=["shard", "license"],
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        waiting, rows = [], 0
        for header, table in shards:
            # Of the meta, kilobytes a shard, what _metadata needs.
            meta = {name: value for name, value in header.meta.items() if name == "random_init"}
            headers.append(replace(header, meta=meta))
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
        metadata = _metadata(stage, headers)
        text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
        of_text = hashlib.sha256(text.encode()).hexdigest()  # for readers of parts of the file
        writer.add_key_value_metadata({"snapshot": text, "sha256": of_text, OWN_SHA256: BLANK})
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as data:
        write_digest(data)
    return _snapshot(metadata)


def read_snapshot(store: ObjectStore, path: str) -> tuple[Snapshot, list[dict]]:
    """The footer of a snapshot: the snapshot, and its shards as docs/formats.md has them.

    ValueError names a file that is missing, damaged, of another version or under another name.
    """
    with _open_parquet(store, path) as file:
        return _footer(file, store.uri(path), path)


def read_index(store: ObjectStore, path: str) -> ShardIndex:
    """The spans of all samples of a snapshot, from its file alone; errors as of read_snapshot."""
    with _open_parquet(store, path) as file:
        snapshot, shards = _footer(file, store.uri(path), path)
        shards = [shard for shard in shards if shard["tar"] is not None]
        offset, length = np.empty(snapshot.ok_rows, np.int64), np.empty(snapshot.ok_rows, np.int32)
        start = 0
        for table in _groups(file, store.uri(path), ["offset", "length"]):
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
    """These columns of a snapshot, a row group at a time; errors as of read_snapshot."""
    with _open_parquet(store, path) as file:
        yield from _groups(file, store.uri(path), columns)


def _groups(file: pq.ParquetFile, where: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    for group in range(file.num_row_groups):
        with _named(where):
            table = file.read_row_group(group, columns=list(columns), use_threads=False)
        # The checksums cover a page's content, but not the number of rows in its header.
        if len(table) != min(_GROUP, file.metadata.num_rows - group * _GROUP):
            raise ValueError(f"{where} is damaged: row group {group} has {len(table)} rows; {_WAY_OUT}")
        yield table


def _footer(file: pq.ParquetFile, where: str, path: str) -> tuple[Snapshot, list[dict]]:
    footer = file.metadata.metadata or {}
    text = footer.get(b"snapshot", b"")
    if hashlib.sha256(text).hexdigest().encode() != footer.get(b"sha256"):
        raise ValueError(f"{where} is damaged: its footer is not what was written; {_WAY_OUT}")
    metadata = parse_json(text, where, fix=_WAY_OUT)
    check_version(metadata.get("version"), SNAPSHOT_VERSION, where)
    snapshot = _snapshot(metadata)
    if not path.endswith(f"/{snapshot.stage}/snapshots/{snapshot.id}.parquet"):
        raise ValueError(f"{where} is snapshot {snapshot.id} of {snapshot.stage}: move it back there")
    if file.metadata.num_rows != snapshot.ok_rows or not file.schema_arrow.equals(SNAPSHOT_SCHEMA):
        raise ValueError(f"{where} is damaged: {file.metadata.num_rows} rows for {snapshot.ok_rows}; {_WAY_OUT}")
    return snapshot, metadata["shards"]


_WAY_OUT = "put it back as it was, or start another run, which pins a new one"


@contextlib.contextmanager
def _open_parquet(store: ObjectStore, path: str) -> Iterator[pq.ParquetFile]:
    """A Parquet file of the storage; what goes wrong while it is open is a ValueError that names it."""
    local = store.local_path(path)
    with _named(store.uri(path)):
        # pre_buffer: neighbouring columns in one request.
        source = {"source": Ranges(store, path), "pre_buffer": True} if local is None else {"source": local}
        yield pq.ParquetFile(**source, memory_map=local is not None, page_checksum_verification=True)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except StorageUnreachable:
        raise
    except (ObjectMissing, FileNotFoundError) as error:
        raise ValueError(f"{where} is gone; {_WAY_OUT}") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is damaged ({error}); {_WAY_OUT}") from error
