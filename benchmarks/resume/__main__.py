"""Check how exactly data loaders resume: this project's, and those of other libraries.

    python -m benchmarks.resume [LOADER ...] [--histories 10] [--json FILE]

hypothesis invents histories: steps on some ranks and workers, saves, kills, restores. Each is compared with a run that
nobody stopped. A library is installed once, into an environment of its own that finds all other packages in the
project's. An adapter for each loader, with versions and links, is in benchmarks/resume/.
"""

import ast
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import describe_machine, format_table, make_parser, write_json
from benchmarks.resume.machine import SCENARIOS, run_histories

FOREIGN = ("mosaicml", "litdata", "torchdata_webdataset", "torchdata_datasets", "accelerate", "energon")


def make_environment(loader: str, cache: Path) -> str:
    """Install the packages that a loader requires, and return the interpreter that finds them."""
    pins = re.search(r"requires = (\(.*\))", (Path(__file__).parent / f"{loader}.py").read_text())
    if not pins:
        return sys.executable
    packages = ast.literal_eval(pins[1])
    folder = cache / "-".join(packages).replace("==", "-")
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "installed").touch()
    return f"{folder}/bin/python"


def summarise(found: Sequence[Mapping[str, Any]], promise: str) -> dict[str, Any]:
    """Add up what was seen in some histories. Lost and repeated samples are those of histories without a refusal."""
    refusals = [one["refused"] for one in found if one["refused"]]
    summary: dict[str, Any] = {"promised": promise, "histories": len(found), "refused": len(refusals)}
    summary |= {name: sum(one[name] for one in found) for name in ("exact", "complete", "lost", "repeated")}
    for when, restored in (("start", False), ("restore", True)):
        starts = [start for one in found for start in one["starts"] if start["restored"] is restored]
        for name in ("seconds", "reads", "bytes"):
            summary[f"{when}, {name}"] = (
                round(statistics.median(start[name] for start in starts), 3) if starts else None
            )
    inexact = min((one["history"] for one in found if not one["exact"]), key=len, default=None)
    return summary | {"refusal": min(refusals, default=None), "shortest inexact history": inexact}


def measure(loader: str, count: int) -> None:
    """Run all scenarios of a loader in this process, and print what was seen as JSON."""
    adapter = importlib.import_module(f"benchmarks.resume.{loader}").Loader
    scenarios = {}
    for name in SCENARIOS:
        if name != "withdrawn sample" or hasattr(adapter, "withdraw"):
            promise = adapter.promises.get(name, "not promised")
            scenarios[name] = summarise(run_histories(adapter, name, count), promise)
    print(json.dumps({"docs": adapter.docs, "requires": adapter.requires, "scenarios": scenarios}))


def main(arguments: Sequence[str] | None = None) -> None:
    command = make_parser("resume", __doc__)
    command.add_argument("loaders", nargs="*", metavar="LOADER", help=f"ours, {', '.join(FOREIGN)}; none: all")
    command.add_argument("--histories", type=int, default=10, help="of each loader and scenario (%(default)s)")
    command.add_argument("--cache", type=Path, default=Path.home() / ".cache/resume", help="environments (%(default)s)")
    options, report = command.parse_args(arguments), {"machine": describe_machine(), "loaders": {}}
    for loader in options.loaders or ("ours", *FOREIGN):
        program = f"from benchmarks.resume.__main__ import measure; measure({loader!r}, {options.histories})"
        own = [make_environment(loader, options.cache), "-c", program]
        run = subprocess.run(own, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
        report["loaders"][loader] = json.loads(run.stdout.splitlines()[-1])
    rows = [
        [loader, scenario, *(str(value) for value in [*summary.values()][:-2])]
        for loader, seen in report["loaders"].items()
        for scenario, summary in seen["scenarios"].items()
    ]
    print(format_table([["loader", "changed", *[*summarise([], "")][:-2]], *rows]))
    write_json(options.json, report)


if __name__ == "__main__":
    main()
