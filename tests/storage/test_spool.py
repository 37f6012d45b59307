"""Images of shards in progress read back as written: from a temporary file, and from the root."""

import dataclasses
import functools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.catalog import Catalog
from storage.collect.normalise import NormalisedImage
from storage.collect.spool import PartialShard, Spool, remove_partial
from storage.garbage import find_garbage
from storage.object_store import StorageUnreachable


def image(number: int) -> NormalisedImage:
    return NormalisedImage(bytes([number]) * (1000 + 97 * number), number + 1, 7, f"sha {number}", ("png",))


def test_images_of_many_threads_read_back():
    with Spool() as spool, ThreadPoolExecutor(8) as threads:
        written = list(threads.map(spool.write, map(image, range(200))))
        for number, found in enumerate(written):
            whole = NormalisedImage(found.jpeg, found.width, found.height, found.sha256, found.flags)
            assert whole == image(number)


def test_a_spool_leaves_no_file_and_ends_with_its_block():
    with Spool() as spool:
        written = spool.write(image(1))
        assert os.fstat(spool._file.fileno()).st_nlink == 0  # without a name: kill -9 leaves nothing
    with pytest.raises(ValueError, match="closed"):
        written.jpeg  # noqa: B018
    with pytest.raises(ValueError, match="closed"):  # and not into the next file with its number
        spool.write(image(2))


def partials(catalog: Catalog) -> list[str]:
    """The objects of shards in progress."""
    return [info.path for info in catalog.store.list("captions/images/partial/")]


def test_a_shard_in_progress_is_saved_in_several_objects_and_read_back(catalog: Catalog, monkeypatch):
    monkeypatch.setattr("storage.collect.spool._OBJECT_BYTES", 1000)

    def lost(*_: object) -> None:
        raise StorageUnreachable("away")

    shard = functools.partial(PartialShard, catalog.store, "captions", "00007")
    images = {
        f"http://x/{i}": NormalisedImage(bytes([i]) * 300, i, 2, f"{i:064}", ("png",) * (i % 2)) for i in range(10)
    }
    with Spool() as spool, Spool() as again:

        def read_back(settings: str) -> dict[str, NormalisedImage]:
            found = shard(settings).load(again)
            names = [field.name for field in dataclasses.fields(NormalisedImage)]
            return {url: NormalisedImage(*(getattr(saved, name) for name in names)) for url, saved in found.items()}

        first, other = shard("a" * 12), shard("b" * 12)
        for url, image in images.items():
            first.add(url, spool.write(image))
        with monkeypatch.context() as away:
            away.setattr(catalog.store, "put", lost)
            with pytest.raises(StorageUnreachable):
                first.save()
        first.save()  # all of it, though the storage was away
        first.save()  # nothing new
        assert len(partials(catalog)) == 3
        assert read_back("a" * 12) == images
        assert read_back("b" * 12) == {}  # other settings make other bytes
        damaged = partials(catalog)[0]
        catalog.store.put(damaged, catalog.store.get(damaged)[:-1])
        assert 0 < len(read_back("a" * 12)) < 10
        other.add("http://x/1", spool.write(images["http://x/1"]))
        other.save()
        assert [what for what, _ in find_garbage(catalog.store, grace=-1)] == 4 * ["partial shard"]
        assert find_garbage(catalog.store, grace=3600) == []
        remove_partial(catalog.store, "captions", {"00001"})
        assert len(partials(catalog)) == 4
        remove_partial(catalog.store, "captions", {"00007"})  # whoever saved them, and with whatever settings
        assert partials(catalog) == []
