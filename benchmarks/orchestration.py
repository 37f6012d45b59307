"""What Prefect costs: the whole pipeline over as many shards as Conceptual Captions has, with next to no work in them.

    python -m benchmarks.orchestration [--shards 331] [--shards-per-task 1] [--json FILE]

Real flows, server, worker, downloads, detector and torchrun; a shard holds two small images, a training is one step.
Prints what Prefect adds to each stage, how many task runs it keeps and how large its database is. Exits with 1 where
that is over the bars, or where there are other task runs or artifacts than the shards account for.
"""

import importlib.metadata
import json
import math
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.measure import machine, parser, write_json
from demo.__main__ import RUN_PIPELINE, flow_parameters, write_deployments
from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.serve import DemoServer, free_port
from flows.serve import end_of, serving
from flows.supervisor import ChildFailed, run_child

if TYPE_CHECKING:
    from flows.pipeline import PipelineResult

SHARDS = 331  # of Conceptual Captions: 3.3 million rows, 10,000 a shard
ROWS = 2  # of a shard here: more than one, so that a task for each row would be seen
MOST_TASK_RUNS = 1_500
MOST_BYTES = 40_000_000
# A training of one step on as little as it takes.
SHORT = ("steps=1", "log_every=1", "validate_every=1", "validation_samples=2", "data.batch=2")
STAGES = {"collect-captions": "collect", "detect-regions": "detect", "pretrain": "pretrain", "finetune": "finetune"}
_SETTLED = 8.0  # seconds without a new row after which the server has written all; it writes events every 5 s


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline: its flow and task runs, its flows' seconds, and those of the work within.

    task_runs counts those of its flows, and one that Prefect keeps for each of these flows; work_seconds is that of
    tasks between their start and their end, or of child processes.
    """

    name: str
    flow_runs: int
    task_runs: int
    seconds: float
    work_seconds: float

    @property
    def overhead(self) -> float:
        """Seconds that Prefect adds."""
        return self.seconds - self.work_seconds

    @property
    def milliseconds(self) -> float:
        """That Prefect adds to each task run."""
        return 1000 * self.overhead / self.task_runs


@dataclass(frozen=True)
class Database:
    """Prefect's database after its server has ended.

    bytes: of all its files; bytes_before: of its content before the pipeline; artifacts: those that the UI shows; rows:
    by table.
    """

    bytes: int
    bytes_before: int
    artifacts: int
    rows: dict[str, int]


@dataclass(frozen=True)
class Measured:
    """All that a run of this benchmark finds.

    waited: seconds from asking for the pipeline to its first stage; seconds: to its end.
    """

    shards: int
    shards_per_task: int
    task_runs: int
    flow_runs: int
    stages: list[Stage]
    waited: float
    seconds: float
    database: Database


# --- the pipeline -----------------------------------------------------------------------------------------------------


def measure(folder: Path, shards: int, shards_per_task: int) -> Measured:
    """Run the pipeline once in `folder`, which is empty, and measure it."""
    settings = DemoDataSettings(
        width=112,
        height=112,
        train_scenes=ROWS * shards,
        held_out_scenes=4,
        max_objects=2,
        broken_rows=0,
        text_lines=60,
        task_train=4,
        task_held_out=2,
        task_min_objects=2,
        task_max_objects=2,
    )
    demo_data = draw_demo_data(folder / "data", settings, free_port(0))
    chosen = parameters(folder / "root", demo_data, shards_per_task)
    write_deployments(folder / "prefect.yaml", chosen)
    home, port = folder / "prefect", free_port(0)
    with DemoServer(demo_data.root), serving(home, port, folder / "prefect.yaml", query_seconds=1.0):
        settle(lambda: rows_of(home))
        before = size_of(home)
        started = time.monotonic()
        try:
            run_child([sys.executable, "-m", "prefect", *RUN_PIPELINE], lambda line: None)
        except ChildFailed as error:
            raise RuntimeError(f"the pipeline failed: {end_of(home / 'worker.log')}") from error
        seconds = time.monotonic() - started
        settle(lambda: rows_of(home))
        ask = Server(f"http://127.0.0.1:{port}/api")
        task_runs, flow_runs = ask.count("task_runs"), ask.count("flow_runs")
        stages, waited = stages_of(ask)
    return Measured(shards, shards_per_task, task_runs, flow_runs, stages, waited, seconds, database_of(home, before))


def parameters(root: Path, demo_data: DemoData, shards_per_task: int) -> dict:
    """The demo's, with ROWS a shard of captions, one step a training and one fine-tuning."""
    chosen = flow_parameters(root, demo_data, seed=0, processes=1)
    chosen["datasets"][0] |= {"rows_per_shard": ROWS, "shards_per_task": shards_per_task}
    chosen["pretraining"]["overrides"] = [*chosen["pretraining"]["overrides"], *SHORT, "data.text_batch=2"]
    chosen["finetunings"] = chosen["finetunings"][:1]
    chosen["finetunings"][0]["overrides"] = [*chosen["finetunings"][0]["overrides"], *SHORT]
    return chosen


def expected_task_runs(shards: int, shards_per_task: int) -> int:
    """A task for each group of shards of captions, and for the other two datasets' only group; a task for the detection
    of each of the three; and what Prefect keeps for each of the eight flows within the pipeline."""
    return math.ceil(shards / shards_per_task) + 2 + 3 + 8


def expected_artifacts() -> int:
    """Whatever the size: progress and result of collecting and of detecting for each of three datasets; progress,
    curves and result of each training; and the pipeline's own."""
    return 3 * (2 + 2) + 2 * 3 + 1


def stages_of(ask: "Server") -> tuple[list[Stage], float]:
    """What each stage of the only pipeline took, and the seconds from asking for it to the first of them."""
    flows = {flow["id"]: flow["name"] for flow in ask.all("flows")}
    runs = ask.all("flow_runs")
    pipeline = next(run for run in runs if flows[run["flow_id"]] == "pretrain-vlbert")
    if pipeline["state_type"] != "COMPLETED":
        raise RuntimeError(f"the pipeline is {pipeline['state_name']}: {pipeline['state']['message']}")
    result: PipelineResult = _result(pipeline["id"])
    collects = [run["id"] for run in runs if flows[run["flow_id"]] == "collect-captions"]
    work = {
        # Not what its result says, which is the time between the tasks, too.
        "collect": sum(task["total_run_time"] for task in ask.all("task_runs", flow_runs={"id": {"any_": collects}})),
        "detect": sum(detected.seconds for detected in result.detected.values()),
        "pretrain": result.pretrained.seconds,
        "finetune": sum(trained.seconds for trained in result.finetuned),
    }
    stages = []
    for flow, name in STAGES.items():
        ours = [run for run in runs if flows[run["flow_id"]] == flow]
        tasks = sum(ask.count("task_runs", flow_runs={"id": {"any_": [run["id"]]}}) for run in ours)
        seconds = sum(run["total_run_time"] for run in ours)
        stages.append(Stage(name, len(ours), tasks + len(ours), seconds, work[name]))
    first = min(_seconds(run["start_time"]) for run in runs if run["parent_task_run_id"])
    return stages, first - _seconds(pipeline["created"])


def _result(run: str) -> "PipelineResult":
    from prefect.client.orchestration import get_client  # here, because Prefect reads its settings when it is imported

    with get_client(sync_client=True) as client:
        return client.read_flow_run(run).state.result()


def _seconds(time_of_day: str) -> float:
    return datetime.fromisoformat(time_of_day).timestamp()


class Server:
    """Examples to Prefect's API."""

    def __init__(self, url: str):
        self.url = url

    def post(self, path: str, **body: object) -> object:
        answer = httpx.post(f"{self.url}/{path}", json=body, timeout=60, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def count(self, what: str, **body: object) -> int:
        return self.post(f"{what}/count", **body)

    def all(self, what: str, **body: object) -> list[dict]:
        """Every one, page after page."""
        found = []
        while True:
            page = self.post(f"{what}/filter", limit=200, offset=len(found), **body)
            found += page
            if not page:
                return found


# --- the database -----------------------------------------------------------------------------------------------------


def rows_of(home: Path) -> dict[str, int]:
    """Rows of each table that has any."""
    with closing(_open(home)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
    return {name: count for name, count in sorted(rows.items(), key=lambda row: -row[1]) if count}


def size_of(home: Path) -> int:
    """Bytes of the database as it is once its journal is written back."""
    with closing(_open(home)) as database:
        return math.prod(database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))


def database_of(home: Path, before: int) -> Database:
    """The database, its server having ended."""
    files = sum(file.stat().st_size for file in home.glob("prefect.db*"))  # before SQLite tidies its journal up
    with closing(_open(home)) as opened:
        (artifacts,) = opened.execute("SELECT count(*) FROM artifact WHERE key IS NOT NULL").fetchone()
    return Database(files, before, artifacts, rows_of(home))


def settle(state: Callable[[], object]) -> None:
    """Wait until the server has written what it was given."""
    last, since = state(), time.monotonic()
    while time.monotonic() - since < _SETTLED:
        time.sleep(0.5)
        now = state()
        if now != last:
            last, since = now, time.monotonic()


def _open(home: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{(home / 'prefect.db').as_uri()}?mode=ro", uri=True)


# --- what is shown ----------------------------------------------------------------------------------------------------


def report(measured: Measured) -> str:
    """Tables for people."""
    database = measured.database
    lines = [
        f"{measured.shards} shards, {measured.shards_per_task} a task: {measured.task_runs:,} task runs, "
        f"{measured.flow_runs} flow runs in {measured.seconds:.1f} s, the first stage after {measured.waited:.1f} s",
        f"\n{'stage':<10}{'flow runs':>11}{'task runs':>11}{'seconds':>10}{'work':>8}{'Prefect':>9}{'ms a task':>11}",
    ]
    lines += [
        f"{stage.name:<10}{stage.flow_runs:>11}{stage.task_runs:>11,}{stage.seconds:>10.1f}{stage.work_seconds:>8.1f}"
        f"{stage.overhead:>9.1f}{stage.milliseconds:>11.0f}"
        for stage in measured.stages
    ]
    lines += [
        f"\ndatabase: {database.bytes / 1e6:.1f} MB, {database.bytes_before / 1e6:.1f} MB of it before the pipeline",
        f"\n{'table':<24}{'rows':>9}",
    ]
    lines += [f"{name:<24}{rows:>9,}" for name, rows in [*database.rows.items()][:8]]
    return "\n".join(lines) + "\n"


def over(measured: Measured) -> list[str]:
    """The bars that it is over, and what is not as many as it should be; one line each."""
    database, planned = measured.database, expected_task_runs(measured.shards, measured.shards_per_task)
    checks = [
        (measured.task_runs <= MOST_TASK_RUNS, f"OVER THE BAR: {measured.task_runs:,} task runs of {MOST_TASK_RUNS:,}"),
        (database.bytes <= MOST_BYTES, f"OVER THE BAR: {database.bytes:,} bytes of {MOST_BYTES:,}"),
        (measured.task_runs == planned, f"NOT AS PLANNED: {measured.task_runs:,} task runs, not {planned:,}"),
        (
            database.artifacts == expected_artifacts(),
            f"NOT AS PLANNED: {database.artifacts} artifacts, not {expected_artifacts()}",
        ),
    ]
    return [message for right, message in checks if not right]


def as_json(measured: Measured) -> dict[str, Any]:
    """For benchmarks/results."""
    facts = asdict(measured) | {
        "machine": machine(),
        "prefect": importlib.metadata.version("prefect"),
        "bars": {"task_runs": MOST_TASK_RUNS, "bytes": MOST_BYTES},
    }
    facts["stages"] = [
        asdict(stage) | {"overhead_seconds": stage.overhead, "milliseconds_a_task_run": stage.milliseconds}
        for stage in measured.stages
    ]
    return json.loads(json.dumps(facts), parse_float=lambda number: round(float(number), 3))


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser("orchestration", __doc__)
    command.add_argument("--shards", type=int, default=SHARDS, help="of captions (%(default)s)")
    command.add_argument("--shards-per-task", type=int, default=1, help="the flows' own default is 10 (%(default)s)")
    chosen = command.parse_args(arguments)
    if chosen.shards < 2 or chosen.shards_per_task < 1:
        command.error("--shards must be at least 2, --shards-per-task at least 1")
    with tempfile.TemporaryDirectory(prefix="orchestration-") as folder:
        measured = measure(Path(folder), chosen.shards, chosen.shards_per_task)
    print(report(measured))
    write_json(chosen.json, as_json(measured))
    failed = over(measured)
    print("\n".join(failed) if failed else "within the bars")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
