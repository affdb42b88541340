"""GenerationEvent: API-neutral news of one choice, as text. Every API turns these into its own wire format."""

from __future__ import annotations

from dataclasses import dataclass, field

from samovar.core.outputs import SequenceTiming
from samovar.core.sequence import FinishReason
from samovar.core.tools import ToolCallDelta


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One alternative at one position. `text` may hold U+FFFD for part of a character; `raw` never loses bytes."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token and its best alternatives at one position (alternatives in rank order)."""

    chosen: LogprobEntry
    top: list[LogprobEntry]


@dataclass(slots=True)
class GenerationEvent:
    """What happened to choice `index` since its last event.

    `text`, `reasoning`, `tool_calls` and `token_ids` are increments: what was said, what was thought before it, and news
    of the calls made after it. What comes in another order comes in several events. Text may lag behind tokens (half a
    character, or a tail that may become a stop string or a mark) and is complete when `finish_reason` is set. `error`
    explains `FinishReason.ERROR`.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    """How many of `token_ids` were thought."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    timing: SequenceTiming | None = None
