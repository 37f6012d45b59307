"""Ceph's S3 gateway for tests marked `far`: a monitor, one OSD that keeps all in memory, and radosgw, on loopback."""

import contextlib
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import urllib3
from s3 import SETTINGS, environment
from tools import skip_without

from demo.serve import free_port

_STARTS = 120.0  # seconds that the daemons have for it
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
        return SETTINGS | {"AWS_ENDPOINT_URL": getattr(self, scheme), "AWS_CA_BUNDLE": str(self.certificate)}


@contextlib.contextmanager
def ceph(folder: Path, *buckets: str) -> Iterator[Gateway]:
    """A gateway with these empty buckets; its files lie in `folder`, which need not outlive it."""
    for program in ("ceph-mon", "ceph-osd", "radosgw", "ceph", "openssl"):
        if not shutil.which(program):
            skip_without("far", f"{program} is not installed; Debian: ceph-mon ceph-osd radosgw ceph-common openssl")
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
    file, certificate = folder / "ceph.conf", folder / "certificate.pem"
    ports = {"monitor": monitor, "http": http, "https": https}
    file.write_text(_CONFIGURATION.format(fsid=fsid, folder=folder, certificate=certificate, **ports))
    request = ["openssl", "req", "-x509", "-nodes", "-subj=/", "-addext=subjectAltName=IP:127.0.0.1", "-days=1"]
    subprocess.run([*request, "-keyout", certificate, "-out", certificate], check=True, capture_output=True)

    def once(program: str, *arguments: str) -> None:
        done = subprocess.run([program, "-c", str(file), *arguments], capture_output=True, text=True, timeout=_STARTS)
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"

    def start(program: str, *arguments: str) -> None:
        with (folder / f"{program}.out").open("wb") as out:
            # They end with this process, however it ends.
            command = ["setpriv", "--pdeathsig", "KILL", program, "-c", str(file), "-f", *arguments]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        stack.callback(process.wait)
        stack.callback(process.kill)  # first

    keys, map_, osd = str(folder / "keyring"), str(folder / "monmap"), str(uuid.uuid4())
    address = f"[v2:127.0.0.1:{monitor}]"
    once("monmaptool", "--create", "--clobber", "--addv", "a", address, "--fsid", fsid, map_)
    once("ceph-authtool", "--create-keyring", keys, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    once("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_, "--keyring", keys)
    start("ceph-mon", "-i", "a")
    once("ceph", "--connect-timeout", "60", "osd", "new", osd)
    once("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    start("ceph-osd", "-i", "0")
    start("radosgw", "-n", "client.rgw.a")
    answers = urllib3.Retry(round(_STARTS / 0.2), backoff_factor=0.1, backoff_max=0.2)
    urllib3.request("GET", f"http://127.0.0.1:{http}", retries=answers, timeout=5)
    key, secret = SETTINGS["AWS_ACCESS_KEY_ID"], SETTINGS["AWS_SECRET_ACCESS_KEY"]
    names = ["--uid=tests", "--display-name=tests", f"--access-key={key}", f"--secret-key={secret}"]
    once("radosgw-admin", "user", "create", *names)
    return Gateway(f"http://127.0.0.1:{http}", f"https://127.0.0.1:{https}", certificate)
