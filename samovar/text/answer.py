"""AnswerPlan: how the text of one answer is told apart into reasoning, content and tool calls. AnswerLog: what came."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from samovar.core.events import GenerationEvent
from samovar.core.sequence import FinishReason
from samovar.core.tools import ToolCallDelta, ToolDefinition
from samovar.text.formats.base import ReasoningFormat, ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """Made with the prompt, once a request; without formats everything is content.

    `begins_in_reasoning` comes from the rendered prompt's own end. `parallel` false keeps the first call only.
    """

    reasoning: ReasoningFormat | None = None
    begins_in_reasoning: bool = False
    tools: ToolFormat | None = None
    definitions: Mapping[str, ToolDefinition] = field(default_factory=dict)
    parallel: bool = True


PLAIN = AnswerPlan()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an answer. `arguments` is the text of a JSON object, or the beginning of one if it was cut off."""

    call_id: str
    name: str
    arguments: str

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are a whole JSON object."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except ValueError:
            return False


class AnswerLog:
    """Adds the events of one choice up to its answer. Takes any number of events; reading it costs a join."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self.token_ids: list[int] = []
        self.num_reasoning_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, event: GenerationEvent) -> None:
        """Take in one event."""
        if event.text:
            self._text.append(event.text)
        if event.reasoning:
            self._reasoning.append(event.reasoning)
        for delta in event.tool_calls:
            self._add_call(delta)
        self.token_ids += event.token_ids
        self.num_reasoning_tokens += event.num_reasoning_tokens
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason

    def _add_call(self, delta: ToolCallDelta) -> None:
        if delta.index == len(self._calls):
            assert delta.call_id is not None and delta.name is not None, delta
            self._calls.append((delta.call_id, delta.name, []))
        self._calls[delta.index][2].append(delta.arguments)

    @property
    def text(self) -> str:
        """The content so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far, in their order."""
        return [ToolCall(call_id, name, "".join(arguments)) for call_id, name, arguments in self._calls]

    @property
    def made_calls(self) -> bool:
        """Whether the model itself ended its answer and at least one call is complete: what APIs call `tool_calls`."""
        return self.finish_reason is FinishReason.STOP and any(call.is_complete for call in self.calls)
