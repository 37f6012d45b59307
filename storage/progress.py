"""The one form of the lines that tell how far a stage is: collecting and detecting, as programs and as flows."""

from collections import Counter
from collections.abc import Mapping


def progress_line(name: str, done: int, total: int, unit: str, counts: Mapping[str, int], seconds: float) -> str:
    """How much of a dataset is done, what it came to, how fast, and how long the rest takes at this rate.

    counts: by what is counted, such as a status; told from the largest. seconds: since the first of `total` was begun.
    """
    what = ", ".join(f"{count:,} {one}" for one, count in Counter(counts).most_common())
    rate = done / seconds if seconds > 0 else 0.0
    left = f", {clock((total - done) / rate)} left" if rate else ""
    return f"{name}: {done:,} of {total:,} {unit}: {what}; {rate:,.1f} {unit}/s, {clock(seconds)} gone{left}"


def clock(seconds: float) -> str:
    """0:07, 12:34 or 1:02:03."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
