"""Confidence intervals of means and of differences, over training seeds and test examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

_COVERAGE, _POWER = 0.95, 0.8
LEVEL = 1 - _COVERAGE  # probability of calling any pair of equal models different


@dataclass(frozen=True)
class Interval:
    """A mean or a difference of means, its 95 % confidence interval, and the p-value of the hypothesis that it is 0."""

    mean: float
    low: float
    high: float
    p: float
    error: float  # standard error
    freedom: float  # degrees of freedom of Student's t


def interval(scores: np.ndarray, minus: np.ndarray | None = None) -> Interval | None:
    """Return the mean of scores [seeds, examples] with its interval, or None if there are fewer than two seeds.

    With `minus`, return the difference of the two means. Both have the same examples, but independent seeds. Variances
    over the seeds of each and over the examples add up, and so do the degrees of freedom (Welch 1947).
    """
    groups = [scores] if minus is None else [scores, minus]
    if min(len(group) for group in groups) < 2:
        return None
    over_examples = scores.mean(0) - (0 if minus is None else minus.mean(0))
    means = [group.mean(1) for group in groups] + [over_examples] * (len(over_examples) > 1)
    parts = [(values.var(ddof=1) / len(values), len(values) - 1) for values in means]
    variance, mean = sum(part for part, _ in parts), float(over_examples.mean())
    error = math.sqrt(variance)
    freedom = variance**2 / sum(part**2 / n for part, n in parts) if variance else math.inf
    half = t.ppf((1 + _COVERAGE) / 2, freedom) * error
    p = 2 * t.sf(abs(mean) / error, freedom) if error else float(mean == 0)
    return Interval(mean, float(mean - half), float(mean + half), float(p), error, float(freedom))


def correct(p: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, corrected for their number (Holm 1979)."""
    order = np.argsort(p)
    corrected = np.empty(len(p))
    corrected[order] = np.maximum.accumulate(np.asarray(p)[order] * np.arange(len(p), 0, -1)).clip(max=1)
    return corrected.tolist()


def detectable(error: float, freedom: float, tests: int) -> float:
    """Return the difference that one of `tests` tests finds with a probability of 0.8, given its standard error."""
    return float(error * (t.ppf(1 - LEVEL / 2 / tests, freedom) + t.ppf(_POWER, freedom)))
