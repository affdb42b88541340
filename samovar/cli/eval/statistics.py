"""What can be said of a few hundred measurements: intervals, and whether two models differ. Always the same answer.

Rows of one window of text depend on each other, so whole windows are drawn again (the bootstrap of Efron, 1979). Shares
get Wilson's interval (1927), which stays inside 0..1; two models that were asked the same questions are compared by
McNemar's test (1947) in its exact form: of the questions that only one of them got right, how many had each?
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
Z = 1.959964
"""Standard deviations either side of the mean that hold `CONFIDENCE` of a normal distribution."""
RESAMPLES = 4000

Interval = tuple[float, float]


def mean_interval(values: NDArray[np.float64]) -> Interval:
    """Interval of the mean of values [windows, rows]; NaN for fewer than two windows."""
    windows = values.mean(axis=1)
    if len(windows) < 2:
        return math.nan, math.nan
    picks = np.random.default_rng(0).integers(0, len(windows), (RESAMPLES, len(windows)))
    low, high = np.quantile(windows[picks].mean(axis=1), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def wilson(hits: int, total: int) -> Interval:
    """Interval of a share; 0..1 of nothing."""
    if total == 0:
        return 0.0, 1.0
    share, spare = hits / total, Z * Z / total
    middle = (share + spare / 2) / (1 + spare)
    reach = Z * math.sqrt(share * (1 - share) / total + spare / (4 * total)) / (1 + spare)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> tuple[int, int, float]:
    """(only the first was right, only the second was right, chance of a difference as large between equal models)."""
    pairs = list(zip(first, second, strict=True))
    only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
    total = only_first + only_second
    tail = sum(math.comb(total, k) for k in range(min(only_first, only_second) + 1)) / 2**total
    return only_first, only_second, min(1.0, 2 * tail)
