"""Downloads the images of caption rows, and commits the rows as shards.

A `Downloader` works on several shards at once. It requests each distinct URL once, within a deadline and from public
addresses only. After a transient failure, a URL is requested again when all others of the shard are done. Each row
gets an image or a Status that explains the failure. Other errors are bugs and are raised. docs/images.md describes
settings, statuses and rules.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
from collections import Counter
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

_FEW = 16  # fewer waiting URLs of a silent host are probed by one request for all shards in progress
_IN_VAIN = 2  # passes in a row without an image after which the URLs that a host refuses are given up
_PROBES = 3  # URLs requested to find out whether a silent host with more waiting URLs answers again


Outcome = SpooledImage | Refused


def with_outcome(row: CaptionRow, outcome: Outcome) -> CaptionRow:
    """Return the row with its image, or with the status and the detail that say why it has no image."""
    if isinstance(outcome, SpooledImage):
        return dataclasses.replace(row, status=Status.OK, image=outcome)
    # aiohttp keeps arbitrary bytes from a server as surrogates, which no text file can store.
    detail = redacted(outcome.detail)[:500].encode(errors="backslashreplace").decode()
    return dataclasses.replace(row, status=outcome.status, detail=detail)


class Downloader:
    """Async context manager that downloads several shards at once, with shared connections and limits."""

    def __init__(self, settings: DownloadSettings):
        self.settings = settings
        self._shards: dict[int, tuple[dict[str, Outcome], dict[str, dict[str, float]]]] = {}  # see `download`

    async def __aenter__(self) -> "Downloader":
        self._threads = ThreadPoolExecutor(self.settings.decode_threads, thread_name_prefix="decode")
        self._fetcher = await Fetcher(self.settings).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._fetcher.__aexit__()
        self._threads.shutdown(cancel_futures=True)

    def progress(self) -> tuple[Counter[str], float]:
        """Return the URLs done by status, of the shards in progress, and the seconds that hanging URLs may take yet."""
        counts: Counter[str] = Counter()
        again = 0
        for outcomes, later in self._shards.values():
            waiting = {url for urls in later.values() for url in urls}
            again += len(waiting)
            done = (outcome for url, outcome in outcomes.items() if url not in waiting)
            counts.update(outcome.status if isinstance(outcome, Refused) else Status.OK for outcome in done)
        hanging = self._fetcher.hosts.count_overdue()  # and once more in the second pass
        passes = math.ceil((again + 2 * hanging) / self.settings.concurrency) + bool(hanging)
        return counts, passes * self.settings.read_timeout

    async def download(self, rows: Sequence[CaptionRow], spool: Spool) -> list[CaptionRow]:
        """Download the images of rows into the spool. Return the rows with their statuses, in the same order."""
        hosts, loop = self._fetcher.hosts, asyncio.get_running_loop()
        outcomes: dict[str, Outcome] = {}
        later: dict[str, dict[str, float]] = {}  # host that failed -> URL -> time when it may be requested again
        retried: dict[str, float] = {}  # host -> start of its latest pass after the first
        in_vain: Counter[str] = Counter()  # host -> passes in a row without an image
        second_pass: float | None = None  # its start
        self._shards[id(outcomes)] = outcomes, later

        async def request(url: str, at: float = 0.0) -> None:
            outcomes.pop(url, None)
            await asyncio.sleep(at - loop.time())
            outcome = outcomes[url] = await self._outcome(url, spool, second_pass)
            if isinstance(outcome, Refused):
                wait = self._fetcher.wait_before_next_pass(url, outcome, second_pass)
                if wait is not None:
                    later.setdefault(outcome.host, {})[url] = loop.time() + wait

        async def retry(name: str) -> None:
            host, few, retried[name] = hosts.host(name), len(later[name]) < _FEW, loop.time()
            async with host.probe if few else contextlib.nullcontext():  # wait for a probe by another shard
                is_known = few and host.failed > retried[name]
                if hosts.is_silent(name) and not is_known and host.answered_url:
                    await self._outcome(host.answered_url, spool, second_pass)
                if hosts.is_silent(name) and not is_known:
                    await run_all(request(url, later[name].pop(url)) for url in _spread([*later[name]]))
            if not hosts.is_silent(name):
                urls = later.pop(name)
                await run_all(request(*item) for item in urls.items())
                in_vain[name] = in_vain[name] + 1 if all(isinstance(outcomes[url], Refused) for url in urls) else 0
                if in_vain[name] == _IN_VAIN:
                    later.pop(name, None)

        await run_all(request(url) for url in dict.fromkeys(row.url for row in rows))
        second_pass, left = loop.time(), [*later]
        while left:
            await run_all(map(retry, left))
            left = [name for name in later if hosts.host(name).answered > retried.get(name, 0.0)]
        del self._shards[id(outcomes)]
        return [with_outcome(row, outcomes[row.url]) for row in rows]

    async def _outcome(self, url: str, spool: Spool, second_pass: float | None = None) -> Outcome:
        try:
            # Hold the slot until the image is stored, so that bodies do not pile up if decoding is slow.
            async with self._fetcher.hosts.slot(self._fetcher.host(url)) as slot:
                data = await self._fetcher.fetch(url, slot, second_pass)
                loop = asyncio.get_running_loop()
                outcome = loop.run_in_executor(self._threads, spool_image, data, self.settings, spool)
                del data  # so that the thread can free it early
                return await outcome
        except Refused as refused:
            return refused.bare()
        except Exception as error:
            if not resource_error_hint(error):
                error.add_note(f"while downloading {display_url(url)}; this error has no status, so please report it")
            raise


def spool_image(data: bytes, settings: ImageSettings, spool: Spool) -> Outcome:
    """Normalise an image file and write it to the spool. Return the spooled image, or the reason why it was refused."""
    try:
        return spool.write(normalise(data, settings))
    except Refused as refused:
        return refused.bare()


def _spread(urls: Sequence[str]) -> Sequence[str]:
    """Return an eighth of the URLs (but at least one, and at most three), evenly spaced."""
    count = min(max(len(urls) // 8, 1), _PROBES)  # spaced, because URLs that hang are often neighbours
    return [urls[(2 * i + 1) * len(urls) // (2 * count)] for i in range(count)]


async def run_all(awaitables: Iterable[Awaitable[None]]) -> None:
    """Run the awaitables concurrently until all are done. If one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def image_config(settings: ImageSettings) -> tuple[dict[str, int | float], str]:
    """Return the settings that determine the stored bytes, and a hash of these settings (12 hex digits)."""
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
    """Commit rows as a shard of the `images` stage. Return False if another writer was first.

    Args:
        source: where the rows come from; recorded in the manifest as meta["source"] (plan.source_of)
        replaces: committed revision of the shard that the new one replaces; None for a new shard
    """
    config, config_hash = image_config(settings)
    meta = {"source": dict(source), "config": config, "config_hash": config_hash}
    table = [Row(row.row, row.key, row.status, row.detail, row.url, license_of(row.extra)) for row in rows]
    samples = (_make_sample(row, row.image) for row in rows if row.image)
    return commit_shard(catalog, "images", shard, samples, table, meta, replaces)


def _make_sample(row: CaptionRow, image: SpooledImage) -> Sample:
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
