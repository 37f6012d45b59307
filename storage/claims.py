"""Claims: which worker is at work on which shard, so that any number of machines make each shard once.

    ROOT/<dataset>/<stage>/claims/<shard>.txt     who is at work on a shard: host, process and a random mark

A worker puts a claim before it begins a shard, renews it while it works, and deletes it at the end. A claim that was
not renewed for EXPIRY seconds is dead, and another worker replaces it. Ages are differences between times of the
storage, so the clocks of the machines may differ. No worker leads the others.

Claims save work, no more: of two that make the same shard, the first commit counts (storage/catalog/commit.py).
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable

EXPIRY = 120.0  # seconds after which a claim that was not renewed is dead
RENEWAL = 20.0  # seconds between two renewals: several may fail before a claim expires
POLLS = 1.0, 30.0  # seconds between looks at the shards that others are at work on: at first, and at most
_SAY = 60.0  # seconds between two lines about them
_CLAIM = re.compile(r"/claims/(\d{5})\.txt$")


def exit_at_sigterm() -> None:
    """From now on SIGTERM ends this program as sys.exit does, with status 143, so that its claims are released.

    Only from the main thread.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class Claims:
    """The claims on the shards of one stage, and those of them that this worker holds.

        with Claims(store, "captions/images") as claims:
            for shard, left in claims.each(shards, pending, print):
                ...  # make and commit it

    Within `with`, a thread renews what is held; at the end all is released. stage: path of its folder in the store.
    held: the shards that we have claimed.
    """

    def __init__(self, store: ObjectStore, stage: str):
        self.store, self.stage = store, stage.removesuffix("/")
        self.held: set[str] = set()
        self._content = f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(8)}".encode()
        self._lock = threading.Lock()  # a claim that is put or released is not renewed meanwhile
        self._end = threading.Event()

    def take(self, shards: Sequence[str]) -> str | None:
        """Claim one of these shards, a random one of those that nobody is at work on; None if there is none."""
        live = self._live()
        for shard in sorted(random.sample(shards, len(shards)), key=live.__contains__):  # without a claim first
            if shard in self.held or live.get(shard):
                continue
            if shard in live:
                if any(self._live(shard).values()):  # since the listing another has replaced the claim
                    continue
                self.store.delete(self._path(shard))
            if self._put(shard):
                return shard
        return None

    def release(self, shard: str) -> None:
        """Delete our claim, unless another worker took it for dead; if the storage is away, it expires."""
        with self._lock:
            with contextlib.suppress(ObjectMissing, StorageUnreachable):
                if self.store.get(self._path(shard)) == self._content:
                    self.store.delete(self._path(shard))
            self.held.remove(shard)  # last: after a signal, the end of `with` tries again

    def renew(self) -> None:
        """Write all held claims again; one that cannot be written stays as it is until the next time."""
        for shard in [*self.held]:
            with self._lock:
                if shard in self.held:
                    try:
                        self.store.put(self._path(shard), self._content)
                    except StorageUnreachable:
                        return

    def each(
        self, shards: Iterable[str], pending: Callable[[Sequence[str]], list[str]], say: Callable[[str], object]
    ) -> Iterator[tuple[str, int]]:
        """Each of these shards that is this worker's to make, claimed, and how many are left after it.

        Ends when none is pending: it waits for the shards that others are at work on, and takes over those of workers
        that are gone. `pending` tells which of some shards are not committed yet. `say` gets lines about the waiting.
        """
        left = list(shards)
        while left:
            shard = self.take(left)
            if shard is None:
                left = self.wait(left, pending, say)
                continue
            try:
                if pending([shard]):
                    left.remove(shard)
                    yield shard, len(left)
                else:  # others have made it since, and perhaps more
                    left = pending(left)
            finally:
                self.release(shard)

    def wait(
        self,
        shards: Sequence[str],
        pending: Callable[[Sequence[str]], list[str]],
        say: Callable[[str], object],
        for_all: bool = False,
    ) -> list[str]:
        """Wait until one of these shards is nobody's or is committed; returns those that are pending then.

        for_all: until each of them is.
        """
        due, pause = time.monotonic(), POLLS[0]
        while True:
            left, live = pending(shards), self._live()
            others = [shard for shard in left if live.get(shard)]
            if not others or not for_all and len(others) < len(shards):
                return left
            if time.monotonic() >= due:
                say(f"waiting for {len(others):,} shards that other workers have claimed, such as {others[0]}")
                due = time.monotonic() + _SAY
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
            self.held.add(shard)  # first: a signal may come while it is put
            ours = self.store.put(self._path(shard), self._content, if_absent=True)
            if not ours:
                self.held.remove(shard)
        return ours

    def _live(self, shard: str = "") -> dict[str, bool]:
        """Shard -> whether the worker of its claim is at work; of all shards that are claimed, or of one.

        A claim whose time is EXPIRY ahead is dead: none renewed it.
        """
        infos = self.store.list(f"{self.stage}/claims/{shard}")
        renewed = {found[1]: info.modified for info in infos if (found := _CLAIM.search(info.path))}
        now = self.store.now()
        return {shard: abs(now - time) < EXPIRY for shard, time in renewed.items()}
