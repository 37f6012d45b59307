"""`vlbert catalog`: what a root holds, whether it is undamaged, and what may be deleted."""

import sys
from collections.abc import Iterable
from typing import Annotated

import tyro

from storage.garbage import collect_garbage
from storage.inventory import Inventory, status
from storage.object_store import ObjectMissing, StorageUnreachable, open_store
from storage.programs import Command, Positional, Root
from storage.verify import verify

OnlyDataset = Annotated[str | None, Positional, tyro.conf.arg(metavar="DATASET", help="only this dataset")]


def print_status(root: Root) -> None:
    """Print stages, rows by status, and snapshots, with those that checkpoints pin."""
    _print(status(open_store(root, write=False)), root)


def verify_files(root: Root, dataset: OnlyDataset = None) -> None:
    """Check every tar, manifest, snapshot and checkpoint against its digest; exit status 1 on a fault."""
    sys.exit(_print_faults(Inventory(open_store(root, write=False), dataset)))


def delete_garbage(root: Root, grace: float = 24, delete: bool = False) -> None:
    """List what nothing names any more.

    Args:
        grace: hours that things must be old
        delete: delete them
    """
    if not 0 <= grace < float("inf"):
        raise ValueError(f"--grace is {grace}; give hours, 0 or more")
    store = open_store(root, write=False)  # deleting raises its own errors
    _print(collect_garbage(store, grace * 3600, delete), root)


def _print(lines: Iterable[str], root: str) -> None:
    print("\n".join(lines) or f"nothing is committed under {root}")


def _print_faults(inventory: Inventory) -> int:
    """The exit status: 1 if there was a fault, or nothing to check."""
    shards, snapshots = (sum(map(len, found.values())) for found in (inventory.manifests, inventory.snapshots))
    checkpoints = sum(map(len, inventory.states.values())) if inventory.dataset is None else 0
    if not shards + snapshots + checkpoints:
        print(f"nothing is committed under {inventory.store.uri()}", file=sys.stderr)
        return 1
    faults = 0
    for fault in verify(inventory):
        print(fault, flush=True)
        faults += 1
    result = f"{faults:,} faults" if faults else "OK: no problems found"
    print(f"{result} (checked: shards {shards:,}, snapshots {snapshots:,}, checkpoints {checkpoints:,})")
    return 1 if faults else 0


COMMANDS = {"status": print_status, "verify": verify_files, "gc": delete_garbage}
main = Command("vlbert catalog", COMMANDS, ObjectMissing, StorageUnreachable)
