"""Run torchrun so that a failed training run ends with its own error line and exit status.

    python -m training.launch --standalone --nproc-per-node N -m vlbert.train RECIPE [--field value ...]

The arguments are torchrun's. Plain torchrun prints a report of about twenty lines after the error line of the rank, and
exits with status 1. This program exits with the status of the first rank that failed, or with 128 + the signal number
if a signal ended that rank. It exits with 75 if torchrun itself received SIGTERM or SIGINT.

On several SLURM nodes, docker/slurm/rendezvous.sh gives torchrun the rendezvous address.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

# torch reads this when it is imported. Without it, a C++ stack trace is printed when another node ends first.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from training.program import STOPPED


def main(arguments: Sequence[str] | None = None) -> None:
    # These loggers report how a process or another node ended; the rank has already printed the reason.
    for name in ("multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    options = run.parse_args(arguments)
    try:
        ranks = run.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        sys.exit(f"training.launch: {error}")
    # With several ranks, torchrun's own default is one thread each.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    # Without it, restarted ranks try to connect to ended ones (https://github.com/pytorch/pytorch/issues/135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        print(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}", file=sys.stderr, flush=True)
        sys.exit(128 - failure.exitcode)
    except RendezvousError as error:
        sys.exit(f"training.launch: another node did not join, or has ended; see its error ({type(error).__name__})")
    except SignalException:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
