"""Rules that web servers set for crawlers: X-Robots-Tag headers, and robots.txt (RFC 9309).

Both are untrusted. A robots.txt is shortened before protego parses it, in a thread, so that the event loop goes on.
"""

import asyncio
import re
import weakref
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING

from storage.collect.statuses import Refused, Status

if TYPE_CHECKING:
    import yarl

AGENT = "vlbert-downloader"  # product token of the User-Agent
NO_AI = ("noai", "noimageai")  # directives of X-Robots-Tag that forbid training
NO_INDEX = ("noindex", "noimageindex", "none")  # directives that forbid a search index; none: noindex and nofollow
# Directives of X-Robots-Tag with a value, needed to distinguish `name: value` from `agent: directive`.
_VALUED = {"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"}

_MAX_TAGS = 20_000  # characters of all X-Robots-Tag headers of an answer

# A robots.txt is cut off at these limits: bytes (RFC 9309, 2.5), lines without comments, and `*` and `$` in them.
MAX_BYTES, MAX_LINES, MAX_WILDCARDS = 500 * 1024, 10_000, 10_000
_LINE_COST, _TEXT_COST = 700, 10  # bytes of memory that protego needs per line, and per character
_COSTLY = 100  # wildcards for which a URL is compared with the rules in a thread
KEPT_BYTES = 64 * 2**20  # memory for the rules of all origins: about 7,000 origins with ten rules each
_USER_AGENT = re.compile(r"user[ -]?agent[ \t]*:?[ \t]*(\*|[a-z_-]*)", re.IGNORECASE)


# --- X-Robots-Tag -----------------------------------------------------------------------------------------------------


def check_x_robots_tag(headers: Iterable[str], obey_noindex: bool) -> None:
    """Raise Refused if the X-Robots-Tag headers forbid training or, with `obey_noindex`, indexing, or are too long."""
    directives_for_us: dict[str, str] = {}  # directive -> its header
    headers = list(headers)
    if sum(map(len, headers)) > _MAX_TAGS:
        raise Refused(Status.BAD_RESPONSE, f"X-Robots-Tag headers of over {_MAX_TAGS} characters")
    for header in headers:
        agent = ""  # the rest of the header's directives are for this agent; "" for all agents
        for item in re.split("[,;]", header):  # some servers write semicolons instead of commas
            name, colon, rest = (part.strip().lower() for part in item.partition(":"))
            # With a space, the item is the middle of a date.
            if colon and name not in (*_VALUED, *NO_AI, *NO_INDEX) and " " not in name:
                agent, name = name.partition("/")[0], rest.rstrip(" :")
            if agent in ("", "*", AGENT):
                directives_for_us.setdefault(name, header)
    for status, directives in ((Status.NOAI, NO_AI), (Status.NOINDEX, NO_INDEX if obey_noindex else ())):
        for name in directives:
            if name in directives_for_us:
                raise Refused(status, f"X-Robots-Tag: {directives_for_us[name][:200]}")


# --- robots.txt -------------------------------------------------------------------------------------------------------


class Rules:
    """The rules of a robots.txt that apply to our agent. `bytes` is their approximate size in memory."""

    def __init__(self, data: bytes):
        from protego import Protego

        lines, wildcards = _limit_lines(data)
        self._rules = Protego.parse("\n".join(lines)) if lines else None
        self.bytes = sum(_LINE_COST + _TEXT_COST * len(line) for line in lines)
        self.is_costly = wildcards > _COSTLY  # `allow` may take over 10 ms

    def allow(self, url: str) -> bool:
        return self._rules is None or self._rules.can_fetch(url, AGENT)


def _limit_lines(data: bytes) -> tuple[list[str], int]:
    """Return the lines of a robots.txt without comments, and the number of their wildcards, up to the limits above.

    All agents except ours and `*` are given the same name, because protego's cost grows with the number of agents
    times the number of rules.
    """
    text = data[:MAX_BYTES].decode("utf-8-sig", errors="replace")
    if len(data) >= MAX_BYTES:
        text = text[: text.rfind("\n") + 1]  # an incomplete line would be another rule
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
    return lines, wildcards


class RobotsTxt:
    """A cache of robots.txt rules by origin (scheme, host and port). URLs of one origin share a request."""

    def __init__(self, request: Callable[["yarl.URL"], Awaitable[Rules]]):
        """Create a cache. `request` fetches the rules from the URL of a robots.txt, or raises Refused."""
        from cachetools import LRUCache

        self._request = request
        self._kept: MutableMapping[str, tuple[Rules | Refused, float]] = LRUCache(
            KEPT_BYTES, lambda known: 1000 + getattr(known[0], "bytes", 0)
        )
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def check(self, url: "yarl.URL", since: float | None = None) -> None:
        """Raise Refused if the robots.txt of a URL's origin forbids the URL or is unavailable.

        A robots.txt that was unavailable before the time `since` (event loop's clock) is requested again.
        """
        origin = str(url.origin())
        async with self._locks.setdefault(origin, asyncio.Lock()):
            rules, at = self._kept.get(origin, (None, 0.0))
            if rules is None or (isinstance(rules, Refused) and since is not None and at <= since):
                try:
                    rules = await self._request(url.origin().with_path("/robots.txt"))
                except Refused as error:
                    rules = error.bare()
                self._kept[origin] = rules, asyncio.get_running_loop().time()
        if isinstance(rules, Refused):
            raise Refused(rules.status, f"robots.txt: {rules.detail}", rules.retry_after)
        is_allowed = await asyncio.to_thread(rules.allow, str(url)) if rules.is_costly else rules.allow(str(url))
        if not is_allowed:
            raise Refused(Status.ROBOTS_TXT, f"the robots.txt of {url.host} forbids {url.raw_path[:200]}")
