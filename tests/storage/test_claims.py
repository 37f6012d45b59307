"""Claims on shards: one worker each, in a folder and in a bucket; workers that die; files that are no claims."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from places import PROJECT

from storage import claims as module
from storage.claims import EXPIRY, Claims
from storage.object_store import LocalStore, ObjectStore, StorageUnreachable, open_store

SHARDS = [f"{number:05}" for number in range(6)]
FIRST = "captions/images/claims/00000.txt"


def claims_of(store: ObjectStore) -> Claims:
    return Claims(store, "captions/images")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(module, "POLLS", (0.01, 0.01))


def test_two_workers_never_hold_one_shard_and_a_released_one_is_free(catalog):
    one, other = (Claims(catalog.store, catalog.path("images", "")) for _ in range(2))
    taken = [worker.take(SHARDS) for worker in (one, other) * 3]
    assert sorted(taken) == SHARDS
    assert (one.take(SHARDS), other.take([])) == (None, None)
    assert [worker.held for worker in (one, other)] == [set(taken[::2]), set(taken[1::2])]
    other.release(taken[1])
    assert one.take(SHARDS) == taken[1]
    assert catalog.shards("images") == []  # no claim looks like a manifest
    for worker in (one, other):
        for shard in [*worker.held]:
            worker.release(shard)
    assert list(catalog.store.list()) == []


def test_a_dead_claim_is_taken_over_once_by_the_clock_of_the_storage(catalog, monkeypatch):
    now = catalog.store.now
    dead, *others = (claims_of(catalog.store) for _ in range(4))
    assert dead.take(["00000"]) == "00000"
    for ahead, taken in ((EXPIRY - 60, None), (EXPIRY + 60, "00000")):  # of this machine's clock
        with monkeypatch.context() as dated:
            dated.setattr(catalog.store, "now", lambda ahead=ahead: now() + ahead)
            assert others[0].take(["00000"]) == taken
    assert [other.take(["00000"]) for other in others] == [None] * 3
    dead.release("00000")  # it has slept, and deletes nobody's but its own
    assert others[1].take(["00000"]) is None
    others[0].release("00000")
    assert list(catalog.store.list()) == []


@pytest.mark.parametrize("age", [EXPIRY + 60, -EXPIRY - 60])  # nobody can have renewed one of the future
def test_of_two_that_find_a_dead_claim_the_later_one_leaves_the_new_claim_alone(tmp_path, monkeypatch, age):
    store = LocalStore(str(tmp_path))
    store.put(FIRST, b"\xff of another program")
    os.utime(tmp_path / FIRST, (time.time() - age,) * 2)
    one, other = claims_of(store), claims_of(store)
    before, live = other._find_live(), other._find_live
    monkeypatch.setattr(other, "_find_live", lambda shard="": live(shard) if shard else before)  # both saw the same
    assert (one.take(["00000"]), other.take(["00000"])) == ("00000", None)
    assert store.get(FIRST) == one._content


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("call", ["put", "delete"])
def test_a_signal_while_a_claim_is_put_or_released_leaves_none_of_ours(tmp_path, monkeypatch, call, before):
    store, told = LocalStore(str(tmp_path)), []
    original = getattr(store, call)

    def interrupted(*arguments, **options):
        """The first time it ends the program, before the call or after it."""
        if not told and before:
            sys.exit(told.append(1))
        result = original(*arguments, **options)
        if not told:
            sys.exit(told.append(1))
        return result

    def work() -> None:
        with claims_of(store) as claims:
            claims.release(claims.take(["00000"]))

    monkeypatch.setattr(store, call, interrupted)
    with pytest.raises(SystemExit):
        work()
    assert list(store.list()) == []


def test_claims_are_renewed_within_with_though_a_renewal_fails_and_not_after_a_release(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RENEWAL", 0.01)
    store, refused = LocalStore(str(tmp_path)), []
    put = store.put

    def refuse_one(path, data, **options):
        if not options and not refused:
            refused.append(path)
            raise StorageUnreachable("full")
        return put(path, data, **options)

    monkeypatch.setattr(store, "put", refuse_one)
    with claims_of(store) as claims:
        claims.take(["00000"])
        os.utime(tmp_path / FIRST, (1e9, 1e9))
        deadline = time.monotonic() + 30
        while not claims._find_live()["00000"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert claims_of(store).take(["00000"]) is None
        claims.release("00000")
        time.sleep(0.1)
        assert list(store.list()) == []
    assert refused == [FIRST]


def test_each_shard_is_made_once_by_two_that_take_turns_and_the_last_waits_for_the_other(catalog):
    made, said = [], []

    def pending(shards):
        return [shard for shard in shards if shard not in made]

    one, other = (claims_of(catalog.store) for _ in range(2))
    ours, theirs = one.each(SHARDS, pending, said.append), other.each(SHARDS, pending, said.append)
    for _ in range(2):
        for worker in (ours, theirs):
            shard, _ = next(worker)
            assert shard not in made
            made.append(shard)
    fifth, _ = next(ours)
    sixth, _ = next(theirs)
    made.append(sixth)

    def finish(line):
        said.append(line)
        made.append(fifth)

    assert list(other.each([fifth], pending, finish)) == []
    (line,) = said
    assert line == f"waiting for 1 shards that other workers have claimed, such as {fifth}"
    assert list(ours) == list(theirs) == []
    assert sorted(made) == SHARDS
    assert list(catalog.store.list()) == []


HOLDER = """
import os, sys, time
from storage.claims import Claims
from storage.object_store import open_store
claims = Claims(open_store(sys.argv[1]), "captions/images")
loader = os.fork()  # as processes that load data, which end some seconds after a killed training
if loader:
    print(claims.take(["00000"]), loader, flush=True)
time.sleep(600)
"""


def test_a_claim_of_a_killed_process_is_free_at_once_on_its_machine_and_after_a_while_on_another(catalog):
    store, command = catalog.store, [sys.executable, "-c", HOLDER, catalog.store.root]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            taken, loader = holder.stdout.readline().split()
            assert (taken, claims_of(store).take(["00000"])) == ("00000", None)
        finally:
            holder.kill()
    left = store.get(FIRST)
    store.put(FIRST, left.replace(module._MACHINE.encode(), b"of-another"))
    assert claims_of(store).take(["00000"]) is None
    store.put(FIRST, left)
    heirs = [claims_of(store) for _ in range(3)]
    assert sorted(str(heir.take(["00000"])) for heir in heirs) == ["00000", "None", "None"]
    os.kill(int(loader), signal.SIGKILL)


def test_who_waits_for_a_claim_gets_it_when_it_is_released_and_hears_of_its_holder_when_it_is_renewed(
    catalog, monkeypatch
):
    said: list[str] = []
    held, waits = claims_of(catalog.store), claims_of(catalog.store)
    assert held.take(["00000"]) == "00000"
    threading.Timer(0.3, held.release, ["00000"]).start()
    assert waits.take_or_wait("00000", said.append) == ""
    monkeypatch.setattr(module, "RENEWAL", 0.3)
    holder = f"process {os.getpid()} on "
    with waits:
        assert held.take_or_wait("00000", said.append).startswith(holder)
    assert [line.partition(holder)[1] for line in said] == [holder] * 2, "one line each"
    assert held.take_or_wait("00000", said.append) == ""


def test_a_holder_that_was_taken_over_notices_it_and_disturbs_its_heir_by_no_renewal(tmp_path):
    store = open_store(str(tmp_path / "root"))
    asleep, heir = claims_of(store), claims_of(store)
    asleep.take(["00000"])
    asleep.check("00000")
    os.utime(store.local_path(FIRST), (time.time() - EXPIRY - 60,) * 2)
    assert heir.take(["00000"]) == "00000"
    asleep.renew()
    heir.check("00000")
    with pytest.raises(
        ValueError, match=rf"^{re.escape(store.uri(FIRST))} was .*taken over .*process {os.getpid()} on "
    ):
        asleep.check("00000")
    (tmp_path / "root").rename(tmp_path / "moved")
    with pytest.raises(StorageUnreachable, match=f"^cannot read the folder {tmp_path}/root"):
        heir.check("00000")
    (tmp_path / "moved").rename(tmp_path / "root")
    store.delete(FIRST)
    heir.renew()
    with pytest.raises(ValueError, match="was removed"):
        heir.check("00000")


def refuse(*_: object) -> None:
    raise StorageUnreachable("away")


def test_a_worker_that_ends_because_the_storage_is_away_does_not_wait_for_it_and_may_begin_anew_at_once(tmp_path):
    store = LocalStore(str(tmp_path))
    claims = claims_of(store)
    with pytest.raises(StorageUnreachable), claims:
        refuse(claims.take(["00000"]))
    assert store.exists(FIRST)
    assert claims_of(store).take(["00000"]) == "00000"
