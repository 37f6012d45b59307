"""Run `make compare`: prepare the demo data with features, and compare models on it (vlbert/comparison/plans.py)."""

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo.data import DemoData, DemoDataSettings, draw_demo_data
from demo.deployments import SHIPPED_DETECTOR, count_answers, make_detection_config, make_sources
from demo.serve import DemoServer
from flows.supervisor import run_child
from storage.collect.plan import CollectSettings
from storage.collect.run import collect
from storage.settings import as_arguments, changed_fields
from vlbert.comparison.compare import compare
from vlbert.comparison.plans import PLANS

PLAN = "family_demo"
# Gates on the worst seed, and on the lower ends of the intervals. A blind model has no grounding. It may reach 0.2 over
# chance in VQA, by the most frequent answers, and 0.14 in RefCOCO+, by words of size and the forms of boxes.
LEAST_GROUNDING, LEAST_OVER_CHANCE = 0.1, {"vqa": 0.25, "refcoco": 0.18, "vcr": 0.05}


def run_comparison(root: Path, seed: int, say: Callable[[str], None]) -> int:
    """Run `make compare` on data drawn with `seed`, and return its exit status."""
    data = draw_demo_data(root / "data", DemoDataSettings(seed=seed))
    prepare(root, data, say)
    fields = [f"vqa:task.answers={count_answers(data)}"]
    summary = compare(PLANS[PLAN](), str(root), fields, report=say)
    if summary is None:
        raise RuntimeError("a signal stopped the comparison")
    print(f"page  {root / 'comparisons' / PLAN / 'index.html'}")
    failed = check_gates(summary)
    print("\n".join(failed) if failed else "all gates passed")
    return 1 if failed else 0


def prepare(root: Path, data: DemoData, log: Callable[[str], None]) -> None:
    """Make the files under `root` that the demo's comparison reads, unless they exist.

    They are the regions with features, the detector's weights, and the text corpus with its vocabulary.
    """
    weights, text = root / "detector.safetensors", root / "text"
    shutil.copyfile(SHIPPED_DETECTOR, weights)
    program = [sys.executable, "-m"]
    if not (text / "corpus.json").exists():
        options = ["--vocabulary_size=500", "--captions", data.train_tsv]
        run_child([*program, "vlbert", "corpus", text, data.text, *options], log)
    with DemoServer(data.root):
        for name, source in make_sources(data).items():
            collect(str(root), CollectSettings(name, **source), log)
    detection = as_arguments(changed_fields(make_detection_config(weights, keep_features=True)))
    for name in make_sources(data):
        run_child([*program, "vlbert", "detect", root, name, *detection], log)


def check_gates(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each failed training run, and for each model whose mean may be too low."""
    failed = [f"{training['run']} failed: {training['reason']}" for training in summary["failed"]]
    failed += [f"{task['title']}: {task['problem']}" for task in summary["tasks"].values() if task["problem"]]
    for name, gap in summary["pretraining"]["monitored_accuracy_grounding_gap"].items():
        if (least := min(gap["seeds"].values())) < LEAST_GROUNDING:
            failed.append(f"{name}: the grounding gap of a seed is {least:.3f}, under {LEAST_GROUNDING}")
    for key, task in summary["tasks"].items():
        for name, found in task["means"].items():
            least = task["chance"] + LEAST_OVER_CHANCE[key]
            if found["low"] is None or found["low"] < least:
                failed.append(f"{name}: {task['title']} is {found['mean']:.3f}, its lower end under {least:.3f}")
    return [f"GATE FAILED: {line}" for line in failed]
