"""Whose turn it is, which hosts are given up, and which bodies may grow: no network."""

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress

import pytest

from storage.hosts import Budget, Hosts, Lease, Transient


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
        async with self.hosts.turn(name):
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


def test_a_host_that_never_answered_has_few_in_flight_and_one_that_has_has_more():
    async def work() -> None:
        hosts = Hosts(at_once=64, per_host=8, breaker=2)
        crowd = Crowd(hosts)
        crowd.come(*20 * ["a"])
        await settle()
        assert len(crowd.inside) == 2
        hosts.answered("a")
        await settle()
        assert len(crowd.inside) == 8
        for task in crowd.tasks:
            task.cancel()
        await crowd.ended()

    run(work())


def test_a_host_that_only_times_out_is_given_up_and_only_it():
    async def work() -> None:
        hosts = Hosts(at_once=64, per_host=8, breaker=2)
        crowd = Crowd(hosts)
        crowd.come(*"aaaaabb")
        await settle()
        hosts.failed("a")
        await settle()
        hosts.check("a")  # once is not enough
        hosts.failed("a")
        await settle()
        with pytest.raises(Transient, match="last 2 URLs asked of a timed out") as refused:
            hosts.check("a")
        assert refused.value.status == "host_timeout"
        crowd.come("a", "b")
        for name in "aabb":
            crowd.let_go(name)
        await settle()
        crowd.let_go("b")
        assert await crowd.ended() == ["", "", *3 * ["host_timeout"], "", "", "host_timeout", ""]

    run(work())


def test_an_answer_ends_the_row_of_timeouts_and_earns_patience():
    async def work() -> None:
        hosts = Hosts(at_once=64, per_host=8, breaker=2)
        hosts.failed("a")
        hosts.answered("a")
        for _ in range(7):
            hosts.failed("a")
        hosts.check("a")
        hosts.failed("a")
        with pytest.raises(Transient):
            hosts.check("a")
        hosts.answered("a")  # of a URL that was still in flight
        hosts.check("a")

    run(work())


def test_a_host_that_is_offered_again_begins_anew():
    async def work() -> None:
        hosts = Hosts(at_once=64, per_host=8, breaker=2)
        crowd = Crowd(hosts)
        for _ in range(2):
            hosts.failed("a")
        hosts.offer_again("a")
        crowd.come(*"aaaa")
        await settle()
        assert crowd.inside == ["a", "a"]
        for _ in range(2):
            hosts.failed("a")  # all others need not try
            crowd.let_go("a")
        assert await crowd.ended() == ["", "", "host_timeout", "host_timeout"]
        hosts.offer_again("a")
        crowd.come(*"aaa")
        await settle()
        assert crowd.inside == ["a", "a"]
        hosts.answered("a")
        await settle()
        assert crowd.inside == ["a", "a", "a"]
        for _ in range(3):
            crowd.let_go("a")
        assert (await crowd.ended())[4:] == ["", "", ""]

    run(work())


def test_a_failure_in_the_trial_of_one_shard_does_not_count_in_that_of_the_next():
    hosts = Hosts(at_once=64, per_host=8, breaker=2)
    for _ in range(8):
        hosts.offer_again("a")
        hosts.failed("a")
    hosts.check("a")
    hosts.answered("a")
    for _ in range(7):
        hosts.failed("a")
        hosts.offer_again("a")  # it answered: that says nothing new of it
    hosts.failed("a")
    with pytest.raises(Transient):
        hosts.check("a")


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


def test_bodies_wait_for_room_and_the_oldest_never_does():
    async def work() -> None:
        budget = Budget(100)
        with budget.lease() as younger:
            with budget.lease() as oldest:
                oldest.grow(10)
                younger.grow(90)
                assert oldest.may_grow
                assert not younger.may_grow
                waiting = asyncio.create_task(younger.room())
                oldest.grow(500)
                await settle()
                assert not waiting.done()
            await settle()
            assert waiting.done()
            assert budget.held == 90
        assert budget.held == 0

    run(work())


def test_a_large_body_that_falls_silent_is_ended_only_while_others_wait():
    async def body(budget: Budget, first: int, pace: int) -> Lease:
        with budget.lease() as lease, suppress(TimeoutError):
            async with asyncio.timeout(4) as clock:
                lease.grow(first)
                lease.read_by(clock)
                while lease.held < 1_000_000:
                    await asyncio.sleep(0.1)
                    lease.grow(pace)
        return lease

    async def work() -> None:
        budget = Budget(1_000_000)
        silent, dripping, quick, small = bodies = [
            asyncio.create_task(body(budget, *facts))
            for facts in ((500_000, 0), (400_000, 100), (500_000, 20_000), (1000, 0))
        ]
        await asyncio.sleep(1.2)
        assert not any(task.done() for task in bodies)
        with budget.lease() as waiting:
            waiting.grow(1)
            await waiting.room()
        assert not any(task.done() for task in (quick, small))
        await asyncio.wait([silent, dripping])
        assert [(await task).revoked for task in (silent, dripping)] == [True, True]
        for task in (quick, small):
            task.cancel()

    run(work())


def test_many_bodies_over_a_small_budget_all_come_to_an_end():
    rng = random.Random(0)
    limit, chunk, largest, count = 100, 10, 80, 64
    peak = 0

    async def body(budget: Budget, size: int) -> None:
        nonlocal peak
        with budget.lease() as lease:
            while lease.held < size:
                await lease.room()
                lease.grow(chunk)
                peak = max(peak, budget.held)
                await asyncio.sleep(0)

    async def work() -> None:
        budget = Budget(limit)
        tasks = [asyncio.create_task(body(budget, rng.randrange(10, largest))) for _ in range(count)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.held == 0

    run(work())
    assert limit <= peak <= limit + largest
