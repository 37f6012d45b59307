"""torchrun, which ends with the training's own line where that fails.

    python -m training.launch --standalone --nproc-per-node N -m vlbert.train RECIPE [field=value ...]

The arguments are torchrun's. By itself torchrun prints a report of some twenty lines behind the line of the rank, and
ends with the status 1. This ends with the status of the first rank that failed; with 128 + the signal that ended it; or
with 128 + the signal that torchrun itself got. Where the environment variable TORCHELASTIC_ERROR_FILE names a file, the
error of the first rank that failed is written to it.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def main(arguments: Sequence[str] | None = None) -> None:
    # It logs which process ended how: the rank has printed why.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if os.environ.get(ERROR_FILE) and isinstance(failure.message, dict):  # as training.loop writes it
            Path(os.environ[ERROR_FILE]).write_text(failure.message["message"])
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        print(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr, flush=True)
        sys.exit(128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
