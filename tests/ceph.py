"""Ceph's S3 gateway for the tests marked `far`: a monitor, one OSD that keeps all in memory, and radosgw, on loopback.

python tests/ceph.py COMMAND...      runs the command with this gateway as AWS_ENDPOINT_URL, and a bucket `bucket`
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a program

import boto3
import pytest
from s3 import SETTINGS, certificate, environment
from tools import skip_without

from demo.serve import free_port

_STARTS, _ENDS = 120.0, 20.0  # seconds that the daemons have for it
# Without `crc`, the gateway waits for ever for a monitor that knows no keys.
_CONFIGURATION = """
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{monitor}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr1 = false
ms_mon_client_mode = crc
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
run_dir = {folder}
admin_socket =
log_file = {folder}/$name.log
log_to_stderr = false
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
osd_pool_default_pg_autoscale_mode = off
rgw_frontends = beast endpoint=127.0.0.1:{http} ssl_endpoint=127.0.0.1:{https} ssl_certificate={certificate}
"""


@dataclass(frozen=True)
class Gateway:
    """A running radosgw: its two endpoints, and the certificate that AWS_CA_BUNDLE names."""

    http: str
    https: str
    certificate: Path

    def variables(self, scheme: str = "http") -> dict[str, str]:
        """The environment in which boto3 finds it."""
        return SETTINGS | {"AWS_ENDPOINT_URL": getattr(self, scheme), "AWS_CA_BUNDLE": str(self.certificate)}


@contextlib.contextmanager
def ceph(folder: Path, *buckets: str) -> Iterator[Gateway]:
    """A gateway with these empty buckets; its files lie in `folder`, which need not outlive it."""
    for program in ("ceph-mon", "ceph-osd", "radosgw", "ceph"):
        if not shutil.which(program):
            skip_without("far", f"{program} is not installed; Debian: ceph-mon ceph-osd radosgw ceph-common")
    with contextlib.ExitStack() as stack:
        gateway = _start(folder, stack)
        with environment(**gateway.variables()):
            for bucket in buckets:
                boto3.session.Session().client("s3").create_bucket(Bucket=bucket)
        yield gateway


def _start(folder: Path, stack: contextlib.ExitStack) -> Gateway:
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    fsid, monitor, http, https = str(uuid.uuid4()), free_port(), free_port(), free_port()
    file, made = folder / "ceph.conf", certificate(folder)
    file.write_text(
        _CONFIGURATION.format(fsid=fsid, monitor=monitor, folder=folder, http=http, https=https, certificate=made)
    )

    def once(program: str, *arguments: str) -> None:
        done = subprocess.run([program, "-c", str(file), *arguments], capture_output=True, text=True, timeout=_STARTS)
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"

    def start(program: str, *arguments: str) -> subprocess.Popen:
        with (folder / f"{program}.out").open("wb") as out:
            # They end with this process, however it ends.
            command = ["setpriv", "--pdeathsig", "KILL", program, "-c", str(file), "-f", *arguments]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        stack.callback(_end, process)
        return process

    keys, map_, osd = str(folder / "keyring"), str(folder / "monmap"), str(uuid.uuid4())
    address = f"[v2:127.0.0.1:{monitor}]"
    once("monmaptool", "--create", "--clobber", "--addv", "a", address, "--fsid", fsid, map_)
    once("ceph-authtool", "--create-keyring", keys, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    once("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_, "--keyring", keys)
    start("ceph-mon", "-i", "a")
    once("ceph", "--connect-timeout", "60", "osd", "new", osd)
    once("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    start("ceph-osd", "-i", "0")
    gateway = start("radosgw", "-n", "client.rgw.a")
    key, secret = SETTINGS["AWS_ACCESS_KEY_ID"], SETTINGS["AWS_SECRET_ACCESS_KEY"]
    names = ["--uid=tests", "--display-name=tests", f"--access-key={key}", f"--secret-key={secret}"]
    _wait(f"http://127.0.0.1:{http}", gateway, folder)
    once("radosgw-admin", "user", "create", *names)
    return Gateway(f"http://127.0.0.1:{http}", f"https://127.0.0.1:{https}", made)


def _wait(endpoint: str, gateway: subprocess.Popen, folder: Path) -> None:
    """Until it answers."""
    end = time.monotonic() + _STARTS
    while time.monotonic() < end and gateway.poll() is None:
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    texts = [f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in folder.glob("*.out")]
    raise AssertionError(f"radosgw does not answer at {endpoint} (status {gateway.poll()}): {texts}")


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(_ENDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    try:
        with tempfile.TemporaryDirectory() as place, ceph(Path(place) / "ceph", "bucket") as running:
            sys.exit(subprocess.run(sys.argv[1:], env=os.environ | running.variables()).returncode)
    except pytest.skip.Exception as missing:
        sys.exit(str(missing))
