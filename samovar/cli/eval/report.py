"""What the reports of evaluations share."""

from __future__ import annotations

import math
from typing import Any

from samovar.cli.eval.statistics import Interval


def interval(bounds: Interval, form: str = ".3f") -> str:
    """Two bounds, each in a format of numbers; "-" where there are none."""
    return "-" if math.isnan(bounds[0]) else f"{bounds[0]:{form}} .. {bounds[1]:{form}}"


def title(result: dict[str, Any]) -> str:
    """What was scored."""
    count, context = result["windows"], result["context"]
    return f"{count} windows of {context} tokens, the second half of each scored"


def plain(value: Any) -> Any:
    """The same for JSON, which has no NaN: null."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
