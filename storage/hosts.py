"""Whose turn it is: how many URLs are in flight, of one host and of all, and how many bytes; hosts that fall silent.

One `Hosts` and one `Budget` serve all shards that are downloaded at a time, so their limits hold over all of them.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.normalise import Refused

# URLs of a host in flight at first, as browsers have it; what it may have later is up to how it answers.
_AT_FIRST = 8
# A round of answers is slow where its median is over this multiple of the fastest of the last rounds, and some more.
_RISEN, _NOISE, _ROUNDS = 1.5, 0.05, 32  # times, seconds, rounds
_COMPLAINTS = 1 / 8  # of a round: more lost connections and 503 than that are more than some bad pages
# While bodies wait for room, those that hold more than an equal share of it must bring so much in every window.
_PACE = 64 * 1024  # bytes a second
_WINDOW = 1.0  # seconds


class Transient(Refused):
    """Refused for now: another attempt may do better.

    retry_after  seconds, at least, that the server asks to wait
    spent        seconds of the URL's deadline that are gone
    attempts     how often the URL was asked
    host         that it was at, which a redirect may have led to
    brief        whether it was asked in brief only, because that host was silent
    ended        when, by the event loop's clock
    """

    def __init__(self, status: str, detail: str, retry_after: float = 0.0):
        super().__init__(status, detail)
        self.retry_after = retry_after
        self.spent = 0.0
        self.attempts = 0
        self.host = ""
        self.brief = False
        self.ended = 0.0


class Hosts:
    """At most `at_once` URLs in flight, `per_host` of one host, the hosts in turn; every URL gets its turn.

    The invariant: no URL of a host that answers ends as `host_timeout`, and every URL is asked. A host that never
    answered is silent after `breaker` failures in a row (URLs that timed out or found no connection). One that has
    answered is then in doubt: `known`, a URL that it answered, is asked again, and only where that fails, too, is it
    silent. URLs of a silent host are asked in brief; any answer ends the silence, and they are asked again as others
    are. docs/download.md has the rules.

    How many URLs of a host are in flight follows its answers. After a round of answers as fast as before it is more: by
    an eighth, and by one once it was lowered. It is halved after a round of slow answers or of many lost connections
    and 503, and at once after a 429; it is one where the host asks to wait (Retry-After). A timeout lowers nothing: as
    long as the host answers others, it is that URL's.
    """

    def __init__(self, at_once: int, per_host: int, breaker: int):
        self._free = at_once
        self._per_host = per_host
        self._breaker = breaker
        self._hosts: dict[str, _Host] = {}
        self._ready: deque[_Host] = deque()  # that have a URL waiting and room for it, in turn

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Waits for a turn of this host and holds it."""
        host = self._host(name)
        await self._enter(host)
        try:
            yield
        finally:
            self._leave(host)

    def answered(self, name: str, url: str, began: float, seconds: float) -> None:
        """The host gave a whole answer, whatever it was, to a request of this moment, its head after so long."""
        host = self._host(name)
        host.answered, host.known, host.failures = True, url, 0
        if began >= host.lowered:
            host.latencies.append(seconds)
        if len(host.latencies) >= max(_AT_FIRST, host.limit):
            median = statistics.median(host.latencies)
            host.medians.append(median)
            slow = median > _RISEN * min(host.medians) + _NOISE
            if slow or host.complaints > _COMPLAINTS * len(host.latencies):
                self._lower(host, host.limit // 2)
            elif host.waiting:
                more = 1 if host.lowered > float("-inf") else max(1, host.limit // 8)
                host.limit = min(self._per_host, host.limit + more)
            host.latencies.clear()
            host.complaints = 0
        self._offer(host)
        self._start()

    def overloaded(self, name: str, began: float, *, rest: bool = False) -> None:
        """A request of this moment was told that there are too many; `rest`: and to wait."""
        host = self._host(name)
        if began >= host.lowered:  # those that were in flight together say it once
            self._lower(host, 1 if rest else host.limit // 2)

    def complained(self, name: str) -> None:
        """A connection of the host was lost or refused, or it answered 503: a bad page, or too many requests."""
        self._host(name).complaints += 1

    def failed(self, name: str) -> None:
        """A URL of the host, asked with all patience, timed out or found no connection."""
        host = self._host(name)
        host.failures += 1
        host.tried = asyncio.get_running_loop().time()
        self._offer(host)
        self._start()

    def doubtful(self, name: str) -> str | None:
        """A URL that the host answered, where it answered none of the last ones: to be asked again."""
        host = self._host(name)
        return host.known if host.failures >= self._breaker else None

    def forget(self, name: str, known: str) -> None:
        """The URL that the host had answered was asked again, in vain."""
        host = self._host(name)
        if host.known == known and host.failures >= self._breaker:
            host.known = None
            self._offer(host)
            self._start()

    def silent(self, name: str) -> bool:
        """Whether the host answers nothing: its URLs are to be asked in brief."""
        return self._silent(self._host(name))

    def tried(self, name: str) -> float:
        """When a URL was last asked in vain with all patience, by the event loop's clock."""
        return self._host(name).tried

    def doubt(self, name: str) -> asyncio.Lock:
        """Held by who asks what the host had answered once more."""
        return self._host(name).doubt

    def trial(self, name: str) -> asyncio.Lock:
        """Held by who asks a URL of the silent host with all patience."""
        return self._host(name).trial

    def _silent(self, host: "_Host") -> bool:
        return host.failures >= self._breaker and host.known is None

    def _lower(self, host: "_Host", limit: int) -> None:
        host.limit = max(1, limit)
        host.lowered = asyncio.get_running_loop().time()
        host.latencies.clear()
        host.complaints = 0

    def _host(self, name: str) -> "_Host":
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(min(_AT_FIRST, self._per_host))
        return host

    async def _enter(self, host: "_Host") -> None:
        turn = asyncio.get_running_loop().create_future()
        host.waiting.append(turn)
        self._offer(host)
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(host)  # it had just been given the turn
            raise

    def _leave(self, host: "_Host") -> None:
        self._free += 1
        host.in_flight -= 1
        self._offer(host)
        self._start()

    def _room(self, host: "_Host") -> bool:
        limit = host.limit
        if self._silent(host):
            limit = min(_AT_FIRST, self._per_host)
        elif not host.answered:  # it must cost little to find out
            limit = min(limit, self._breaker - host.failures)
        return host.in_flight < limit

    def _offer(self, host: "_Host") -> None:
        if not host.ready and host.waiting and self._room(host):
            host.ready = True
            self._ready.append(host)

    def _start(self) -> None:
        while self._free and self._ready:
            host = self._ready.popleft()
            host.ready = False
            while host.waiting and host.waiting[0].done():
                host.waiting.popleft()  # cancelled
            if host.waiting and self._room(host):
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
        self.known: str | None = None
        self.tried = self.lowered = float("-inf")
        self.latencies: list[float] = []  # of this round
        self.medians: deque[float] = deque(maxlen=_ROUNDS)
        self.doubt, self.trial = asyncio.Lock(), asyncio.Lock()


class Budget:
    """Bytes of bodies in memory: a body waits before it grows past `limit` in all, except the one that came first.

    That one may always grow, so it comes to its end and makes room: no body waits for another that waits. A server that
    falls silent behind a large body must not keep all others waiting: its lease is revoked.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.held = 0
        self._leases: dict[Lease, None] = {}  # in the order in which they came
        self._waiting: list[asyncio.Future[None]] = []

    def lease(self) -> "Lease":
        """The share of one body: a context manager that gives it back."""
        return Lease(self)

    def _revoke_laggards(self) -> None:
        """Of the bodies that are being read and hold more than an equal share: those that were too slow of late."""
        now = asyncio.get_running_loop().time()
        for lease in self._leases:
            seconds = now - lease._since
            if lease._clock is None or seconds < _WINDOW or lease.held * len(self._leases) < self.limit:
                continue
            if lease.held - lease._counted >= _PACE * seconds:
                lease.read_by(lease._clock)
            elif not lease._clock.expired():
                lease.revoked = True
                lease._clock.reschedule(now)


class Lease:
    """The bytes that one body holds of a Budget; `revoked` where they came too slowly while others waited."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self.held = 0
        self.revoked = False
        self._clock: asyncio.Timeout | None = None
        self._since, self._counted = 0.0, 0  # of the window in which it must keep pace

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        budget = self._budget
        budget.held -= self.held
        budget._leases.pop(self, None)
        waiting, budget._waiting = budget._waiting, []
        for room in waiting:
            if not room.done():
                room.set_result(None)

    @property
    def may_grow(self) -> bool:
        """Whether there is room, or this is the body that came first."""
        budget = self._budget
        return budget.held < budget.limit or next(iter(budget._leases)) is self

    def grow(self, count: int) -> None:
        """Take `count` bytes more, which are there already."""
        self._budget._leases.setdefault(self)
        self._budget.held += count
        self.held += count

    def read_by(self, clock: asyncio.Timeout | None) -> None:
        """The body is read under this clock, which ends at once where the lease is revoked; None: it rests."""
        self._clock = clock
        self._since, self._counted = asyncio.get_running_loop().time(), self.held

    async def room(self) -> None:
        """Wait until this body may grow."""
        while not self.may_grow:
            room = asyncio.get_running_loop().create_future()
            self._budget._waiting.append(room)
            while not (await asyncio.wait([room], timeout=_WINDOW))[0]:
                self._budget._revoke_laggards()
