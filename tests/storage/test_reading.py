"""storage.reading: samples by number, from files and through joined range requests."""

import contextlib
import gc
import multiprocessing
import os
import re

import numpy as np
import pytest
from read import COUNT, identity, samples_of
from stores import Recorded
from tiny import commit_samples, tiny_sample, with_bytes

from storage.object_store import ObjectMissing, StorageUnreachable, open_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("reading")
    commit_samples(root, "captions", [tiny_sample(i) for i in range(COUNT)], per_shard=16)
    return root


@pytest.fixture(scope="module")
def written() -> list[tuple]:
    return [identity(tiny_sample(i)) for i in range(COUNT)]


@pytest.mark.parametrize("remote", [False, True])
def test_samples_come_in_the_order_of_their_numbers_and_neighbours_in_one_request(folder, written, remote):
    counted = Recorded(open_store(str(folder)), remote)
    samples = samples_of(counted)
    for numbers, requests in (
        ([], 0), ([7], 1), ([3, 2, 1, 0], 1), ([7, 4, 6, 5], 1), ([14, 15, 16, 17], 2), ([0, 39], 2), ([3, 3], 1),
        ([5, 39, 5, 6, 5, 0, 38], 2), ([*range(39, -1, -1)], 3),
    ):  # fmt: skip
        counted.ranges.clear()
        assert [identity(sample) for sample in samples.samples(numbers)] == [written[number] for number in numbers]
        assert len(counted.ranges) == requests * remote, numbers
        assert [identity(samples.sample(number)) for number in numbers] == [written[number] for number in numbers]


def test_joined_requests_are_bounded(tmp_path):
    large = [with_bytes(tiny_sample(i), os.urandom(3 << 20)) for i in range(5)]
    commit_samples(tmp_path, "captions", large)
    samples = samples_of(open_store(str(tmp_path)))
    assert [len(places) for places in samples._group_neighbours([0, 1, 2, 3, 4])] == [2, 2, 1]
    assert [len(places) for places in samples._group_neighbours([0, 2, 4])] == [1, 1, 1], "3 MB are no small gap"
    assert [identity(sample) for sample in samples.samples([4, 0, 3, 1])] == [identity(large[i]) for i in (4, 0, 3, 1)]


def test_a_damaged_sample_or_a_truncated_tar_leaves_the_others_readable(tmp_path, written):
    commit_samples(tmp_path, "captions", [tiny_sample(i) for i in range(16)], per_shard=16)
    samples = samples_of(open_store(str(tmp_path)))
    tar, offset = tmp_path / samples.index.tars[0], int(samples.index.offset[5])
    data = bytearray(tar.read_bytes())
    data[offset + 200] ^= 1  # in the first header of sample 5
    tar.write_bytes(data)
    found = samples.samples(range(16))  # and the file is open from now on
    assert [identity(sample) for i, sample in enumerate(found) if i != 5] == [written[i] for i in range(16) if i != 5]
    assert isinstance(found[5], ValueError)
    assert re.search(rf"{tar.name} at byte {offset}: the tar header at byte 0 is damaged", str(found[5]))
    os.truncate(tar, int(samples.index.offset[14]) + 100)
    found = samples.samples(range(10, 16))
    assert [identity(sample) for sample in found[:4]] == written[10:14]
    assert [type(sample) for sample in found[4:]] == [ValueError, ValueError]
    assert "ends before byte" in str(found[4])
    with pytest.raises(ValueError, match=r"\.tar has \d+ bytes, but its manifest needs \d+: it is truncated or"):
        samples_of(open_store(str(tmp_path)))


def test_a_missing_tar_is_an_error_of_the_run(tmp_path):
    commit_samples(tmp_path, "captions", [tiny_sample(i) for i in range(4)])
    samples = samples_of(open_store(str(tmp_path)))
    (tmp_path / samples.index.tars[0]).unlink()
    for numbers in ([0, 1], [0]):
        with pytest.raises(ObjectMissing, match=r"captions/regions/.*\.tar .*Start the run again"):
            samples.samples(numbers)


class Away(Recorded):
    """A bucket that gives these HTTP statuses in place of the next ranges; None: no answer at all."""

    statuses: list[int | None] = []

    def get_range(self, path: str, offset: int, length: int) -> bytes:
        if self.statuses:
            raise StorageUnreachable("it failed", self.statuses.pop())
        return super().get_range(path, offset, length)


def test_a_read_is_repeated_while_the_server_is_away_but_not_if_it_refuses(folder, written, capfd, monkeypatch):
    pauses = []
    monkeypatch.setattr("storage.reading.time.sleep", pauses.append)
    store = Away(open_store(str(folder)), remote=True)
    patient, impatient = samples_of(store), samples_of(store, patience=0)
    store.statuses = [None, 503, None]
    assert identity(patient.sample(3)) == written[3]
    assert len(pauses) == 3
    assert all(0.5 <= pause <= 30 for pause in pauses)
    assert capfd.readouterr().err == "waiting for the storage, for at most 300 s: it failed\n"
    for samples, status in ((patient, 403), (impatient, None)):
        store.statuses = [status]
        with pytest.raises(StorageUnreachable):
            samples.sample(3)
        assert identity(samples.sample(3)) == written[3]
    assert len(pauses) == 3


def test_a_tar_that_the_listing_lacks_is_read(tmp_path, written, monkeypatch):
    """Network file systems list what was written last late."""
    commit_samples(tmp_path, "captions", [tiny_sample(i) for i in range(COUNT)], per_shard=16)
    store = open_store(str(tmp_path))
    last, listed = samples_of(store).index.tars[-1], store.list
    monkeypatch.setattr(store, "list", lambda prefix="": (info for info in listed(prefix) if info.path != last))
    assert identity(samples_of(store).sample(COUNT - 1)) == written[-1]
    (tmp_path / last).unlink()
    with pytest.raises(ValueError, match=f"{last} has 0 bytes"):
        samples_of(store)


def test_descriptors_are_kept_and_bounded(tmp_path, written):
    def open_tars() -> int:
        gc.collect()  # a reader that an earlier test's traceback keeps alive would be counted too
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by another thread
                found += os.readlink(f"/proc/self/fd/{name}").startswith(f"{tmp_path}/")
        return found

    commit_samples(tmp_path, "captions", [tiny_sample(i) for i in range(COUNT)], per_shard=4)
    samples = samples_of(open_store(str(tmp_path)))
    for _ in range(3):
        assert [identity(samples.sample(i)) for i in range(COUNT)] == written
    assert open_tars() == 10
    del samples
    assert open_tars() == 0  # a reader that is gone keeps none
    samples = samples_of(open_store(str(tmp_path)))
    samples._max_files = 3
    for i in np.random.default_rng(0).permutation(COUNT).tolist():
        assert identity(samples.sample(i)) == written[i]
    assert open_tars() == 3


def test_forked_workers_read_through_the_same_descriptors(folder, written):
    samples = samples_of(open_store(str(folder)))
    samples.samples(range(COUNT))  # opens every tar before the fork
    context = multiprocessing.get_context("fork")
    wrong = context.Value("i", 0)

    def read(seed: int) -> None:
        for i in np.random.default_rng(seed).integers(COUNT, size=300).tolist():
            if identity(samples.sample(i)) != written[i]:
                with wrong.get_lock():
                    wrong.value += 1

    workers = [context.Process(target=read, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    read(9)
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert wrong.value == 0
