"""What is committed: one manifest per shard and stage. Visible means: has a manifest.

    ROOT/<dataset>/<stage>/<shard>.parquet           the manifest: one row per input row, ok or why not
    ROOT/<dataset>/<stage>/<shard>-<12 hex>.tar      the samples of its ok rows, named by content

A stage is `images` or `regions/<detector id>`. The tar goes first, the manifest last and only where there is none, so
that a reader never sees half a shard and two writers never mix. Readers never look for tars: the manifest names its
own. The layout is a contract, docs/formats.md. `python -m storage.catalog status ROOT` prints what there is.
"""

import argparse
import hashlib
import io
import json
import re
import sys
import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.objects import ObjectMissing, Objects, StorageUnreachable, open_objects
from storage.sample import Sample
from storage.shards import SHARD_VERSION, read_shard, write_shard

MANIFEST_VERSION = 1
OK = "ok"
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("url", pa.string(), nullable=False),
        # Null where the status is not ok; num_regions also where the stage has no regions.
        pa.field("offset", pa.int64()),
        pa.field("length", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("num_regions", pa.int32()),
    ]
)
_STAGE = re.compile(r"images|regions/[A-Za-z0-9][A-Za-z0-9_.-]*")
_SHARD = re.compile(r"\d{5}")
_Read = TypeVar("_Read")
_READERS = 16  # manifests fetched at a time: each is small, and S3 answers in tens of milliseconds


@dataclass(frozen=True)
class Row:
    """What became of one input row; detail says more where the status is not enough."""

    row: int
    key: str
    status: str
    detail: str = ""
    url: str = ""


@dataclass(frozen=True)
class Header:
    """What a manifest says of its shard as a whole.

    tar         path of the tar relative to the root; None where no row is ok
    tar_sha256  of the tar, 64 hex; "" where there is none. tar_bytes its size
    statuses    rows by status
    meta        what the stage recorded: source, config, config_hash, "untrained", ...
    sha256      of the manifest's own bytes, 64 hex
    """

    shard: str
    stage: str
    tar: str | None
    tar_sha256: str
    tar_bytes: int
    statuses: dict[str, int]
    meta: dict
    sha256: str

    @property
    def ok_rows(self) -> int:
        return self.statuses.get(OK, 0)

    def as_source(self) -> dict[str, str]:
        """What a stage that read this shard records as meta["source"]: `Catalog.pending` looks for it."""
        return {"stage": self.stage, "shard": self.shard, "manifest_sha256": self.sha256}


@dataclass(frozen=True)
class Manifest(Header):
    """One committed shard: its header, and its rows as a table (SCHEMA)."""

    table: pa.Table


@dataclass(frozen=True)
class Snapshot:
    """All shards of a stage at one moment; id is a hash of what the manifests say, so of every sample."""

    id: str
    stage: str
    shards: tuple[str, ...]
    ok_rows: int


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where the S samples of a snapshot lie, by shard and then in the order of the rows: 14 bytes a sample.

    tars    path of each tar relative to the root; shards without a tar are left out
    shard   uint16 [S]  (uint32 above 65,536 tars) which of `tars`
    offset  int64  [S]  bytes
    length  int32  [S]  bytes: Objects.get_range(tars[shard], offset, length) -> shards.read_span
    """

    snapshot: Snapshot
    tars: tuple[str, ...]
    shard: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    _catalog: "Catalog"

    def __len__(self) -> int:
        return len(self.offset)

    def keys(self) -> list[str]:
        """The key of each sample; read now, for they take more memory than all the rest."""
        return self._strings("key")

    def urls(self) -> list[str]:
        """The URL of each sample (of imported images, the file name); read now, as keys are."""
        return self._strings("url")

    def _strings(self, column: str) -> list[str]:
        values = []
        for table in self._catalog.columns(self.snapshot.stage, ["status", column], self.snapshot.shards):
            values += _ok_rows(table).column(column).to_pylist()
        return values


class Catalog:
    """The committed shards of one dataset."""

    def __init__(self, objects: Objects, dataset: str):
        if not dataset or "/" in dataset or dataset == "runs":
            raise ValueError(f"{dataset!r} cannot be a dataset: it is one folder of the root, and runs/ is taken")
        self.objects = objects
        self.dataset = dataset

    def commit(self, stage: str, shard: str, samples: Iterable[Sample], rows: Sequence[Row], meta: dict) -> bool:
        """Write one shard; False, and nothing changed, where it was committed already or another writer was first.

        rows hold every input row of the shard once, in ascending order; samples are those of the ok rows, in the same
        order. ValueError names the row where that does not hold, and then nothing becomes visible.
        """
        path = self._manifest_path(stage, shard)
        if self.objects.exists(path):
            return False
        where = self.objects.where(path)
        _check_rows(rows, where)
        recorded = _as_json(meta, where)
        facts = []  # of each sample as it passes: width, height, number of regions
        with tempfile.TemporaryDirectory(prefix="commit-") as folder:
            file = Path(folder) / f"{shard}.tar"
            spans = write_shard(_matched(samples, rows, stage, where, facts), file)
            tar, tar_sha256, tar_bytes = None, "", 0
            if spans:
                tar_sha256, tar_bytes = _sha256_of(file), file.stat().st_size
                tar = f"{shard}-{tar_sha256[:12]}.tar"
                if not self.objects.exists(self._path(stage, tar)):  # left by a writer that died before its manifest
                    self.objects.put(self._path(stage, tar), file)
        header = {
            "version": MANIFEST_VERSION,
            "shard_version": SHARD_VERSION,
            "stage": stage,
            "shard": shard,
            "tar": tar,
            "tar_sha256": tar_sha256,
            "tar_bytes": tar_bytes,
            "statuses": dict(sorted(Counter(row.status for row in rows).items())),
            "meta": recorded,
        }
        ok = iter([(span.offset, span.length, *fact) for span, fact in zip(spans, facts, strict=True)])
        table = _table(
            [(r.row, r.key, r.status, r.detail, r.url, *(next(ok) if r.status == OK else _NULLS)) for r in rows]
        )
        if self.objects.put(path, _to_parquet(table, header), if_absent=True):
            return True
        # The winner's manifest stands for good, so a tar that it does not name will never be named.
        if tar is not None and self.manifest(stage, shard).tar != self._path(stage, tar):
            self.objects.delete(self._path(stage, tar))
        return False

    def shards(self, stage: str) -> list[str]:
        """The committed shards, sorted; one listing."""
        prefix = self._path(stage, "")
        names = (info.path.removeprefix(prefix) for info in self.objects.list(prefix))
        return [name.removesuffix(".parquet") for name in names if re.fullmatch(r"\d{5}\.parquet", name)]

    def manifest(self, stage: str, shard: str) -> Manifest:
        """The manifest of one shard; ObjectMissing where it is not committed."""
        data, header = self._read_header(stage, shard)
        table = pq.read_table(io.BytesIO(data)).replace_schema_metadata(None)
        if not table.schema.equals(SCHEMA):
            raise ValueError(f"{self._where(stage, shard)} has columns {table.schema.names}, not {SCHEMA.names}")
        return Manifest(**vars(header), table=table)

    def headers(self, stage: str, shards: Sequence[str] | None = None) -> dict[str, Header]:
        """What the manifests say of their shards as a whole, some fetched at a time: of all shards, or of these."""
        shards = self.shards(stage) if shards is None else shards
        found = _each(lambda shard: self._read_header(stage, shard)[1], shards)
        return dict(zip(shards, found, strict=True))

    def columns(self, stage: str, columns: Sequence[str], shards: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """These columns of the manifests, shard by shard, some fetched at a time: of all shards, or of these."""

        def load(shard: str) -> pa.Table:
            return pq.read_table(io.BytesIO(self._bytes(stage, shard)), columns=list(columns), use_threads=False)

        return _each(load, self.shards(stage) if shards is None else shards)

    def read(self, stage: str, shard: str) -> Iterator[Sample]:
        """The samples of a committed shard, in the order of its rows.

        ValueError, before the first of them, where the tar is not the one that was committed.
        """
        manifest = self.manifest(stage, shard)
        if manifest.tar is None:
            return iter(())
        where = self.objects.where(manifest.tar)
        file = self.objects.local_path(manifest.tar)
        try:
            source = self.objects.get(manifest.tar) if file is None else file
            sha256 = hashlib.sha256(source).hexdigest() if file is None else _sha256_of(file)
        except (ObjectMissing, FileNotFoundError) as error:
            raise ValueError(f"{where} is gone; {self._redo(stage, shard)}") from error
        if sha256 != manifest.tar_sha256:
            raise ValueError(f"{where} is damaged: its sha256 is {sha256[:12]}...; {self._redo(stage, shard)}")
        return read_shard(source, where)

    def pending(self, source: str, target: str) -> list[str]:
        """The shards committed in `source` that `target` has not yet: what work is left. Reads no tar.

        ValueError names both manifests where a target was made from another source than the one that stands there.
        """
        done = set(self.shards(target))
        pending, both = [], []
        for shard in self.shards(source):
            (both if shard in done else pending).append(shard)
        sources = _each(lambda shard: hashlib.sha256(self._bytes(source, shard)).hexdigest(), both)
        headers = self.headers(target, both).values()
        for shard, sha256, header in zip(both, sources, headers, strict=True):
            wanted = {"stage": source, "shard": shard, "manifest_sha256": sha256}
            found = header.meta.get("source")
            if found != wanted:
                raise ValueError(
                    f"{self._where(target, shard)} was made from {found}, not from {self._where(source, shard)} as it "
                    f"is now (sha256 {sha256}); {self._redo(target, shard)}"
                )
        return pending

    def snapshot(self, stage: str) -> Snapshot:
        """All that is committed now."""
        shards = self.shards(stage)
        return _snapshot(stage, shards, self.headers(stage, shards).values())

    def counts(self, stage: str) -> dict[str, int]:
        """Rows by status, over all shards."""
        total = Counter()
        for header in self.headers(stage).values():
            total.update(header.statuses)
        return dict(sorted(total.items()))

    def index(self, stage: str, shards: Sequence[str] | None = None) -> ShardIndex:
        """Where every sample lies, from the manifests alone: of all that is committed now, or of these shards."""
        shards = self.shards(stage) if shards is None else sorted(shards)
        wide = len(shards) > 2**16
        # array.array grows in place; lists of numpy arrays would need twice the memory while they are joined.
        numbers, offsets, lengths = array("I" if wide else "H"), array("q"), array("i")
        tars, headers = [], []

        def load(shard: str) -> tuple[Header, np.ndarray, np.ndarray]:
            data, header = self._read_header(stage, shard)
            table = _ok_rows(pq.read_table(io.BytesIO(data), columns=["status", "offset", "length"], use_threads=False))
            return header, table["offset"].to_numpy(), table["length"].to_numpy()

        for header, offset, length in _each(load, shards):
            headers.append(header)
            if header.tar is not None:
                numbers.frombytes(np.full(len(offset), len(tars), dtype=numbers.typecode).tobytes())
                offsets.frombytes(offset.astype(np.int64).tobytes())
                lengths.frombytes(length.astype(np.int32).tobytes())
                tars.append(header.tar)
        return ShardIndex(
            snapshot=_snapshot(stage, shards, headers),
            tars=tuple(tars),
            shard=np.frombuffer(numbers, dtype=np.uint32 if wide else np.uint16),
            offset=np.frombuffer(offsets, dtype=np.int64),
            length=np.frombuffer(lengths, dtype=np.int32),
            _catalog=self,
        )

    def _path(self, stage: str, name: str) -> str:
        if not _STAGE.fullmatch(stage):
            raise ValueError(f"{stage!r} is no stage: use `images` or `regions/<detector id>`")
        return f"{self.dataset}/{stage}/{name}"

    def _manifest_path(self, stage: str, shard: str) -> str:
        if not _SHARD.fullmatch(shard):
            raise ValueError(f"{shard!r} is no shard: use five digits, such as 00000")
        return self._path(stage, f"{shard}.parquet")

    def _where(self, stage: str, shard: str) -> str:
        return self.objects.where(self._manifest_path(stage, shard))

    def _redo(self, stage: str, shard: str) -> str:
        return f"to make it again, delete {self._where(stage, shard)} and run the stage"

    def _bytes(self, stage: str, shard: str) -> bytes:
        return self.objects.get(self._manifest_path(stage, shard))

    def _read_header(self, stage: str, shard: str) -> tuple[bytes, Header]:
        """A manifest's bytes and what the JSON in its footer says; ValueError where it is not what its name says."""
        data, where = self._bytes(stage, shard), self._where(stage, shard)
        try:
            header = json.loads(pq.read_metadata(io.BytesIO(data)).metadata[b"manifest"])
        except (pa.ArrowInvalid, KeyError, TypeError) as error:
            raise ValueError(f"{where} is no manifest ({error!r}); {self._redo(stage, shard)}") from error
        versions = header.get("version"), header.get("shard_version")
        if versions != (MANIFEST_VERSION, SHARD_VERSION):
            raise ValueError(
                f"{where} is of version {versions[0]} for a shard of version {versions[1]}, this code reads "
                f"{MANIFEST_VERSION} and {SHARD_VERSION}"
            )
        if (header["stage"], header["shard"]) != (stage, shard):
            raise ValueError(
                f"{where} says that it is shard {header['shard']} of {header['stage']}: move it back there"
            )
        return data, Header(
            shard=shard,
            stage=stage,
            tar=header["tar"] and self._path(stage, header["tar"]),
            tar_sha256=header["tar_sha256"],
            tar_bytes=header["tar_bytes"],
            statuses=header["statuses"],
            meta=header["meta"],
            sha256=hashlib.sha256(data).hexdigest(),
        )


_NULLS = (None,) * 5  # offset, length, width, height, num_regions of a row that is not ok


def _check_rows(rows: Sequence[Row], where: str) -> None:
    if not rows:
        raise ValueError(f"{where}: a shard without rows cannot be committed; every input row belongs in it, ok or not")
    owners = {}
    for i, row in enumerate(rows):
        if i and row.row <= rows[i - 1].row:
            raise ValueError(f"{where}: row {row.row} follows row {rows[i - 1].row}; give each row once, in order")
        if not row.status:
            raise ValueError(f"{where}: row {row.row} has no status; say ok or why not")
        if row.status == OK and owners.setdefault(row.key, row.row) != row.row:
            raise ValueError(
                f"{where}: rows {owners[row.key]} and {row.row} are both ok with key {row.key}; keep one and give the "
                "other a status"
            )


def _matched(samples: Iterable[Sample], rows: Sequence[Row], stage: str, where: str, facts: list) -> Iterator[Sample]:
    """The samples as they come, each held against the ok row whose turn it is; notes its width, height and regions."""
    detector = stage.partition("/")[2]
    expected = (row for row in rows if row.status == OK)
    for sample in samples:
        row = next(expected, None)
        if row is None:
            raise ValueError(f"{where}: sample {sample.key} comes after the last ok row; mark its row as ok")
        if sample.key != row.key:
            raise ValueError(f"{where}: row {row.row} is ok with key {row.key}, but the sample there is {sample.key}")
        if detector and (sample.regions is None or sample.regions.detector != detector):
            found = "no regions" if sample.regions is None else f"regions of detector {sample.regions.detector}"
            raise ValueError(f"{where}: row {row.row} ({row.key}) has {found}, and the stage is {stage}")
        facts.append((sample.width, sample.height, None if sample.regions is None else len(sample.regions)))
        yield sample
    row = next(expected, None)
    if row is not None:
        raise ValueError(f"{where}: row {row.row} ({row.key}) is ok, but there is no sample for it")


def _as_json(meta: dict, where: str) -> dict:
    try:
        return json.loads(json.dumps(meta, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: meta cannot be written as JSON: {error}") from error


def _table(rows: list[tuple]) -> pa.Table:
    columns = [pa.array([row[i] for row in rows], type=field.type) for i, field in enumerate(SCHEMA)]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _to_parquet(table: pa.Table, header: dict) -> bytes:
    """The same table and header give the same bytes (under one version of pyarrow, which writes its name into them)."""
    about = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    sink = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({"manifest": about}),
        sink,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        use_dictionary=["status", "detail"],
        write_statistics=True,
        row_group_size=max(1, len(table)),
    )
    return sink.getvalue()


def _ok_rows(table: pa.Table) -> pa.Table:
    return table.filter(pc.equal(table["status"], OK))


def _snapshot(stage: str, shards: Sequence[str], headers: Iterable[Header]) -> Snapshot:
    headers = list(headers)
    lines = "".join(f"{header.shard} {header.sha256}\n" for header in headers)
    ok_rows = sum(header.ok_rows for header in headers)
    return Snapshot(hashlib.sha256(lines.encode()).hexdigest()[:16], stage, tuple(shards), ok_rows)


def _sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _each(read: Callable[[str], _Read], shards: Sequence[str]) -> Iterator[_Read]:
    """read(shard) for each, in order, some at a time."""
    with ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, len(shards), 4 * _READERS):  # in portions, so that answers do not pile up
            yield from pool.map(read, shards[start : start + 4 * _READERS])


def datasets_with(objects: Objects, stage: str) -> list[str]:
    """The datasets that have a committed shard of this stage, sorted; one listing."""
    pattern = re.compile(rf"([^/]+)/{re.escape(stage)}/{_SHARD.pattern}\.parquet")
    return sorted({found[1] for info in objects.list() if (found := pattern.fullmatch(info.path))})


def status(objects: Objects) -> list[str]:
    """One line per dataset and stage: shards, rows by status, bytes of manifests and of the tars that they name."""
    shards, sizes = defaultdict(list), {}
    for info in objects.list():
        sizes[info.path] = info.size
        parts = re.fullmatch(rf"([^/]+)/({_STAGE.pattern})/({_SHARD.pattern})\.parquet", info.path)
        if parts:
            shards[parts[1], parts[2]].append(parts[3])
    lines = []
    for (dataset, stage), names in sorted(shards.items()):
        catalog = Catalog(objects, dataset)
        size, statuses = sum(sizes[catalog._manifest_path(stage, name)] for name in names), Counter()
        for header in catalog.headers(stage, names).values():
            size += header.tar_bytes
            statuses.update(header.statuses)
        by_status = ", ".join(f"{name} {count:,}" for name, count in sorted(statuses.items()))
        lines.append(
            f"{dataset:<12} {stage:<24} {len(names):>6,} shards  {statuses.total():>10,} rows  "
            f"{size / 1e6:>10,.1f} MB  {by_status}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m storage.catalog", description="What is committed under a root.")
    parser.add_argument("command", choices=["status"])
    parser.add_argument("root", help="a folder or s3://bucket/prefix")
    options = parser.parse_args(arguments)
    try:
        lines = status(open_objects(options.root, write=False))
    except (ValueError, StorageUnreachable) as error:
        sys.exit(str(error))
    print("\n".join(lines) or f"nothing is committed under {options.root}")


if __name__ == "__main__":
    main()
