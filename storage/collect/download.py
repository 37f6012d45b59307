"""Rows of (caption, url) -> rows with their images and a status each, and shards of them.

A `Downloader` requests every distinct URL once, with one deadline each, from public addresses only, for several shards
at once. Transient failures are requested once more when all others of the shard are done. A row's failure is a Status.
Any other error is a bug of this program and is raised. docs/images.md has the settings, the statuses and the address
rules.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.collect.fetch import DownloadSettings, Fetcher
from storage.collect.lists import license_of
from storage.collect.normalise import ImageSettings, normalise, resource_error_hint
from storage.collect.rows import CaptionRow
from storage.collect.spool import Spool, SpooledImage
from storage.collect.statuses import Refused, Status
from storage.manifests import Header, Row
from storage.redact import display_url, redacted
from storage.sample import Sample

_FEW = 16  # URLs of a silent host: one is requested for all shards in progress
_PROBES = 3  # of more, that are requested to find out whether it answers after all


Outcome = SpooledImage | Refused


def with_outcome(row: CaptionRow, outcome: Outcome) -> CaptionRow:
    """The row with its image, or with the status that says why it has none."""
    if isinstance(outcome, SpooledImage):
        return dataclasses.replace(row, status=Status.OK, image=outcome)
    # A server may send any bytes, which aiohttp keeps as surrogates. No text file can store those.
    detail = redacted(outcome.detail)[:500].encode(errors="backslashreplace").decode()
    return dataclasses.replace(row, status=outcome.status, detail=detail)


class Downloader:
    """Downloads several shards at once, with one set of connections and limits; an async context manager."""

    def __init__(self, settings: DownloadSettings):
        self.settings = settings

    async def __aenter__(self) -> "Downloader":
        self._threads = ThreadPoolExecutor(self.settings.decode_threads, thread_name_prefix="decode")
        self._fetcher = await Fetcher(self.settings).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._fetcher.__aexit__()
        self._threads.shutdown(cancel_futures=True)

    async def download(self, rows: Sequence[CaptionRow], spool: Spool) -> list[CaptionRow]:
        """The rows with their status, in the same order, and their images in the spool."""
        hosts, loop = self._fetcher.hosts, asyncio.get_running_loop()
        outcomes: dict[str, Outcome] = {}
        later: dict[str, dict[str, float]] = {}  # by the host that failed: URLs, and when they may be requested again
        retried: dict[str, float] = {}  # when that was begun, by host

        async def first(url: str) -> None:
            outcome = outcomes[url] = await self._outcome(url, spool)
            wait = self._fetcher.wait_before_second_pass(url, outcome) if isinstance(outcome, Refused) else None
            if isinstance(outcome, Refused) and wait is not None:
                later.setdefault(outcome.host, {})[url] = loop.time() + wait

        async def again(url: str, at: float) -> None:
            await asyncio.sleep(at - loop.time())
            outcomes[url] = await self._outcome(url, spool, second_pass)

        async def retry(name: str) -> None:
            host, few, retried[name] = hosts.host(name), len(later[name]) < _FEW, loop.time()
            async with host.probe if few else contextlib.nullcontext():  # a few URLs wait for another shard's probe
                is_known = few and host.failed > retried[name]
                if hosts.is_silent(name) and host.answered_url:
                    await self._outcome(host.answered_url, spool, second_pass)
                elif hosts.is_silent(name) and not is_known:
                    await run_all(again(url, later[name].pop(url)) for url in _spread([*later[name]]))
            if not hosts.is_silent(name):
                await run_all(again(*item) for item in later.pop(name).items())

        await run_all(first(url) for url in dict.fromkeys(row.url for row in rows))
        second_pass, left = loop.time(), [*later]
        while left:
            await run_all(map(retry, left))
            left = [name for name in later if hosts.host(name).answered > retried[name]]
        return [with_outcome(row, outcomes[row.url]) for row in rows]

    async def _outcome(self, url: str, spool: Spool, second_pass: float | None = None) -> Outcome:
        try:
            # The slot is held until the image is stored: if decoding is slower than the network, bodies must not pile
            # up.
            async with self._fetcher.hosts.slot(self._fetcher.host(url)):
                data = await self._fetcher.fetch(url, second_pass)
                loop = asyncio.get_running_loop()
                work = loop.run_in_executor(self._threads, spooled, data, self.settings, spool)
                del data  # the thread drops it as early as it can
                return await work
        except Refused as refused:
            return refused.bare()
        except Exception as error:
            if not resource_error_hint(error):
                error.add_note(
                    f"while downloading {display_url(url)}; no status stands for this error, so please report it"
                )
            raise


def spooled(data: bytes, settings: ImageSettings, spool: Spool) -> Outcome:
    """The stored form of an image file, in the spool, or why there is none."""
    try:
        return spool.write(normalise(data, settings))
    except Refused as refused:
        return refused.bare()


def _spread(urls: Sequence[str]) -> Sequence[str]:
    """One in eight of them, from 1 to 3, from all over the list: URLs that hang are often neighbours."""
    count = min(max(len(urls) // 8, 1), _PROBES)
    return [urls[(2 * i + 1) * len(urls) // (2 * count)] for i in range(count)]


async def run_all(works: Iterable[Awaitable[None]]) -> None:
    """Await all of them at once; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def image_config(settings: ImageSettings) -> tuple[dict[str, int | float], str]:
    """The settings that decide bytes, by name, and their hash of 12 hex digits."""
    config = {field.name: getattr(settings, field.name) for field in dataclasses.fields(ImageSettings)}
    return config, hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def commit_images(
    catalog: Catalog,
    shard: str,
    rows: Sequence[CaptionRow],
    settings: ImageSettings,
    source: Mapping[str, object],
    replaces: Header | None = None,
) -> bool:
    """Commit these rows as a shard of `images`, or as the next revision of one.

    source: of which list they are, for the manifest. False if another writer was first.
    """
    config, config_hash = image_config(settings)
    meta = {"source": dict(source), "config": config, "config_hash": config_hash}
    table = [Row(row.row, row.key, row.status, row.detail, row.url, license_of(row.extra)) for row in rows]
    samples = (_sample_of(row, row.image) for row in rows if row.image)
    return commit_shard(catalog, "images", shard, samples, table, meta, replaces)


def _sample_of(row: CaptionRow, image: SpooledImage) -> Sample:
    """The row and its image, which is read from its spool."""
    return Sample(
        key=row.key,
        image=image.jpeg,
        caption=row.caption,
        url=row.url,
        width=image.width,
        height=image.height,
        sha256=image.sha256,
        flags=image.flags,
        extra=row.extra,
    )
