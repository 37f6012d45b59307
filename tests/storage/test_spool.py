"""Images of shards in progress read back as written, from a temporary file."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.collect.normalise import NormalisedImage
from storage.collect.spool import Spool

FIELDS = [field.name for field in dataclasses.fields(NormalisedImage)]


def test_images_of_many_threads_read_back_until_the_block_ends():
    images = [NormalisedImage(bytes([n]) * (1000 + 97 * n), n + 1, 7, f"sha {n}", ("png",)) for n in range(200)]
    with Spool() as spool, ThreadPoolExecutor(8) as threads:
        written = list(threads.map(spool.write, images))
        assert [NormalisedImage(*(getattr(one, name) for name in FIELDS)) for one in written] == images
        assert os.fstat(spool._file.fileno()).st_nlink == 0  # without a name: kill -9 leaves nothing
    with pytest.raises(ValueError, match="closed"):
        written[0].jpeg  # noqa: B018
    with pytest.raises(ValueError, match="closed"):  # and not into the next file with its number
        spool.write(images[0])
