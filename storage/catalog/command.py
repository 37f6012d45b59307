"""`vlbert catalog`: prints a summary of a root, checks its files, and deletes files that nothing uses any more."""

import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import tyro

from storage.garbage import collect_garbage
from storage.inventory import Inventory, status
from storage.object_store import ObjectMissing, StorageUnreachable, open_store
from storage.programs import Command, Positional, Root
from storage.verify import verify

OnlyDataset = Annotated[str | None, Positional, tyro.conf.arg(metavar="DATASET", help="check only this dataset")]


def print_status(root: Root) -> None:
    """Print the row counts of each stage by status, and for each snapshot, whether a checkpoint pins it."""
    _print(status(open_store(root, write=False)), root)


def verify_files(root: Root, dataset: OnlyDataset = None) -> None:
    """Check every tar, manifest, snapshot and checkpoint against its digest. Exits with status 1 if one is damaged."""
    inventory = Inventory(open_store(root, write=False), dataset)
    shards, snapshots = (sum(map(len, names.values())) for names in (inventory.manifests, inventory.snapshots))
    checkpoints = len(inventory.states)
    if not shards + snapshots + checkpoints:
        print(f"nothing is committed under {inventory.store.uri()}", file=sys.stderr)
        sys.exit(1)
    faults = 0
    for fault in verify(inventory):
        print(fault, flush=True)
        faults += 1
    result = f"{faults:,} faults" if faults else "OK: no problems found"
    print(f"{result} (checked: shards {shards:,}, snapshots {snapshots:,}, checkpoints {checkpoints:,})")
    sys.exit(1 if faults else 0)


def delete_garbage(root: Root, grace: float = 24, delete: bool = False) -> None:
    """List or delete the files that no manifest, snapshot or checkpoint uses any more.

    Args:
        grace: minimum age in hours; younger files are kept
        delete: delete the files instead of only listing them
    """
    if not 0 <= grace < float("inf"):
        raise ValueError(f"--grace is {grace}; set it to a number of hours, 0 or more")
    store = open_store(root, write=False)  # a delete that is not permitted raises its own error
    _print(collect_garbage(store, grace * 3600, delete), root)


def _print(lines: Iterable[str], root: str) -> None:
    print("\n".join(lines) or f"nothing is committed under {root}")


COMMANDS: dict[str, Callable[..., Any]] = {"status": print_status, "verify": verify_files, "gc": delete_garbage}
main = Command("vlbert catalog", COMMANDS, ObjectMissing, StorageUnreachable)
