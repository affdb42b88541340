"""Pacer: how often a stream says something, for every API alike."""

from __future__ import annotations

from collections.abc import Iterable

from samovar.core.events import GenerationEvent
from samovar.core.tools import ToolCallDelta


class Pacer:
    """Joins events that are not worth a chunk with later ones of the same choice.

    A chunk always says something or ends its choice; beyond the first, it has at least `interval` tokens. Tokens and
    logprobs that came without text wait for it, so that every token is reported exactly once. What was thought, said
    and called keeps its order: events whose parts would change places are not joined.
    """

    __slots__ = ("_begun", "_held", "_interval")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, GenerationEvent] = {}
        self._begun: set[int] = set()

    def take(self, choice: int, event: GenerationEvent) -> Iterable[GenerationEvent]:
        """The events to write now, the last with what was held of its choice."""
        held = self._held.pop(choice, None)
        ready: tuple[GenerationEvent, ...] = ()
        if held is not None:
            if _keeps_order(held, event):
                _append(held, event)
                event = held
            else:
                ready = (held,)
                self._begun.add(choice)
        if event.finish_reason is None:
            wanted = self._interval if choice in self._begun else 1
            says = event.text or event.reasoning or event.tool_calls
            if not says or (wanted > 1 and len(event.token_ids) < wanted):
                self._held[choice] = event
                return ready
        self._begun.add(choice)
        return (*ready, event)


def _keeps_order(held: GenerationEvent, later: GenerationEvent) -> bool:
    if held.tool_calls:
        return not (later.text or later.reasoning)
    return not (held.text and later.reasoning)


def _append(held: GenerationEvent, later: GenerationEvent) -> None:
    held.text += later.text
    held.reasoning += later.reasoning
    held.tool_calls = _joined(held.tool_calls, later.tool_calls)
    held.num_reasoning_tokens += later.num_reasoning_tokens
    held.token_ids = held.token_ids + later.token_ids
    if later.logprobs is not None:
        held.logprobs = (held.logprobs or []) + later.logprobs
    if later.prompt_logprobs is not None:
        held.prompt_logprobs = later.prompt_logprobs
    held.num_cached_tokens = max(held.num_cached_tokens, later.num_cached_tokens)
    held.finish_reason, held.stop_reason = later.finish_reason, later.stop_reason


def _joined(calls: list[ToolCallDelta], later: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Pieces of one call's arguments that follow each other become one."""
    found = list(calls)
    for delta in later:
        last = found[-1] if found else None
        if last is not None and last.index == delta.index and delta.name is None:
            found[-1] = ToolCallDelta(last.index, last.call_id, last.name, last.arguments + delta.arguments)
        else:
            found.append(delta)
    return found
