"""Claims on shards: one worker each, in a folder and in a bucket; workers that die; files that are no claims."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import PROJECT

from storage import claims as module
from storage.claims import EXPIRY, Claims
from storage.object_store import LocalStore, ObjectStore, StorageUnreachable, open_store

SHARDS = [f"{number:05}" for number in range(6)]


class Dated:
    """A store whose own clock runs ahead of this machine's, by `ahead` seconds."""

    def __init__(self, store: ObjectStore):
        self._store, self.ahead = store, 0.0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def now(self) -> float:
        return self._store.now() + self.ahead


def claimed(catalog, shard: str = "00000", number: int = 1) -> str:
    return f"captions/images/claims/{shard}-{number}.json"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(module, "POLLS", (0.01, 0.01))


def test_two_workers_never_hold_one_shard_and_a_released_one_is_free(catalog):
    one, other = (Claims(catalog.store, catalog.path("images", "")) for _ in range(2))
    taken = [worker.take(SHARDS) for worker in (one, other) * 3]
    assert sorted(taken) == SHARDS
    assert one.take(SHARDS) is None
    assert other.take([]) is None
    assert {shard: claim.worker for shard, claim in one.found().items()} == {
        shard: worker.worker for shard, worker in zip(taken, (one, other) * 3, strict=True)
    }
    other.release(taken[1])
    assert one.take(SHARDS) == taken[1]
    assert catalog.shards("images") == []  # no claim looks like a manifest
    for shard in [*one.held]:
        one.release(shard)
    for shard in [*other.held]:
        other.release(shard)
    assert list(catalog.store.list()) == []


def test_the_first_shard_is_a_random_one(tmp_path):
    random.seed(3)
    store = LocalStore(str(tmp_path))
    firsts = set()
    for _ in range(20):
        claims = Claims(store, "captions/images")
        firsts.add(shard := claims.take(SHARDS))
        claims.release(shard)
    assert len(firsts) > 2


def test_a_claim_lives_as_long_as_it_is_renewed_by_the_clock_of_the_storage(catalog, monkeypatch):
    store = Dated(catalog.store)
    dead, other = (Claims(store, "captions/images") for _ in range(2))
    assert dead.take(["00000"]) == "00000"
    own = SimpleNamespace(monotonic=time.monotonic, sleep=time.sleep)  # this machine's clock is not asked
    monkeypatch.setattr(module, "time", own)
    store.ahead = EXPIRY - 100
    assert other.take(["00000"]) is None
    store.ahead = EXPIRY + 100
    assert other.take(["00000"]) == "00000"
    assert other.found()["00000"].number == 2
    third = Claims(store, "captions/images")
    store.ahead = 0
    assert third.take(["00000"]) is None  # the newest claim counts
    other.release("00000")
    assert list(catalog.store.list()) == []  # with the one that it replaced


def test_a_renewed_claim_is_not_taken(tmp_path):
    store = Dated(LocalStore(str(tmp_path)))
    slow = Claims(store, "captions/images")
    slow.take(["00000"])
    file = tmp_path / claimed(store)
    os.utime(file, (time.time() - EXPIRY - 1,) * 2)
    slow.renew()
    assert Claims(store, "captions/images").take(["00000"]) is None
    slow.release("00000")
    slow.renew()
    assert not file.exists()  # what was released is not written again


def test_of_many_that_find_a_dead_claim_one_takes_it(catalog):
    store = Dated(catalog.store)
    Claims(store, "captions/images").take(["00000"])
    store.ahead = EXPIRY + 100
    others = [Claims(store, "captions/images") for _ in range(3)]
    listed = others[0]._listed()
    for other in others:  # all have seen the same
        other._listed = lambda: listed
    assert [other.take(["00000"]) for other in others] == ["00000", None, None]


def test_a_claim_that_is_released_during_a_renewal_is_not_written_again(tmp_path):
    store = LocalStore(str(tmp_path))
    claims, put = Claims(store, "captions/images"), store.put
    claims.take(["00000"])
    claims.take(["00001"])

    def put_and_release(path: str, data: bytes) -> bool:
        put(path, data)
        path, _ = claims.held.pop("00001")  # as another thread's release does it
        store.delete(path)
        return True

    store.put = put_and_release
    claims.renew()
    assert [info.path for info in store.list()] == [claimed(store)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"worker": "a", "since": "soon", "machine": "", "process": [1, 2]}',
        b'{"worker": "a", "since": 1, "machine": "", "process": 7}',
        b'{"worker": "a", "since": 1, "machine": "", "process": [1, 2]',
    ],
)
def test_a_damaged_claim_holds_until_it_expires(catalog, content):
    store = Dated(catalog.store)
    store.put(claimed(catalog), content)
    claims = Claims(store, "captions/images")
    assert claims.found()["00000"].worker == "unknown"
    assert claims.take(["00000"]) is None
    store.ahead = EXPIRY + 100
    assert claims.take(["00000"]) == "00000"


def test_a_claim_from_the_future_is_dead(tmp_path):
    store = LocalStore(str(tmp_path))
    store.put(claimed(store), b"{}")
    os.utime(tmp_path / claimed(store), (time.time() + EXPIRY + 60,) * 2)
    assert Claims(store, "captions/images").take(["00000"]) == "00000"


@pytest.mark.parametrize("since", [-1e300, 0, 4e9, 1e300])
def test_a_claim_that_began_in_the_future_is_waited_for_since_now(catalog, since):
    content = {"worker": "a", "since": since, "machine": "", "process": [1, 2], "of a newer version": {}}
    catalog.store.put(claimed(catalog), json.dumps(content).encode())
    claim = Claims(catalog.store, "captions/images").found()["00000"]
    assert claim.worker == "a"
    assert claim.since == max(0, min(since, claim.renewed))


def test_other_files_between_the_claims_are_no_claims(tmp_path):
    store = LocalStore(str(tmp_path))
    for name in ("00000-0.json", "00000-10000.json", "00000.json", "0000-1.json", "00000-1.json.bak", "notes.txt"):
        store.put(f"captions/images/claims/{name}", b"{}")
    claims = Claims(store, "captions/images")
    assert claims.found() == {}
    assert claims.take(["00000"]) == "00000"


def hold(root: str, ready) -> None:
    with Claims(open_store(root), "captions/images") as claims:
        claims.take(["00000"])
        ready.set()
        time.sleep(60)


def test_a_claim_of_a_killed_process_of_this_machine_is_free_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    worker = context.Process(target=hold, args=(str(tmp_path), ready))
    worker.start()
    assert ready.wait(60)
    claims = Claims(open_store(str(tmp_path)), "captions/images")
    assert claims.take(["00000"]) is None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert claims.take(["00000"]) == "00000"


def test_an_ended_with_releases_all_also_after_an_error(catalog):
    def fail_at_the_first() -> None:
        with Claims(catalog.store, "captions/images") as claims:
            for shard, _ in claims.each(SHARDS, list, print):
                assert shard in claims.found()
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_at_the_first()
    assert list(catalog.store.list()) == []


def interrupted(call, told: list[int], before: bool = False):
    """As `call`, but the first time it ends the program, after the call or before it."""

    def done(*arguments, **options):
        first = not told
        told.append(143)
        if first and before:
            sys.exit(143)
        result = call(*arguments, **options)
        if first:
            sys.exit(143)
        return result

    return done


def test_a_signal_while_a_claim_is_put_leaves_none_of_ours_and_that_of_another(tmp_path, monkeypatch):
    store = LocalStore(str(tmp_path))
    for others in ([], ["captions/images/claims/00000-1.json"]):
        monkeypatch.setattr(store, "put", interrupted(store.put, []))
        claims = Claims(store, "captions/images")
        with pytest.raises(SystemExit), claims:
            claims._put("00000", 1, store.now())
        monkeypatch.undo()
        assert [info.path for info in store.list()] == others
        Claims(store, "captions/images").take(["00000"])


@pytest.mark.parametrize("before", [True, False])
def test_a_signal_while_a_claim_is_released_leaves_none(tmp_path, monkeypatch, before):
    store = LocalStore(str(tmp_path))
    claims = Claims(store, "captions/images")
    claims.take(["00000"])
    monkeypatch.setattr(store, "delete", interrupted(store.delete, [], before))
    with pytest.raises(SystemExit), claims:
        claims.release("00000")
    assert list(store.list()) == []


def test_claims_are_renewed_within_with_though_a_renewal_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RENEWAL", 0.01)
    store, refused = LocalStore(str(tmp_path)), []
    put = store.put

    def refuse_one(path, data, **options):
        if not options and not refused:
            refused.append(path)
            raise StorageUnreachable("full")
        return put(path, data, **options)

    store.put = refuse_one
    with Claims(store, "captions/images") as claims:
        claims.take(["00000"])
        os.utime(tmp_path / claimed(store), (1e9, 1e9))
        deadline = time.monotonic() + 30
        while claims.found()["00000"].renewed < 1e9 + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert abs(claims.found()["00000"].renewed - time.time()) < 60
    assert refused == [claimed(store)]


def test_each_shard_is_made_once_by_two_that_take_turns_and_the_last_waits_for_the_other(catalog):
    made, said = [], []

    def pending(shards):
        return [shard for shard in shards if shard not in made]

    one, other = (Claims(catalog.store, "captions/images") for _ in range(2))
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
    assert len(said) == 1
    assert said[0].startswith(f"waiting for shard {fifth}, at which {one.worker} has been for 0 min")
    assert list(ours) == list(theirs) == []
    assert sorted(made) == SHARDS
    assert list(catalog.store.list()) == []


def test_the_shard_of_a_worker_that_dies_is_taken_over_by_one_that_waits(tmp_path):
    store = Dated(LocalStore(str(tmp_path)))
    Claims(store, "captions/images").take(["00000"])
    made, claims = [], Claims(store, "captions/images")

    def dies(line):
        store.ahead = EXPIRY + 100

    for shard, left in claims.each(["00000"], lambda shards: [one for one in shards if one not in made], dies):
        assert left == 0
        made.append(shard)
    assert made == ["00000"]


def test_the_file_of_a_claim_is_as_documented(tmp_path):
    store = LocalStore(str(tmp_path))
    claims = Claims(store, "captions/images")
    claims.take(["00000"])
    content = json.loads(Path(tmp_path / claimed(store)).read_text())
    assert content.keys() == {"worker", "since", "machine", "process"}
    assert content["process"][0] == os.getpid()
    assert abs(content["since"] - time.time()) < 60


# SIGTERM in a finalizer: Python drops the SystemExit that is raised there.
DROPPED = """
import os, signal, sys
from storage.claims import Claims, exit_at_sigterm
from storage.object_store import open_store

class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

exit_at_sigterm()
with Claims(open_store(sys.argv[1]), "captions/images") as claims:
    for shard, left in claims.each(["00000", "00001"], list, print):
        print(shard, flush=True)
        last = Last()
        del last
"""


def test_a_program_that_missed_its_sigterm_ends_before_the_next_claim(tmp_path: Path):
    run = subprocess.run([sys.executable, "-c", DROPPED, tmp_path], cwd=PROJECT, capture_output=True, text=True)
    assert (run.returncode, len(run.stdout.split())) == (143, 1), run.stderr
    assert "Exception ignored" in run.stderr
    assert Claims(open_store(str(tmp_path)), "captions/images").found() == {}
