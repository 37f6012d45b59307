"""Address rules for downloads: only http and https, ports 80 and 443, and public addresses, except for allowed hosts.

Caption lists are untrusted. Every address is checked when the connection is made, so that neither a redirect nor a
changed DNS answer can lead into a private network.
"""

import asyncio
import concurrent.futures
import ipaddress
import re
import socket
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from storage.collect.statuses import Refused, Status
from storage.redact import display_url

if TYPE_CHECKING:
    import yarl

_PORTS = {80, 443}
_CONTROL = re.compile(r"[\0-\x1f\x7f]")
# Characters that are quoted in a URL, and a percent sign that quotes nothing.
_QUOTED = re.compile(r"[^A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+|%(?![0-9A-Fa-f]{2})")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Refused although some versions of Python 3.11's ipaddress module call them public, or although they are routed.
_REFUSED_NETWORKS: tuple[Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        "100.64.0.0/10",  # shared by carriers (RFC 6598)
        "168.63.129.16/32",  # platform service inside Azure
        "192.0.0.0/24",  # protocol assignments (RFC 6890)
        "192.88.99.0/24",  # 6to4 relays (RFC 7526)
        "64:ff9b:1::/48",  # NAT64 for local use (RFC 8215)
        "2001::/23",  # protocol assignments, with Teredo (RFC 2928, 4380)
        "3fff::/20",  # documentation (RFC 9637)
        "5f00::/16",  # segment routing (RFC 9602)
        "fec0::/10",  # site-local (RFC 3879)
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")


class AddressGuard:
    """Refuses unsafe URLs and IP addresses. `allowed_hosts` (host:port) are exempt from port and address checks."""

    def __init__(self, allowed_hosts: Iterable[str]):
        self.allowed = {entry.lower().replace("[", "").replace("]", "") for entry in allowed_hosts}
        self.allowed_addresses: set[str] = set()  # address:port of allowed names, from the resolver

    def check_url(self, url: str) -> "yarl.URL":
        """Parse a URL before it is requested. Raises Refused if its syntax, port or IP address is not allowed."""
        parsed = parse_url(url)
        host, port = str(parsed.host), parsed.port  # parse_url refuses a URL without a host
        if f"{host}:{port}" in self.allowed:
            return parsed
        if port not in _PORTS:
            raise Refused(Status.BLOCKED_ADDRESS, f"port {port} is not 80 or 443, and {host}:{port} is not allowed")
        try:
            address = ipaddress.ip_address(host)
        except ValueError as error:
            if ":" in host:  # aiohttp connects to some strings that are not IPv6 addresses
                raise Refused(Status.BAD_URL, f"[{host[:200]}] is not an address: {error}") from error
            return parsed  # the resolver and open_socket check the addresses of a name
        self.check_address(host, port, address)
        return parsed

    def check_address(self, host: str, port: int, address: Address) -> None:
        """Raise Refused if `address`, an IP address of `host`, is not public, unless host:port is allowed."""
        if f"{host.lower()}:{port}" in self.allowed:
            self.allowed_addresses.add(f"{address}:{port}")
        elif not is_public(address):
            raise Refused(Status.BLOCKED_ADDRESS, f"{host}: {address} is not a public address")

    def open_socket(self, address_info: tuple[Any, ...]) -> socket.socket:
        """Create the socket for a connection, after a final check of the address to connect to."""
        family, kind, protocol, _, (host, port, *_) = address_info
        if f"{host}:{port}" not in self.allowed_addresses:
            self.check_address(host, port, ipaddress.ip_address(host))
        return socket.socket(family, kind, protocol)


def is_public(address: Address) -> bool:
    """Return True if an address is public. If an IPv6 address contains an IPv4 address, the IPv4 address is checked."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:  # selects one of this machine's interfaces
            return False
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


async def system_lookup(host: str, port: int) -> list[str]:
    # A daemon thread for each lookup, because a lookup without an answer cannot be cancelled. In asyncio's few shared
    # threads, dead names would block living ones, and the program could not end before their lookups do.
    answer: concurrent.futures.Future[list[tuple[Any, ...]]] = concurrent.futures.Future()
    threading.Thread(target=_look_up, args=(host, port, answer), name=f"look up {host}", daemon=True).start()
    return list(dict.fromkeys(sockaddr[0] for *_, sockaddr in await asyncio.wrap_future(answer)))


def _look_up(host: str, port: int, answer: concurrent.futures.Future) -> None:
    answer.set_running_or_notify_cancel()  # from here on, it cannot be cancelled
    try:
        answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG))
    except Exception as error:  # noqa: BLE001  awaiting the answer raises it again
        answer.set_exception(error)


def guarded_resolver(guard: AddressGuard) -> Any:
    """Return a resolver for aiohttp that checks every address of a host name.

    aiohttp caches the addresses for ten seconds, so `AddressGuard.open_socket` checks them again for each connection.
    """
    from aiohttp.abc import AbstractResolver, ResolveResult

    class Resolver(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
            try:
                addresses = [ipaddress.ip_address(address) for address in await system_lookup(host, port)]
            except UnicodeError as error:  # a label that is empty or over 63 characters
                raise Refused(Status.BAD_URL, f"host {host!r} is not a valid name: {error}") from error
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


def parse_url(url: str) -> "yarl.URL":
    """Parse a URL, and quote what a request cannot contain, as browsers do. Raises Refused if it is malformed."""
    import yarl

    text = url.strip(" ")
    shown = repr(display_url(url))
    if _CONTROL.search(text):
        raise Refused(Status.BAD_URL, f"{shown} has control characters")
    match = re.match(r"(https?)://([^/?#\\ ]*)([^?#]*)(.*)", text, re.IGNORECASE | re.DOTALL)
    if not match or not match[2] or match[3].startswith((" ", "\\")):
        raise Refused(Status.BAD_URL, f"{shown} is not http://host/... or https://host/...")
    if "@" in match[2]:
        raise Refused(Status.BAD_URL, f"{shown} has a user name")
    scheme, authority = match[1].lower(), match[2].lower()
    path = match[3].replace("\\", "/") + match[4]
    try:
        if not authority.isprintable():
            raise ValueError("unprintable characters in the host")
        if not authority.isascii():
            authority = yarl.URL(f"{scheme}://{authority}").raw_authority
        quoted = _QUOTED.sub(lambda found: quote(found[0], errors="surrogateescape"), path)  # raw bytes of a Location
        parsed = yarl.URL(f"{scheme}://{authority}{quoted}", encoded=True)
        host, raw_host = parsed.host, parsed.raw_host
        if not host or not raw_host or not parsed.port:
            raise ValueError("no host")
        raw_host.encode("ascii")
    except ValueError as error:  # also UnicodeError; its text may contain part of a password
        raise Refused(Status.BAD_URL, f"{shown} cannot be parsed") from error
    try:
        # The system resolves 2130706433, 0x7f.1 and 0177.0.0.1 to 127.0.0.1. In dotted form, all checks recognise it.
        dotted = socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return parsed
    return parsed if dotted == host else parsed.with_host(dotted)
