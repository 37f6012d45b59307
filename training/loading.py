"""Load batches in worker processes, ahead of time, and copy them to the device."""

import faulthandler
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from storage.object_store import ObjectMissing, StorageUnreachable
from training.stopping import ignore_group_signals

# Errors of data, settings or storage: programs print them as one line without a traceback.
EXPECTED = (ValueError, FloatingPointError, ObjectMissing, StorageUnreachable)

MAX_SECONDS = 600.0  # for one item. A worker that takes longer hangs: reads end after half of it (storage/reading.py)


def batches(data: Dataset, steps: Sequence[int], workers: int, device: torch.device) -> Iterator[Any]:
    """Yield data[step] for each of `steps`, in order, loaded ahead of time by `workers` processes.

    The batches are on `device`. If a worker process raises one of the errors in EXPECTED, the error is raised here with
    its original type. A worker that hangs prints its stack after MAX_SECONDS and exits, which raises RuntimeError here.
    """
    loader = DataLoader(
        _ErrorsAsItems(data),
        sampler=steps,
        batch_size=None,
        collate_fn=lambda item: item,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        # Forked workers share the data that is already in memory; spawned ones would get a copy. They take no lock that
        # the writer's thread may hold: bucket clients are created anew, and stdout is flushed before a fork.
        multiprocessing_context="fork" if workers else None,
        pin_memory=device.type != "cpu",
        worker_init_fn=_start_worker if workers else None,
    )
    for batch in loader if device.type == "cpu" else copy_ahead(loader, device):
        if isinstance(batch, EXPECTED):
            raise batch
        yield batch


def copy_ahead(items: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield copies of the items on the device. Each item is copied while the previous one is being used."""
    streams = torch.get_device_module(device)
    copying = streams.Stream()

    def copies() -> Iterator[tuple[Any, Any]]:
        for item in items:
            # The copy may reuse memory of older items, which kernels launched so far may still read.
            copying.wait_stream(streams.current_stream())
            with streams.stream(copying):
                copied = _move(item, device)
            yield copied, copying.record_event()

    for (item, copied_event), _ in itertools.pairwise(itertools.chain(copies(), [(None, None)])):
        streams.current_stream().wait_event(copied_event)
        yield item


def _move(item: Any, device: torch.device) -> Any:
    """Move everything that has a `to` method to the device, including inside lists and tuples."""
    if isinstance(item, list | tuple):
        return type(item)(_move(part, device) for part in item)
    return item.to(device) if hasattr(item, "to") else item


class _ErrorsAsItems(Dataset):
    """A dataset that returns EXPECTED errors as items. DataLoader would turn raised errors into traceback text."""

    def __init__(self, data: Dataset):
        self.data = data

    def __getitem__(self, index: int) -> Any:
        if get_worker_info():
            faulthandler.dump_traceback_later(MAX_SECONDS, exit=True, file=2)
        try:
            return self.data[index]
        except EXPECTED as error:
            return error
        finally:
            if get_worker_info():
                faulthandler.cancel_dump_traceback_later()


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    ignore_group_signals()
