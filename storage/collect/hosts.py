"""Limits on the number of URLs in flight per host, over all shards in progress, and detection of silent hosts."""

import asyncio
import statistics
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from storage.collect.statuses import Refused, Status

_INITIAL_LIMIT = 8  # URLs of a host in flight at first, as in browsers
# A round of answers is slow if its median is over _SLOWER times that of the fastest of the last _ROUNDS rounds, plus
# _NOISE seconds.
_SLOWER, _NOISE, _ROUNDS = 1.5, 0.05, 32
# A URL is overdue after _OVERDUE times the median latency of its host's last round, but at least _PATIENCE seconds.
_OVERDUE, _PATIENCE = 4.0, 0.5
# Of a host's last _ATTEMPTS first attempts and as many retries (at least _FEW) are counted how many were refused. Many
# are more than _MANY of them. A host refuses single URLs if the shares differ by more than _DIFFERENCE.
_ATTEMPTS, _FEW, _MANY, _DIFFERENCE = 32, 8, 0.25, 0.4
BREAKER = 2  # failures in a row after which a host is silent
_NEVER = float("-inf")


class Hosts:
    """The hosts of all URLs. At most `at_once` URLs are in flight over all hosts. Hosts with waiting URLs take turns.

    A host is silent after two failures in a row (timeouts or lost connections) without an answer to another URL. Its
    other URLs wait until the rest of their shard is done. Then the host is tested with one URL that it has answered
    before, if there is one, and then with up to three of the waiting URLs. If it answers, all waiting URLs are
    requested; otherwise they end as HOST_TIMEOUT.

    Each host has a limit on URLs in flight. A refusal (429, 503) or a slower round of answers halves it, once for all
    in flight; other rounds double it up to the last good limit, then add one. A URL that is overdue or waits for a
    retry leaves its place to others while the host serves them. Repeated refusals of the same URLs do not count.
    """

    def __init__(self, at_once: int):
        self._free = self._at_once = at_once
        self._hosts = defaultdict[str, Host](lambda: Host(min(_INITIAL_LIMIT, at_once)))
        # Hosts with a waiting URL and a free slot, in the order of their turns.
        self._ready: OrderedDict[Host, None] = OrderedDict()

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator["Slot"]:
        """Async context manager that waits for a free slot of the host, and holds it for one URL in flight."""
        host = self.host(name)
        turn = asyncio.get_running_loop().create_future()
        host.waiting.append(turn)
        self._start(host)
        try:
            yield await turn
        finally:
            if not turn.cancelled():  # a turn that was cancelled while it waited holds no slot
                self._free += 1
                host.slots.remove(turn.result())
                self._start(host)

    async def pause(self, slot: "Slot", seconds: float) -> None:
        """Wait before a retry. Meanwhile the URL leaves its place to another one, unless the host is overloaded."""
        slot.is_paused = True
        self._start(slot.host)
        await asyncio.sleep(seconds)
        slot.is_paused, slot.began = False, asyncio.get_running_loop().time()

    def start_waiting(self) -> None:
        """Give the places of URLs that have become overdue to waiting URLs. Call this at short intervals."""
        for host in [host for host in self._hosts.values() if host.waiting] if self._free else ():
            self._start(host)

    def host(self, name: str) -> "Host":
        """Return the state of a host, creating it if it is new."""
        return self._hosts[name]

    def record_end(
        self,
        name: str,
        url: str,
        began: float,
        seconds: float | None,
        refused: Refused | None = None,
        is_retry: bool = False,
    ) -> None:
        """Record the outcome of a request.

        `began` is the time at which the request began. `seconds` is the time until the response's headers came, or None
        if no response came.
        """
        host, status = self.host(name), refused.status if refused else Status.OK
        now = asyncio.get_running_loop().time()
        if status in (Status.TIMEOUT, Status.CONNECT):
            if began >= host.answered:  # otherwise, the failure says nothing about the host
                host.failures += 1
                host.failed = now
        elif seconds is not None:
            host.answered_url, host.answered, host.failures = url, now, 0
            is_refusal = status in ("http_429", "http_503")
            (host.retries if is_retry else host.firsts).append(is_refusal)
            if began >= host.lowered:  # requests that were in flight together lower the limit once
                if not is_refusal:
                    host.latencies.append(seconds)
                elif not host.refuses_urls:
                    self._lower(host)
                if len(host.latencies) >= max(_INITIAL_LIMIT, host.limit):
                    self._end_round(host)
        self._start(host)

    def count_overdue(self) -> int:
        """Return the number of URLs that are overdue, over all hosts."""
        return sum(len(host.overdue()) for host in self._hosts.values())

    def is_silent(self, name: str) -> bool:
        """Return True if the last BREAKER requests to the host, or more, timed out or lost their connections."""
        return self.host(name).failures >= BREAKER

    def _end_round(self, host: "Host") -> None:
        host.medians.append(statistics.median(host.latencies))
        host.latencies.clear()
        if host.medians[-1] > _SLOWER * min(host.medians) + _NOISE:
            self._lower(host)
            return
        host.passed = host.limit
        if host.waiting:
            more = max(1, host.limit // 8) if host.lowered == _NEVER else 1  # faster until it is first lowered
            limit = min(2 * host.limit, host.last_good) if host.limit < host.last_good else host.limit + more
            host.limit = min(self._at_once, limit)

    def _lower(self, host: "Host") -> None:
        host.last_good, host.passed = host.passed or host.last_good // 2, 0
        host.limit = max(1, host.limit // 2)
        host.lowered = asyncio.get_running_loop().time()
        host.latencies.clear()

    def _has_slot(self, host: "Host") -> bool:
        if host.answered_url is None and host.failures < BREAKER:
            # Only a few URLs are used to find out whether the host answers.
            return len(host.slots) < min(host.limit, BREAKER - host.failures)
        overdue = host.overdue()
        left = sum(slot.began < host.answered for slot in overdue)
        if not host.is_overloaded:
            left += sum(slot.is_paused for slot in host.slots)
        # If all are overdue, one more URL shows whether the host still answers.
        return len(host.slots) - left < host.limit or len(overdue) == len(host.slots)

    def _offer(self, host: "Host") -> None:
        if host.waiting and self._has_slot(host):
            self._ready[host] = None

    def _start(self, changed: "Host") -> None:
        """Give free slots to waiting URLs. `changed` is a host that may have a free slot now."""
        self._offer(changed)
        while self._free and self._ready:
            host, _ = self._ready.popitem(last=False)
            while host.waiting and host.waiting[0].done():
                host.waiting.popleft()  # cancelled
            if host.waiting and self._has_slot(host):
                slot = Slot(host, asyncio.get_running_loop().time())
                host.slots.append(slot)
                host.waiting.popleft().set_result(slot)
                self._free -= 1
                self._offer(host)  # behind all others


@dataclass(eq=False)
class Slot:
    """A URL in flight. It is overdue if it has taken much longer than other URLs of its host."""

    host: "Host"
    began: float  # start of the latest attempt
    is_paused: bool = False  # whether it waits for a retry


class Host:
    """The state of one host, including the URLs that wait for it. Its times are read from the event loop's clock."""

    def __init__(self, limit: int):
        self.limit = limit
        self.passed = 0  # limit of the last round that was not slow since the limit was lowered, or 0
        self.last_good = 0  # the same before the limit was lowered, halved for each lowering without such a round
        self.waiting: deque[asyncio.Future[Slot]] = deque()
        self.slots: list[Slot] = []
        self.failures = 0  # in a row
        self.answered_url: str | None = None  # a URL that the host has answered
        self.answered = self.failed = self.lowered = _NEVER  # last answer, failure and lowering of the limit
        self.probe = asyncio.Lock()  # held while a silent host is tested
        self.latencies: list[float] = []  # of this round, in seconds
        self.medians: deque[float] = deque(maxlen=_ROUNDS)  # of earlier rounds
        # Whether the latest first attempts and the latest retries were refused.
        self.firsts: deque[bool] = deque(maxlen=_ATTEMPTS)
        self.retries: deque[bool] = deque(maxlen=_ATTEMPTS)

    def overdue(self) -> list[Slot]:
        """Return the slots of the URLs that are overdue."""
        patience = max(_PATIENCE, _OVERDUE * self.medians[-1] if self.medians else 0.0)
        due = asyncio.get_running_loop().time() - patience
        return [slot for slot in self.slots if slot.began <= due and not slot.is_paused]

    @property
    def refuses_urls(self) -> bool:
        """True if a URL that was refused once is mostly refused again, while other URLs are not."""
        if len(self.retries) < _FEW or not self.firsts:
            return False
        return sum(self.retries) / len(self.retries) - sum(self.firsts) / len(self.firsts) > _DIFFERENCE

    @property
    def is_overloaded(self) -> bool:
        """True if many first attempts are refused, and not for their URLs."""
        return sum(self.firsts) > _MANY * len(self.firsts) and not self.refuses_urls
