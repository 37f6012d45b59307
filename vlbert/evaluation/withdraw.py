"""Withdraw images by their URLs, and list every checkpoint that has seen them.

    vlbert withdraw ROOT URL ...                 or, one URL a line: --urls FILE
    vlbert catalog gc ROOT --delete              then: delete the tars that still have them

From now on no collection under ROOT takes these URLs, nor the same images from other URLs. The shards that have them
are written again without them. URLs are compared as they stand in the lists. The same command again finishes what was
interrupted, and prints the same list. docs/provenance.md says what is not reached.
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
from vlbert.evaluation.whence import lineage, seen

_SHOWN = 5  # URLs that are named where there are many


# --- what is committed ------------------------------------------------------------------------------------------------


def committed_rows(store: ObjectStore, withdrawn: Withdrawn) -> list[dict]:
    """All committed rows that are among these: dataset, stage, shard, url, sha256 and status of each."""
    found = []
    for (dataset, stage), shards in sorted(Inventory(store).manifests.items()):
        names, catalog = sorted(shards), Catalog(store, dataset)
        tables = catalog.columns(stage, ["url", "sha256", "status"], names)
        for shard, table in zip(names, tables, strict=True):
            place = {"dataset": dataset, "stage": stage, "shard": shard}
            found += [place | row for row in table.filter(withdrawn.contains(table)).to_pylist()]
    return found


def withdraw_urls(store: ObjectStore, urls: Collection[str]) -> tuple[Withdrawn, list[dict], frozenset[str]]:
    """Withdraw these URLs, and the images that they have, under whatever URL.

    Returns what was not withdrawn before, the committed rows that have these URLs, and all URLs of these images.
    """
    new = withdraw(store, urls)
    rows = committed_rows(store, Withdrawn(frozenset(urls)))
    images = frozenset(row["sha256"] for row in rows if row["status"] == OK) - {""}
    same = frozenset(row["url"] for row in committed_rows(store, Withdrawn(sha256=images))) if images else frozenset()
    withdraw(store, same, images)
    return new, rows, frozenset(urls) | same


def revise_shards(store: ObjectStore) -> int:
    """Write all shards that hold withdrawn images again without them; returns how many."""
    rows = committed_rows(store, read_withdrawn(store))
    places = sorted({(row["dataset"], row["stage"], row["shard"]) for row in rows if row["status"] == OK})
    return sum(withdraw_samples(Catalog(store, dataset), stage, shard) for dataset, stage, shard in places)


# --- what checkpoints have seen ---------------------------------------------------------------------------------------


def sightings(store: ObjectStore, urls: frozenset[str]) -> list[str]:
    """What the runs of each checkpoint under a root have seen of these URLs, as a table; and a line for each checkpoint
    of which that is not known."""
    rows, unknown = [], []
    for path in sorted(path for steps in Inventory(store).states.values() for path in steps.values()):
        folder = path.removesuffix(f"/{STATE}")
        try:
            checkpoint = read_checkpoint(store, folder, tensors=False)
            if not isinstance(checkpoint.state.get("data"), list):
                continue  # a detector: it learned from the files of its annotations
            runs, start = lineage(checkpoint)
        except (ValueError, ObjectMissing) as error:
            unknown.append(f"{store.uri(folder)}: {printable(error)}")
            continue
        if start:
            unknown.append(f"{store.uri(folder)}: it started from {start['checkpoint']}, which does not say")
        for trained in runs:
            try:
                found = [row for table in seen(trained, "url", urls) for row in table.to_pylist()]
            except ValueError as error:  # of its URLs one is in the snapshots, or these are gone
                unknown.append(f"{store.uri(folder)}: {printable(error)}")
                continue
            if found:
                count, first = len({row["url"] for row in found}), min(row["first_step"] for row in found)
                rows.append((folder, trained.run, f"{count:,} of {len(urls):,}", f"{first:,}"))
    lines = aligned(("checkpoint", "learned in run", "URLs", "first at step"), rows)
    if not rows:
        lines.append(f"no checkpoint under {store.uri()} has seen any of them, as far as is known")
    return lines + [f"not known of {line}" for line in unknown]


# --- as a program -----------------------------------------------------------------------------------------------------


def withdraw_images(
    root: Root,
    url: Annotated[tuple[str, ...], Positional, tyro.conf.arg(metavar="URL ...")] = (),
    urls: Path | None = None,
) -> None:
    """Withdraw images by their URLs, and list every checkpoint that has seen them.

    Args:
        url: as the list has it
        urls: file with a URL a line
    """
    wanted = [*dict.fromkeys([*url, *(read_lines(urls, "--urls") if urls else [])])]
    if not wanted:
        raise ValueError("no URL is given: name some, or a file with one a line: --urls FILE")
    if next(iter(open_store(root, write=False).list()), None) is None:  # which makes no folder
        raise ValueError(f"{root} holds nothing; see how the root's name is written")
    store = open_store(root)
    new, rows, every = withdraw_urls(store, wanted)
    print(f"{len(new.urls):,} URLs are withdrawn now, {len(wanted) - len(new.urls):,} were before", flush=True)
    missing = [display_url(url) for url in wanted if url not in {row["url"] for row in rows}]
    if missing:
        print(f"in no list under {store.uri()} are {len(missing):,} of them: {', '.join(missing[:_SHOWN])}", flush=True)
    if len(every) > len(wanted):
        print(f"{len(every) - len(wanted):,} more URLs have the same images, and are withdrawn, too", flush=True)
    print("\n".join(sightings(store, every)), flush=True)
    print(f"{revise_shards(store):,} shards were written again without them", flush=True)
    print(f"to delete the tars that still have them: vlbert catalog gc {root} --delete", flush=True)


main = Command("vlbert withdraw", withdraw_images, ObjectMissing, StorageUnreachable)
