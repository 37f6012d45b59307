"""Whose turn it is, which hosts are silent, and which bodies may grow: no network, or a simulated one."""

import asyncio
import random
from collections.abc import Coroutine

import pytest
import yarl
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Answer, downloaded

from storage.download import DownloadSettings
from storage.hosts import ByteBudget, Hosts


def run(work: Coroutine) -> object:
    """Run it; a turn that never comes ends as a TimeoutError."""
    return asyncio.run(asyncio.wait_for(work, 5))


async def settle() -> None:
    """Let everything happen that can happen."""
    for _ in range(20):
        await asyncio.sleep(0)


class Crowd:
    """Tasks that each take a turn of a host and hold it until they are let go."""

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self.inside: list[str] = []
        self.order: list[str] = []
        self.tasks: list[asyncio.Task] = []
        self.exits: list[tuple[str, asyncio.Event]] = []

    def come(self, *names: str) -> None:
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

    def let_go(self, name: str) -> None:
        next(leave for who, leave in self.exits if who == name and not leave.is_set()).set()

    async def ended(self) -> list[str]:
        """What became of each: "" or the status that it was refused with."""
        ends = await asyncio.gather(*self.tasks, return_exceptions=True)
        return [getattr(end, "status", "" if end is None else repr(end)) for end in ends]


def test_hosts_take_turns_though_the_list_is_sorted_by_host():
    async def work() -> None:
        hosts = Hosts(at_once=4, per_host=2, breaker=2)
        crowd = Crowd(hosts)
        crowd.come(*"aaaaaabbbbbbc")
        await settle()
        assert sorted(crowd.inside) == ["a", "a", "b", "b"]
        crowd.let_go("a")
        await settle()
        assert sorted(crowd.inside) == ["a", "b", "b", "c"]  # c came last, and is before the other five of a
        while crowd.exits:
            crowd.let_go(crowd.exits[0][0])
            await settle()
        assert await crowd.ended() == 13 * [""]
        assert crowd.order[:6] == ["a", "a", "b", "b", "c", "a"]

    run(work())


def test_a_busy_host_keeps_no_place_from_the_others():
    async def work() -> None:
        crowd = Crowd(Hosts(at_once=10, per_host=2, breaker=2))
        crowd.come(*"aaaaaaaaaaaaaaaaaaaa", *"bcdefgh")
        await settle()
        assert sorted(crowd.inside) == list("aabcdefgh")
        for task in crowd.tasks:
            task.cancel()
        await crowd.ended()

    run(work())


def answer(hosts: Hosts, name: str, times: int = 1, seconds: float = 0.1) -> None:
    """Answers of the host to requests of now."""
    for _ in range(times):
        hosts.answered(name, f"http://{name}/known", asyncio.get_running_loop().time(), seconds)


async def in_flight(hosts: Hosts, name: str) -> int:
    """How many URLs of the host have room; all are gone again afterwards."""
    crowd = Crowd(hosts)
    crowd.come(*100 * [name])
    await settle()
    for task in crowd.tasks:
        task.cancel()
    await crowd.ended()
    return max(len(crowd.inside), len(crowd.order))


def test_a_host_that_never_answered_has_few_in_flight_and_one_that_has_has_more():
    async def work() -> None:
        hosts = Hosts(at_once=64, per_host=64, breaker=2)
        assert await in_flight(hosts, "a") == 2
        hosts.failed("a")
        assert await in_flight(hosts, "a") == 1
        answer(hosts, "a")
        assert await in_flight(hosts, "a") == 8
        assert await in_flight(Hosts(at_once=64, per_host=3, breaker=9), "a") == 3

    run(work())


def test_silence_begins_after_failures_in_a_row_and_ends_with_any_answer():
    async def work() -> None:
        hosts = Hosts(at_once=64, per_host=64, breaker=2)
        hosts.failed("a")
        assert not hosts.silent("a")
        hosts.failed("a")
        assert hosts.silent("a")
        assert hosts.url_to_recheck("a") is None
        assert not hosts.silent("b")
        assert await in_flight(hosts, "a") == 8  # each with a short deadline
        answer(hosts, "a")
        assert not hosts.silent("a")

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
        assert await in_flight(hosts, "a") == 8  # nobody waits for more
        crowd = Crowd(hosts)
        crowd.come(*200 * ["a"])
        await settle()
        sizes = []
        for _ in range(30):
            answer(hosts, "a", len(crowd.inside))
            await settle()
            sizes.append(len(crowd.inside))
        assert sizes == sorted(sizes)
        assert sizes[0] == 9
        assert sizes[-1] == 64
        for task in crowd.tasks:
            task.cancel()
        await crowd.ended()
        answer(hosts, "a", 64, 0.19)  # within one and a half times as long, and 50 ms
        assert await in_flight(hosts, "a") == 64
        answer(hosts, "a", 64, 0.21)
        assert await in_flight(hosts, "a") == 32

    run(work())


def test_what_a_host_says_of_too_many_lowers_what_it_gets():
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


@pytest.mark.parametrize("ticks", range(5))
def test_who_leaves_the_queue_takes_no_place_along(ticks: int):
    async def work() -> None:
        crowd = Crowd(Hosts(at_once=1, per_host=1, breaker=1))
        crowd.come("a")
        await settle()
        crowd.come(*"babb")
        await settle()
        crowd.let_go("a")
        for _ in range(ticks):  # after some, the next one has just been given the turn and does not know it yet
            await asyncio.sleep(0)
        for task in crowd.tasks[1:4]:
            task.cancel()
        await settle()
        crowd.let_go("b")
        assert (await crowd.ended())[::4] == ["", ""]

    run(work())


# --- no URL of a host that answers is lost, and each is asked: under a simulated clock --------------------------------


def dealt(urls: list[str], shards: int) -> list[list[str]]:
    """The URLs in so many shards, in order."""
    size = -(-len(urls) // shards)
    return [urls[start : start + size] for start in range(0, len(urls), size)]


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
@settings(max_examples=100)
def test_no_url_of_a_host_that_answers_ends_as_host_timeout_and_every_url_is_asked(example: tuple):
    shards, hosts, limits = example

    def serve(url: yarl.URL, now: float, in_flight: int) -> Answer:
        begin, end, delays, refuses = hosts[f"{url.host}:80"]
        delay = delays[int(url.name)]
        if refuses:
            return Answer(refused=True)
        return Answer(delay if delay is not None and begin <= now and now + delay < end else None)

    done = downloaded(shards, serve, limits)
    assert set(done.network.asked) == {url for urls in shards for url in urls}
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
    done = downloaded(
        dealt(urls, 5), lambda url, *_: Answer(None if url.name == "hangs" else 0.1), DownloadSettings(second_pass=0)
    )
    assert done.statuses == {"ok": 400, "timeout": 100}


@pytest.mark.parametrize("seconds", [1.2, 6])
@pytest.mark.parametrize(("count", "hang"), [(5, 3), (5, 6), (5, 20), (1, 40)])
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


@pytest.mark.parametrize(("hosts", "rows", "bound"), [(1, 500, 100), (50, 20, 60), (200, 1, 80)])
def test_hosts_that_never_answer_cost_no_more_than_is_stated(hosts: int, rows: int, bound: float):
    urls = [f"http://dead{host}.example/{row}" for host in range(hosts) for row in range(rows)]
    urls += [f"http://good{number % 50}.example/{number}" for number in range(500)]
    random.Random(0).shuffle(urls)
    serve = lambda url, *_: Answer(0.1 if url.host.startswith("good") else None)  # noqa: E731
    done = downloaded(dealt(urls, 5), serve, DownloadSettings())
    assert done.statuses["ok"] == 500
    assert done.statuses["timeout"] + done.statuses["host_timeout"] == hosts * rows
    assert len(done.network.asked) == len(urls)
    assert done.seconds < bound


def test_a_host_that_comes_back_gets_all_its_urls_and_one_that_goes_away_is_not_waited_for_one_by_one():
    urls = [f"http://host.example/{number}" for number in range(1000)]
    back = downloaded(dealt(urls, 5), lambda url, now, _: Answer(0.1 if now > 30 else None), DownloadSettings())
    assert back.statuses["ok"] == 1000
    away = downloaded(dealt(urls, 5), lambda url, now, _: Answer(0.1 if now < 2 else None), DownloadSettings())
    assert len(away.network.asked) == 1000
    assert away.statuses["ok"] + away.statuses["timeout"] + away.statuses["host_timeout"] == 1000
    assert away.seconds < 200  # not 20 s for each eight


def test_a_slow_host_that_recovers_is_noticed_by_the_one_url_with_a_full_deadline():
    urls = [f"http://host.example/{number}" for number in range(10)]
    # Too late and too slow for a short deadline.
    done = downloaded([urls], lambda _, now, __: Answer(3 if now > 10.5 else None), DownloadSettings())
    assert done.statuses == {"ok": 10}


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


def test_one_fast_host_is_downloaded_at_its_pace_and_one_that_is_overloaded_is_not_pressed():
    urls = [f"http://host.example/{number}" for number in range(800)]
    hangs = set(random.Random(13).sample(range(800), 8))
    fast = downloaded(
        dealt(urls, 2), lambda url, *_: Answer(None if int(url.name) in hangs else 0.2), DownloadSettings(second_pass=0)
    )
    assert fast.statuses == {"ok": 792, "timeout": 8}
    assert fast.network.most["host.example:80"] == 64
    assert fast.seconds < 20  # eight at a time: 40
    # It does 100 a second: more in flight only make them wait.
    queue = downloaded(dealt(urls, 2), lambda _, __, now: Answer(max(0.1, now / 100)), DownloadSettings())
    assert queue.statuses == {"ok": 800}
    assert queue.network.most["host.example:80"] < 40
    refusals = 0

    def at_most_20(_: yarl.URL, __: float, now: int) -> Answer:
        nonlocal refusals
        refusals += now > 20
        return Answer(0.1, 429 if now > 20 else 200)

    told = downloaded(dealt(urls, 2), at_most_20, DownloadSettings())
    assert told.statuses == {"ok": 800}
    assert refusals < 50


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.integers(8, 30), st.sets(st.integers(0, 39)))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_bodies_wait_for_a_full_budget_and_all_come_to_an_end(sizes: list[int], limit: int, cancelled: set[int]):
    peak = 0

    async def body(budget: ByteBudget, size: int) -> None:
        nonlocal peak
        with budget.share() as share:
            while share.held < size:
                await share.wait_to_grow()
                share.grow(1)
                peak = max(peak, budget.held)
                await asyncio.sleep(0)

    async def work() -> None:
        budget = ByteBudget(limit)
        tasks = [asyncio.create_task(body(budget, size)) for size in sizes]
        for _ in range(3):
            await asyncio.sleep(0)
        for number in cancelled & set(range(len(tasks))):
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.held == 0

    run(work())
    assert min(limit, sum(sizes), 3) <= peak <= limit + max(sizes)


def test_only_the_oldest_body_grows_past_the_limit():
    async def work() -> None:
        budget = ByteBudget(100)
        with budget.share() as younger:
            with budget.share() as oldest:
                oldest.grow(10)
                younger.grow(90)
                assert (oldest.may_grow, younger.may_grow) == (True, False)
                waiting = asyncio.create_task(younger.wait_to_grow())
                oldest.grow(500)
                await settle()
                assert not waiting.done()
            await settle()
            assert waiting.done()
            assert budget.held == 90

    run(work())
