"""Pickles and weight files of strangers: what they hold comes out, and nothing that they name is run."""

import codecs
import os
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.weights.tensor_files import read_tensors
from storage.pickles import UnsafePickle, read_pickle
from vlbert.datasets.refcoco import read_plain_pickle


class Calls:
    """Pickled, it is a call."""

    def __init__(self, call: Callable, *arguments: object, state: object = None):
        self.reduced = (call, arguments) if state is None else (call, arguments, state)

    def __reduce__(self) -> tuple:
        return self.reduced


# Things that make the folder or file `mark` when they are unpickled, by what they name.
HOSTILE: dict[str, Callable[[Path], object]] = {
    "system": lambda mark: Calls(os.system, f"mkdir {mark}"),
    "eval": lambda mark: Calls(eval, f"__import__('os').mkdir({str(mark)!r})"),
    "loads": lambda mark: Calls(pickle.loads, pickle.dumps(Calls(os.mkdir, str(mark)))),
    "memmap": lambda mark: Calls(np.memmap, str(mark), "uint8", "w+", 0, (1,)),
    "getattr": lambda mark: Calls(np.ndarray.tofile, np.ones(3), str(mark)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_what_it_names_and_does_not_run(name: str, tmp_path: Path):
    mark, file, payload = tmp_path / "ran", tmp_path / "file", HOSTILE[name](tmp_path / "ran")
    beside = {"model": {"w": np.ones(3)}, "more": payload}
    for read, save in (
        (read_plain_pickle, lambda: file.write_bytes(pickle.dumps([payload]))),
        (read_tensors, lambda: file.write_bytes(pickle.dumps(beside, 2))),
        (read_tensors, lambda: torch.save(beside, file)),
        (read_tensors, lambda: torch.save(beside, file, _use_new_zipfile_serialization=False)),
    ):
        save()
        with pytest.raises(ValueError, match=rf"{file} wants to load \S*{name}, .*do not trust it"):
            read(file)
    assert not mark.exists()
    pickle.loads(pickle.dumps([payload]))  # it is hostile: an ordinary reader runs it
    assert mark.exists()


def test_a_damaged_index_allocates_nothing():
    tracemalloc.start()
    assert read_pickle(b"\x80\x04Nr\xff\xff\xff\0.") is None  # None, stored as object 2**24 - 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_pickle_can_neither_bring_pointers_in_arrays_nor_change_the_reader():
    # numpy's own reader takes these 16 bytes for two pointers, and follows them.
    forged = Calls(np.dtype, "O8", False, True, state=(3, "|", None, None, None, -1, -1, 0))
    rebuild = np._core.multiarray._reconstruct
    pointers = Calls(rebuild, np.ndarray, (0,), b"b", state=(1, (2,), forged, False, b"A" * 16))
    records = np.zeros(2, dtype=[("a", "f4"), ("b", "f4")])
    for value, what in (
        (pointers, "an array of 'O8'"),
        (np.array([{}, 1], object), "an array of 'O8'"),
        (records, "an array of 'V8'"),
        (np.array(["text"]), "an array of 'U4'"),
        (Calls(np.dtype, np.float32), "numpy.float32"),
        (Calls(codecs.encode, "x", "utf-7"), "_codecs.encode to 'utf-7'"),
    ):
        with pytest.raises(UnsafePickle, match=re.escape(what)):
            read_pickle(pickle.dumps(value, 2))
    # BUILD sets the state of what stands for numpy's function: here it would call str.
    ours = b"cnumpy._core.multiarray\n_reconstruct\n"
    read_pickle(b"\x80\x02" + ours + b"(ccollections\nOrderedDict\n)}}tb.")
    assert read_pickle(pickle.dumps(np.arange(3), 2)).tolist() == [0, 1, 2]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)
ARRAYS = {
    "columns first": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "big end first": np.arange(4).astype(">f8"),
    "one number": np.array(7),
    "a scalar": np.float64(2.5),
    "none": np.zeros((0, 3), np.float16),
    "truths": np.array([True, False]),
}


@settings(max_examples=60, deadline=None)
@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_and_arrays_come_out_as_they_went_in(value: object, protocol: int):
    found = read_pickle(pickle.dumps((value, ARRAYS), protocol))
    assert repr(found[0]) == repr(value)  # 1, 1.0 and True are equal
    for name, array in ARRAYS.items():
        assert np.array_equal(found[1][name], array), name
        assert np.shape(found[1][name]) == array.shape


def test_a_pickle_of_python_2_and_old_numpy_is_read():
    raw = np.float32([1, -2]).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x02\x85cnumpy\ndtype\n"
        b"U\x02f4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x08" + raw + b"tb"
    )
    assert read_pickle(b"\x80\x02}U\x01w" + array + b"s.")["w"].tolist() == [1, -2]
