"""`vlbert serve` on a free port, with its server and processes for tests to query."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from places import PROJECT

from demo.data import DemoData
from demo.deployments import SHIPPED_DETECTOR, as_json, flow_parameters
from demo.serve import free_port
from detectors.config import DetectionConfig
from flows.serve import environment, read_tail
from flows.settings import quiet_prefect
from flows.supervisor import run_in_background

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


@dataclass(frozen=True)
class Operated:
    """A server and its workers: Prefect's home, the server's URL, the file that is served, and the password, if any."""

    home: Path
    url: str
    deployments: Path
    password: str | None = None  # user:password

    @property
    def variables(self) -> dict[str, str]:
        password = {"PREFECT_API_AUTH_STRING": self.password} if self.password else {}
        return quiet_prefect(self.home) | {"PREFECT_API_URL": f"{self.url}/api"} | password

    def ask(self, method: str, path: str, **json: object) -> object:
        given = {"json": json or None, "auth": tuple(self.password.split(":")) if self.password else None}
        for attempt in range(5):
            answer = httpx.request(method, f"{self.url}/api{path}", timeout=60, trust_env=False, **given)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(2**attempt)  # its database is busy: ask again, as Prefect's own client does
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def answers(self) -> bool:
        try:
            return self.ask("GET", "/health") is True
        except httpx.TransportError:
            return False

    def start(self, deployment: str, **parameters: object) -> str:
        known = self.ask("GET", f"/deployments/name/{deployment}")
        return self.ask("POST", f"/deployments/{known['id']}/create_flow_run", parameters=parameters)["id"]

    def complete(self, deployment: str, **parameters: object) -> str:
        run = self.start(deployment, **parameters)
        self.wait_for(run, lambda: self.state(run) in ENDED, 180)
        assert self.state(run) == "COMPLETED", self.account(run)
        return run

    def state(self, run: str) -> str:
        return self.ask("GET", f"/flow_runs/{run}")["state_type"]

    def wait_for(self, run: str, holds: Callable[[], object], seconds: float) -> float:
        """Seconds until it held; where it does not come to that, what is known of the run."""
        return wait_until(holds, seconds, lambda: self.account(run))

    def account(self, run: str) -> str:
        """The states of the run and of those below it, its processes, and the last lines of the logs."""
        found = [self.ask("GET", f"/flow_runs/{run}"), *self.below(run)]
        states = [f"{one['name']} is {one['state_type']}: {one['state']['message'] or ''}" for one in found]
        logs = [read_tail(log) for log in (*self.home.glob("*.log"), *self.home.parent.glob("serve.log"))]
        return "\n".join([*states, f"processes: {self.processes(run)}", *logs])

    def below(self, run: str) -> list[dict]:
        """The flow runs that this one has started, and those that they have."""
        found = self.ask("POST", "/flow_runs/filter", flow_runs={"parent_flow_run_id": {"any_": [run]}})
        return [*found, *(deeper for child in found for deeper in self.below(child["id"]))]

    def listen(self) -> Callable[[], list[str]]:
        """A function that gives what flows have printed since now: also the last lines, which the server may lack."""
        log = self.home / "worker.log"
        start = log.stat().st_size
        return lambda: log.read_bytes()[start:].decode(errors="replace").splitlines()

    def logs(self, run: str) -> list[str]:
        """What the run and those below it have logged, in order of time."""
        runs = [run, *(child["id"] for child in self.below(run))]
        asked = [self.ask("POST", "/logs/filter", logs={"flow_run_id": {"any_": [one]}}, limit=200) for one in runs]
        return [line["message"] for line in sorted(sum(asked, []), key=lambda line: line["timestamp"])]

    def processes(self, run: str) -> dict[int, str]:
        """Process id and command line of all that works for the run: children inherit the variable that names it."""
        ours = f"PREFECT__FLOW_RUN_ID={run}\0"
        found = {pid: command for pid, command, variables in running() if ours in variables}
        return {pid: command.replace("\0", " ").strip() for pid, command in found.items()}

    def process(self, run: str) -> int:
        return next(pid for pid, command in self.processes(run).items() if command.endswith("-m flows.engine"))

    def serve(self) -> int:
        return _process(f"\0-m\0vlbert\0serve\0--home\0{self.home}\0")

    def worker(self) -> int:
        return _process("\0worker\0start\0", f"PREFECT_HOME={self.home}\0")

    def server(self) -> int:
        return _process("\0server\0start\0", f"PREFECT_HOME={self.home}\0")


@contextmanager
def operated(home: Path, deployments: Path) -> Iterator[Operated]:
    port, log = free_port(), home.parent / "serve.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "vlbert", "serve", "--home", str(home), "--port", str(port), "--query", "1"]
    with run_in_background([*command, "--deployments", str(deployments)], log) as serves:

        def ready() -> bool:
            assert serves(), log.read_text()
            return "Prefect's UI is at" in log.read_text()

        wait_until(ready, 180)
        yield Operated(home, f"http://127.0.0.1:{port}", deployments)


@contextmanager
def server_of(server: Operated) -> Iterator[None]:
    """Run Prefect's server alone, with the settings of `vlbert serve`."""
    port, log = int(server.url.rpartition(":")[2]), server.home / "server.log"
    command = [sys.executable, "-m", "flows.prefect_patches", "server", "start", "--host", "127.0.0.1", "--port"]
    given = environment(server.home, port, 1.0) | server.variables
    with run_in_background([*command, str(port)], log, environment=given):
        wait_until(server.answers, 180, lambda: read_tail(log))
        yield


@contextmanager
def operated_apart(home: Path, deployments: Path, pool: str) -> Iterator[Operated]:
    """Serve these deployments by a server and a worker of this pool, which end independently."""
    home.mkdir()
    port = free_port()
    server = Operated(home, f"http://127.0.0.1:{port}", deployments)
    given = environment(home, port, 1.0) | server.variables
    with ExitStack() as running:
        running.enter_context(server_of(server))
        command = [sys.executable, "-m", "vlbert", "deploy", str(deployments)]
        subprocess.run(command, env=os.environ | given, check=True, capture_output=True, cwd=PROJECT, timeout=180)
        worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
        running.enter_context(run_in_background(worker, home / "worker.log", environment=given))
        yield server


def tiny_pipeline(demo_data: DemoData, root: Path, processes: int = 1) -> dict:
    """The parameters of `make demo`, made small: shards of ten, four steps a run, end to end, one fine-tuning."""
    parameters = flow_parameters(root, demo_data, seed=0, processes=processes)
    for training, name in ((parameters["pretraining"], "pretrain"), (parameters["finetunings"][0], "refcoco-with")):
        training["run"], training["recipe"] = name, training["recipe"].replace(" --features=precomputed", "")
        training["overrides"].append(f"--model.regions.weights={SHIPPED_DETECTOR}")
    steps = ["--steps=4", "--log_every=1", "--validate_every=4", "--validation_samples=8", "--data.batch=4"]
    for dataset in parameters["datasets"]:
        annotations = demo_data.refcoco_instances if dataset["images"] else demo_data.annotations
        detector = DetectionConfig("annotated", annotations=str(annotations))  # loads no network: seconds a dataset
        dataset |= {"rows_per_shard": 10, "shards_per_task": 2, "detector": as_json(DetectionConfig, detector)}
        dataset["download"]["deadline"] = 1.5
    parameters["finetunings"] = parameters["finetunings"][:1]
    parameters["pretraining"]["overrides"] += [*steps, "--data.text_batch=2"]
    parameters["finetunings"][0]["overrides"] += steps
    for training in (parameters["pretraining"], *parameters["finetunings"]):
        training["processes"]["threads"] = 1  # more would wait for each other where the machine has other work
    return parameters


def running() -> Iterator[tuple[int, str, str]]:
    """(process id, command line, environment) of every process that has not ended, parts separated by NUL."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if command:  # empty of one that has ended and is not reaped
                yield int(folder.name), command.decode(errors="replace"), variables.decode(errors="replace")


def _process(words: str, variable: str = "") -> int:
    """Process id of the one with these words and this variable; not of its supervisor, which has the same words."""
    found = {pid: command for pid, command, variables in running() if words in command and variable in variables}
    return next(pid for pid, command in found.items() if "supervisor.py" not in command)


def wait_until(holds: Callable[[], object], seconds: float, why: Callable[[], str] = lambda: "") -> float:
    """Seconds until it held; where it does not come to that, an error with what `why` gives."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < seconds, f"not within {seconds} s\n{why()}"
        time.sleep(0.1)
    return time.monotonic() - started
