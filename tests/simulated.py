"""A simulated network under a simulated clock: an hour of hanging hosts in a fraction of a second.

`downloaded` is the Downloader itself, on an event loop whose time jumps to the next timer where nothing else is left to
do, and whose executors work at once. `Network` stands in for aiohttp's session: how each host answers is a function.
"""

import asyncio
import selectors
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import multidict
import yarl
from web import draw, encode

from storage.collect.download import Downloader
from storage.collect.fetch import DownloadSettings
from storage.collect.rows import CaptionRow
from storage.collect.spool import Spool

JPEG = encode(draw(32, 32))


@dataclass
class Answer:
    """What a server sends, `seconds` after the request (None: never), and its body `body_seconds` later."""

    seconds: float | None = 0.1
    status: int = 200
    body: bytes = JPEG
    headers: dict[str, str] = field(default_factory=dict)
    refused: bool = False  # no connection at all
    body_seconds: float = 0.0


class Network:
    """aiohttp's session, as far as the Fetcher uses it. `serve(url, time, in flight at its host)` says what comes.

    `requests` are URLs and times in order, `counts` their numbers by URL, `answered` the times of each host's answers,
    `most` the most in flight at each host. `robots_txt(url, time)` says what comes for a robots.txt, whose requests are
    in `robots_requests` alone.
    """

    def __init__(
        self,
        serve: Callable[[yarl.URL, float, int], Answer],
        read_timeout: float,
        robots_txt: Callable[[yarl.URL, float], Answer],
    ):
        self.serve, self.read_timeout, self.robots_txt = serve, read_timeout, robots_txt
        self.requests: list[tuple[str, float]] = []
        self.robots_requests: list[tuple[str, float]] = []
        self.answered: dict[str, list[float]] = {}
        self.counts, self.now, self.most = Counter(), Counter(), Counter()

    @asynccontextmanager
    async def get(self, url: yarl.URL, **_: object) -> AsyncIterator["_Response"]:
        loop, host = asyncio.get_running_loop(), f"{url.host}:{url.port}"
        if url.path == "/robots.txt":
            self.robots_requests.append((str(url), loop.time()))
            yield await self._response(self.robots_txt(url, loop.time()))
            return
        self.requests.append((str(url), loop.time()))
        self.counts[str(url)] += 1
        self.now[host] += 1
        self.most[host] = max(self.most[host], self.now[host])
        try:
            response = await self._response(self.serve(url, loop.time(), self.now[host]))
            self.answered.setdefault(host, []).append(loop.time())
            yield response
        finally:
            self.now[host] -= 1

    async def _response(self, answer: Answer) -> "_Response":
        if answer.refused:
            await asyncio.sleep(0.001)
            raise aiohttp.ServerDisconnectedError
        if answer.seconds is None or answer.seconds > self.read_timeout:
            await asyncio.sleep(self.read_timeout)
            raise aiohttp.SocketTimeoutError
        await asyncio.sleep(answer.seconds)
        return _Response(answer)

    async def close(self) -> None:
        pass


class _Response:
    """A response, and the content of itself."""

    reason = ""

    def __init__(self, answer: Answer):
        self.status, self.headers = answer.status, multidict.CIMultiDict(answer.headers)
        self.content, self.content_length = self, len(answer.body)
        self._left, self._seconds = answer.body, answer.body_seconds

    def at_eof(self) -> bool:
        return not self._left

    async def readany(self) -> bytes:
        await asyncio.sleep(self._seconds)
        left, self._left = self._left, b""
        return left


class _Selector(selectors.SelectSelector):
    """Waits for nothing: the loop's clock goes on instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing is to come"
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def pass_time(self, seconds: float) -> None:
        """Let time go on in which nothing of this process runs."""
        self._clock.now += seconds

    def run_in_executor(self, executor: object, work: Callable, *arguments: object) -> asyncio.Future:
        done = self.create_future()
        try:
            done.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001  as an executor has it
            done.set_exception(error)
        return done


@dataclass
class Simulated:
    """Shards as they were downloaded, in which second each was done, and what the network saw."""

    shards: list[list[CaptionRow]]
    ends: list[float]
    network: Network

    @property
    def seconds(self) -> float:
        return max(self.ends)

    @property
    def statuses(self) -> Counter[str]:
        return Counter(item.status for shard in self.shards for item in shard)


def downloaded(
    shards: Sequence[Sequence[str]],
    serve: Callable[[yarl.URL, float, int], Answer],
    settings: DownloadSettings,
    robots_txt: Callable[[yarl.URL, float], Answer] = lambda *_: Answer(0, 404),
) -> Simulated:
    """The shards, lists of URLs, downloaded at once."""
    network = Network(serve, settings.read_timeout, robots_txt)

    async def work() -> Simulated:
        async with Downloader(settings) as downloader:
            await downloader._fetcher.session.close()
            downloader._fetcher.session = network

            async def one(urls: Sequence[str]) -> tuple[list[CaptionRow], float]:
                rows = [CaptionRow(row, "", url) for row, url in enumerate(urls)]
                return await downloader.download(rows, Spool().__enter__()), asyncio.get_running_loop().time()

            items, ends = zip(*await asyncio.gather(*map(one, shards)), strict=True)
            return Simulated(list(items), list(ends), network)

    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work())
