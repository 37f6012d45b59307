"""Intervals of means over seeds and examples: a paired bootstrap over the examples, Student's t over the seeds."""

import math
from dataclasses import dataclass

import numpy as np

REPLICATES = 5_000
_COVERED = 0.95
_SEED = 20_190_822  # of all resampling: the same scores give the same intervals
_AT_ONCE = 2**23  # numbers of examples drawn in one go


@dataclass(frozen=True)
class Interval:
    """A mean, and between what its 95 % interval lies."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def interval(scores: np.ndarray) -> Interval:
    """The mean of scores [seeds, examples], and its 95 % interval.

    Of a difference of two models, give the difference of their scores: so both are resampled alike. Each side's width
    is the root of the sum of two squares: of the width over resampled examples, and of that over the seeds by Student's
    t. Seeds are too few to be resampled: the percentiles over three of them are those of a normal distribution at best,
    and too narrow by the factor 2.2. With one seed, the interval is over the examples alone.
    """
    mean, over_seeds = float(scores.mean()), _width_over_seeds(scores.mean(1))
    low, high = np.quantile(_resampled(scores.mean(0)), [(1 - _COVERED) / 2, (1 + _COVERED) / 2])
    return Interval(mean, mean - math.hypot(mean - low, over_seeds), mean + math.hypot(high - mean, over_seeds))


def _resampled(scores: np.ndarray) -> np.ndarray:
    """The means of resamples of scores [n], [REPLICATES].

    Each has n - 1 of them (Rao and Wu 1988): with n, the spread is too small by the root of (n - 1) / n.
    """
    rng, n = np.random.default_rng(_SEED), len(scores)
    size, draws = max(1, _AT_ONCE // n), max(1, n - 1)
    parts = [min(size, REPLICATES - start) for start in range(0, REPLICATES, size)]
    return np.concatenate([scores[rng.integers(0, n, (part, draws))].mean(1) for part in parts])


def _width_over_seeds(means: np.ndarray) -> float:
    """Of the 95 % interval of the mean of these, on each side; 0 where there is one."""
    if len(means) == 1:
        return 0.0
    return t_quantile(len(means) - 1) * float(means.std(ddof=1)) / math.sqrt(len(means))


def t_quantile(freedom: int) -> float:
    """What Student's t with these degrees of freedom is within, to both sides, in 95 of 100 cases."""
    # With t = sqrt(freedom) tan(angle), the density of the angle is cos(angle) ** (freedom - 1).
    angles = np.linspace(0, min(math.pi / 2, 60 / math.sqrt(freedom)), 20_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(_COVERED * mass[-1], mass, angles))
