"""How many URLs of each host are in flight, over all shards in progress, and which hosts have fallen silent."""

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.collect.statuses import Refused, Status

# URLs of a host in flight at first, as in browsers. Its answers decide whether it gets more later.
_INITIAL_LIMIT = 8
# A round of answers is slow if its median is over _SLOWER times that of the fastest of the last _ROUNDS rounds, plus
# _NOISE seconds.
_SLOWER, _NOISE, _ROUNDS = 1.5, 0.05, 32
BREAKER = 2  # failures in a row after which a host is silent


class Hosts:
    """At most `at_once` URLs in flight. Hosts with waiting URLs take turns.

    A host is silent after two failures in a row: timeouts and lost connections. Its other URLs wait until the rest of
    their shard is done. Then a URL that it has answered before, else up to three of those, are requested. If it
    answers, all are, else they end as HOST_TIMEOUT. So no URL of a host that answers meanwhile does.

    The number of URLs of a host in flight follows its answers. It grows after a round of answers as fast as before: by
    an eighth, or by one if it was lowered before. It is halved after a round of slow answers, and at once after a 429
    or 503. It is one if the host asks to wait (Retry-After). A timeout does not lower it: while the host answers other
    URLs, the fault is that URL's.
    """

    def __init__(self, at_once: int):
        self._free = self._at_once = at_once
        self._hosts: dict[str, Host] = {}
        self._ready: deque[Host] = deque()  # hosts with a waiting URL and a free slot for it, in turn

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator[None]:
        """Waits until a URL of this host may be in flight, and holds the slot."""
        host = self.host(name)
        turn = asyncio.get_running_loop().create_future()
        host.waiting.append(turn)
        self._start(host)
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():  # else it was cancelled while it waited
                self._free += 1
                host.in_flight -= 1
                self._start(host)

    def host(self, name: str) -> "Host":
        """What is known of a host."""
        if name not in self._hosts:
            self._hosts[name] = Host(min(_INITIAL_LIMIT, self._at_once))
        return self._hosts[name]

    def ended(self, name: str, url: str, began: float, seconds: float | None, refused: Refused | None = None) -> None:
        """A request ended. seconds: until its headers came, None if none did; refused: why there is no image."""
        host, status = self.host(name), refused.status if refused else Status.OK
        must_wait = refused is not None and bool(refused.retry_after)
        if status in (Status.TIMEOUT, Status.CONNECT):
            host.failures += 1
            host.failed = asyncio.get_running_loop().time()
        elif seconds is not None:
            host.answered_url, host.answered, host.failures = url, asyncio.get_running_loop().time(), 0
            if began >= host.lowered:
                host.latencies.append(seconds)
        if must_wait or status in (Status.HTTP_429, Status.HTTP_503):
            if began >= host.lowered:  # requests that were in flight together count once
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
        """Whether the host answers nothing for now."""
        return self.host(name).failures >= BREAKER

    def _lower(self, host: "Host", limit: int) -> None:
        host.limit = max(1, limit)
        host.lowered = asyncio.get_running_loop().time()
        host.latencies.clear()

    def _has_slot(self, host: "Host") -> bool:
        found_out = host.answered_url is not None or host.failures >= BREAKER
        # Few URLs should find out whether the host answers.
        return host.in_flight < (host.limit if found_out else min(host.limit, BREAKER - host.failures))

    def _offer(self, host: "Host") -> None:
        if not host.ready and host.waiting and self._has_slot(host):
            host.ready = True
            self._ready.append(host)

    def _start(self, changed: "Host") -> None:
        """Give the free slots to waiting URLs; `changed` is a host that may have got room."""
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
    """What is known of one host, and the URLs that wait for it. Times are by the event loop's clock.

    answered_url  a URL that it has answered
    answered      when it answered last, as `failed`
    probe         held while it is found out whether the silent host answers after all
    lowered       when `limit` was lowered last
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.in_flight = self.failures = 0  # failures: in a row
        self.ready = False
        self.answered_url: str | None = None
        self.answered = self.failed = self.lowered = float("-inf")
        self.probe = asyncio.Lock()
        self.latencies: list[float] = []  # of this round
        self.medians: deque[float] = deque(maxlen=_ROUNDS)
