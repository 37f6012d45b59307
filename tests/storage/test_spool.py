"""Pictures wait in a temporary file, whole, whichever thread brings them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from places import PROJECT

from storage.normalise import Picture
from storage.spool import Spool


def picture(number: int) -> Picture:
    return Picture(bytes([number]) * (1000 + 97 * number), number + 1, 7, f"sha {number}", ("png",))


def test_what_many_threads_bring_reads_back_as_it_came():
    with Spool() as spool, ThreadPoolExecutor(8) as threads:
        kept = list(threads.map(spool.keep, map(picture, range(200))))
        for number, found in enumerate(kept):
            whole = Picture(found.image, found.width, found.height, found.sha256, found.flags)
            assert whole == picture(number)


def test_a_spool_leaves_no_file_and_ends_with_its_block():
    with Spool() as spool:
        kept = spool.keep(picture(1))
        assert os.fstat(spool._file.fileno()).st_nlink == 0  # without a name: kill -9 leaves nothing
    with pytest.raises(ValueError, match="closed"):
        kept.image  # noqa: B018
    with pytest.raises(ValueError, match="closed"):  # and not into the next file with its number
        spool.keep(picture(2))


def test_a_full_disk_is_named_with_the_way_out():
    code = (
        "import resource, signal; from storage.normalise import Picture; from storage.spool import Spool;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000));"
        "spool = Spool().__enter__(); spool.keep(Picture(bytes(9000), 1, 1, '', ()))"
    )
    root = PROJECT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 1
    assert "set TMPDIR to a folder with more room" in done.stderr
