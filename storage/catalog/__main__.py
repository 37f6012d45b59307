"""`vlbert catalog`: what a root holds, whether it is undamaged, and what may be deleted.

status ROOT                        stages, rows by status, snapshots, what each training run pinned
verify ROOT [DATASET]              every file checked against its digest; exit status 1 on a fault
gc ROOT [--grace HOURS] [--delete] what nothing names any more; deletes it only with --delete
"""

import argparse
import math
import sys
from collections.abc import Sequence

from storage.garbage import collect_garbage
from storage.inventory import Inventory, status
from storage.object_store import ObjectMissing, StorageUnreachable, open_store
from storage.programs import make_parser
from storage.verify import verify

COMMANDS = {
    "status": "stages, rows by status, snapshots, and what each training run pinned",
    "verify": "check every tar, manifest, snapshot and checkpoint against its digest; exit status 1 on a fault",
    "gc": "list what nothing names any more; deletes it only with --delete",
}


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 <= hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours; give 0 or more")
    return hours


def _print_faults(inventory: Inventory) -> int:
    """The exit status: 1 if there was a fault, or nothing to check."""
    shards, snapshots = (sum(map(len, found.values())) for found in (inventory.manifests, inventory.snapshots))
    checkpoints = sum(map(len, inventory.states.values())) if inventory.dataset is None else 0
    if not shards + snapshots + checkpoints:
        print(f"nothing is committed under {inventory.store.where()}", file=sys.stderr)
        return 1
    faults = 0
    for fault in verify(inventory):
        print(fault, flush=True)
        faults += 1
    result = f"{faults:,} faults" if faults else "OK: no problems found"
    print(f"{result} (checked: shards {shards:,}, snapshots {snapshots:,}, checkpoints {checkpoints:,})")
    return 1 if faults else 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("vlbert catalog", "What is committed under a root.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, description in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("root", help="a folder or s3://bucket/prefix")
        if name == "verify":
            command.add_argument("dataset", nargs="?", help="only this dataset")
        if name == "gc":
            command.add_argument("--grace", type=_hours, default=24, help="hours that things must be old (24)")
            command.add_argument("--delete", action="store_true", help="delete them")
    options = parser.parse_args(arguments)
    try:
        store = open_store(options.root, write=False)  # `gc` deletes, which raises its own errors
        if options.command == "verify":
            sys.exit(_print_faults(Inventory(store, options.dataset)))
        if options.command == "status":
            lines = status(store)
        else:
            lines = collect_garbage(store, options.grace * 3600, options.delete)
    except (ValueError, ObjectMissing, StorageUnreachable) as error:
        sys.exit(str(error))
    print("\n".join(lines) or f"nothing is committed under {options.root}")


if __name__ == "__main__":
    main()
