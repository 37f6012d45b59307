"""How many URLs of each host are in flight, over all shards in progress, and which hosts have fallen silent."""

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.collect.normalise import Refused

# URLs of a host in flight at first, as in browsers. Its answers decide whether it gets more later.
_INITIAL_LIMIT = 8
# A round of answers is slow if its median is over _SLOWER times that of the fastest of the last _ROUNDS rounds, plus
# _NOISE seconds.
_SLOWER, _NOISE, _ROUNDS = 1.5, 0.05, 32
_MAX_COMPLAINTS = 1 / 8  # of a round: with more lost connections and 503 the limit is lowered


class Transient(Refused):
    """Refused for now: another attempt may succeed.

    retry_after    seconds, at least, that the server asks to wait
    of_robots_txt  whether robots.txt could not be had, which was tried as often as an image is
    spent          seconds of the URL's deadline that are used up
    attempts       how often the URL was requested
    host           the host that failed, after redirects
    shortened      whether its deadline was short because that host was silent
    ended          when it failed, by the event loop's clock
    """

    def __init__(self, status: str, detail: str, retry_after: float = 0.0, *, of_robots_txt: bool = False):
        super().__init__(status, detail)
        self.retry_after = retry_after
        self.of_robots_txt = of_robots_txt
        self.spent = 0.0
        self.attempts = 0
        self.host = ""
        self.shortened = False
        self.ended = 0.0


class Hosts:
    """At most `at_once` URLs in flight, `per_host` of one host. Hosts with waiting URLs take turns.

    The invariant: every URL is requested that robots.txt allows, and no URL of a host that answers ends as
    `host_timeout`. A host that never answered is silent after `breaker` failures in a row (URLs that timed out or found
    no connection). If a host has answered before, the URL that it answered is requested again first. Only if that fails
    too is the host silent. URLs of a silent host get a short deadline. Any answer ends the silence, and these URLs are
    requested again as usual. docs/download.md has the rules.

    The number of URLs of a host in flight follows its answers. It grows after a round of answers as fast as before: by
    an eighth, or by one if it was lowered before. It is halved after a round of slow answers or of many lost
    connections and 503, and at once after a 429. It is one if the host asks to wait (Retry-After). A timeout does not
    lower it: while the host answers other URLs, the fault is that URL's.
    """

    def __init__(self, at_once: int, per_host: int, breaker: int):
        self._free = at_once
        self._per_host = per_host
        self._breaker = breaker
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
            self._hosts[name] = Host(name, min(_INITIAL_LIMIT, self._per_host))
        return self._hosts[name]

    def answered(self, name: str, url: str, began: float, seconds: float) -> None:
        """The host answered completely, with any status. `began`: when requested; `seconds`: until the headers came."""
        host = self.host(name)
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
        self._start(host)

    def overloaded(self, name: str, began: float, *, must_wait: bool = False) -> None:
        """The host answered a request begun at this time with "too many requests"; must_wait: with Retry-After."""
        host = self.host(name)
        if began >= host.lowered:  # requests that were in flight together count once
            self._lower(host, 1 if must_wait else host.limit // 2)

    def complained(self, name: str) -> None:
        """A connection of the host was lost or refused, or it answered 503: a bad page, or too many requests."""
        self.host(name).complaints += 1

    def failed(self, name: str) -> None:
        """A URL of the host timed out after its full deadline, or found no connection."""
        host = self.host(name)
        host.failures += 1
        host.last_failure = asyncio.get_running_loop().time()
        self._start(host)

    def url_to_recheck(self, name: str) -> str | None:
        """A URL that the host answered before, if it answered none of the last ones: to be requested again."""
        host = self.host(name)
        return host.answered_url if host.failures >= self._breaker else None

    def recheck_failed(self, name: str, url: str) -> None:
        """The URL that the host had answered was requested again and failed."""
        host = self.host(name)
        if host.answered_url == url and host.failures >= self._breaker:
            host.answered_url = None
            self._start(host)

    def silent(self, name: str) -> bool:
        """Whether the host answers nothing: its URLs get a short deadline."""
        host = self.host(name)
        return host.failures >= self._breaker and host.answered_url is None

    def _lower(self, host: "Host", limit: int) -> None:
        host.limit = max(1, limit)
        host.lowered = asyncio.get_running_loop().time()
        host.latencies.clear()
        host.complaints = 0

    def _has_slot(self, host: "Host") -> bool:
        limit = host.limit
        if self.silent(host.name):
            limit = min(_INITIAL_LIMIT, self._per_host)
        elif not host.answered:  # few URLs should find out whether the host answers
            limit = min(limit, self._breaker - host.failures)
        return host.in_flight < limit

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
    """What is known of one host, and the URLs that wait for it.

    last_failure  when a URL last failed after its full deadline, by the event loop's clock
    recheck_lock  held while the URL that the host had answered is requested again
    trial_lock    held while a URL of the silent host is requested with its full deadline
    """

    def __init__(self, name: str, limit: int):
        self.name, self.limit = name, limit
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.in_flight = self.failures = self.complaints = 0  # failures: in a row; complaints: of this round
        self.answered = self.ready = False
        self.answered_url: str | None = None
        self.last_failure = self.lowered = float("-inf")
        self.latencies: list[float] = []  # of this round
        self.medians: deque[float] = deque(maxlen=_ROUNDS)
        self.recheck_lock, self.trial_lock = asyncio.Lock(), asyncio.Lock()
