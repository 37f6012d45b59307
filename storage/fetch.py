"""URL -> bytes: one deadline for everything, a cap on bytes, retries of what is transient, and public addresses only.

Every address is checked where the connection is made, so that neither a redirect nor a name that resolves anew can
lead into a private network.
"""

import asyncio
import concurrent.futures
import email.utils
import ipaddress
import random
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from storage.normalise import ImageSettings, Refused

if TYPE_CHECKING:
    import aiohttp
    import yarl

_TRANSIENT = {"connect", "timeout", "http_429"} | {f"http_{code}" for code in range(500, 600)}
_REDIRECTS = {301, 302, 303, 307, 308}
_PORTS = {80, 443}
_ACCEPT = "image/jpeg,image/png,image/webp,image/gif,image/bmp;q=0.9,*/*;q=0.1"
# A URL of nothing but these is sent as the list has it; any other is quoted first.
_PLAIN_URL = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})*")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Not public although the ipaddress module of some Python 3.11 takes them for it, or although they are routed.
_REFUSED_NETWORKS: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        "100.64.0.0/10",  # shared by carriers (RFC 6598)
        "168.63.129.16/32",  # the platform service inside Azure
        "192.0.0.0/24",  # protocol assignments (RFC 6890)
        "192.88.99.0/24",  # 6to4 relays (RFC 7526)
        "64:ff9b:1::/48",  # NAT64 of local use (RFC 8215)
        "2001::/23",  # protocol assignments, Teredo among them (RFC 2928, 4380)
        "3fff::/20",  # documentation (RFC 9637)
        "5f00::/16",  # segment routing (RFC 9602)
        "fec0::/10",  # site-local (RFC 3879)
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")


@dataclass(frozen=True, kw_only=True)
class DownloadSettings(ImageSettings):
    """How rows are downloaded; the image part is ImageSettings."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # for a form made of it

    deadline: float = 30.0
    """Seconds for one URL, from the first look-up to the last byte: redirects, retries and pauses included."""
    connect_timeout: float = 10.0
    """Seconds for one TCP connection and TLS handshake."""
    read_timeout: float = 10.0
    """Seconds for which a server may be silent."""
    max_redirects: int = 5
    """Redirects that are followed for one URL; each hop is checked as the first URL is."""
    retries: int = 2
    """Further attempts after `connect`, `timeout`, `http_429` and `http_5xx`, as far as the deadline allows."""
    retry_delay: float = 0.5
    """Seconds before the first retry; doubled for each further one, times a factor in 0.5..1.5 drawn from the seed."""
    seed: int = 0
    """Seed of the retries' jitter."""
    concurrency: int = 32
    """URLs of one shard in flight at once; each holds up to two times `max_bytes` of memory."""
    decode_threads: int = 2
    """Threads that check, decode and encode the images of one shard; each holds one decoded image."""
    allowed_hosts: tuple[str, ...] = ()
    """`host:port` entries exempt from the address and port rules, such as "127.0.0.1:8791"; none by default."""
    contact: str = ""
    """A URL or mail address for the User-Agent, where a site's owner can ask what this is; set it for the open web."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("deadline", "connect_timeout", "read_timeout", "concurrency", "decode_threads"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be over 0")
        for name in ("max_redirects", "retries", "retry_delay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
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
        """What servers are told: the program's name and, where set, whom to ask."""
        return "vlbert-downloader/0.1" + (f" (+{self.contact})" if self.contact else "")


class Fetcher:
    """URL -> bytes over one pool of connections; an async context manager.

    `lookup` stands in for the system's name resolution in tests: (host, port) -> addresses.
    """

    def __init__(self, settings: DownloadSettings, lookup: Callable[[str, int], Awaitable[list[str]]] | None = None):
        self.settings = settings
        self.guard = AddressGuard(settings.allowed_hosts)
        self.lookup = lookup or _system_lookup

    async def __aenter__(self) -> "Fetcher":
        import aiohttp

        settings = self.settings
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the workers are the limit; a queue in here would eat into deadlines
                resolver=_guarded_resolver(self.guard, self.lookup),
                socket_factory=self.guard.open_socket,
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout, sock_read=settings.read_timeout
            ),
            headers={"User-Agent": settings.user_agent, "Accept": _ACCEPT, "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a few bytes can unpack to gigabytes: see _unpack
            trust_env=False,  # a proxy from the environment would connect for us, unchecked
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def fetch(self, url: str) -> bytes:
        """The body, within the deadline; Refused says why there is none."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.settings.deadline
        jitter = random.Random(f"{self.settings.seed} {url}")
        attempts = 0
        refused: Refused | None = None
        try:
            async with asyncio.timeout_at(end):
                while True:
                    attempts += 1
                    try:
                        return await self._attempt(url)
                    except _Retry as error:
                        refused = error
                    pause = self.settings.retry_delay * 2 ** (attempts - 1) * jitter.uniform(0.5, 1.5)
                    pause = max(pause, refused.retry_after)
                    if attempts > self.settings.retries or loop.time() + pause >= end:
                        tries = f" ({attempts} attempts)" if attempts > 1 else ""
                        raise Refused(refused.status, refused.detail + tries)
                    await asyncio.sleep(pause)
        except TimeoutError as error:
            before = f"; before that {refused.status}: {refused.detail}" if refused else ""
            raise Refused("timeout", f"not done after {self.settings.deadline:g} s{before}") from error

    async def _attempt(self, url: str) -> bytes:
        """One try: redirects and body. _Retry where another try may do better, Refused where not."""
        import aiohttp

        address = url
        try:
            for _ in range(self.settings.max_redirects + 1):
                request = self.session.get(self.guard.check_url(address), allow_redirects=False)
                async with request as response:
                    if response.status not in _REDIRECTS:
                        return await self._body(response)
                    location = response.headers.get("Location")
                    if not location:
                        raise Refused("http_other", f"HTTP {response.status} without a Location")
                    address = _join(address, location)
            raise Refused("too_many_redirects", f"more than {self.settings.max_redirects}, the last to {address[:200]}")
        except aiohttp.ClientError as error:
            status = _status_of(error)
            detail = f"{type(error).__name__}: {error}"[:300]
            raise (_Retry if status in _TRANSIENT else Refused)(status, detail) from error

    async def _body(self, response: "aiohttp.ClientResponse") -> bytes:
        import aiohttp

        code = response.status
        if code != 200:
            status = f"http_{code}" if 400 <= code < 600 else "http_other"
            detail = f"HTTP {code} {response.reason or ''}".rstrip()
            if status in _TRANSIENT:
                raise _Retry(status, detail, _retry_after(response.headers.get("Retry-After", "")))
            raise Refused(status, detail)
        limit = self.settings.max_bytes
        if (response.content_length or 0) > limit:
            raise Refused("too_big", f"{response.content_length} bytes announced, more than {limit}")
        body = bytearray()
        try:
            while chunk := await response.content.readany():
                body += chunk
                if len(body) > limit:
                    raise Refused("too_big", f"over {limit} bytes sent")
        except (aiohttp.ClientPayloadError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            expected = "" if response.content_length is None else f" of {response.content_length}"
            raise Refused("short_body", f"{len(body)}{expected} bytes, then the connection ended") from error
        return _unpack(bytes(body), response.headers.get("Content-Encoding", ""), limit)


class _Retry(Refused):
    """Refused for now: `retry_after` is the least number of seconds that the server asks for."""

    def __init__(self, status: str, detail: str, retry_after: float = 0.0):
        super().__init__(status, detail)
        self.retry_after = retry_after


class AddressGuard:
    """Which URLs and addresses may be asked: http and https, ports 80 and 443, public addresses, and the allow-list."""

    def __init__(self, allowed_hosts: Iterable[str]):
        self.allowed = {entry.lower().replace("[", "").replace("]", "") for entry in allowed_hosts}
        self.led_to: set[str] = set()  # address:port of allowed names, as the resolver found them

    def check_url(self, url: str) -> "yarl.URL":
        """The URL as it is sent; Refused where its form, its port or an address written in it is not admitted."""
        parsed = _parse(url)
        host, port = parsed.host, parsed.port
        if f"{host}:{port}" in self.allowed:
            return parsed
        if port not in _PORTS:
            raise Refused("blocked_address", f"port {port} is neither 80 nor 443, and {host}:{port} is not allowed")
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return parsed  # a name: the resolver and open_socket see what it leads to
        self.check_address(host, port, address)
        return parsed

    def check_address(self, host: str, port: int, address: Address) -> None:
        """Refused where `address`, to which `host` leads, is neither public nor host:port in the allow-list."""
        if f"{host.lower()}:{port}" in self.allowed:
            self.led_to.add(f"{address}:{port}")
        elif not is_public(address):
            raise Refused("blocked_address", f"{host} is {address}, which is not a public address")

    def open_socket(self, address_info: tuple[Any, ...]) -> socket.socket:
        """The socket of one connection; the last look at the address that is really connected to."""
        family, kind, protocol, _, (host, port, *_) = address_info
        if f"{host}:{port}" not in self.led_to:
            self.check_address(host, port, ipaddress.ip_address(host))
        return socket.socket(family, kind, protocol)


def is_public(address: Address) -> bool:
    """Whether anybody on the internet may be asked at this address; forms that wrap an IPv4 address go by that."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address in _COMPATIBLE or address.is_site_local:
            return False
        if int(address) >> 32 & 0xFFFFFFFF in (0x5EFE, 0x02005EFE):  # ISATAP: the last 32 bits are an IPv4 address
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if address.is_multicast or address.is_reserved or address.is_unspecified or not address.is_global:
        return False
    return not any(address in network for network in _REFUSED_NETWORKS if network.version == address.version)


async def _system_lookup(host: str, port: int) -> list[str]:
    # A thread for each, and a daemon: a look-up that gets no answer cannot be ended. asyncio's few shared threads would
    # be full of dead names, while names that live wait; and neither a deadline nor the program's end would be kept.
    answer: concurrent.futures.Future[list[tuple[Any, ...]]] = concurrent.futures.Future()
    threading.Thread(target=_look_up, args=(host, port, answer), name=f"look up {host}", daemon=True).start()
    return list(dict.fromkeys(sockaddr[0] for *_, sockaddr in await asyncio.wrap_future(answer)))


def _look_up(host: str, port: int, answer: concurrent.futures.Future) -> None:
    answer.set_running_or_notify_cancel()  # from here on, it cannot be cancelled
    try:
        answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG))
    except Exception as error:  # noqa: BLE001  raised again where the answer is awaited
        answer.set_exception(error)


def _guarded_resolver(guard: AddressGuard, lookup: Callable[[str, int], Awaitable[list[str]]]) -> Any:
    """aiohttp's resolver of names, which checks every answer of `lookup`.

    aiohttp keeps an answer for ten seconds; what is connected to, each time, is checked again in `open_socket`.
    """
    from aiohttp.abc import AbstractResolver

    class Resolver(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[dict[str, Any]]:
            try:
                addresses = [ipaddress.ip_address(address) for address in await lookup(host, port)]
            except UnicodeError as error:  # a label that is empty or over 63 characters
                raise Refused("bad_url", f"host {host!r} is no name: {error}") from error
            for address in addresses:
                guard.check_address(host, port, address)
            return [
                {
                    "hostname": host,
                    "host": str(address),
                    "port": port,
                    "family": socket.AF_INET if address.version == 4 else socket.AF_INET6,
                    "proto": 0,
                    "flags": socket.AI_NUMERICHOST,
                }
                for address in addresses
            ]

        async def close(self) -> None:
            pass

    return Resolver()


def _parse(url: str) -> "yarl.URL":
    import yarl

    text = url.strip(" ")
    shown = repr(url[:200])
    if not text.isprintable() or "\\" in text:
        raise Refused("bad_url", f"{shown} has control characters or a backslash")
    match = re.match(r"(https?)://([^/?# ]*)(.*)", text, re.IGNORECASE)
    if not match or not match[2] or match[3].startswith(" "):
        raise Refused("bad_url", f"{shown} is not http://host/... or https://host/...")
    text = f"{match[1].lower()}://{match[2].lower()}{match[3]}"
    if "@" in match[2]:
        raise Refused("bad_url", f"{shown} has a user name")
    try:
        parsed = yarl.URL(text, encoded=_PLAIN_URL.fullmatch(text) is not None)
        host, port = parsed.host, parsed.port
        if not host or not port:
            raise ValueError("no host")
        parsed.raw_host.encode("ascii")
    except ValueError as error:  # UnicodeError among them
        raise Refused("bad_url", f"{shown}: {error}") from error
    try:
        # 2130706433, 0x7f.1 and 0177.0.0.1 are 127.0.0.1 to the system; written out, every check sees it.
        dotted = socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return parsed
    return parsed if dotted == host else parsed.with_host(dotted)


def _join(base: str, location: str) -> str:
    try:
        return urljoin(base, location)
    except ValueError as error:
        raise Refused("bad_url", f"redirect to {location[:200]!r}: {error}") from error


def _status_of(error: "aiohttp.ClientError") -> str:
    """The status of an error before the body. The order is that of aiohttp's classes, the special ones first."""
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


def _retry_after(value: str) -> float:
    """Seconds that a Retry-After header asks for: a number, or an HTTP date; 0 where there is none."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):  # a server may write anything: a zone of 20 digits overflows
        return 0.0


def _unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a content encoding that we did not ask for, but never past `limit` bytes."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise Refused("bad_response", f"Content-Encoding {encoding[:40]!r}, though none was asked for")
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip or zlib, told by the header
    try:
        unpacked = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise Refused("bad_response", f"Content-Encoding {encoding}, but {error}") from error
    if len(unpacked) > limit:
        raise Refused("too_big", f"over {limit} bytes when unpacked from {encoding}")
    if not unpacker.eof:
        raise Refused("short_body", f"the {encoding} stream of {len(body)} bytes has no end")
    return unpacked
