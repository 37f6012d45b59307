"""Draw and serve demo data, run the whole pipeline with a real Prefect server, and write a report.

    make demo [ROOT=demo-root] [SEED=0]             runs everything, except parts that are already complete
    make demo-full [ROOT=demo-full-root] [SEED=0]   also trains the detector, and uses three seeds and VCR
    make compare [ROOT=compare-root] [SEED=0]       compares the models of all architectures (docs/results.md)
    make ui [ROOT=demo-root]                        shows the recorded runs in Prefect's UI (vlbert serve). To collect
                                                    deleted shards again, run python -m demo.serve ROOT/data

`make demo` finds regions with demo/detector.safetensors, which was trained on similar scenes. The exit status is 1 if
the detector or the models have not learned enough.
"""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from demo.tasks import DEMO_TASKS, STARTS, collect_numbers, joint_folder, mean, run_name, runs_by_role
from flows.serve import serving
from flows.supervisor import ChildFailed, run_child
from storage.tables import aligned

if TYPE_CHECKING:
    from flows.pipeline import PipelineResult
    from flows.torchrun import Trained

SEEDS = 3  # for demo-full
LEAST_MAP = {"shipped": 0.7, "trained": 0.5}  # mAP@0.5 on the held-out scenes
LEAST_GROUNDING = 0.12  # accuracy at colour and shape words, minus that with another scene's image
BUDGET = (300, 1800)  # target for `make demo` and `make demo-full` in seconds on two cores; not a gate
# A line of the worker's log that was written by a stage (flows.artifacts.stage_logger), not by Prefect.
STAGE_LINE = re.compile(r"^[\d:.]+ \| \w+ +\| prefect\.\w+\.stage - (.*)$", re.MULTILINE)


def run_demo(root: Path, seed: int, processes: int, full: bool = False) -> int:
    """Run the demo, and return the exit status. `full` also trains the detector, and uses SEEDS seeds and VCR."""
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
    stage_seconds, peaks = measure_stages(pipelines, trained)
    peaks["server"] = max(pipeline.peak_bytes for pipeline in pipelines)
    # Time of Prefect itself: server, deployments, worker, and the time of pipeline runs outside of stages.
    seconds |= {"server": time.monotonic() - before - sum(stage_seconds.values()), **stage_seconds}
    before = time.monotonic()
    if full:
        for pipeline in pipelines:
            for start in STARTS:
                evaluate_vcr(root, runs_by_role(pipeline), start)
        seconds["evaluate"] = time.monotonic() - before
    from demo.report import evaluate_detector, write_report  # after the stages: torch takes a second and some memory

    detector = evaluate_detector(data, weights)
    report = write_report(root, data, detector, pipelines)
    seconds["total"] = time.monotonic() - started
    peaks["total"] = max(peaks.values())
    rows = [
        (name, f"{value:.1f}", f"{peaks[name] / 1e6:.0f}" if name in peaks else "-") for name, value in seconds.items()
    ]
    print("", *aligned(("stage", "seconds", "peak MB of one process"), rows), sep="\n")
    print(f"target: {BUDGET[full]} s\n\nreport       {report}")
    print(f"UI           make ui ROOT={shlex.quote(str(root))}\n")
    failed = check_gates(pipelines, detector["metrics"]["map50"], LEAST_MAP["trained" if full else "shipped"])
    print("\n".join(failed) if failed else "all gates passed")
    return 1 if failed else 0


def measure_stages(pipelines: "Sequence[PipelineResult]", trained: "Sequence[Trained]") -> tuple[dict, dict]:
    """Return two dicts by stage: the total seconds of all pipeline runs, and the peak bytes of the largest process.

    Later runs skip what earlier ones have done. The memory of the download stage is unknown.
    """
    stages: dict[str, Sequence[Any]] = {
        "train detector": trained,
        "download": [result for pipeline in pipelines for result in pipeline.collected],
        "detect": [result for pipeline in pipelines for result in pipeline.detected.values()],
        "pre-train": [pipeline.pretrained for pipeline in pipelines],
        "fine-tune": [result for pipeline in pipelines for result in pipeline.finetuned],
    }
    seconds = {name: sum(result.seconds for result in results) for name, results in stages.items() if results}
    return seconds, {name: max(result.peak_bytes for result in stages[name]) for name in seconds if name != "download"}


def evaluate_vcr(root: Path, runs: dict[str, str], start: str) -> None:
    """Evaluate VCR's answer run and rationale run jointly on val. An existing evaluation is kept."""
    names = [runs[run_name(task, start)] for task in ("vcr-answers", "vcr-rationales")]
    folder = joint_folder(root, names[0])
    checkpoints = ",".join(str(root / "runs" / name) for name in names)
    recipe = shlex.split(DEMO_TASKS["vcr-answers"].recipe)
    command = [sys.executable, "-m", "vlbert.evaluation.evaluate", *recipe, checkpoints, "val", f"--out={folder}"]
    run_child(command, say)


def run_deployment(deployment: str, parameters: dict, log: Path) -> Any:
    """Run a deployment with changed `parameters`, print its stages' lines from the worker's log, and return its result.

    Raises RuntimeError if the run does not complete.
    """
    from prefect.client.orchestration import get_client  # here, because it reads settings that `serving` sets
    from prefect.deployments import run_deployment as start

    say(f"prefect deployment run {deployment}")
    with open(log, encoding="utf-8", errors="replace") as lines, get_client(sync_client=True) as client:
        run: Any = start(deployment, parameters=parameters, timeout=0)
        state = run.state
        while state is None or not state.is_final():
            time.sleep(1)
            state = client.read_flow_run(run.id).state
            for message in STAGE_LINE.findall(lines.read()):
                say(message)
    if not state.is_completed():
        raise RuntimeError(f"{deployment} is {state.name}: {state.message}; see {log}")
    return state.result()


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def check_gates(pipelines: "Sequence[PipelineResult]", map50: float, least_map: float) -> list[str]:
    """Print the detector's result and the models' means over the pipeline runs, and return a line per failed gate."""
    means = mean([collect_numbers(pipeline) for pipeline in pipelines])
    gap, seeds = means["grounding"], f", mean of {len(pipelines)}" if len(pipelines) > 1 else ""
    print(f"detector: mAP@0.5 {map50:.3f} on held-out scenes\nmodels{seeds}: grounding {gap:.3f}")
    checks = [
        (map50 >= least_map, f"the detector's mAP@0.5 is {map50:.3f}, under {least_map}"),
        (gap >= LEAST_GROUNDING, f"grounding is {gap:.3f}, under {LEAST_GROUNDING}: the model does not use the image"),
    ]
    for key, task in DEMO_TASKS.items():
        if key not in means:
            continue
        pretrained, without, chance = means[run_name(key, "with")], means[run_name(key, "without")], means[key]
        print(f"{task.title}: {pretrained:.3f} with pre-training, {without:.3f} without, {chance:.3f} by chance")
        message = f"{task.title} with pre-training is {pretrained:.3f}, not {task.least_gain} over"
        checks += [
            (pretrained - chance >= task.least_gain, f"{message} chance ({chance:.3f})"),
            (pretrained - without >= task.least_gain, f"{message} {without:.3f} without it"),
        ]
    return [f"GATE FAILED: {message}" for passed, message in checks if not passed]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("what", nargs="?", choices=["run", "full", "compare"], default="run")
    parser.add_argument("--root", type=Path, default=Path("demo-root"), help="folder for all files (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and of training (%(default)s)")
    parser.add_argument("--processes", type=int, default=min(2, cores), help="training processes (%(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.what == "compare":
            from demo.compare import run_comparison  # here, because it imports torch

            sys.exit(run_comparison(chosen.root, chosen.seed, say))
        sys.exit(run_demo(chosen.root, chosen.seed, chosen.processes, chosen.what == "full"))
    except (ValueError, RuntimeError, ChildFailed, ConnectionError) as error:
        sys.exit(f"\nthe demo stopped: {error}\nComplete parts are kept; the same command resumes the demo.")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
