"""Why an answer ended, once for all APIs; each says it in its own words."""

from __future__ import annotations

from typing import Literal, TypeAlias

from samovar.core.sequence import FinishReason

Ending: TypeAlias = Literal["stop", "stop_sequence", "calls", "length", "abort"]
"""The model ended by itself, by a stop string or stop token of the request, with calls to be made, cut by a limit, or
ended by somebody else."""

OPENAI: dict[Ending, str] = {
    "stop": "stop", "stop_sequence": "stop", "calls": "tool_calls", "length": "length", "abort": "abort",
}  # fmt: skip
"""As chat completions spell it."""


def ending_of(reason: FinishReason, stop_reason: int | str | None, *, made_calls: bool) -> Ending:
    """The ending of one choice. An answer that was cut is cut, whatever it holds; one that made a call ended with it."""
    if reason is FinishReason.LENGTH:
        return "length"
    if reason is not FinishReason.STOP:
        return "abort"
    if made_calls:
        return "calls"
    return "stop_sequence" if stop_reason is not None else "stop"
