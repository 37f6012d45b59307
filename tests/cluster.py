"""Two machines in namespaces of their own, `one` and `two`, joined by a virtual cable; and a SLURM on them.

A machine has its own network, host name, /etc/hosts and process ids. Nothing leaves the cable. When the first process
of a machine is killed, the kernel ends all others of it; and all of it goes with the test's process.
"""

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from operated import wait_until
from places import PROJECT
from s3 import environment
from tools import skip_without

ADDRESSES = {"one": "10.77.0.1", "two": "10.77.0.2"}
PROGRAMS = ("ip", "nsenter", "unshare", "setpriv", "munged", "slurmctld", "slurmd", "srun", "sbatch")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# With seconds in place of minutes where SLURM waits. No cgroups: a machine of namespaces has none of its own.
_SLURM_CONF = """\
ClusterName=test
SlurmctldHost=one(10.77.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MailProg=/bin/true
MpiDefault=none
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ReturnToService=2
KillWait=5
SlurmdTimeout={lost}
MessageTimeout=5
SchedulerParameters=sched_interval=2,bf_interval=2,defer_batch,batch_sched_delay=0
NodeName=one NodeAddr=10.77.0.1 CPUs=4 RealMemory=1000
NodeName=two NodeAddr=10.77.0.2 CPUs=4 RealMemory=1000
PartitionName=all Nodes=one,two Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """The machines and what runs on them. Commands get `variables` beside ours."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.variables = {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.machines: dict[str, subprocess.Popen] = {}
        self.started: list[subprocess.Popen] = []

    def init(self, name: str) -> int:
        """The first process of a machine, as this process numbers it."""
        unshare = self.machines[name].pid
        return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])

    def start_machine(self, name: str) -> None:
        hosts = self.folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {machine}" for machine, address in ADDRESSES.items())]
        hosts.write_text("".join(f"{line}\n" for line in lines))
        up = f"hostname {name} && mount --bind {hosts} /etc/hosts && ip link set lo up && echo up"
        own = ["unshare", "--net", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
        # bash, and no `sleep infinity`: the first process has to reap those that nobody else does.
        command = [*own, "bash", "-c", f"{up} && while true; do sleep 1; done"]
        self.machines[name] = machine = self.start(command, subprocess.PIPE)
        said = machine.stdout.readline()
        if said != b"up\n":
            skip_without("far", f"this machine makes no namespaces: {said.decode().strip()}")

    def connect(self) -> None:
        one, two = (str(self.init(name)) for name in ADDRESSES)  # on a machine they have other numbers
        add = ["ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", two]
        subprocess.run(["nsenter", "--net", "--target", one, *add], env=os.environ | self.variables, check=True)
        for name, address in ADDRESSES.items():
            self.call(name, "ip", "address", "add", f"{address}/24", "dev", "cable")
            self.call(name, "ip", "link", "set", "cable", "up")

    def cut(self) -> None:
        self.call("two", "ip", "link", "set", "cable", "down")

    def join(self) -> None:
        self.call("two", "ip", "link", "set", "cable", "up")

    def inside(self, name: str, *command: object) -> list[str]:
        """The command line that runs a command on a machine."""
        spaces = ("--net", "--uts", "--mount", "--pid")
        return ["nsenter", f"--target={self.init(name)}", *spaces, f"--wd={PROJECT}", *map(str, command)]

    def call(self, name: str, *command: object, check: bool = True, **variables: str) -> str:
        variables = os.environ | self.variables | variables
        ended = subprocess.run(self.inside(name, *command), env=variables, capture_output=True, text=True, timeout=60)
        assert not check or ended.returncode == 0, (command, ended.returncode, ended.stdout, ended.stderr)
        return ended.stdout

    def start(self, command: list[str], out: int | BinaryIO) -> subprocess.Popen:
        """A process that ends with this one, however that ends."""
        outputs = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        command = ["setpriv", "--pdeathsig", "KILL", *command]
        process = subprocess.Popen(command, env=os.environ | self.variables, **outputs)
        self.started.append(process)
        return process

    def start_daemon(self, command: list[str], name: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.start(command, log)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """While the block runs, this thread's sockets are on a machine's network, and so is all that it starts."""
        there = f"/proc/{self.init(name)}/ns/net"
        with environment(**self.variables), open("/proc/self/ns/net") as ours, open(there) as theirs:
            _enter(theirs.fileno())
            try:
                yield
            finally:
                _enter(ours.fileno())

    def kill(self, name: str) -> None:
        """A machine that loses its power: its processes end, and nothing of it tells the other."""
        self.cut()
        os.kill(self.init(name), signal.SIGKILL)
        self.machines[name].wait(10)

    def restart(self, name: str) -> None:
        self.call("one", "ip", "link", "delete", "cable", check=False)  # the kernel takes it away, too, but later
        self.start_machine(name)
        self.connect()
        self.slurmd(name)

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait(10)

    # --- SLURM --------------------------------------------------------------------------------------------------------

    def start_slurm(self, lost: int) -> None:
        """Start the daemons, and wait until both nodes are free."""
        (self.folder / "slurm.conf").write_text(_SLURM_CONF.format(folder=self.folder, lost=lost))
        for name in ("state", *(f"spool-{machine}" for machine in ADDRESSES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        files = {"socket": "munge.socket", "key-file": key.name, "pid-file": "munged.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / file}" for option, file in files.items()]
        # One for both machines, which share its socket. Forced: a temporary folder may lie in one that all can write.
        self.start_daemon(["munged", "--foreground", "--force", *options], "munged")
        wait_until((self.folder / "munge.socket").exists, 10, self.logs)
        self.start_daemon(self.inside("one", "slurmctld", "-D", "-c"), "slurmctld")
        for name in ADDRESSES:
            self.slurmd(name)
        wait_until(self.idle, 30, self.logs)

    def logs(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self.folder.glob("*.log")))

    def slurmd(self, name: str) -> None:
        self.start_daemon(self.inside(name, "slurmd", "-D", "-N", name), f"slurmd-{name}")

    def idle(self) -> bool:
        return self.call("one", "sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == "2"

    def submit(self, *arguments: object, **variables: str) -> str:
        return self.call("one", "sbatch", "--parsable", *arguments, **variables).strip()

    def state(self, job: str) -> str:
        words = self.call("one", "scontrol", "show", "job", job).split()
        return next(word for word in words if word.startswith("JobState=")).partition("=")[2]

    def jobs(self) -> str:
        return self.call("one", "squeue", "-h")


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def slurm(folder: Path, lost: int) -> Iterator[Cluster]:
    """The machines with a SLURM, which gives a node up after `lost` seconds without an answer."""
    missing = [program for program in PROGRAMS if not shutil.which(program, path=_PATH)]
    if missing:
        skip_without("far", f"there is no {', '.join(missing)}: install the packages of .ci/run")
    if os.geteuid() != 0:
        skip_without("far", "only root makes network namespaces")
    cluster = Cluster(folder)
    try:
        for name in ADDRESSES:
            cluster.start_machine(name)
        cluster.connect()
        cluster.start_slurm(lost)
        yield cluster
    finally:
        cluster.end()
