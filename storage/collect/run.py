"""`vlbert collect`: downloads the images of a caption list, or imports local images, into shards of the `images` stage.

Shard 00000 holds the first `rows_per_shard` rows of the list, 00001 the next ones, and so on. Committed rows are not
downloaded again. If rows are added at the end of the list, they make new shards. It is an error if rows of committed
shards have changed, because the dataset would mix two lists. Any number of processes may run at once, on any machines
that read the same list. Each process claims the shards that it works on (storage/claims.py), and at the end waits for
the others.

    vlbert collect ROOT DATASET --captions LIST
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from storage.catalog import Catalog, require_valid
from storage.claims import Claims, exit_at_sigterm
from storage.collect.download import Downloader, commit_images, run_all
from storage.collect.failures import first_failures
from storage.collect.imports import import_images, read_folder
from storage.collect.normalise import NormalisedImage
from storage.collect.plan import IMAGES, CollectSettings, Part, identify, plan, prepare_rows, source_of
from storage.collect.rows import CaptionRow, Rows
from storage.collect.spool import Spool
from storage.collect.statuses import NOT_REQUESTED, UNREACHABLE, Status
from storage.collect.tars import TarSet
from storage.manifests import Header, Manifest
from storage.object_store import ObjectMissing, open_store
from storage.programs import Command, Flat, Root
from storage.progress import progress_line
from storage.redact import display_url
from storage.withdrawn import Withdrawn, read_withdrawn

SHARDS_AT_ONCE = 8  # shards of a group in parallel: while one waits for slow servers, the others continue
# Fewer rows on fewer hosts may all be gone. With more, the cause is probably this machine's network.
_FEW_HOSTS, _FEW_ROWS = 5, 20
_REPORT_SECONDS, _REPORTS = 10.0, 6  # seconds between two lines of progress, and lines from which the time left follows
_HINTS = {  # by the most frequent status, if no row of a list is ok
    Status.BLOCKED_ADDRESS: "If you trust this server, set download.allowed_hosts to its host:port",
    Status.BAD_URL: "Set columns to the columns of URL and caption; for file names, set images to their folder",
    **dict.fromkeys(UNREACHABLE, "Check this machine's network and whether the servers are up"),
}


@dataclass(frozen=True)
class Group:
    """Shards to collect together (as one task in a Prefect flow), and the progress of the run's earlier groups."""

    parts: tuple[Part, ...]
    list_id: str  # id of the stored rows
    before: dict[str, int]  # rows by status of the run's earlier groups
    rows: int  # number of rows of the whole run
    has_images: bool = True  # whether the dataset has an ok row; until then, shards without one are not committed
    started: float = dataclasses.field(default_factory=time.monotonic)  # start of the run, by time.monotonic


@dataclass(frozen=True)
class Collected:
    """The result of collecting a dataset."""

    dataset: str
    shards: int
    new_shards: int  # shards that this run committed and that did not exist before
    counts: dict[str, int]  # rows of the dataset by status
    seconds: float


OnCommit = Callable[[str], object]  # called with the name of each shard that this run commits


def collect(
    root: str,
    settings: CollectSettings,
    log: Callable[[str], None] = print,
    run_group: Callable[[str, CollectSettings, Group, OnCommit], dict[str, int]] | None = None,
) -> Collected:
    """Download or import the missing shards of a dataset, in groups. Return a summary.

    `run_group` collects one group (default: `collect_group`). Raises ValueError if no shard of the dataset,
    new or older, has an ok row.
    """
    started = time.monotonic()
    run_group = run_group or functools.partial(collect_group, log=log)
    new_shards = set()
    catalog = Catalog(open_store(root), settings.name)
    headers = catalog.headers(IMAGES)

    def log_line(line: str) -> None:
        log(f"{settings.name}: {line}")

    listed = prepare_rows(catalog.store, settings)
    parts = plan(settings, listed, headers)
    missing = [part for part in parts if part.shard not in headers]
    missing += [  # committed shards with rows to request again
        dataclasses.replace(part, replaces=headers[part.shard].sha256)
        for part in parts
        if part.shard in headers and settings.retried_statuses & headers[part.shard].statuses.keys()
    ]
    _log_plan(settings, listed, len(missing), len(parts), log_line)
    has_images = any(header.ok_rows for header in headers.values())

    claims = Claims(catalog.store, catalog.path(IMAGES, ""))

    def pending(shards: Sequence[str]) -> list[str]:
        committed = set(catalog.shards(IMAGES))
        return [shard for shard in shards if shard not in committed]

    while missing:
        rows, counts = sum(part.stop - part.start for part in missing), Counter()
        for first in range(0, len(missing), settings.shards_per_task):
            together = tuple(missing[first : first + settings.shards_per_task])
            group = Group(together, listed.id, dict(counts), rows, has_images, started)
            counts.update(run_group(root, settings, group, new_shards.add))
            has_images = has_images or counts[Status.OK] > 0
            log_line(f"{first + len(together)} of {len(missing)} shards collected: {_by_status(counts)}")
        left = claims.wait([part.shard for part in missing], pending, log_line, for_all=True)
        missing = [part for part in missing if part.shard in set(left)]
        has_images = any(header.ok_rows for header in catalog.headers(IMAGES).values())
        if missing and not has_images and counts.total() == rows:  # other workers had none
            raise ValueError(_nothing_stored(settings, listed, counts, missing[0]))
        if missing:
            log_line(f"collecting {len(missing)} shards again, which had no image or were claimed by another worker")
    new = len(new_shards - headers.keys())
    return Collected(settings.name, len(parts), new, catalog.counts(IMAGES), time.monotonic() - started)


def _log_plan(settings: CollectSettings, listed: Rows, missing: int, shards: int, log: Callable[[str], None]) -> None:
    if not missing:
        log(f"nothing to download: all {shards} shards are committed")
        return
    log(f"{missing} of {shards} shards to collect, {listed.count} rows in {settings.origin}, read as {listed.reading}")
    if listed.unreadable:
        (row,) = listed.read(listed.unreadable[0], listed.unreadable[0] + 1)
        log(f"{len(listed.unreadable)} rows cannot be collected, the first: {row.status}: {row.detail}")
    if settings.is_download and not settings.download.contact and not settings.download.allowed_hosts:
        log("warning: set download.contact to a URL or mail address, so that the servers' owners can ask questions")


def _by_status(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in Counter(counts).most_common())


def _nothing_stored(settings: CollectSettings, listed: Rows, counts: Mapping[str, int], part: Part) -> str:
    """Return the error message for a dataset without an ok row. The message shows the first row of `part`."""
    status = Status(Counter(counts).most_common(1)[0][0])
    (row,) = listed.read(part.start, part.start + 1)
    hints = [f"{status}: {status.meaning} (docs/images.md)", row.detail]
    if settings.is_download and status in _HINTS:
        location = listed.reading.location(settings.origin, row.row)
        hints += [_HINTS[status], f"{location} has {display_url(row.url)!r} as its URL"]
    return (
        f"{settings.name}: no row of {settings.origin} has an image ({_by_status(counts)}); nothing was committed. "
        f"{'; '.join(filter(None, hints))}. Then run again"
    )


def collect_group(
    root: str,
    settings: CollectSettings,
    group: Group,
    on_commit: OnCommit = lambda shard: None,
    log: Callable[[str], None] = print,
) -> dict[str, int]:
    """Collect and commit the shards of a group, a few at a time. Return the number of rows with each status.

    Shards that another worker has claimed or committed are skipped. A shard without any image is committed only if the
    dataset or this group already has an image. If none of a shard's hosts can be reached, the shard is not committed,
    and ConnectionError is raised.
    """
    catalog = Catalog(open_store(root), settings.name)
    rows = Rows(catalog.store, settings.name, group.list_id)
    if settings.webdataset and identify(settings, rows.reading) != rows.id:
        raise ValueError(
            f"{settings.name}: {settings.origin} was changed while it was collected. Shard {group.parts[0].shard} was "
            "not committed; run again"
        )
    with Claims(catalog.store, catalog.path(IMAGES, "")) as claims:
        withdrawn = read_withdrawn(catalog.store)
        collector = _GroupCollector(catalog, settings, group, rows, on_commit, log, claims, withdrawn)
        asyncio.run(collector.collect())
        return collector.count()


@dataclass
class _GroupCollector:
    """Collects the shards of one group. Files are accessed in a thread, so that downloads can continue meanwhile."""

    catalog: Catalog
    settings: CollectSettings
    group: Group
    rows: Rows
    on_commit: OnCommit
    log: Callable[[str], None]
    claims: Claims
    withdrawn: Withdrawn
    counts: dict[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)  # shard -> rows by status, if done

    def count(self) -> dict[str, int]:
        """Return the number of rows with each status, over all finished shards."""
        return dict(sum(map(Counter, self.counts.values()), Counter()))

    async def report(self, downloader: Downloader | None) -> None:
        """Log the progress at intervals. The time left follows from the last minute and from the URLs that hang."""
        before: deque[tuple[float, int]] = deque(maxlen=_REPORTS)
        while True:
            in_progress, waiting = downloader.progress() if downloader else (Counter(), 0.0)
            counts = Counter(self.group.before) + Counter(self.count()) + in_progress
            now, done = time.monotonic(), counts.total()
            if before:
                rate = (done - before[0][1]) / (now - before[0][0])
                left = max((self.group.rows - done) / rate if rate else 0.0, waiting) or None
                seconds = now - self.group.started
                self.log(progress_line(self.settings.name, done, self.group.rows, "rows", counts, seconds, left))
            before.append((now, done))
            await asyncio.sleep(_REPORT_SECONDS)

    async def collect(self) -> None:
        """Collect all shards of the group: a few at a time if they are downloaded, one at a time if imported."""
        is_download, download = self.settings.is_download, self.settings.download
        free = asyncio.Semaphore(SHARDS_AT_ONCE if is_download else 1)

        async def claim_and_collect(part: Part) -> None:
            async with free:
                if await self.in_thread(self.claims.take, [part.shard]):
                    try:
                        with Spool() as spool:
                            await self.collect_shard(part, downloader, spool)
                    finally:
                        await self.in_thread(self.claims.release, part.shard)

        with ThreadPoolExecutor(1, thread_name_prefix="files") as self.files:
            async with Downloader(download) if is_download else contextlib.nullcontext() as downloader:
                reports = asyncio.create_task(self.report(downloader))
                try:
                    await run_all(claim_and_collect(part) for part in self.group.parts)
                finally:
                    if not reports.cancel():
                        reports.result()  # raises the error of `log`

    async def in_thread(self, function: Callable, *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.files, function, *arguments)

    async def collect_shard(self, part: Part, downloader: Downloader | None, spool: Spool) -> None:
        """Collect one shard: read its rows, download or import their images, and commit the result."""
        replaces = await self.in_thread(self.read_manifest, part.shard)
        if replaces and replaces.sha256 != part.replaces:  # another worker has committed the shard
            self.counts[part.shard] = replaces.statuses
            return
        rows = await self.in_thread(self.rows.read, part.start, part.stop)
        before = await self.in_thread(self.read_results, replaces, rows, spool) if replaces else {}
        results = before | self.settle_rows(part, rows)
        retried = self.settings.retried_statuses
        left = [row for row in rows if row.row not in results or results[row.row].status in retried]
        if downloader is None:
            collected = await self.in_thread(self.import_rows, left, spool)
        else:
            collected = await downloader.download(left, spool)
            if not self.settings.commit_unreachable and not replaces:
                check_network(part, collected, self.settings)
        for row in collected:  # a retried row whose host is still unreachable keeps its earlier result
            if row.row not in results or row.status not in UNREACHABLE:
                results[row.row] = row
        self.counts[part.shard] = statuses = Counter(row.status for row in results.values())
        if replaces:
            must_commit = any(results[number].status != row.status for number, row in before.items())
        else:  # a new shard without an image is not committed while its dataset has none
            unreachable = self.settings.commit_unreachable and statuses.keys() & UNREACHABLE
            must_commit = bool(self.group.has_images or unreachable or self.count().get(Status.OK))
        if must_commit:
            await self.in_thread(self.commit, part, [results[row.row] for row in rows], replaces)

    def read_manifest(self, shard: str) -> Manifest | None:
        """Return the newest manifest of a shard, or None if the shard is not committed."""
        with contextlib.suppress(ObjectMissing):
            return self.catalog.manifest(IMAGES, shard)

    def read_results(self, manifest: Manifest, rows: Sequence[CaptionRow], spool: Spool) -> dict[int, CaptionRow]:
        """Return the rows of a committed shard with their results, keyed by row number.

        `rows` are all rows of the shard. Committed images are copied to the spool.
        """
        samples, results = map(require_valid, self.catalog.read_each(manifest)), {}
        for row, line in zip(rows, manifest.table.to_pylist(), strict=True):
            image = None
            if line["status"] == Status.OK:
                sample = next(samples)
                size = sample.width, sample.height
                image = spool.write(NormalisedImage(sample.image, *size, sample.sha256, sample.flags))
            results[row.row] = dataclasses.replace(row, status=line["status"], detail=line["detail"], image=image)
        return results

    def settle_rows(self, part: Part, rows: Iterable[CaptionRow]) -> dict[int, CaptionRow]:
        """Return the rows that need no request (withdrawn, unreadable or repeated), keyed by row number."""
        results, firsts = {}, self.rows.duplicates(part.start, part.stop)
        for row in rows:
            if row.url in self.withdrawn.urls:
                results[row.row] = dataclasses.replace(row, status=Status.WITHDRAWN, detail="")
            elif row.status:
                results[row.row] = row
            elif row.row in firsts:
                first = self.rows.reading.location(Path(self.settings.origin).name, firsts[row.row])
                detail = f"of {first}"
                results[row.row] = dataclasses.replace(row, status=Status.DUPLICATE, detail=detail)
        return results

    def import_rows(self, rows: Sequence[CaptionRow], spool: Spool) -> list[CaptionRow]:
        """Import the images of `rows`. Return the rows with their statuses. Log only the first missing file."""
        settings, limit = self.settings, self.settings.download.max_bytes
        if settings.images:
            images = read_folder(Path(settings.images), dict.fromkeys(row.url for row in rows), limit)
        else:
            images = TarSet(settings.origin).read(dict.fromkeys(row.place for row in rows if row.place), limit)
        try:
            imported = import_images(rows, images, settings.download, spool)
        except (MemoryError, RuntimeError) as error:
            error.add_note(f"while importing images from {settings.images or settings.origin}")
            raise
        missing = [row for row in imported if row.status == Status.MISSING_FILE]
        if missing:
            more, location = len(missing) - 1, self.rows.reading.location(settings.origin, missing[0].row)
            self.log(f"{settings.name}: {location}: missing_file, and {more} more of the shard: {missing[0].detail}")
        return imported

    def commit(self, part: Part, rows: Sequence[CaptionRow], replaces: Header | None) -> None:
        source = source_of(self.settings, self.rows, part)
        if commit_images(self.catalog, part.shard, rows, self.settings.download, source, replaces):
            self.on_commit(part.shard)


def check_network(part: Part, rows: Sequence[CaptionRow], settings: CollectSettings) -> None:
    """Raise ConnectionError if every requested row of a shard has a status in UNREACHABLE.

    A shard with fewer than 20 requested rows and fewer than five hosts is not checked.
    """
    requested = [row for row in rows if row.status not in NOT_REQUESTED]
    hosts = {urlsplit(row.url).hostname for row in requested}
    few = len(hosts) < _FEW_HOSTS and len(requested) < _FEW_ROWS
    if not few and all(row.status in UNREACHABLE for row in requested):
        counts = _by_status(Counter(row.status for row in requested))
        raise ConnectionError(
            f"{settings.name}: none of the {len(hosts)} hosts of shard {part.shard} (rows {part.start} to {part.stop} "
            f"of {settings.origin}) could be reached: {counts}, the first {display_url(requested[0].url)}: "
            f"{requested[0].detail}. It was not committed. {_HINTS[Status.CONNECT]}, and run again; if these hosts are "
            "gone for good, set --commit_unreachable"
        )


# --- as a program -----------------------------------------------------------------------------------------------------


def collect_images(root: Root, settings: Annotated[CollectSettings, Flat]) -> None:
    """Download the images of a caption list, or import images, into shards. Continues an interrupted run.

    vlbert collect ROOT DATASET --captions LIST --download.contact me@example.org
    """
    exit_at_sigterm()
    collected = collect(root, settings, functools.partial(print, flush=True))
    print(
        f"{collected.dataset}: {collected.new_shards} new of {collected.shards} shards in {collected.seconds:.1f} s; "
        f"all rows: {_by_status(collected.counts)}"
    )
    for failure in first_failures(Catalog(open_store(root), settings.name), IMAGES):
        print(f"{failure.status}, such as {failure}; {failure.hint}")
    if collected.counts.keys() - {Status.OK}:
        print(f"vlbert failures {root} {settings.name} lists all of them")


main = Command("vlbert collect", collect_images, ObjectMissing)
