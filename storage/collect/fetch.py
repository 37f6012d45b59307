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
from storage.collect.normalise import ImageSettings, run_out
from storage.collect.robots import AGENT, MAX_BYTES, RobotsTxt, Rules, as_refused, check_x_robots_tag
from storage.collect.statuses import Refused, Status
from storage.programs import require
from storage.redact import redacted, shown_url
from storage.settings import FORM, check

if TYPE_CHECKING:
    import aiohttp
    import yarl

_SERVER_ERRORS = {Status.HTTP_429} | {Status(f"http_{code}") for code in range(500, 600)}
_RETRIED = _SERVER_ERRORS | {Status.CONNECT, Status.ROBOTS_TXT_FAILED}
_REDIRECTS = {301, 302, 303, 307, 308}
_ACCEPT = "image/jpeg,image/png,image/webp,image/gif,image/bmp;q=0.9,*/*;q=0.1"
_MAX_REDIRECTS = 5
_MIN_RATE = 2000  # bytes a second that a body must bring over every `read_timeout` seconds
_RETRY_DELAY = 0.5  # seconds before the first retry; doubled for each further one
# A longer pause would keep a slot from other URLs. Such a URL is requested again when the others are done, unless the
# server asks for more than the second.
_LONGEST_PAUSE, _LONGEST_WAIT = 2.0, 30.0
# The part of its deadline that a URL gets while its host is silent: 1 s of 20.
_SHORT_DEADLINE = 1 / 20
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True)
class DownloadSettings(ImageSettings):
    """How rows are downloaded; the image part is ImageSettings."""

    __pydantic_config__ = FORM

    deadline: float = 20.0
    """Seconds for one URL, from the first look-up to the last byte: redirects, retries and their pauses included. A
    server may be silent, and a TCP connection or a TLS handshake may take, for half of them."""
    retries: int = 2
    """Further attempts at once after a lost connection, 429 or 5xx, as far as the deadline allows, and if it is not 0
    another one after these and timeouts, when the others are done."""
    concurrency: int = 64
    """URLs in flight at once, over all shards in progress; their bodies take at most `concurrency` x `max_bytes`. A
    host begins with 8, and has more as long as it answers as fast."""
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
        for name in ("deadline", "concurrency", "decode_threads"):
            check(self, getattr(self, name) > 0, name, "over 0")
        check(self, self.retries >= 0, "retries", "0 or more")
        if not self.contact.isprintable():
            raise ValueError(f"contact {self.contact!r} has control characters; it is sent in a header")
        if isinstance(self.allowed_hosts, str):
            raise ValueError(f"allowed_hosts is the string {self.allowed_hosts!r}; give a tuple of host:port strings")
        for entry in self.allowed_hosts:
            host, _, port = entry.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in entry or "*" in entry:
                raise ValueError(f"allowed_hosts entry {entry!r} is not host:port, such as 127.0.0.1:8791")

    @property
    def read_timeout(self) -> float:
        """Seconds for which a server may be silent, and for one TCP connection and TLS handshake."""
        return self.deadline / 2

    @property
    def user_agent(self) -> str:
        """The User-Agent: the program's name and, if set, the contact."""
        return f"{AGENT}/{importlib.metadata.version('vlbert')}" + (f" (+{self.contact})" if self.contact else "")


class Fetcher:
    """URL -> bytes over one pool of connections; an async context manager."""

    def __init__(self, settings: DownloadSettings):
        self.settings = settings
        self.guard = AddressGuard(settings.allowed_hosts)
        self.hosts = Hosts(settings.concurrency)

    async def __aenter__(self) -> "Fetcher":
        require("aiohttp", "downloading")
        import aiohttp

        settings = self.settings
        self.robots_txt = RobotsTxt(self._fetch_robots_txt)
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

    async def fetch(self, url: str, before: Transient | None = None) -> bytes:
        """The body, within the deadline; Refused says why there is none, Transient that a later attempt may succeed.

        The caller holds a slot of the URL's host. `before` is the result of the first pass. The second pass is one
        attempt, in the rest of the deadline, but at most half of it; in all of it if the deadline was shortened.
        """
        deadline, retries = self.settings.deadline, self.settings.retries
        if before is not None and not before.shortened:
            deadline, retries = min(before.left, deadline / 2), 0
        flight = _Flight(deadline, retries, before)
        try:
            return await self._with_retries(url, flight)
        except TimeoutError as error:
            if flight.shortened:
                detail = f"not done after {self._short_deadline:g} s, and {flight.host} had not answered for long"
                refused = Transient(Status.HOST_TIMEOUT, detail)
            else:
                earlier = f"; before that {flight.failed.status}: {flight.failed.detail}" if flight.failed else ""
                refused = Transient(Status.TIMEOUT, f"not done after {deadline:g} s{earlier}")
                self.hosts.failed(flight.host)
            raise flight.ended(refused) from error
        except Transient as refused:
            if refused.status == Status.CONNECT and not refused.of_robots_txt and not flight.shortened:
                self.hosts.failed(flight.host)
            flight.ended(refused)
            raise

    @property
    def _short_deadline(self) -> float:
        """Seconds for a URL of a silent host."""
        return self.settings.deadline * _SHORT_DEADLINE

    def wait_before_second_pass(self, url: str, refused: Transient) -> float | None:
        """Seconds until the URL may be requested again; None if it may not."""
        if refused.shortened:
            return 0.0
        wait = max(_pause(url, self.settings.retries + 1), refused.retry_after)
        return wait if self.settings.retries and refused.left > 0 and wait <= _LONGEST_WAIT else None

    async def probe(self, url: str) -> None:
        """Request a URL of a silent host with the full deadline; an answer ends the silence."""
        flight, checked = _Flight(self.settings.deadline, 0), self.guard.check_url(url)
        flight.host, flight.url = _host_of(checked), str(checked)
        with suppress(TimeoutError, Refused):
            async with flight.running():
                await self._request(checked, flight)

    async def _with_retries(self, url: str, flight: "_Flight") -> bytes:
        """The body, after at most `retries` further attempts; the last one's Transient if none succeeds."""
        for number in itertools.count(1):
            flight.attempts += 1
            try:
                return await self._attempt(url, flight)
            except Transient as error:
                flight.failed = error
                pause = max(_pause(url, number), error.retry_after)
                more = error.status in _RETRIED and not error.of_robots_txt and number <= flight.retries
                if not more or pause > _LONGEST_PAUSE or pause >= flight.left:
                    raise
            async with flight.running():
                await asyncio.sleep(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, url: str, flight: "_Flight") -> bytes:
        """One attempt: redirects and body. Transient if another attempt may succeed, else Refused."""
        address = url
        for _ in range(_MAX_REDIRECTS + 1):
            checked = self.guard.check_url(address)
            flight.host, flight.url = _host_of(checked), str(checked)
            if self.settings.obey_robots_txt:
                # Waiting for it takes nothing of the deadline: it is not the image's fault.
                refused = as_refused(checked, await self.robots_txt.ask(checked, flight.since))
                if refused:
                    raise refused
            if flight.is_first and self.hosts.is_silent(flight.host):
                flight.shorten(self._short_deadline)
            async with flight.running():
                location, body = await self._request(checked, flight)
            if location is None:
                return body
            address = _join(address, location)
        raise Refused(Status.TOO_MANY_REDIRECTS, f"more than {_MAX_REDIRECTS}, the last to {shown_url(address)}")

    async def _request(self, url: "yarl.URL", flight: "_Flight") -> tuple[str | None, bytes]:
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
            if error.status == Status.TIMEOUT:
                self.hosts.failed(flight.host)  # the short deadline is shorter than this
            elif seconds is not None:
                self.hosts.answered(flight.host, str(url), begin, seconds)
            must_wait = isinstance(error, Transient) and error.retry_after > 0
            if must_wait or error.status == Status.HTTP_429:
                self.hosts.overloaded(flight.host, begin, must_wait=must_wait)
            elif error.status in (Status.HTTP_503, Status.CONNECT):
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
            lost = status in (Status.CONNECT, Status.TIMEOUT)
            transient = lost or (status == Status.DNS and error.errno == socket.EAI_AGAIN)
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
                raise Refused(Status.HTTP_OTHER, f"HTTP {code} without a Location")
            return location, b""
        status = Status.of_http(code)
        if status in _SERVER_ERRORS:
            raise Transient(status, _status_line(response), _retry_after(response))
        raise Refused(status, _status_line(response))

    async def _fetch_robots_txt(self, url: "yarl.URL") -> Rules:
        """The rules of a robots.txt, requested once, within the deadline of an image.

        It counts neither for nor against its host, which may answer this and nothing else.
        """
        address, location = str(url), None
        try:
            async with asyncio.timeout(self.settings.deadline):
                for _ in range(_MAX_REDIRECTS + 1):
                    location, body = await self._get(self.guard.check_url(address), self._robots_txt)
                    if location is None:
                        return Rules(body)
                    address = _join(address, location)
        except TimeoutError as error:
            raise Transient(Status.TIMEOUT, f"not done after {self.settings.deadline:g} s") from error
        except Refused as error:
            # If the server cannot be reached, its images get that as their status, as without robots.txt.
            if location is None or error.status == Status.ROBOTS_TXT_FAILED:
                raise
            detail = f"{error.status}: {error.detail}, after a redirect to {shown_url(address)}"
            raise Transient(Status.ROBOTS_TXT_FAILED, detail) from error
        return Rules(b"")  # as if there were none: RFC 9309, 2.3.1.2

    async def _robots_txt(self, response: "aiohttp.ClientResponse") -> tuple[str | None, bytes]:
        """Where a redirect leads, or None and the file; none at all allows everything."""
        code, location = response.status, response.headers.get("Location")
        if code in _REDIRECTS and location:
            return location, b""
        if 400 <= code < 500 and code != 429:
            return None, b""
        if not 200 <= code < 300:
            raise Transient(Status.ROBOTS_TXT_FAILED, _status_line(response), _retry_after(response))
        try:
            return None, await self._body(response, MAX_BYTES, cut=True)
        except Refused as error:
            if error.status == Status.TIMEOUT:
                raise
            raise Transient(Status.ROBOTS_TXT_FAILED, f"{error.status}: {error.detail}") from error

    async def _body(self, response: "aiohttp.ClientResponse", limit: int, *, cut: bool = False) -> bytes:
        """The body; of more than `limit` bytes those, if it may be cut, else `too_big`."""
        import aiohttp

        settings, content = self.settings, response.content
        if (response.content_length or 0) > limit and not cut:
            raise Refused(Status.TOO_BIG, f"{response.content_length} bytes announced, more than {limit}")
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
                    raise Refused(Status.TOO_BIG, f"over {limit} bytes {how}")
                seconds = loop.time() - since
                if seconds >= settings.read_timeout:
                    if received - counted < _MIN_RATE * seconds and not content.at_eof():
                        slow = f"{received - counted} bytes in {seconds:.0f} s, under {_MIN_RATE}/s"
                        raise Transient(Status.TIMEOUT, slow)
                    since, counted = loop.time(), received
        except zlib.error as error:
            raise Refused(Status.BAD_RESPONSE, f"Content-Encoding {encoding}, but {error}") from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            expected = "" if response.content_length is None else f" of {response.content_length}"
            raise Transient(Status.SHORT_BODY, f"{received}{expected} bytes, then the connection ended") from error
        if unpack and not unpack.eof:
            raise Refused(Status.SHORT_BODY, f"the {encoding} stream of {received} bytes has no end")
        return bytes(body)


class _Flight:
    """One URL in flight: the host that it is at, and the seconds that it has left; they run only in `running`.

    retries    further attempts at once
    before     the result of the first pass, if this is the second
    is_first   whether its deadline may be shortened, which is done for silent hosts
    since      when it failed last, by the event loop's clock: a robots.txt that failed before is requested again
    """

    def __init__(self, seconds: float, retries: int, before: Transient | None = None):
        self.left, self.retries = seconds, retries
        self.is_first, self.shortened = before is None, False
        self.since, self.attempts = (before.ended, before.attempts) if before else (float("-inf"), 0)
        self.host = self.url = ""
        self.failed: Transient | None = None

    def shorten(self, seconds: float) -> None:
        self.shortened, self.retries, self.left = True, 0, min(self.left, seconds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """TimeoutError when no second is left."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with asyncio.timeout(self.left):
                yield
        finally:
            self.left -= loop.time() - begin

    def ended(self, refused: Transient) -> Transient:
        """The same with what a second pass needs to know."""
        refused.host, refused.url, refused.shortened = self.host, self.url, self.shortened
        refused.attempts, refused.left, refused.ended = self.attempts, self.left, asyncio.get_running_loop().time()
        return refused


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
        raise Refused(Status.BAD_URL, f"redirect to {shown_url(location)!r} cannot be parsed") from error


def _status_of(error: "aiohttp.ClientError") -> Status:
    """The status of an error before the body. Subclasses come before their base classes."""
    import aiohttp

    if isinstance(error, aiohttp.ClientSSLError) or isinstance(error.__cause__, ssl.SSLError):
        return Status.TLS
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Status.DNS
    if isinstance(error, aiohttp.ServerTimeoutError):
        return Status.TIMEOUT
    if isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError):
        return Status.CONNECT
    if isinstance(error, aiohttp.InvalidURL):
        return Status.BAD_URL
    return Status.BAD_RESPONSE


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
        raise Refused(Status.BAD_RESPONSE, f"Content-Encoding {encoding[:40]!r}, though none was asked for")
    return zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip or zlib, by the stream's header
