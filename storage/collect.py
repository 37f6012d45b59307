"""Collect: turn a caption list, a folder of images or a folder of img2dataset into shards of the stage `images`.

Shard 00000 holds the first `rows_per_shard` rows of the list, 00001 the next ones, and so on. Committed rows are not
downloaded again. A list may grow: its new rows make new shards. If rows of committed shards changed in the list, that
is an error, because one dataset would mix two lists.

    python -m storage.collect ROOT DATASET captions=LIST [field=value ...]
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from storage.catalog import OK, Catalog
from storage.collection_plan import (
    CollectSettings,
    Part,
    check_committed,
    check_unchanged,
    identity,
    image_files,
    plan,
    rows_of,
)
from storage.download import (
    STATUSES,
    CaptionRow,
    Download,
    Downloader,
    Spool,
    all_of,
    commit_images,
    image_config,
    import_images,
)
from storage.img2dataset import import_rows, read_rows
from storage.manifests import Manifest
from storage.normalise import NormalisedImage
from storage.object_store import ObjectMissing, StorageUnreachable, open_store
from storage.progress import progress_line
from storage.redact import shown_url
from storage.settings import add_fields, from_assignments
from storage.spool import PartialShard, remove_partial

IMAGES = "images"
SHARDS_AT_ONCE = 5  # of one group: while one shard waits for slow servers, the others go on
UNREACHABLE = {"dns", "connect", "timeout", "host_timeout"}  # also while this machine has no network
_NOT_REQUESTED = {"duplicate", "bad_url", "blocked_address"}  # statuses of rows that need no request
# Fewer rows of fewer hosts may all be gone. If there are more, the fault is probably this machine's network.
_FEW_HOSTS, _FEW_ROWS = 5, 20
_HOST = re.compile(r"https?://(?:[^/?#@]*@)?([^/?#@]+:\d+)", re.IGNORECASE)  # with its port


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
        where = settings.origin
        log(f"{settings.name}: {len(missing)} of {len(parts)} shards to collect, {parts[-1].stop} rows in {where}")
        if settings.captions and not settings.download.contact and not settings.download.allowed_hosts:
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
    while missing:
        rows, counts, held_back = sum(part.stop - part.start for part in missing), Counter(), []
        for first in range(0, len(missing), settings.shards_per_task):
            parts_of_group = tuple(missing[first : first + settings.shards_per_task])
            group = Group(parts_of_group, dict(counts), rows, len(missing), has_images, started)
            counts.update(run_group(root, settings, group, new_shards.add))
            if not has_images and not counts[OK]:
                held_back += parts_of_group
            has_images = has_images or counts[OK] > 0
            ready = first + len(parts_of_group)
            log(f"{settings.name}: {ready} of {len(missing)} shards collected: {_by_status(counts)}")
        committed = catalog.headers(IMAGES) if held_back else {}
        missing = [part for part in held_back if part.shard not in committed]
        if missing and not has_images and not any(header.ok_rows for header in committed.values()):
            raise NothingStored(_nothing_stored(settings, counts, missing[0]))
        if missing:
            log(f"{settings.name}: {len(missing)} shards without an image are collected again: others have images")
        has_images = True
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
    rows = rows_of(part, settings) if settings.captions else []
    if rows and status == "blocked_address":
        hosts = Counter(found[1] for row in rows if (found := _HOST.match(row.url)))
        host = hosts.most_common(1)[0][0] if hosts else "HOST:PORT"
        way_out += f". If you trust this server, set download.allowed_hosts={host}"
    elif rows and status == "bad_url":
        way_out += f". Each line is `caption TAB url`; line {part.start + 1} has {shown_url(rows[0].url)!r} as its URL"
    elif rows and status in UNREACHABLE:
        way_out += ". Check this machine's network and whether the servers are up"
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

    A shard that another process committed meanwhile is skipped. ConnectionError if no host of a shard could be reached;
    that shard is not committed. A shard without an image is committed only once the dataset or this group has one.
    """
    catalog = Catalog(open_store(root), settings.name)
    parts = {part.shard: part for part in group.parts}
    committed = catalog.headers(IMAGES, [shard for shard in catalog.shards(IMAGES) if shard in parts])
    # By an earlier attempt, or by another process.
    done = {shard: header for shard, header in committed.items() if header.sha256 != parts[shard].replaces}
    progress = _Progress(settings, group, log)
    for shard, header in done.items():
        progress.counts[shard] = header.statuses
    missing = [part for part in group.parts if part.shard not in done]
    commit = _Commit(catalog, settings, group.has_images, on_commit)
    if settings.captions:
        asyncio.run(_download(missing, catalog, settings, progress, commit))
    else:
        files = image_files(settings.images) if settings.images else []
        for part in missing:
            if _is_committed(catalog, part, progress):
                continue
            with Spool() as spool:
                if settings.images:
                    downloads = _import(files, part, settings, progress, spool)
                else:
                    downloads = _import_stored(part, settings, progress, spool)
                commit(part, downloads)
    if progress.of_group().get(OK):
        commit.commit_waiting()
    return progress.of_group()


class _Progress:
    """Rows by status of each shard of a group; logs a line of progress from time to time."""

    def __init__(self, settings: CollectSettings, group: Group, log: Callable[[str], None]):
        self.settings, self.group, self.log = settings, group, log
        self.counts: dict[str, dict[str, int]] = {}
        self.due = time.monotonic() + settings.report_every

    def of_group(self) -> dict[str, int]:
        """Rows by status."""
        return dict(sum(map(Counter, self.counts.values()), Counter()))

    def update(self, part: Part, counts: Mapping[str, int]) -> None:
        """Set a shard's rows by status so far."""
        self.counts[part.shard] = counts
        if time.monotonic() >= self.due:
            counts = Counter(self.group.before) + Counter(self.of_group())
            name, seconds = self.settings.name, time.monotonic() - self.group.started
            self.log(progress_line(name, counts.total(), self.group.rows, "rows", counts, seconds))
            self.due = time.monotonic() + self.settings.report_every


def _is_committed(catalog: Catalog, part: Part, progress: _Progress) -> bool:
    """Whether another process has committed the shard; then its rows are counted."""
    try:
        (header,) = catalog.headers(IMAGES, [part.shard]).values()
    except ObjectMissing:
        return False
    if header.sha256 == part.replaces:
        return False
    progress.update(part, header.statuses)
    return True


class _Commit:
    """Commits shards. One without an image waits for `commit_waiting`, unless the dataset has images."""

    def __init__(self, catalog: Catalog, settings: CollectSettings, has_images: bool, on_commit: OnCommit):
        self._catalog, self._settings, self._on_commit = catalog, settings, on_commit
        self._has_images = has_images
        self._waiting: list[tuple[Part, Sequence[Download]]] = []  # without images, so they are small

    def __call__(self, part: Part, downloads: Sequence[Download], known: "_Known | None" = None) -> None:
        if known is not None and known.manifest is not None:
            before = dict(
                zip(known.manifest.table["row"].to_pylist(), known.manifest.table["status"].to_pylist(), strict=True)
            )
            if any(item.status != before[item.row.row] for item in downloads):
                self._commit(part, downloads, known.manifest)
            return
        statuses = {item.status for item in downloads}
        gone = self._settings.commit_unreachable and statuses & UNREACHABLE
        if self._has_images or gone or OK in statuses:
            self._commit(part, downloads)
        else:
            self._waiting.append((part, downloads))

    def commit_waiting(self) -> None:
        """Commit those that wait, because there is an image now."""
        for part, downloads in self._waiting:
            self._commit(part, downloads)

    def _commit(self, part: Part, downloads: Sequence[Download], replaces: Manifest | None = None) -> None:
        settings = self._settings.download
        if commit_images(self._catalog, part.shard, downloads, settings, source=part.source, replaces=replaces):
            self._on_commit(part.shard)


@dataclass(frozen=True)
class _Known:
    """The rows of a shard that are known before any request.

    rows      by row: duplicates, and the rows of a committed shard that are not requested again
    before    by row: the results in the committed shard of rows that are requested again
    manifest  of the committed shard
    """

    rows: dict[int, Download]
    before: dict[int, Download] = dataclasses.field(default_factory=dict)
    manifest: Manifest | None = None

    def with_answers(self, rows: Sequence[CaptionRow], answers: Sequence[Download]) -> list[Download]:
        """All rows in order. A row whose host could not be reached keeps its result from before."""
        answers = iter(answers)
        joined = [self.rows.get(row.row) or next(answers) for row in rows]
        return [self.before.get(item.row.row, item) if item.status in UNREACHABLE else item for item in joined]


def _known(catalog: Catalog, part: Part, rows: Sequence[CaptionRow], settings: CollectSettings, spool: Spool) -> _Known:
    if not part.replaces:
        first = dict(part.duplicates)
        repeated = [row for row in rows if row.row in first]
        return _Known({row.row: Download(row, "duplicate", f"of row {first[row.row]}", None) for row in repeated})
    manifest = catalog.manifest(IMAGES, part.shard)
    known, samples = _Known({}, {}, manifest), catalog.read(IMAGES, part.shard)
    for row, line in zip(rows, manifest.table.to_pylist(), strict=True):
        image = None
        if line["status"] == OK:
            sample = next(samples)
            image = spool.write(NormalisedImage(sample.image, sample.width, sample.height, sample.sha256, sample.flags))
        retried = line["status"] in settings.retried_statuses
        (known.before if retried else known.rows)[row.row] = Download(row, line["status"], line["detail"], image)
    return known


async def _download(
    parts: Sequence[Part], catalog: Catalog, settings: CollectSettings, progress: _Progress, commit: _Commit
) -> None:
    free = asyncio.Semaphore(SHARDS_AT_ONCE)
    loop = asyncio.get_running_loop()
    # Files are read and written in a thread, so that the other shards go on. Saves have their own thread, so that they
    # do not wait for the commit of a large shard.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="files") as files,
        ThreadPoolExecutor(1, thread_name_prefix="saves") as saves,
    ):
        async with Downloader(settings.download) as downloader:
            partials: set[PartialShard] = set()

            async def save() -> None:
                while True:
                    await asyncio.sleep(settings.save_every)
                    for partial in list(partials):
                        try:
                            await loop.run_in_executor(saves, partial.save)
                        except StorageUnreachable as error:
                            progress.log(f"{settings.name}: images in progress could not be saved: {error}")
                        except ValueError:
                            if partial in partials:
                                raise
                            # Its shard has failed meanwhile, so its spool is closed.

            async def one(part: Part) -> None:
                async with free:
                    if await loop.run_in_executor(files, _is_committed, catalog, part, progress):
                        return
                    rows = await loop.run_in_executor(files, rows_of, part, settings)
                    _, config = image_config(settings.download)
                    partial = PartialShard(catalog.store, settings.name, part.shard, config)
                    with Spool() as spool:
                        known = await loop.run_in_executor(files, _known, catalog, part, rows, settings, spool)
                        counted = Counter(item.status for item in known.rows.values())
                        stored = await loop.run_in_executor(files, partial.load, spool)
                        if stored:
                            images = f"{len(stored)} images from an earlier run"
                            progress.log(f"{settings.name}: shard {part.shard} continues with {images}")
                        partials.add(partial)
                        try:
                            requested = await downloader.download(
                                [row for row in rows if row.row not in known.rows],
                                lambda done, of, counts: progress.update(part, Counter(counts) + counted),
                                spool,
                                partial,
                                stored,
                            )
                        finally:
                            partials.remove(partial)
                        if not settings.commit_unreachable and not part.replaces:
                            check_network(part, requested, settings)
                        downloads = known.with_answers(rows, requested)
                        await loop.run_in_executor(files, commit, part, downloads, known)
                        await loop.run_in_executor(files, partial.close)
                    progress.update(part, Counter(item.status for item in downloads))

            saving = asyncio.ensure_future(save())
            try:
                await all_of(one(part) for part in parts)
            finally:
                saving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await saving


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
    files: Sequence[Path], part: Part, settings: CollectSettings, progress: _Progress, spool: Spool
) -> list[Download]:
    """Each image as if it had been downloaded; its row is its position among all files."""
    files = files[part.start : part.stop]
    check_unchanged(part, [identity(file) for file in files], settings)
    imported = import_images(
        files,
        settings.download,
        lambda done, of, counts: progress.update(part, counts),
        threads=settings.download.decode_threads,
        spool=spool,
    )
    return [
        dataclasses.replace(item, row=dataclasses.replace(item.row, row=part.start + item.row.row)) for item in imported
    ]


def _import_stored(part: Part, settings: CollectSettings, progress: _Progress, spool: Spool) -> list[Download]:
    """The rows of a part as img2dataset stored them, with normalised images."""
    rows = read_rows(settings.origin, part.file)[part.offset : part.offset + part.stop - part.start]
    check_unchanged(part, [row.line() for row in rows], settings)
    counts = Counter()

    def on_row(status: str) -> None:
        counts[status] += 1
        progress.update(part, counts)

    threads = settings.download.decode_threads
    return import_rows(
        settings.origin, rows, part.start, dict(part.duplicates), settings.download, spool, on_row, threads
    )


# --- as a program -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m storage.collect",
        description="Download a caption list, or import images, into shards; goes on where it was stopped.\n\n"
        "    python -m storage.collect ROOT DATASET captions=LIST download.contact=me@example.org",
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
    main()
