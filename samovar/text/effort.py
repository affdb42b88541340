"""Reasoning effort -> the variables by which a chat template steers how much a model thinks.

Clients send an effort with every request, whatever the model: one that a template cannot honour is not an error. A
template gets it under the names it reads: a switch (on, or off for "none") and a level. A level that the template does
not speak of, beyond the low, medium and high that all know, gives way to the nearest one, ties to the higher.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from samovar.core.once import Once
from samovar.errors import ValidationError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""From the least to the most."""
_USUAL = ("low", "medium", "high")
_SPELLINGS = {"none": ("none", "no_think")}
"""Other words by which templates mean a level."""
_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False), "thinking": (True, False), "thinking_mode": ("enabled", "disabled"),
    "thinking_option": ("on", "off"), "add_thoughts": (True, False),
}  # fmt: skip
"""Template variable -> its values for thinking and for not thinking."""
_LEVELS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_BUDGET = "thinking_budget"

_once = Once(logging.getLogger(__name__))


def check_effort(effort: str | None) -> None:
    """Raise `ValidationError` for a word that is no effort."""
    if effort is not None and effort not in EFFORTS:
        message = f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {str(effort)[:100]!r}"
        raise ValidationError(message, parameter="reasoning_effort", value=effort)


def effort_variables(
    effort: str | None, budget: int | None, reads: Collection[str], constants: Collection[str], *, thinks: bool = True
) -> list[dict[str, Any]]:
    """Sets of template variables, the best first; a template may refuse a level, and then the next set is tried.

    `reads` are the variables that the template reads, `constants` the texts it speaks of. A model that is not known to
    think (`thinks`) honours "none" without any.
    """
    base: dict[str, Any] = {}
    if budget is not None and budget >= 0 and _BUDGET in reads:
        base[_BUDGET] = budget
    if effort is None:
        return [base]
    for name, (on, off) in _SWITCHES.items():
        if name in reads:
            base[name] = off if effort == "none" else on
    levels = [name for name in _LEVELS if name in reads]
    if not levels:
        if not base and (thinks or effort != "none"):
            _once.warn(f"reasoning_effort {effort!r} changes nothing: the chat template reads no such setting")
        return [base]
    words = {level: word for level in EFFORTS for word in _SPELLINGS.get(level, (level,)) if word in constants}
    words |= {level: level for level in _USUAL if level not in words}
    at = EFFORTS.index(effort)
    nearest = sorted(words, key=lambda level: (abs(EFFORTS.index(level) - at), -EFFORTS.index(level)))
    return [base | dict.fromkeys(levels, words[level]) for level in nearest]
