"""Draw demo data, serve them, and run the whole pipeline with a real Prefect server; ends with a report and a table.

    make demo [ROOT=demo-root] [SEED=0]             everything; what is done already is not done again
    make demo-full [ROOT=demo-full-root] [SEED=0]   trains the detector too, and the models with three seeds and on VCR
    make compare [ROOT=compare-root] [SEED=0]       compares the models of all architectures (docs/results.md)
    make ui [ROOT=demo-root]                        the flow UI on what was recorded. To collect removed shards again,
                                                    serve the images: python -m demo.serve ROOT/data

`make demo` finds regions with the detector beside this file, which was trained on such scenes. Exits with 1 where the
detector or the models did not learn enough.
"""

import argparse
import contextvars
import json
import os
import resource
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from demo.data import DEFAULT_PORT, DESCRIPTION, DemoData, DemoDataSettings, draw_demo_data
from demo.deployments import (
    DETECTOR_RUN,
    PIPELINE,
    SHIPPED_DETECTOR,
    TRAIN_DETECTOR,
    flow_parameters,
    write_deployments,
)
from demo.serve import DemoServer, free_port
from demo.tasks import DEMO_TASKS, STARTS, joint_folder, mean, numbers_of, run_of, runs_of
from flows.serve import PORT, serve, serving
from flows.supervisor import ChildFailed, run_child
from storage.tables import aligned

if TYPE_CHECKING:
    from flows.pipeline import PipelineResult
    from flows.torchrun import Trained

SEEDS = 3  # of demo-full
LEAST_MAP = {"shipped": 0.7, "trained": 0.5}  # mAP@0.5 on the held-out scenes
LEAST_GROUNDING = 0.12  # accuracy at colour and shape words, less that with another scene's image
# Seconds that a stage may take on two cores, in `make demo` and in `make demo-full`: a goal, not a gate.
BUDGET = {
    "draw and serve": (15, 15),
    "server": (45, 150),
    "train detector": (0, 300),
    "download": (15, 15),
    "detect": (30, 60),
    "pre-train": (150, 480),
    "fine-tune": (90, 690),
    "evaluate": (0, 75),
    "report": (15, 15),
    "total": (360, 1800),
}


class Stage(NamedTuple):
    """A line of the table at the end; peak_bytes is the memory of the largest process that worked for it."""

    name: str
    seconds: float
    peak_bytes: int


def run_demo(root: Path, seed: int, processes: int, full: bool = False) -> int:
    """The whole demo; the exit status. full: with a detector trained here, and training with SEEDS seeds."""
    started = time.monotonic()
    data = draw(root / "data", DemoDataSettings(seed=seed))
    home, deployments = root / "prefect", root / "prefect.yaml"
    if full:
        weights = root / "runs" / DETECTOR_RUN / "weights.safetensors"
        parameters = [
            flow_parameters(root, data, number, processes, weights, f"-seed{number}", tuple(DEMO_TASKS))
            for number in range(seed, seed + SEEDS)
        ]
    else:
        weights, parameters = SHIPPED_DETECTOR, [flow_parameters(root, data, seed, processes)]
    write_deployments(deployments, parameters[0], data)
    with DemoServer(data.root):
        stages = [Stage("draw and serve", time.monotonic() - started, own_peak())]
        before = time.monotonic()
        say("starting a Prefect server and a worker")
        with serving(home, free_port(0), deployments, query_seconds=2.0):
            trained = [run_deployment(TRAIN_DETECTOR)] if full else []
            pipelines = [
                run_deployment(PIPELINE, {name: each[name] for name in ("pretraining", "finetunings")})
                for each in parameters
            ]
    working = stages_of(pipelines, trained)
    # What Prefect itself took: server, deployments and worker, and of the pipeline runs all that no stage worked.
    elapsed = time.monotonic() - before - sum(stage.seconds for stage in working)
    stages += [Stage("server", elapsed, max(pipeline.peak_bytes for pipeline in pipelines)), *working]
    if full:
        before = time.monotonic()
        evaluated = [evaluate_vcr(root, runs_of(each), start) for each in pipelines for start in STARTS]
        stages.append(Stage("evaluate", time.monotonic() - before, max(evaluated)))
    from demo.evaluate_detector import evaluate_detector  # after the stages, for they take a second and some memory
    from demo.report import write_report

    before = time.monotonic()
    found = evaluate_detector(root, data, weights)
    report = write_report(root, data, found, [(stage.name, stage.seconds) for stage in stages], pipelines)
    stages.append(Stage("report", time.monotonic() - before, own_peak()))
    stages.append(Stage("total", time.monotonic() - started, max(stage.peak_bytes for stage in stages)))
    print(table(stages, full))
    print(f"report       {report}\nflow UI      {again('ui', root)}\n")
    failed = gates(pipelines, found["metrics"]["map50"], LEAST_MAP["trained" if full else "shipped"])
    print("\n".join(failed) if failed else "all gates passed")
    return 1 if failed else 0


def stages_of(pipelines: "Sequence[PipelineResult]", trained: "Sequence[Trained]") -> list[Stage]:
    """What the stages of all pipeline runs took together; a later run skips what an earlier one did."""
    working = {
        "train detector": trained,
        "detect": [one for pipeline in pipelines for one in pipeline.detected.values()],
        "pre-train": [pipeline.pretrained for pipeline in pipelines],
        "fine-tune": [one for pipeline in pipelines for one in pipeline.finetuned],
    }
    found = {
        name: Stage(name, sum(one.seconds for one in results), max(one.peak_bytes for one in results))
        for name, results in working.items()
        if results
    }
    seconds = sum(collected.seconds for pipeline in pipelines for collected in pipeline.collected)
    found["download"] = Stage("download", seconds, max(pipeline.peak_bytes for pipeline in pipelines))
    return [found[name] for name in BUDGET if name in found]


def evaluate_vcr(root: Path, runs: dict[str, str], start: str) -> int:
    """Evaluate the runs of answers and of rationales together on val, unless that is done; its memory in bytes."""
    names = [runs[run_of(task, start)] for task in ("vcr-answers", "vcr-rationales")]
    folder = joint_folder(root, names[0])
    if (folder / "metrics.json").is_file():
        return 0
    checkpoints = ",".join(str(root / "runs" / name) for name in names)
    recipe = shlex.split(DEMO_TASKS["vcr-answers"].recipe)
    command = [sys.executable, "-m", "vlbert.evaluation.evaluate", *recipe, checkpoints, "val", f"--out={folder}"]
    return run_child(command, say)


def draw(folder: Path, settings: DemoDataSettings) -> DemoData:
    """The demo data; those that are there keep their port, which the collected lists name. Exits where others are."""
    port = DEFAULT_PORT if (folder / DESCRIPTION).exists() else free_port()
    if port != DEFAULT_PORT:
        say(
            f"WARNING: port {DEFAULT_PORT} is taken, so the demo data are served at {port}. Their URLs name it: keys, "
            "shards and numbers differ from those of the default port"
        )
    say(f"drawing {settings.train_scenes + settings.held_out_scenes} scenes into {folder}")
    try:
        return draw_demo_data(folder, settings, port)
    except ValueError as error:
        sys.exit(
            f"error: {error}\nThe shards and runs beside them are made of them. For others: make demo ROOT=OTHER, or "
            f"first remove these: make clean ROOT={shlex.quote(str(folder.parent))}"
        )


def again(what: str, root: Path, seed: int = 0) -> str:
    """The command, as one types it in the project's folder."""
    return f"make {what} ROOT={shlex.quote(str(root))}" + (f" SEED={seed}" if seed else "")


def run_deployment(deployment: str, parameters: dict | None = None) -> "PipelineResult | Trained":
    """The result of a deployment that is run as a user would run it, with these of its parameters set anew."""
    from prefect.client.orchestration import get_client  # here, because what it reads is set by `serving`
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    command = ["deployment", "run", deployment, "--watch"]
    say(f"prefect {' '.join(command)}")
    with stages_shown():
        given = ["--params", json.dumps(parameters)] if parameters else []
        run_child([sys.executable, "-m", "prefect", *command, *given], lambda line: None)
    flow, name = deployment.split("/")
    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])),
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[name])),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=1,
        )
    return run.state.result()


@contextmanager
def stages_shown() -> Iterator[None]:
    """Print what our stages log from now on, in flows and in tasks, one line each, and nothing that Prefect logs."""
    over, context = threading.Event(), contextvars.copy_context()  # with Prefect's settings
    thread = threading.Thread(target=context.run, args=(_follow, datetime.now(UTC), over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(start: datetime, over: threading.Event) -> None:
    from prefect.client.orchestration import get_client  # here, because what it reads is set by `serving`
    from prefect.client.schemas.filters import LogFilter, LogFilterTimestamp
    from prefect.client.schemas.sorting import LogSort

    from flows.artifacts import STAGE_LOG

    shown, last = set(), False
    with get_client(sync_client=True) as client:
        while not last:
            last, lines = over.wait(1), []  # before the request, which then has all that was logged until the end
            since = LogFilter(timestamp=LogFilterTimestamp(after_=start))
            with suppress(Exception):  # a server that is away is asked again
                lines = client.read_logs(since, limit=200, sort=LogSort.TIMESTAMP_ASC)
            for line in lines:
                if line.id not in shown and line.name.endswith(f".{STAGE_LOG}"):
                    print(f"{line.timestamp.astimezone():%H:%M:%S}  {line.message}", flush=True)
                shown.add(line.id)
            if lines:  # processes send their lines some seconds late
                late = timedelta(seconds=10 if len(lines) < 200 else 0)
                start = max(start, lines[-1].timestamp - late)


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def own_peak() -> int:
    """The most memory that this process has had, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(stages: Sequence[Stage], full: bool) -> str:
    rows = [
        (one.name, f"{one.seconds:.1f}", str(BUDGET[one.name][full]), f"{one.peak_bytes / 1e6:.0f}") for one in stages
    ]
    return "\n".join(["", *aligned(("stage", "seconds", "budget", "peak MB of one process"), rows), ""])


def gates(pipelines: "Sequence[PipelineResult]", map50: float, least_map: float) -> list[str]:
    """Print what detector and models learned, means over the pipeline runs; a line for each that is not enough."""
    means = mean([numbers_of(pipeline) for pipeline in pipelines])
    gap = means["grounding"]
    print(f"detector: mAP@0.5 {map50:.3f} on held-out scenes\nmodels, means of {len(pipelines)}: grounding {gap:.3f}")
    checks = [
        (map50 >= least_map, f"the detector's mAP@0.5 is {map50:.3f}, under {least_map}"),
        (gap >= LEAST_GROUNDING, f"grounding is {gap:.3f}, under {LEAST_GROUNDING}: the model does not use the image"),
    ]
    for key, task in DEMO_TASKS.items():
        if key not in means:
            continue
        with_it, without, chance = means[run_of(key, "with")], means[run_of(key, "without")], means[key]
        print(f"{task.title}: {with_it:.3f} with pre-training, {without:.3f} without, {chance:.3f} by chance")
        message = f"{task.title} with pre-training is {with_it:.3f}, not {task.least_gain} over"
        checks += [
            (with_it - chance >= task.least_gain, f"{message} chance ({chance:.3f})"),
            (with_it - without >= task.least_gain, f"{message} {without:.3f} without it"),
        ]
    return [f"GATE FAILED: {message}" for passed, message in checks if not passed]


def show_ui(root: Path, port: int) -> None:
    """Serve the deployments on the demo's database, with the flow UI, until Ctrl-C.

    The images are not served: they are collected already.
    """
    deployments = root / "prefect.yaml"
    if not deployments.is_file():
        raise ValueError(f"{root} holds no demo (no prefect.yaml); run it first: {again('demo', root)}")
    serve(root / "prefect", port, deployments)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("what", nargs="?", choices=["run", "full", "compare", "ui"], default="run")
    parser.add_argument("--root", type=Path, default=Path("demo-root"), help="folder for everything (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of training (%(default)s)")
    parser.add_argument("--processes", type=int, default=min(2, cores), help="that train together (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="of the flow UI (%(default)s)")
    chosen = parser.parse_args(arguments)
    full = chosen.what == "full"
    target = {"run": "demo", "full": "demo-full"}.get(chosen.what, chosen.what)
    command = again(target, chosen.root, chosen.seed)
    try:
        if chosen.what == "ui":
            show_ui(chosen.root, chosen.port)
        if chosen.what == "compare":
            from demo.compare import run_comparison  # here: it imports torch

            sys.exit(run_comparison(chosen.root, chosen.seed, SEEDS, say))
        sys.exit(run_demo(chosen.root, chosen.seed, chosen.processes, full))
    except (ValueError, RuntimeError, ChildFailed, ConnectionError) as error:
        sys.exit(f"\nthe demo stopped: {error}\nWhat is done stays; `{command}` goes on.")
    except KeyboardInterrupt:
        print(f"\nstopped; `{command}` goes on from here", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
