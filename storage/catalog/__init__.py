"""The catalog of committed shards: one manifest per shard and stage. A shard is visible if it has a manifest.

    ROOT/<dataset>/<stage>/<shard>.parquet           manifest: one row per input row, with its status
    ROOT/<dataset>/<stage>/<shard>.r<N>.parquet      its N-th revision; readers use the newest
    ROOT/<dataset>/<stage>/<shard>-<12 hex>.tar      samples of its `ok` rows, named by content
    ROOT/<dataset>/<stage>/snapshots/<id>.parquet    `ok` rows of all shards at one point in time

A stage is `images` or `regions/<detector id>`. A writer puts the tar first. It puts the manifest last, and only if no
other writer has put it. So a reader never sees half a shard, and the files of two writers never mix
(storage/catalog/commit.py). Readers find a tar through its manifest, and never list tars. Training reads a snapshot
(storage/snapshots.py). docs/formats.md specifies the layout. `vlbert catalog status ROOT` prints a summary
(storage/catalog/command.py).
"""

import contextlib
import errno
import hashlib
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
from storage.manifests import MANIFEST_VERSION, SCHEMA, Header, Manifest, parse_parquet
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable
from storage.safe_json import parse_json
from storage.sample import BadSample, Sample
from storage.shards import SHARD_VERSION, Span, read_samples
from storage.snapshots import FROM_MANIFEST, ShardIndex, Snapshot, read_index, write_snapshot
from storage.withdrawn import WITHDRAWN

STAGE_NAME = re.compile(r"images|regions/[A-Za-z0-9][A-Za-z0-9_.-]*")
SHARD_NAME = re.compile(r"\d{5}")
MANIFEST_FILE = re.compile(r"(\d{5})(?:\.r([1-9]\d*))?\.parquet")
_SNAPSHOT = re.compile(r"[0-9a-f]{16}")
_READERS = 16  # manifests fetched in parallel; each is small, and S3 takes tens of milliseconds to answer


class Catalog:
    """The committed shards of one dataset."""

    def __init__(self, store: ObjectStore, dataset: str):
        if not dataset or "/" in dataset or dataset in ("runs", WITHDRAWN):
            raise ValueError(
                f"{dataset!r} cannot be a dataset: use the name of one folder of the root, but not runs or {WITHDRAWN}"
            )
        self.store = store
        self.dataset = dataset

    def shards(self, stage: str) -> list[str]:
        """Return the sorted names of a stage's committed shards."""
        return sorted(self._manifest_names(stage))

    def newest(self, stage: str, shards: Sequence[str] | None = None) -> dict[str, str]:
        """Map each shard to the name of its newest manifest. `shards` defaults to all committed shards.

        An uncommitted shard is mapped to the name that its first manifest would have.
        """
        names = self._manifest_names(stage, shards)
        return {shard: names.get(shard, [shard])[-1] for shard in (sorted(names) if shards is None else shards)}

    def _manifest_names(self, stage: str, shards: Sequence[str] | None = None) -> dict[str, list[str]]:
        """Map each of the shards that is committed, and perhaps others, to its manifests' names, oldest first."""
        revisions, prefix = [], os.path.commonprefix(list(shards or [""]))
        for info in self.store.list(self.path(stage, prefix)):
            if match := MANIFEST_FILE.fullmatch(info.path.removeprefix(self.path(stage, ""))):
                revisions.append((match[1], int(match[2] or 1), match[0].removesuffix(".parquet")))
        names = {}
        for shard, _, name in sorted(revisions):
            names.setdefault(shard, []).append(name)
        return names

    def revisions(self, stage: str, shard: str) -> list[Header]:
        """Return the headers of all revisions of a shard, oldest first; [] if it is not committed."""
        self.manifest_path(stage, shard)
        return list(self.manifests(stage, self._manifest_names(stage, [shard]).get(shard, [])))

    def manifest(self, stage: str, shard: str) -> Manifest:
        """Return the newest manifest of a shard. Raises ObjectMissing if the shard is not committed."""
        return self._read(stage, self.newest(stage, [shard])[shard], SCHEMA.names)

    def manifests(self, stage: str, names: Sequence[str], columns: Sequence[str] = ()) -> Iterator[Manifest]:
        """Yield the manifests with these names (`Header.name`), in order. Their tables have only the given columns."""
        with ThreadPoolExecutor(_READERS) as pool:
            for start in range(0, len(names), 4 * _READERS):  # in blocks, so that answers do not pile up in memory
                yield from pool.map(lambda name: self._read(stage, name, columns), names[start : start + 4 * _READERS])

    def headers(self, stage: str, shards: Sequence[str] | None = None) -> dict[str, Header]:
        """Map each shard to the header of its newest manifest. `shards` defaults to all committed shards."""
        return {header.shard: header for header in self.manifests(stage, [*self.newest(stage, shards).values()])}

    def columns(self, stage: str, columns: Sequence[str], shards: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Return an iterator over `columns` of the newest manifests. `shards` defaults to all committed shards."""
        names = [*self.newest(stage, shards).values()]
        return (manifest.table for manifest in self.manifests(stage, names, columns))

    def read(self, stage: str, shard: str) -> Iterator[Sample]:
        """Return an iterator over a shard's samples, in row order. Raises ValueError for damaged data."""
        return map(require_valid, self.read_each(self.manifest(stage, shard)))

    def read_each(self, manifest: Manifest) -> Iterator[Sample | BadSample]:
        """Return an iterator over a shard's samples, in row order, with a BadSample in place of each invalid sample.

        Raises ValueError, before the first sample, if the tar is not the one that was committed with the manifest.
        """
        if manifest.tar is None:
            return iter(())
        uri, hint = self.store.uri(manifest.tar), self._rebuild_hint(manifest.stage, manifest.name)
        try:
            data = self.store.get(manifest.tar)
        except ObjectMissing as error:
            raise ValueError(f"{uri} is missing; {hint}") from error
        if (sha256 := hashlib.sha256(data).hexdigest()) != manifest.tar_sha256:
            raise ValueError(f"{uri} is damaged: its sha256 is {sha256[:12]}...; {hint}")
        rows = manifest.ok().select(["key", "offset", "length"]).to_pylist()
        return read_samples(data, (Span(**row) for row in rows), uri)

    def pending(self, source: str, target: str, shards: Sequence[str] | None = None) -> list[str]:
        """Return the sorted names of the shards of stage `source` that stage `target` must still make.

        A shard is pending if `target` does not have it, or made it from samples that have changed since. Withdrawals do
        not count as changes. No tar is read. Raises ValueError if a target shard was made from another source.
        """
        committed, done = self._manifest_names(source, shards), self._manifest_names(target, shards)
        wanted = sorted(committed) if shards is None else sorted(committed.keys() & set(shards))
        both = [shard for shard in wanted if shard in done]
        pending = [shard for shard in wanted if shard not in done]
        for source_manifest, target_manifest in zip(
            self.manifests(source, [committed[shard][-1] for shard in both]),
            self.manifests(target, [done[shard][-1] for shard in both]),
            strict=True,
        ):
            made_from = target_manifest.meta.get("source") or {}
            if (made_from.get("stage"), made_from.get("shard")) != (source, source_manifest.shard):
                raise ValueError(
                    f"{self.uri(target, target_manifest.name)} was made from {made_from}, not from "
                    f"{self.uri(source, source_manifest.name)}; {self._rebuild_hint(target, target_manifest.name)}"
                )
            if made_from["content"] != source_manifest.content:
                pending.append(source_manifest.shard)
        return sorted(pending)

    def counts(self, stage: str) -> dict[str, int]:
        """Return the number of rows with each status, over all shards of a stage."""
        total = sum((Counter(header.statuses) for header in self.headers(stage).values()), Counter())
        return dict(sorted(total.items()))

    def pin(self, stage: str) -> Snapshot:
        """Write a snapshot of all shards of a stage that are committed now, and return it."""
        manifests = self.manifests(stage, [*self.newest(stage).values()], [*FROM_MANIFEST, "status"])
        with temporary_folder() as folder:
            file = folder / "snapshot.parquet"
            snapshot = write_snapshot(file, stage, ((manifest, manifest.ok()) for manifest in manifests))
            # An existing snapshot is written again: the new date keeps `gc` from deleting it before the first
            # checkpoint names it, and a damaged file is replaced.
            self.store.put(self._snapshot_path(stage, snapshot.id), file)
        return snapshot

    def pinned(self, stage: str, snapshot_id: str) -> ShardIndex:
        """Read a snapshot that `pin` has written. Raises ValueError if its file is missing or damaged."""
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
        """Return the path or URI of a manifest, for messages. `name` is a `Header.name`, such as 00000 or 00000.r2."""
        return self.store.uri(self.manifest_path(stage, name))

    def _rebuild_hint(self, stage: str, shard: str) -> str:
        return f"to make it again, delete {self.uri(stage, shard)} and run the stage"

    def _read(self, stage: str, name: str, columns: Sequence[str] = ()) -> Manifest:
        """Read a manifest and the given columns of its table. Raises ValueError if the file was changed or moved."""
        data, uri = self.store.get(self.manifest_path(stage, name)), self.uri(stage, name)
        footer = pq.read_metadata(pa.BufferReader(data)).metadata if has_valid_digest(data) else {}
        if b"manifest" not in footer:
            raise ValueError(
                f"{uri} is damaged or not a manifest: its {len(data)} bytes differ from the committed ones. Restore "
                f"it from a copy; {self._rebuild_hint(stage, name)}"
            )
        header = parse_json(footer[b"manifest"], uri)
        check_version(header.get("version"), MANIFEST_VERSION, uri)
        check_version(header.get("shard_version"), SHARD_VERSION, f"the tar of {uri}")
        shard, _, revision = name.partition(".r")
        if (header["stage"], header["shard"]) != (stage, shard):
            raise ValueError(
                f"{uri} is the manifest of shard {header['shard']} of {header['stage']}: move it back there"
            )
        table = SCHEMA.empty_table()
        if columns:
            table = parse_parquet(data, columns)
        same = ("shard", "stage", "tar_sha256", "tar_bytes", "content", "statuses", "meta")
        return Manifest(
            **{name: header[name] for name in same},
            tar=header["tar"] and self.path(stage, header["tar"]),
            sha256=hashlib.sha256(data).hexdigest(),
            revision=int(revision or 1),
            table=table.replace_schema_metadata(None),
        )


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Context manager that creates a temporary local folder. Raises StorageUnreachable if its disk is full."""
    try:
        with tempfile.TemporaryDirectory(prefix="commit-") as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StorageUnreachable(
            f"no space in {tempfile.gettempdir()}, where tars and snapshots are made: {error}. Set TMPDIR to a folder "
            "with more space, then run again: committed shards are kept"
        ) from error


def require_valid(sample: Sample | BadSample) -> Sample:
    if isinstance(sample, BadSample):
        raise sample
    return sample
