"""Claims: which worker is at work on which shard, so that any number of machines make each shard once.

    ROOT/<dataset>/<stage>/claims/<shard>-<n>.json     the n-th claim on a shard; the one with the largest n counts

A worker puts a claim before it begins a shard, renews it while it works, and deletes it at the end. A claim that was
not renewed for EXPIRY seconds is dead, and another worker puts the next one. Ages are differences between times of the
storage, so the clocks of the machines may differ. No worker leads the others.

Claims save work, no more: of two that make the same shard, the first commit counts (storage/catalog/commit.py).
"""

import contextlib
import json
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from storage.object_store import ObjectMissing, ObjectStore, StorageUnreachable
from storage.safe_json import parse_json, printable

EXPIRY = 300.0  # seconds after which a claim that was not renewed is dead
RENEWAL = 60.0  # seconds between two renewals: several may fail before a claim expires
POLLS = 1.0, 30.0  # seconds between looks at the shards that others are at work on: at first, and at most
_SAY = 60.0  # seconds between two lines about them
CLAIM = re.compile(r"(.+)/claims/(\d{5})-([1-9]\d{0,3})\.json")  # stage, shard, number


@dataclass(frozen=True)
class Claim:
    """A claim on a shard, as the storage has it. Times in seconds since 1970, by the storage's clock.

    worker   host and process, "unknown" where the file is damaged
    since    when the work began; of a damaged file, when it was last written
    renewed  when it was last written
    machine  the boot and the process namespace in which `process`, as _process gives it, means something
    """

    shard: str
    number: int
    worker: str
    since: float
    renewed: float
    machine: str = ""
    process: tuple[int, int] = (0, 0)

    def is_live(self, now: float) -> bool:
        """Whether its worker is at work.

        A claim is dead, too, if its time is more than EXPIRY ahead: no worker has renewed it since then. One of this
        machine is dead as soon as its process is.
        """
        if abs(now - self.renewed) >= EXPIRY:
            return False
        return not self.machine or self.machine != _machine() or _process(self.process[0]) == self.process


def _machine() -> str:
    """This boot of this machine and this namespace of processes; "" where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process(number: int) -> tuple[int, int]:
    """A process's number and when it started, in ticks since the boot; (0, 0) if there is none."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0, 0
    return (0, 0) if fields[0] in "ZX" else (number, int(fields[19]))  # a zombie does not work any more


def exit_at_sigterm() -> None:
    """From now on SIGTERM ends this program as sys.exit does, with status 143, so that its claims are released.

    Only from the main thread. Python drops what is raised while it calls a finalizer or the callback of a weak
    reference, as in an import. A program that went on after that ends at the next `exit_if_told`: before each claim,
    and where long work calls it.
    """

    def end(number: int, frame: object) -> None:
        _told.append(128 + number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


_told: list[int] = []  # the statuses with which signals wanted to end this program


def exit_if_told() -> None:
    """End this program where a SIGTERM wanted to end it before."""
    if _told:
        sys.exit(_told[0])


class Claims:
    """The claims on the shards of one stage, and those of them that this worker holds.

        with Claims(store, "captions/images") as claims:
            for shard, left in claims.each(shards, pending, print):
                ...  # make and commit it

    Within `with`, a thread renews what is held; at the end all is released. stage: path of its folder in the store.
    held: shard -> path and content of our claim on it.
    """

    def __init__(self, store: ObjectStore, stage: str):
        self.store, self.stage = store, stage.removesuffix("/")
        self.worker = f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(2)}"
        self.held: dict[str, tuple[str, bytes]] = {}
        self._lock = threading.Lock()  # of a renewal and a release: a claim that was released is not written again
        self._begun: tuple[str, bytes] | None = None  # path and content of a claim that is being put or deleted
        self._end = threading.Event()

    def found(self) -> dict[str, Claim]:
        """The newest claim on each shard, live or dead; one listing, and a request for each."""
        return {shard: claim for shard, info in self._listed().items() if (claim := self._read(*info))}

    def take(self, shards: Sequence[str]) -> str | None:
        """Claim one of these shards, a random one of those that nobody is at work on; None if there is none."""
        exit_if_told()
        listed = self._listed()
        free = [shard for shard in shards if shard not in listed]
        now = self.store.now()
        for shard in random.sample(free, len(free)):
            if self._put(shard, 1, now):
                return shard
        for shard in random.sample(shards, len(shards)):
            if shard not in listed or shard in self.held:
                continue
            claim = self._read(*listed[shard])
            if claim and not claim.is_live(now) and self._put(shard, claim.number + 1, now):
                return shard
        return None

    def release(self, shard: str) -> None:
        """Delete our claim, and the dead ones that it replaced; where the storage is away, it expires."""
        with self._lock:
            self._begun = self.held[shard]
            del self.held[shard]
        self._delete(self._begun[0])
        self._begun = None

    def _delete(self, path: str) -> None:
        _, shard, last = CLAIM.fullmatch(path).groups()
        with contextlib.suppress(StorageUnreachable):
            for number in range(1, int(last) + 1):
                self.store.delete(self._path(shard, number))

    def renew(self) -> None:
        """Write all held claims again; one that cannot be written stays as it is until the next time."""
        for shard in [*self.held]:
            with self._lock:
                if shard in self.held:
                    try:
                        self.store.put(*self.held[shard])
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
        exit_if_told()

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
            left, found, now = pending(shards), self.found(), self.store.now()
            others = [found[shard] for shard in left if shard in found and found[shard].is_live(now)]
            if not others or not for_all and len(others) < len(shards):
                return left
            if time.monotonic() >= due:
                first = min(others, key=lambda claim: claim.since)
                minutes = (now - first.since) / 60
                more = f" and {len(others) - 1} more" if len(others) > 1 else ""
                say(f"waiting for shard {first.shard}, at which {first.worker} has been for {minutes:.0f} min{more}")
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
        if self._begun:  # a signal came meanwhile
            path, data = self._begun
            with contextlib.suppress(ObjectMissing, StorageUnreachable):
                if self.store.get(path) == data:
                    self._delete(path)

    def _renew_until_end(self) -> None:
        while not self._end.wait(RENEWAL):
            self.renew()

    def _path(self, shard: str, number: int) -> str:
        return f"{self.stage}/claims/{shard}-{number}.json"

    def _put(self, shard: str, number: int, now: float) -> bool:
        pid, started = _process(os.getpid())
        content = {"worker": self.worker, "since": now, "machine": _machine(), "process": [pid, started]}
        data, path = json.dumps(content).encode(), self._path(shard, number)
        self._begun = path, data
        ours = self.store.put(path, data, if_absent=True)
        if ours:
            with self._lock:
                self.held[shard] = path, data
        self._begun = None
        return ours

    def _listed(self) -> dict[str, tuple[str, int, float]]:
        """Shard -> its name, number and time of the newest claim on it."""
        newest = {}
        for info in self.store.list(f"{self.stage}/claims/"):
            if found := CLAIM.fullmatch(info.path):
                shard, number = found[2], int(found[3])
                if shard not in newest or newest[shard][1] < number:
                    newest[shard] = shard, number, info.modified
        return newest

    def _read(self, shard: str, number: int, modified: float) -> Claim | None:
        """None if it was released since the listing."""
        path = self._path(shard, number)
        try:
            content = self.store.get(path)
        except ObjectMissing:
            return None
        try:
            return Claim(shard, number, **_checked(parse_json(content, path), modified), renewed=modified)
        except (ValueError, KeyError, TypeError):
            return Claim(shard, number, "unknown", modified, modified)


def _checked(content: Any, renewed: float) -> dict:
    pid, started = content["process"]
    return {
        "worker": printable(content["worker"])[:100],
        "since": max(0.0, min(float(content["since"]), renewed)),  # no work begins after its claim was written
        "machine": str(content["machine"]),
        "process": (int(pid), int(started)),
    }
