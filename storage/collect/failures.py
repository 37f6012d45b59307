"""`vlbert failures`: lists the rows of a dataset without an image or without regions, with the reason and a hint."""

import csv
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass, fields
from typing import Annotated

import tyro

from storage.catalog import Catalog
from storage.collect.rows import Reading
from storage.collect.statuses import Status, hint_for
from storage.inventory import Inventory
from storage.manifests import OK
from storage.object_store import ObjectMissing, StorageUnreachable, open_store
from storage.programs import Command, Dataset, Root
from storage.redact import display_url
from storage.safe_json import printable
from storage.withdrawn import is_in

_IMAGES = "images"
_PASSED = (OK, "no_image")  # a shard of regions repeats the rows without an image if it has no others
_CLASSES = ("http_4xx", "http_5xx")
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="STATUS ...")]
AsCsv = Annotated[bool, tyro.conf.arg(name="csv")]


@dataclass(frozen=True)
class Failure:
    """A row without an image or without regions."""

    location: str  # of the row in its list: FILE:LINE, or "FILE, row N"
    stage: str
    status: str
    url: str  # URL or file name, as in the list
    reason: str
    hint: str

    def __str__(self) -> str:
        return printable(f"{self.location}: {display_url(self.url) or '(no URL)'}: {self.reason}")


def find_failures(
    catalog: Catalog, stage: str, statuses: AbstractSet[str], shards: Sequence[str] | None = None
) -> Iterator[Failure]:
    """Yield the rows of a stage with one of these statuses, in the order of their list. `shards` defaults to all."""
    headers = [header for header in catalog.headers(stage, shards).values() if header.statuses.keys() & statuses]
    images = catalog.headers(_IMAGES, [header.shard for header in headers]) if headers else {}
    for manifest in catalog.manifests(stage, [header.name for header in headers], ["row", "status", "detail", "url"]):
        source = images[manifest.shard].meta["source"]
        origin, reading = source["list"].rpartition(" ")[0], Reading(**source["reading"])
        for row in manifest.table.filter(is_in(manifest.table["status"], statuses)).to_pylist():
            status, location = row["status"], reading.location(origin, row["row"])
            reason, hint = row["detail"].removeprefix(f"{location}: "), "docs/detector.md explains it"
            if stage == _IMAGES:
                is_import = reading.form in ("images", "webdataset") or "://" not in row["url"]
                reason, hint = reason or Status(status).meaning, hint_for(status, is_import)
            yield Failure(location, stage, status, row["url"], reason, hint)


def first_failures(catalog: Catalog, stage: str) -> Iterator[Failure]:
    """Yield the first row with each status, the most frequent status first."""
    headers, counts = catalog.headers(stage), Counter()
    for header in headers.values():
        counts.update(header.statuses)
    for status, _ in counts.most_common():
        if status not in _PASSED:
            shard = next(shard for shard, header in headers.items() if status in header.statuses)
            yield next(find_failures(catalog, stage, {status}, [shard]))


# --- as a program -----------------------------------------------------------------------------------------------------


def list_failures(root: Root, dataset: Dataset, status: Names = (), as_csv: AsCsv = False) -> None:
    """List the rows of a dataset without an image or without regions: place in the list, reason and hint.

    vlbert failures ROOT DATASET --status http_404 timeout
    vlbert failures ROOT DATASET --csv > failures.csv

    Args:
        status: list only rows with these statuses, such as http_404 or http_5xx; by default, all that are not ok
        as_csv: print CSV, with URLs in full
    """
    store = open_store(root, write=False)
    catalog = Catalog(store, dataset)
    counts = {stage: catalog.counts(stage) for _, stage in sorted(Inventory(store, dataset).manifests)}
    found = sorted({name for names in counts.values() for name in names} - {*_PASSED})
    for name in status:
        if name not in {*found, *Status, *_CLASSES}:
            raise ValueError(f"no row of {dataset} has the status {name!r}; there are {', '.join(found) or 'none'}")
    wanted = [name for name in found if not status or name in status or f"{name[:6]}xx" in status]
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(field.name for field in fields(Failure))
        writer.writerows(astuple(failure) for stage in counts for failure in find_failures(catalog, stage, {*wanted}))
        return
    for stage, name in ((stage, name) for stage in counts for name in wanted if name in counts[stage]):
        for number, failure in enumerate(find_failures(catalog, stage, {name})):
            if not number:
                print(f"{stage}, {name}, {counts[stage][name]:,} rows; {failure.hint}")
            print(f"  {failure}")
    if not wanted:
        print(f"{dataset}: no such rows")


main = Command("vlbert failures", list_failures, ObjectMissing, StorageUnreachable)
