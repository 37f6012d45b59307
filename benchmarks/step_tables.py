"""Format the tables of benchmarks/train_step.py from its JSON report, which has more numbers."""

import statistics
from typing import Any

from benchmarks.measure import Table, format_table
from benchmarks.step_parts import PARTS

PLAIN = "plain fp32"


def parts_table(report: dict[str, Any], name: str) -> Table:
    """Return a table of the time and FLOPs of each part of a step, for the contender `name`."""
    step = 1000 * statistics.median(report["seconds a step"][name])
    best = report["matrix product"][name]
    table = [["part", "ms", "share", "GFLOP", "TFLOP/s", "of a matrix product"]]
    parts = report["parts"][name]
    for part in PARTS:
        milliseconds, flops = parts[part], report["flops"][part]
        if not milliseconds and not flops:
            continue
        rate = flops / milliseconds * 1000 if flops and milliseconds else None
        cells = [f"{flops / 1e9:,.1f}", f"{rate / 1e12:,.2f}", f"{rate / best:.0%}"] if rate else [""] * 3
        table.append([part, f"{milliseconds:,.1f}", f"{milliseconds / step:.1%}", *cells])
    explained, flops = sum(parts.values()), sum(report["flops"].values())
    rate = flops / step * 1000
    table.append(["all parts", f"{explained:,.1f}", f"{explained / step:.1%}", "", "", ""])
    table.append(["unexplained", f"{step - explained:,.1f}", f"{1 - explained / step:.1%}", "", "", ""])
    whole = [f"{flops / 1e9:,.1f}", f"{rate / 1e12:,.2f}", f"{rate / best:.0%}"]
    table.append(["the step, without marks", f"{step:,.1f}", "100.0%", *whole])
    return table


def contenders_table(report: dict[str, Any]) -> Table:
    """Return a table of the speed and memory of each contender."""
    recipe = report["recipe"]
    whole = recipe["steps"] * recipe["data"]["batch"] / 3600
    plain = report["seconds a step"].get(PLAIN)
    table = [["", "s/step", "pairs/s", "text/s", "hours of the recipe", "x plain", "GB kept for backward", "GB peak"]]
    for name, seconds in report["seconds a step"].items():
        step, memory = statistics.median(seconds), report["memory"][name]
        peak = memory["peak"]
        table.append(
            [
                name,
                f"{step:.3f}",
                f"{report['pairs'] / step:,.2f}",
                f"{report['texts'] / step:,.2f}",
                f"{whole * step / report['pairs']:,.0f}",
                f"{statistics.median(plain) / step:.2f}" if plain else "",
                f"{memory['kept for backward']:.2f}",
                "" if peak is None else f"{peak:.2f}",
            ]
        )
    return table


def other_lines(report: dict[str, Any]) -> list[str]:
    """Return the lines of text that follow the tables of a report."""
    rates = [f"{name} {rate / 1e12:,.2f}" for name, rate in report["matrix product"].items()]
    lines = [
        f"{sum(report['flops'].values()) / report['pairs'] / 1e12:.2f} TFLOP per pair, including its share of text; a "
        f"product of random matrices reaches {', '.join(rates)} TFLOP/s here",
    ]
    if report["compiled graphs"] is not None:
        lines.append(f"torch.compile made {report['compiled graphs']} graphs")
    if "with a loader" in report:
        loader = report["with a loader"]
        lines.append(
            f"with a loader of {loader['workers']} workers: {loader['pairs/s']:,.1f} pairs/s, data wait "
            f"{loader['data wait']:.1%}"
        )
    return [*lines, *report["notes"]]


def step_tables(report: dict[str, Any]) -> str:
    machine, recipe = report["machine"], report["recipe"]
    settings = [name for name in ("compile", "activation_checkpointing") if recipe[name]]
    lines = [
        f"{recipe['name']}: {report['pairs']} pairs and {report['texts']} text rows per step"
        + (f", with {' and '.join(settings)}" if settings else ""),
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"torch {machine['torch']}, {machine['date']}",
        "",
        format_table(contenders_table(report)),
    ]
    for name in report["parts"]:
        lines += ["", f"{name}:", "", format_table(parts_table(report, name))]
    return "\n".join([*lines, "", *other_lines(report)])


def check_table(report: dict[str, Any]) -> Table:
    table = [["relative error against plain fp32", "losses", "bound", "gradients", "bound", "", "worst gradient"]]
    for precision, errors in report["apart"].items():
        table.append(
            [
                precision,
                f"{errors['losses']:.1e}",
                f"{errors['losses at most']:g}",
                f"{errors['gradients']:.1e}",
                f"{errors['gradients at most']:g}",
                "within" if errors["within"] else "FAIL",
                errors["worst"],
            ]
        )
    return table


def losses_table(report: dict[str, Any]) -> Table:
    """Return a table of the mean losses over each tenth of the steps, in each precision."""
    curves = report["losses"]
    names = [name for name in next(iter(curves.values()))[0] if "accuracy" not in name]
    table = [["steps", *(f"{name}, {precision}" for name in names for precision in curves)]]
    steps = len(next(iter(curves.values())))
    tenth = max(1, steps // 10)
    for first in range(0, steps, tenth):
        cells = [
            f"{statistics.mean(step[name] for step in curve[first : first + tenth]):.3f}"
            for name in names
            for curve in curves.values()
        ]
        table.append([f"{first + 1} to {min(first + tenth, steps)}", *cells])
    return table
