"""`make compare`: the demo's data with features kept, then models compared on them (vlbert/comparison/plans.py)."""

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.deployments import SHIPPED_DETECTOR, answers_of, detection_of_demo, sources_of
from demo.serve import DemoServer
from flows.supervisor import run_child
from storage.collect.plan import CollectSettings
from storage.collect.run import collect
from storage.settings import as_arguments, changed_fields
from vlbert.comparison.compare import compare
from vlbert.comparison.plans import PLANS

PLAN = "family_demo"
# Of the means over the seeds; far below what was seen (docs/results.md), and far above what chance does.
LEAST_GROUNDING, LEAST_OVER_CHANCE = 0.05, 0.03


def run_comparison(root: Path, seed: int, seeds: int, say: Callable[[str], None]) -> int:
    """All of `make compare`; the exit status."""
    data = draw_demo_data(root / "data", DemoDataSettings(seed=seed))
    prepare(root, data, say)
    given = [f"vqa:task.answers={answers_of(data)}"]
    summary = compare(PLANS[PLAN](), str(root), given, range(seed, seed + seeds), report=say)
    if summary is None:
        raise RuntimeError("it was told to stop")
    print(f"page  {root / 'comparisons' / PLAN / 'index.html'}")
    failed = gates(summary)
    print("\n".join(failed) if failed else "all gates passed")
    return 1 if failed else 0


def prepare(root: Path, data: DemoData, log: Callable[[str], None]) -> None:
    """What the demo's plans read below `root`: regions with features, the detector's weights, and the text corpus with
    its vocabulary. What is there is not made again."""
    weights, text = root / "detector.safetensors", root / "text"
    shutil.copyfile(SHIPPED_DETECTOR, weights)
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
