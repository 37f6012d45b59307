"""Withdraw images by their URLs, and list every checkpoint that has seen them.

    vlbert withdraw ROOT URL ...                 or a file with one URL per line: --urls FILE
    vlbert catalog gc ROOT --delete              then: delete the tars that still contain them

Later collections under ROOT skip these URLs, and the same images from other URLs. Shards that contain them are
rewritten. URLs must match those in the caption lists exactly. Repeating the command finishes an interrupted withdrawal,
and prints the same list. docs/provenance.md says what a withdrawal does not remove.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import tyro

from storage.catalog import Catalog
from storage.catalog.commit import withdraw_samples
from storage.inventory import Inventory
from storage.manifests import OK
from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable, open_store
from storage.programs import Command, Positional, Root
from storage.redact import display_url
from storage.runs import STATE
from storage.safe_json import printable
from storage.tables import aligned
from storage.withdrawn import Withdrawn, read_withdrawn, withdraw
from vlbert.checkpoint import read_checkpoint
from vlbert.datasets.files import read_lines
from vlbert.evaluation.whence import lineage, seen_samples

_MAX_PRINTED = 5  # maximum number of URLs to print


# --- committed rows ---------------------------------------------------------------------------------------------------


def committed_rows(store: ObjectStore, withdrawn: Withdrawn) -> list[dict]:
    """Return the manifest rows of withdrawn images as dicts: dataset, stage, shard, url, sha256 and status."""
    rows = []
    for (dataset, stage), shards in sorted(Inventory(store).manifests.items()):
        names, catalog = sorted(shards), Catalog(store, dataset)
        tables = catalog.columns(stage, ["url", "sha256", "status"], names)
        for shard, table in zip(names, tables, strict=True):
            location = {"dataset": dataset, "stage": stage, "shard": shard}
            rows += [location | row for row in table.filter(withdrawn.contains(table)).to_pylist()]
    return rows


def withdraw_urls(store: ObjectStore, urls: Collection[str]) -> tuple[Withdrawn, list[dict], frozenset[str]]:
    """Withdraw URLs and their images, including the same images from other URLs.

    Returns those of `urls` that are newly withdrawn, the manifest rows of `urls`, and all URLs of the images.
    """
    new = withdraw(store, urls)
    rows = committed_rows(store, Withdrawn(frozenset(urls)))
    images = frozenset(row["sha256"] for row in rows if row["status"] == OK) - {""}
    same = frozenset(row["url"] for row in committed_rows(store, Withdrawn(sha256=images))) if images else frozenset()
    withdraw(store, same, images)
    return new, rows, frozenset(urls) | same


def revise_shards(store: ObjectStore) -> int:
    """Rewrite all shards that contain withdrawn images, without those images. Returns the number of shards."""
    rows = committed_rows(store, read_withdrawn(store))
    shards = sorted({(row["dataset"], row["stage"], row["shard"]) for row in rows if row["status"] == OK})
    return sum(withdraw_samples(Catalog(store, dataset), stage, shard) for dataset, stage, shard in shards)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def list_sightings(store: ObjectStore, urls: frozenset[str]) -> list[str]:
    """Return lines of text: the checkpoints that have seen any of these URLs, and those for which this is unknown."""
    rows, unknown = [], []
    for path in Inventory(store).states:
        folder = path.removesuffix(f"/{STATE}")
        try:
            checkpoint = read_checkpoint(store, folder, tensors=False)
            if not isinstance(checkpoint.state.get("data"), list):
                continue  # a detector, which was trained on annotated images
            runs, start = lineage(checkpoint)
        except (ValueError, ObjectMissing) as error:
            unknown.append(f"{store.uri(folder)}: {printable(error)}")
            continue
        if start:
            unknown.append(f"{store.uri(folder)}: started from {start['checkpoint']}, which has no record of its data")
        for trained in runs:
            try:
                samples = [row for table in seen_samples(trained, "url", urls) for row in table.to_pylist()]
            except ValueError as error:  # snapshots are missing, or task files are missing or have changed
                unknown.append(f"{store.uri(folder)}: {printable(error)}")
                continue
            if samples:
                count, first = len({row["url"] for row in samples}), min(row["first_step"] for row in samples)
                rows.append((folder, trained.run, f"{count:,} of {len(urls):,}", f"{first:,}"))
    lines = aligned(("checkpoint", "seen in run", "URLs", "first at step"), rows)
    if not rows:
        lines.append(f"no checkpoint under {store.uri()} is known to have seen any of them")
    return lines + [f"unknown for {line}" for line in unknown]


# --- as a program -----------------------------------------------------------------------------------------------------


def withdraw_images(
    root: Root,
    url: Annotated[tuple[str, ...], Positional, tyro.conf.arg(metavar="URL ...")] = (),
    urls: Path | None = None,
) -> None:
    """Withdraw images by their URLs, and list every checkpoint that has seen them.

    Args:
        url: URLs as in the caption lists
        urls: file with one URL per line
    """
    wanted = [*dict.fromkeys([*url, *(read_lines(urls, "--urls") if urls else [])])]
    if not wanted:
        raise ValueError("no URL is given; give URLs, or a file with one per line: --urls FILE")
    if next(iter(open_store(root, write=False).list()), None) is None:  # read-only, so that no folder is made
        raise ValueError(f"{root} is empty; check the spelling of the root")
    store = open_store(root)
    new, rows, every = withdraw_urls(store, wanted)
    print(f"{len(new.urls):,} URLs are now withdrawn, {len(wanted) - len(new.urls):,} were already", flush=True)
    missing = [display_url(url) for url in wanted if url not in {row["url"] for row in rows}]
    if missing:
        named = ", ".join(missing[:_MAX_PRINTED])
        print(f"{len(missing):,} of them are in no list under {store.uri()}: {named}", flush=True)
    if len(every) > len(wanted):
        print(f"{len(every) - len(wanted):,} more URLs of the same images are also withdrawn", flush=True)
    print("\n".join(list_sightings(store, every)), flush=True)
    print(f"{revise_shards(store):,} shards were rewritten without them", flush=True)
    print(f"to delete the tars that still contain them: vlbert catalog gc {root} --delete", flush=True)


main = Command("vlbert withdraw", withdraw_images, ObjectMissing, StorageUnreachable)
