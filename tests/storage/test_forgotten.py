"""Withdrawn images: tombstones, snapshots without them, bytes that go, and what older snapshots read since."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from seeded import DETECTOR, as_dict, put_checkpoint, seeded_regions, seeded_sample, shard_of
from stores import Recorded

from storage.cache import ShardCache
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.collect.normalise import NormalisedImage
from storage.collect.spool import PartialShard, Spool
from storage.forgotten import forget, forgotten_urls
from storage.garbage import collect_garbage
from storage.inventory import Inventory
from storage.manifests import Row
from storage.object_store import Content, LocalStore, ObjectStore, open_store
from storage.reading import ShardSamples
from storage.sample import Sample
from storage.verify import verify

REGIONS = f"regions/{DETECTOR}"
STAGES = ("images", REGIONS)
DAY = 86400.0


def commit(catalog: Catalog, number: int) -> None:
    """Images, and their regions made from them."""
    name = f"{number:05d}"
    assert commit_shard(catalog, "images", name, *shard_of(number), {"config": {"max_side": 1024}})
    meta = {"source": catalog.manifest("images", name).as_source(), "random_init": False}
    assert commit_shard(catalog, REGIONS, name, *shard_of(number, regions=True), meta)


def samples_of(shards: range) -> list[Sample]:
    return [sample for number in shards for sample in shard_of(number, regions=True)[0]]


def read_all(samples: ShardSamples) -> list[dict | str]:
    """Of each sample all that it says, or why it cannot be read."""
    found = samples.samples(range(len(samples)))
    return [as_dict(one) if isinstance(one, Sample) else str(one) for one in found]


def opened(store: ObjectStore, snapshot: str, **more: ShardCache) -> ShardSamples:
    return ShardSamples(store, Catalog(store, "captions").pinned(REGIONS, snapshot), **more)


def bytes_of(store: ObjectStore) -> bytes:
    return b"".join(store.get(info.path) for info in store.list() if not info.path.endswith(".parquet"))


def faults(store: ObjectStore) -> list[str]:
    return list(verify(Inventory(store)))


# --- tombstones -------------------------------------------------------------------------------------------------------


def test_a_tombstone_is_left_once_for_each_url(catalog):
    store, urls = catalog.store, [f"http://example.org/{i}.jpg" for i in range(5)]
    assert forgotten_urls(store) == frozenset()
    assert forget(store, urls[:3]) == urls[:3]
    (first,) = (info.path for info in store.list("forgotten/"))
    before = store.get(first)
    assert forget(store, reversed(urls[:3])) == []
    assert forget(store, urls) == urls[3:]
    assert forgotten_urls(store) == frozenset(urls)
    assert store.get(first) == before
    assert len(list(store.list("forgotten/"))) == 2


def test_of_many_who_forget_at_once_nothing_is_lost(local):
    urls = [f"http://example.org/{i}.jpg" for i in range(30)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: forget(LocalStore(local.store.root), urls[i : i + 10]), range(21)))
    assert forgotten_urls(local.store) == frozenset(urls)


@pytest.mark.parametrize("url", ["", " ", "http://example.org/a\nb", "http://example.org/\udcff"])
def test_what_is_no_url_is_refused(local, url):
    with pytest.raises(ValueError, match="is not a URL: give each as it stands in the list"):
        forget(local.store, ["http://example.org/good.jpg", url])
    assert not list(local.store.list())


def test_a_tombstone_is_read_once_and_one_that_was_taken_back_is_seen(local):
    """Garbage collection asks for each tar: requests must not be those of all tombstones times all tars."""
    store = Recorded(local.store, remote=True)
    for number in range(20):
        forget(store, [f"http://example.org/{number}.jpg"])
    store.requests.clear()
    for _ in range(3):
        assert len(forgotten_urls(store)) == 20
    assert sum(one.startswith("get ") for one in store.requests) <= 20
    path = sorted(info.path for info in store.list("forgotten/"))[0]
    content = local.store.get(path)
    local.store.delete(path)
    assert len(forgotten_urls(store)) == 19
    local.store.put(path, content)
    assert len(forgotten_urls(store)) == 20


def test_a_damaged_tombstone_is_named(local):
    forget(local.store, ["http://example.org/1.jpg"])
    (path,) = (info.path for info in local.store.list())
    local.store.put(path, local.store.get(path).replace(b"1.jpg", b"2.jpg"))
    with pytest.raises(ValueError, match=rf"{path} is damaged.*put it back from a copy, or delete it"):
        forgotten_urls(local.store)
    assert path in "".join(faults(local.store))


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_the_next_snapshot_lacks_what_was_forgotten_and_no_tar_changes(local):
    for number in range(2):
        commit(local, number)
    store, samples = local.store, samples_of(range(2))
    before, tars = local.pin(REGIONS), {info.path: info for info in store.list() if info.path.endswith(".tar")}
    forget(store, [samples[1].url, samples[6].url])
    after = local.pin(REGIONS)
    assert after.id != before.id
    assert (after.shards, after.ok_rows) == (before.shards, before.ok_rows - 2)
    left = [as_dict(sample) for i, sample in enumerate(samples) if i not in (1, 6)]
    assert read_all(opened(store, after.id)) == left
    assert local.pin(REGIONS) == after
    assert {info.path: info for info in store.list() if info.path.endswith(".tar")} == tars
    assert faults(store) == []
    # A run that is pinned to the older one does not read them any more.
    found = read_all(opened(store, before.id))
    assert [i for i, one in enumerate(found) if isinstance(one, str)] == [1, 6]
    assert found[1] == f"sample {samples[1].key} was forgotten since: docs/provenance.md"
    assert [one for one in found if not isinstance(one, str)] == left


def test_a_forgotten_shard_leaves_an_empty_part_of_the_snapshot(local):
    for number in range(2):
        commit(local, number)
    before = local.pin(REGIONS)
    forget(local.store, [sample.url for sample in samples_of(range(1))])
    for _ in range(2):  # before its bytes are gone and after
        after = local.pin(REGIONS)
        assert (after.shards, after.ok_rows) == (("00000", "00001"), 4)
        assert len(read_all(opened(local.store, after.id))) == 4
        found = read_all(opened(local.store, before.id))
        assert [isinstance(one, str) for one in found] == [True] * 4 + [False] * 4
        collect_garbage(local.store, DAY, delete=True)
    assert local.manifest(REGIONS, "00000").tar is None
    assert faults(local.store) == []


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_gc_takes_the_bytes_of_every_stage_and_leaves_the_others_as_they_were(local):
    for number in range(3):
        commit(local, number)
    store, samples = local.store, samples_of(range(3))
    before = {stage: local.pin(stage) for stage in STAGES}
    out = {1, 2, 9}
    urls = [samples[i].url for i in out]
    forget(store, urls)
    lines = collect_garbage(store, DAY, delete=False)
    assert sum("forgotten images" in line for line in lines) == 4
    assert local.manifest("images", "00000").revision == 1
    collect_garbage(store, DAY, delete=True)
    data = bytes_of(store)
    tombstones = b"".join(store.get(info.path) for info in store.list("forgotten/"))
    for url in urls:
        assert data.count(url.encode()) == tombstones.count(url.encode()) == 1, "in its tombstone alone"
    assert collect_garbage(store, DAY, delete=True) == ["nothing to delete"]
    for stage in STAGES:
        manifest = local.manifest(stage, "00000")
        assert (manifest.revision, manifest.statuses) == (2, {"forgotten": 2, "http_404": 2, "ok": 2})
        assert local.manifest(stage, "00001").revision == 1
        now = local.pin(stage)
        assert now.ok_rows == before[stage].ok_rows - 3
    assert local.manifest("images", "00000").meta["config"] == {"max_side": 1024}
    assert local.pending("images", REGIONS) == [], "nothing is detected again"
    # The new tar is what a writer would have made of the other samples.
    kept = [sample for i, sample in enumerate(samples[:4]) if i not in out]
    other = Catalog(open_store(f"{store.root}/other"), "captions")
    rows = [Row(i, sample.key, "ok", url=sample.url) for i, sample in enumerate(kept)]
    commit_shard(other, REGIONS, "00000", kept, rows, {})
    assert other.manifest(REGIONS, "00000").tar_sha256 == local.manifest(REGIONS, "00000").tar_sha256
    for info in list(other.store.list()):
        other.store.delete(info.path)
    # Older snapshots find the same samples at their new places.
    found = read_all(opened(store, before[REGIONS].id))
    assert [i for i, one in enumerate(found) if isinstance(one, str)] == sorted(out)
    assert [one for one in found if not isinstance(one, str)] == [
        as_dict(sample) for i, sample in enumerate(samples) if i not in out
    ]
    assert read_all(opened(store, local.pin(REGIONS).id)) == [one for one in found if not isinstance(one, str)]
    assert faults(store) == []


def test_what_is_forgotten_again_moves_again(local):
    commit(local, 0)
    samples, snapshots = samples_of(range(1)), [local.pin(REGIONS).id]
    for i in (2, 0):
        forget(local.store, [samples[i].url])
        snapshots.append(local.pin(REGIONS).id)
        collect_garbage(local.store, 0, delete=True)
        snapshots.append(local.pin(REGIONS).id)
    assert local.manifest(REGIONS, "00000").revision == 3
    for snapshot in (snapshots[0], snapshots[-1]):
        if not local.store.exists(f"captions/{REGIONS}/snapshots/{snapshot}.parquet"):
            continue  # nothing pins it
        found = read_all(opened(local.store, snapshot))
        assert [one for one in found if not isinstance(one, str)] == [as_dict(samples[1]), as_dict(samples[3])]
    assert faults(local.store) == []


def pin_in_a_checkpoint(store: ObjectStore, *snapshots: str) -> None:
    spans = [{"snapshot": one, "epoch": i, "consumed": 4 * i, "examples": 4} for i, one in enumerate(snapshots)]
    data = {"dataset": "captions", "stage": REGIONS, "random_init": False, "weight": 4.0, "snapshots": spans}
    put_checkpoint(store, "runs/pinned/step-0000001", {"data": [data], "held_out": []})


def test_an_earlier_revision_and_a_shard_that_was_made_again_lose_the_bytes_too(local):
    commit(local, 0)
    samples, first = samples_of(range(1)), local.pin(REGIONS)
    pin_in_a_checkpoint(local.store, first.id)
    # A revision with another row that is ok, as after rows were requested again.
    more = seeded_sample(1, seeded_regions(1, 3))
    rows = [dataclasses.replace(row, status="ok", detail="") if row.row == 1 else row for row in shard_of(0)[1]]
    standing = local.headers(REGIONS)["00000"]
    assert commit_shard(
        local, REGIONS, "00000", [samples[0], more, *samples[1:]], rows, {"source": standing.meta["source"]}, standing
    )
    forget(local.store, [samples[1].url])
    collect_garbage(local.store, DAY, delete=True)
    assert bytes_of(local.store).count(samples[1].url.encode()) == 1, "in its tombstone alone"
    found = read_all(opened(local.store, first.id))
    assert [i for i, one in enumerate(found) if isinstance(one, str)] == [1]
    assert [found[i] for i in (0, 2, 3)] == [as_dict(samples[i]) for i in (0, 2, 3)]
    assert faults(local.store) == []
    # Without any manifest of it, the snapshot alone names the tar.
    for name in ("00000", "00000.r2", "00000.r3"):
        local.store.delete(f"captions/{REGIONS}/{name}.parquet")
    forget(local.store, [samples[3].url])
    collect_garbage(local.store, 0, delete=True)  # also the tar of the revision that is gone
    assert bytes_of(local.store).count(samples[3].url.encode()) == 1
    found = read_all(opened(local.store, first.id))
    assert [i for i, one in enumerate(found) if isinstance(one, str)] == [1, 3]


def test_collections_of_garbage_at_once_agree(local):
    for number in range(3):
        commit(local, number)
    samples, first = samples_of(range(3)), local.pin(REGIONS)

    def work(number: int) -> None:
        store = LocalStore(local.store.root)
        forget(store, [samples[number].url, samples[4 + number].url])
        for _ in range(2):
            collect_garbage(store, DAY, delete=True)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    collect_garbage(local.store, DAY, delete=True)
    found = read_all(opened(local.store, first.id))
    assert [i for i, one in enumerate(found) if isinstance(one, str)] == [0, 1, 2, 4, 5, 6]
    assert [found[i] for i in (3, 7, 8)] == [as_dict(samples[i]) for i in (3, 7, 8)]
    data = bytes_of(local.store)
    assert all(data.count(samples[i].url.encode()) == 1 for i in (0, 1, 2, 4, 5, 6)), "in its tombstone alone"
    assert faults(local.store) == []


def test_a_tombstone_that_is_taken_back_brings_no_bytes_back(local):
    commit(local, 0)
    samples, first = samples_of(range(1)), local.pin(REGIONS)
    pin_in_a_checkpoint(local.store, first.id)
    forget(local.store, [samples[0].url])
    collect_garbage(local.store, DAY, delete=True)
    (path,) = (info.path for info in local.store.list("forgotten/"))
    local.store.delete(path)
    found = read_all(opened(local.store, first.id))
    assert [i for i, one in enumerate(found) if isinstance(one, str)] == [0]
    assert samples[0].key in found[0]


def test_a_reader_finds_what_moves_while_it_reads(catalog):
    for number in range(2):
        commit(catalog, number)
    store, samples = catalog.store, samples_of(range(2))
    reader = opened(store, catalog.pin(REGIONS).id)
    if store.local_path("any") is None:
        assert isinstance(reader.sample(0), Sample)
    forget(store, [samples[1].url])
    collect_garbage(store, DAY, delete=True)
    assert as_dict(reader.sample(3)) == as_dict(samples[3])
    found = read_all(reader)
    assert [i for i, one in enumerate(found) if isinstance(one, str)] == [1]
    assert [one for one in found if not isinstance(one, str)] == [
        as_dict(sample) for i, sample in enumerate(samples) if i != 1
    ]


def test_copies_of_a_cache_go_when_the_next_run_opens_it(local, tmp_path):
    commit(local, 0)
    remote, samples = Recorded(local.store, remote=True), samples_of(range(1))
    snapshot = local.pin(REGIONS).id
    cache = ShardCache(remote, tmp_path / "cache", 10**9)
    opened(remote, snapshot, cache=cache)
    assert cache.fill()
    copies = [*(tmp_path / "cache").rglob("*.tar")]
    assert len(copies) == 1
    forget(local.store, [samples[0].url])
    collect_garbage(local.store, DAY, delete=True)
    assert copies[0].exists()
    for again in (snapshot, local.pin(REGIONS).id):
        copies[0].write_bytes(b"as if it lay there still")
        reader = opened(remote, again, cache=cache)
        assert not copies[0].exists()
        assert cache.fill()
        assert len([*(tmp_path / "cache").rglob("*.tar")]) == 1
        assert as_dict(reader.sample(len(reader) - 1)) == as_dict(samples[-1])


def test_images_in_progress_are_forgotten_too(local):
    commit(local, 0)
    sample = seeded_sample(0)
    with Spool() as spool:
        partial = PartialShard(local.store, "captions", "00007", "0" * 12)
        partial.add(sample.url, spool.write(NormalisedImage(sample.image, 16, 8, sample.sha256, ())))
        partial.save()
    assert len(list(local.store.list("captions/images/partial/"))) == 1
    forget(local.store, ["http://example.org/another.jpg"])
    collect_garbage(local.store, DAY, delete=True)
    assert len(list(local.store.list("captions/images/partial/"))) == 1
    forget(local.store, [sample.url])
    collect_garbage(local.store, DAY, delete=True)
    assert not list(local.store.list("captions/images/partial/"))


def test_a_damaged_tar_with_a_forgotten_sample_is_named(local):
    commit(local, 0)
    forget(local.store, [samples_of(range(1))[0].url])
    tar = local.manifest(REGIONS, "00000").tar
    local.store.put(tar, local.store.get(tar)[:-1] + b"x")
    with pytest.raises(ValueError, match=rf"{tar} holds forgotten samples and is damaged.*delete .*00000\.parquet"):
        collect_garbage(local.store, DAY, delete=True)


# --- kills ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


class Dying(LocalStore):
    """A store whose writer is killed before or after its n-th write or delete."""

    def __init__(self, root: str, left: int, after: bool):
        super().__init__(root)
        self.left, self.after = left, after

    def _step(self, before: bool) -> None:
        if before != self.after:
            if self.left == 0:
                raise Killed
            self.left -= 1

    def put(self, path: str, data: Content, *, if_absent: bool = False) -> bool:
        self._step(before=True)
        done = super().put(path, data, if_absent=if_absent)
        self._step(before=False)
        return done

    def delete(self, path: str) -> None:
        self._step(before=True)
        super().delete(path)
        self._step(before=False)


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_loses_nothing_and_the_next_run_finishes(tmp_path, after):
    kills, samples = 0, samples_of(range(1))
    for left in range(100):
        root = str(tmp_path / f"{left}")
        catalog = Catalog(open_store(root), "captions")
        commit(catalog, 0)
        first = catalog.pin(REGIONS)
        try:
            dying = Dying(root, left, after)
            forget(dying, [samples[1].url])
            collect_garbage(dying, DAY, delete=True)
            killed = False
        except Killed:
            killed = True
            kills += 1
        # Whatever moment it was: each other sample is read, now and from the older snapshot.
        for snapshot in (first.id, catalog.pin(REGIONS).id):
            found = read_all(opened(catalog.store, snapshot))
            kept = [one for one in found if not isinstance(one, str)]
            assert [as_dict(samples[i]) for i in (0, 2, 3)] == [one for one in kept if one["key"] != samples[1].key]
        assert faults(catalog.store) == []
        forget(catalog.store, [samples[1].url])
        collect_garbage(catalog.store, 0, delete=True)
        assert bytes_of(catalog.store).count(samples[1].url.encode()) == 1
        assert collect_garbage(catalog.store, 0, delete=True) == ["nothing to delete"]
        assert catalog.manifest(REGIONS, "00000").statuses == {"forgotten": 1, "http_404": 2, "ok": 3}
        assert faults(catalog.store) == []
        if not killed:
            break
    assert kills >= 9, "a tombstone, and tar, record, manifest and deletion of two stages"
