"""Draw and serve demo data, run the whole pipeline with a real Prefect server, and write a report.

    make demo [ROOT=demo-root] [SEED=0]             runs everything, except parts that are already complete
    make demo-full [ROOT=demo-full-root] [SEED=0]   also trains the detector, and each model with five seeds
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

from demo.data import LABELS, DemoDataSettings, draw_demo_data
from demo.deployments import (
    COMPARE,
    DETECTOR_RUN,
    PIPELINE,
    SHIPPED_DETECTOR,
    TRAIN_DETECTOR,
    comparison_parameters,
    flow_parameters,
    write_deployments,
)
from demo.labels import WITH, WITHOUT
from demo.serve import DemoServer, free_port
from flows.serve import serving
from flows.supervisor import ChildFailed
from storage.tables import aligned

if TYPE_CHECKING:
    from demo.results import Results
    from flows.pipeline import PipelineResult
    from flows.torchrun import Trained

SEEDS = 5  # for demo-full
LEAST_MAP = {"shipped": 0.7, "trained": 0.5}  # mAP@0.5 on the held-out scenes
# The lower ends of intervals must be above these. A model that sees no image has no grounding, no lead over the blind
# answers of VQA, and 0.14 over chance in RefCOCO+, from words of size and the forms of boxes.
LEAST_GROUNDING = 0.1  # accuracy at colour and shape words, minus that with another scene's image
LEAST_LEAD = {"refcoco": 0.2, "vqa": 0.1}  # over chance; over the blind answers. With pre-training and the most labels
BUDGET = (300, 1800)  # target for `make demo` and `make demo-full` in seconds on two cores; not a gate
# A line of the worker's log that was written by a stage (flows.artifacts.stage_logger), not by Prefect.
STAGE_LINE = re.compile(r"^[\d:.]+ \| \w+ +\| prefect\.\w+\.stage - (.*)$", re.MULTILINE)


def run_demo(root: Path, seed: int, processes: int, full: bool = False) -> int:
    """Run the demo, and return the exit status. `full` also trains the detector, and uses SEEDS seeds."""
    started = time.monotonic()
    data = draw_demo_data(root / "data", DemoDataSettings(seed=seed))
    home, deployments = root / "prefect", root / "prefect.yaml"
    weights = root / "runs" / DETECTOR_RUN / "weights.safetensors" if full else SHIPPED_DETECTOR
    parameters = flow_parameters(root, data, seed, processes, weights)
    comparison = comparison_parameters(root, data, range(seed, seed + (SEEDS if full else 1)))
    write_deployments(deployments, parameters, comparison, data)
    with DemoServer(data.root):
        before = time.monotonic()
        seconds = {"draw and serve": before - started}
        say("starting a Prefect server and a worker")
        with serving(home, free_port(), deployments, query_seconds=2.0):
            trained = [run_deployment(TRAIN_DETECTOR, {}, home / "worker.log")] if full else []
            pipeline = run_deployment(PIPELINE, parameters, home / "worker.log")
            compared = time.monotonic()
            run_deployment(COMPARE, comparison, home / "worker.log")
            compared = time.monotonic() - compared
    stage_seconds, peaks = measure_stages(pipeline, trained)
    stage_seconds["compare"], peaks["server"] = compared, pipeline.peak_bytes
    # Time of Prefect itself: server, deployments, worker, and the time of pipeline runs outside of stages.
    seconds |= {"server": time.monotonic() - before - sum(stage_seconds.values()), **stage_seconds}
    from demo.report import evaluate_detector, write_report  # after the stages: torch takes a second and some memory
    from demo.results import read_results

    detector, results = evaluate_detector(data, weights), read_results(root, data, comparison)
    report = write_report(root, data, detector, pipeline, results)
    seconds["total"] = time.monotonic() - started
    peaks["total"] = max(peaks.values())
    rows = [
        (name, f"{value:.1f}", f"{peaks[name] / 1e6:.0f}" if name in peaks else "-") for name, value in seconds.items()
    ]
    print("", *aligned(("stage", "seconds", "peak MB of one process"), rows), sep="\n")
    print(f"target: {BUDGET[full]} s\n\nreport       {report}")
    print(f"UI           make ui ROOT={shlex.quote(str(root))}\n")
    failed = check_gates(results, detector["metrics"]["map50"], LEAST_MAP["trained" if full else "shipped"])
    print("\n".join(failed) if failed else "all gates passed")
    return 1 if failed else 0


def measure_stages(pipeline: "PipelineResult", trained: "Sequence[Trained]") -> tuple[dict, dict]:
    """Return two dicts by stage: the total seconds, and the peak bytes of the largest process.

    The memory of the download stage is unknown.
    """
    stages: dict[str, Sequence[Any]] = {
        "train detector": trained,
        "download": pipeline.collected,
        "detect": [*pipeline.detected.values()],
        "pre-train": [pipeline.pretrained],
        "fine-tune": pipeline.finetuned,
    }
    seconds = {name: sum(result.seconds for result in results) for name, results in stages.items() if results}
    return seconds, {name: max(result.peak_bytes for result in stages[name]) for name in seconds if name != "download"}


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


def check_gates(results: "Results", map50: float, least_map: float) -> list[str]:
    """Print the results, and return a line for each failed gate."""
    print(f"detector: mAP@0.5 {map50:.3f} on held-out scenes")
    print(f"words of colour and shape: grounding gap {results.gap:.3f}, lower end {results.least_gap:.3f}")
    checks = [
        (map50 >= least_map, f"the detector's mAP@0.5 is {map50:.3f}, under {least_map}"),
        (
            results.least_gap >= LEAST_GROUNDING,
            f"the lower end of the grounding gap is {results.least_gap:.3f}, under {LEAST_GROUNDING}",
        ),
    ]
    for column in results.columns:
        means = {f"{start} pre-training": column.means[start]["mean"] for start in (WITH, WITHOUT)}
        line = ", ".join(f"{name} {value:.3f}" for name, value in {**means, **column.baselines}.items())
        print(f"{column.title}, {column.labels:,} labels: {line}")
        if column.labels == max(LABELS):
            least, baseline = LEAST_LEAD[column.task], "blind" if "blind" in column.baselines else "chance"
            message = (
                f"{column.title} with pre-training: its lower end is {column.lead:.3f} over {baseline}, under {least}"
            )
            checks.append((column.lead >= least, message))
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
