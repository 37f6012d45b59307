"""Batches that are made ahead of time by other processes, and copied to the device."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from storage.object_store import ObjectMissing, StorageUnreachable
from training.stopping import ignore_group_signals

# What is wrong with data, settings or storage: these end a program with one line, and need no traceback.
EXPECTED = (ValueError, FloatingPointError, ObjectMissing, StorageUnreachable)


def batches(data: Dataset, steps: Sequence[int], workers: int, device: torch.device) -> Iterator[Any]:
    """data[step] for every step, in order, on the device, made ahead of time by `workers` processes; their errors come
    out as ours."""
    loader = DataLoader(
        _Caught(data),
        sampler=steps,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        # Forked workers share what the data has read already; to others it would be copied. They take no lock that the
        # writer's thread may hold meanwhile: clients of a bucket are made anew, and stdout is flushed before a fork.
        multiprocessing_context="fork" if workers else None,
        pin_memory=device.type != "cpu",
        worker_init_fn=_start_worker if workers else None,
    )
    for found in loader if device.type == "cpu" else copied_ahead(loader, device):
        if isinstance(found, EXPECTED):
            raise found
        yield found


def copied_ahead(items: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The items on the device, each copied there while it computes from the one before."""
    streams = torch.get_device_module(device)
    copying = streams.Stream()

    def copies() -> Iterator[tuple[Any, Any]]:
        for item in items:
            # Memory of older items, which is written over now, may still be read by what was asked for until here.
            copying.wait_stream(streams.current_stream())
            with streams.stream(copying):
                copied = _moved(item, device)
            yield copied, copying.record_event()

    for (item, is_there), _ in itertools.pairwise(itertools.chain(copies(), [None])):
        streams.current_stream().wait_event(is_there)
        yield item


def _moved(item: Any, device: torch.device) -> Any:
    """The item with all that has a method `to`, in lists and tuples too, on the device."""
    if isinstance(item, list | tuple):
        return type(item)(_moved(part, device) for part in item)
    return item.to(device) if hasattr(item, "to") else item


class _Caught(Dataset):
    """data, with errors as values: what a worker raises comes out of a DataLoader as the text of a traceback."""

    def __init__(self, data: Dataset):
        self.data = data

    def __getitem__(self, step: int) -> Any:
        try:
            return self.data[step]
        except EXPECTED as error:
            return error


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
    ignore_group_signals()


def _as_it_is(item: Any) -> Any:
    return item
