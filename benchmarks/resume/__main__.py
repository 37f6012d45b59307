"""Check how exactly data loaders resume: this project's, and those of other libraries.

    python -m benchmarks.resume [LOADER ...] [--histories 2] [--json FILE]

hypothesis invents histories: steps on some ranks and workers, saves, kills, restores. Each is compared with a run that
nobody stopped. docs/reproducibility.md has a table, and what each library promises.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import describe_machine, format_table, make_parser, write_json
from benchmarks.resume.machine import CHANGES, run_histories

LOADERS = {  # module -> packages that it needs besides the project's
    "ours": (),
    "mosaicml": ("mosaicml-streaming==0.13.0",),
    "litdata": ("litdata==0.2.76",),
    "torchdata_webdataset": ("torchdata==0.11.0", "webdataset==1.0.2"),
    "torchdata_datasets": ("torchdata==0.11.0", "datasets==5.2.0"),
    "accelerate": ("accelerate==1.15.0",),
    "energon": ("megatron-energon==7.4.1",),
}


def make_environment(packages: Sequence[str], cache: Path) -> str:
    """Install packages, if there are any, into an environment of their own, and return its interpreter."""
    if not packages:
        return sys.executable
    folder = cache / "-".join(packages).replace("==", "-")
    if not folder.exists():
        venv.create(folder, with_pip=True)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")  # all other packages are found there
    subprocess.run([f"{folder}/bin/python", "-m", "pip", "install", "--quiet", *packages], check=True)
    return f"{folder}/bin/python"


def summarise(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up what was seen in some histories. All but the first two numbers are of histories without a refusal."""
    complete = [history for history in found if not history["refused"]]
    summary: dict[str, Any] = {"histories": len(found), "refused": len(found) - len(complete)}
    summary |= {name: sum(history[name] for history in complete) for name in ("exact", "lost", "repeated")}
    restores = [restore for history in complete for restore in history["starts"][1:]]
    for name in ("seconds", "reads", "bytes"):
        summary[name] = round(statistics.median(restore[name] for restore in restores), 2) if restores else None
    return summary | {"example": next((history for history in found if not history["exact"]), None)}


def measure(loader: str, count: int) -> None:
    """Run all histories of a loader in this process, and print what was seen as JSON."""
    adapter = importlib.import_module(f"benchmarks.resume.{loader}").Loader
    offered = [change for change in CHANGES if change != "withdrawn sample" or hasattr(adapter, "withdraw")]
    print(json.dumps({change: summarise(run_histories(adapter, [change], count)) for change in offered}))


def main(arguments: Sequence[str] | None = None) -> None:
    command = make_parser("resume", __doc__)
    command.add_argument("loaders", nargs="*", metavar="LOADER", help=f"{', '.join(LOADERS)}; none: all")
    command.add_argument("--histories", type=int, default=2, help="of each loader and change (%(default)s)")
    command.add_argument("--cache", type=Path, default=Path.home() / ".cache/resume", help="environments (%(default)s)")
    options, report = command.parse_args(arguments), {"machine": describe_machine(), "loaders": {}}
    if unknown := {*options.loaders} - {*LOADERS}:
        command.error(f"unknown loader {', '.join(unknown)}; choose from {', '.join(LOADERS)}")
    for loader in options.loaders or LOADERS:
        program = f"from benchmarks.resume.__main__ import measure; measure({loader!r}, {options.histories})"
        own = [make_environment(LOADERS[loader], options.cache), "-c", program]
        run = subprocess.run(own, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
        if run.returncode:
            sys.exit(run.stderr.decode())
        seen = json.loads(run.stdout.splitlines()[-1])
        report["loaders"][loader] = {"packages": LOADERS[loader], "seen": seen}
        rows = [[change, *(str(value) for value in [*one.values()][:-1])] for change, one in seen.items()]
        print(format_table([[loader, *[*seen["nothing"]][:-1]], *rows]), flush=True)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
