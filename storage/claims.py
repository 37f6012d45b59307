"""Claims on shards and training runs: many machines use them to share the work, so that it is done only once.

    ROOT/<dataset>/<stage>/claims/<shard>.txt     the worker that claims the shard: its process, machine and token
    ROOT/runs/<run>/claims/writer.txt             the process that trains the run

A worker writes a claim before it begins a shard, renews it while it works, and deletes it at the end. A claim is dead,
and another worker may replace it, if it has not been renewed for EXPIRY seconds, or if its process ran on the same
machine and has ended. Ages are measured by the storage's clock, so the clocks of the machines may differ. No machine
coordinates the others.

Claims only avoid duplicate work. If two workers make the same shard, the first commit wins (storage/catalog/commit.py).
The process that trains a run checks its claim before each write.
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
from pathlib import Path
from types import TracebackType

from storage.object_store import ObjectInfo, ObjectMissing, ObjectStore, StorageUnreachable

EXPIRY = 120.0  # seconds after which a claim that has not been renewed is dead
RENEWAL = 20.0  # seconds between renewals; several may fail before a claim expires
POLLS = 1.0, 30.0  # seconds between checks of other workers' shards: initially, and at most
_LOG_PERIOD = 60.0  # seconds between two log lines about waiting
# Processes with the same value see the same names of sockets: those of one network on one machine since its last start.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MACHINE = f"{_BOOT.read_text().strip()}-{Path('/proc/self/ns/net').stat().st_ino}" if _BOOT.exists() else ""
_CLAIM = re.compile(r"/claims/(\w+)\.txt$")


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
        token = secrets.token_hex(8)
        self._content = f"process {os.getpid()} on {socket.gethostname()}, {_MACHINE}, {token}".encode()
        self._alive = socket.socket(socket.AF_UNIX)  # has a name until this process ends, even by SIGKILL
        if _MACHINE:
            self._alive.bind(f"\0{token}")
        os.register_at_fork(after_in_child=self._alive.close)  # processes that load data may end later
        self._lock = threading.Lock()  # held while a claim is put, renewed or released
        self._end = threading.Event()

    def take(self, shards: Sequence[str]) -> str | None:
        """Claim a random shard without a live claim. Return its name, or None if all shards have live claims."""
        live = self._find_live()
        for shard in sorted(random.sample(shards, len(shards)), key=live.__contains__):  # shards without a claim first
            if shard in self.held or (live.get(shard) and not self._has_ended(shard)):
                continue
            if shard in live:
                # Another worker may have replaced the claim since the listing.
                if any(self._find_live(shard).values()) and not self._has_ended(shard):
                    continue
                self.store.delete(self._path(shard))
            with self._lock:
                self.held.add(shard)  # before the put, so that a signal during it releases the claim
                if self.store.put(self._path(shard), self._content, if_absent=True):
                    return shard
                self.held.remove(shard)
        return None

    def take_or_wait(self, name: str, log: Callable[[str], object]) -> str:
        """Claim `name`, and return "". If the process that holds the claim renews it, and so is alive, return that."""
        first: ObjectInfo | None = None
        while self.take([name]) is None:
            claim = next(self.store.list(self._path(name)), None)
            holder = self._read(name).partition(b",")[0].decode(errors="replace")
            if first and claim and claim.modified > first.modified:
                return holder
            if claim and not first:
                first = claim
                log(f"waiting for at most {EXPIRY:g} s for {holder}, which may have been killed")
            time.sleep(POLLS[0])
        return ""

    def check(self, name: str) -> None:
        """Raise ValueError if our claim was deleted or replaced, and StorageUnreachable if it cannot be read."""
        if (content := self._read(name)) != self._content:
            self.store.check(write=False)  # the whole root may be missing
            raise ValueError(
                f"{self.store.uri(self._path(name))} was removed, or taken over by another process after {EXPIRY:g} s "
                f"without a renewal ({content.decode(errors='replace')}). Nothing more is saved; start again to resume"
            )

    def release(self, shard: str) -> None:
        """Delete our claim on a shard, unless another worker has replaced it. If this fails, the claim will expire."""
        with self._lock:
            with contextlib.suppress(StorageUnreachable):
                if self._read(shard) == self._content:
                    self.store.delete(self._path(shard))
            self.held.remove(shard)  # last: after a signal, the end of `with` tries again

    def renew(self) -> None:
        """Renew all held claims that are still ours. If a write fails, leave the other claims to the next call."""
        with contextlib.suppress(StorageUnreachable):
            for shard in [*self.held]:
                with self._lock:
                    if shard in self.held and self._read(shard) == self._content:
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
        self._alive.close()
        if isinstance(error, StorageUnreachable):
            return  # a release would wait for it in vain: the claims will expire
        self._thread.join()
        for shard in [*self.held]:
            self.release(shard)

    def _renew_until_end(self) -> None:
        while not self._end.wait(RENEWAL):
            self.renew()

    def _path(self, shard: str) -> str:
        return f"{self.stage}/claims/{shard}.txt"

    def _read(self, shard: str) -> bytes:
        """Return the content of a claim, or b"" if there is none."""
        try:
            return self.store.get(self._path(shard))
        except ObjectMissing:
            return b""

    def _has_ended(self, shard: str) -> bool:
        """Return True if the process that claims a shard ran on this machine, and has ended."""
        _, machine, token = [*self._read(shard).decode(errors="replace").split(", "), "", ""][:3]
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):  # OSError: the name is in use
            if machine and machine == _MACHINE:
                probe.bind(f"\0{token}")
                return True
        return False

    def _find_live(self, shard: str = "") -> dict[str, bool]:
        """Map each claimed shard to whether its claim is live. If `shard` is given, check only that shard.

        A claim dated EXPIRY seconds or more in the future counts as dead.
        """
        infos = self.store.list(f"{self.stage}/claims/{shard}")
        renewed = {match[1]: info.modified for info in infos if (match := _CLAIM.search(info.path))}
        now = self.store.now()
        return {shard: abs(now - time) < EXPIRY for shard, time in renewed.items()}
