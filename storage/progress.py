"""Progress lines that the collect and detect stages print."""

from collections import Counter
from collections.abc import Mapping


def progress_line(
    name: str, done: int, total: int, unit: str, counts: Mapping[str, int], seconds: float, left: float | None = None
) -> str:
    """Format a progress line: work done, counts (such as rows by status), rate, `seconds` elapsed and time left.

    `left` is the time left in seconds; by default, it follows from the rate.
    """
    breakdown = ", ".join(f"{count:,} {label}" for label, count in Counter(dict(sorted(counts.items()))).most_common())
    rate = done / seconds if seconds > 0 else 0.0
    if left is None and rate:
        left = (total - done) / rate
    rest = "" if left is None else f", {clock(left)} left"
    return f"{name}: {done:,} of {total:,} {unit}: {breakdown}; {rate:,.1f} {unit}/s, {clock(seconds)} elapsed{rest}"


def clock(seconds: float) -> str:
    """Format a duration as 0:07, 12:34 or 1:02:03."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
