"""Downloads from several hosts at once, some of which are slow, dead or want to be left alone: real servers."""

import asyncio
import gzip
import itertools
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler

import pytest
from places import PROJECT
from web import Answer, Web, draw, drip, encode, endless, in_turn, send, silent

from storage.download import CaptionRow, Download, Downloader, DownloadSettings, Spool, download
from storage.fetch import Fetcher
from storage.hosts import Transient
from storage.normalise import Refused

JPEG = encode(draw())


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        yield server


@pytest.fixture
def webs() -> Iterator[list[Web]]:
    """Six hosts."""
    with ExitStack() as stack:
        yield [stack.enter_context(Web(f"127.0.0.{number}")) for number in range(1, 7)]


def settings_for(*servers: Web, **changes: object) -> DownloadSettings:
    """Impatient settings that admit these servers, with the second pass and the limits of a host as they are."""
    hosts = tuple(server.host for server in servers)
    patience = {"deadline": 4.0, "connect_timeout": 0.5, "read_timeout": 0.5, "retries": 0, "retry_delay": 0.02}
    return DownloadSettings(allowed_hosts=hosts, **(patience | changes))


def rows_of(urls: list[str]) -> list[CaptionRow]:
    return [CaptionRow(row, f"caption {row}", url) for row, url in enumerate(urls)]


def statuses(urls: list[str], settings: DownloadSettings) -> list[str]:
    return [item.status for item in download(rows_of(urls), settings)]


class Counted:
    """An answer that counts how many requests it holds at once."""

    def __init__(self, answer: Answer, seconds: float = 0.03):
        self.answer, self.seconds = answer, seconds
        self.now = self.most = 0
        self.lock = threading.Lock()

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
        self.answer(handler)


def cut_off(handler: BaseHTTPRequestHandler) -> None:
    """A picture whose connection is reset in the middle."""
    send(JPEG[:100], length=len(JPEG))(handler)
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def asleep_at_first(requests: int = 2) -> Answer:
    """Silence for the first requests, wherever it is put, then a picture."""
    count = itertools.count()
    return lambda handler: (silent(20) if next(count) < requests else send(JPEG))(handler)


# --- hosts in turn ----------------------------------------------------------------------------------------------------


def test_a_host_has_at_most_its_share_over_all_shards_of_one_downloader(web: Web):
    counted = Counted(send(JPEG))
    urls = [web.put(f"/{i}.jpg", counted) for i in range(24)]

    async def work() -> None:
        async with Downloader(settings_for(web, per_host=3)) as downloader:
            shards = [downloader.download(rows_of(urls[start : start + 8])) for start in (0, 8, 16)]
            for shard in await asyncio.gather(*shards):
                assert {item.status for item in shard} == {"ok"}

    asyncio.run(work())
    assert counted.most == 3


def test_a_slow_host_at_the_head_of_a_sorted_list_holds_up_no_other(webs: list[Web]):
    slow, *quick = webs
    served = itertools.count(1)
    all_others = threading.Event()

    def quickly(handler: BaseHTTPRequestHandler) -> None:
        send(JPEG)(handler)
        if next(served) == 20:
            all_others.set()

    def last(handler: BaseHTTPRequestHandler) -> None:
        if all_others.wait(10):  # else an empty answer
            send(JPEG)(handler)

    held = Counted(last)
    urls = [slow.put(f"/{i}.jpg", held) for i in range(8)]
    urls += [server.put(f"/{i}.jpg", quickly) for server in quick for i in range(4)]
    settings = settings_for(*webs, per_host=2, concurrency=4, deadline=30, read_timeout=20)
    assert statuses(urls, settings) == 28 * ["ok"]
    assert held.most <= 2


# --- hosts that only time out -----------------------------------------------------------------------------------------


def test_hosts_that_hang_or_drip_are_asked_every_url_in_brief(webs: list[Web]):
    hanging, dripping, *good = webs
    urls = [hanging.put(f"/{i}.jpg", silent(20)) for i in range(30)]
    urls += [dripping.put(f"/{i}.jpg", drip(JPEG, 1, 0.05)) for i in range(30)]
    urls += [server.put(f"/{i}.jpg", send(JPEG)) for server in good for i in range(10)]
    begin = time.monotonic()
    results = download(rows_of(urls), settings_for(*webs, deadline=10, connect_timeout=4, read_timeout=1.5))
    assert time.monotonic() - begin < 15  # with all patience for each, two at a time: 25
    assert Counter(item.status for item in results[60:]) == {"ok": 40}
    for server, bad in ((hanging, results[:30]), (dripping, results[30:60])):
        assert all(server.asked(f"/{i}.jpg") for i in range(30))
        # Two at first, one of them or another one in the second pass, and those that were on their way.
        assert Counter(item.status for item in bad)["timeout"] <= 5
        assert {item.status for item in bad} == {"timeout", "host_timeout"}
        in_brief = next(item for item in bad if item.status == "host_timeout")
        assert f"not done after 0.5 s, and {server.host}" in in_brief.detail


def test_a_port_where_nobody_listens_is_tried_for_every_row():
    with Web() as gone:
        urls = [gone.url(f"/{i}.jpg") for i in range(100)]
    results = download(rows_of(urls), settings_for(gone, retries=2))
    assert Counter(item.status for item in results) == {"connect": 100}
    assert len([item for item in results if "attempts" in item.detail]) <= 6  # once, now that it is known


def test_a_port_where_nobody_listens_is_no_fault_of_another_port_of_that_host(web: Web):
    with Web() as gone:
        urls = [gone.url(f"/{i}.jpg") for i in range(10)]
    urls += [web.put(f"/{i}.jpg", send(JPEG)) for i in range(10)]
    assert statuses(urls, settings_for(web, gone, concurrency=1, second_pass=0))[10:] == 10 * ["ok"]
    assert len(web.requests) == 10


def test_an_answer_behind_the_answer_is_not_taken_for_that_of_the_next_row(web: Web):
    wrong = encode(draw(seed=9))

    def twice(handler: BaseHTTPRequestHandler) -> None:
        send(JPEG)(handler)
        send(wrong)(handler)

    def too_small_a_length(handler: BaseHTTPRequestHandler) -> None:
        send(JPEG, length=len(JPEG))(handler)
        handler.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    urls = [web.put(f"/{i}.jpg", answer) for i, answer in enumerate(3 * [twice, too_small_a_length])]
    results = download(rows_of(urls), settings_for(web, concurrency=1))
    assert [item.status for item in results] == 6 * ["ok"]
    assert {item.sample.image for item in results} == {JPEG}
    assert all(headers["Connection"] == "close" for *_, headers in web.requests)


def test_more_hosts_than_files_may_be_open_are_no_matter_and_too_few_files_are_no_rows_fault():
    code = (
        "import resource, sys; from collections import Counter; from contextlib import ExitStack;"
        "from storage.download import CaptionRow, DownloadSettings, download;"
        "hosts = [f'127.0.1.{i}:{sys.argv[1]}' for i in range(1, 151)];"
        "rows = [CaptionRow(i, 'a', f'http://{host}/a.jpg') for i, host in enumerate(hosts)];"
        "files = ExitStack(); used = [files.enter_context(open('/dev/null')) for _ in range(int(sys.argv[2]))];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100));"
        "settings = DownloadSettings(allowed_hosts=tuple(hosts), concurrency=32, retries=0, second_pass=0);"
        "print(Counter(item.status for item in download(rows, settings)))"
    )

    def attempt(files: int) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", code, str(web.server.server_port), str(files)]
        return subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)

    with Web("0.0.0.0") as web:
        web.put("/a.jpg", send(JPEG))
        many, few = attempt(0), attempt(80)
    assert many.stdout == "Counter({'ok': 150})\n", many.stderr
    last = few.stderr.splitlines()[-1]
    assert few.returncode == 1
    assert last.startswith("OSError: [Errno 24]")
    assert "raise `ulimit -n`, or lower concurrency" in last


def test_a_drip_under_the_least_rate_ends_long_before_the_deadline(web: Web):
    step = len(JPEG) // 20
    url = web.put("/drip.jpg", drip(JPEG, step, 0.05))  # done after a second
    begin = time.monotonic()
    settings = settings_for(web, second_pass=0, read_timeout=0.3, min_rate=2 * 20 * step)
    (result,) = download(rows_of([url]), settings)
    assert result.status == "timeout"
    assert f"under {settings.min_rate}/s" in result.detail
    assert time.monotonic() - begin < 0.9
    assert statuses([url], settings_for(web, second_pass=0, read_timeout=0.3, min_rate=20 * step // 3)) == ["ok"]


def test_a_host_that_recovers_gets_all_its_urls_in_the_second_pass(web: Web):
    asleep = asleep_at_first()
    urls = [web.put(f"/{i}.jpg", asleep) for i in range(10)]
    assert statuses(urls, settings_for(web)) == 10 * ["ok"]
    assert len(web.requests) == 12


def test_a_host_whose_first_three_requests_time_out_keeps_all_its_rows(web: Web):
    answer = asleep_at_first(3)
    urls = [web.put(f"/{i}.jpg", answer) for i in range(10)]
    assert statuses(urls, settings_for(web)) == 10 * ["ok"]


def test_what_a_host_has_answered_is_asked_again_before_it_counts_as_silent(web: Web):
    good = [web.put(f"/{i}.jpg", send(JPEG)) for i in range(4)]
    hanging = [web.put(f"/hangs/{i}.jpg", silent(20)) for i in range(10)]
    settings = settings_for(web, concurrency=2, second_pass=0)
    assert statuses([good[0], *hanging, *good[1:]], settings) == ["ok", *10 * ["timeout"], *3 * ["ok"]]
    assert [web.asked(f"/hangs/{i}.jpg") for i in range(10)] == 10 * [1]
    assert 2 <= web.asked("/0.jpg") <= 6  # after two that hang, once


def test_a_host_that_redirects_lead_to_is_asked_again_too(webs: list[Web]):
    shortener, recovering = webs[:2]

    def asleep_for_a_while(handler: BaseHTTPRequestHandler) -> None:
        awake = time.monotonic() - recovering.requests[0][0] > 0.8
        (send(JPEG) if awake else silent(20))(handler)

    targets = [recovering.put(f"/{i}.jpg", asleep_for_a_while) for i in range(8)]
    urls = [shortener.put(f"/{i}", send(b"", 302, Location=target)) for i, target in enumerate(targets)]
    # Two of them, and perhaps more, time out after half a second each; the second pass begins after a whole one.
    assert statuses(urls, settings_for(*webs, per_host=2, retry_delay=1.0)) == 8 * ["ok"]
    assert len(recovering.requests) <= 16


def test_a_redirect_to_a_silent_host_is_followed_in_brief_and_its_own_host_is_not_blamed(webs: list[Web]):
    shortener, hanging = webs[:2]
    targets = [hanging.put(f"/{i}.jpg", silent(20)) for i in range(8)]
    urls = [shortener.put(f"/{i}", send(b"", 302, Location=target)) for i, target in enumerate(targets)]
    urls += [shortener.put("/good.jpg", send(JPEG))]
    found = statuses(urls, settings_for(*webs, per_host=2, second_pass=0))
    assert found[-1] == "ok"
    assert Counter(found[:-1])["timeout"] in (2, 3, 4)  # two, one on its way, and one at the end
    assert Counter(found[:-1])["host_timeout"] == 8 - Counter(found[:-1])["timeout"]
    assert all(hanging.asked(f"/{i}.jpg") for i in range(8))


# --- the second pass --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passing", [send(b"", 503), send(b"", 429), silent(20), cut_off])
def test_what_may_pass_is_asked_once_more_when_all_others_are_done(web: Web, passing: Answer):
    first = web.put("/first.jpg", in_turn(passing, send(JPEG)))
    others = [web.put(f"/{i}.jpg", send(JPEG)) for i in range(5)]
    assert statuses([first, *others], settings_for(web, concurrency=1)) == 6 * ["ok"]
    paths = [path for _, path, _ in web.requests]
    assert paths == ["/first.jpg", *(f"/{i}.jpg" for i in range(5)), "/first.jpg"]


@pytest.mark.parametrize("lasting", [send(b"", 404), send(b"<html>"), send(JPEG[:-200])])
def test_what_lasts_has_no_second_pass(web: Web, lasting: Answer):
    download(rows_of([web.put("/lasting.jpg", lasting)]), settings_for(web))
    assert len(web.requests) == 1


@pytest.mark.parametrize(("code", "passes"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)])
def test_a_look_up_that_failed_for_now_may_pass_and_one_that_found_nothing_lasts(code: int, passes: bool):
    async def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(code, "as the system says")

    async def work() -> Refused:
        async with Fetcher(DownloadSettings(retries=2), lookup) as fetcher:
            with fetcher.budget.share() as share, pytest.raises(Refused) as refused:
                await fetcher.fetch("http://name.example/a.jpg", share)
        return refused.value

    refused = asyncio.run(work())
    assert refused.status == "dns"
    assert isinstance(refused, Transient) == passes
    assert getattr(refused, "attempts", 1) == 1


def test_a_timeout_is_not_tried_again_at_once(web: Web):
    assert statuses([web.put("/a.jpg", silent(20))], settings_for(web, retries=2, second_pass=0)) == ["timeout"]
    assert len(web.requests) == 1


def test_the_second_pass_is_one_attempt_and_the_detail_counts_all(web: Web):
    (result,) = download(rows_of([web.put("/down.jpg", send(b"", 503))]), settings_for(web, retries=2))
    assert (result.status, len(web.requests)) == ("http_503", 4)
    assert result.detail.endswith(" (4 attempts)")
    url = web.put("/other.jpg", in_turn(silent(20), send(b"", 503), send(JPEG)))
    assert statuses([url], settings_for(web, retries=2)) == ["http_503"]


@pytest.mark.slow
def test_a_long_retry_after_takes_no_place_and_is_waited_for(web: Web):
    later = web.put("/later.jpg", in_turn(send(b"", 429, Retry_After="3"), send(JPEG)))
    other = web.put("/other.jpg", send(JPEG))
    assert statuses([later, other], settings_for(web, concurrency=1, retries=2)) == ["ok", "ok"]
    (first, one, _), (between, two, _), (second, three, _) = web.requests
    assert (one, two, three) == ("/later.jpg", "/other.jpg", "/later.jpg")
    assert between - first < 1
    assert second - first > 2.9


def test_a_retry_after_longer_than_the_second_pass_waits_is_final(web: Web):
    url = web.put("/much-later.jpg", send(b"", 503, Retry_After="4"))
    begin = time.monotonic()
    assert statuses([url], settings_for(web, retries=2, second_pass=3)) == ["http_503"]
    assert time.monotonic() - begin < 1
    assert len(web.requests) == 1


def test_both_passes_share_the_deadline(web: Web):
    url = web.put("/drip.jpg", drip(JPEG, 1, 0.05))
    begin = time.monotonic()
    settings = settings_for(web, deadline=1.0, min_rate=0)
    assert statuses([url], settings) == ["timeout"]
    assert time.monotonic() - begin < 1.5  # it has used all its time in the first pass
    assert len(web.requests) == 1
    url = web.put("/later.jpg", in_turn(silent(20), drip(JPEG, 1, 0.05)))
    (result,) = download(rows_of([url]), settings_for(web, deadline=1.2, min_rate=0))
    assert result.detail == "not done after 0.6 s (2 attempts)"  # half of it, though more is left


# --- what is in memory ------------------------------------------------------------------------------------------------


def test_bodies_in_flight_stay_within_their_budget_and_all_arrive(web: Web):
    body = JPEG + bytes(1_000_000 - len(JPEG))
    urls = [web.put(f"/{i}.jpg", send(body)) for i in range(12)]
    settings = settings_for(web, max_bytes=1_000_000, max_bytes_in_flight=1_500_000, per_host=12, breaker=12)
    peak = 0

    async def one(fetcher: Fetcher, url: str) -> None:
        nonlocal peak
        with fetcher.budget.share() as share:
            assert await fetcher.fetch(url, share) == body
            peak = max(peak, fetcher.budget.held)
            await asyncio.sleep(0.02)  # the bytes are in use until the share is given back
            peak = max(peak, fetcher.budget.held)

    async def work() -> None:
        async with Fetcher(settings) as fetcher:
            await asyncio.gather(*(one(fetcher, url) for url in urls))
            assert fetcher.budget.held == 0

    asyncio.run(work())
    # The budget, one body that may always grow, and what each of the others had just read.
    assert 1_500_000 <= peak <= 2_500_000 + 12 * 2**18


def test_unpacked_bytes_are_within_the_budget_too(web: Web):
    bomb = gzip.compress(JPEG + bytes(2_000_000 - len(JPEG)))
    urls = [web.put(f"/{i}.jpg", send(bomb, Content_Encoding="gzip")) for i in range(12)]
    settings = settings_for(web, max_bytes=2_000_000, max_bytes_in_flight=3_000_000, per_host=12, breaker=12)
    peak = 0

    async def one(fetcher: Fetcher, url: str) -> None:
        nonlocal peak
        with fetcher.budget.share() as share:
            assert len(await fetcher.fetch(url, share)) == 2_000_000
            assert share.held == 2_000_000
            peak = max(peak, fetcher.budget.held)
            await asyncio.sleep(0.02)  # the bytes are in use until the share is given back

    async def work() -> None:
        async with Fetcher(settings) as fetcher:
            await asyncio.gather(*(one(fetcher, url) for url in urls))

    asyncio.run(work())
    assert 2_000_000 <= peak <= 5_000_000 + 12 * 2**18


def test_large_bodies_that_fall_silent_keep_the_others_waiting_only_until_their_read_timeout(webs: list[Web]):
    bad, good = webs[:2]
    large = JPEG[:2] + 17 * (b"\xff\xfe\xff\xff" + bytes(65533)) + JPEG[2:]

    def falls_silent(handler: BaseHTTPRequestHandler) -> None:
        send(large, length=len(large) + 1)(handler)
        handler.server.stopping.wait(60)

    urls = [bad.put(f"/{i}.jpg", falls_silent) for i in range(2)]
    urls += [good.put(f"/{i}.jpg", send(JPEG)) for i in range(20)]
    settings = settings_for(*webs, max_bytes=2_000_000, max_bytes_in_flight=2_000_000, second_pass=0)
    assert statuses(urls, settings) == 2 * ["timeout"] + 20 * ["ok"]


def test_waiting_for_room_is_no_time_of_the_servers(web: Web):
    def in_two(handler: BaseHTTPRequestHandler) -> None:
        send(JPEG[:100], length=len(JPEG))(handler)
        handler.server.stopping.wait(0.9)
        handler.wfile.write(JPEG[100:])

    settings = settings_for(web, max_bytes=10_000, max_bytes_in_flight=10_000, deadline=0.7, read_timeout=2.0)
    url = web.put("/a.jpg", in_two)

    async def work() -> bytes:
        async with Fetcher(settings) as fetcher:
            with fetcher.budget.share() as ours:
                with fetcher.budget.share() as held:
                    held.grow(10_000)
                    fetching = asyncio.create_task(fetcher.fetch(url, ours))
                    await asyncio.sleep(0.6)
                    assert not fetching.done()
                return await fetching

    assert asyncio.run(work()) == JPEG


def test_spooled_pictures_read_as_those_in_memory_and_hold_no_bytes(web: Web):
    rows = rows_of([web.put(f"/{i}.jpg", send(encode(draw(seed=i)))) for i in range(5)] + [web.url("/gone.jpg")])

    async def work(spool: Spool | None) -> list[Download]:
        async with Downloader(settings_for(web)) as downloader:
            return await downloader.download(rows, spool=spool)

    in_memory = asyncio.run(work(None))
    with Spool() as spool:
        spooled = asyncio.run(work(spool))
        assert [item.sample for item in spooled] == [item.sample for item in in_memory]
        assert not any(isinstance(value, bytes) for item in spooled[:5] for value in vars(item.image).values())
    with pytest.raises(ValueError, match="closed file"):
        spooled[0].image.jpeg  # noqa: B018


# --- robots -----------------------------------------------------------------------------------------------------------


def robots(*headers: str) -> Answer:
    """An image without an end under these X-Robots-Tag headers."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for header in headers:
            handler.send_header("X-Robots-Tag", header)
        handler.send_header("Content-Length", str(len(JPEG)))
        handler.end_headers()
        handler.wfile.write(JPEG)

    return answer


@pytest.mark.parametrize(
    "headers",
    [
        ["noai"], ["noimageai"], ["NoAI"], ["noindex, noai"], ["noindex,noimageai , nofollow"], ["noindex", "noai"],
        ["vlbert-downloader: noai"], ["VLBERT-Downloader: noindex, noimageai"], ["*: noai"], ["max-snippet: 20, noai"],
        ["vlbert-downloader/0.1: noai"], ["otherbot: noindex, vlbert-downloader: noai"], ["otherbot: noai", "noai"],
        ["unavailable_after: 25 Jun 2030 15:00:00 GMT, noai"], ["max-image-preview:large; noai"], ["noindex;noai"],
        ["noai:"], ["vlbert-downloader: noai:"], ["unavailable_after: 25 Jun 2030 15:00:00 GMT; noai"],
        ["unavailable_after: Tue, 25 Jun 2030 15:00:00 GMT, noai"],
    ],
)  # fmt: skip
def test_a_server_that_forbids_training_is_heeded(web: Web, headers: list[str]):
    (result,) = download(rows_of([web.put("/a.jpg", robots(*headers))]), settings_for(web))
    assert (result.status, result.sample) == ("refused_by_robots", None)
    assert "noai" in result.detail.lower() or "noimageai" in result.detail.lower()
    assert len(web.requests) == 1


@pytest.mark.parametrize(
    "headers",
    [[], [""], ["noindex"], ["none"], ["all"], ["noaim"], ["x-noai: 1"], ["otherbot: noai"], ["otherbot: none, noai"]],
)
def test_other_directives_and_those_for_others_forbid_nothing(web: Web, headers: list[str]):
    assert statuses([web.put("/a.jpg", robots(*headers))], settings_for(web)) == ["ok"]


def test_what_is_forbidden_is_not_read_and_a_redirect_may_forbid_too(web: Web):
    def forbidden(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("X-Robots-Tag", "noai")
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(65536))  # until the other side has hung up

    url = web.put("/endless.jpg", forbidden)
    redirect = web.put("/to", send(b"", 302, Location="/b.jpg", X_Robots_Tag="noai"))
    web.put("/b.jpg", send(JPEG))
    assert statuses([url, redirect], settings_for(web)) == 2 * ["refused_by_robots"]
    assert web.asked("/b.jpg") == 0
    web.put("/endless.jpg", endless(bytes(65536)))
    assert statuses([url], settings_for(web, max_bytes=2**20)) == ["too_big"]
