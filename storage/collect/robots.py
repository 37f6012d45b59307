"""What a server asks of programs: X-Robots-Tag, and robots.txt as RFC 9309 has it.

Both are written by strangers. protego reads a robots.txt, after what could be costly to it was cut off.
"""

import asyncio
import re
import weakref
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING

from storage.collect.statuses import Refused, Status

if TYPE_CHECKING:
    import yarl

AGENT = "vlbert-downloader"  # the product token
NO_AI = ("noai", "noimageai")  # directives of X-Robots-Tag that forbid training
NO_INDEX = ("noindex", "noimageindex", "none")  # those that forbid a search index; none: noindex and nofollow
# Directives of X-Robots-Tag that have a value: this tells `name: value` from `agent: directive`.
_VALUED = {"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"}

# Of a robots.txt: bytes (RFC 9309, 2.5), lines that are no comments, and `*` and `$` in them. There it ends for us.
MAX_BYTES, MAX_LINES, MAX_WILDCARDS = 500 * 1024, 10_000, 10_000
_LINE_COST, _TEXT_COST = 700, 10  # bytes of memory that protego needs for a line, and for each character
KEPT_BYTES = 64 * 2**20  # of rules, over all origins: about 7,000 origins with ten rules each
_USER_AGENT = re.compile(r"user[ -]?agent[ \t]*:?[ \t]*(\*|[a-z_-]*)", re.IGNORECASE)


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
    for status, directives in ((Status.NOAI, NO_AI), (Status.NOINDEX, NO_INDEX if obey_noindex else ())):
        for name in directives:
            if name in found:
                raise Refused(status, f"X-Robots-Tag: {found[name][:200]}")


# --- robots.txt -------------------------------------------------------------------------------------------------------


class Rules:
    """The rules of a robots.txt that hold for us; `bytes`: of memory, about."""

    def __init__(self, data: bytes):
        from protego import Protego

        lines = _bounded(data)
        self._rules = Protego.parse("\n".join(lines)) if lines else None
        self.bytes = sum(_LINE_COST + _TEXT_COST * len(line) for line in lines)

    def allow(self, url: str) -> bool:
        return self._rules is None or self._rules.can_fetch(url, AGENT)


def _bounded(data: bytes) -> list[str]:
    """The lines of a file up to the limits. All agents but us and `*` are one: protego multiplies agents by rules."""
    text = data[:MAX_BYTES].decode("utf-8-sig", errors="replace")
    if len(data) >= MAX_BYTES:
        text = text[: text.rfind("\n") + 1]  # half a line would be another rule
    lines, wildcards = [], 0
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        if agent := _USER_AGENT.match(line):
            line = f"User-agent: {agent[1].lower() if agent[1].lower() in (AGENT, '*') else 'another'}"
        else:
            wildcards += line.count("*") + line.count("$")
        if len(lines) == MAX_LINES or wildcards > MAX_WILDCARDS:
            break
        lines.append(line)
    return lines


class RobotsTxt:
    """The robots.txt of each origin, requested once for all URLs in flight, and kept as long as this is."""

    def __init__(self, request: Callable[["yarl.URL"], Awaitable[Rules]]):
        """`request(url of robots.txt)`: its rules; Refused if they cannot be had."""
        from cachetools import LRUCache

        self._request = request
        self._kept: MutableMapping[str, tuple[Rules | Refused, float]] = LRUCache(
            KEPT_BYTES, lambda known: 1000 + getattr(known[0], "bytes", 0)
        )
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def check(self, url: "yarl.URL", since: float | None = None) -> None:
        """Refused if the rules forbid the URL, or cannot be had; if that was before `since`, they are requested again.

        since: by the event loop's clock.
        """
        origin = str(url.origin())
        async with self._locks.setdefault(origin, asyncio.Lock()):
            found, at = self._kept.get(origin, (None, 0.0))
            if found is None or (isinstance(found, Refused) and since is not None and at <= since):
                try:
                    found = await self._request(url.origin().with_path("/robots.txt"))
                except Refused as error:
                    found = error.bare()
                self._kept[origin] = found, asyncio.get_running_loop().time()
        if isinstance(found, Refused):
            raise Refused(found.status, f"robots.txt: {found.detail}", found.retry_after)
        if not found.allow(str(url)):
            raise Refused(Status.ROBOTS_TXT, f"the robots.txt of {url.host} forbids {url.raw_path[:200]}")
