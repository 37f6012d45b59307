"""Images in a temporary file read back as written, from any thread."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from places import PROJECT

from storage.normalise import NormalisedImage
from storage.spool import Spool


def image(number: int) -> NormalisedImage:
    return NormalisedImage(bytes([number]) * (1000 + 97 * number), number + 1, 7, f"sha {number}", ("png",))


def test_what_many_threads_write_reads_back():
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


def test_a_full_disk_is_named_with_the_way_out():
    code = (
        "import resource, signal; from storage.normalise import NormalisedImage; from storage.spool import Spool;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000));"
        "spool = Spool().__enter__(); spool.write(NormalisedImage(bytes(9000), 1, 1, '', ()))"
    )
    root = PROJECT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 1
    assert "set TMPDIR to a folder with more space" in done.stderr
