"""Limits over all shards that are downloaded at a time: URLs in flight, of one host and of all, and bytes of bodies.

One `Hosts` and one `ByteBudget` serve a Downloader. `Hosts` also knows which hosts have fallen silent.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from storage.normalise import Refused

# URLs of a host in flight at first, as in browsers. Its answers decide whether it gets more later.
_INITIAL_LIMIT = 8
# A round of answers is slow if its median is over _SLOWER times that of the fastest of the last _ROUNDS rounds, plus
# _NOISE seconds.
_SLOWER, _NOISE, _ROUNDS = 1.5, 0.05, 32
_MAX_COMPLAINTS = 1 / 8  # of a round: with more lost connections and 503 the limit is lowered


class Transient(Refused):
    """Refused for now: another attempt may succeed.

    retry_after  seconds, at least, that the server asks to wait
    spent        seconds of the URL's deadline that are used up
    attempts     how often the URL was requested
    host         the host that failed, after redirects
    shortened    whether its deadline was short because that host was silent
    ended        when it failed, by the event loop's clock
    """

    def __init__(self, status: str, detail: str, retry_after: float = 0.0):
        super().__init__(status, detail)
        self.retry_after = retry_after
        self.spent = 0.0
        self.attempts = 0
        self.host = ""
        self.shortened = False
        self.ended = 0.0


class Hosts:
    """At most `at_once` URLs in flight, `per_host` of one host. Hosts with waiting URLs take turns.

    The invariant: every URL is requested, and no URL of a host that answers ends as `host_timeout`. A host that never
    answered is silent after `breaker` failures in a row (URLs that timed out or found no connection). If a host has
    answered before, the URL that it answered is requested again first. Only if that fails too is the host silent. URLs
    of a silent host get a short deadline. Any answer ends the silence, and these URLs are requested again as usual.
    docs/download.md has the rules.

    The number of URLs of a host in flight follows its answers. It grows after a round of answers as fast as before: by
    an eighth, or by one if it was lowered before. It is halved after a round of slow answers or of many lost
    connections and 503, and at once after a 429. It is one if the host asks to wait (Retry-After). A timeout does not
    lower it: while the host answers other URLs, the fault is that URL's.
    """

    def __init__(self, at_once: int, per_host: int, breaker: int):
        self._free = at_once
        self._per_host = per_host
        self._breaker = breaker
        self._hosts: dict[str, _Host] = {}
        self._ready: deque[_Host] = deque()  # hosts with a waiting URL and a free slot for it, in turn

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator[None]:
        """Waits until a URL of this host may be in flight, and holds the slot."""
        host = self._host(name)
        await self._enter(host)
        try:
            yield
        finally:
            self._leave(host)

    def answered(self, name: str, url: str, began: float, seconds: float) -> None:
        """The host answered completely, with any status. `began`: when requested; `seconds`: until the headers came."""
        host = self._host(name)
        host.answered, host.answered_url, host.failures = True, url, 0
        if began >= host.lowered:
            host.latencies.append(seconds)
        if len(host.latencies) >= max(_INITIAL_LIMIT, host.limit):
            median = statistics.median(host.latencies)
            host.medians.append(median)
            slow = median > _SLOWER * min(host.medians) + _NOISE
            if slow or host.complaints > _MAX_COMPLAINTS * len(host.latencies):
                self._lower(host, host.limit // 2)
            elif host.waiting:
                more = 1 if host.lowered > float("-inf") else max(1, host.limit // 8)
                host.limit = min(self._per_host, host.limit + more)
            host.latencies.clear()
            host.complaints = 0
        self._offer(host)
        self._start()

    def overloaded(self, name: str, began: float, *, must_wait: bool = False) -> None:
        """The host answered a request begun at this time with "too many requests"; must_wait: with Retry-After."""
        host = self._host(name)
        if began >= host.lowered:  # requests that were in flight together count once
            self._lower(host, 1 if must_wait else host.limit // 2)

    def complained(self, name: str) -> None:
        """A connection of the host was lost or refused, or it answered 503: a bad page, or too many requests."""
        self._host(name).complaints += 1

    def failed(self, name: str) -> None:
        """A URL of the host timed out after its full deadline, or found no connection."""
        host = self._host(name)
        host.failures += 1
        host.last_failure = asyncio.get_running_loop().time()
        self._offer(host)
        self._start()

    def url_to_recheck(self, name: str) -> str | None:
        """A URL that the host answered before, if it answered none of the last ones: to be requested again."""
        host = self._host(name)
        return host.answered_url if host.failures >= self._breaker else None

    def recheck_failed(self, name: str, url: str) -> None:
        """The URL that the host had answered was requested again and failed."""
        host = self._host(name)
        if host.answered_url == url and host.failures >= self._breaker:
            host.answered_url = None
            self._offer(host)
            self._start()

    def silent(self, name: str) -> bool:
        """Whether the host answers nothing: its URLs get a short deadline."""
        return self._silent(self._host(name))

    def last_failure(self, name: str) -> float:
        """When a URL of the host last failed after its full deadline, by the event loop's clock."""
        return self._host(name).last_failure

    def recheck_lock(self, name: str) -> asyncio.Lock:
        """Held while the URL that the host had answered is requested again."""
        return self._host(name).recheck_lock

    def trial_lock(self, name: str) -> asyncio.Lock:
        """Held while a URL of the silent host is requested with its full deadline."""
        return self._host(name).trial_lock

    def _silent(self, host: "_Host") -> bool:
        return host.failures >= self._breaker and host.answered_url is None

    def _lower(self, host: "_Host", limit: int) -> None:
        host.limit = max(1, limit)
        host.lowered = asyncio.get_running_loop().time()
        host.latencies.clear()
        host.complaints = 0

    def _host(self, name: str) -> "_Host":
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(min(_INITIAL_LIMIT, self._per_host))
        return host

    async def _enter(self, host: "_Host") -> None:
        slot = asyncio.get_running_loop().create_future()
        host.waiting.append(slot)
        self._offer(host)
        self._start()
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self._leave(host)  # the slot was given to it just before
            raise

    def _leave(self, host: "_Host") -> None:
        self._free += 1
        host.in_flight -= 1
        self._offer(host)
        self._start()

    def _has_slot(self, host: "_Host") -> bool:
        limit = host.limit
        if self._silent(host):
            limit = min(_INITIAL_LIMIT, self._per_host)
        elif not host.answered:  # few URLs should find out whether the host answers
            limit = min(limit, self._breaker - host.failures)
        return host.in_flight < limit

    def _offer(self, host: "_Host") -> None:
        if not host.ready and host.waiting and self._has_slot(host):
            host.ready = True
            self._ready.append(host)

    def _start(self) -> None:
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


class _Host:
    """What is known of one host, and the URLs that wait for it."""

    def __init__(self, limit: int):
        self.limit = limit
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.in_flight = self.failures = self.complaints = 0  # failures: in a row; complaints: of this round
        self.answered = self.ready = False
        self.answered_url: str | None = None
        self.last_failure = self.lowered = float("-inf")
        self.latencies: list[float] = []  # of this round
        self.medians: deque[float] = deque(maxlen=_ROUNDS)
        self.recheck_lock, self.trial_lock = asyncio.Lock(), asyncio.Lock()


class ByteBudget:
    """Bytes of bodies in memory: while `limit` are held, a body waits before it grows, except the oldest one.

    The oldest body may always grow, so it comes to its end, or to its deadline, and frees its bytes. No two bodies wait
    for each other, and memory is at most `limit` and one body.

    waiting  bodies that wait to grow
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.held = self.waiting = 0
        self._shares: dict[ByteShare, None] = {}  # in the order of their first bytes
        self._released = asyncio.Event()

    @contextmanager
    def share(self) -> Iterator["ByteShare"]:
        """The bytes of one body; they are given back at the end."""
        share = ByteShare(self)
        try:
            yield share
        finally:
            self.held -= share.held
            self._shares.pop(share, None)
            self._released.set()
            self._released = asyncio.Event()


class ByteShare:
    """The bytes that one body holds of a ByteBudget."""

    def __init__(self, budget: ByteBudget):
        self._budget = budget
        self.held = 0

    @property
    def may_grow(self) -> bool:
        """Whether the budget has bytes left, or this is the oldest body."""
        budget = self._budget
        return budget.held < budget.limit or next(iter(budget._shares)) is self

    @property
    def delays_others(self) -> bool:
        """Whether bodies wait, and this is the one that they wait for."""
        return self._budget.waiting > 0 and next(iter(self._budget._shares), None) is self

    def grow(self, count: int) -> None:
        """Count `count` bytes more, which were received already."""
        self._budget._shares.setdefault(self)
        self._budget.held += count
        self.held += count

    async def wait_to_grow(self) -> None:
        """Wait until this body may grow."""
        self._budget.waiting += 1
        try:
            while not self.may_grow:
                await self._budget._released.wait()
        finally:
            self._budget.waiting -= 1
