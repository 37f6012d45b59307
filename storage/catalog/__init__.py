"""The catalog of committed shards: one manifest per shard and stage. A shard is visible if it has a manifest.

    ROOT/<dataset>/<stage>/<shard>.parquet           the manifest: one row per input row, ok or why not
    ROOT/<dataset>/<stage>/<shard>.r<N>.parquet      its N-th revision; the newest counts
    ROOT/<dataset>/<stage>/<shard>-<12 hex>.tar      the samples of its ok rows, named by content
    ROOT/<dataset>/<stage>/snapshots/<id>.parquet    the ok rows of all shards at one moment

A stage is `images` or `regions/<detector id>`. The tar is written first. The manifest is written last, and only if
there is none, so that a reader never sees half a shard and two writers never mix: storage/catalog/commit.py. Readers
never list tars: the manifest names its tar. A training reads a snapshot, storage/snapshots.py. The layout is a
contract, docs/formats.md. `vlbert catalog status ROOT` prints a summary: storage/catalog/command.py.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage.digests import check_version, has_valid_digest
from storage.manifests import MANIFEST_VERSION, SCHEMA, Header, Manifest
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable
from storage.safe_json import parse_json
from storage.sample import BadSample, Sample
from storage.shards import SHARD_VERSION, read_shard
from storage.snapshots import FROM_MANIFEST, ShardIndex, Snapshot, read_index, write_snapshot
from storage.withdrawn import WITHDRAWN

STAGE_NAME = re.compile(r"images|regions/[A-Za-z0-9][A-Za-z0-9_.-]*")
SHARD_NAME = re.compile(r"\d{5}")
MANIFEST_FILE = re.compile(r"(\d{5})(?:\.r([1-9]\d*))?\.parquet")
_SNAPSHOT = re.compile(r"[0-9a-f]{16}")
_READERS = 16  # manifests fetched at a time: each is small, and S3 answers in tens of milliseconds


class Catalog:
    """The committed shards of one dataset."""

    def __init__(self, store: ObjectStore, dataset: str):
        if not dataset or "/" in dataset or dataset in ("runs", WITHDRAWN):
            raise ValueError(
                f"{dataset!r} cannot be a dataset: use the name of one folder of the root, other than runs and "
                f"{WITHDRAWN}"
            )
        self.store = store
        self.dataset = dataset

    def shards(self, stage: str) -> list[str]:
        """The committed shards, sorted; one listing."""
        return sorted(self._names(stage))

    def newest(self, stage: str, shards: Sequence[str] | None = None) -> dict[str, str]:
        """Shard -> the name of its newest manifest: of all shards, or of these, committed or not; one listing."""
        found = self._names(stage, "" if shards is None else os.path.commonprefix(list(shards)))
        return {shard: found.get(shard, [shard])[-1] for shard in (sorted(found) if shards is None else shards)}

    def _names(self, stage: str, prefix: str = "") -> dict[str, list[str]]:
        """Shard -> the names of its manifests, the newest last, for shards that begin with `prefix`; one listing."""
        found = []
        for info in self.store.list(self.path(stage, prefix)):
            if match := MANIFEST_FILE.fullmatch(info.path.removeprefix(self.path(stage, ""))):
                found.append((match[1], int(match[2] or 1), match[0].removesuffix(".parquet")))
        names = {}
        for shard, _, name in sorted(found):
            names.setdefault(shard, []).append(name)
        return names

    def revisions(self, stage: str, shard: str) -> list[Header]:
        """The header of each revision of a shard, the newest last; [] if it is not committed."""
        self.manifest_path(stage, shard)
        return list(self.each(stage, self._names(stage, shard).get(shard, [])))

    def manifest(self, stage: str, shard: str) -> Manifest:
        """The newest manifest of one shard; ObjectMissing if it is not committed."""
        return self._read(stage, self.newest(stage, [shard])[shard], SCHEMA.names)

    def each(self, stage: str, names: Sequence[str], columns: Sequence[str] = ()) -> Iterator[Manifest]:
        """The manifests of these names (Header.name), in order, several fetched at a time, with these columns only."""
        with ThreadPoolExecutor(_READERS) as pool:
            for start in range(0, len(names), 4 * _READERS):  # some at a time, so that answers do not pile up
                yield from pool.map(lambda name: self._read(stage, name, columns), names[start : start + 4 * _READERS])

    def headers(self, stage: str, shards: Sequence[str] | None = None) -> dict[str, Header]:
        """The headers of the newest manifests, by shard: of all shards, or of these."""
        return {header.shard: header for header in self.each(stage, [*self.newest(stage, shards).values()])}

    def columns(self, stage: str, columns: Sequence[str], shards: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """These columns of the newest manifests, shard by shard: of all shards, or of these."""
        return (one.table for one in self.each(stage, [*self.newest(stage, shards).values()], columns))

    def read(self, stage: str, shard: str) -> Iterator[Sample]:
        """The samples of a committed shard in the order of its rows; ValueError as `read_each` or at an invalid one."""
        return map(readable, self.read_each(self.manifest(stage, shard)))

    def read_each(self, manifest: Manifest) -> Iterator[Sample | BadSample]:
        """The samples of a committed shard, in the order of this manifest's rows, each or why it is invalid.

        ValueError, before the first of them, if the tar is not the one that was committed.
        """
        if manifest.tar is None:
            return iter(())
        where, redo = self.store.uri(manifest.tar), self._redo(manifest.stage, manifest.name)
        try:
            data = self.store.get(manifest.tar)
        except ObjectMissing as error:
            raise ValueError(f"{where} is gone; {redo}") from error
        if (sha256 := hashlib.sha256(data).hexdigest()) != manifest.tar_sha256:
            raise ValueError(f"{where} is damaged: its sha256 is {sha256[:12]}...; {redo}")
        return read_shard(data, where)

    def pending(self, source: str, target: str, shards: Sequence[str] | None = None) -> list[str]:
        """The shards of `source` (of all, or of these) that are still to be made in `target`, sorted.

        These are the shards that `target` does not have, and those that it made from other samples than the source has
        now; those that were only withdrawn do not count. Reads no tar. ValueError names a target of another source.
        """
        prefix = "" if shards is None else os.path.commonprefix(list(shards))
        committed, done = self._names(source, prefix), self._names(target, prefix)
        wanted = sorted(committed) if shards is None else sorted(committed.keys() & set(shards))
        both = [shard for shard in wanted if shard in done]
        pending = [shard for shard in wanted if shard not in done]
        for ours, made in zip(
            self.each(source, [committed[shard][-1] for shard in both]),
            self.each(target, [done[shard][-1] for shard in both]),
            strict=True,
        ):
            found = made.meta.get("source") or {}
            if (found.get("stage"), found.get("shard")) != (source, ours.shard):
                raise ValueError(
                    f"{self.uri(target, made.name)} was made from {found}, not from {self.uri(source, ours.name)}; "
                    f"{self._redo(target, made.name)}"
                )
            if found["content"] != ours.content:
                pending.append(ours.shard)
        return sorted(pending)

    def counts(self, stage: str) -> dict[str, int]:
        """Rows by status, over all shards."""
        total = sum((Counter(header.statuses) for header in self.headers(stage).values()), Counter())
        return dict(sorted(total.items()))

    def pin(self, stage: str) -> Snapshot:
        """Write the snapshot of all shards that are committed now as one file, dated now, for a training.

        Reads each manifest once.
        """
        manifests = self.each(stage, [*self.newest(stage).values()], [*FROM_MANIFEST, "status"])
        with temporary_folder("commit-") as folder:
            file = folder / "snapshot.parquet"
            snapshot = write_snapshot(file, stage, ((one, one.ok()) for one in manifests))
            # Where it is already, it gets a new date, so that `gc` does not delete it before the first checkpoint names
            # it. A damaged one is replaced.
            self.store.put(self._snapshot_path(stage, snapshot.id), file)
        return snapshot

    def pinned(self, stage: str, snapshot_id: str) -> ShardIndex:
        """The index of a pinned snapshot, from its file alone; ValueError names a file that is missing or damaged."""
        return read_index(self.store, self._snapshot_path(stage, snapshot_id))

    def path(self, stage: str, name: str) -> str:
        if not STAGE_NAME.fullmatch(stage):
            raise ValueError(f"{stage!r} is not a stage: use `images` or `regions/<detector id>`")
        return f"{self.dataset}/{stage}/{name}"

    def manifest_path(self, stage: str, name: str) -> str:
        if not MANIFEST_FILE.fullmatch(f"{name}.parquet"):
            raise ValueError(f"{name!r} is not a shard: use five digits, such as 00000")
        return self.path(stage, f"{name}.parquet")

    def _snapshot_path(self, stage: str, snapshot_id: str) -> str:
        if not _SNAPSHOT.fullmatch(snapshot_id):
            raise ValueError(f"{snapshot_id!r} is not a snapshot: use 16 hex digits, as in a checkpoint's state.json")
        return self.path(stage, f"snapshots/{snapshot_id}.parquet")

    def uri(self, stage: str, name: str) -> str:
        """The manifest of a shard (its name, or that of a revision: Header.name) in full, for messages."""
        return self.store.uri(self.manifest_path(stage, name))

    def _redo(self, stage: str, shard: str) -> str:
        return f"to make it again, delete {self.uri(stage, shard)} and run the stage"

    def _read(self, stage: str, name: str, columns: Sequence[str] = ()) -> Manifest:
        """A manifest with these columns of its table. ValueError if it is not the one that was committed under this
        name."""
        data, where = self.store.get(self.manifest_path(stage, name)), self.uri(stage, name)
        footer = pq.read_metadata(io.BytesIO(data)).metadata if has_valid_digest(data) else {}
        if b"manifest" not in footer:
            raise ValueError(
                f"{where} is damaged or not a manifest: its {len(data)} bytes are not those that were committed. Put "
                f"it back as it was; {self._redo(stage, name)}"
            )
        header = parse_json(footer[b"manifest"], where)
        check_version(header.get("version"), MANIFEST_VERSION, where)
        check_version(header.get("shard_version"), SHARD_VERSION, f"the tar of {where}")
        shard, _, revision = name.partition(".r")
        if (header["stage"], header["shard"]) != (stage, shard):
            raise ValueError(
                f"{where} is the manifest of shard {header['shard']} of {header['stage']}: move it back there"
            )
        table = SCHEMA.empty_table()
        if columns:
            table = pq.read_table(io.BytesIO(data), columns=list(columns), use_threads=False)
        return Manifest(
            shard=shard,
            stage=stage,
            tar=header["tar"] and self.path(stage, header["tar"]),
            tar_sha256=header["tar_sha256"],
            tar_bytes=header["tar_bytes"],
            content=header["content"],
            statuses=header["statuses"],
            meta=header["meta"],
            sha256=hashlib.sha256(data).hexdigest(),
            revision=int(revision or 1),
            table=table.replace_schema_metadata(None),
        )


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder of this machine; StorageUnreachable names it if it is full."""
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StorageUnreachable(
            f"no space in {tempfile.gettempdir()}, where tars and snapshots are made: {error}. Set TMPDIR to a "
            "folder with more space, then run again: what is committed stays"
        ) from error


def readable(sample: Sample | BadSample) -> Sample:
    if isinstance(sample, BadSample):
        raise sample
    return sample


def datasets_with(store: ObjectStore, stage: str) -> list[str]:
    """The datasets that have a committed shard of this stage, sorted; one listing."""
    pattern = re.compile(rf"([^/]+)/{re.escape(stage)}/{MANIFEST_FILE.pattern}")
    return sorted({found[1] for info in store.list() if (found := pattern.fullmatch(info.path))})
