"""torchrun, which ends with the training's own line where that fails.

    python -m training.launch --standalone --nproc-per-node N -m vlbert.train RECIPE [field=value ...]

The arguments are torchrun's. By itself torchrun prints a report of some twenty lines behind what the rank has said, and
ends with the status 1; this has the status of the first rank that failed, or 128 and the signal that ended it.
"""

import logging
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: Sequence[str] | None = None) -> None:
    # Which process ended how: the rank has said why.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        print(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr, flush=True)
        sys.exit(128 - failure.exitcode)


if __name__ == "__main__":
    main()
