"""What a server asks of programs: X-Robots-Tag and robots.txt, of real servers, and as plain text."""

import contextlib
import gzip
import re
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
import simulated
import yarl
from web import Answer, Web, draw, encode, raw, results, send, settings_for, silent, statuses

from storage.collect.fetch import DownloadSettings
from storage.collect.robots import MAX_BYTES, MAX_LINES, MAX_WILDCARDS, Rules, check_x_robots_tag
from storage.collect.statuses import Refused

JPEG = encode(draw())
FORBID_ALL = b"User-agent: *\nDisallow: /\n"


NO_AI = [
    ["noai"], ["NoAI"], ["noindex,noimageai , nofollow"], ["noindex", "noai"], ["*: noai"], ["otherbot: noai", "noai"],
    ["VLBERT-Downloader: noindex, noimageai"], ["otherbot: noindex, vlbert-downloader: noai"], ["noindex;noai"],
    ["unavailable_after: Tue, 25 Jun 2030 15:00:00 GMT, noai"], ["vlbert-downloader/0.1: noai:"],
]  # fmt: skip
NO_INDEX = [
    ["NoIndex, nofollow"], ["nofollow;none"], ["otherbot: noai", "noindex"],
    ["otherbot: noai, vlbert-downloader: noimageindex"],
]  # fmt: skip
NEITHER = [[], [""], ["all"], ["index"], ["noaim"], ["x-noai: 1"], ["otherbot: noai"], ["nofollow, nosnippet"]]
NEITHER += [["otherbot: noarchive, noai"], ["otherbot: noindex"], ["noindexing"], ["googlebot: none"]]


def test_x_robots_tag_forbids_training_always_and_an_index_by_a_setting():
    for headers in NO_AI + NO_INDEX + NEITHER:
        for obey in (True, False):
            wanted = "noai" if headers in NO_AI else "noindex" if obey and headers in NO_INDEX else None
            with contextlib.nullcontext() if wanted is None else pytest.raises(Refused) as refused:
                check_x_robots_tag(headers, obey)
            if wanted:
                assert refused.value.status == wanted, headers
                assert re.match(f"X-Robots-Tag: .*({'ai' if wanted == 'noai' else 'no'})", refused.value.detail, re.I)


def test_a_forbidden_body_is_not_read_and_a_redirect_may_forbid_too(web: Web):
    def forbidden(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for header in ("otherbot: noarchive", "noai"):
            handler.send_header("X-Robots-Tag", header)
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(65536))  # until the other side has hung up

    url = web.put("/endless.jpg", forbidden)
    redirect = web.put("/to", send(b"", 302, Location="/b.jpg", X_Robots_Tag="noindex"))
    web.put("/b.jpg", send(JPEG))
    assert statuses([url, redirect], settings_for(web.host)) == ["noai", "noindex"]
    assert web.count_of("/b.jpg") == 0
    assert statuses([redirect], settings_for(web.host, obey_noindex=False)) == ["ok"]


# A file -> the paths of /a, /b, /c that are forbidden. What a rule matches is protego's own.
GROUPS = {
    "User-agent: *\nDisallow: /b\n\nUser-agent: VLBert-Downloader\nDisallow: /a": "a",
    "User-agent: vlbert-downloader\nDisallow:\n\nUser-agent: *\nDisallow: /": "",
    "User-agent: otherbot\nUser-agent: vlbert-downloader\nDisallow: /a\nUser-agent: *\nDisallow: /b": "a",
    "User-agent: vlbert-downloader\nDisallow: /a\nUser-agent: x\nDisallow: /b\n"
    "User-agent: vlbert-downloader\nDisallow: /c": "ac",
    "User-agent: vlbert-downloader/1.0\rDisallow: /a # no\rDisallow: /b$\rAllow: /b": "ab",
    "User-agent: vlbert\nDisallow: /a\nUser-agent: vlbert-downloader-news\nDisallow: /b": "",
    "\ufeffUser-agent: *\nDisallow: /c": "c",
}  # fmt: skip


@pytest.mark.parametrize("text", GROUPS)
def test_the_groups_of_our_product_token_hold_and_else_those_of_all(text: str):
    rules = Rules(text.encode())
    assert "".join(letter for letter in "abc" if not rules.allow(f"http://h/{letter}")) == GROUPS[text]


@pytest.mark.parametrize(
    "data",
    [
        b"".join(b"User-agent: a%d\n" % i for i in range(14_000))
        + b"User-agent: *\n"
        + b"".join(b"Allow:/%x\n" % i for i in range(MAX_BYTES // 10)),
        b"User-agent: *\nDisallow: /" + b"*a" * 200_000,
    ],
    ids=["agents times rules", "a rule of wildcards"],
)
def test_a_file_made_to_be_costly_is_not(data: bytes):
    """Seconds of the processor; where this was written they were under 0.4 and 0.02. Unbounded, the first takes 24."""
    begin, rules, parsed = time.process_time(), Rules(data), time.process_time()
    rules.allow("http://h/" + "ab" * 1000)
    assert parsed - begin < 2
    assert time.process_time() - parsed < 0.2
    assert rules.bytes < 20 * MAX_BYTES


def test_what_is_beyond_a_limit_does_not_count():
    rule = b"Disallow: /a\n"
    for before in (b"Allow: /b\n" * (MAX_LINES - 2), b"Allow: /b" + b"*b" * (MAX_WILDCARDS - 1) + b"\n"):
        for more, forbidden in ((b"", True), (before.partition(b"\n")[0] + b"*\n", False)):
            rules = Rules(b"User-agent: *\n" + more + before + rule)
            assert rules.allow("http://h/a") != forbidden


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
        every = self.web.requests + self.web.robots_requests
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
    "200": (send(FORBID_ALL), "robots_txt", "forbids /a.jpg"),
    "404": (send(FORBID_ALL, 404), "ok", ""),
    "429": (send(b"", 429), "robots_txt_failed", "robots.txt: HTTP 429"),
    "999": (send(b"", 999), "robots_txt_failed", "robots.txt: HTTP 999"),
    "silence": (silent(9), "timeout", "robots.txt: "),
    "hangs up": (raw(b""), "connect", "robots.txt: "),
    "half a file": (send(FORBID_ALL, length=999), "robots_txt_failed", "short_body"),
    "noise": (send(bytes(range(256)) * 9 + b"\nUser-agent: *\n\xff\nDisallow: /"), "robots_txt", "forbids /a.jpg"),
    "a redirect": (send(b"", 301, Location="/moved.txt"), "robots_txt", "forbids /a.jpg"),
    "a circle": (send(b"", 302, Location="/robots.txt"), "ok", ""),
    "a redirect into a private network": (
        send(b"", 302, Location="http://10.0.0.1/robots.txt"), "robots_txt_failed", "blocked_address",
    ),
    "a rule behind 500 KiB": (send(padded(b"Disallow: /\n", MAX_BYTES)), "ok", ""),
    "a rule cut at 500 KiB": (send(padded(b"Disallow: /b\n", MAX_BYTES - 11)), "ok", ""),
    "a gzip bomb": (
        send(gzip.compress(FORBID_ALL + b"#" * 50_000_000), Content_Encoding="gzip"), "robots_txt", "forbids /a.jpg",
    ),
}  # fmt: skip


def test_every_answer_to_robots_txt_ends_in_its_status(origins: Origins):
    origins.web.put("/moved.txt", send(FORBID_ALL))
    hosts = [origins.add(answer) for answer, *_ in ANSWERS.values()]
    found = results([f"http://{host}/a.jpg" for host in hosts], settings_for(*hosts, deadline=2.0))
    for host, item, (name, (_, status, detail)) in zip(hosts, found, ANSWERS.items(), strict=True):
        assert item.status == status, (name, item.detail)
        assert detail in item.detail, name
        assert ("/a.jpg" in origins.requests(host)) == (status == "ok"), name


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


def urls_of(hosts: int, rows: int) -> list[str]:
    return [f"http://host{host}.example/{row}" for row in range(rows) for host in range(hosts)]


def test_waiting_for_it_takes_nothing_of_the_deadline_of_a_url():
    robots_txt, slow = simulated.Answer(7, body=b""), simulated.Answer(7, body_seconds=7)
    settings = DownloadSettings(deadline=16)
    done = simulated.downloaded([urls_of(1, 1)], lambda *_: slow, settings, lambda *_: robots_txt)
    assert (done.statuses, done.seconds) == ({"ok": 1}, pytest.approx(21))


@pytest.mark.parametrize("broken", [{"status": 503}, {"refused": True}, {"seconds": None}], ids=str)
@pytest.mark.parametrize("back", [5, float("inf")])
def test_a_robots_txt_that_cannot_be_had_is_tried_again_for_the_second_pass(broken: dict, back: float):
    """Once in the first pass and once in the second, however many URLs wait for it."""

    def robots_txt(url: yarl.URL, now: float) -> simulated.Answer:
        there = {"status": 404} if url.host == "other.example" else {"body": b""} if now > back else broken
        return simulated.Answer(**there)

    # Those of the other host take longer than a few seconds.
    shards = [urls_of(3, 20) + [f"http://other.example/{shard}/{row}" for row in range(200)] for shard in range(2)]
    settings = DownloadSettings(concurrency=3)
    done = simulated.downloaded(shards, lambda *_: simulated.Answer(), settings, robots_txt)
    if back == 5:
        assert done.statuses == {"ok": 520}
        return
    failed = {"refused": "connect", "status": "robots_txt_failed", "seconds": "timeout"}[next(iter(broken))]
    found, waited = done.statuses[failed], done.statuses["host_timeout"]
    assert (found + waited, done.statuses["ok"]) == (120, 400)
    assert found == 120 if failed == "robots_txt_failed" else 0 < found < 30  # then their hosts are silent
    assert all("other" in url for url, _ in done.network.requests)
    # Of each host in the first pass, and in the second of each shard.
    assert len(done.network.robots_requests) <= 1 + 3 * 3


def test_a_retry_after_of_robots_txt_is_waited_for_up_to_half_a_minute():
    for seconds, expected in ((20, {"ok": 50}), (40, {"robots_txt_failed": 50})):

        def robots_txt(_: yarl.URL, now: float, seconds: float = seconds) -> simulated.Answer:
            later = {"Retry-After": str(seconds)}
            return simulated.Answer(body=b"") if now >= seconds else simulated.Answer(status=429, headers=later)

        done = simulated.downloaded([urls_of(1, 50)], lambda *_: simulated.Answer(), DownloadSettings(), robots_txt)
        assert (done.statuses, len(done.network.robots_requests)) == (expected, 1 + (seconds == 20))
