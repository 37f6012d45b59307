"""The kill harness at full length: writers of shards and trainings, killed with SIGKILL again and again.

    python -m benchmarks.kill [--seed N] [--kills 100] [--training-kills 12]

Prints a table, and exits with status 1 where something was torn, lost, double or not as in an uninterrupted run.
"""

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kill", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100, help="of writers (100); 0 leaves them out")
    parser.add_argument("--training-kills", type=int, default=12, help="of trainings (12); 0 leaves them out")
    parser.add_argument("--rank-of", nargs=3, metavar=("ROOT", "SEEN", "WORKERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of:  # a process of a training that is killed
        root, seen, workers = options.rank_of
        from benchmarks import killed_training  # not above: writers are forked, and torch would come with them

        return killed_training.trained(Path(root), Path(seen), int(workers))
    rows, failed = [], []
    for name, kills in (("killed_writer", options.kills), ("killed_training", options.training_kills)):
        if not kills:
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kill-") as folder:
            say = lambda line: print(line, flush=True)  # noqa: E731
            check = importlib.import_module(f"benchmarks.{name}").check
            faults = check(Path(folder), options.seed, kills, say)
        failed += [f"{name}: {fault}" for fault in faults]
        rows.append((name, kills, len(faults), time.monotonic() - started, "FAILED" if faults else "passed"))
    print(f"\n{'part':<16} {'kills':>6} {'faults':>7} {'seconds':>8}  result (seed {options.seed})")
    for name, kills, faults, seconds, result in rows:
        print(f"{name:<16} {kills:>6} {faults:>7} {seconds:>8.0f}  {result}")
    for fault in failed:
        print(fault)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
