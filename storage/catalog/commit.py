"""Commits a shard: its tar first, then its manifest, which makes it visible."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest

from storage.catalog import Catalog, readable, temporary_folder
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
    """Write one shard; False, with nothing changed, if it was committed already or another writer was first.

    rows hold every input row of the shard once, in ascending order; samples are those of the ok rows, in the same
    order. Samples that are withdrawn are left out, and their rows get that status. ValueError names the row that breaks
    this, and nothing becomes visible. `replaces` is the revision that the caller has read: the next revision is written
    beside it, and readers use that from then on. content: as Header has it, if it is not that of these samples.
    """
    path = catalog.manifest_path(stage, shard)
    if replaces is not None:
        path = catalog.manifest_path(stage, dataclasses.replace(replaces, revision=replaces.revision + 1).name)
        meta = meta | {"replaces": replaces.sha256}
    if catalog.store.exists(path):
        return False
    where = catalog.store.uri(path)
    withdrawn = read_withdrawn(catalog.store)
    facts, gone = [], set()

    def stored() -> Iterator[Sample]:
        for sample in _matched(samples, rows, stage, where):
            if withdrawn.has(sample.url, sample.sha256):
                gone.add(sample.key)
            else:
                regions = None if sample.regions is None else len(sample.regions)
                facts.append((sample.width, sample.height, regions, sample.sha256))
                yield sample

    with temporary_folder("commit-") as folder:
        file = folder / f"{shard}.tar"
        spans = write_shard(stored(), file)
        tar, tar_sha256, tar_bytes = None, "", 0
        if spans:
            tar_sha256, tar_bytes = sha256_of(file), file.stat().st_size
            tar = f"{shard}-{tar_sha256[:12]}.tar"
            # Also if a killed writer left the same tar: with a new date, `gc` does not delete it.
            catalog.store.put(catalog.path(stage, tar), file)
        if gone:
            lost = dataclasses.replace
            rows = [lost(r, status=WITHDRAWN) if r.status == OK and r.key in gone else r for r in rows]
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
            # `gc` may have deleted it, because it had read the old date just before.
            if tar is not None and not catalog.store.exists(catalog.path(stage, tar)):
                catalog.store.put(catalog.path(stage, tar), file)
            if read_withdrawn(catalog.store) != withdrawn:  # who withdrew meanwhile did not see this shard
                withdraw_samples(catalog, stage, shard)
            return True
    # The other writer's manifest is final, so a tar that no revision names will never be used.
    if tar is not None and all(one.tar != catalog.path(stage, tar) for one in catalog.revisions(stage, shard)):
        catalog.store.delete(catalog.path(stage, tar))
    return False


def withdraw_samples(catalog: Catalog, stage: str, shard: str) -> bool:
    """Write the next revision of a shard without the samples that are withdrawn; False if it has none of them.

    The other samples keep their bytes, and stages that were made from the shard stay up to date. ValueError names a tar
    that is damaged. If another writer commits a revision first, that one leaves them out, too.
    """
    manifest = catalog.manifest(stage, shard)
    if not any(read_withdrawn(catalog.store).contains(manifest.ok()).to_pylist()):
        return False
    samples = map(readable, catalog.read_each(manifest))
    meta = {name: value for name, value in manifest.meta.items() if name != "replaces"}
    return commit_shard(catalog, stage, shard, samples, manifest.rows(), meta, manifest, manifest.content)


def _matched(samples: Iterable[Sample], rows: Sequence[Row], stage: str, where: str) -> Iterator[Sample]:
    """The samples of the ok rows. ValueError names a row that is not in ascending order, or not that of its sample."""
    for before, row in pairwise(rows):
        if row.row <= before.row:
            raise ValueError(f"{where}: row {row.row} follows row {before.row}; give each row once, in order")
    detector = stage.partition("/")[2] or None
    for row, sample in zip_longest((row for row in rows if row.status == OK), samples):
        expected = "no row that is ok" if row is None else f"row {row.row} with key {row.key}"
        found = "no sample" if sample is None else f"sample {sample.key}"
        if row is None or sample is None or row.key != sample.key:
            raise ValueError(f"{where}: where {expected} is due, there is {found}")
        if (None if sample.regions is None else sample.regions.detector) != detector:
            raise ValueError(f"{where}: {found} of {expected} has no regions of {stage}")
        yield sample
