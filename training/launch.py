"""torchrun, which ends with the training's own line where that fails.

    python -m training.launch --standalone --nproc-per-node N -m vlbert.train RECIPE [--field value ...]

The arguments are torchrun's. By itself torchrun prints a report of some twenty lines behind the line of the rank, and
ends with the status 1. This ends with the status of the first rank that failed, with 128 + the signal that ended it, or
with 75 where torchrun itself was told to stop.

On several nodes of SLURM docker/slurm/rendezvous.sh tells torchrun where they meet.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

# Before the import of torch, which reads it. Else a stack trace of C++ is printed where another node ends first.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from training.program import STOPPED


def main(arguments: Sequence[str] | None = None) -> None:
    # They log which process ended how, and that another node has ended: the rank has printed why.
    for name in ("multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    options = run.parse_args(arguments)
    try:
        ranks = run.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        sys.exit(f"training.launch: {error}")
    # torchrun itself would give each of several ranks one thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    # Else ranks of a restart look for the dead (https://github.com/pytorch/pytorch/issues/135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    sys.exit(launch(options))


def launch(options: argparse.Namespace) -> int:
    """Run torchrun and return the exit status."""
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        print(f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}", file=sys.stderr, flush=True)
        return 128 - failure.exitcode
    except RendezvousError as error:
        fault = type(error).__name__
        print(f"training.launch: another node did not come, or has ended: see its error ({fault})", file=sys.stderr)
        return 1
    except SignalException:
        return STOPPED
    return 0


if __name__ == "__main__":
    main()
