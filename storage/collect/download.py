"""Rows of (caption, url) -> Samples, each with a status.

A `Downloader` requests every distinct URL once, with one deadline each, from public addresses only, for several shards
at once. Transient failures are requested once more when all others of the shard are done. A row's failure is a status
in STATUSES. Any other error is a bug of this program and is raised. docs/download.md has the settings, the statuses and
the address rules.
"""

import asyncio
import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.collect.fetch import DownloadSettings, Fetcher
from storage.collect.hosts import Transient
from storage.collect.lists import CaptionRow, license_of
from storage.collect.normalise import ImageSettings, NormalisedImage, Refused, normalise, run_out
from storage.collect.spool import Spool, SpooledImage
from storage.manifests import OK, Header, Row
from storage.redact import redacted, shown_url
from storage.sample import Sample, sample_key
from storage.withdrawn import WITHDRAWN

STATUSES: dict[str, str] = {
    "ok": "the image is stored",
    "duplicate": "an earlier row of the list has the same URL and caption",
    WITHDRAWN: "its URL, or the same image from another one, was withdrawn: `vlbert withdraw`",
    "bad_url": "not an absolute http(s) URL with a host and without user name, or one that cannot be parsed",
    "blocked_address": "the host is, or resolves to, an address that is not public, or the port is neither 80 nor 443",
    "dns": "the host name does not resolve",
    "connect": "no connection, or the connection was lost before an answer came",
    "tls": "the TLS handshake failed, or the certificate does not hold for this host",
    "timeout": "the deadline passed, or the server was silent or too slow for too long",
    "host_timeout": "a short deadline passed: its host had answered nothing, and did not until the shard was done",
    "noai": "its `X-Robots-Tag` forbids training with it: `noai` or `noimageai`",
    "noindex": "its `X-Robots-Tag` asks for no index: `noindex`, `noimageindex` or `none` (`download.obey_noindex`)",
    "robots_txt": "the `robots.txt` of its server, or of one on its way, forbids it (`download.obey_robots_txt`)",
    "robots_txt_failed": "its server answers its `robots.txt` with 429, 5xx or half a file: for now, that forbids all",
    "bad_response": "the answer is not HTTP, or its content encoding cannot be undone",
    "too_many_redirects": "more than five redirects",
    "too_big": "more bytes than `max_bytes`, announced or sent",
    "short_body": "the connection ended before the whole announced body had come",
    "missing_file": "a local image that is not there, is no regular file or cannot be opened (import only)",
    "bad_caption": "the caption of an image of a tar is missing, too long or cannot be read (import only)",
    "x_robots_tag": "img2dataset refused it for its `X-Robots-Tag`, and does not say which directive (import only)",
    "not_stored": "img2dataset did not store it, for a reason that has no status here (import only)",
    "not_image": "not an image in a format that is read: JPEG, PNG, GIF, WebP, BMP",
    "truncated": "the image file ends early or is damaged",
    "too_many_pixels": "more pixels than `max_pixels`, or made to be costly to decode",
    "bad_geometry": "the shorter side is under `min_side`, or one side over `max_aspect` times the other",
    "http_other": "an HTTP status other than 200 that is not 4xx or 5xx, or a redirect without a target",
}
_HTTP_NAMES = {status.value: status.phrase for status in HTTPStatus}
STATUSES |= {f"http_{code}": f"HTTP {code} {_HTTP_NAMES.get(code, '')}".rstrip() for code in range(400, 600)}

_TRIALS = 3  # URLs of a silent host, at most, that get their full deadline before a shard gives up the rest


@dataclass(frozen=True)
class Download:
    """The result of one row: a status of STATUSES, details in words, and the image if the status is ok."""

    row: CaptionRow
    status: str
    detail: str
    image: NormalisedImage | SpooledImage | None

    @classmethod
    def of(cls, row: CaptionRow, outcome: SpooledImage | Refused) -> "Download":
        if not isinstance(outcome, Refused):
            return cls(row, OK, "", outcome)
        assert outcome.status in STATUSES.keys() - {OK}, outcome.status
        tries = f" ({outcome.attempts} attempts)" if isinstance(outcome, Transient) and outcome.attempts > 1 else ""
        # A server may send any bytes, which aiohttp keeps as surrogates. No text file can store those.
        detail = (redacted(outcome.detail)[:500] + tries).encode(errors="backslashreplace").decode()
        return cls(row, outcome.status, detail, None)

    @property
    def sample(self) -> Sample | None:
        """The row and its image, read now from its spool; None if there is no image."""
        if self.image is None:
            return None
        return Sample(
            key=sample_key(self.row.url, self.row.caption),
            image=self.image.jpeg,
            caption=self.row.caption,
            url=self.row.url,
            width=self.image.width,
            height=self.image.height,
            sha256=self.image.sha256,
            flags=self.image.flags,
            extra=self.row.extra,
        )


Outcome = SpooledImage | Refused
_Later = dict[str, tuple[Transient, float]]  # by URL: its first result, and when it may be requested again


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

    async def download(
        self,
        rows: Sequence[CaptionRow],
        spool: Spool,
        on_result: Callable[[str, Outcome], object] = lambda url, outcome: None,
        stored: Mapping[str, SpooledImage] = MappingProxyType({}),
    ) -> list[Download]:
        """One Download per row, in row order, its image in the spool; `on_result(url, outcome)` after each URL.

        `stored` are images by URL from an earlier run; these URLs are not requested.
        """
        outcomes: dict[str, Outcome] = dict(stored)
        hosts, loop = self._fetcher.hosts, asyncio.get_running_loop()
        later: dict[str, _Later] = {}  # by host

        def settle(url: str, outcome: Outcome) -> None:
            outcomes[url] = outcome
            on_result(url, outcome)

        async def first(url: str) -> None:
            outcome = await self._outcome(url, spool)
            pause = self._fetcher.pause_before_second_pass(url, outcome) if isinstance(outcome, Transient) else None
            if pause is None:
                settle(url, outcome)
            else:
                later.setdefault(outcome.host, {})[url] = outcome, loop.time() + pause

        async def again(url: str, left: _Later, full_deadline: bool = False) -> None:
            before, at = left.pop(url)
            await asyncio.sleep(at - loop.time())
            outcome = await self._outcome(url, spool, before, full_deadline)
            if isinstance(outcome, Transient) and outcome.shortened:  # the host fell silent meanwhile
                left[url] = outcome, loop.time()
            else:
                settle(url, outcome)

        async def try_silent_host(host: str, left: _Later) -> None:
            """Request some URLs with their full deadline."""
            tries = _spread([url for url, (before, _) in left.items() if before.shortened] or list(left))
            if len(tries) > 1:
                await all_of(again(url, left, full_deadline=True) for url in tries)
                return
            async with hosts.host(host).trial_lock:
                # If several shards end at a time with a few URLs of the host, only one of them tries.
                last_failure = hosts.host(host).last_failure
                if hosts.silent(host) and last_failure <= max(before.ended for before, _ in left.values()):
                    await again(tries[0], left, full_deadline=True)

        async def second(host: str, left: _Later) -> None:
            while left:
                if hosts.silent(host):
                    await try_silent_host(host, left)
                    if hosts.silent(host):
                        return
                await all_of(again(url, left) for url in list(left))

        await all_of(first(url) for url in dict.fromkeys(row.url for row in rows) if url not in stored)
        while later:
            await all_of(second(host, left) for host, left in later.items())
            later = {host: left for host, left in later.items() if left}
            if all(map(hosts.silent, later)):  # if not, a host answered while the others were requested
                break
        for left in later.values():
            for url, (before, _) in left.items():
                settle(url, before)
        return [Download.of(row, outcomes[row.url]) for row in rows]

    async def _outcome(
        self, url: str, spool: Spool, before: Transient | None = None, full_deadline: bool = False
    ) -> Outcome:
        try:
            # The slot is held until the image is stored: if decoding is slower than the network, bodies must not pile
            # up.
            async with self._fetcher.hosts.slot(self._fetcher.host(url)):
                data = await self._fetcher.fetch(url, before, full_deadline=full_deadline)
                loop = asyncio.get_running_loop()
                work = loop.run_in_executor(self._threads, spooled, data, self.settings, spool)
                del data  # the thread drops it as early as it can
                return await work
        except Refused as refused:
            return refused.bare()
        except Exception as error:
            if not run_out(error):
                error.add_note(
                    f"while downloading {shown_url(url)}; no status stands for this error, so please report it"
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
    count = min(max(len(urls) // 8, 1), _TRIALS)
    return [urls[(2 * i + 1) * len(urls) // (2 * count)] for i in range(count)]


async def all_of(works: Iterable[Awaitable[None]]) -> None:
    """Await all of them at once; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def read_file(file: Path, limit: int) -> bytes:
    """The bytes of a regular file, or of one that a symbolic link leads to.

    Refused: `too_big` over `limit` bytes, `missing_file` for all that cannot be read, also for a FIFO or a device.
    OSError if this machine has run out of files or memory.
    """
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Refused("missing_file", f"{file} is not a regular file")
            # The file system reports the size and may be wrong, so the read is limited too.
            data = b"" if status.st_size > limit else opened.read(limit + 1)
            if max(status.st_size, len(data)) > limit:
                raise Refused("too_big", f"{max(status.st_size, len(data))} bytes, more than {limit}")
            return data
    except OSError as error:
        if run_out(error):
            raise
        raise Refused("missing_file", f"{file}: {error.strerror}") from error


def import_images(
    rows: Sequence[CaptionRow], files: Sequence[Path], settings: DownloadSettings, spool: Spool
) -> list[Download]:
    """The image files of these rows as if they had been downloaded; one that several rows name is decoded once."""

    def read(file: Path) -> Outcome:
        try:
            return spooled(read_file(file, settings.max_bytes), settings, spool)
        except Refused as refused:
            return refused.bare()

    distinct = list(dict.fromkeys(files))
    with ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode") as pool:
        outcomes = dict(zip(distinct, pool.map(read, distinct), strict=True))
    return [Download.of(row, outcomes[file]) for row, file in zip(rows, files, strict=True)]


def image_config(settings: ImageSettings) -> tuple[dict[str, int | float], str]:
    """The settings that decide bytes, by name, and their hash of 12 hex digits."""
    config = {field.name: getattr(settings, field.name) for field in dataclasses.fields(ImageSettings)}
    return config, hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def commit_images(
    catalog: Catalog,
    shard: str,
    downloads: Sequence[Download],
    settings: ImageSettings,
    *,
    source: str = "",
    reading: Mapping[str, object] | None = None,
    replaces: Header | None = None,
) -> bool:
    """Commit these results as a shard of `images`, or as the next revision of one.

    source and reading: which list, and how it is read, for the manifest. False if another writer was first.
    """
    config, config_hash = image_config(settings)
    numbers = [item.row.row for item in downloads]
    meta = {
        "source": {"list": source, "rows": [min(numbers), max(numbers) + 1]}  # from, to (exclusive)
        | ({"reading": dict(reading)} if reading else {}),
        "config": config,
        "config_hash": config_hash,
    }
    table = [
        Row(row.row, sample_key(row.url, row.caption), item.status, item.detail, row.url, license_of(row.extra))
        for item in downloads
        for row in [item.row]
    ]
    samples = (item.sample for item in downloads if item.image)
    return commit_shard(catalog, "images", shard, samples, table, meta, replaces)
