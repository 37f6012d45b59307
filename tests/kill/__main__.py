"""The kill harness at full length: writers of shards and trainings, killed with SIGKILL again and again.

    python -m tests.kill [--seed N] [--kills 100] [--training-kills 12]

Ends with an error if something was torn, lost, double or not as in an uninterrupted run.
"""

import argparse
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100, help="of writers (100); 0 leaves them out")
    parser.add_argument("--training-kills", type=int, default=12, help="kills of training runs (12); 0 leaves them out")
    parser.add_argument("--rank-of", nargs=3, metavar=("ROOT", "SEEN", "WORKERS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of:  # a process of a training that is killed
        root, seen, workers = options.rank_of
        from tests.kill import training  # not above: writers are forked, and torch would come with them

        training.trained(Path(root), Path(seen), int(workers))
        return
    for name, kills in (("writer", options.kills), ("training", options.training_kills)):
        if kills:
            with tempfile.TemporaryDirectory(prefix="kill-") as folder:
                check = importlib.import_module(f"tests.kill.{name}").check
                check(Path(folder), options.seed, kills, lambda line: print(line, flush=True))
            print(f"{name}, {kills} kills, seed {options.seed}: no fault", flush=True)


if __name__ == "__main__":
    main()
