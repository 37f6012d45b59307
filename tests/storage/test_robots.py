"""What a server asks of programs: X-Robots-Tag and robots.txt, of real servers, and as plain text."""

import asyncio
import gzip
import re
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest
import simulated
import yarl
from hypothesis import given
from hypothesis import strategies as st
from web import Answer, Web, downloaded, draw, drip, encode, endless, in_turn, raw, send, silent

from storage.collect.download import Download, Downloader
from storage.collect.fetch import DownloadSettings
from storage.collect.lists import CaptionRow
from storage.collect.robots import MAX_BYTES, RobotsTxt, Rules
from storage.collect.spool import Spool

JPEG = encode(draw())
FORBID_ALL = b"User-agent: *\nDisallow: /\n"


def settings_for(*hosts: str, **changes: object) -> DownloadSettings:
    """Impatient settings that admit these host:port and no other address."""
    patience = {"deadline": 5.0, "read_timeout": 2.0, "retries": 0, "second_pass": 0.0, "breaker": 64}
    return DownloadSettings(allowed_hosts=hosts, **(patience | changes))


def rows_of(*urls: str) -> list[CaptionRow]:
    return [CaptionRow(row, f"caption {row}", url) for row, url in enumerate(urls)]


def results(urls: list[str], settings: DownloadSettings) -> list[Download]:
    return downloaded(rows_of(*urls), settings)


def statuses(urls: list[str], settings: DownloadSettings) -> list[str]:
    return [item.status for item in results(urls, settings)]


# --- X-Robots-Tag -----------------------------------------------------------------------------------------------------


def tagged(*headers: str) -> Answer:
    """An image under these X-Robots-Tag headers."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for header in headers:
            handler.send_header("X-Robots-Tag", header)
        handler.send_header("Content-Length", str(len(JPEG)))
        handler.end_headers()
        handler.wfile.write(JPEG)

    return answer


NO_AI = [
    ["noai"], ["noimageai"], ["NoAI"], ["noindex, noai"], ["noindex,noimageai , nofollow"], ["noindex", "noai"],
    ["vlbert-downloader: noai"], ["VLBERT-Downloader: noindex, noimageai"], ["*: noai"], ["max-snippet: 20, noai"],
    ["vlbert-downloader/0.1: noai"], ["otherbot: noindex, vlbert-downloader: noai"], ["otherbot: noai", "noai"],
    ["unavailable_after: 25 Jun 2030 15:00:00 GMT, noai"], ["max-image-preview:large; noai"], ["noindex;noai"],
    ["noai:"], ["vlbert-downloader: noai:"], ["unavailable_after: 25 Jun 2030 15:00:00 GMT; noai"],
    ["unavailable_after: Tue, 25 Jun 2030 15:00:00 GMT, noai"], ["none, noai"],
]  # fmt: skip
NO_INDEX = [
    ["noindex"], ["noimageindex"], ["none"], ["NoIndex, nofollow"], ["nofollow;none"], ["otherbot: noai", "noindex"],
    ["vlbert-downloader: noindex"], ["noindex:"], ["otherbot: noai, vlbert-downloader: noimageindex"],
    ["max-snippet: 20, noindex"],
]  # fmt: skip
NEITHER = [[], [""], ["all"], ["index"], ["noaim"], ["x-noai: 1"], ["otherbot: noai"], ["nofollow, nosnippet"]]
NEITHER += [["otherbot: noarchive, noai"], ["otherbot: noindex"], ["noindexing"], ["googlebot: none"]]


@pytest.mark.parametrize("obey", [True, False])
def test_x_robots_tag_forbids_training_always_and_an_index_by_a_setting(web: Web, obey: bool):
    cases = NO_AI + NO_INDEX + NEITHER
    urls = [web.put(f"/tagged/{i}.jpg", tagged(*headers)) for i, headers in enumerate(cases)]
    for headers, item in zip(cases, results(urls, settings_for(web.host, obey_noindex=obey)), strict=True):
        wanted = "noai" if headers in NO_AI else "noindex" if obey and headers in NO_INDEX else "ok"
        assert (item.status, item.sample is None) == (wanted, wanted != "ok"), headers
        assert item.detail.startswith("X-Robots-Tag: ") == (wanted != "ok")
        if wanted == "noai":
            assert re.search("noai|noimageai", item.detail, re.IGNORECASE), headers


def test_a_forbidden_body_is_not_read_and_a_redirect_may_forbid_too(web: Web):
    def forbidden(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("X-Robots-Tag", "noai")
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(65536))  # until the other side has hung up

    url = web.put("/endless.jpg", forbidden)
    redirect = web.put("/to", send(b"", 302, Location="/b.jpg", X_Robots_Tag="noai"))
    web.put("/b.jpg", send(JPEG))
    assert statuses([url, redirect], settings_for(web.host)) == 2 * ["noai"]
    assert web.count_of("/b.jpg") == 0


# --- robots.txt as text -----------------------------------------------------------------------------------------------

# A file -> paths that it allows, paths that it forbids. A row without an agent is for all.
FILES: dict[str, tuple[str, list[str], list[str]]] = {
    "nothing": ("", ["/"], []),
    "an empty rule": ("Disallow:", ["/"], []),
    "the beginning of a path": ("Disallow: /a", ["/", "/b/a", "/A"], ["/a", "/a/", "/ab.jpg", "/a?b"]),
    "all": ("Disallow: /", ["/robots.txt"], ["/", "/a.jpg", "/robots.txt/a"]),
    "the longest decides": ("Disallow: /a/\nAllow: /a/b/\nDisallow: /a/b/c", ["/a/b/x", "/x"], ["/a/x", "/a/b/c"]),
    "whatever the order": ("Allow: /a/b/\nDisallow: /a/b/c\nDisallow: /a/", ["/a/b/x", "/x"], ["/a/x", "/a/b/c"]),
    "allow wins a tie": (
        "Disallow: /a\nAllow: /a\nDisallow: /*b\nAllow: /bb\nAllow: /d\nDisallow: /%64", ["/a", "/bb", "/d"], ["/cb"],
    ),
    "a wildcard": ("Disallow: /*.gif\nDisallow: /a/*/c", ["/a/c", "/gif"], ["/x.gif", "/x/y.gif?z", "/a/b/c", "/a//c"]),
    "several wildcards": ("Disallow: /*a*b*c$", ["/abcd", "/cba", "/ab"], ["/abc", "/xaxbxc", "/abcc"]),
    "many in a row": ("Disallow: /***a***", ["/b"], ["/a", "/ba"]),
    "the end": ("Disallow: /*.png$\nDisallow: /x$", ["/a.png?b", "/xy", "/a.pngs"], ["/a.png", "/x"]),
    "a wildcard is as long as any octet": ("Allow: /a.jpg\nDisallow: /*.jpg$", ["/a.jpg?"], ["/a.jpg", "/b.jpg"]),
    "the length is that of the encoded path": (  # /%62%61 is /ba, and /?a is /%3Fa
        "Disallow: /%62%61\nAllow: /*a*\nAllow: /*z*\nDisallow: /?a", ["/ba", "/ca"], ["/?az"],
    ),
    "a dollar inside": ("Disallow: /a$b", ["/a", "/a$"], ["/a$b", "/a%24b"]),
    "query": ("Disallow: /*?size=\nDisallow: /q?$", ["/a?b=size=", "/q?a", "/q"], ["/a?size=3", "/q?", "/q%3f"]),
    "percent-encoding": (
        "Disallow: /%62%61z\nDisallow: /\u30c4\nDisallow: /%e3%83%83\nDisallow: /a%2Fb\nDisallow: /~u\nDisallow: /s%2a",
        ["/a/b", "/sx"],
        ["/baz", "/%62az", "/%E3%83%84", "/%e3%83%84", "/%E3%83%83", "/a%2fb", "/%7Eu", "/s*", "/s%2A"],
    ),
    "reserved characters": ("Disallow: /u?x=http://a.b\nDisallow: /p,q", ["/pq"], ["/u?x=http%3A//a.b", "/p%2Cq"]),
    "a comment": ("Disallow: /a # /b\n#Disallow: /c\nDisallow: #/d", ["/c", "/d", "/ b"], ["/a"]),
    "spaces and case": (" \tDISALLOW\t :  /a  \r\nallow:/a/b", ["/a/b"], ["/a", "/aa"]),
    "old line ends": ("Disallow: /a\rDisallow: /b", ["/c"], ["/a", "/b"]),
    "not from the root": ("Disallow: a\nDisallow: https://h.example/b", ["/a", "/b"], []),
    "lines that are no rules": ("Disallow /a\nNoindex: /b\n\0\nhuh\n: /c\nDisallow: /d", ["/a", "/b", "/c"], ["/d"]),
    "rules for nobody": ("x", ["/a"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_longest_rule_that_matches_decides(name: str):
    text, allowed, forbidden = FILES[name]
    for line_end in ("\n", "\r\n"):
        rules = Rules.parse(f"User-agent: *\n{text}\n".replace("\n", line_end).encode())
        assert [path for path in allowed if rules.forbidding(path)] == [], line_end
        assert [path for path in forbidden if not rules.forbidding(path)] == [], line_end
    assert not any(map(Rules.parse(text.encode()).forbidding, forbidden)), "rules before the first agent are nobody's"


# A file -> the paths of /a, /b, /c that are forbidden.
GROUPS = {
    "User-agent: vlbert-downloader\nDisallow: /a\n\nUser-agent: *\nDisallow: /b": "a",
    "User-agent: *\nDisallow: /b\n\nUser-agent: VLBert-Downloader\nDisallow: /a": "a",
    "User-agent: otherbot\nDisallow: /a\n\nUser-agent: *\nDisallow: /b": "b",
    "User-agent: otherbot\nDisallow: /a": "",
    "User-agent: vlbert-downloader\nDisallow:\n\nUser-agent: *\nDisallow: /": "",
    "User-agent: vlbert-downloader\nUser-agent: *\nDisallow: /a": "a",
    "User-agent: otherbot\nUser-agent: vlbert-downloader\nDisallow: /a\nUser-agent: *\nDisallow: /b": "a",
    "User-agent: vlbert-downloader\nSitemap: https://h/s.xml\nCrawl-delay: 9\nUser-agent: otherbot\nDisallow: /a": "a",
    "User-agent: vlbert-downloader\nDisallow: /a\nUser-agent: x\nDisallow: /b\n"
    "User-agent: vlbert-downloader\nDisallow: /c": "ac",
    "User-agent: *\nDisallow: /a\nUser-agent: x\nDisallow: /b\nUser-agent: *\nDisallow: /c": "ac",
    "User-agent: vlbert-downloader/1.0\nDisallow: /a": "a",
    "User-agent: vlbert\nDisallow: /a\nUser-agent: downloader\nDisallow: /b\nUser-agent: v\nDisallow: /c": "",
    "User-agent: vlbert-downloader-news\nDisallow: /a": "",
    "User-agent:\nDisallow: /a": "",
    "User-agent: *\n\n\nDisallow: /a\n\nDisallow: /b": "ab",
    "\ufeffUser-agent: *\nDisallow: /a": "a",
}  # fmt: skip


@pytest.mark.parametrize("text", GROUPS)
def test_the_groups_of_our_product_token_hold_and_else_those_of_all(text: str):
    rules = Rules.parse(text.encode())
    assert "".join(letter for letter in "abc" if rules.forbidding(f"/{letter}")) == GROUPS[text]


@given(st.text("ab/*", max_size=7), st.booleans(), st.text("ab/", max_size=9))
def test_a_pattern_matches_as_the_regular_expression_of_its_meaning(pattern: str, whole: bool, path: str):
    pattern, path = f"/{pattern}", f"/{path}"
    expression = ".*".join(map(re.escape, pattern.split("*"))) + ("$" if whole else "")
    rules = Rules.parse(f"User-agent: *\nDisallow: {pattern}{'$' * whole}".encode())
    assert bool(rules.forbidding(path)) == bool(re.match(expression, path))


def filled(line: Callable[[int], bytes]) -> bytes:
    """A file of MAX_BYTES of these lines."""
    return b"User-agent: *\n" + b"".join(line(number) for number in range(MAX_BYTES // len(line(9))))[: MAX_BYTES - 20]


@pytest.mark.parametrize(
    "data",
    [
        b"".join(b"User-agent: a%d\n" % i for i in range(14_000)) + filled(lambda i: b"Disallow:/%x*x\n" % i)[14:],
        filled(lambda i: b"Disallow:/*%x$\n" % i),
        filled(lambda i: b"Disallow: /" + b"*a" * 40 + b"*b\n"),
        b"User-agent: *\nDisallow: /" + b"*a" * 200_000,
        b"User-agent: *\nDisallow: /" + b"*" * 400_000 + b"$",
        b"User-agent: *\nDisallow: " + b"%" * 400_000,
        b" " * MAX_BYTES,
        b"\t\r" * (MAX_BYTES // 2),
        b"User-agent" * (MAX_BYTES // 10),
        bytes(range(256)) * 2000,
    ],
    ids=range(10),
)
def test_a_file_made_to_be_costly_is_not(data: bytes):
    begin = time.process_time()
    rules = Rules.parse(data[:MAX_BYTES])
    rules.forbidding("/" + "ab" * 1000)
    assert time.process_time() - begin < 5  # 0.3 s where this was written; what is quadratic takes minutes
    assert rules.bytes < 20 * MAX_BYTES


# --- robots.txt of a server -------------------------------------------------------------------------------------------


class Origins:
    """One server with an origin for each name, which each have a robots.txt of their own."""

    def __init__(self, web: Web):
        self.web = web
        self.robots: dict[str, Answer] = {}  # by host
        web.put("/robots.txt", lambda handler: self.robots[handler.headers["Host"]](handler))
        web.put("/a.jpg", send(JPEG))

    def add(self, robots_txt: Answer) -> str:
        """host:port of a new origin."""
        host = f"127.0.9.{len(self.robots) + 1}:{self.web.server.server_port}"
        self.robots[host] = robots_txt
        return host

    def requests(self, host: str) -> list[str]:
        """The paths that were requested of it, in order."""
        every = sorted(self.web.requests + self.web.robots_requests, key=lambda request: request[0])
        return [path for _, path, headers in every if headers["Host"] == host]


@pytest.fixture
def origins() -> Iterator[Origins]:
    with Web("0.0.0.0") as web:
        yield Origins(web)


def padded(rule: bytes, before: int) -> bytes:
    """A file whose last line begins after so many bytes."""
    return b"User-agent: *\n" + b"#" * (before - 15) + b"\n" + rule


# What a server answers to /robots.txt -> the status of its image, and what the detail says.
ANSWERS: dict[str, tuple[Answer, str, str]] = {
    "200": (send(FORBID_ALL), "robots_txt", "Disallow: /"),
    "206": (send(FORBID_ALL, 206), "robots_txt", "Disallow: /"),
    "another page": (send(b"User-agent: *\nDisallow: /b"), "ok", ""),
    "204": (send(b"", 204), "ok", ""),
    "404": (send(FORBID_ALL, 404), "ok", ""),
    "401": (send(b"", 401), "ok", ""),
    "403": (send(b"", 403), "ok", ""),
    "410": (send(b"", 410), "ok", ""),
    "429": (send(b"", 429), "robots_txt_failed", "robots.txt: HTTP 429"),
    "500": (send(b"", 500), "robots_txt_failed", "robots.txt: HTTP 500"),
    "503": (send(b"", 503), "robots_txt_failed", "robots.txt: HTTP 503"),
    "999": (send(b"", 999), "robots_txt_failed", "robots.txt: HTTP 999"),
    "silence": (silent(9), "timeout", "robots.txt: "),
    "a drip": (drip(FORBID_ALL, 1, 0.3), "timeout", "robots.txt: "),
    "hangs up": (raw(b""), "connect", "robots.txt: "),
    "not http": (raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "bad_response", "robots.txt: "),
    "half a file": (send(FORBID_ALL, length=999), "robots_txt_failed", "short_body"),
    "gzip": (send(gzip.compress(FORBID_ALL), Content_Encoding="gzip"), "robots_txt", "Disallow: /"),
    "brotli": (send(FORBID_ALL, Content_Encoding="br"), "robots_txt_failed", "bad_response"),
    "an html page": (send(b"<html>Disallow: /</html>", Content_Type="text/html"), "ok", ""),
    "noise": (send(bytes(range(256)) * 9 + b"\nUser-agent: *\n\xff\nDisallow: /"), "robots_txt", "Disallow: /"),
    "a byte order mark": (send(b"\xef\xbb\xbf" + FORBID_ALL), "robots_txt", "Disallow: /"),
    "its own x-robots-tag": (send(b"", X_Robots_Tag="noai, noindex"), "ok", ""),
    "a redirect": (send(b"", 301, Location="/moved.txt"), "robots_txt", "Disallow: /"),
    "five redirects": (send(b"", 302, Location="/hop/4"), "robots_txt", "Disallow: /"),
    "six redirects": (send(b"", 302, Location="/hop/5"), "ok", ""),
    "a redirect without a target": (send(b"", 302), "robots_txt_failed", "HTTP 302"),
    "a redirect to nonsense": (send(b"", 302, Location="http://[::1"), "robots_txt_failed", "bad_url"),
    "a redirect into a private network": (
        send(b"", 302, Location="http://10.0.0.1/robots.txt"), "robots_txt_failed", "blocked_address",
    ),
    "a redirect to no host": (send(b"", 302, Location="http://no-such.invalid/"), "robots_txt_failed", "dns"),
    "a redirect to an error": (send(b"", 302, Location="/hop/error"), "robots_txt_failed", "HTTP 500"),
    "an end without a line end": (send(FORBID_ALL[:-1]), "robots_txt", "Disallow: /"),
    "a rule at the end of 500 KiB": (send(padded(b"Disallow: /\n", MAX_BYTES - 13)), "robots_txt", "Disallow: /"),
    "a rule behind 500 KiB": (send(padded(b"Disallow: /\n", MAX_BYTES)), "ok", ""),
    "a rule cut at 500 KiB": (send(padded(b"Disallow: /b\n", MAX_BYTES - 11)), "ok", ""),
    "without an end": (endless(FORBID_ALL + b"#" * 65536), "robots_txt", "Disallow: /"),
    "a gzip bomb": (
        send(gzip.compress(FORBID_ALL + b"#" * 50_000_000), Content_Encoding="gzip"), "robots_txt", "Disallow: /",
    ),
}  # fmt: skip


def test_every_answer_to_robots_txt_ends_in_its_status(origins: Origins):
    origins.web.put("/moved.txt", send(FORBID_ALL))
    origins.web.put("/hop/0", send(FORBID_ALL))
    origins.web.put("/hop/error", send(b"", 500))
    for hop in range(1, 6):
        origins.web.put(f"/hop/{hop}", send(b"", 302, Location=f"/hop/{hop - 1}"))
    hosts = {name: origins.add(answer) for name, (answer, *_) in ANSWERS.items()}
    settings = settings_for(*hosts.values(), read_timeout=1.0, deadline=3.0, min_rate=0)
    found = results([f"http://{host}/a.jpg" for host in hosts.values()], settings)
    for (name, host), item in zip(hosts.items(), found, strict=True):
        _, status, detail = ANSWERS[name]
        assert item.status == status, (name, item.detail)
        assert detail in item.detail, name
        assert ("/a.jpg" in origins.requests(host)) == (status == "ok"), name


def test_robots_txt_is_not_requested_where_the_setting_is_off(origins: Origins):
    host = origins.add(send(FORBID_ALL))
    assert statuses([f"http://{host}/a.jpg"], settings_for(host, obey_robots_txt=False)) == ["ok"]
    assert origins.requests(host) == ["/a.jpg"]


def test_it_is_requested_once_for_all_urls_in_flight_and_before_any_of_them(origins: Origins):
    def slow(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        send(b"User-agent: *\nDisallow: /no/")(handler)

    host, settings = origins.add(slow), {"breaker": 64, "per_host": 64}
    urls = []
    for number in range(60):
        path = f"/{'no' if number % 3 == 0 else 'yes'}/{number}.jpg"
        origins.web.put(path, send(JPEG))
        urls.append(f"http://{host}{path}")
    assert statuses(urls, settings_for(host, **settings)) == 20 * ["robots_txt", "ok", "ok"]
    first, *others = origins.requests(host)
    assert first == "/robots.txt"
    assert sorted(others) == sorted(yarl.URL(url).path for url in urls if "/yes/" in url)


def test_each_port_has_its_own_and_a_redirect_asks_that_of_its_target(origins: Origins):
    asking, forbidding, open_host = (origins.add(send(text)) for text in (b"", FORBID_ALL, b""))
    for name, target in (("bad", forbidding), ("good", open_host)):
        origins.web.put(f"/{name}", send(b"", 302, Location=f"http://{target}/a.jpg"))
    with Web("127.0.9.1") as other:  # the address of the first
        other.put("/robots.txt", send(FORBID_ALL))
        other.put("/a.jpg", send(JPEG))
        urls = [f"http://{asking}/bad", f"http://{asking}/good", other.url("/a.jpg"), f"http://{asking}/a.jpg"]
        found = statuses(urls, settings_for(asking, forbidding, open_host, other.host))
        assert found == ["robots_txt", "ok", "robots_txt", "ok"]
        assert other.count_of("/a.jpg") == 0
    assert origins.requests(forbidding) == ["/robots.txt"]
    assert sorted(origins.requests(open_host)) == ["/a.jpg", "/robots.txt"]


def test_waiting_for_it_takes_nothing_of_the_deadline_of_a_url(origins: Origins):
    def after(seconds: float, body: bytes) -> Answer:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            time.sleep(seconds)
            send(body)(handler)

        return answer

    host = origins.add(after(1.0, b""))
    origins.web.put("/slow.jpg", after(1.0, JPEG))
    assert statuses([f"http://{host}/slow.jpg"], settings_for(host, deadline=1.9)) == ["ok"]


def test_a_download_that_is_cancelled_while_it_waits_leaves_others_their_robots_txt(origins: Origins):
    host = origins.add(in_turn(silent(9), send(b"")))
    urls = [f"http://{host}/{number}.jpg" for number in range(4)]
    for url in urls:
        origins.web.put(yarl.URL(url).path, send(JPEG))

    async def work() -> None:
        with Spool() as spool:
            async with Downloader(settings_for(host, breaker=2, per_host=2)) as downloader:
                one, two = (
                    asyncio.create_task(downloader.download(rows_of(*part), spool)) for part in (urls[:2], urls[2:])
                )
                while not origins.requests(host):
                    await asyncio.sleep(0.01)
                begin = time.monotonic()
                one.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await one
                assert [item.status for item in await two] == ["ok", "ok"]
                assert time.monotonic() - begin < 1.8  # less than `read_timeout`
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(work())
    assert origins.requests(host).count("/robots.txt") == 2


# --- what is kept, under a simulated clock ----------------------------------------------------------------------------


def urls_of(hosts: int, rows: int) -> list[str]:
    return [f"http://host{host}.example/{row}" for row in range(rows) for host in range(hosts)]


def image(*_: object) -> simulated.Answer:
    return simulated.Answer(0.1)


def asked(done: simulated.Simulated) -> int:
    return len(done.network.robots_requests)


@pytest.mark.parametrize("broken", [{"status": 503}, {"refused": True}, {"seconds": None}], ids=str)
@pytest.mark.parametrize("back", [5, None])
def test_a_robots_txt_that_cannot_be_had_is_tried_again_for_the_second_pass(broken: dict, back: float | None):
    """As often as an image, however many URLs wait for it: at once, but not after a timeout, and in the second pass."""

    def robots_txt(_: yarl.URL, now: float) -> simulated.Answer:
        return simulated.Answer(**({"body": b""} if back is not None and now > back else broken))

    # Those of the other host take longer than a few seconds.
    shards = [urls_of(3, 40) + [f"http://other.example/{shard}/{row}" for row in range(200)] for shard in range(2)]
    done = simulated.downloaded(
        shards,
        image,
        DownloadSettings(per_host=4),
        lambda url, now: simulated.Answer(0, 404) if url.host == "other.example" else robots_txt(url, now),
    )
    failed = {"refused": "connect", "status": "robots_txt_failed", "seconds": "timeout"}[next(iter(broken))]
    if back is None:
        assert done.statuses == {failed: 240, "ok": 400}
        assert all("other" in url for url, _ in done.network.requests)
        lost = [item for shard in done.shards for item in shard if item.status == failed]
        assert all(item.detail.startswith("robots.txt: ") for item in lost)
        # Of each host in the first pass, and in the second of each shard.
        assert asked(done) <= 1 + 3 * 3 * (1 if failed == "timeout" else 3)
        assert done.seconds < 40
    else:
        assert done.statuses == {"ok": 640}


@pytest.mark.parametrize(("failures", "status"), [(2, "ok"), (3, "robots_txt_failed"), (3, "connect")])
def test_it_is_retried_as_an_image_is_and_no_url_does_so_once_more(failures: int, status: str):
    left = [simulated.Answer(0.1, 503, refused=status == "connect")] * failures

    def robots_txt(*_: object) -> simulated.Answer:
        return left.pop() if left else simulated.Answer(0.1, body=b"")

    done = simulated.downloaded([urls_of(1, 60)], image, DownloadSettings(retries=2, second_pass=0), robots_txt)
    assert (done.statuses, asked(done)) == ({status: 60}, 3)
    assert done.seconds < 6  # two pauses and the images; with pauses of its own, each two URLs would take a second


@pytest.mark.parametrize(("hosts", "rows"), [(1, 500), (50, 20)])
def test_hosts_that_answer_nothing_cost_less_than_without_robots_txt(hosts: int, rows: int):
    dead = lambda url, *_: simulated.Answer(0.1 if "good" in url.host else None)  # noqa: E731
    urls = urls_of(hosts, rows) + [f"http://good{row % 50}.example/{row}" for row in range(500)]
    shards = [urls[part::5] for part in range(5)]
    done = simulated.downloaded(
        shards, dead, DownloadSettings(), lambda url, _: dead(url) if "host" in url.host else image()
    )
    assert done.statuses == {"ok": 500, "timeout": hosts * rows}
    assert done.seconds < 45
    assert asked(done) < 50 + 7 * hosts


def test_a_retry_after_of_robots_txt_is_waited_for():
    def robots_txt(_: yarl.URL, now: float) -> simulated.Answer:
        later = {"Retry-After": "20"}
        return simulated.Answer(0.1, body=b"") if now >= 20 else simulated.Answer(0.1, 429, headers=later)

    done = simulated.downloaded([urls_of(1, 50)], image, DownloadSettings(), robots_txt)
    assert (done.statuses, asked(done)) == ({"ok": 50}, 2)
    done = simulated.downloaded([urls_of(1, 50)], image, DownloadSettings(second_pass=10), robots_txt)
    assert (done.statuses, asked(done)) == ({"robots_txt_failed": 50}, 1)


def test_it_is_kept_for_a_day_and_a_failure_for_a_minute_and_few_bytes_of_them(monkeypatch: pytest.MonkeyPatch):
    from storage.collect.hosts import Transient

    requests: list[str] = []

    async def request(url: yarl.URL) -> Rules:
        requests.append(str(url))
        if url.host == "fails.example":
            raise Transient("robots_txt_failed", "HTTP 503")
        return Rules.parse(FORBID_ALL)

    async def work() -> None:
        robots, loop = RobotsTxt(request), asyncio.get_running_loop()

        async def ask(host: str, seconds: float, times: int, since: float = float("-inf")) -> None:
            await asyncio.sleep(seconds)
            url = yarl.URL(f"http://{host}.example/a.jpg")
            await robots.ask(url, since)
            assert robots.known(url, float("-inf")) is not None
            assert requests.count(f"http://{host}.example/robots.txt") == times

        for host, seconds in (("good", 23 * 3600), ("fails", 50)):
            await ask(host, 0, 1)
            await ask(host, seconds, 1)
            await ask(host, seconds, 2)
        await ask("fails", 0, 2, loop.time() - 1)  # it failed after the URL did
        await asyncio.sleep(1)
        await ask("fails", 0, 3, loop.time() - 0.5)
        monkeypatch.setattr("storage.collect.robots.KEPT_BYTES", 2000)
        for number in range(4):
            await ask(f"h{number}", 0, 1)
        await ask("h3", 0, 1)
        await ask("h0", 0, 2)

    simulated.simulate(work())
