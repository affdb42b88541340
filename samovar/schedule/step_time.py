"""StepTimeModel: how long a step of a given size will take, learned from the steps before it.

seconds = a + b * tokens + c * pairs + d * decode pairs, where both kinds of pairs count (query, key) pairs of attention:
those of prompts share what is read of the keys, those of decoding sequences each read their own. The figures are a
least-squares fit with non-negative coefficients over the latest measurements. Steps with prefill and steps of decode
alone are kept in separate windows, so that an hour of decode does not push out what is known about prefill.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW = 32
"""Measurements kept of each of the two kinds."""

_TOKENS, _PAIRS, _DECODE_PAIRS = 256.0, 262144.0, 16384.0  # Scales that bring the columns to one size.
_RIDGE = 1e-9


class StepTimeModel:
    """Predicts seconds of a step; knows nothing until the first `observe`."""

    def __init__(self) -> None:
        self._prefills: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        self._decodes: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        self._coefficients: tuple[float, float, float, float] | None = None

    def observe(
        self, num_tokens: int, num_pairs: int, seconds: float, *, has_prefill: bool, decode_pairs: int = 0
    ) -> None:
        """Take the measured `seconds` of a step; `num_pairs` are those of prompts."""
        if seconds <= 0 or num_tokens <= 0:
            return
        window = self._prefills if has_prefill else self._decodes
        window.append((num_tokens / _TOKENS, num_pairs / _PAIRS, decode_pairs / _DECODE_PAIRS, seconds))
        self._coefficients = None

    @property
    def largest_step(self) -> int:
        """Tokens of the largest step in the windows: predictions far beyond it are guesses."""
        return round(max((s[0] for w in (self._prefills, self._decodes) for s in w), default=0.0) * _TOKENS)

    def predict(self, num_tokens: int, num_pairs: int, decode_pairs: int = 0) -> float:
        """Expected seconds; 0.0 while nothing was measured."""
        a, b, c, d = self._fitted()
        return a + b * num_tokens / _TOKENS + c * num_pairs / _PAIRS + d * decode_pairs / _DECODE_PAIRS

    def tokens_within(self, seconds: float, start: int) -> float:
        """Prompt tokens from position `start` that add at most `seconds` to a step; may be infinite, never negative."""
        _, b, c, _ = self._fitted()
        linear = b / _TOKENS + c / _PAIRS * (start + 0.5)
        square = c / _PAIRS / 2
        if seconds <= 0:
            return 0.0
        if square > 0:
            return (math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)
        return seconds / linear if linear > 0 else math.inf

    def _fitted(self) -> tuple[float, float, float, float]:
        if self._coefficients is None:
            self._coefficients = self._fit()
        return self._coefficients

    def _fit(self) -> tuple[float, float, float, float]:
        samples = [(1.0, *sample) for window in (self._prefills, self._decodes) for sample in window]
        columns = [0, 1, 2, 3]
        while samples and columns:
            gram = [[sum(s[i] * s[j] for s in samples) for j in columns] for i in columns]
            for k, row in enumerate(gram):
                row[k] += _RIDGE * (1 + row[k])
            solution = _solve(gram, [sum(s[i] * s[4] for s in samples) for i in columns])
            worst = min(range(len(columns)), key=solution.__getitem__)
            if solution[worst] >= 0:
                found = dict(zip(columns, solution, strict=True))
                return (found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0), found.get(3, 0.0))
            del columns[worst]
        return (0.0, 0.0, 0.0, 0.0)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a small positive definite system."""
    size = len(right)
    rows = [[*row, r] for row, r in zip(matrix, right, strict=True)]
    for k in range(size):
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    solution = [0.0] * size
    for k in reversed(range(size)):
        solution[k] = (rows[k][size] - sum(rows[k][j] * solution[j] for j in range(k + 1, size))) / rows[k][k]
    return solution
