"""Fetching of URLs from public addresses, with a deadline, a byte limit, and retries after transient failures."""

import asyncio
import functools
import importlib.metadata
import io
import itertools
import random
import re
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from storage.collect.addresses import AddressGuard, guarded_resolver
from storage.collect.awake import AwakeClock
from storage.collect.hosts import Hosts, Slot
from storage.collect.normalise import ImageSettings, begins_as_image, resource_error_hint
from storage.collect.responses import FIRST, MAX_FIELD, Unpacker, tolerant_protocol
from storage.collect.robots import AGENT, MAX_BYTES, RobotsTxt, Rules, check_x_robots_tag
from storage.collect.statuses import UNREACHABLE, Refused, Status
from storage.programs import require
from storage.redact import display_url, redacted
from storage.settings import check, check_positive

if TYPE_CHECKING:
    import aiohttp
    import yarl

_SERVER_ERRORS = {Status(f"http_{code}") for code in (429, *range(500, 600))}
_RETRIED = _SERVER_ERRORS | {Status.CONNECT}
# A request that ends so is sent again if this process did not run for over _STALL seconds of it.
_AFTER_STALL, _STALL = UNREACHABLE | {Status.TLS, Status.SHORT_BODY, Status.ROBOTS_TXT_FAILED}, 1.0
_REDIRECTS = {301, 302, 303, 307, 308}
_ACCEPT = "image/jpeg,image/png,image/webp,image/gif,image/bmp;q=0.9,*/*;q=0.1"
_MAX_REDIRECTS = 5
_RETRY_DELAY = 0.5  # seconds before the first retry, doubled for each further one
# A longer pause would keep a slot from other URLs. Such a URL is requested again when the others are done, unless the
# server asks to wait longer than _MAX_WAIT. Both are in seconds.
_MAX_PAUSE, _MAX_WAIT = 2.0, 30.0
# Limits that keep the event loop free: bytes that are read and decompressed at a time, and characters of an error.
_CHUNK, _PIECE, _MAX_ERROR = 2**12, 2**20, 10_000
_UNREAD = re.compile(r"\b(?:br|zstd|compress)\b", re.IGNORECASE)  # encodings that are not read
_Answer = tuple[str | None, bytes]  # the target of a redirect and no bytes, or None and the body
_Read = Callable[["aiohttp.ClientResponse"], Awaitable[_Answer]]


@dataclass(frozen=True, kw_only=True)
class DownloadSettings(ImageSettings):
    """Settings for downloading images, in addition to those for storing them."""

    deadline: float = 20.0
    """seconds for one URL, from the DNS lookup to the last byte, with redirects, retries and pauses; the same again in
    each later pass; the server may be silent, or take to connect (TCP and TLS), for at most half of this time; time in
    which this process did not run is left out"""
    retries: int = 2
    """immediate retries after a lost connection, 429 or 5xx, within the deadline; unless this is 0, such URLs and those
    that timed out get one more attempt in a second pass, after all others; 429 and 5xx get further passes, until two in
    a row bring no image of their host"""
    concurrency: int = 64
    """URLs in flight at once, over all shards in progress; their bodies take at most `concurrency` x `max_bytes` of
    memory; each host starts with 8, and gets more while its answers do not slow down"""
    decode_threads: int = 2
    """threads that check, decode and encode images, for all shards in progress; each holds one decoded image"""
    allowed_hosts: tuple[str, ...] = ()
    """`host:port` entries exempt from the address and port rules, such as "127.0.0.1:8791"; none by default"""
    obey_noindex: bool = True
    """refuse images with an `X-Robots-Tag` of `noindex`, `noimageindex` or `none`; `noai` is always obeyed"""
    obey_robots_txt: bool = True
    """read the `robots.txt` of each server first, and request no URL that it forbids for `vlbert-downloader`"""
    contact: str = ""
    """URL or mail address for the User-Agent, so that site owners can reach you; set it for the open web"""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "deadline", "concurrency", "decode_threads")
        check(self, self.retries >= 0, "retries", "0 or more")
        if not self.contact.isprintable():
            raise ValueError(f"contact {self.contact!r} has control characters, which a header cannot contain")
        for entry in self.allowed_hosts:
            host, _, port = entry.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in entry or "*" in entry:
                raise ValueError(f"allowed_hosts entry {entry!r} is not host:port, such as 127.0.0.1:8791")

    @property
    def read_timeout(self) -> float:
        """Time limit in seconds for connecting (TCP and TLS), and for each wait for data from the server."""
        return self.deadline / 2

    @property
    def user_agent(self) -> str:
        """User-Agent header: name and version of this program and, if set, the contact."""
        return f"{AGENT}/{importlib.metadata.version('vlbert')}" + (f" (+{self.contact})" if self.contact else "")


class Fetcher:
    """Async context manager that fetches URLs over one pool of connections."""

    def __init__(self, settings: DownloadSettings):
        self.settings = settings
        self.guard = AddressGuard(settings.allowed_hosts)
        self.hosts = Hosts(settings.concurrency)

    async def __aenter__(self) -> "Fetcher":
        require("aiohttp", "downloading")
        import aiohttp

        self.clock = AwakeClock(self.hosts.start_waiting)
        self._parser = ThreadPoolExecutor(1, "robots")  # one, so that the event loop keeps half a core
        patience = self.settings.read_timeout
        self.robots_txt = RobotsTxt(self._fetch_robots_txt)
        connector = aiohttp.TCPConnector(
            limit=0,  # Hosts limits the connections; a queue here would use up deadlines
            # One answer per connection: bytes that a server sends after an answer must not be read as the answer
            # to the next URL. Also, thousands of hosts would each keep a connection open.
            force_close=True,
            resolver=guarded_resolver(self.guard),
            socket_factory=self.guard.open_socket,
        )
        connector._factory = functools.partial(tolerant_protocol)  # aiohttp has no argument for it
        self.session = aiohttp.ClientSession(
            connector=connector,
            max_field_size=MAX_FIELD,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=patience, sock_read=patience),
            headers={"User-Agent": self.settings.user_agent, "Accept": _ACCEPT, "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a few bytes can unpack to gigabytes: see _decompressor
            trust_env=False,  # a proxy from the environment would connect to unchecked addresses
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.clock.stop()
        self._parser.shutdown(cancel_futures=True)
        await self.session.close()

    def host(self, url: str) -> str:
        """Return "host:port" for a URL. Raises the same errors as `AddressGuard.check_url`."""
        return _host_of(self.guard.check_url(url))

    async def fetch(self, url: str, slot: Slot, second_pass: float | None = None) -> bytes:
        """Fetch a URL and return its body. Raises Refused if it cannot be fetched within the deadline.

        The caller must hold `slot`, a slot of the URL's host (`Hosts.slot`). After the first pass over a shard's URLs,
        failed URLs that may succeed later are requested again in a second pass. `second_pass` is the start of that pass
        by the event loop's clock, or None in the first pass. Later passes make only one attempt for each URL. Unlike
        the first pass, they also request URLs of silent hosts, and robots.txt files that were unavailable before.
        """
        # Before the deadline starts, because the wait for a robots.txt should not count.
        await self._check_host(self.guard.check_url(url), second_pass)
        end = self.clock.time() + self.settings.deadline
        retries = self.settings.retries if second_pass is None else 0
        for number in itertools.count(1):
            try:
                return await self._attempt(url, end, second_pass, number > 1)
            except Refused as error:
                pause = max(_pause(url, number), error.retry_after or 0.0)
                in_vain = self.hosts.is_silent(error.host) or self.hosts.host(error.host).refuses_urls
                more = error.status in _RETRIED and number <= retries and not in_vain
                if not more or pause > _MAX_PAUSE or self.clock.time() + pause >= end:
                    raise
            await self.hosts.pause(slot, pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def wait_before_next_pass(self, url: str, refused: Refused, second_pass: float | None) -> float | None:
        """Return the seconds to wait before a refused URL is requested in the next pass, or None if it is not."""
        if refused.status == Status.HOST_TIMEOUT:
            return 0.0
        is_last = second_pass is not None and refused.status not in _SERVER_ERRORS
        if is_last or refused.retry_after is None or not self.settings.retries:
            return None
        wait = max(_pause(url, self.settings.retries + 1), refused.retry_after)
        return wait if wait <= _MAX_WAIT else None

    async def _attempt(self, url: str, end: float, second_pass: float | None, is_retry: bool) -> bytes:
        """Request a URL without retries, follow redirects, and return the body. For `second_pass`, see `fetch`."""
        address = url
        for _ in range(_MAX_REDIRECTS + 1):
            checked = self.guard.check_url(address)
            await self._check_host(checked, second_pass)
            location, body = await self._request(checked, end, is_retry or second_pass is not None)
            if location is None:
                return body
            address = _join(address, location)
        raise Refused(Status.TOO_MANY_REDIRECTS, f"more than {_MAX_REDIRECTS}, the last to {display_url(address)}")

    async def _check_host(self, url: "yarl.URL", second_pass: float | None) -> None:
        """Raise Refused if the host's robots.txt forbids the URL or is unavailable.

        In the first pass (`second_pass` is None), also raise Refused if the host is silent (storage/collect/hosts.py).
        """
        host = _host_of(url)
        if second_pass is None and self.hosts.is_silent(host):
            raise Refused(Status.HOST_TIMEOUT, f"{host} did not answer other URLs", 0.0, host)
        if self.settings.obey_robots_txt:
            begin = asyncio.get_running_loop().time()
            try:
                await self.robots_txt.check(url, second_pass)
            except Refused as error:
                error.host = host
                self.hosts.record_end(host, str(url), begin, None, error)
                raise

    async def _request(self, url: "yarl.URL", end: float, is_retry: bool) -> _Answer:
        """Send one request and record its outcome in `hosts`. Return (None, body), or (target, b"") for a redirect."""
        host, begin, seconds = _host_of(url), asyncio.get_running_loop().time(), None
        awake = self.clock.time()

        async def read(response: "aiohttp.ClientResponse") -> _Answer:
            nonlocal seconds
            seconds = self.clock.time() - awake
            return await self._read_answer(response)

        try:
            answer = await self._get(url, read, end)
        except Refused as error:
            error.host = host
            self.hosts.record_end(host, str(url), begin, seconds, error, is_retry)
            raise
        self.hosts.record_end(host, str(url), begin, seconds, None, is_retry)
        return answer

    async def _get(self, url: "yarl.URL", read: _Read, end: float) -> _Answer:
        """Send a request and return `read(response)`. Raises Refused if it fails or is not done by `end`.

        `end` is a time of `self.clock`. If a request fails in which this process did not run for over a second, another
        is sent.
        """
        while True:
            late = self.clock.late
            try:
                return await self._send(url, read, end)
            except Refused as error:
                stalled = self.clock.late - late > _STALL and error.status in _AFTER_STALL
                if not stalled or self.clock.time() >= end:
                    raise

    async def _send(self, url: "yarl.URL", read: _Read, end: float) -> _Answer:
        """Do the work of `_get`, with one request."""
        import aiohttp

        try:
            async with (
                asyncio.timeout(end - self.clock.time()),
                self.session.get(url, allow_redirects=False) as response,
            ):
                return await read(response)
        except aiohttp.ClientError as error:
            hint, number = resource_error_hint(error), getattr(error, "errno", None)
            if hint:
                raise OSError(number, f"{error}, while requesting {display_url(str(url))}; {hint}") from error
            status = _status_of(error)
            text = str(error)[:_MAX_ERROR].replace(str(url), display_url(str(url)))
            detail = redacted(f"{type(error).__name__}: {text}")[:300]
            lost = status in (Status.CONNECT, Status.TIMEOUT)
            transient = lost or (status == Status.DNS and number == socket.EAI_AGAIN)
            raise Refused(status, detail, 0.0 if transient else None) from error
        except TimeoutError as error:  # without a retry, because the deadline has passed
            raise Refused(Status.TIMEOUT, f"not done after {self.settings.deadline:g} s") from error

    async def _read_answer(self, response: "aiohttp.ClientResponse") -> _Answer:
        """Return (None, body), or (target, b"") for a redirect. Raises Refused for any other response."""
        code = response.status
        if 200 <= code < 300 or code in _REDIRECTS:
            check_x_robots_tag(response.headers.getall("X-Robots-Tag", ()), self.settings.obey_noindex)
        if 200 <= code < 300:
            body = await self._read_body(response, self.settings.max_bytes)
            encoding = _UNREAD.search(response.headers.get("Content-Encoding", ""))
            if begins_as_image(body) or (code == 200 and not encoding):
                return None, body
            if encoding:
                raise Refused(Status.BAD_RESPONSE, f"Content-Encoding {encoding[0]}, though none was requested")
        if code in _REDIRECTS:
            location = response.headers.get("Location")
            if not location:
                raise Refused(Status.HTTP_OTHER, f"HTTP {code} without a Location")
            return location, b""
        status = Status(f"http_{code}") if 400 <= code < 600 else Status.HTTP_OTHER
        raise Refused(status, _status_line(response), _retry_after(response) if status in _SERVER_ERRORS else None)

    async def _fetch_robots_txt(self, url: "yarl.URL") -> Rules:
        """Fetch a robots.txt, without retries and within the time limit for an image, and return its rules.

        A success is not recorded in `hosts`, because the host may serve its robots.txt but no images.
        """
        address, location = str(url), None
        end = self.clock.time() + self.settings.deadline
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                location, body = await self._get(self.guard.check_url(address), self._read_robots_txt, end)
                if location is None:
                    return await asyncio.get_running_loop().run_in_executor(self._parser, Rules, body)
                address = _join(address, location)
        except Refused as error:
            # If the server cannot be reached, its images get that status, as if there were no robots.txt.
            if location is None or error.status == Status.ROBOTS_TXT_FAILED:
                raise
            detail = f"{error.status}: {error.detail}, after a redirect to {display_url(address)}"
            raise Refused(Status.ROBOTS_TXT_FAILED, detail, 0.0) from error
        return Rules(b"")  # too many redirects count as a missing robots.txt: RFC 9309, 2.3.1.2

    async def _read_robots_txt(self, response: "aiohttp.ClientResponse") -> _Answer:
        """Return (None, content), or (target, b"") for a redirect. A missing file counts as empty."""
        code, location = response.status, response.headers.get("Location")
        if code in _REDIRECTS and location:
            return location, b""
        if 400 <= code < 500 and code != 429:
            return None, b""
        if not 200 <= code < 300:
            raise Refused(Status.ROBOTS_TXT_FAILED, _status_line(response), _retry_after(response))
        try:
            return None, await self._read_body(response, MAX_BYTES, cut=True)
        except Refused as error:
            raise Refused(Status.ROBOTS_TXT_FAILED, f"{error.status}: {error.detail}", 0.0) from error

    async def _read_body(self, response: "aiohttp.ClientResponse", limit: int, *, cut: bool = False) -> bytes:
        """Return the body, decompressed. If it exceeds `limit` bytes, truncate it (with `cut`) or raise Refused."""
        import aiohttp

        content = response.content
        if (response.content_length or 0) > limit and not cut:
            raise Refused(Status.TOO_BIG, f"{response.content_length} bytes announced, more than {limit}")
        body, received, packed = io.BytesIO(), 0, b""
        unpacker = Unpacker(", ".join(response.headers.getall("Content-Encoding", ())))
        in_chunks = response.content_length is None
        try:
            while packed or not content.at_eof():
                # Small steps, because HTTP chunks of one byte each would take long to join.
                chunk = packed or await (content.read(_CHUNK) if in_chunks else content.readany())
                while not received and len(chunk) < FIRST and not content.at_eof():
                    chunk += await content.read(_CHUNK)
                received += len(chunk) - len(packed)
                piece, packed = unpacker.unpack(chunk, min(limit + 1 - body.tell(), _PIECE))
                body.write(piece)
                if packed or in_chunks:  # let the event loop go on
                    await asyncio.sleep(0)
                if max(received, body.tell()) > limit:
                    if cut:
                        return body.getvalue()[:limit]
                    how = "sent" if received > limit else "when unpacked"
                    raise Refused(Status.TOO_BIG, f"over {limit} bytes {how}")
        except zlib.error as error:
            raise Refused(Status.BAD_RESPONSE, f"Content-Encoding {unpacker.encoding[:40]}, but {error}") from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            expected = "" if response.content_length is None else f" of {response.content_length}"
            detail = f"{received}{expected} bytes, then the connection ended"
            raise Refused(Status.SHORT_BODY, detail, 0.0) from error
        if not unpacker.at_end:
            raise Refused(Status.SHORT_BODY, f"the compressed stream of {received} bytes has no end")
        return body.getvalue()


def _pause(url: str, attempts: int) -> float:
    """Return the seconds to wait before the next attempt. The jitter depends only on the arguments."""
    return _RETRY_DELAY * 2 ** (attempts - 1) * random.Random(f"{attempts} {url}").uniform(0.5, 1.5)


def _host_of(url: "yarl.URL") -> str:
    # With the port, because a host may answer at port 80 and not at 443.
    return f"{url.host}:{url.port}"


def _join(base: str, location: str) -> str:
    path, mark, rest = re.split(r"([?#]|\Z)", location, maxsplit=1)
    try:
        return urljoin(base, path.replace("\\", "/") + mark + rest)  # as browsers do
    except ValueError as error:
        raise Refused(Status.BAD_URL, f"redirect to {display_url(location)!r} cannot be parsed") from error


def _status_of(error: "aiohttp.ClientError") -> Status:
    """Return the status for an error that occurred before the body was read."""
    import aiohttp

    # Subclasses come before their base classes.
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
    """Return the seconds in a Retry-After header, or 0 if it is missing or not a number (such as a date)."""
    value = response.headers.get("Retry-After", "").strip()
    return float(value) if value.isdecimal() else 0.0
