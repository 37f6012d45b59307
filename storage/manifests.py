"""The manifest of one shard: its fields, and how it is encoded as Parquet.

docs/formats.md specifies the layout. storage/catalog commits and reads manifests.
"""

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.digests import BLANK, OWN_SHA256, write_digest
from storage.shards import SHARD_VERSION, Span

MANIFEST_VERSION = 5
OK = "ok"
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("url", pa.string(), nullable=False),
        # Null if the status is not ok; num_regions is also null in stages without regions.
        pa.field("offset", pa.int64()),
        pa.field("length", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("num_regions", pa.int32()),
        pa.field("sha256", pa.string()),  # of the image as it was downloaded
        pa.field("license", pa.string()),  # null if the list has none
    ]
)
# Written out, so that other defaults of pyarrow do not change the files. Snapshots use them as well.
PARQUET = {"version": "2.6", "data_page_version": "1.0", "compression": "zstd", "compression_level": 3}


@dataclass(frozen=True)
class Row:
    """The outcome of one input row, such as a line of a caption list."""

    row: int
    key: str
    status: str
    detail: str = ""  # explains the status
    url: str = ""
    license: str | None = None  # as in the caption list


@dataclass(frozen=True)
class Header:
    """The fields of a manifest that describe its shard as a whole.

    Attributes:
        tar: path of the tar relative to the root; None if no row is ok
        tar_sha256: sha256 of the tar, 64 hex digits; "" if there is no tar
        tar_bytes: size of the tar; 0 if there is no tar
        content: sha256 of the tar before any sample was withdrawn; if a revision changes it, the shards of other stages
            that were made from this shard must be made again
        statuses: number of rows with each status
        meta: how the stage made the shard: "source", "config", "config_hash", "random_init", ...
        sha256: sha256 of the manifest's bytes, 64 hex digits
        revision: number of the revision, starting at 1; rows that are requested again or withdrawn make a new revision
    """

    shard: str
    stage: str
    tar: str | None
    tar_sha256: str
    tar_bytes: int
    content: str
    statuses: dict[str, int]
    meta: dict
    sha256: str
    revision: int = field(default=1, kw_only=True)

    @property
    def name(self) -> str:
        """Name of the manifest's file without its extension: 00002, then 00002.r2, 00002.r3, ..."""
        return self.shard if self.revision == 1 else f"{self.shard}.r{self.revision}"

    @property
    def ok_rows(self) -> int:
        return self.statuses.get(OK, 0)

    def as_source(self) -> dict[str, str]:
        """Return a reference to this shard, to be recorded as meta["source"] of the shards that are made from it."""
        return {"stage": self.stage, "shard": self.shard, "manifest_sha256": self.sha256, "content": self.content}


@dataclass(frozen=True)
class Manifest(Header):
    """The header and the rows of a committed shard. `table` has only the columns that were requested."""

    table: pa.Table

    def rows(self) -> list[Row]:
        """Return the rows as Row objects, to be passed to `commit_shard`."""
        names = [field.name for field in fields(Row)]
        return [Row(**line) for line in self.table.select(names).to_pylist()]

    def ok(self) -> pa.Table:
        """Return the rows whose status is ok. These are the rows with a sample in the tar."""
        return self.table.filter(pc.equal(self.table["status"], OK))


def manifest_bytes(rows: Sequence[Row], spans: Sequence[Span], facts: Sequence[dict], metadata: dict) -> bytes:
    """Encode a manifest as bytes. Equal arguments give equal bytes, as long as the version of pyarrow is the same.

    Args:
        spans: for each ok row, the position of its sample in the tar
        facts: for each ok row, its width, height, num_regions (or None) and sha256
        metadata: the other fields of the header: stage, shard, tar, tar_sha256, tar_bytes, content and meta
    """
    header = {
        **metadata,
        "version": MANIFEST_VERSION,
        "shard_version": SHARD_VERSION,
        "statuses": dict(sorted(Counter(row.status for row in rows).items())),
    }
    ok = ({"offset": span.offset, "length": span.length, **fact} for span, fact in zip(spans, facts, strict=True))
    lines = [asdict(row) | (next(ok) if row.status == OK else {}) for row in rows]
    return table_bytes(pa.Table.from_pylist(lines, schema=SCHEMA), header)


def table_bytes(table: pa.Table, header: dict) -> bytes:
    """Encode a manifest as bytes. `table` holds its rows, in the columns of SCHEMA."""
    text = json.dumps(header, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    sink = io.BytesIO()
    dictionaries = ["status", "detail", "license"]
    with pq.ParquetWriter(sink, SCHEMA, use_dictionary=dictionaries, write_statistics=True, **PARQUET) as writer:
        writer.write_table(table, row_group_size=max(1, len(table)))
        writer.add_key_value_metadata({"manifest": text, OWN_SHA256: BLANK})
    data = bytearray(sink.getvalue())
    write_digest(data)
    return bytes(data)


def parse_parquet(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table of a Parquet file in memory, with these columns (default: all). Starts no threads.

    Arrow's threads can abort a process that ends soon after: https://github.com/apache/arrow/issues/34314
    """
    file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
    return file.read(columns and list(columns), use_threads=False)
