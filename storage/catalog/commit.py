"""Commits a shard: its tar first, then its manifest, which makes it visible."""

import dataclasses
from collections.abc import Iterable, Sequence

from storage.catalog import Catalog, sha256_of, temporary_folder
from storage.manifests import Header, Row, check_rows, checked_meta, manifest_bytes, matched
from storage.sample import Sample
from storage.shards import write_shard


def commit_shard(
    catalog: Catalog,
    stage: str,
    shard: str,
    samples: Iterable[Sample],
    rows: Sequence[Row],
    meta: dict,
    replaces: Header | None = None,
) -> bool:
    """Write one shard; False, with nothing changed, if it was committed already or another writer was first.

    rows hold every input row of the shard once, in ascending order; samples are those of the ok rows, in the same
    order. ValueError names the row that breaks this, and nothing becomes visible. `replaces` is the revision that
    the caller has read: the next revision is written beside it, and readers use that from then on.
    """
    path = catalog.manifest_path(stage, shard)
    if replaces is not None:
        path = catalog.manifest_path(stage, dataclasses.replace(replaces, revision=replaces.revision + 1).name)
        meta = meta | {"replaces": replaces.sha256}
    if catalog.store.exists(path):
        return False
    where = catalog.store.where(path)
    check_rows(rows, where)
    recorded = checked_meta(meta, where)
    facts = []  # of each sample: width, height, number of regions
    with temporary_folder("commit-") as folder:
        file = folder / f"{shard}.tar"
        spans = write_shard(matched(samples, rows, stage, where, facts), file)
        tar, tar_sha256, tar_bytes = None, "", 0
        if spans:
            tar_sha256, tar_bytes = sha256_of(file), file.stat().st_size
            tar = f"{shard}-{tar_sha256[:12]}.tar"
            # Also if a killed writer left the same tar: with a new date, `gc` does not delete it.
            catalog.store.put(catalog.path(stage, tar), file)
        metadata = {
            "stage": stage,
            "shard": shard,
            "tar": tar,
            "tar_sha256": tar_sha256,
            "tar_bytes": tar_bytes,
            "meta": recorded,
        }
        if catalog.store.put(path, manifest_bytes(rows, spans, facts, metadata), if_absent=True):
            # `gc` may have deleted it, because it had read the old date just before.
            if tar is not None and not catalog.store.exists(catalog.path(stage, tar)):
                catalog.store.put(catalog.path(stage, tar), file)
            return True
    # The other writer's manifest is final, so a tar that no revision names will never be used.
    if tar is not None and all(one.tar != catalog.path(stage, tar) for one in catalog.revisions(stage, shard)):
        catalog.store.delete(catalog.path(stage, tar))
    return False
