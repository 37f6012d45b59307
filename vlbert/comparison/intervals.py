"""Confidence intervals of means: a paired bootstrap over the examples, and Student's t over the seeds."""

import math
from dataclasses import dataclass

import numpy as np

REPLICATES = 5_000
_COVERAGE = 0.95
_SEED = 20_190_822  # of all resampling, so that the same scores give the same intervals
_CHUNK = 2**23  # examples drawn at once


@dataclass(frozen=True)
class Interval:
    """A mean and the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def interval(scores: np.ndarray) -> Interval:
    """Return the mean of scores [seeds, examples] with its 95 % confidence interval.

    To compare two models, pass the difference of their scores, so that the same examples are resampled for both. The
    interval combines the variation over examples (bootstrap, width b) and over seeds (Student's t, width t): on each
    side of the mean, its width is sqrt(b² + t²). With one seed, t is 0.
    """
    mean, over_seeds = float(scores.mean()), _width_over_seeds(scores.mean(1))
    low, high = np.quantile(_resample_means(scores.mean(0)), [(1 - _COVERAGE) / 2, (1 + _COVERAGE) / 2])
    return Interval(mean, mean - math.hypot(mean - low, over_seeds), mean + math.hypot(high - mean, over_seeds))


def _resample_means(scores: np.ndarray) -> np.ndarray:
    """Return the means [REPLICATES] of bootstrap resamples of scores [examples].

    Each resample draws n - 1 of the n scores with replacement (Rao and Wu 1988). With n draws, the spread would be too
    small by a factor of sqrt((n - 1) / n).
    """
    rng, n = np.random.default_rng(_SEED), len(scores)
    size, draws = max(1, _CHUNK // n), max(1, n - 1)
    parts = [min(size, REPLICATES - start) for start in range(0, REPLICATES, size)]
    return np.concatenate([scores[rng.integers(0, n, (part, draws))].mean(1) for part in parts])


def _width_over_seeds(means: np.ndarray) -> float:
    """Return the half-width of the 95 % interval for the mean of `means` [seeds]; 0 for one seed."""
    if len(means) == 1:
        return 0.0
    # Not a bootstrap: percentiles over three seeds are at best normal ones, too narrow by a factor of 2.2.
    return t_quantile(len(means) - 1) * float(means.std(ddof=1)) / math.sqrt(len(means))


def t_quantile(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t with `freedom` degrees of freedom."""
    # With t = sqrt(freedom) tan(angle), the density of the angle is cos(angle) ** (freedom - 1).
    angles = np.linspace(0, min(math.pi / 2, 60 / math.sqrt(freedom)), 20_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(_COVERAGE * mass[-1], mass, angles))
