"""Collect: turn a caption list, or images that are there already, into shards of the stage `images`.

Shard 00000 holds the first `rows_per_shard` rows of the list, 00001 the next ones, and so on. Committed rows are not
downloaded again. A list may grow: its new rows make new shards. If rows of committed shards changed in the list, that
is an error, because one dataset would mix two lists. Any number of these may run at once, on any machines that read
the same list: each claims the shards that it is at work on (storage/claims.py), and waits at the end for the others.

    vlbert collect ROOT DATASET captions=LIST [field=value ...]
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from storage.catalog import Catalog
from storage.claims import Claims, exit_at_sigterm
from storage.collect.download import (
    STATUSES,
    Download,
    Downloader,
    Outcome,
    all_of,
    commit_images,
    image_config,
    import_images,
)
from storage.collect.img2dataset import Img2dataset
from storage.collect.lists import CaptionRow, ListFile, where
from storage.collect.normalise import NormalisedImage, Refused
from storage.collect.plan import (
    CollectSettings,
    Part,
    check_committed,
    check_unchanged,
    identity,
    image_files,
    image_of,
    plan,
    rows_of,
    stored_by_others,
)
from storage.collect.spool import PartialShard, Spool, remove_partial
from storage.collect.tars import TarSet
from storage.manifests import OK, Header
from storage.object_store import ObjectMissing, StorageUnreachable, open_store
from storage.programs import make_parser
from storage.progress import progress_line
from storage.redact import shown_url
from storage.settings import add_fields, from_assignments
from storage.withdrawn import WITHDRAWN, read_withdrawn

IMAGES = "images"
SHARDS_AT_ONCE = 5  # of one group: while one shard waits for slow servers, the others go on
UNREACHABLE = {"dns", "connect", "timeout", "host_timeout"}  # also while this machine has no network
_NOT_REQUESTED = {"duplicate", WITHDRAWN, "bad_url", "blocked_address"}  # statuses of rows that need no request
# Fewer rows of fewer hosts may all be gone. If there are more, the fault is probably this machine's network.
_FEW_HOSTS, _FEW_ROWS = 5, 20
_REPORT_SECONDS = 10.0  # between two lines of progress, at least
_WAYS_OUT = {  # by the most frequent status, if no row of a list is ok
    "blocked_address": "If you trust this server, set download.allowed_hosts to its host:port",
    "bad_url": "Name the column of the URLs under columns; if they are names of files, their folder under images",
    "noindex": "If its owner allows this use, set download.obey_noindex=false",
    "robots_txt": "If its owner allows this use, set download.obey_robots_txt=false",
    **dict.fromkeys(UNREACHABLE, "Check this machine's network and whether the servers are up"),
}


@dataclass(frozen=True)
class Group:
    """Shards that are collected together.

    before      rows by status of the run's earlier groups
    rows        of the whole run, as `shards` and `started` (by time.monotonic)
    has_images  whether the dataset has an ok row; until then, a shard without one is not committed
    """

    parts: tuple[Part, ...]
    before: dict[str, int]
    rows: int
    shards: int
    has_images: bool = True
    started: float = dataclasses.field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Collected:
    """A dataset's shards and rows by status, and how many shards this run committed.

    retried_rows, newly_ok: rows of earlier shards, by CollectSettings.retry_statuses.
    """

    dataset: str
    shards: int
    new_shards: int
    counts: dict[str, int]
    seconds: float
    retried_rows: int = 0
    newly_ok: int = 0


class NothingStored(ValueError):
    """No row of the whole dataset is ok, so nothing was committed; the message says what to do."""


OnCommit = Callable[[str], object]  # called with the name of each shard that this run commits


def collect(
    root: str,
    settings: CollectSettings,
    log: Callable[[str], None] = print,
    run_group: Callable[[str, CollectSettings, Group, OnCommit], dict[str, int]] | None = None,
) -> Collected:
    """Download or import the missing shards of the dataset; `run_group` may wrap `collect_group`, as the flow does.

    NothingStored if no row of the dataset is ok, committed ones included.
    """
    started = time.monotonic()
    run_group = run_group or functools.partial(collect_group, log=log)
    new_shards = set()
    catalog = Catalog(open_store(root), settings.name)
    headers = catalog.headers(IMAGES)
    done = {shard: header.meta for shard, header in headers.items()}
    parts = plan(settings, {shard: meta["source"]["rows"][1] for shard, meta in done.items()})
    check_committed(done, parts, settings)
    missing = [part for part in parts if part.shard not in done]
    if missing:
        origin = settings.origin
        log(f"{settings.name}: {len(missing)} of {len(parts)} shards to collect, {parts[-1].stop} rows in {origin}")
        if parts[0].reading:
            log(f"{settings.name}: {origin} is read as {parts[0].reading}")
        if settings.is_download and not settings.download.contact and not settings.download.allowed_hosts:
            log(
                f"{settings.name}: warning: no contact is set, so the servers' owners cannot ask what this is; set "
                "download.contact to a URL or a mail address"
            )
    else:
        log(f"{settings.name}: nothing to download: {len(done)} of {len(parts)} shards are committed")
    wanted = settings.retried_statuses
    retried = {
        part.shard: sum(headers[part.shard].statuses.get(one, 0) for one in wanted)
        for part in parts
        if part.shard in done
    }
    retries = [
        dataclasses.replace(part, replaces=headers[part.shard].sha256) for part in parts if retried.get(part.shard)
    ]
    if wanted:
        rows, statuses = sum(retried.values()), ", ".join(settings.retry_statuses)
        log(f"{settings.name}: {rows} rows of {len(retries)} shards are requested again: {statuses}")
    missing += retries
    remove_partial(catalog.store, settings.name, done.keys() - {part.shard for part in retries})
    has_images = any(header.ok_rows for header in headers.values())

    claims = Claims(catalog.store, catalog.path(IMAGES, ""))

    def pending(shards: Sequence[str]) -> list[str]:
        committed = set(catalog.shards(IMAGES))
        return [shard for shard in shards if shard not in committed]

    def say(line: str) -> None:
        log(f"{settings.name}: {line}")

    while missing:
        rows, counts = sum(part.stop - part.start for part in missing), Counter()
        for first in range(0, len(missing), settings.shards_per_task):
            parts_of_group = tuple(missing[first : first + settings.shards_per_task])
            group = Group(parts_of_group, dict(counts), rows, len(missing), has_images, started)
            counts.update(run_group(root, settings, group, new_shards.add))
            has_images = has_images or counts[OK] > 0
            ready = first + len(parts_of_group)
            log(f"{settings.name}: {ready} of {len(missing)} shards collected: {_by_status(counts)}")
        left = claims.wait([part.shard for part in missing], pending, say, for_all=True)
        missing = [part for part in missing if part.shard in set(left)]
        has_images = any(header.ok_rows for header in catalog.headers(IMAGES).values())
        if missing and not has_images and counts.total() == rows:  # none of them was another worker's
            raise NothingStored(_nothing_stored(settings, counts, missing[0]))
        if missing:
            say(f"{len(missing)} shards that had no image, or another worker, are collected again")
    names = [part.shard for part in retries]
    newly_ok = sum(now.ok_rows - headers[shard].ok_rows for shard, now in catalog.headers(IMAGES, names).items())
    return Collected(
        settings.name,
        len(parts),
        len(new_shards - set(names)),
        catalog.counts(IMAGES),
        time.monotonic() - started,
        sum(retried.values()),
        newly_ok,
    )


def _by_status(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in Counter(counts).most_common())


def _nothing_stored(settings: CollectSettings, counts: Counter[str], part: Part) -> str:
    """The message if no row is ok; `part` is a shard that was not committed."""
    status = counts.most_common(1)[0][0]
    way_out = f"{status}: {STATUSES[status]} (docs/download.md)"
    if settings.is_download and status in _WAYS_OUT:
        with ListFile(settings.list_file, part.known_reading) as list_file:
            url = shown_url(rows_of(part, settings, list_file)[0].url)
        place = where(settings.list_file, part.known_reading, part.start)
        way_out += f". {_WAYS_OUT[status]}; {place} has {url!r} as its URL"
    return (
        f"{settings.name}: no row of {settings.origin} gave an image ({_by_status(counts)}); nothing was committed. "
        f"{way_out}. Then run again"
    )


def collect_group(
    root: str,
    settings: CollectSettings,
    group: Group,
    on_commit: OnCommit = lambda shard: None,
    log: Callable[[str], None] = print,
) -> dict[str, int]:
    """Collect these shards, a few at a time, and commit each when it is complete; the group's rows by status.

    A shard that another worker has claimed or committed is skipped. ConnectionError if no host of a shard could be
    reached; that shard is not committed. A shard without an image is committed only once the dataset or this group has
    one.
    """
    catalog = Catalog(open_store(root), settings.name)
    with Claims(catalog.store, catalog.path(IMAGES, "")) as claims:
        collecting = _Group(catalog, settings, group, on_commit, log, claims)
        if settings.is_download:
            asyncio.run(_download(collecting))
            return collecting.count()
        files = image_files(settings.images) if settings.images and not settings.captions else []
        stored = stored_by_others(settings)
        for part in group.parts:
            if not claims.take([part.shard]):
                continue
            if committed := collecting.committed(part):
                collecting.update(part, committed)
            else:
                with Spool() as spool:
                    downloads = collecting.without_withdrawn(_import(part, files, stored, settings, spool, log))
                    if collecting.wants(part, downloads):
                        collecting.commit(part, downloads)
            claims.release(part.shard)
        return collecting.count()


class _Group:
    """A group while it is collected: commits its shards, and logs a line of progress from time to time."""

    def __init__(
        self,
        catalog: Catalog,
        settings: CollectSettings,
        group: Group,
        on_commit: OnCommit,
        log: Callable[[str], None],
        claims: Claims,
    ):
        self.catalog, self.settings, self.group, self.on_commit, self.log = catalog, settings, group, on_commit, log
        self.claims = claims
        self.withdrawn = read_withdrawn(catalog.store)
        self.counts: dict[str, Mapping[str, int]] = {}  # rows by status of each shard
        self.due = time.monotonic() + _REPORT_SECONDS

    def count(self) -> dict[str, int]:
        """Rows by status."""
        return dict(sum(map(Counter, self.counts.values()), Counter()))

    def update(self, part: Part, counts: Mapping[str, int]) -> None:
        """Set a shard's rows by status so far."""
        self.counts[part.shard] = counts
        if time.monotonic() >= self.due:
            counts = Counter(self.group.before) + Counter(self.count())
            name, seconds = self.settings.name, time.monotonic() - self.group.started
            self.log(progress_line(name, counts.total(), self.group.rows, "rows", counts, seconds))
            self.due = time.monotonic() + _REPORT_SECONDS

    def committed(self, part: Part) -> dict[str, int]:
        """Rows by status if another process, or an earlier attempt, has committed the shard; else {}."""
        try:
            (header,) = self.catalog.headers(IMAGES, [part.shard]).values()
        except ObjectMissing:
            return {}
        return {} if header.sha256 == part.replaces else header.statuses

    def without_withdrawn(self, downloads: Sequence[Download]) -> list[Download]:
        """The results of rows, without the images that were withdrawn; a commit would leave these out, too."""
        sha256s = ["" if item.image is None else item.image.sha256 for item in downloads]
        return [
            _withdrawn(item.row) if self.withdrawn.has(item.row.url, sha256) else item
            for item, sha256 in zip(downloads, sha256s, strict=True)
        ]

    def wants(self, part: Part, downloads: Sequence[Download]) -> bool:
        """Whether a new shard is to be committed: not one without an image while its dataset has none."""
        statuses = Counter(item.status for item in downloads)
        self.update(part, statuses)
        gone = self.settings.commit_unreachable and statuses.keys() & UNREACHABLE
        return bool(self.group.has_images or gone or self.count().get(OK))

    def commit(self, part: Part, downloads: Sequence[Download], replaces: Header | None = None) -> None:
        reading = None if part.reading is None else part.reading.as_meta
        settings, source = self.settings.download, part.source
        if commit_images(
            self.catalog, part.shard, downloads, settings, source=source, reading=reading, replaces=replaces
        ):
            self.on_commit(part.shard)


async def _download(group: _Group) -> None:
    catalog, settings = group.catalog, group.settings
    free = asyncio.Semaphore(SHARDS_AT_ONCE)
    loop = asyncio.get_running_loop()

    async def save(partial: PartialShard) -> None:
        while True:
            await asyncio.sleep(settings.save_every)
            try:
                await loop.run_in_executor(saves, partial.save)
            except StorageUnreachable as error:
                group.log(f"{settings.name}: images in progress could not be saved: {error}")

    async def claimed(part: Part) -> None:
        async with free:
            if await loop.run_in_executor(files, group.claims.take, [part.shard]):
                try:
                    await one(part)
                finally:
                    await loop.run_in_executor(files, group.claims.release, part.shard)

    async def one(part: Part) -> None:
        if committed := await loop.run_in_executor(files, group.committed, part):
            group.update(part, committed)
            return
        rows = await loop.run_in_executor(files, rows_of, part, settings, list_file)
        partial = PartialShard(catalog.store, settings.name, part.shard, image_config(settings.download)[1])
        with Spool() as spool:
            replaces, known = await loop.run_in_executor(files, _known_rows, catalog, part, rows, spool)
            before = {row: item.status for row, item in known.items()}
            known |= {row.row: _withdrawn(row) for row in rows if row.url in group.withdrawn.urls}
            stored = await loop.run_in_executor(files, partial.load, spool)
            if stored:
                images = f"{len(stored)} images from an earlier run"
                group.log(f"{settings.name}: shard {part.shard} continues with {images}")
            retried = settings.retried_statuses
            requested = [row for row in rows if row.row not in known or known[row.row].status in retried]
            rows_of_url = Counter(row.url for row in requested)
            counts = Counter(item.status for item in known.values() if item.status not in retried)

            def on_result(url: str, outcome: Outcome) -> None:
                counts[outcome.status if isinstance(outcome, Refused) else OK] += rows_of_url[url]
                group.update(part, counts)
                if not isinstance(outcome, Refused):
                    partial.add(url, outcome)

            for url in rows_of_url.keys() & stored:
                counts[OK] += rows_of_url[url]
            saving = asyncio.ensure_future(save(partial))
            try:
                answers = await downloader.download(requested, spool, on_result, stored)
            finally:
                saving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await saving
            if not settings.commit_unreachable and not replaces:
                check_network(part, answers, settings)
            results = dict(known)
            for item in answers:  # a row whose host could not be reached again keeps its result from before
                if item.row.row not in known or item.status not in UNREACHABLE:
                    results[item.row.row] = item
            downloads = group.without_withdrawn([results[row.row] for row in rows])
            wanted = group.wants(part, downloads)
            if replaces:
                wanted = any(results[row].status != before[row] for row in before)
            if wanted:
                await loop.run_in_executor(files, group.commit, part, downloads, replaces)
            await loop.run_in_executor(files, partial.close)

    # Files are read and written in a thread, so that the other shards go on. Saves have their own thread, so that they
    # do not wait for the commit of a large shard.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="files") as files,
        ThreadPoolExecutor(1, thread_name_prefix="saves") as saves,
        ListFile(settings.list_file, group.group.parts[0].known_reading) as list_file,
    ):
        async with Downloader(settings.download) as downloader:
            await all_of(claimed(part) for part in group.group.parts)


def _withdrawn(row: CaptionRow) -> Download:
    return Download(row, WITHDRAWN, "", None)


def _known_rows(
    catalog: Catalog, part: Part, rows: Sequence[CaptionRow], spool: Spool
) -> tuple[Header | None, dict[int, Download]]:
    """The committed manifest if some of its rows are requested again, and the results that are known, by row."""
    if not part.replaces:
        first = dict(part.duplicates)
        repeated = [row for row in rows if row.row in first]
        return None, {row.row: Download(row, "duplicate", f"of row {first[row.row]}", None) for row in repeated}
    manifest, samples, known = catalog.manifest(IMAGES, part.shard), catalog.read(IMAGES, part.shard), {}
    for row, line in zip(rows, manifest.table.to_pylist(), strict=True):
        image = None
        if line["status"] == OK:
            sample = next(samples)
            image = spool.write(NormalisedImage(sample.image, sample.width, sample.height, sample.sha256, sample.flags))
        known[row.row] = Download(row, line["status"], line["detail"], image)
    return manifest, known


def check_network(part: Part, downloads: Sequence[Download], settings: CollectSettings) -> None:
    """ConnectionError if every requested row is UNREACHABLE, and these are at least 20 rows or of five hosts."""
    requested = [item for item in downloads if item.status not in _NOT_REQUESTED]
    hosts = {urlsplit(item.row.url).hostname for item in requested}
    few = len(hosts) < _FEW_HOSTS and len(requested) < _FEW_ROWS
    if not few and all(item.status in UNREACHABLE for item in requested):
        counts = _by_status(Counter(item.status for item in requested))
        raise ConnectionError(
            f"{settings.name}: none of the {len(hosts)} hosts of shard {part.shard} (rows {part.start} to {part.stop} "
            f"of {settings.origin}) could be reached: {counts}, the first "
            f"{shown_url(requested[0].row.url)}: {requested[0].detail}. It was not committed. Check this machine's "
            "network and whether the server is up, and run again; if these hosts are gone for good, set "
            "commit_unreachable=true"
        )


def _import(
    part: Part,
    files: Sequence[Path],
    stored: Img2dataset | TarSet | None,
    settings: CollectSettings,
    spool: Spool,
    log: Callable[[str], None],
) -> list[Download]:
    """The rows of a part: of `files`, the image files of a folder, of a folder's captions, or as others stored them."""
    if settings.images and settings.captions:
        return _import_captioned(part, settings, spool, log)
    if settings.images:
        files = files[part.start : part.stop]
        check_unchanged(part, [identity(file) for file in files], settings)
        names = (os.fsencode(file.name).decode(errors="backslashreplace") for file in files)  # not all are UTF-8
        rows = [CaptionRow(number, "", name) for number, name in enumerate(names, part.start)]
        return import_images(rows, files, settings.download, spool)
    assert stored is not None, settings
    count, duplicates = part.stop - part.start, dict(part.duplicates)
    rows, downloads = stored.import_rows(
        part.file, part.offset, count, part.known_reading, part.start, duplicates, settings.download, spool
    )
    check_unchanged(part, [row.line() for row in rows], settings)
    return downloads


def _import_captioned(
    part: Part, settings: CollectSettings, spool: Spool, log: Callable[[str], None]
) -> list[Download]:
    """The rows of the captions of a folder; the first image that is missing is logged."""
    with ListFile(settings.list_file, part.known_reading) as list_file:
        rows = rows_of(part, settings, list_file)
    found, files, firsts = {}, {}, dict(part.duplicates)
    for row in rows:
        if row.row in firsts:
            found[row.row] = Download(row, "duplicate", f"of row {firsts[row.row]}", None)
            continue
        try:
            files[row.row] = image_of(row, settings)
        except ValueError as error:
            found[row.row] = Download(row, "missing_file", str(error), None)
    images = import_images([row for row in rows if row.row in files], list(files.values()), settings.download, spool)
    found |= {item.row.row: item for item in images}
    missing = [row for row in rows if found[row.row].status == "missing_file"]
    if missing:
        first = missing[0]
        more = f", and of {len(missing) - 1} more rows of shard {part.shard}" if missing[1:] else ""
        place = where(settings.list_file, part.known_reading, first.row)
        log(f"{settings.name}: {place}: there is no image {first.url!r} in {settings.images}{more}: missing_file")
    return [found[row.row] for row in rows]


# --- as a program -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(
        "vlbert collect",
        "Download a caption list, or import images, into shards; goes on where it was stopped.\n\n"
        "    vlbert collect ROOT DATASET captions=LIST download.contact=me@example.org",
    )
    parser.add_argument("root", metavar="ROOT", help="a folder or s3://bucket/prefix")
    parser.add_argument("dataset", metavar="DATASET", help="the name under which the images are stored: captions, ...")
    add_fields(parser, CollectSettings, without=["name"])
    options = parser.parse_args(arguments)
    try:
        settings = from_assignments(CollectSettings, options.fields, name=options.dataset)
        collected = collect(options.root, settings, functools.partial(print, flush=True))
    except (ValueError, OSError, ObjectMissing) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        print("stopped; what is committed stays, and the same command goes on from there", file=sys.stderr)
        sys.exit(130)  # as the shell has it for Ctrl-C
    again = f"{collected.newly_ok} of {collected.retried_rows} requested again are ok now; "
    print(
        f"{collected.dataset}: {collected.new_shards} new of {collected.shards} shards in {collected.seconds:.1f} s; "
        f"{again if settings.retry_statuses else ''}all rows: {_by_status(collected.counts)}"
    )


if __name__ == "__main__":
    exit_at_sigterm()
    main()
