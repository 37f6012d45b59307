"""Images and containers by Debian's buildah and podman: no daemon, no registry, all that they keep in one folder."""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from operated import wait_until
from places import PROJECT
from tools import skip_without

PROGRAMS = ("buildah", "podman", "runc", "mmdebstrap", "catatonit", "iptables")
PROGRAMS += ("/usr/lib/podman/netavark", "/usr/lib/podman/aardvark-dns")
BASE = "localhost/base"
# runc, since crun 1.8, which podman takes by itself, refuses the cgroups of some machines. Containers get the limits of
# this machine, which it may be unable to raise.
_CONFIG = """
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc=30000:30000"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/graph"
runroot = "{folder}/run"
"""


@dataclass(frozen=True)
class Engine:
    """buildah and podman over one folder."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of every program: where all lies that they keep."""
        here = {"CONTAINERS_STORAGE_CONF": "storage.conf", "CONTAINERS_CONF": "containers.conf", "TMPDIR": "tmp"}
        # Health checks are run by whoever waits for them: there may be no systemd, to which podman leaves them.
        variables = {name: str(self.folder / file) for name, file in here.items()} | {"DISABLE_HC_SYSTEMD": "true"}
        return os.environ | variables

    def run(self, *command: object, seconds: float = 60, **variables: str) -> str:
        """What the program prints; AssertionError with its errors where it fails."""
        command, settings = [*map(str, command)], {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(command, cwd=PROJECT, env=self.environment | variables, timeout=seconds, **settings)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    @contextmanager
    def docker(self) -> Iterator[dict[str, str]]:
        """podman's API, which is that of Docker; the variable by which `docker compose` finds it."""
        socket = self.folder / "podman.sock"
        command = ["podman", "system", "service", "--time", "0", f"unix://{socket}"]
        with open(self.folder / "service.log", "wb") as log:
            service = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_until(socket.exists, 30)
            yield {"DOCKER_HOST": f"unix://{socket}"}
        finally:
            service.terminate()
            service.wait(30)

    def build(self, target: str, tag: str) -> None:
        """A target of docker/Dockerfile on Debian's own Python. This machine's settings of pip go in as a secret."""
        if BASE not in self.run("buildah", "images", "--format", "{{.Name}}"):
            include = "--include=python3,python3-venv,ca-certificates"
            tar = self.folder / "base.tar"
            self.run("mmdebstrap", "--quiet", "--variant=minbase", include, "bookworm", tar, seconds=180)
            self.run("podman", "import", "--quiet", tar, BASE)
            tar.unlink()
        secret = self.folder / "pip.conf"
        secret.write_text(pip_settings())
        mounts = []
        for scheme, path in set(re.findall(r"(file://)?(/[^ :\n]+)", secret.read_text())):
            folder = Path(path).parent if scheme else Path(path)  # an index names files beside it
            mounts += ["--volume", f"{folder}:{folder}:ro"] if folder.exists() else []
        options = ["--isolation", "chroot", "--network", "host", "--pull-never", "--layers", "--format", "docker"]
        options += ["--build-arg", f"BASE={BASE}", "--secret", f"id=pip,src={secret}", *mounts]
        options += ["--file", "docker/Dockerfile", "--target", target, "--tag", tag]
        self.run("buildah", "build", *options, ".", seconds=900)


def pip_settings() -> str:
    """A pip.conf with what pip is told on this machine, in its files and in the environment, which wins."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = {}
    for line in listed.stdout.splitlines():
        found = re.fullmatch(r"(:env:\.|global\.)([\w-]+)='(.*)'", line)
        if found and (found[1] == ":env:." or found[2] not in settings):
            settings[found[2]] = found[3]
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())


@contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """An engine that keeps all in a new folder, and leaves nothing; skipped where a program is missing."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None] + ["root"] * (os.getuid() != 0)
    if missing:
        skip_without("far", f"containers need {', '.join(missing)}; .ci/run installs Debian's packages")
    folder.mkdir()
    (folder / "tmp").mkdir()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    (folder / "containers.conf").write_text(_CONFIG.format(files=files, folder=folder))
    (folder / "storage.conf").write_text(_STORAGE.format(folder=folder))
    made = Engine(folder)
    try:
        yield made
    finally:
        made.run("podman", "rm", "--all", "--force", "--time", "2")
        made.run("podman", "rmi", "--all", "--force")  # unmounts what they were on
        shutil.rmtree(folder)
