"""Loading processes that hang."""

import ctypes
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import Dataset
from writing import wait_for

import training.loading
from storage.object_store import StorageUnreachable
from training.loading import batches


@dataclass
class Numbers(Dataset):
    """Whose sixth item never comes."""

    library: Callable = ctypes.CDLL

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.library(None).sleep(600)
        return index


# With PyDLL the worker holds the GIL, as in a page fault of a mapped file whose server is gone: SIGTERM ends nothing.
@pytest.mark.parametrize("library", [ctypes.CDLL, ctypes.PyDLL])
def test_a_worker_that_hangs_is_named_with_its_stack_and_killed(monkeypatch, capfd, library):
    monkeypatch.setattr(training.loading, "MOST_SILENT", 2.0)
    got, began = [], time.monotonic()
    with pytest.raises(StorageUnreachable, match=r"loading worker 1 hangs: batch [35] has not come for 2 s"):
        got.extend(batches(Numbers(library), range(2, 9), 2, torch.device("cpu")))
    assert got in ([2, 3, 4], [2]), "those before it; a batch that was not yet sent may be lost with the worker"
    assert time.monotonic() - began < 30
    assert "test_loading.py" in capfd.readouterr().err, "where it hangs"
    wait_for(lambda: not multiprocessing.active_children())


def test_slow_loading_is_no_hanging(monkeypatch, capfd):
    """A pause of the training is none, either."""
    monkeypatch.setattr(training.loading, "MOST_SILENT", 2.0)
    for _ in batches(Numbers(), range(4), 1, torch.device("cpu")):
        time.sleep(0.8)
    assert "Timeout" not in capfd.readouterr().err
