"""Check how exactly data loaders resume: this project's, and those of other libraries.

    python -m benchmarks.resume [LOADER ...] [--histories 10] [--json FILE]

hypothesis invents histories: steps on some ranks and workers, saves, kills, restores. Each is compared with a run
that nobody stopped. A library is installed once, into an environment of its own that finds all other packages in the
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

LOADERS = ("ours", "mosaicml", "litdata", "torchdata_webdataset", "torchdata_datasets", "torchdata_datasets_buffer")
LOADERS += ("accelerate", "energon")


def make_environment(loader: str, cache: Path) -> str:
    """Install the packages that a loader requires, and return the interpreter that finds them."""
    pins = re.search(r"requires = (\(.*\))", (Path(__file__).parent / f"{loader}.py").read_text())
    if not pins:
        return sys.executable
    packages = ast.literal_eval(pins[1])
    folder = cache / "-".join(package.replace("==", "-") for package in packages)
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "installed").touch()
    return f"{folder}/bin/python"


def summarise(found: Sequence[Mapping[str, Any]], promise: str | None) -> dict[str, Any]:
    starts, refusals = [start for one in found for start in one["starts"]], [one["refused"] for one in found]
    inexact = sorted((one["history"] for one in found if not one["exact"]), key=len)
    summary = {"promised": promise, "histories": len(found), "exact": sum(one["exact"] for one in found)}
    summary |= {name: sum(one[name] for one in found) for name in ("lost", "repeated", "withdrawn")}
    summary |= {"refused": len(refusals) - refusals.count(None), "refusal": next(filter(None, refusals), None)}
    for name in ("seconds", "reads", "bytes"):
        for when, restored in (("start", False), ("restore", True)):
            values = [start[name] for start in starts if start["restored"] is restored]
            summary[f"{when}, {name}"] = round(statistics.median(values), 3) if values else None
    return summary | {"shortest inexact history": inexact[0] if inexact else None}


def measure(loader: str, count: int) -> dict[str, Any]:
    """Run all scenarios of a loader in this process."""
    adapter = importlib.import_module(f"benchmarks.resume.{loader}").Loader
    scenarios = [name for name in SCENARIOS if name != "withdrawn sample" or hasattr(adapter, "withdraw")]
    seen = {name: summarise(run_histories(adapter, name, count), adapter.promises.get(name)) for name in scenarios}
    return {"docs": adapter.docs, "requires": adapter.requires, "scenarios": seen}


def row(loader: str, scenario: str, seen: Mapping[str, Any]) -> list[str]:
    exact = f"{seen['exact']} of {seen['histories']}"
    return [loader, scenario, seen["promised"] or "not promised", exact, *(str(seen[name]) for name in COUNTED)]


COUNTED = ("lost", "repeated", "refused", "start, seconds", "restore, seconds", "restore, reads", "restore, bytes")


def main(arguments: Sequence[str] | None = None) -> None:
    command = make_parser("resume", __doc__)
    command.add_argument("loaders", nargs="*", metavar="LOADER", help=f"of {', '.join(LOADERS)}; none: all")
    command.add_argument("--histories", type=int, default=10, help="of each loader and scenario (%(default)s)")
    command.add_argument("--cache", type=Path, default=Path.home() / ".cache/resume", help="environments (%(default)s)")
    command.add_argument("--here", action="store_true", help="do not install, run in this environment")
    options = command.parse_args(arguments)
    report, table = (
        {"machine": describe_machine(), "loaders": {}},
        [["loader", "changed", "promised", "exact", *COUNTED]],
    )
    for loader in options.loaders or LOADERS:
        if options.here:
            report["loaders"][loader] = measure(loader, options.histories)
        else:
            own = [make_environment(loader, options.cache), "-m", "benchmarks.resume", loader, "--here"]
            file = options.cache / f"{loader}.json"
            own += ["--histories", str(options.histories), "--json", str(file)]
            file.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(own, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
            report["loaders"][loader] = json.loads(file.read_text())["loaders"][loader]
        table += [row(loader, *one) for one in report["loaders"][loader]["scenarios"].items()]
    print(format_table(table))
    write_json(options.json, report)


if __name__ == "__main__":
    main()
