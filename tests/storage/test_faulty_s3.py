"""S3 behind a bad network: the same outcome as behind a good one, or an error."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from s3_faults import FaultyS3, faulty
from seeded import REGIONS, as_dict, commit, detect, shard_of

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.garbage import collect_garbage
from storage.inventory import Inventory, status
from storage.object_store import StorageUnreachable, open_store
from storage.verify import verify


@pytest.fixture
def calm(s3: str) -> Iterator[FaultyS3]:
    """The proxy, with only the faults that a test plans."""
    with faulty(s3) as proxy:
        yield proxy


def work(root: str) -> tuple[dict[str, bytes], list]:
    """Commit, detect, pin and read a shard; the objects under the root, and what was read."""
    catalog = Catalog(open_store(root), "captions")
    commit(catalog, 0)
    assert catalog.pending("images", REGIONS) == ["00000"]
    detect(catalog, 0)
    samples = [*map(as_dict, catalog.read(REGIONS, "00000"))]
    index = catalog.pinned(REGIONS, catalog.pin(REGIONS).id)
    some = range(0, len(index), max(1, len(index) // 10))
    places = [(index.tars[index.shard[i]], int(index.offset[i]), int(index.length[i])) for i in some]
    ranges = [catalog.store.get_range(*place) for place in places]
    assert list(verify(Inventory(catalog.store))) == []
    assert collect_garbage(catalog.store, -60, delete=True) == ["nothing to delete"]
    read = [index.urls(), index.offset.tolist(), samples, ranges, [line[:70] for line in status(catalog.store)[:3]]]
    return {info.path: catalog.store.get(info.path) for info in catalog.store.list()}, read


def test_work_behind_a_bad_network_has_the_same_outcome(s3, tmp_path):
    root = f"s3://bucket/{tmp_path.name}"
    expected = work(f"{root}/calm")
    with faulty(s3) as proxy:
        for method, part, faults in [
            ("HEAD", "", ("503",)),
            ("PUT", ".probe", ("reset after",)),
            ("PUT", ".tar", ("503", "reset after")),
            ("PUT", "00000.parquet", ("reset before", "truncated")),
            ("PUT", "snapshots", ("reset after",)),
            ("GET", "list-type", ("truncated",)),
            ("GET", ".parquet", ("truncated", "truncated", "reset after")),
            ("GET", ".tar", ("truncated",)),
        ]:
            proxy.plan(method, part, *faults)
        assert work(f"{root}/faulty") == expected
    assert proxy.planned == []


def test_a_download_that_breaks_off_is_repeated(calm, tmp_path):
    store = open_store(f"s3://bucket/{tmp_path.name}")
    data = bytes(range(256)) * 40
    store.put("a", data)
    for faults in (("truncated",) * 3, ("reset after", "503")):
        for read, expected in ((lambda: store.get("a"), data), (lambda: store.get_range("a", 300, 50), data[300:350])):
            calm.plan("GET", "/a", *faults)
            assert read() == expected
            assert calm.planned == []
    calm.plan("GET", "/a", *["truncated"] * 5)
    with pytest.raises(StorageUnreachable, match=rf"{tmp_path.name}/a ended early 5 times"):
        store.get_range("a", 0, 1000)


def test_a_conflict_is_repeated_until_it_is_decided(calm, tmp_path, monkeypatch):
    monkeypatch.setattr("storage.object_store.random.random", lambda: -0.5)  # without pauses
    store = open_store(f"s3://bucket/{tmp_path.name}")
    calm.plan("PUT", "/new", "409", "409")
    assert store.put("new", b"1", if_absent=True) is True
    assert calm.planned == []
    assert store.get("new") == b"1"
    calm.plan("PUT", "/other", *["409"] * 5)
    with pytest.raises(StorageUnreachable, match="put_object of .*/other") as error:
        store.put("other", b"1", if_absent=True)
    assert (error.value.http_status, error.value.lasts) == (409, False)
    assert not store.exists("other")


@pytest.mark.parametrize("status", ["400", "403"])
def test_a_refused_request_stops_at_once_and_tells_of_the_credentials(calm, tmp_path, status):
    store = open_store(f"s3://bucket/{tmp_path.name}")
    calm.plan("GET", "/a", status, status)
    with pytest.raises(
        StorageUnreachable, match=rf"{tmp_path.name}/a at .*session token may have expired.* again"
    ) as refused:
        store.get("a")
    assert (refused.value.http_status, refused.value.lasts) == (int(status), True)
    assert calm.planned == [("GET", "/a", status)]  # one request


def test_writers_refuse_an_endpoint_that_ignores_conditions(moto, tmp_path):
    # moto, because Ceph refuses a request without a header that is signed.
    with faulty(moto["AWS_ENDPOINT_URL"], strip=frozenset({"If-None-Match"})) as proxy:
        with pytest.raises(StorageUnreachable, match=f"^{proxy.endpoint} does not honour If-None-Match.*$") as refused:
            open_store(f"s3://bucket/{tmp_path.name}")
        assert len(str(refused.value).splitlines()) == 1
        assert list(open_store(f"s3://bucket/{tmp_path.name}", write=False).list()) == []


def race(root: str, number: int) -> bool:
    """One of several writers of one shard, with samples of its own; whether it was the one that committed."""
    samples, rows = shard_of(0)
    samples = [dataclasses.replace(sample, caption=f"writer {number}") for sample in samples]
    return commit_shard(Catalog(open_store(root), "captions"), "images", "00000", samples, rows, {"by": number})


def test_of_many_writers_of_a_shard_on_s3_one_wins(s3, tmp_path):
    root = f"s3://bucket/{tmp_path.name}"
    with faulty(s3) as proxy, ThreadPoolExecutor(4) as pool:
        proxy.plan("PUT", "/00000.parquet", "409", "reset after", "503", "reset after", "reset before")
        won = list(pool.map(lambda number: race(root, number), range(4)))
    assert won.count(True) == 1
    catalog = Catalog(open_store(root), "captions")
    assert catalog.manifest("images", "00000").meta == {"by": won.index(True)}
    assert {sample.caption for sample in catalog.read("images", "00000")} == {f"writer {won.index(True)}"}
    assert len(list(catalog.store.list())) == 2  # and no tar of those who lost


def test_another_writer_of_the_same_bytes_wins(calm, tmp_path):
    catalog = Catalog(open_store(f"s3://bucket/{tmp_path.name}"), "captions")
    samples, rows = shard_of(0)

    def overtaken() -> Iterator:
        assert commit_shard(catalog, "images", "00000", samples, rows, {}) is True
        calm.plan("PUT", "/00000.parquet", "reset after")  # the loser's request, refused, and it never hears that
        yield from samples

    assert commit_shard(catalog, "images", "00000", overtaken(), rows, {}) is False
    assert calm.planned == []
    assert list(verify(Inventory(catalog.store))) == []
