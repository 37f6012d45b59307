"""Whose turn it is: how many URLs are in flight, of one host and of all, and how many bytes; hosts that are given up.

One `Hosts` and one `Budget` serve all shards that are downloaded at a time, so their limits hold over all of them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.normalise import Refused

# A host that has answered before may have many URLs in flight when the network halts for a moment.
_PATIENCE_WITH_THE_PROVEN = 4
# While bodies wait for room, those that hold more than an equal share of it must bring so much in every window.
_PACE = 64 * 1024  # bytes a second
_WINDOW = 1.0  # seconds


class Transient(Refused):
    """Refused for now: another attempt may do better.

    retry_after  seconds, at least, that the server asks to wait
    spent        seconds of the URL's deadline that are gone
    attempts     how often the URL was asked
    host         that it was at, which a redirect may have led to
    """

    def __init__(self, status: str, detail: str, retry_after: float = 0.0):
        super().__init__(status, detail)
        self.retry_after = retry_after
        self.spent = 0.0
        self.attempts = 0
        self.host = ""


class Hosts:
    """At most `at_once` URLs in flight, `per_host` of one host, the hosts in turn.

    A host is given up after `breaker` failures in a row (URLs that timed out or found no connection), four times as
    many where it has answered before; one that has never answered has at most `breaker` URLs in flight, so that it
    costs little to find out.
    """

    def __init__(self, at_once: int, per_host: int, breaker: int):
        self._free = at_once
        self._per_host = per_host
        self._breaker = breaker
        self._hosts: dict[str, _Host] = {}
        self._ready: deque[_Host] = deque()  # that have a URL waiting and room for it, in turn

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Waits for a turn of this host and holds it; Transient("host_timeout") where the host is given up."""
        host = self._host(name)
        host.check()
        await self._enter(host)
        try:
            yield
        finally:
            self._leave(host)

    def check(self, name: str) -> None:
        """Transient("host_timeout") where the host is given up."""
        self._host(name).check()

    def answered(self, name: str) -> None:
        """The host gave a whole answer, whatever it was."""
        host = self._host(name)
        if not host.answered or host.failures:
            host.answered, host.given_up, host.failures = True, False, 0
            self._offer(host)
            self._start()

    def failed(self, name: str) -> None:
        """A URL of the host timed out or found no connection; where that was one too many, the others are refused."""
        host = self._host(name)
        host.failures += 1
        if host.failures >= self._breaker * (_PATIENCE_WITH_THE_PROVEN if host.answered else 1):
            host.given_up = True
            while host.waiting:
                turn = host.waiting.popleft()
                if not turn.done():
                    turn.set_exception(host.refusal())

    def offer_again(self, name: str) -> None:
        """A host that was given up, and has not answered since, begins anew as one that never answered."""
        host = self._host(name)
        if host.given_up or not host.answered:
            host.given_up, host.answered, host.failures = False, False, 0
            self._offer(host)
            self._start()

    def _host(self, name: str) -> "_Host":
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(name)
        return host

    async def _enter(self, host: "_Host") -> None:
        turn = asyncio.get_running_loop().create_future()
        host.waiting.append(turn)
        self._offer(host)
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(host)  # it had just been given the turn
            raise

    def _leave(self, host: "_Host") -> None:
        self._free += 1
        host.in_flight -= 1
        self._offer(host)
        self._start()

    def _room(self, host: "_Host") -> bool:
        if host.answered:
            return host.in_flight < self._per_host
        return host.in_flight < min(self._per_host, self._breaker - host.failures)

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

    __slots__ = ("answered", "failures", "given_up", "in_flight", "name", "ready", "waiting")

    def __init__(self, name: str):
        self.name = name
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.in_flight = self.failures = 0
        self.answered = self.given_up = self.ready = False

    def check(self) -> None:
        if self.given_up:
            raise self.refusal()

    def refusal(self) -> Transient:
        refusal = Transient(
            "host_timeout",
            f"not asked: the last {self.failures} URLs asked of {self.name} timed out or found no connection",
        )
        refusal.host = self.name
        return refusal


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
