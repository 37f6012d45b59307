"""Samples by number: through descriptors that stay open, and through joined range requests."""

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import re
from collections.abc import Iterator

import numpy as np
import pytest
from loaded import captions, training_data
from read import COUNT, Counted, identity, samples_of
from s3 import s3_server
from s3_faults import faulty
from tiny import commit_samples, tiny_root, tiny_sample, with_bytes

from storage.object_store import ObjectInfo, ObjectMissing, StorageUnreachable, open_store
from vlbert.data.loading import SnapshotSpan, drawn


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("reading")
    commit_samples(root, "captions", [tiny_sample(i) for i in range(COUNT)], per_shard=16)
    return root


@pytest.fixture(params=["folder", "bucket"])
def store(request, folder) -> Counted:
    return Counted(open_store(str(folder)) if request.param == "folder" else request.getfixturevalue("bucket"))


@pytest.fixture(scope="module")
def bucket(folder):
    with s3_server("reading"):
        store = open_store("s3://reading/root")
        local = open_store(str(folder))
        for info in local.list():
            store.put(info.path, local.get(info.path))
        yield store


@pytest.fixture(scope="module")
def written() -> list[tuple]:
    return [identity(tiny_sample(i)) for i in range(COUNT)]


def test_each_number_is_the_sample_that_was_written_there(store, written):
    samples = samples_of(store)
    assert [identity(samples.sample(i)) for i in range(COUNT)] == written


@pytest.mark.parametrize(
    "numbers", [[], [7], [3, 2, 1, 0], [15, 16, 17], [5, 39, 5, 6, 5, 0, 38], [*range(39, -1, -1)]], ids=str
)
def test_samples_come_in_the_order_asked_for(store, written, numbers):
    found = samples_of(store).samples(numbers)
    assert [identity(sample) for sample in found] == [written[number] for number in numbers]


def test_neighbours_in_a_tar_are_one_request(bucket, written):
    counted = Counted(bucket)
    samples = samples_of(counted)
    for numbers, requests in (([4, 5, 6, 7], 1), ([7, 4, 6, 5], 1), ([14, 15, 16, 17], 2), ([0, 39], 2), ([3, 3], 1)):
        counted.ranges.clear()
        assert [identity(sample) for sample in samples.samples(numbers)] == [written[number] for number in numbers]
        assert len(counted.ranges) == requests, numbers


def test_a_chunk_is_one_request_where_single_samples_are_many(tmp_path):
    large = [with_bytes(tiny_sample(i), os.urandom(100_000)) for i in range(64)]
    commit_samples(tmp_path, "captions", large, per_shard=64)
    store = Counted(open_store(str(tmp_path)))
    samples = samples_of(store)
    groups, stretches = {}, [SnapshotSpan(0, 0, 64, "")]
    for chunk in (1, 8):
        steps = [[number for _, _, number in drawn(stretches, step * 16, 16, 1, chunk)] for step in range(4)]
        groups[chunk] = sum(len(samples._neighbours(numbers)) for numbers in steps)
    assert groups[8] <= 9, "eight chunks, one of which may go round the end"
    assert groups[1] > 30


def test_a_training_takes_chunks_of_neighbours(tmp_path):
    data = training_data(tiny_root(tmp_path, samples=20), chunk=4)
    number = {data.source.samples.sample(i).key: i for i in range(20)}
    for step in range(5):  # two epochs, of five chunks each
        taken = [number[key] for key in captions(data[step][0])]
        for start in (0, 4):
            assert taken[start : start + 4] == [(taken[start] + i) % 20 for i in range(4)]


def test_what_is_read_together_is_bounded(tmp_path):
    large = [with_bytes(tiny_sample(i), os.urandom(3 << 20)) for i in range(5)]
    commit_samples(tmp_path, "captions", large)
    store = Counted(open_store(str(tmp_path)))
    samples = samples_of(store)
    assert [len(places) for places in samples._neighbours([0, 1, 2, 3, 4])] == [2, 2, 1]
    assert [len(places) for places in samples._neighbours([0, 2, 4])] == [1, 1, 1], "3 MB are no small gap"
    assert [identity(sample) for sample in samples.samples([4, 0, 3, 1])] == [identity(large[i]) for i in (4, 0, 3, 1)]


def test_a_damaged_sample_does_not_take_its_neighbours_along(tmp_path, written):
    commit_samples(tmp_path, "captions", [tiny_sample(i) for i in range(COUNT)], per_shard=16)
    samples = samples_of(open_store(str(tmp_path)))
    tar, offset = tmp_path / samples.index.tars[0], int(samples.index.offset[5])
    data = bytearray(tar.read_bytes())
    data[offset + 200] ^= 1  # in the first header of sample 5
    tar.write_bytes(data)
    found = samples.samples(range(16))
    assert [identity(sample) for i, sample in enumerate(found) if i != 5] == [written[i] for i in range(16) if i != 5]
    assert isinstance(found[5], ValueError)
    assert re.search(rf"{tar.name} at byte {offset}: the tar header at byte 0 is damaged", str(found[5]))


def test_a_tar_that_is_cut_short_loses_only_what_it_lost(tmp_path, written):
    commit_samples(tmp_path, "captions", [tiny_sample(i) for i in range(16)], per_shard=16)
    samples = samples_of(open_store(str(tmp_path)))
    samples.sample(0)  # the file is open from before
    os.truncate(tmp_path / samples.index.tars[0], int(samples.index.offset[14]) + 100)
    found = samples.samples(range(10, 16))
    assert [identity(sample) for sample in found[:4]] == written[10:14]
    assert [type(sample) for sample in found[4:]] == [ValueError, ValueError]
    assert "ends before byte" in str(found[4])


@pytest.mark.parametrize("off", [-512, -1, 1, 512])
def test_an_index_that_is_off_reads_no_sample(folder, off):
    samples = samples_of(open_store(str(folder)))
    samples.index = dataclasses.replace(samples.index, offset=samples.index.offset + off)
    for found in samples.samples([1, 2, 3, 20]):
        assert isinstance(found, ValueError)
    with pytest.raises(ValueError, match=r"\.tar at byte \d+: "):
        samples.sample(20)


def test_a_tar_that_is_gone_is_no_samples_fault(tmp_path):
    commit_samples(tmp_path, "captions", [tiny_sample(i) for i in range(4)])
    samples = samples_of(open_store(str(tmp_path)))
    (tmp_path / samples.index.tars[0]).unlink()
    for numbers in ([0, 1], [0]):
        with pytest.raises(ObjectMissing, match="there is no object captions/regions"):
            samples.samples(numbers)


ATTEMPTS = 7  # of a request, before a server counts as away


@pytest.mark.slow
def test_a_server_that_is_away_for_some_seconds_is_waited_for_and_that_is_said_once(folder, written, capfd):
    with s3_server("away") as server, faulty(server, faults={}) as proxy:
        store, local = open_store("s3://away"), open_store(str(folder))
        for info in local.list():
            store.put(info.path, local.get(info.path))
        samples = samples_of(store)
        samples.sample(0)
        proxy.plan("GET", ".tar", *["reset before"] * (3 * ATTEMPTS))
        assert [identity(sample) for sample in samples.samples([3, 19, 35])] == [written[i] for i in (3, 19, 35)]
        said = [line for line in capfd.readouterr().err.splitlines() if "waits" in line]
        assert len(said) == 1
        assert "reading waits for the storage, at most 300 s: get_object of s3://away/captions" in said[0]

        impatient = samples_of(store, patience=0)
        proxy.plan("GET", ".tar", *["reset before"] * ATTEMPTS)
        with pytest.raises(StorageUnreachable, match=r"get_object of .*\.tar .* failed"):
            impatient.sample(3)
        assert identity(impatient.sample(3)) == written[3]


def test_a_server_that_refuses_is_not_waited_for(folder, capfd):
    with s3_server("gone"):
        store, local = open_store("s3://gone/root"), open_store(str(folder))
        for info in local.list():
            store.put(info.path, local.get(info.path))
        samples = samples_of(store)
        client = store._client()
        for entry in client.list_objects_v2(Bucket="gone")["Contents"]:
            client.delete_object(Bucket="gone", Key=entry["Key"])
        client.delete_bucket(Bucket="gone")
        with pytest.raises(StorageUnreachable, match="NoSuchBucket"):
            samples.sample(0)
        assert "waits" not in capfd.readouterr().err


def test_a_file_that_its_disk_does_not_give_is_asked_for_anew(folder, written):
    samples = samples_of(open_store(str(folder)))
    samples.sample(0)
    samples._files[0] = open("/proc/self/mem", "rb", buffering=0)  # noqa: SIM115  every read of page 0 is an OSError
    with pytest.raises(OSError, match="Input/output error"):
        os.pread(samples._files[0].fileno(), 10, 0)
    assert [identity(sample) for sample in samples.samples([0, 3])] == [written[0], written[3]]
    assert samples._files.get(0) is None, "it is opened anew"


class Lagging(Counted):
    """A listing lacks what was written last."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        tars = [info for info in self._store.list(prefix) if info.path.endswith(".tar")]
        yield from (info for info in self._store.list(prefix) if info != tars[-1])


def test_a_tar_that_only_the_listing_lacks_is_there(tmp_path, written):
    commit_samples(tmp_path, "captions", [tiny_sample(i) for i in range(COUNT)], per_shard=16)
    store = open_store(str(tmp_path))
    last = samples_of(store).index.tars[-1]
    samples = samples_of(Lagging(store))
    assert identity(samples.sample(COUNT - 1)) == written[-1]
    os.truncate(tmp_path / last, 1000)
    with pytest.raises(ValueError, match=f"{last} has 0 bytes"):
        samples_of(Lagging(store))


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
    samples._most_files = 3
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
