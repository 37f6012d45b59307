"""How many shards are made twice when many workers share a stage: simulated workers with the real claims.

    python -m benchmarks.spread [--shards 331] [--rounds 5] [--processes 8]

Simulated time: each worker makes one shard after another, each in a time of its own, and asks the real code of
storage/claims.py about a store in memory whose clock is the simulation's. Then so many real processes share a folder.
"without claims" is the same order of work with a look at what is committed before each shard.
"""

import argparse
import heapq
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from storage.claims import EXPIRY, POLLS, RENEWAL, Claims
from storage.object_store import Content, LocalStore, ObjectInfo, ObjectMissing

WORKERS = (2, 4, 8, 16, 32, 64)
SECONDS = 300.0  # that a shard takes, on average; between half and one and a half times as long


class SimulatedStore:
    """What claims need of an ObjectStore, in memory; `time` is set by the simulation."""

    root = "simulated"

    def __init__(self):
        self.time, self.objects, self.requests = 0.0, {}, 0

    def now(self) -> float:
        self.requests += 1
        return self.time

    def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
        self.requests += 1
        if if_absent and path in self.objects:
            return False
        self.objects[path] = data, self.time
        return True

    def get(self, path: str) -> bytes:
        self.requests += 1
        if path not in self.objects:
            raise ObjectMissing(path)
        return self.objects[path][0]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.requests += 1
        found = [(path, *value) for path, value in self.objects.items() if path.startswith(prefix)]
        return iter([ObjectInfo(path, len(data), modified) for path, data, modified in sorted(found)])

    def delete(self, path: str) -> None:
        self.requests += 1
        self.objects.pop(path, None)


def simulate(workers: int, shards: int, deaths: int, seed: int, claimed: bool) -> tuple[int, int, float]:
    """Shards made, requests and seconds, until all are committed. So many workers die in the middle of a shard."""
    rng = random.Random(seed)
    random.seed(seed)
    store, committed, made = SimulatedStore(), set(), Counter()
    names = [f"{number:05}" for number in range(shards)]
    dying = {worker: rng.uniform(0, shards * SECONDS / workers) for worker in rng.sample(range(workers), deaths)}
    left = [rng.sample(names, len(names)) for _ in range(workers)]
    claims = [Claims(store, "captions/images") for _ in range(workers)]
    waits = [0] * workers
    events = [(rng.uniform(0, 30), worker, "free", "") for worker in range(workers)]
    heapq.heapify(events)
    while len(committed) < shards:
        store.time, worker, what, shard = heapq.heappop(events)
        at, ours = store.time, claims[worker]
        if worker in dying and at >= dying[worker]:
            continue
        if what == "renew":
            if shard in ours.held:
                ours.renew()
                heapq.heappush(events, (at + RENEWAL, worker, "renew", shard))
            continue
        if what == "done":
            committed.add(shard)
            if claimed:
                ours.release(shard)
        left[worker] = [name for name in left[worker] if name not in committed]
        if not left[worker]:
            continue
        shard = ours.take(left[worker]) if claimed else left[worker].pop(0)
        if shard is None:
            waits[worker] += 1
            pause = min(POLLS[0] * 2 ** waits[worker], POLLS[1]) * rng.uniform(0.5, 1.5)
            heapq.heappush(events, (at + pause, worker, "free", ""))
            continue
        waits[worker] = 0
        made[shard] += 1
        if claimed:
            heapq.heappush(events, (at + RENEWAL, worker, "renew", shard))
        heapq.heappush(events, (at + SECONDS * rng.uniform(0.5, 1.5), worker, "done", shard))
    return made.total(), store.requests, store.time


def work(root: str, shards: int, seconds: float, number: int, results) -> None:
    """A real process that makes shards until none is left; puts how many it made."""
    store, made = LocalStore(root), 0

    def pending(names: list[str]) -> list[str]:
        done = {info.path for info in store.list("captions/images/done/")}
        return [name for name in names if f"captions/images/done/{name}" not in done]

    rng = random.Random(number)
    with Claims(store, "captions/images") as claims:
        for shard, _ in claims.each([f"{one:05}" for one in range(shards)], pending, lambda line: None):
            time.sleep(seconds * rng.uniform(0.5, 1.5))
            store.put(f"captions/images/done/{shard}", b"")
            made += 1
    results.put(made)


def race(processes: int, shards: int, seconds: float) -> tuple[list[int], float]:
    """Shards that each of so many processes made on one folder, and seconds."""
    context = multiprocessing.get_context("spawn")
    results, started = context.Queue(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spread-") as root:
        running = [context.Process(target=work, args=(root, shards, seconds, n, results)) for n in range(processes)]
        for process in running:
            process.start()
        made = [results.get() for _ in running]
        for process in running:
            process.join()
    return made, time.monotonic() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=331)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args(arguments)
    shards, rounds = options.shards, range(options.rounds)
    print(f"{shards} shards of {SECONDS:.0f} s, claims expire after {EXPIRY:.0f} s; means of {options.rounds} rounds")
    print("workers | twice, without claims | with claims | one in eight dies | time over the least | requests a shard")
    for workers in WORKERS:
        without = [simulate(workers, shards, 0, seed, False)[0] for seed in rounds]
        rows = [simulate(workers, shards, 0, seed, True) for seed in rounds]
        deaths = workers // 8
        dying = [simulate(workers, shards, deaths, seed, True)[0] - deaths for seed in rounds]
        twice = [f"{100 * (sum(made) / len(made) / shards - 1):.1f} %" for made in (without, [row[0] for row in rows])]
        died = f"{100 * (sum(dying) / len(dying) / shards - 1):.1f} %" if deaths else "-"
        least = shards * SECONDS / workers
        longer = sum(row[2] for row in rows) / len(rows) / least
        requests = sum(row[1] for row in rows) / len(rows) / shards
        print(
            f"{workers:7} | {twice[0]:>21} | {twice[1]:>11} | {died:>17} | {longer:19.2f} | {requests:16.1f}",
            flush=True,
        )
    made, seconds = race(options.processes, shards, 0.1)
    twice = f"{sum(made) - shards} of {shards} twice"
    print(f"really, {len(made)} processes: {twice}, {min(made)} to {max(made)} each, {seconds:.0f} s")


if __name__ == "__main__":
    main()
