"""Slots of hosts, silent hosts, retries and deadlines: without a network, or with a simulated one."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import yarl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated import Answer, Simulated, downloaded

from storage.collect.fetch import DownloadSettings
from storage.collect.hosts import Hosts
from storage.collect.statuses import Refused, Status


@pytest.mark.parametrize("ticks", range(5))
def test_hosts_take_turns_and_a_cancelled_url_takes_no_slot_along(ticks: int):
    """The list is sorted by host; URLs are cancelled before, while and after they are given a slot."""
    order = []

    async def visit(hosts: Hosts, name: str) -> None:
        async with hosts.slot(name):
            order.append(name)
            await asyncio.sleep(0)

    async def work() -> None:
        hosts = Hosts(at_once=2)
        tasks = [asyncio.create_task(visit(hosts, name)) for name in "aaaaaabbbbbbc"]
        for _ in range(ticks):
            await asyncio.sleep(0)
        for task in tasks[1:3]:
            task.cancel()
        await asyncio.gather(*tasks[:1], *tasks[3:])

    asyncio.run(asyncio.wait_for(work(), 5))
    assert order.index("c") < 6
    assert Counter(order)["b"] == 6


def test_failures_and_refusals_count_once_for_what_was_in_flight_together():
    async def work() -> None:
        hosts, refused = Hosts(at_once=64), Refused(Status("http_429"), "")
        host, now = hosts.host("a"), asyncio.get_running_loop().time()
        hosts.record_end("a", "/", now, 0.1)
        for _ in range(8):
            hosts.record_end("a", "/", now, 0.1, refused)
        assert host.limit == 4
        hosts.record_end("a", "/", asyncio.get_running_loop().time(), 0.1, refused)
        assert host.limit == 2
        for _ in range(9):  # it has answered since they began
            hosts.record_end("a", "/", now, None, Refused(Status.TIMEOUT, ""))
        assert not hosts.is_silent("a")
        for _ in range(2):
            hosts.record_end("a", "/", asyncio.get_running_loop().time(), None, Refused(Status.TIMEOUT, ""))
        assert hosts.is_silent("a")

    asyncio.run(work())


def dealt(urls: list[str], shards: int) -> list[list[str]]:
    """The URLs in so many shards, in order."""
    size = -(-len(urls) // shards)
    return [urls[start : start + size] for start in range(0, len(urls), size)]


def collected(urls: Sequence[str], serve: Callable[..., Answer], shards: int = 1, **changes: object) -> Simulated:
    return downloaded(dealt(list(urls), shards), serve, DownloadSettings(**changes))


def urls_of(*paths: object) -> list[str]:
    return [f"http://host.example/{path}" for path in paths]


def urls_at(places: str) -> list[str]:
    """The URLs of places such as `a/1`."""
    return [f"http://{host}.example/{number}" for host, number in (place.split("/") for place in places.split())]


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
    limits = DownloadSettings(concurrency=draw(st.sampled_from([1, 2, 8, 64])), retries=draw(st.integers(0, 2)))
    return dealt(urls, draw(st.integers(1, 4))), hosts, limits


# The host `a` answers the third shard while the first still waits for another host.
_MEANWHILE = (
    [
        urls_at("b/0 a/0 a/1 c/0 a/3 a/4 a/5 a/6 a/7"),
        urls_at("a/8 a/9 a/2 d/0 d/1 d/2 d/3 d/4 d/5"),
        urls_at("a/10 d/6 d/7 d/8 d/9 d/10 d/11"),
    ],
    {
        f"{host}.example:80": (0.0, float("inf"), [0.5 if number == answered else None for number in range(12)], False)
        for host, answered in {"a": 10, "b": None, "c": None, "d": 4}.items()
    },
    DownloadSettings(concurrency=1, retries=0),
)


@example(_MEANWHILE)
@given(lists())
@settings(max_examples=70)
def test_no_url_of_a_host_that_answers_is_a_host_timeout_and_every_other_one_is_requested(case: tuple):
    shards, hosts, limits = case

    def serve(url: yarl.URL, now: float, in_flight: int) -> Answer:
        begin, end, delays, refuses = hosts[f"{url.host}:80"]
        delay = delays[int(url.name)]
        if refuses:
            return Answer(refused=True)
        return Answer(delay if delay is not None and begin <= now and now + delay < end else None)

    done = downloaded(shards, serve, limits)
    assert all(done.network.most[host] <= limits.concurrency for host in hosts)
    for items, ended in zip(done.shards, done.ends, strict=True):
        for item in items:
            url = yarl.URL(item.url)
            host = f"{url.host}:80"
            begin, end, delays, _ = hosts[host]
            delay = delays[int(url.name)]
            assert (item.status == "host_timeout") or done.network.counts[item.url]
            if end == float("inf") and any(moment < ended for moment in done.network.answered.get(host, ())):
                # It answers, if only since a while ago: whatever the order, its other URLs cost this one nothing.
                assert item.status != "host_timeout"
                if delay is not None and begin == 0:
                    assert item.status == "ok"


@pytest.mark.parametrize(("hosts", "rows", "bound"), [(1, 5000, 31), (50, 20, 45)])
@pytest.mark.parametrize("dead", [Answer(None), Answer(refused=True)], ids=["hangs", "refuses"])
def test_hosts_that_never_answer_cost_no_more_than_is_stated(hosts: int, rows: int, bound: float, dead: Answer):
    urls = [f"http://dead{host}.example/{row}" for host in range(hosts) for row in range(rows)]
    urls += [f"http://good{number % 50}.example/{number}" for number in range(500)]
    random.Random(0).shuffle(urls)
    done = collected(urls, lambda url, *_: Answer() if url.host.startswith("good") else dead, 5)
    assert done.statuses["ok"] == 500
    assert done.statuses.keys() == {"ok", "connect" if dead.refused else "timeout", "host_timeout"}
    assert max(Counter(yarl.URL(url).host for url, _ in done.network.requests if "dead" in url).values()) < 40
    assert done.seconds < bound


def test_a_host_that_comes_back_gets_all_its_urls_and_one_that_goes_away_is_not_waited_for_one_by_one():
    urls = urls_of(*range(500))
    back = collected(urls, lambda url, now, _: Answer(0.1 if now >= 10 else None), 5).statuses
    assert back == {"ok": 500}
    gone = collected(urls, lambda url, now, _: Answer(None if 1 <= now < 26 else 0.1), 5).statuses
    assert gone["ok"] > 480
    away = collected(urls, lambda url, now, _: Answer(0.1 if now < 1 else None), 5)
    assert away.statuses.keys() == {"ok", "timeout", "host_timeout"}
    assert away.seconds < 60  # not 10 s for each eight


def mixed(parts: int, recovers: bool, wait: str) -> tuple[list[str], Callable[..., Answer], Counter[str]]:
    """4,000 good URLs of one host among 1,090 that hang or are refused, and the statuses they should get; or a part.

    Those refused with 429 or 503 are served when they are asked again, or never.
    """
    wanted = Counter(ok=4000, timeout=50, http_404=400, http_429=320, http_503=320)
    wanted = Counter({status: count // parts for status, count in wanted.items()})
    kinds = list(wanted.elements())
    random.Random(0).shuffle(kinds)
    asked = Counter()

    def serve(url: yarl.URL, *_: object) -> Answer:
        kind = kinds[int(url.name)]
        asked[url.name] += 1
        if kind == "timeout":
            return Answer(None)
        if kind == "ok" or (recovers and asked[url.name] > 1 and kind in ("http_429", "http_503")):
            return Answer(0.003)
        return Answer(0.003, int(kind[5:]), headers={"Retry-After": wait} if kind == "http_429" else {})

    if recovers:
        wanted["ok"] += wanted.pop("http_429") + wanted.pop("http_503")
    return urls_of(*range(len(kinds))), serve, wanted


@pytest.mark.parametrize(
    ("parts", "recovers", "wait", "bound"),
    [(1, False, "1", 40), (5, False, "20", 60), (5, False, "soon", 40), (5, True, "1", 60)],
)
def test_bad_urls_of_a_host_hold_up_none_of_its_good_ones(parts: int, recovers: bool, wait: str, bound: float):
    """20 s of it are those of a URL that hangs in both passes. One URL after another, all took 600 s, a fifth 140 s."""
    urls, serve, wanted = mixed(parts, recovers, wait)
    done = collected(urls, serve, 5)
    assert done.statuses == wanted
    assert done.seconds < bound


@pytest.mark.parametrize("wait", ["", "1", "3"])
@pytest.mark.parametrize("rate", [2, 5, 20])
def test_a_host_that_serves_so_many_a_second_loses_no_url_and_is_not_pressed(rate: int, wait: str):
    """With a token bucket, as nginx, Apache and the CDNs have one."""
    tokens, last = float(rate), 0.0

    def serve(_: yarl.URL, now: float, __: int) -> Answer:
        nonlocal tokens, last
        tokens, last = min(rate, tokens + (now - last) * rate), now
        tokens -= (served := tokens >= 1)
        return Answer(0.05, 200 if served else 429, headers={} if served or not wait else {"Retry-After": wait})

    done = collected(urls_of(*range(400)), serve, 5)
    assert done.statuses == {"ok": 400}
    assert done.seconds < 3 * 400 / rate
    assert done.network.counts.total() < (1000 if wait != "3" else 4000)


@pytest.mark.parametrize("stalls", [[2.0], [0.05, 12.0, 30.0]], ids=str)
@pytest.mark.parametrize("second_pass", [False, True])
def test_time_in_which_this_process_did_not_run_is_charged_to_no_url(stalls: list[float], second_pass: bool):
    """It stops for 25 s at such times. What was sent meanwhile is lost, as with a server whose own patience is less."""
    left = [10.0 + stall if second_pass else stall for stall in stalls]

    def serve(url: yarl.URL, now: float, _: int) -> Answer:
        if left and now >= left[0]:
            left.pop(0)
            asyncio.get_running_loop().pass_time(25)
            return Answer(None)
        hangs = second_pass and now < 9 and int(url.name) % 2
        return Answer(None if hangs else 0.05 + 0.2 * (int(url.name) % 10))

    done = collected(urls_of(*range(200)), serve, 2)
    assert done.statuses == {"ok": 200}
    assert not left


def test_a_fast_host_is_downloaded_at_its_pace_and_an_overloaded_one_is_not_pressed():
    urls = urls_of(*range(800))
    fast = collected(urls, lambda url, *_: Answer(0.2 if int(url.name) % 100 else None), 2, retries=0)
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


def test_after_a_moment_of_overload_a_host_is_soon_at_its_pace_again():
    late = []

    def serve(_: yarl.URL, now: float, in_flight: int) -> Answer:
        late.extend([in_flight] if 4.6 < now < 5 else [])
        return Answer(0.1, 503 if 3 < now < 3.3 else 200)

    assert collected(urls_of(*range(3000)), serve).statuses == {"ok": 3000}
    assert max(late) > 50  # by one a round it would be at 48


def test_the_lag_of_a_busy_process_is_not_the_host_s():
    late = []

    def serve(_: yarl.URL, now: float, in_flight: int) -> Answer:
        late.append(in_flight)
        if len(late) > 1000:
            asyncio.get_running_loop().pass_time(0.02)
        return Answer(0.1)

    assert collected(urls_of(*range(3000)), serve).statuses == {"ok": 3000}
    assert max(late[-500:]) > 50


def test_a_host_that_slows_down_gets_fewer_urls_at_once():
    late = []

    def serve(_: yarl.URL, now: float, in_flight: int) -> Answer:
        if now > 5:
            late.append(in_flight)
        return Answer(0.1 if now < 1 else in_flight / 20)

    assert collected(urls_of(*range(600)), serve).statuses == {"ok": 600}
    assert late
    assert max(late) < 8


def by_url(**answers: Answer | list[Answer]) -> Callable[..., Answer]:
    """An answer for each first part of a path; of a list one by one, and the last one stays."""

    def serve(url: yarl.URL, *_: object) -> Answer:
        found = answers.get(url.parts[1], Answer())
        return found if isinstance(found, Answer) else found.pop(0) if len(found) > 1 else found[0]

    return serve


def test_a_url_that_a_host_answered_is_requested_again_before_the_host_is_given_up():
    urls = urls_of("0", *(f"hangs/{i}" for i in range(10)), "1", "2", "3")
    done = collected(urls, by_url(hangs=Answer(None)), concurrency=2, retries=0)
    assert statuses_in(done) == ["ok", *10 * ["timeout"], *3 * ["ok"]]
    assert done.network.counts[urls[0]] == 2


@pytest.mark.parametrize(
    ("transient", "at_once"), [({"status": 429}, 3), ({"seconds": None}, 1), ({"refused": True}, 1)], ids=str
)
def test_a_transient_failure_is_requested_once_more_when_all_others_are_done(transient: dict, at_once: int):
    urls = urls_of("first", *range(5))
    retries = 2 if "status" in transient else 1
    answers = [*at_once * [Answer(**transient)], Answer()]
    done = collected(urls, by_url(first=answers), concurrency=1, retries=retries)
    assert done.statuses == {"ok": 6}
    if "refused" not in transient:  # after which it is requested at once
        assert [url for url, _ in done.network.requests] == [*at_once * urls[:1], *urls[1:], urls[0]]


def test_urls_that_hang_give_up_their_places_even_if_no_other_url_ends():
    urls = urls_of("first", *(f"hangs/{i}" for i in range(8)), *range(100))
    done = collected(urls, by_url(hangs=Answer(None)), retries=0)
    assert done.statuses == {"ok": 101, "timeout": 8}
    assert done.network.requests[-1][1] < 5  # not after the 10 s in which they hang


NOT_NUMBERS = ("\u00b2", "Fri, 31 Dec 2100 23:59:59 GMT")


def test_a_failure_is_retried_so_often_and_a_timeout_not_at_once():
    (url,) = urls_of("a")
    for answers, retries, status, count in (
        ([Answer(None)], 0, "timeout", 1),
        ([Answer(status=503)], 2, "http_503", 5),
        ([Answer(status=503), Answer(status=502)], 1, "http_502", 4),  # the last failure counts
        ([Answer(None), Answer(status=503), Answer()], 2, "ok", 3),
        ([Answer(refused=True)], 2, "connect", 3),  # after two, its host is silent
        ([Answer(status=503, headers={"Retry-After": "31"}), Answer()], 2, "http_503", 1),
        *(([Answer(status=503, headers={"Retry-After": text}), Answer()], 2, "ok", 2) for text in NOT_NUMBERS),
    ):
        done = collected([url], by_url(a=answers), retries=retries)
        assert (statuses_in(done), done.network.counts[url]) == ([status], count)
    done = collected(urls_of(*range(2)), lambda *_: Answer(refused=True))
    assert (done.statuses, done.network.counts.total()) == ({"connect": 2}, 3)


def test_a_long_retry_after_takes_no_slot_and_is_waited_for():
    urls = urls_of("later", "other")
    answers = [Answer(status=429, headers={"Retry-After": "20"}), Answer()]
    done = collected(urls, by_url(later=answers), concurrency=1)
    (first, one), (second, two), (third, three) = done.network.requests
    assert (done.statuses, [first, second, third]) == ({"ok": 2}, [*urls, urls[0]])
    assert two - one < 1
    assert three - one == pytest.approx(20, abs=1)


def test_the_attempts_of_each_pass_share_a_deadline():
    (url,) = urls_of("a")
    drips = Answer(0.1, body_seconds=60)
    for answers, count, seconds in (
        ([drips], 1, 12),  # its time is used up in the first pass
        ([Answer(None), drips], 2, 6 + 12),
        ([Answer(4, 503), Answer(0.1, 503), drips], 3, 12),
    ):
        done = collected([url], by_url(a=answers), deadline=12)
        assert (statuses_in(done), done.network.counts[url]) == (["timeout"], count)
        assert done.shards[0][0].detail == "not done after 12 s"
        assert done.seconds == pytest.approx(seconds, abs=2.5)
    done = collected([url], lambda *_: Answer(0.3, 302, headers={"Location": "/a"}), deadline=0.7, retries=0)
    assert statuses_in(done) == ["timeout"]
