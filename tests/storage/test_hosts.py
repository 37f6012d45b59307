"""Slots of hosts, silent hosts, retries and deadlines: without a network, or with a simulated one."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from email.utils import formatdate

import pytest
import yarl
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Answer, Simulated, downloaded

from storage.collect.fetch import DownloadSettings
from storage.collect.hosts import Hosts


def run(work: Coroutine) -> None:
    """Run it; a slot that never comes ends as a TimeoutError."""
    asyncio.run(asyncio.wait_for(work, 5))


async def settle() -> None:
    """Let everything happen that can happen."""
    for _ in range(20):
        await asyncio.sleep(0)


class Crowd:
    """Tasks that each take a slot of a host and hold it until they are released or cancelled."""

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self.inside: list[str] = []
        self.order: list[str] = []
        self.tasks: list[asyncio.Task] = []
        self.exits: list[tuple[str, asyncio.Event]] = []

    def enter(self, *names: str) -> None:
        self.tasks += [asyncio.create_task(self._visit(name)) for name in names]

    async def _visit(self, name: str) -> None:
        async with self.hosts.slot(name):
            self.inside.append(name)
            self.order.append(name)
            exit = name, asyncio.Event()
            self.exits.append(exit)
            try:
                await exit[1].wait()
            finally:
                self.inside.remove(name)
                self.exits.remove(exit)

    def release(self, name: str) -> None:
        next(leave for who, leave in self.exits if who == name and not leave.is_set()).set()

    async def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_hosts_take_turns_though_the_list_is_sorted_by_host():
    async def work() -> None:
        crowd = Crowd(Hosts(at_once=4, per_host=2, breaker=2))
        crowd.enter(*"aaaaaabbbbbbc")
        await settle()
        assert sorted(crowd.inside) == ["a", "a", "b", "b"]
        crowd.release("a")
        await settle()
        assert sorted(crowd.inside) == ["a", "b", "b", "c"]  # c came last, and is before the other five of a
        while crowd.exits:
            crowd.release(crowd.exits[0][0])
            await settle()
        await asyncio.gather(*crowd.tasks)
        assert crowd.order[:6] == ["a", "a", "b", "b", "c", "a"]
        crowd.enter(*20 * "a", *"bc")
        await settle()
        assert sorted(crowd.inside) == ["a", "a", "b", "c"]  # a busy host keeps no slot from the others
        await crowd.cancel()

    run(work())


@pytest.mark.parametrize("ticks", range(5))
def test_a_cancelled_url_takes_no_slot_along(ticks: int):
    async def work() -> None:
        crowd = Crowd(Hosts(at_once=1, per_host=1, breaker=1))
        crowd.enter("a")
        await settle()
        crowd.enter(*"babb")
        await settle()
        crowd.release("a")
        for _ in range(ticks):  # after some, the next one has just been given the slot and does not know it yet
            await asyncio.sleep(0)
        for task in crowd.tasks[1:4]:
            task.cancel()
        await settle()
        crowd.release("b")
        await asyncio.gather(crowd.tasks[0], crowd.tasks[4])

    run(work())


def answer(hosts: Hosts, name: str, times: int = 1, seconds: float = 0.1) -> None:
    """Answers of the host to requests of now."""
    for _ in range(times):
        hosts.answered(name, f"http://{name}/known", asyncio.get_running_loop().time(), seconds)


async def in_flight(hosts: Hosts, name: str) -> int:
    """How many URLs of the host get a slot; all are gone again afterwards."""
    crowd = Crowd(hosts)
    crowd.enter(*100 * [name])
    await settle()
    count = len(crowd.inside)
    await crowd.cancel()
    return count


def test_a_host_is_silent_after_failures_in_a_row_until_it_answers():
    async def work() -> None:
        hosts = Hosts(at_once=64, per_host=64, breaker=2)
        assert await in_flight(hosts, "a") == 2  # few find out whether it answers
        hosts.failed("a")
        assert await in_flight(hosts, "a") == 1
        assert not hosts.silent("a")
        hosts.failed("a")
        assert hosts.silent("a")
        assert hosts.url_to_recheck("a") is None
        assert not hosts.silent("b")
        assert await in_flight(hosts, "a") == 8  # each with a short deadline
        answer(hosts, "a")
        assert not hosts.silent("a")
        assert await in_flight(hosts, "a") == 8
        assert await in_flight(Hosts(at_once=64, per_host=3, breaker=9), "a") == 3

    run(work())


def test_a_host_that_has_answered_is_rechecked_before_it_is_silent():
    async def work() -> None:
        hosts = Hosts(at_once=64, per_host=64, breaker=2)
        answer(hosts, "a")
        hosts.failed("a")
        assert hosts.url_to_recheck("a") is None
        hosts.failed("a")
        assert hosts.url_to_recheck("a") == "http://a/known"
        assert not hosts.silent("a")
        answer(hosts, "a")
        hosts.recheck_failed("a", "http://a/known")  # a moment late
        assert hosts.url_to_recheck("a") is None
        for _ in range(2):
            hosts.failed("a")
        assert not hosts.silent("a")
        hosts.recheck_failed("a", "http://a/known")
        assert hosts.silent("a")

    run(work())


def test_a_fast_host_gets_more_in_flight_and_one_that_slows_down_less():
    async def work() -> None:
        hosts = Hosts(at_once=200, per_host=64, breaker=2)
        answer(hosts, "a", 8)
        assert await in_flight(hosts, "a") == 8  # no URL waits for a slot
        crowd = Crowd(hosts)
        crowd.enter(*200 * ["a"])
        await settle()
        sizes = []
        for _ in range(30):
            answer(hosts, "a", len(crowd.inside))
            await settle()
            sizes.append(len(crowd.inside))
        assert sizes == sorted(sizes)
        assert sizes[0] == 9
        assert sizes[-1] == 64
        await crowd.cancel()
        answer(hosts, "a", 64, 0.19)  # within one and a half times as long, and 50 ms
        assert await in_flight(hosts, "a") == 64
        answer(hosts, "a", 64, 0.21)
        assert await in_flight(hosts, "a") == 32

    run(work())


def test_complaints_lower_the_urls_in_flight():
    async def work() -> None:
        hosts, now = Hosts(at_once=64, per_host=64, breaker=2), asyncio.get_running_loop().time
        answer(hosts, "a")
        before = now()
        await asyncio.sleep(0.01)
        hosts.overloaded("a", now())
        assert await in_flight(hosts, "a") == 4
        hosts.overloaded("a", before)  # in flight with the one before: the same complaint
        assert await in_flight(hosts, "a") == 4
        hosts.overloaded("a", now() + 1, must_wait=True)
        assert await in_flight(hosts, "a") == 1
        hosts.overloaded("a", now() + 1)
        assert await in_flight(hosts, "a") == 1
        answer(hosts, "b")
        for complaints, left in ((1, 8), (2, 4)):  # a bad page, and too many of them
            for _ in range(complaints):
                hosts.complained("b")
            answer(hosts, "b", 8 - (complaints == 1))
            assert await in_flight(hosts, "b") == left
        for _ in range(1000):
            hosts.failed("b")  # a URL that hangs says nothing of the others
        answer(hosts, "b")
        assert await in_flight(hosts, "b") == 4

    run(work())


# --- every URL is requested, and none of a host that answers is lost: under a simulated clock -------------------------


def dealt(urls: list[str], shards: int) -> list[list[str]]:
    """The URLs in so many shards, in order."""
    size = -(-len(urls) // shards)
    return [urls[start : start + size] for start in range(0, len(urls), size)]


def collected(urls: Sequence[str], serve: Callable[..., Answer], shards: int = 1, **changes: object) -> Simulated:
    return downloaded(dealt(list(urls), shards), serve, DownloadSettings(**changes))


def urls_of(*paths: object) -> list[str]:
    return [f"http://host.example/{path}" for path in paths]


def statuses_in(done: Simulated) -> list[str]:
    return [item.status for item in done.shards[0]]


@st.composite
def lists(draw: st.DrawFn) -> tuple[list[list[str]], dict[str, tuple], DownloadSettings]:
    """Shards of URLs, how each host behaves, and settings.

    A host answers from `begin` to `end`, its URL `/n` after as many seconds as `delays` has for it, None: never.
    """
    hosts, urls = {}, []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["answers", "answers", "hangs", "refuses", "begins", "ends"]))
        delay = st.none() | st.floats(0.01, draw(st.sampled_from([0.9, 0.9, 9.0])))
        delays = draw(st.lists(delay, min_size=1, max_size=20))
        begin = {"begins": draw(st.floats(1, 60)), "hangs": float("inf"), "refuses": float("inf")}.get(kind, 0.0)
        end = draw(st.floats(1, 20)) if kind == "ends" else float("inf")
        hosts[f"{kind}{number}.example:80"] = begin, end, delays, kind == "refuses"
        urls += [f"http://{kind}{number}.example/{i}" for i in range(len(delays))]
    urls = draw(st.permutations(urls))
    limits = {"concurrency": draw(st.sampled_from([2, 8, 64])), "per_host": draw(st.sampled_from([1, 8, 64]))}
    more = {"breaker": draw(st.integers(1, 3)), "second_pass": draw(st.sampled_from([0.0, 30.0])), "retries": 1}
    return dealt(urls, draw(st.integers(1, 4))), hosts, DownloadSettings(**limits, **more)


@given(lists())
@settings(max_examples=70)
def test_every_url_is_requested_and_none_of_a_host_that_answers_is_a_host_timeout(example: tuple):
    shards, hosts, limits = example

    def serve(url: yarl.URL, now: float, in_flight: int) -> Answer:
        begin, end, delays, refuses = hosts[f"{url.host}:80"]
        delay = delays[int(url.name)]
        if refuses:
            return Answer(refused=True)
        return Answer(delay if delay is not None and begin <= now and now + delay < end else None)

    done = downloaded(shards, serve, limits)
    assert set(done.network.counts) == {url for urls in shards for url in urls}
    assert all(done.network.most[host] <= limits.per_host for host in hosts)
    for items, ended in zip(done.shards, done.ends, strict=True):
        for item in items:
            url = yarl.URL(item.row.url)
            host = f"{url.host}:80"
            begin, end, delays, _ = hosts[host]
            delay = delays[int(url.name)]
            if end == float("inf") and any(moment < ended for moment in done.network.answered.get(host, ())):
                # It answers, if only since a while ago: whatever the order, its other URLs cost this one nothing.
                assert item.status != "host_timeout"
                if delay is not None and begin == 0:
                    assert item.status == "ok"
            if delay is not None and begin == 0 and end == float("inf") and delay < limits.deadline / 20:
                assert item.status == "ok"  # also with a short deadline
            if item.status == "host_timeout":
                assert not url.host.startswith("refuses")  # which says so itself: connect


@pytest.mark.parametrize("order", ["eight in a row", "by seed 13", "all first"])
def test_urls_that_hang_in_several_shards_cost_no_good_url_of_their_host(order: str):
    urls = [f"http://host.example/{number}{'/hangs' if number % 5 == 0 else ''}" for number in range(500)]
    if order == "by seed 13":
        random.Random(13).shuffle(urls)
    else:
        urls.sort(key=lambda url: not url.endswith("hangs"))
        if order == "eight in a row":  # at the head of each shard, behind good ones of the first
            hang, good = urls[:100], urls[100:]
            urls = [*good[:20], *(url for i in range(10) for url in (*hang[10 * i :][:10], *good[20 + 38 * i :][:38]))]
    done = collected(urls, lambda url, *_: Answer(None if url.name == "hangs" else 0.1), 5, second_pass=0)
    assert done.statuses == {"ok": 400, "timeout": 100}


@pytest.mark.parametrize(("seconds", "count", "hang"), [(1.2, 5, 20), (6, 5, 3), (6, 1, 40)])
def test_a_host_too_slow_for_the_short_deadline_loses_no_url_to_its_first_ones_that_hang(
    seconds: float, count: int, hang: int
):
    shards = dealt([f"http://slow.example/{number}" for number in range(100)], count)
    for number, shard in enumerate(shards):  # others, so that the network is seen to work
        shard += [f"http://good{number}.example/{row}" for row in range(20)]
    serve = lambda url, *_: Answer(  # noqa: E731
        0.1 if url.host.startswith("good") else None if int(url.name) < hang else seconds
    )
    statuses = downloaded(shards, serve, DownloadSettings()).statuses
    assert statuses == {"ok": 100 - hang + 20 * count, "timeout": hang}


@pytest.mark.parametrize(("hosts", "rows", "bound"), [(1, 500, 100), (50, 20, 60)])
def test_hosts_that_never_answer_cost_no_more_than_is_stated(hosts: int, rows: int, bound: float):
    urls = [f"http://dead{host}.example/{row}" for host in range(hosts) for row in range(rows)]
    urls += [f"http://good{number % 50}.example/{number}" for number in range(500)]
    random.Random(0).shuffle(urls)
    serve = lambda url, *_: Answer(0.1 if url.host.startswith("good") else None)  # noqa: E731
    done = collected(urls, serve, 5)
    assert done.statuses["ok"] == 500
    assert done.statuses["timeout"] + done.statuses["host_timeout"] == hosts * rows
    assert len(done.network.counts) == len(urls)
    assert done.seconds < bound


def test_a_host_that_comes_back_gets_all_its_urls_and_one_that_goes_away_is_not_waited_for_one_by_one():
    urls = urls_of(*range(500))
    assert collected(urls, lambda url, now, _: Answer(0.1 if now > 30 else None), 5).statuses == {"ok": 500}
    away = collected(urls, lambda url, now, _: Answer(0.1 if now < 2 else None), 5)
    assert len(away.network.counts) == 500
    assert away.statuses.keys() <= {"ok", "timeout", "host_timeout"}
    assert away.seconds < 120  # not 20 s for each eight


@pytest.mark.parametrize("silent", [2, 3])
def test_a_host_that_recovers_gets_all_its_urls_in_the_second_pass(silent: int):
    count = itertools.count()
    done = collected(urls_of(*range(10)), lambda *_: Answer(None if next(count) < silent else 0.1))
    assert done.statuses == {"ok": 10}
    assert len(done.network.requests) <= 10 + 2 * silent
    # Too late and too slow for a short deadline: the one URL with a full deadline notices.
    assert collected(urls_of(*range(10)), lambda _, now, __: Answer(3 if now > 10.5 else None)).statuses == {"ok": 10}


def test_a_short_deadline_is_followed_by_another_attempt_if_its_host_answers_meanwhile():
    def serve(url: yarl.URL, now: float, _: int) -> Answer:
        if url.host == "busy.example":
            return Answer(0.1) if now > 29 else Answer(0.1, 429, headers={"Retry-After": "30"})
        if url.host == "slow.example":  # its last URL leads to the other one's host when that is back
            return Answer(4.5, 302, headers={"Location": "http://back.example/3"}) if url.name == "3" else Answer(4.5)
        return Answer(0.1 if now > 16 else None)

    waiting = [*(f"http://back.example/{number}" for number in range(3)), "http://busy.example/0"]
    slow = [f"http://slow.example/{number}" for number in range(4)]
    done = downloaded([waiting, slow], serve, DownloadSettings(per_host=1, deadline=10, read_timeout=5))
    assert done.statuses == {"ok": 7, "timeout": 1}  # the one that had its full deadline while it was away


def test_a_fast_host_is_downloaded_at_its_pace_and_an_overloaded_one_is_not_pressed():
    urls = urls_of(*range(800))
    fast = collected(urls, lambda url, *_: Answer(0.2 if int(url.name) % 100 else None), 2, second_pass=0)
    assert fast.statuses == {"ok": 792, "timeout": 8}
    assert fast.network.most["host.example:80"] == 64
    assert fast.seconds < 22  # eight at a time: 40
    urls = urls[:400]
    # It does 100 a second: more in flight only make them wait.
    queue = collected(urls, lambda _, __, now: Answer(max(0.1, now / 100)), 2)
    assert queue.statuses == {"ok": 400}
    assert queue.network.most["host.example:80"] < 40
    refusals = 0

    def at_most_20(_: yarl.URL, __: float, now: int) -> Answer:
        nonlocal refusals
        refusals += now > 20
        return Answer(0.1, 429 if now > 20 else 200)

    assert collected(urls, at_most_20, 2).statuses == {"ok": 400}
    assert refusals < 50


def by_url(**answers: Answer | list[Answer]) -> Callable[..., Answer]:
    """An answer for each first part of a path; of a list one by one, and the last one stays."""

    def serve(url: yarl.URL, *_: object) -> Answer:
        found = answers.get(url.parts[1], Answer())
        return found if isinstance(found, Answer) else found.pop(0) if len(found) > 1 else found[0]

    return serve


def test_a_host_that_drips_gets_a_short_deadline_for_most_of_its_urls():
    done = collected(urls_of(*range(30)), lambda *_: Answer(0.1, body_seconds=60))
    assert set(done.statuses) == {"timeout", "host_timeout"}
    assert done.statuses["timeout"] <= 5
    assert len(done.network.counts) == 30
    short = next(item for item in done.shards[0] if item.status == "host_timeout")
    assert "1 s, and host.example:80" in short.detail


def test_a_url_that_a_host_answered_is_requested_again_before_the_host_counts_as_silent():
    urls = urls_of("0", *(f"hangs/{i}" for i in range(10)), "1", "2", "3")
    done = collected(urls, by_url(hangs=Answer(None)), concurrency=2, second_pass=0)
    assert statuses_in(done) == ["ok", *10 * ["timeout"], *3 * ["ok"]]
    assert all(done.network.counts[url] == 1 for url in urls[1:11])
    assert 2 <= done.network.counts[urls[0]] <= 6  # after two that hang, once


def redirects(to: Callable[[float], Answer]) -> Callable[..., Answer]:
    """host.example redirects its numbers to target.example, which answers by the time."""

    def serve(url: yarl.URL, now: float, _: int) -> Answer:
        if url.host == "target.example":
            return to(now)
        location = {"Location": f"http://target.example{url.path}"}
        return Answer() if url.path == "/good" else Answer(0.1, 302, headers=location)

    return serve


def test_a_silent_host_behind_redirects_is_no_fault_of_the_host_that_redirects():
    urls = urls_of(*range(8), "good")
    done = collected(urls, redirects(lambda now: Answer(0.1 if now > 12 else None)), per_host=2)
    assert done.statuses == {"ok": 9}
    assert len([url for url, _ in done.network.requests if "target" in url]) <= 16
    done = collected(urls, redirects(lambda now: Answer(None)), per_host=2, second_pass=0)
    found = statuses_in(done)
    assert found[-1] == "ok"
    assert Counter(found[:-1])["timeout"] in (2, 3, 4)  # two, one on its way, and one at the end
    assert Counter(found[:-1])["host_timeout"] == 8 - Counter(found[:-1])["timeout"]
    assert all(done.network.counts[f"http://target.example/{i}"] for i in range(8))


# --- attempts, pauses and the deadline of one URL ---------------------------------------------------------------------


@pytest.mark.parametrize("transient", [{"status": 503}, {"status": 429}, {"seconds": None}, {"refused": True}], ids=str)
def test_a_transient_failure_is_requested_once_more_when_all_others_are_done(transient: dict):
    urls = urls_of("first", *range(5))
    done = collected(urls, by_url(first=[Answer(**transient), Answer()]), concurrency=1, retries=0)
    assert done.statuses == {"ok": 6}
    assert [url for url, _ in done.network.requests] == [*urls, urls[0]]


def test_attempts_are_counted_and_a_timeout_is_not_retried_at_once():
    (url,) = urls_of("a")
    done = collected([url], by_url(a=Answer(None)), second_pass=0)
    assert (statuses_in(done), done.network.counts[url]) == (["timeout"], 1)
    done = collected([url], by_url(a=Answer(status=503)))
    assert (statuses_in(done), done.network.counts[url]) == (["http_503"], 4)
    assert done.shards[0][0].detail.endswith(" (4 attempts)")
    done = collected([url], by_url(a=[Answer(status=503), Answer(status=502)]), second_pass=0)
    assert (statuses_in(done), done.network.counts[url]) == (["http_502"], 3)  # the last failure counts
    answers = [Answer(None), Answer(status=503), Answer()]
    assert statuses_in(collected([url], by_url(a=answers))) == ["http_503"]


def test_a_long_retry_after_takes_no_slot_and_is_waited_for():
    urls = urls_of("later", "other")
    answers = [Answer(status=429, headers={"Retry-After": "20"}), Answer()]
    done = collected(urls, by_url(later=answers), concurrency=1)
    (first, one), (second, two), (third, three) = done.network.requests
    assert (done.statuses, [first, second, third]) == ({"ok": 2}, [*urls, urls[0]])
    assert two - one < 1
    assert three - one >= 20


@pytest.mark.parametrize(
    ("text", "statuses", "least", "most"),
    [
        ("1", ["ok"], 1, 3),
        ("31", ["http_503"], 0, 1),
        ("Fri, 31 Dec 2100 23:59:59 GMT", ["http_503"], 0, 1),
        *((text, ["ok"], 0, 1) for text in ("soon", "-5", "", "1e3", "\u00b2", "Mon, 01 Jan 2024 00:00:00 GMT")),
        *(
            (text, ["ok", "http_503"], 0, 1)
            for text in (
                "Mon, 01 Jan 2024 00:00:00 +99999999999999999999",
                "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
                "Fri, 31 Dec 9999 23:59:59 -2359",
                "Mon, 01 Jan 0001 00:00:00",
                "9" * 400,
            )
        ),
    ],
)
def test_retry_after_is_a_number_or_a_date_and_anything_else_is_ignored(
    text: str, statuses: list[str], least: float, most: float
):
    answers = [Answer(status=503, headers={"Retry-After": text}), Answer()]
    done = collected(urls_of("a"), by_url(a=answers))
    assert statuses_in(done)[0] in statuses
    assert least <= done.seconds <= most


def test_a_date_as_retry_after_is_waited_for():
    answers = [Answer(status=503, headers={"Retry-After": formatdate(time.time() + 9, usegmt=True)}), Answer()]
    done = collected(urls_of("a"), by_url(a=answers))
    assert done.statuses == {"ok": 1}
    assert 4 < done.seconds < 11


def test_all_attempts_share_the_deadline():
    (url,) = urls_of("a")
    drips = Answer(0.1, body_seconds=60)
    done = collected([url], by_url(a=drips), deadline=10)
    assert (statuses_in(done), done.network.counts[url]) == (["timeout"], 1)  # its time is used up in the first pass
    for read_timeout, left in ((4, 6), (8, 4)):  # of 12 s, half, or what the first pass left
        done = collected([url], by_url(a=[Answer(None), drips]), deadline=12, read_timeout=read_timeout)
        assert done.shards[0][0].detail == f"not done after {left} s (2 attempts)"
    done = collected([url], lambda *_: Answer(status=503), retries=50, deadline=8, second_pass=0)
    assert statuses_in(done)[0] in ("http_503", "timeout")
    assert done.seconds <= 8
    done = collected([url], lambda *_: Answer(0.3, 302, headers={"Location": "/a"}), deadline=0.7, second_pass=0)
    assert statuses_in(done) == ["timeout"]
