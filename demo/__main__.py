"""Draw demo data, serve them, and run the whole pipeline with a real Prefect server; ends with a report and a table.

    make demo [ROOT=demo-root] [SEED=0]             everything; what is done already is not done again
    make demo-full [ROOT=demo-full-root] [SEED=0]   trains the detector too, and the models with three seeds and on VCR
    make compare [ROOT=compare-root] [SEED=0]       compares the models of all architectures (docs/results.md)
    make ui [ROOT=demo-root]                        the flow UI on what was recorded (vlbert serve). To collect removed
                                                    shards again, serve the images: python -m demo.serve ROOT/data

`make demo` finds regions with the detector beside this file, which was trained on such scenes. Exits with 1 where the
detector or the models did not learn enough.
"""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from demo.data import DemoDataSettings, draw_demo_data
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
from flows.serve import serving
from flows.supervisor import ChildFailed, run_child
from storage.tables import aligned

if TYPE_CHECKING:
    from flows.pipeline import PipelineResult
    from flows.torchrun import Trained

SEEDS = 3  # of demo-full
LEAST_MAP = {"shipped": 0.7, "trained": 0.5}  # mAP@0.5 on the held-out scenes
LEAST_GROUNDING = 0.12  # accuracy at colour and shape words, less that with another scene's image
BUDGET = (300, 1800)  # seconds that `make demo` and `make demo-full` may take on two cores: a goal, not a gate
# A line of the worker's log that a stage wrote (flows.artifacts.stage_logger), and not Prefect.
LOGGED = re.compile(r"^[\d:.]+ \| \w+ +\| prefect\.\w+\.stage - (.*)$", re.MULTILINE)


def run_demo(root: Path, seed: int, processes: int, full: bool = False) -> int:
    """The whole demo; the exit status. full: with a detector trained here, and training with SEEDS seeds."""
    started = time.monotonic()
    data = draw_demo_data(root / "data", DemoDataSettings(seed=seed))
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
        before = time.monotonic()
        seconds = {"draw and serve": before - started}
        say("starting a Prefect server and a worker")
        with serving(home, free_port(), deployments, query_seconds=2.0):
            trained = [run_deployment(TRAIN_DETECTOR, {}, home / "worker.log")] if full else []
            pipelines = [run_deployment(PIPELINE, each, home / "worker.log") for each in parameters]
    working, peaks = stages_of(pipelines, trained)
    peaks["server"] = max(pipeline.peak_bytes for pipeline in pipelines)
    # What Prefect itself took: server, deployments and worker, and of the pipeline runs all that no stage worked.
    seconds |= {"server": time.monotonic() - before - sum(working.values()), **working}
    before = time.monotonic()
    if full:
        for pipeline in pipelines:
            for start in STARTS:
                evaluate_vcr(root, runs_of(pipeline), start)
        seconds["evaluate"] = time.monotonic() - before
    from demo.report import evaluate_detector, write_report  # after the stages: torch takes a second and some memory

    found = evaluate_detector(data, weights)
    report = write_report(root, data, found, pipelines)
    seconds["total"] = time.monotonic() - started
    peaks["total"] = max(peaks.values())
    rows = [
        (name, f"{took:.1f}", f"{peaks[name] / 1e6:.0f}" if name in peaks else "-") for name, took in seconds.items()
    ]
    print("", *aligned(("stage", "seconds", "peak MB of one process"), rows), sep="\n")
    print(f"of {BUDGET[full]} s that it may take\n\nreport       {report}")
    print(f"flow UI      make ui ROOT={shlex.quote(str(root))}\n")
    failed = gates(pipelines, found["metrics"]["map50"], LEAST_MAP["trained" if full else "shipped"])
    print("\n".join(failed) if failed else "all gates passed")
    return 1 if failed else 0


def stages_of(pipelines: "Sequence[PipelineResult]", trained: "Sequence[Trained]") -> tuple[dict, dict]:
    """Seconds of the stages of all pipeline runs together, and bytes of the largest process, where it is known; a later
    run skips what an earlier one did."""
    working = {
        "train detector": trained,
        "download": [one for pipeline in pipelines for one in pipeline.collected],
        "detect": [one for pipeline in pipelines for one in pipeline.detected.values()],
        "pre-train": [pipeline.pretrained for pipeline in pipelines],
        "fine-tune": [one for pipeline in pipelines for one in pipeline.finetuned],
    }
    seconds = {name: sum(one.seconds for one in results) for name, results in working.items() if results}
    return seconds, {name: max(one.peak_bytes for one in working[name]) for name in seconds if name != "download"}


def evaluate_vcr(root: Path, runs: dict[str, str], start: str) -> None:
    """Evaluate the runs of answers and of rationales together on val; what is evaluated already stays."""
    names = [runs[run_of(task, start)] for task in ("vcr-answers", "vcr-rationales")]
    folder = joint_folder(root, names[0])
    checkpoints = ",".join(str(root / "runs" / name) for name in names)
    recipe = shlex.split(DEMO_TASKS["vcr-answers"].recipe)
    command = [sys.executable, "-m", "vlbert.evaluation.evaluate", *recipe, checkpoints, "val", f"--out={folder}"]
    run_child(command, say)


def run_deployment(deployment: str, parameters: dict, log: Path) -> "PipelineResult | Trained":
    """The result of a deployment that is run with these of its parameters set anew.

    Prints what stages write to the worker's log meanwhile. RuntimeError where it does not complete.
    """
    from prefect.client.orchestration import get_client  # here, because what it reads is set by `serving`
    from prefect.deployments import run_deployment as start

    say(f"prefect deployment run {deployment}")
    with open(log, encoding="utf-8", errors="replace") as lines, get_client(sync_client=True) as client:
        run = start(deployment, parameters=parameters, timeout=0)
        while not run.state.is_final():
            time.sleep(1)
            run = client.read_flow_run(run.id)
            for message in LOGGED.findall(lines.read()):
                say(message)
    if not run.state.is_completed():
        raise RuntimeError(f"{deployment} is {run.state.name}: {run.state.message}; {log} has more")
    return run.state.result()


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("what", nargs="?", choices=["run", "full", "compare"], default="run")
    parser.add_argument("--root", type=Path, default=Path("demo-root"), help="folder for everything (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data and of training (%(default)s)")
    parser.add_argument("--processes", type=int, default=min(2, cores), help="that train together (%(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.what == "compare":
            from demo.compare import run_comparison  # here: it imports torch

            sys.exit(run_comparison(chosen.root, chosen.seed, SEEDS, say))
        sys.exit(run_demo(chosen.root, chosen.seed, chosen.processes, chosen.what == "full"))
    except (ValueError, RuntimeError, ChildFailed, ConnectionError) as error:
        sys.exit(f"\nthe demo stopped: {error}\nWhat is done stays; the same command goes on.")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
