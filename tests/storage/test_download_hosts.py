"""Downloads from several hosts at once, some slow, silent or overloaded: real servers, or simulated ones."""

import asyncio
import gzip
import itertools
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler

import pytest
import simulated
import yarl
from places import PROJECT
from web import Answer, Web, draw, drip, encode, endless, in_turn, send

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
    """An image whose connection is reset in the middle."""
    send(JPEG[:100], length=len(JPEG))(handler)
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


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


# --- hosts that only time out -----------------------------------------------------------------------------------------


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


# --- silent hosts and the second pass, under a simulated clock --------------------------------------------------------


def first_silent(requests: int) -> Callable[..., simulated.Answer]:
    """No answer to the first requests, whatever their URL, then an image."""
    count = itertools.count()
    return lambda *_: simulated.Answer(None if next(count) < requests else 0.1)


def by_url(**answers: simulated.Answer | list[simulated.Answer]) -> Callable[..., simulated.Answer]:
    """An answer for each first part of a path; of a list one by one, and the last one stays."""

    def serve(url: yarl.URL, *_: object) -> simulated.Answer:
        found = answers.get(url.parts[1], simulated.Answer())
        return found if isinstance(found, simulated.Answer) else found.pop(0) if len(found) > 1 else found[0]

    return serve


def urls_of(*paths: str) -> list[str]:
    return [f"http://host.example/{path}" for path in paths]


def results(urls: list[str], serve: Callable, **settings: object) -> simulated.Simulated:
    return simulated.downloaded([urls], serve, DownloadSettings(**settings))


def statuses_in(done: simulated.Simulated) -> list[str]:
    return [item.status for item in done.shards[0]]


def test_a_slow_host_at_the_head_of_a_sorted_list_holds_up_no_other():
    urls = urls_of(*(str(i) for i in range(8)))
    urls += [f"http://quick{host}.example/{i}" for host in range(5) for i in range(4)]
    serve = lambda url, *_: simulated.Answer(5 if url.host == "host.example" else 0.1)  # noqa: E731
    done = results(urls, serve, per_host=2, concurrency=4)
    assert done.statuses == {"ok": 28}
    assert max(max(done.network.answered[f"quick{host}.example:80"]) for host in range(5)) < 5


def test_a_host_that_drips_gets_a_short_deadline_for_most_of_its_urls():
    done = results(urls_of(*(str(i) for i in range(30))), lambda *_: simulated.Answer(0.1, body_seconds=60))
    assert set(done.statuses) == {"timeout", "host_timeout"}
    assert done.statuses["timeout"] <= 5
    assert len(done.network.asked) == 30
    short = next(item for item in done.shards[0] if item.status == "host_timeout")
    assert "not done after 1 s, and host.example:80" in short.detail


@pytest.mark.parametrize("silent_requests", [2, 3])
def test_a_host_that_recovers_gets_all_its_urls_in_the_second_pass(silent_requests: int):
    done = results(urls_of(*(str(i) for i in range(10))), first_silent(silent_requests))
    assert done.statuses == {"ok": 10}
    assert len(done.network.requests) <= 10 + 2 * silent_requests


def test_what_a_host_has_answered_is_requested_again_before_it_counts_as_silent():
    urls = urls_of("0", *(f"hangs/{i}" for i in range(10)), "1", "2", "3")
    done = results(urls, by_url(hangs=simulated.Answer(None)), concurrency=2, second_pass=0)
    assert statuses_in(done) == ["ok", *10 * ["timeout"], *3 * ["ok"]]
    assert all(done.network.asked[url] == 1 for url in urls[1:11])
    assert 2 <= done.network.asked[urls[0]] <= 6  # after two that hang, once


def redirects(to: Callable[[float], simulated.Answer]) -> Callable[..., simulated.Answer]:
    """host.example redirects its numbers to target.example, which answers by the time."""

    def serve(url: yarl.URL, now: float, _: int) -> simulated.Answer:
        if url.host == "target.example":
            return to(now)
        location = {"Location": f"http://target.example{url.path}"}
        return simulated.Answer() if url.path == "/good" else simulated.Answer(0.1, 302, headers=location)

    return serve


def test_a_host_that_redirects_lead_to_is_requested_again_too():
    serve = redirects(lambda now: simulated.Answer(0.1 if now > 12 else None))
    done = results(urls_of(*(str(i) for i in range(8))), serve, per_host=2)
    assert done.statuses == {"ok": 8}
    assert len([url for url, _ in done.network.requests if "target" in url]) <= 16


def test_a_redirect_to_a_silent_host_gets_a_short_deadline_and_is_no_fault_of_its_own_host():
    urls = urls_of(*(str(i) for i in range(8)), "good")
    done = results(urls, redirects(lambda now: simulated.Answer(None)), per_host=2, second_pass=0)
    found = statuses_in(done)
    assert found[-1] == "ok"
    assert Counter(found[:-1])["timeout"] in (2, 3, 4)  # two, one on its way, and one at the end
    assert Counter(found[:-1])["host_timeout"] == 8 - Counter(found[:-1])["timeout"]
    assert all(done.network.asked[f"http://target.example/{i}"] for i in range(8))


@pytest.mark.parametrize("transient", [{"status": 503}, {"status": 429}, {"seconds": None}, {"refused": True}], ids=str)
def test_a_transient_failure_is_requested_once_more_when_all_others_are_done(transient: dict):
    urls = urls_of("first", *(str(i) for i in range(5)))
    serve = by_url(first=[simulated.Answer(**transient), simulated.Answer()])
    done = results(urls, serve, concurrency=1, retries=0)
    assert done.statuses == {"ok": 6}
    assert [url for url, _ in done.network.requests] == [*urls, urls[0]]


def test_a_timeout_is_not_retried_at_once_and_the_second_pass_is_one_attempt_and_counted():
    (url,) = urls_of("a")
    done = results([url], by_url(a=simulated.Answer(None)), second_pass=0)
    assert (statuses_in(done), done.network.asked[url]) == (["timeout"], 1)
    done = results([url], by_url(a=simulated.Answer(status=503)))
    assert (statuses_in(done), done.network.asked[url]) == (["http_503"], 4)
    assert done.shards[0][0].detail.endswith(" (4 attempts)")
    answers = [simulated.Answer(None), simulated.Answer(status=503), simulated.Answer()]
    assert statuses_in(results([url], by_url(a=answers))) == ["http_503"]


def test_a_long_retry_after_takes_no_slot_and_is_waited_for():
    urls = urls_of("later", "other")
    answers = [simulated.Answer(status=429, headers={"Retry-After": "20"}), simulated.Answer()]
    done = results(urls, by_url(later=answers), concurrency=1)
    (first, one), (second, two), (third, three) = done.network.requests
    assert (done.statuses, [first, second, third]) == ({"ok": 2}, [*urls, urls[0]])
    assert two - one < 1
    assert three - one >= 20


def in_two_seconds() -> str:
    return formatdate(time.time() + 2, usegmt=True)  # a date has whole seconds: at least 1 s from now


RETRY_AFTER = {
    "seconds": (lambda: "1", "ok", 1, 3),
    "a date": (in_two_seconds, "ok", 0.9, 4),
    "longer than the second pass": (lambda: "31", "http_503", 0, 1),
    "an hour": (lambda: "3600", "http_503", 0, 1),
    "in 2100": (lambda: "Fri, 31 Dec 2100 23:59:59 GMT", "http_503", 0, 1),
    **{repr(text): (lambda text=text: text, "ok", 0, 1) for text in ("soon", "-5", "", "1e3", "\u00b2")},
    **{
        f"hostile {number}": (lambda text=text: text, None, 0, 1)
        for number, text in enumerate(
            [
                "Mon, 01 Jan 2024 00:00:00 +99999999999999999999",
                "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
                "Fri, 31 Dec 9999 23:59:59 -2359",
                "Mon, 01 Jan 0001 00:00:00",
                "9" * 400,
            ]
        )
    },
}


@pytest.mark.parametrize("value", RETRY_AFTER)
def test_retry_after_is_waited_for_if_it_is_a_number_or_a_date_in_reach(value: str):
    text, status, least, most = RETRY_AFTER[value]
    answers = [simulated.Answer(status=503, headers={"Retry-After": text()}), simulated.Answer()]
    done = results(urls_of("a"), by_url(a=answers))
    assert statuses_in(done)[0] in ((status,) if status else ("ok", "http_503"))
    assert least <= done.seconds <= most


def test_both_passes_share_the_deadline():
    (url,) = urls_of("a")
    done = results([url], by_url(a=simulated.Answer(0.1, body_seconds=60)), deadline=10)
    assert (statuses_in(done), done.network.asked[url]) == (["timeout"], 1)  # its time is used up in the first pass
    for read_timeout, left in ((4, 6), (8, 4)):  # of 12 s, half, or what the first pass left
        answers = [simulated.Answer(None), simulated.Answer(0.1, body_seconds=60)]
        done = results([url], by_url(a=answers), deadline=12, read_timeout=read_timeout)
        assert done.shards[0][0].detail == f"not done after {left} s (2 attempts)"


def test_retries_stay_within_the_deadline():
    done = results(urls_of("a"), lambda *_: simulated.Answer(status=503), retries=50, deadline=8, second_pass=0)
    assert statuses_in(done)[0] in ("http_503", "timeout")
    assert done.seconds <= 8


# --- the second pass with real servers --------------------------------------------------------------------------------


def test_a_body_that_is_cut_off_is_requested_once_more(web: Web):
    assert statuses([web.put("/a.jpg", in_turn(cut_off, send(JPEG)))], settings_for(web)) == ["ok"]


@pytest.mark.parametrize(
    "lasting",
    [send(b"", 404), send(b"", 403), send(b"<html>"), send(JPEG[:-200]), send(b"x", length=10**12)],
)
def test_a_lasting_failure_is_not_requested_again(web: Web, lasting: Answer):
    assert statuses([web.put("/lasting.jpg", lasting)], settings_for(web, retries=2))[0] != "ok"
    assert len(web.requests) == 1


@pytest.mark.parametrize(("code", "transient"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)])
def test_a_look_up_that_failed_for_now_is_transient_and_an_unknown_name_is_not(code: int, transient: bool):
    async def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(code, "as the system says")

    async def work() -> Refused:
        async with Fetcher(DownloadSettings(retries=2), lookup) as fetcher:
            with fetcher.budget.share() as share, pytest.raises(Refused) as refused:
                await fetcher.fetch("http://name.example/a.jpg", share)
        return refused.value

    refused = asyncio.run(work())
    assert refused.status == "dns"
    assert isinstance(refused, Transient) == transient
    assert getattr(refused, "attempts", 1) == 1


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


def test_a_large_body_that_drips_ends_where_all_others_wait_for_it(webs: list[Web]):
    bad, good = webs[:2]
    large = JPEG[:2] + 17 * (b"\xff\xfe\xff\xff" + bytes(65533)) + JPEG[2:]

    def drips(handler: BaseHTTPRequestHandler) -> None:
        send(large, length=len(large) + 500_000)(handler)
        while not handler.server.stopping.wait(0.1):
            handler.wfile.write(bytes(500))

    urls = [bad.put(f"/{i}.jpg", drips) for i in range(2)]
    urls += [good.put(f"/{i}.jpg", send(JPEG)) for i in range(20)]
    limits = {"max_bytes": 2_000_000, "max_bytes_in_flight": 2_000_000, "deadline": 5.0, "read_timeout": 5.0}
    found = download(rows_of(urls), settings_for(*webs, second_pass=0, **limits))
    assert [one.status for one in found] == 2 * ["timeout"] + 20 * ["ok"]
    # The other one holds half of the budget, and delays nobody any more.
    assert sorted("waited for room" in one.detail for one in found[:2]) == [False, True]


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


FORBIDDING = [
    ["noai"], ["noimageai"], ["NoAI"], ["noindex, noai"], ["noindex,noimageai , nofollow"], ["noindex", "noai"],
    ["vlbert-downloader: noai"], ["VLBERT-Downloader: noindex, noimageai"], ["*: noai"], ["max-snippet: 20, noai"],
    ["vlbert-downloader/0.1: noai"], ["otherbot: noindex, vlbert-downloader: noai"], ["otherbot: noai", "noai"],
    ["unavailable_after: 25 Jun 2030 15:00:00 GMT, noai"], ["max-image-preview:large; noai"], ["noindex;noai"],
    ["noai:"], ["vlbert-downloader: noai:"], ["unavailable_after: 25 Jun 2030 15:00:00 GMT; noai"],
    ["unavailable_after: Tue, 25 Jun 2030 15:00:00 GMT, noai"],
]  # fmt: skip
ALLOWING = [[], [""], ["noindex"], ["none"], ["all"], ["noaim"], ["x-noai: 1"], ["otherbot: noai"]]
ALLOWING += [["otherbot: none, noai"]]


def test_a_server_that_forbids_training_is_obeyed_and_other_directives_forbid_nothing(web: Web):
    cases = FORBIDDING + ALLOWING
    urls = [web.put(f"/{i}.jpg", robots(*headers)) for i, headers in enumerate(cases)]
    for headers, item in zip(cases, download(rows_of(urls), settings_for(web)), strict=True):
        if headers in FORBIDDING:
            assert (item.status, item.sample) == ("refused_by_robots", None), headers
            assert re.search("noai|noimageai", item.detail, re.IGNORECASE)
        else:
            assert item.status == "ok", headers
    assert len(web.requests) == len(cases)


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
