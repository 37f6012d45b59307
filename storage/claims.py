"""Claims on shards: many machines use them to share the work, so that each shard is made only once.

    ROOT/<dataset>/<stage>/claims/<shard>.txt     the worker that claims the shard: host, process id and a random token

A worker writes a claim before it begins a shard, renews it while it works, and deletes it at the end. A claim that has
not been renewed for EXPIRY seconds is dead, and another worker may replace it. Ages are measured by the storage's
clock, so the clocks of the machines may differ. No machine coordinates the others.

Claims only avoid duplicate work. If two workers make the same shard, the first commit wins (storage/catalog/commit.py).
"""

import contextlib
import os
import random
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType

from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable

EXPIRY = 120.0  # seconds after which a claim that has not been renewed is dead
RENEWAL = 20.0  # seconds between renewals; several may fail before a claim expires
POLLS = 1.0, 30.0  # seconds between checks of other workers' shards: initially, and at most
_LOG_PERIOD = 60.0  # seconds between two log lines about waiting
_CLAIM = re.compile(r"/claims/(\d{5})\.txt$")


def exit_at_sigterm() -> None:
    """Make SIGTERM raise SystemExit with status 143, so that claims are released. Call it from the main thread."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class Claims:
    """Context manager for this process's claims on shards. A thread renews them, and they are released at the end.

        with Claims(store, "captions/images") as claims:
            for shard, left in claims.each(shards, pending, print):
                ...  # make and commit it

    `stage` is the path of the stage's folder in the store.
    """

    def __init__(self, store: ObjectStore, stage: str):
        self.store, self.stage = store, stage.removesuffix("/")
        self.held: set[str] = set()  # shards that this worker has claimed
        self._content = f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(8)}".encode()
        self._lock = threading.Lock()  # held while a claim is put, renewed or released
        self._end = threading.Event()

    def take(self, shards: Sequence[str]) -> str | None:
        """Claim a random shard without a live claim. Return its name, or None if all shards have live claims."""
        live = self._find_live()
        for shard in sorted(random.sample(shards, len(shards)), key=live.__contains__):  # shards without a claim first
            if shard in self.held or live.get(shard):
                continue
            if shard in live:
                if any(self._find_live(shard).values()):  # another worker has replaced the claim since the listing
                    continue
                self.store.delete(self._path(shard))
            if self._put(shard):
                return shard
        return None

    def release(self, shard: str) -> None:
        """Delete our claim on a shard, unless another worker has replaced it. If this fails, the claim will expire."""
        with self._lock:
            with contextlib.suppress(ObjectMissing, StorageUnreachable):
                if self.store.get(self._path(shard)) == self._content:
                    self.store.delete(self._path(shard))
            self.held.remove(shard)  # last: after a signal, the end of `with` tries again

    def renew(self) -> None:
        """Renew all held claims by writing them again. If a write fails, leave the other claims to the next call."""
        with contextlib.suppress(StorageUnreachable):
            for shard in [*self.held]:
                with self._lock:
                    if shard in self.held:
                        self.store.put(self._path(shard), self._content)

    def each(
        self, shards: Iterable[str], pending: Callable[[Sequence[str]], list[str]], log: Callable[[str], object]
    ) -> Generator[tuple[str, int]]:
        """Claim the shards one at a time, and yield each claimed shard with the number of shards that are left.

        Waits while other workers hold the remaining shards, takes over the shards of dead workers, and ends when no
        shard is pending.

        Args:
            pending: function that returns which of the given shards are not committed yet
            log: function that logs a line; called while this worker waits
        """
        left = list(shards)
        while left:
            shard = self.take(left)
            if shard is None:
                left = self.wait(left, pending, log)
                continue
            try:
                if pending([shard]):
                    left.remove(shard)
                    yield shard, len(left)
                else:  # another worker has made it, and perhaps others, too
                    left = pending(left)
            finally:
                self.release(shard)

    def wait(
        self,
        shards: Sequence[str],
        pending: Callable[[Sequence[str]], list[str]],
        log: Callable[[str], object],
        for_all: bool = False,
    ) -> list[str]:
        """Wait until at least one shard is committed or has no live claim. Return the shards that are still pending.

        With `for_all`, wait until this holds for every shard. For `pending` and `log`, see `each`.
        """
        due, pause = time.monotonic(), POLLS[0]
        while True:
            left, live = pending(shards), self._find_live()
            others = [shard for shard in left if live.get(shard)]
            if not others or not for_all and len(others) < len(shards):
                return left
            if time.monotonic() >= due:
                log(f"waiting for {len(others):,} shards that other workers have claimed, such as {others[0]}")
                due = time.monotonic() + _LOG_PERIOD
            time.sleep(pause * (0.5 + random.random()))
            pause = min(2 * pause, POLLS[1])

    def __enter__(self) -> "Claims":
        self._thread = threading.Thread(target=self._renew_until_end, name="claims", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        for shard in [*self.held]:
            self.release(shard)

    def _renew_until_end(self) -> None:
        while not self._end.wait(RENEWAL):
            self.renew()

    def _path(self, shard: str) -> str:
        return f"{self.stage}/claims/{shard}.txt"

    def _put(self, shard: str) -> bool:
        with self._lock:
            self.held.add(shard)  # before the put, so that a signal during it releases the claim
            ours = self.store.put(self._path(shard), self._content, if_absent=True)
            if not ours:
                self.held.remove(shard)
        return ours

    def _find_live(self, shard: str = "") -> dict[str, bool]:
        """Map each claimed shard to whether its claim is live. If `shard` is given, check only that shard.

        A claim dated EXPIRY seconds or more in the future counts as dead.
        """
        infos = self.store.list(f"{self.stage}/claims/{shard}")
        renewed = {match[1]: info.modified for info in infos if (match := _CLAIM.search(info.path))}
        now = self.store.now()
        return {shard: abs(now - time) < EXPIRY for shard, time in renewed.items()}
