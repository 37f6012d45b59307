"""Withdrawn images: no commit takes them, revisions lose them, and older snapshots go on with all the others."""

import dataclasses
from collections.abc import Callable

import pytest
from seeded import REGIONS, as_dict, commit, detect, put_checkpoint, seeded_regions, seeded_sample, shard_of
from stores import Recorded

from storage.cache import ShardCache
from storage.catalog import Catalog
from storage.catalog.commit import commit_shard, withdraw_samples
from storage.garbage import collect_garbage
from storage.inventory import Inventory
from storage.manifests import Row
from storage.object_store import LocalStore, ObjectMissing, ObjectStore, open_store
from storage.reading import ShardSamples
from storage.sample import Sample
from storage.verify import verify
from storage.withdrawn import Withdrawn, read_withdrawn, withdraw

STAGES = ("images", REGIONS)
DAY = 86400.0


def commit_both(catalog: Catalog, number: int) -> None:
    """Images, and their regions made from them."""
    assert commit(catalog, number, config={"max_side": 1024})
    assert detect(catalog, number)


def samples_of(shards: range) -> list[Sample]:
    return [sample for number in shards for sample in shard_of(number, regions=True)[0]]


def withdraw_all(catalog: Catalog, *samples: Sample) -> None:
    """As `vlbert withdraw` does it."""
    withdraw(catalog.store, [sample.url for sample in samples])
    for stage in STAGES:
        for shard in catalog.shards(stage):
            withdraw_samples(catalog, stage, shard)


def pin_in_a_checkpoint(store: ObjectStore, snapshot: str) -> None:
    span = {"snapshot": snapshot, "epoch": 0, "consumed": 0, "examples": 4}
    data = {"dataset": "captions", "stage": REGIONS, "random_init": False, "weight": 4.0, "snapshots": [span]}
    put_checkpoint(store, "runs/pinned/step-0000001", {"data": [data], "held_out": []})


def opened(store: ObjectStore, snapshot: str, **more: ShardCache) -> ShardSamples:
    return ShardSamples(store, Catalog(store, "captions").pinned(REGIONS, snapshot), **more)


def read_all(samples: ShardSamples) -> list[dict | str]:
    """Of each sample all that it says, or why it cannot be read."""
    found = samples.samples(range(len(samples)))
    return [as_dict(one) if isinstance(one, Sample) else str(one) for one in found]


def check_read(samples: ShardSamples, expected: list[Sample], gone: set[int]) -> None:
    """All but those that are gone are as they were written."""
    wanted = [
        f"sample {one.key} was withdrawn since: docs/provenance.md" if i in gone else as_dict(one)
        for i, one in enumerate(expected)
    ]
    assert read_all(samples) == wanted


def count(store: ObjectStore, sample: Sample) -> int:
    """How often the URL of a sample stands in tars."""
    return sum(store.get(info.path).count(sample.url.encode()) for info in store.list() if info.path.endswith(".tar"))


def faults(store: ObjectStore) -> list[str]:
    return list(verify(Inventory(store)))


def test_each_url_and_hash_is_withdrawn_once(catalog):
    store, urls = catalog.store, [f"http://example.org/{i}.jpg" for i in range(5)]
    assert not read_withdrawn(store)
    assert withdraw(store, urls[:3], ["a" * 64]) == Withdrawn(frozenset(urls[:3]), frozenset({"a" * 64}))
    (first,) = (info.path for info in store.list("withdrawn/"))
    before = store.get(first)
    assert not withdraw(store, reversed(urls[:3]), ["a" * 64])
    assert withdraw(store, urls) == Withdrawn(frozenset(urls[3:]))
    found = read_withdrawn(store)
    assert found == Withdrawn(frozenset(urls), frozenset({"a" * 64}))
    assert (found.has(urls[4], ""), found.has("", "a" * 64), found.has("", "b" * 64)) == (True, True, False)
    assert store.get(first) == before
    store.delete(first)  # taken back
    assert read_withdrawn(store) == Withdrawn(frozenset(urls[3:]))


@pytest.mark.parametrize("url", ["", "http://example.org/a\nb"])
def test_what_is_no_url_is_refused(local, url):
    with pytest.raises(ValueError, match="is not a URL: write each URL as in the caption list"):
        withdraw(local.store, ["http://example.org/good.jpg", url])
    assert not list(local.store.list())


def test_a_damaged_list_is_named_and_stops_commits(local):
    withdraw(local.store, ["http://example.org/1.jpg"])
    (path,) = (info.path for info in local.store.list())
    local.store.put(path, local.store.get(path).replace(b"1.jpg", b"2.jpg"))
    with pytest.raises(ValueError, match=rf"{path} is damaged.*put it back from a copy, or delete it"):
        commit_both(local, 0)
    assert path in "".join(faults(local.store))


def test_a_commit_leaves_out_urls_and_hashes_also_those_withdrawn_meanwhile(catalog):
    store, (samples, rows) = catalog.store, shard_of(0)
    withdraw(store, [samples[1].url], [samples[2].sha256])

    def withdrawing():
        yield from samples[:2]
        withdraw(store, [samples[0].url])  # who withdraws finds no shard yet
        yield from samples[2:]

    assert commit_shard(catalog, "images", "00000", withdrawing(), rows, {})
    manifest = catalog.manifest("images", "00000")
    assert manifest.statuses == {"http_404": 2, "ok": 1, "withdrawn": 3}
    assert [as_dict(sample) for sample in catalog.read("images", "00000")] == [as_dict(samples[3])]
    assert [count(store, sample) for sample in samples] == [1, 0, 0, 2], "the first is in a tar of an earlier revision"
    assert faults(store) == []


def test_revisions_lose_the_samples_and_keep_the_others_byte_for_byte(local):
    for number in range(3):
        commit_both(local, number)
    store, samples, gone = local.store, samples_of(range(3)), {1, 2, *range(8, 12)}
    before = {stage: local.pin(stage) for stage in STAGES}
    pin_in_a_checkpoint(store, before[REGIONS].id)
    running = opened(store, before[REGIONS].id)
    withdraw_all(local, *(samples[i] for i in gone))
    for stage in STAGES:
        manifest = local.manifest(stage, "00000")
        assert (manifest.revision, manifest.statuses) == (2, {"withdrawn": 2, "http_404": 2, "ok": 2})
        assert local.manifest(stage, "00001").revision == 1
        assert local.pin(stage).ok_rows == before[stage].ok_rows - len(gone)
    assert local.manifest(REGIONS, "00002").tar is None, "nothing is left of it"
    assert local.manifest("images", "00000").meta["config"] == {"max_side": 1024}
    assert local.pending("images", REGIONS) == [], "nothing is detected again"
    # The new tar is what a writer would have made of the other samples.
    kept = [sample for i, sample in enumerate(samples[:4]) if i not in gone]
    other = Catalog(open_store(f"{store.root}-other"), "captions")
    rows = [Row(i, sample.key, "ok", url=sample.url) for i, sample in enumerate(kept)]
    commit_shard(other, REGIONS, "00000", kept, rows, {})
    assert other.manifest(REGIONS, "00000").tar_sha256 == local.manifest(REGIONS, "00000").tar_sha256
    for collected in (False, True):
        check_read(opened(store, before[REGIONS].id), samples, gone)
        check_read(opened(store, local.pin(REGIONS).id), [s for i, s in enumerate(samples) if i not in gone], set())
        assert [count(store, samples[i]) > 0 for i in sorted(gone)] == [not collected] * len(gone)
        assert faults(store) == []
        lines = collect_garbage(store, DAY, delete=True)  # whatever their age
        assert sum("withdrawn images" in line for line in lines) == (0 if collected else 4)
    for info in [*store.list("withdrawn/")]:  # taken back too late
        store.delete(info.path)
    check_read(opened(store, before[REGIONS].id), samples, gone)
    with pytest.raises(ObjectMissing, match="Start the run again to read the newest revisions"):
        running.sample(0)


def test_revisions_of_every_kind_follow_each_other(local):
    """Withdrawn, requested again with another row that is ok, and withdrawn again."""
    commit_both(local, 0)
    samples, first = samples_of(range(1)), local.pin(REGIONS)
    pin_in_a_checkpoint(local.store, first.id)
    withdraw_all(local, samples[2])
    standing = local.manifest(REGIONS, "00000")
    more = seeded_sample(1, seeded_regions(1, 3))
    rows = [dataclasses.replace(row, status="ok", detail="") if row.row == 1 else row for row in standing.rows()]
    kept = [samples[0], more, samples[1], samples[3]]
    assert commit_shard(local, REGIONS, "00000", kept, rows, {"source": standing.meta["source"]}, standing)
    second = local.pin(REGIONS)
    collect_garbage(local.store, DAY, delete=True)
    withdraw_all(local, samples[0])
    for _ in range(2):
        assert local.manifest(REGIONS, "00000").statuses == {"http_404": 1, "ok": 3, "withdrawn": 2}
        check_read(opened(local.store, first.id), samples, {0, 2})
        check_read(opened(local.store, second.id), kept, {0})
        collect_garbage(local.store, DAY, delete=True)
    assert [count(local.store, sample) for sample in (samples[0], samples[2])] == [0, 0]
    assert faults(local.store) == []


def test_copies_of_a_cache_go_when_the_next_run_opens_it(local, tmp_path):
    commit_both(local, 0)
    remote, samples, snapshot = Recorded(local.store, remote=True), samples_of(range(1)), local.pin(REGIONS).id
    cache = ShardCache(remote, tmp_path / "cache", 10**9)
    opened(remote, snapshot, cache=cache)
    cache.fill()
    (copy,) = (tmp_path / "cache").rglob("*.tar")
    withdraw_all(local, samples[0])
    collect_garbage(local.store, DAY, delete=True)
    check_read(opened(remote, snapshot, cache=cache), samples, {0})
    assert not copy.exists()
    cache.fill()
    assert len([*(tmp_path / "cache").rglob("*.tar")]) == 1


def test_verify_names_a_shard_that_still_has_them(local):
    commit_both(local, 0)
    withdraw(local.store, [samples_of(range(1))[0].url])
    said = "still has withdrawn images; run `vlbert withdraw`"
    assert [said in fault for fault in faults(local.store)] == [True] * 2


class Killed(BaseException):
    pass


class Dying(LocalStore):
    """A store whose writer is killed before or after its n-th write or delete."""

    def __init__(self, root: str, left: int, after: bool):
        super().__init__(root)
        self.left, self.after = left, after

    def _step(self, work: Callable, *arguments: object, **options: bool) -> bool:
        if self.left == 0 and not self.after:
            raise Killed
        done = work(*arguments, **options)
        if self.left == 0:
            raise Killed
        self.left -= 1
        return done

    def put(self, *arguments: object, **options: bool) -> bool:
        return self._step(super().put, *arguments, **options)

    def delete(self, path: str) -> None:
        self._step(super().delete, path)


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_loses_nothing_and_the_next_run_finishes(tmp_path, after):
    kills, samples = 0, samples_of(range(1))
    kept = [samples[i] for i in (0, 2, 3)]
    for left in range(100):
        root = str(tmp_path / f"{left}")
        catalog = Catalog(open_store(root), "captions")
        commit_both(catalog, 0)
        first = catalog.pin(REGIONS)
        pin_in_a_checkpoint(catalog.store, first.id)
        try:
            dying = Catalog(Dying(root, left, after), "captions")
            withdraw_all(dying, samples[1])
            collect_garbage(dying.store, DAY, delete=True)
            killed = False
        except Killed:
            killed = True
            kills += 1
        # Whatever moment it was: each other sample is read, now and from the older snapshot.
        for snapshot in (first.id, catalog.pin(REGIONS).id):
            found = [one for one in read_all(opened(catalog.store, snapshot)) if not isinstance(one, str)]
            assert [one for one in found if one["key"] != samples[1].key] == [as_dict(one) for one in kept]
        withdraw_all(catalog, samples[1])
        collect_garbage(catalog.store, 0, delete=True)
        assert count(catalog.store, samples[1]) == 0
        assert collect_garbage(catalog.store, 0, delete=True) == ["nothing to delete"]
        assert catalog.manifest(REGIONS, "00000").statuses == {"withdrawn": 1, "http_404": 2, "ok": 3}
        check_read(opened(catalog.store, first.id), samples, {1})
        assert faults(catalog.store) == []
        if not killed:
            break
    assert kills >= 7, "a list, and tar, manifest and deletion of two stages"
