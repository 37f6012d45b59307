"""What only a real S3 decides: races and clocks. Ceph's, beside the tests that run on every storage."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from s3 import environment
from seeded import shard_of
from tools import skip_without

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.claims import Claims
from storage.inventory import Inventory
from storage.object_store import ObjectStore, open_store
from storage.verify import verify

pytestmark = pytest.mark.far
WRITERS, SHARDS = 4, [f"{number:05}" for number in range(8)]


def in_processes(work: Callable, *arguments: tuple, variables: tuple[dict[str, str], ...] = ()) -> None:
    """One process of its own for each of these arguments, all at once; `variables` of each beside the environment."""
    context, processes = multiprocessing.get_context("spawn" if variables else "fork"), []
    try:
        for given, its in zip(arguments, variables or [{}] * len(arguments), strict=True):
            process = context.Process(target=work, args=given)
            with environment(**its):
                process.start()
            processes.append(process)
        for process in processes:
            process.join(120)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * len(arguments)


def meet(store: ObjectStore, writer: int) -> None:
    """Go on when all writers are here."""
    store.put(f"here/{writer}", b"")
    end = time.monotonic() + 60
    while len(list(store.list("here/"))) < WRITERS:
        assert time.monotonic() < end


def race(root: str, writer: int, file: Path) -> None:
    store, won = open_store(root), []
    own = {size: (b"%d" % writer) * size for size in (10, 300_000, 9_000_000)}
    meet(store, writer)
    for size, rounds in ((10, 60), (300_000, 20), (9_000_000, 2)):
        for number in range(rounds):
            path = f"race/{size}-{number}"
            if store.put(path, own[size], if_absent=True):
                won.append(path)
    file.write_text(json.dumps(won))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_of_four_processes_that_put_one_object_one_wins(radosgw, tmp_path, scheme):
    root, files = f"s3://bucket/{tmp_path.name}", [tmp_path / str(writer) for writer in range(WRITERS)]
    with environment(**radosgw.variables(scheme)):
        in_processes(race, *[(root, writer, files[writer]) for writer in range(WRITERS)])
        won = [json.loads(file.read_text()) for file in files]
        store = open_store(root)
        objects = [info.path for info in store.list("race/")]
        assert len(objects) == 82
        assert sorted(path for paths in won for path in paths) == objects  # each has one winner
        for writer, paths in enumerate(won):
            assert {byte for path in paths for byte in store.get(path)} <= {ord(str(writer))}


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_large_objects_of_every_form_are_put_whole(radosgw, tmp_path, scheme):
    data, file = os.urandom(20_000_000), tmp_path / "file"
    file.write_bytes(data)
    forms = {"bytes": data, "file": file}
    with environment(**radosgw.variables(scheme)):
        store = open_store(f"s3://bucket/{tmp_path.name}")
        for form, content in forms.items():
            for if_absent in (False, True):  # in parts, and in one request
                path = f"{form}/{if_absent}"
                assert store.put(path, content, if_absent=if_absent) is True
                assert store.get(path) == data
                assert store.get_range(path, 8_388_607, 3) == data[8_388_607:8_388_610]
        assert list(store.leftovers()) == []


def make_shards(root: str, file: Path) -> None:
    """A worker: commits what it can claim of SHARDS; the shards that it began are written to the file."""
    catalog, begun = Catalog(open_store(root), "captions"), []

    def pending(shards: list[str]) -> list[str]:
        done = set(catalog.shards("images"))
        return [shard for shard in shards if shard not in done]

    with Claims(catalog.store, catalog.path("images", "")) as claims:
        for shard, _ in claims.each(SHARDS, pending, print):
            begun.append(shard)
            time.sleep(0.2)  # time to be overtaken
            assert commit_shard(catalog, "images", shard, *shard_of(int(shard)), {})
    file.write_text(json.dumps(begun))


def test_each_shard_is_made_once_by_machines_whose_clocks_are_ten_minutes_apart(radosgw, tmp_path):
    root, files = f"s3://bucket/{tmp_path.name}", [tmp_path / str(worker) for worker in range(3)]
    with environment(**radosgw.variables()):
        in_processes(make_shards, *[(root, file) for file in files], variables=(clock(-5), clock(0), clock(5)))
        begun = [json.loads(file.read_text()) for file in files]
        assert sorted(shard for shards in begun for shard in shards) == SHARDS
        assert all(begun), begun
        store = open_store(root)
        assert Catalog(store, "captions").shards("images") == SHARDS
        assert list(verify(Inventory(store))) == []
        assert not [info.path for info in store.list() if "/claims/" in info.path]


def clock(minutes: int) -> dict[str, str]:
    """The environment of a process whose clock is wrong by so much."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        skip_without("far", "faketime is not installed; Debian: faketime")
    return {"LD_PRELOAD": str(library), "FAKETIME": f"{minutes:+}m"} if minutes else {}
