"""Limits on the number of URLs in flight per host, over all shards in progress, and detection of silent hosts."""

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.collect.statuses import Refused, Status

_INITIAL_LIMIT = 8  # URLs of a host in flight at first, as in browsers
# A round of answers is slow if its median is over _SLOWER times that of the fastest of the last _ROUNDS rounds, plus
# _NOISE seconds.
_SLOWER, _NOISE, _ROUNDS = 1.5, 0.05, 32
BREAKER = 2  # failures in a row after which a host is silent


class Hosts:
    """The hosts of all URLs. At most `at_once` URLs are in flight over all hosts. Hosts with waiting URLs take turns.

    A host is silent after two failures in a row (timeouts or lost connections). Its other URLs wait until the rest of
    their shard is done. Then the host is tested with one URL that it has answered before or, if there is none, with up
    to three of the waiting URLs. If it answers, all waiting URLs are requested; otherwise they end as HOST_TIMEOUT.

    Each host also has its own limit on URLs in flight. The limit is adjusted after every round of answers. A round has
    as many answers as the limit, but at least eight. After a round that was as fast as earlier rounds, the limit grows
    by an eighth, or by one if it has ever been lowered. After a slower round, or immediately after a 429 or 503, the
    limit is halved. If the host asks clients to wait (Retry-After), the limit becomes one. Timeouts do not lower the
    limit: if the host still answers other URLs, only the URL that timed out is at fault.
    """

    def __init__(self, at_once: int):
        self._free = self._at_once = at_once
        self._hosts: dict[str, Host] = {}
        self._ready: deque[Host] = deque()  # hosts with a waiting URL and a free slot, in the order of their turns

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator[None]:
        """Async context manager that waits for a free slot of the host, and holds it for one URL in flight."""
        host = self.host(name)
        turn = asyncio.get_running_loop().create_future()
        host.waiting.append(turn)
        self._start(host)
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # a turn that was cancelled while it waited holds no slot
                self._free += 1
                host.in_flight -= 1
                self._start(host)

    def host(self, name: str) -> "Host":
        """Return the state of a host, creating it if it is new."""
        if name not in self._hosts:
            self._hosts[name] = Host(min(_INITIAL_LIMIT, self._at_once))
        return self._hosts[name]

    def record_end(
        self, name: str, url: str, began: float, seconds: float | None, refused: Refused | None = None
    ) -> None:
        """Record the outcome of a request.

        `began` is the time at which the request began. `seconds` is the time until the response's headers came, or None
        if no response came.
        """
        host, status = self.host(name), refused.status if refused else Status.OK
        must_wait = refused is not None and bool(refused.retry_after)
        if status in (Status.TIMEOUT, Status.CONNECT):
            host.failures += 1
            host.failed = asyncio.get_running_loop().time()
        elif seconds is not None:
            host.answered_url, host.answered, host.failures = url, asyncio.get_running_loop().time(), 0
            if began >= host.lowered:
                host.latencies.append(seconds)
        if must_wait or status in ("http_429", "http_503"):
            if began >= host.lowered:  # requests that were in flight together lower the limit once
                self._lower(host, 1 if must_wait else host.limit // 2)
        elif len(host.latencies) >= max(_INITIAL_LIMIT, host.limit):
            median = statistics.median(host.latencies)
            host.medians.append(median)
            if median > _SLOWER * min(host.medians) + _NOISE:
                self._lower(host, host.limit // 2)
            elif host.waiting:
                more = 1 if host.lowered > float("-inf") else max(1, host.limit // 8)
                host.limit = min(self._at_once, host.limit + more)
            host.latencies.clear()
        self._start(host)

    def is_silent(self, name: str) -> bool:
        """Return True if at least the last BREAKER requests to the host timed out or lost their connections."""
        return self.host(name).failures >= BREAKER

    def _lower(self, host: "Host", limit: int) -> None:
        host.limit = max(1, limit)
        host.lowered = asyncio.get_running_loop().time()
        host.latencies.clear()

    def _has_slot(self, host: "Host") -> bool:
        is_known = host.answered_url is not None or host.failures >= BREAKER
        # Only a few URLs are used to find out whether the host answers.
        return host.in_flight < (host.limit if is_known else min(host.limit, BREAKER - host.failures))

    def _offer(self, host: "Host") -> None:
        if not host.ready and host.waiting and self._has_slot(host):
            host.ready = True
            self._ready.append(host)

    def _start(self, changed: "Host") -> None:
        """Give free slots to waiting URLs. `changed` is a host that may have a free slot now."""
        self._offer(changed)
        while self._free and self._ready:
            host = self._ready.popleft()
            host.ready = False
            while host.waiting and host.waiting[0].done():
                host.waiting.popleft()  # cancelled
            if host.waiting and self._has_slot(host):
                host.waiting.popleft().set_result(None)
                host.in_flight += 1
                self._free -= 1
                self._offer(host)  # behind all others


class Host:
    """The state of one host, including the URLs that wait for it. Its times are read from the event loop's clock."""

    def __init__(self, limit: int):
        self.limit = limit
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.in_flight = self.failures = 0  # failures in a row
        self.ready = False
        self.answered_url: str | None = None  # a URL that the host has answered
        self.answered = self.failed = self.lowered = float("-inf")  # last answer, failure and lowering of the limit
        self.probe = asyncio.Lock()  # held while a silent host is tested
        self.latencies: list[float] = []  # of this round, in seconds
        self.medians: deque[float] = deque(maxlen=_ROUNDS)  # of earlier rounds
