"""URL -> bytes: one deadline for all, a limit on bytes, retries of transient failures, public addresses only."""

import asyncio
import email.utils
import importlib.metadata
import itertools
import random
import socket
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urljoin

from storage.collect.addresses import AddressGuard, guarded_resolver
from storage.collect.hosts import Hosts, Transient
from storage.collect.normalise import ImageSettings, Refused, run_out
from storage.collect.robots import AGENT, MAX_BYTES, RobotsTxt, Rules, as_refused, check_x_robots_tag
from storage.programs import require
from storage.redact import redacted, shown_url
from storage.settings import FORM, check

if TYPE_CHECKING:
    import aiohttp
    import yarl

_RETRIED = {"connect", "http_429"} | {f"http_{code}" for code in range(500, 600)}
_TRANSIENT = _RETRIED | {"timeout"}
_REDIRECTS = {301, 302, 303, 307, 308}
_ACCEPT = "image/jpeg,image/png,image/webp,image/gif,image/bmp;q=0.9,*/*;q=0.1"
_MAX_REDIRECTS = 5
_RETRY_DELAY = 0.5  # seconds before the first retry; doubled for each further one
# A longer pause would keep a slot from other URLs. Such a URL is requested again in the second pass.
_LONGEST_PAUSE = 2.0
# The part of its deadline that a URL gets while its host is silent: 1 s of 20.
_SHORT_DEADLINE = 1 / 20
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True)
class DownloadSettings(ImageSettings):
    """How rows are downloaded; the image part is ImageSettings."""

    __pydantic_config__ = FORM

    deadline: float = 20.0
    """Seconds for one URL, from the first look-up to the last byte: redirects, retries and their pauses included."""
    read_timeout: float = 10.0
    """Seconds for which a server may be silent, and for one TCP connection and TLS handshake."""
    min_rate: int = 2000
    """Bytes a second that a body must bring over every `read_timeout` seconds; a server that drips is a `timeout`."""
    retries: int = 2
    """Further attempts at once after `connect`, `http_429` and `http_5xx`, as far as the deadline allows."""
    second_pass: float = 30.0
    """A URL that asks for a longer pause, in seconds, gets no second attempt after the others; 0: no URL gets one."""
    breaker: int = 2
    """Timeouts or lost connections in a row after which a host may be silent: its URLs then get a short deadline."""
    concurrency: int = 64
    """URLs in flight at once, over all shards in progress; their bodies take at most `concurrency` x `max_bytes`."""
    per_host: int = 64
    """The most URLs of one host in flight at once: it begins with 8, and has more as long as it answers as fast."""
    decode_threads: int = 2
    """Threads that check, decode and encode images, for all shards in progress; each holds one decoded image."""
    allowed_hosts: tuple[str, ...] = ()
    """`host:port` entries exempt from the address and port rules, such as "127.0.0.1:8791"; none by default."""
    obey_noindex: bool = True
    """Refuse an image whose `X-Robots-Tag` says `noindex`, `noimageindex` or `none`; `noai` is obeyed in any case."""
    obey_robots_txt: bool = True
    """Read the `robots.txt` of each server first, and request no URL that it forbids for `vlbert-downloader`."""
    contact: str = ""
    """A URL or mail address for the User-Agent, where a site's owner can ask what this is; set it for the open web."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("deadline", "read_timeout", "concurrency", "per_host", "breaker", "decode_threads"):
            check(self, getattr(self, name) > 0, name, "over 0")
        for name in ("min_rate", "retries", "second_pass"):
            check(self, getattr(self, name) >= 0, name, "0 or more")
        if not self.contact.isprintable():
            raise ValueError(f"contact {self.contact!r} has control characters; it is sent in a header")
        if isinstance(self.allowed_hosts, str):
            raise ValueError(f"allowed_hosts is the string {self.allowed_hosts!r}; give a tuple of host:port strings")
        for entry in self.allowed_hosts:
            host, _, port = entry.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in entry or "*" in entry:
                raise ValueError(f"allowed_hosts entry {entry!r} is not host:port, such as 127.0.0.1:8791")

    @property
    def user_agent(self) -> str:
        """The User-Agent: the program's name and, if set, the contact."""
        return f"{AGENT}/{importlib.metadata.version('vlbert')}" + (f" (+{self.contact})" if self.contact else "")


class Fetcher:
    """URL -> bytes over one pool of connections; an async context manager."""

    def __init__(self, settings: DownloadSettings):
        self.settings = settings
        self.guard = AddressGuard(settings.allowed_hosts)
        self.hosts = Hosts(settings.concurrency, settings.per_host, settings.breaker)
        self.robots_txt = RobotsTxt(self._fetch_robots_txt)

    async def __aenter__(self) -> "Fetcher":
        require("aiohttp", "downloading")
        import aiohttp

        settings = self.settings
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # Hosts limits the connections; a queue in here would use up deadlines
                # One answer per connection: bytes that a server sends after it must not be read as the answer to the
                # next URL. And with thousands of hosts, each would keep one connection open.
                force_close=True,
                resolver=guarded_resolver(self.guard),
                socket_factory=self.guard.open_socket,
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.read_timeout, sock_read=settings.read_timeout
            ),
            headers={"User-Agent": settings.user_agent, "Accept": _ACCEPT, "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a few bytes can unpack to gigabytes: see _decompressor
            trust_env=False,  # a proxy from the environment would connect for us, unchecked
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    def host(self, url: str) -> str:
        """The host of a URL, with its port; Refused as AddressGuard.check_url."""
        return _host_of(self.guard.check_url(url))

    async def fetch(self, url: str, before: Transient | None = None, *, full_deadline: bool = False) -> bytes:
        """The body, within the deadline; Refused says why there is none, Transient that a later attempt may succeed.

        The caller holds a slot of the URL's host. `before` is the result of the first pass. The second pass is one
        attempt, in the rest of the deadline, but at most half of it; in all of it if the deadline was shortened.
        `full_deadline`: do not shorten the deadline for a silent host.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        deadline = self.settings.deadline
        second = before is not None and not before.shortened
        if second:
            deadline = min(deadline - before.spent, deadline / 2)
        flight = _InFlight("", full_deadline, before.ended if before else float("-inf"))
        refused: Transient | None = None
        attempts = before.attempts if before else 0
        try:
            async with asyncio.timeout_at(begin + deadline) as flight.clock:
                for attempt in itertools.count(1):
                    attempts += 1
                    try:
                        return await self._attempt(url, flight)
                    except Transient as error:
                        refused = error
                        if error.of_robots_txt:
                            raise
                    pause = max(_pause(url, attempt), refused.retry_after)
                    more = refused.status in _RETRIED and attempt <= self.settings.retries
                    if not more or second or flight.shortened or pause > _LONGEST_PAUSE:
                        break
                    if loop.time() + pause >= flight.clock.when():
                        break
                    await asyncio.sleep(pause)
                if refused.status == "connect":
                    self._count_failure(flight)
                raise refused
        except TimeoutError as error:
            if flight.shortened:
                refused = Transient(
                    "host_timeout",
                    f"not done after {self._short_deadline:g} s, and {flight.host} had not answered for long",
                )
            else:
                self._count_failure(flight)
                earlier = f"; before that {refused.status}: {refused.detail}" if refused else ""
                refused = Transient("timeout", f"not done after {deadline:g} s{earlier}")
            raise refused from error
        finally:
            if refused is not None:
                refused.attempts, refused.host, refused.shortened = attempts, flight.host, flight.shortened
                refused.ended = loop.time()
                refused.spent = refused.ended - begin - flight.waited + (before.spent if before else 0.0)

    @property
    def _short_deadline(self) -> float:
        """Seconds for a URL of a silent host."""
        return self.settings.deadline * _SHORT_DEADLINE

    def _count_failure(self, flight: "_InFlight") -> None:
        """Count a failure against the host that the URL was at, unless the deadline was shortened."""
        if not flight.shortened:
            self.hosts.failed(flight.host)

    def pause_before_second_pass(self, url: str, refused: Transient) -> float | None:
        """Seconds until the URL may be requested again; None if it may not."""
        if refused.shortened:
            return 0.0
        settings = self.settings
        pause = max(_pause(url, settings.retries + 1), refused.retry_after)
        return None if pause > settings.second_pass or refused.spent >= settings.deadline else pause

    async def _attempt(self, url: str, flight: "_InFlight") -> bytes:
        """One attempt: redirects and body. Transient if another attempt may succeed, else Refused."""
        address = url
        for _ in range(_MAX_REDIRECTS + 1):
            checked = self.guard.check_url(address)
            flight.host = _host_of(checked)
            if self.settings.obey_robots_txt:
                await self._check_robots_txt(checked, flight)
            if self.hosts.url_to_recheck(flight.host):
                async with flight.clock_stopped():
                    await self._recheck(flight.host)
            if self.hosts.silent(flight.host) and not flight.full_deadline:
                flight.shorten(self._short_deadline)
            location, body = await self._request(checked, flight)
            if location is None:
                return body
            address = _join(address, location)
        raise Refused("too_many_redirects", f"more than {_MAX_REDIRECTS}, the last to {shown_url(address)}")

    async def _recheck(self, host: str) -> None:
        """Request again a URL that the host has answered: is the host silent, or only some of its URLs?"""
        async with self.hosts.host(host).recheck_lock:
            url = self.hosts.url_to_recheck(host)
            if url is None:
                return  # it has answered meanwhile, or another URL found it silent
            flight = _InFlight(host, full_deadline=True)
            with suppress(TimeoutError, Refused):
                async with asyncio.timeout(self.settings.deadline) as flight.clock:
                    await self._request(self.guard.check_url(url), flight)
            self.hosts.recheck_failed(host, url)

    async def _request(self, url: "yarl.URL", flight: "_InFlight") -> tuple[str | None, bytes]:
        """One request: where a redirect leads, or None and the body. What comes of it counts for the host."""
        loop = asyncio.get_running_loop()
        begin, seconds = loop.time(), None

        async def read(response: "aiohttp.ClientResponse") -> tuple[str | None, bytes]:
            nonlocal seconds
            seconds = loop.time() - begin
            return await self._answer(response)

        try:
            answer = await self._get(url, read)
        except Refused as error:
            if error.status == "timeout":
                self._count_failure(flight)
            elif seconds is not None:
                self.hosts.answered(flight.host, str(url), begin, seconds)
            must_wait = isinstance(error, Transient) and error.retry_after > 0
            if must_wait or error.status == "http_429":
                self.hosts.overloaded(flight.host, begin, must_wait=must_wait)
            elif error.status in ("http_503", "connect"):
                self.hosts.complained(flight.host)
            raise
        assert seconds is not None
        self.hosts.answered(flight.host, str(url), begin, seconds)
        return answer

    async def _get(self, url: "yarl.URL", read: Callable[["aiohttp.ClientResponse"], Awaitable[_Answer]]) -> _Answer:
        """One request: what `read` makes of the answer. Transient if another may succeed, else Refused."""
        import aiohttp

        try:
            async with self.session.get(url, allow_redirects=False) as response:
                return await read(response)
        except aiohttp.ClientError as error:
            way_out = run_out(error)
            if way_out:
                raise OSError(error.errno, f"{error}, while {shown_url(str(url))} was requested; {way_out}") from error
            status = _status_of(error)
            text = str(error).replace(str(url), shown_url(str(url)))
            detail = redacted(f"{type(error).__name__}: {text}")[:300]
            transient = status in _TRANSIENT or (status == "dns" and error.errno == socket.EAI_AGAIN)
            raise (Transient if transient else Refused)(status, detail) from error

    async def _answer(self, response: "aiohttp.ClientResponse") -> tuple[str | None, bytes]:
        """Where a redirect leads, or None and the body."""
        code = response.status
        if code == 200 or code in _REDIRECTS:
            check_x_robots_tag(response.headers.getall("X-Robots-Tag", ()), self.settings.obey_noindex)
        if code == 200:
            return None, await self._body(response, self.settings.max_bytes)
        if code in _REDIRECTS:
            location = response.headers.get("Location")
            if not location:
                raise Refused("http_other", f"HTTP {code} without a Location")
            return location, b""
        status = f"http_{code}" if 400 <= code < 600 else "http_other"
        if status in _TRANSIENT:
            raise Transient(status, _status_line(response), _retry_after(response))
        raise Refused(status, _status_line(response))

    async def _check_robots_txt(self, url: "yarl.URL", flight: "_InFlight") -> None:
        """Refused if the robots.txt of the URL's origin forbids it, or cannot be had."""
        found = self.robots_txt.known(url, flight.since)
        if found is None:
            async with flight.clock_stopped():
                found = await self.robots_txt.ask(url, flight.since)
        refused = as_refused(url, found)
        if refused:
            raise refused

    async def _fetch_robots_txt(self, url: "yarl.URL") -> Rules:
        """The rules of a robots.txt; retried and within a deadline as an image is.

        It counts neither for nor against its host, which may answer this and nothing else.
        """
        deadline = self.settings.deadline
        try:
            async with asyncio.timeout(deadline):
                for attempt in itertools.count(1):
                    try:
                        return await self._attempt_robots_txt(url)
                    except Transient as error:
                        pause = max(_pause(str(url), attempt), error.retry_after)
                        retried = error.status == "robots_txt_failed" or error.status in _RETRIED
                        if not retried or attempt > self.settings.retries or pause > _LONGEST_PAUSE:
                            raise
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            raise Transient("timeout", f"not done after {deadline:g} s") from error

    async def _attempt_robots_txt(self, url: "yarl.URL") -> Rules:
        """One attempt, redirects included."""
        address, location = str(url), None
        for _ in range(_MAX_REDIRECTS + 1):
            try:
                location, body = await self._get(self.guard.check_url(address), self._robots_txt)
                if location is None:
                    return Rules.parse(body)
                address = _join(address, location)
            except Refused as error:
                # If the server cannot be reached, its images get that as their status, as without robots.txt.
                if location is None or error.status == "robots_txt_failed":
                    raise
                detail = f"{error.status}: {error.detail}, after a redirect to {shown_url(address)}"
                raise Transient("robots_txt_failed", detail) from error
        return Rules({})  # as if there were none: RFC 9309, 2.3.1.2

    async def _robots_txt(self, response: "aiohttp.ClientResponse") -> tuple[str | None, bytes]:
        """Where a redirect leads, or None and the file; none at all allows everything."""
        code, location = response.status, response.headers.get("Location")
        if code in _REDIRECTS and location:
            return location, b""
        if 400 <= code < 500 and code != 429:
            return None, b""
        if not 200 <= code < 300:
            raise Transient("robots_txt_failed", _status_line(response), _retry_after(response))
        try:
            return None, await self._body(response, MAX_BYTES, cut=True)
        except Refused as error:
            if error.status == "timeout":
                raise
            raise Transient("robots_txt_failed", f"{error.status}: {error.detail}") from error

    async def _body(self, response: "aiohttp.ClientResponse", limit: int, *, cut: bool = False) -> bytes:
        """The body; of more than `limit` bytes those, if it may be cut, else `too_big`."""
        import aiohttp

        settings, content = self.settings, response.content
        if (response.content_length or 0) > limit and not cut:
            raise Refused("too_big", f"{response.content_length} bytes announced, more than {limit}")
        encoding = response.headers.get("Content-Encoding", "").strip().lower()
        unpack = _decompressor(encoding)
        body, received = bytearray(), 0
        loop = asyncio.get_running_loop()
        since, counted = loop.time(), 0  # of the rate
        try:
            while not content.at_eof():
                chunk = await content.readany()
                received += len(chunk)
                left = limit + 1 - len(body)
                body += unpack.decompress(chunk, left) if unpack else chunk[:left]
                if max(received, len(body)) > limit:
                    if cut:
                        return bytes(body[:limit])
                    how = "sent" if received > limit else f"when unpacked from {encoding}"
                    raise Refused("too_big", f"over {limit} bytes {how}")
                seconds = loop.time() - since
                if seconds >= settings.read_timeout:
                    if received - counted < settings.min_rate * seconds and not content.at_eof():
                        raise Transient(
                            "timeout", f"{received - counted} bytes in {seconds:.0f} s, under {settings.min_rate}/s"
                        )
                    since, counted = loop.time(), received
        except zlib.error as error:
            raise Refused("bad_response", f"Content-Encoding {encoding}, but {error}") from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            expected = "" if response.content_length is None else f" of {response.content_length}"
            raise Transient("short_body", f"{received}{expected} bytes, then the connection ended") from error
        if unpack and not unpack.eof:
            raise Refused("short_body", f"the {encoding} stream of {received} bytes has no end")
        return bytes(body)


class _InFlight:
    """One URL in flight: the host that it is at, and the clock of its deadline.

    full_deadline  whether it keeps its deadline though the host is silent
    since          when it failed last, by the event loop's clock: a robots.txt that failed before is requested again
    shortened      whether its deadline was shortened
    """

    def __init__(self, host: str, full_deadline: bool, since: float = float("-inf")):
        self.host = host
        self.full_deadline = full_deadline
        self.since = since
        self.shortened = False
        self.clock: asyncio.Timeout
        self.waited = 0.0  # seconds in which the clock was stopped

    def shorten(self, seconds: float) -> None:
        """End after this many seconds from now, unless the deadline is nearer."""
        self.shortened = True
        self.clock.reschedule(min(self.clock.when(), asyncio.get_running_loop().time() + seconds))

    @asynccontextmanager
    async def clock_stopped(self) -> AsyncIterator[None]:
        """Time in here does not count towards the deadline: it is not the server's fault."""
        loop = asyncio.get_running_loop()
        end, begin = self.clock.when(), loop.time()
        self.clock.reschedule(None)
        try:
            yield
        finally:
            seconds = loop.time() - begin
            self.waited += seconds
            self.clock.reschedule(end + seconds)


def _pause(url: str, attempts: int) -> float:
    """Seconds before the next attempt, with a jitter that is the same in every run."""
    return _RETRY_DELAY * 2 ** (attempts - 1) * random.Random(f"{attempts} {url}").uniform(0.5, 1.5)


def _host_of(url: "yarl.URL") -> str:
    # With the port: a server may listen at port 80 and not at 443.
    return f"{url.host}:{url.port}"


def _join(base: str, location: str) -> str:
    try:
        return urljoin(base, location)
    except ValueError as error:
        raise Refused("bad_url", f"redirect to {shown_url(location)!r} cannot be parsed") from error


def _status_of(error: "aiohttp.ClientError") -> str:
    """The status of an error before the body. Subclasses come before their base classes."""
    import aiohttp

    if isinstance(error, aiohttp.ClientSSLError) or isinstance(error.__cause__, ssl.SSLError):
        return "tls"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "dns"
    if isinstance(error, aiohttp.ServerTimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError):
        return "connect"
    if isinstance(error, aiohttp.InvalidURL):
        return "bad_url"
    return "bad_response"


def _status_line(response: "aiohttp.ClientResponse") -> str:
    return f"HTTP {response.status} {response.reason or ''}".rstrip()


def _retry_after(response: "aiohttp.ClientResponse") -> float:
    """Seconds that a Retry-After header asks for: a number, or an HTTP date; 0 if it has neither."""
    value = response.headers.get("Retry-After", "")
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):  # a server may write anything: a zone of 20 digits overflows
        return 0.0


def _decompressor(encoding: str) -> "zlib._Decompress | None":
    """What undoes a content encoding, which some servers use without being asked; None if there is none."""
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise Refused("bad_response", f"Content-Encoding {encoding[:40]!r}, though none was asked for")
    return zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip or zlib, by the stream's header
