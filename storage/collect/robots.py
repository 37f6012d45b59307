"""What a server asks of programs: X-Robots-Tag, and robots.txt as RFC 9309 has it.

Both are written by strangers. At most MAX_BYTES of a robots.txt are read, in linear time, and only the rules for our
product token are kept, else those for all. A pattern is matched without a regular expression.
"""

import asyncio
import re
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from storage.collect.hosts import Transient
from storage.collect.normalise import Refused

if TYPE_CHECKING:
    import yarl

AGENT = "vlbert-downloader"  # the product token
NO_AI = ("noai", "noimageai")  # directives of X-Robots-Tag that forbid training
NO_INDEX = ("noindex", "noimageindex", "none")  # those that forbid a search index; none: noindex and nofollow
# Directives of X-Robots-Tag that have a value: this tells `name: value` from `agent: directive`.
_VALUED = {"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"}

MAX_BYTES = 500 * 1024  # of a robots.txt: RFC 9309, 2.5
KEPT_BYTES = 64 * 2**20  # of rules, over all origins: about 60,000 origins with ten rules each
_KEPT_SECONDS = 24 * 3600  # a robots.txt: RFC 9309, 2.4
_FAILURE_KEPT_SECONDS = 60  # that there is none for now
_LINE = re.compile(rb"^[ \t]*(user-agent|allow|disallow)[ \t]*:([^#\n]*)", re.IGNORECASE | re.MULTILINE)
_TOKEN = re.compile(rb"[a-z_-]+|\*", re.IGNORECASE)
_UNRESERVED = re.compile(rb"[A-Za-z0-9._~-]")
_ENCODED = re.compile(rb"%[0-9A-Fa-f]{2}|[^A-Za-z0-9._~/-]")


# --- X-Robots-Tag -----------------------------------------------------------------------------------------------------


def check_x_robots_tag(headers: Iterable[str], obey_noindex: bool) -> None:
    """Refused if an X-Robots-Tag, for all agents or for ours, forbids training; or a search index, if that counts."""
    found: dict[str, str] = {}  # the directives for us, with their header
    for header in headers:
        agent = ""  # the directives up to the end of the header are for this agent; "" for all
        for item in re.split("[,;]", header):  # some servers write semicolons instead of commas
            name, colon, rest = (part.strip().lower() for part in item.partition(":"))
            # A space: the middle of a date.
            if colon and name not in (*_VALUED, *NO_AI, *NO_INDEX) and " " not in name:
                agent, name = name.partition("/")[0], rest.rstrip(" :")
            if agent in ("", "*", AGENT):
                found.setdefault(name, header)
    for status, directives in (("noai", NO_AI), ("noindex", NO_INDEX if obey_noindex else ())):
        for name in directives:
            if name in found:
                raise Refused(status, f"X-Robots-Tag: {found[name][:200]}")


# --- robots.txt -------------------------------------------------------------------------------------------------------


class Rules:
    """The rules of a robots.txt that hold for us."""

    def __init__(self, rules: dict[bytes, bool]):
        """`rules`: whether a pattern allows, by pattern."""
        # The longest pattern decides, and Allow before Disallow.
        self._rules = sorted(rules.items(), key=lambda rule: (len(rule[0]), rule[1]), reverse=True)
        self.bytes = sum(len(pattern) + 120 for pattern in rules)  # in memory, about

    @classmethod
    def parse(cls, data: bytes) -> "Rules":
        """The rules of a file, whatever it is: lines that are no rules are skipped."""
        if len(data) >= MAX_BYTES:
            data = data[: data.rfind(b"\n") + 1]  # half a line would be another rule
        ours = AGENT.encode()
        groups: dict[bytes, dict[bytes, bool]] = {}  # for us and for all
        group: set[bytes] = set()  # the agents, of these two, that a rule is for
        ended = False
        for match in _LINE.finditer(data.removeprefix(b"\xef\xbb\xbf").replace(b"\r", b"\n")):
            field, value = match[1].lower(), match[2].strip()
            if field == b"user-agent":
                if ended:
                    group, ended = set(), False
                token = _TOKEN.match(value)
                if token and token[0].lower() in (ours, b"*"):
                    group.add(token[0].lower())
                    groups.setdefault(token[0].lower(), {})
                continue
            ended = True
            if not value or not group:
                continue
            pattern, allows = _normal_pattern(value), field == b"allow"
            for agent in group:
                groups[agent][pattern] = groups[agent].get(pattern, False) or allows
        return cls(groups.get(ours, groups.get(b"*", {})))

    def forbidding(self, path: str) -> str:
        """The pattern that forbids a path and query, as a URL has them; "" if it is allowed."""
        if path == "/robots.txt":
            return ""
        normal = _normal(path.encode()).replace(b"*", b"%2A")
        for pattern, allows in self._rules:
            if _matches(pattern, normal):
                return "" if allows else pattern.decode()
        return ""


def _normal(path: bytes) -> bytes:
    """Percent-encoded as in RFC 9309, 2.2.2, so that equal paths are equal bytes. A `*` stays."""
    return _ENCODED.sub(_normal_octet, path)


def _normal_octet(match: re.Match[bytes]) -> bytes:
    found = match[0]
    octet = bytes([int(found[1:], 16)]) if len(found) == 3 else found
    return octet if _UNRESERVED.fullmatch(octet) or found == b"*" else b"%%%02X" % octet[0]


def _normal_pattern(value: bytes) -> bytes:
    """The same of a pattern: `*` stands for any octets, and a `$` at its end for the end of the URL."""
    value = re.sub(rb"\*+", b"*", value)
    return _normal(value[:-1]) + b"$" if value.endswith(b"$") else _normal(value)


def _matches(pattern: bytes, path: bytes) -> bool:
    """Whether a pattern matches the beginning of a path, or with `$` the whole."""
    whole = pattern.endswith(b"$")
    if b"*" not in pattern:
        return path == pattern[:-1] if whole else path.startswith(pattern)
    first, *parts, last = pattern.removesuffix(b"$").split(b"*")
    if not path.startswith(first):
        return False
    begin = len(first)
    for part in parts:
        found = path.find(part, begin)
        if found < 0:
            return False
        begin = found + len(part)
    return path.endswith(last, begin) if whole else path.find(last, begin) >= 0


class _Known(NamedTuple):
    found: Rules | Refused
    at: float  # by the event loop's clock
    bytes: int


class RobotsTxt:
    """The robots.txt of each origin, requested once for all URLs in flight and kept for a day.

    A failure is kept for a minute, so that it costs the other URLs of the origin nothing.
    """

    def __init__(self, request: Callable[["yarl.URL"], Awaitable[Rules]]):
        """`request(url of robots.txt)`: its rules; Refused if they cannot be had."""
        self._request = request
        self._kept: OrderedDict[str, _Known] = OrderedDict()  # the one that was used last comes last
        self._bytes = 0
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def known(self, url: "yarl.URL", since: float) -> Rules | Refused | None:
        """The rules for a URL, or why they could not be had after `since`, by the event loop's clock; None: ask."""
        origin = str(url.origin())
        known = self._kept.get(origin)
        if known is None:
            return None
        lost = isinstance(known.found, Refused)
        age = asyncio.get_running_loop().time() - known.at
        if age > (_FAILURE_KEPT_SECONDS if lost else _KEPT_SECONDS) or (lost and known.at <= since):
            return None
        self._kept.move_to_end(origin)
        return known.found

    async def ask(self, url: "yarl.URL", since: float) -> Rules | Refused:
        """The same, requested of the server if it is not known, once at a time."""
        origin = str(url.origin())
        async with self._locks.setdefault(origin, asyncio.Lock()):
            found = self.known(url, since)  # another URL may have asked meanwhile
            if found is None:
                try:
                    found = await self._request(url.origin().with_path("/robots.txt"))
                except Refused as error:
                    found = error.bare()
                self._keep(origin, found)
            return found

    def _keep(self, origin: str, found: Rules | Refused) -> None:
        cost = 500 + (found.bytes if isinstance(found, Rules) else 500)
        before = self._kept.pop(origin, None)
        self._kept[origin] = _Known(found, asyncio.get_running_loop().time(), cost)
        self._bytes += cost - (before.bytes if before else 0)
        while self._bytes > KEPT_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].bytes


def as_refused(url: "yarl.URL", found: Rules | Refused) -> Refused | None:
    """Why a URL may not be requested; None if it may."""
    if isinstance(found, Rules):
        pattern = found.forbidding(url.raw_path_qs)
        return Refused("robots_txt", f"{url.host}: Disallow: {pattern[:200]}") if pattern else None
    detail = f"robots.txt: {found.detail}"
    if isinstance(found, Transient):
        return Transient(found.status, detail, found.retry_after, of_robots_txt=True)
    return Refused(found.status, detail)
