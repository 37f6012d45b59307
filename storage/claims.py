"""Claims: which worker is at work on which shard, so that any number of machines make each shard once.

    ROOT/<dataset>/<stage>/claims/<shard>.txt     who is at work on a shard: host and process

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
from storage.safe_json import printable

EXPIRY = 120.0  # seconds after which a claim that was not renewed is dead
RENEWAL = 20.0  # seconds between two renewals: several may fail before a claim expires
POLLS = 1.0, 30.0  # seconds between looks at the shards that others are at work on: at first, and at most
_SAY = 60.0  # seconds between two lines about them
CLAIM = re.compile(r"(.+)/claims/(\d{5})\.txt")  # stage, shard


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
        self.worker = f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(2)}"
        self.held: set[str] = set()
        self._content = self.worker.encode()
        self._lock = threading.Lock()  # a claim that is put or released is not renewed meanwhile
        self._end = threading.Event()

    def workers(self, now: float) -> dict[str, str]:
        """Shard -> host and process of the worker that is at work on it; one listing, and a request for each.

        now: seconds since 1970, by the storage's clock.
        """
        found = {}
        for shard, renewed in self._listed().items():
            with contextlib.suppress(ObjectMissing):  # it was released since the listing
                if _is_live(renewed, now):
                    found[shard] = printable(str(self.store.get(self._path(shard)), "utf-8", "replace"))[:100]
        return found

    def take(self, shards: Sequence[str]) -> str | None:
        """Claim one of these shards, a random one of those that nobody is at work on; None if there is none."""
        listed, now = self._listed(), self.store.now()
        free_first = sorted(random.sample(shards, len(shards)), key=listed.__contains__)
        for shard in free_first:
            if shard in self.held:
                continue
            if shard in listed:
                # By a look of its own: since the listing another may have replaced the claim.
                if any(_is_live(renewed, now) for renewed in self._listed(shard).values()):
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
            left, workers = pending(shards), self.workers(self.store.now())
            others = [shard for shard in left if shard in workers]
            if not others or not for_all and len(others) < len(shards):
                return left
            if time.monotonic() >= due:
                more = f" and {len(others) - 1} more" if len(others) > 1 else ""
                say(f"waiting for shard {others[0]}, at which {workers[others[0]]} is at work{more}")
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

    def _listed(self, shard: str = "") -> dict[str, float]:
        """Shard -> when its claim was written, in seconds since 1970; of all shards, or of one."""
        infos = self.store.list(f"{self.stage}/claims/{shard}")
        return {found[2]: info.modified for info in infos if (found := CLAIM.fullmatch(info.path))}


def _is_live(renewed: float, now: float) -> bool:
    """Return whether the worker of a claim is at work. One whose time is EXPIRY ahead is dead: none renewed it."""
    return abs(now - renewed) < EXPIRY
