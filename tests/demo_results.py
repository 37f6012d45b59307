"""Results of a run of the demo, without running it."""

from collections.abc import Mapping, Sequence

from demo.labels import TASKS, WITH, WITHOUT, label_curves, parse_column
from demo.results import Column, Results

GOOD = {"refcoco": (0.5, 0.3), "vqa": (0.6, 0.5)}


def results(
    scores: Mapping[str, tuple[float, float]] = GOOD,
    leads: Mapping[str, float] | None = None,
    gap: float = 0.3,
    least_gap: float = 0.2,
    seeds: Sequence[int] = (0,),
) -> Results:
    """scores: with and without pre-training by task or by column; leads: their lower ends over the blind."""
    columns = []
    for column in label_curves().tasks:
        task, labels = parse_column(column)
        means = dict(zip((WITH, WITHOUT), scores.get(column, scores.get(task, GOOD[task])), strict=True))
        width = 0.02 if len(seeds) > 1 else None  # of half an interval

        def ends(mean: float, width: float | None = width) -> dict[str, float | None]:
            return {"mean": mean, "low": mean - width if width else None, "high": mean + width if width else None}

        found, pair = {start: ends(mean) for start, mean in means.items()}, ends(means[WITH] - means[WITHOUT])
        baselines = {"another image": 0.35, "blind": 0.32, "chance": 0.13} if task == "vqa" else {"chance": 0.24}
        lead = (leads or {}).get(task, 0.2)
        columns.append(Column(task, labels, TASKS[task].title, 500, found, pair, baselines, lead))
    return Results(columns, seeds, gap, least_gap)
