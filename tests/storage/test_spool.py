"""Images of shards in progress read back as written, from a temporary file."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.collect.normalise import NormalisedImage
from storage.collect.spool import Spool


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
