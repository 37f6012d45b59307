"""Commit a shard: write its tar first, then its manifest. The manifest makes the shard visible."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest

from storage.catalog import Catalog, require_valid, temporary_folder
from storage.digests import sha256_of
from storage.manifests import OK, Header, Row, manifest_bytes
from storage.sample import Sample
from storage.shards import write_shard
from storage.withdrawn import WITHDRAWN, read_withdrawn


def commit_shard(
    catalog: Catalog,
    stage: str,
    shard: str,
    samples: Iterable[Sample],
    rows: Sequence[Row],
    meta: dict,
    replaces: Header | None = None,
    content: str | None = None,
) -> bool:
    """Commit a shard or, with `replaces`, its next revision. Return False, changing nothing, if it already exists.

    Withdrawn samples are left out, and their rows get the status `withdrawn`. Raises ValueError, without committing the
    shard, if a row is out of order or does not match its sample.

    Args:
        samples: samples of the rows with status `ok`, in the order of `rows`
        rows: every input row of the shard once, in ascending order
        replaces: committed revision that this one replaces; its files are kept, but readers use the newest revision
        content: value of `Header.content`; None to compute it from the samples
    """
    path = catalog.manifest_path(stage, shard)
    if replaces is not None:
        path = catalog.manifest_path(stage, dataclasses.replace(replaces, revision=replaces.revision + 1).name)
        meta = meta | {"replaces": replaces.sha256}
    if catalog.store.exists(path):
        return False
    withdrawn = read_withdrawn(catalog.store)
    facts, withdrawn_keys = [], set()

    def stored_samples() -> Iterator[Sample]:
        for sample in _check_order(samples, rows, stage, catalog.store.uri(path)):
            if withdrawn.has(sample.url, sample.sha256):
                withdrawn_keys.add(sample.key)
            else:
                regions = None if sample.regions is None else len(sample.regions)
                size = {"width": sample.width, "height": sample.height}
                facts.append(size | {"num_regions": regions, "sha256": sample.sha256})
                yield sample

    with temporary_folder() as folder:
        file = folder / f"{shard}.tar"
        spans = write_shard(stored_samples(), file)
        tar, tar_sha256, tar_bytes = None, "", 0
        if spans:
            tar_sha256, tar_bytes = sha256_of(file), file.stat().st_size
            tar = f"{shard}-{tar_sha256[:12]}.tar"
            # Written even if a killed writer left the same tar: the new date keeps `gc` from deleting it.
            catalog.store.put(catalog.path(stage, tar), file)
        rows = [
            dataclasses.replace(row, status=WITHDRAWN) if row.status == OK and row.key in withdrawn_keys else row
            for row in rows
        ]
        if content is None:
            same = replaces is not None and replaces.tar_sha256 == tar_sha256
            content = replaces.content if same else tar_sha256
        metadata = {
            "stage": stage,
            "shard": shard,
            "tar": tar,
            "tar_sha256": tar_sha256,
            "tar_bytes": tar_bytes,
            "content": content,
            "meta": meta,
        }
        if catalog.store.put(path, manifest_bytes(rows, spans, facts, metadata), if_absent=True):
            # `gc` may have deleted the tar, if it had read the old date just before.
            if tar is not None and not catalog.store.exists(catalog.path(stage, tar)):
                catalog.store.put(catalog.path(stage, tar), file)
            if read_withdrawn(catalog.store) != withdrawn:  # a withdrawal in the meantime did not see this shard
                withdraw_samples(catalog, stage, shard)
            return True
    # Another writer was first. A revision of the shard may still name the same tar.
    unused = tar and catalog.path(stage, tar)
    if unused and all(header.tar != unused for header in catalog.revisions(stage, shard)):
        catalog.store.delete(unused)
    return False


def withdraw_samples(catalog: Catalog, stage: str, shard: str) -> bool:
    """Commit a revision of a shard without its withdrawn samples. Return False if none of its samples is withdrawn.

    The other samples keep their bytes, and stages made from the shard stay up to date. If another writer commits a
    revision first, the withdrawn samples are missing from that revision too. Raises ValueError if the tar is damaged.
    """
    manifest = catalog.manifest(stage, shard)
    if not any(read_withdrawn(catalog.store).contains(manifest.ok()).to_pylist()):
        return False
    samples = map(require_valid, catalog.read_each(manifest))
    meta = {name: value for name, value in manifest.meta.items() if name != "replaces"}
    return commit_shard(catalog, stage, shard, samples, manifest.rows(), meta, manifest, manifest.content)


def _check_order(samples: Iterable[Sample], rows: Sequence[Row], stage: str, uri: str) -> Iterator[Sample]:
    """Yield the samples. Raises ValueError if rows are not in ascending order or do not match the samples."""
    for before, row in pairwise(rows):
        if row.row <= before.row:
            raise ValueError(f"{uri}: row {row.row} follows row {before.row}; give each row once, in ascending order")
    detector = stage.partition("/")[2] or None
    for row, sample in zip_longest((row for row in rows if row.status == OK), samples):
        expected = "no further sample" if row is None else f"row {row.row} with key {row.key}"
        actual = "no sample" if sample is None else f"sample {sample.key}"
        if row is None or sample is None or row.key != sample.key:
            raise ValueError(f"{uri}: expected {expected}, but got {actual}")
        if (None if sample.regions is None else sample.regions.detector) != detector:
            raise ValueError(f"{uri}: {actual} of {expected} has no regions of {stage}")
        yield sample
