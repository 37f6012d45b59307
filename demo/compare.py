"""`make compare`: the demo's data with features kept, then models compared on them (vlbert/comparison/plans.py)."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.deployments import SHIPPED_DETECTOR, detection_of_demo, sources_of
from demo.serve import DemoServer, free_port
from demo.task_files import ANSWERS
from flows.supervisor import run_child
from storage.collect.plan import CollectSettings
from storage.collect.run import collect
from storage.settings import as_arguments, changed_fields
from vlbert.comparison.compare import compare, table
from vlbert.comparison.plans import PLANS

PLAN = "family_demo"
BUDGET = 2400  # seconds that all of it may take on two cores: a goal, not a gate
# Of the means over the seeds; far below what was seen (docs/results.md), and far above what chance does.
LEAST_GROUNDING, LEAST_OVER_CHANCE = 0.05, 0.03


def run_comparison(root: Path, seed: int, seeds: int, say: Callable[[str], None]) -> int:
    """All of `make compare`; the exit status."""
    started, folder = time.monotonic(), root / "data"
    data = draw_demo_data(folder, DemoDataSettings(seed=seed), free_port())
    prepare(root, data, say)
    answers = len((data.vqa / ANSWERS).read_text(encoding="utf-8").splitlines())
    say(f"data ready after {time.monotonic() - started:.0f} s")
    given = [f"vqa:task.answers={answers}"]
    summary = compare(PLANS[PLAN](), str(root), given, range(seed, seed + seeds), report=say)
    if summary is None:
        raise RuntimeError("it was told to stop")
    print(f"\n{table(summary)}\n\npage  {root / 'comparisons' / PLAN / 'index.html'}")
    print(f"{time.monotonic() - started:.0f} s, of {BUDGET} that it may take")
    failed = gates(summary)
    print("\n".join(failed) if failed else "all gates passed")
    return 1 if failed else 0


def prepare(root: Path, data: DemoData, log: Callable[[str], None]) -> None:
    """What the demo's plans read below `root`: regions with features, the detector's weights, and the text corpus with
    its vocabulary. What is there is not made again."""
    weights, text = root / "detector.safetensors", root / "text"
    if not weights.exists():
        unfinished = weights.with_suffix(".part")
        shutil.copyfile(SHIPPED_DETECTOR, unfinished)
        unfinished.rename(weights)  # so that what is there is whole
    program = [sys.executable, "-m"]
    if not (text / "corpus.json").exists():
        building = ["--vocabulary_size=500", "--captions", data.train_tsv]
        run_child([*program, "vlbert", "corpus", text, data.text, *building], log)
    with DemoServer(data.root):
        for name, source in sources_of(data).items():
            collect(str(root), CollectSettings(name, **source), log)
    detection = as_arguments(changed_fields(detection_of_demo(weights, keep_features=True)))
    for name in sources_of(data):
        run_child([*program, "vlbert", "detect", root, name, *detection], log)


def gates(summary: Mapping[str, Any]) -> list[str]:
    """A line for each model that did not learn enough, means over the seeds, and for each training that failed."""
    failed = [f"{one['run']} failed: {one['reason']}" for one in summary["failed"]]
    failed += [f"{task['title']}: {task['problem']}" for task in summary["tasks"].values() if task["problem"]]
    for name, found in summary["pretraining"]["monitored_accuracy_grounding_gap"].items():
        if found["mean"] < LEAST_GROUNDING:
            failed.append(f"{name}: the grounding gap is {found['mean']:.3f}, under {LEAST_GROUNDING}")
    for task in summary["tasks"].values():
        for name, found in task["means"].items():
            if found["mean"] < task["chance"] + LEAST_OVER_CHANCE:
                failed.append(
                    f"{name}: {task['title']} is {found['mean']:.3f}, not {LEAST_OVER_CHANCE} over chance "
                    f"({task['chance']:.3f})"
                )
    return [f"GATE FAILED: {line}" for line in failed]
