"""Dialogue: what any chat-like API asks, in one form; and what answering it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samovar.core.request import Request
from samovar.core.structured import StructuredOutputsParams
from samovar.core.tools import ToolChoice, ToolDefinition
from samovar.text.answer import AnswerPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Messages in OpenAI's chat form (role, content, reasoning, tool_calls, tool_call_id), and how to go on.

    `reasoning_effort`: None (the template's own default), "none", "minimal", "low", "medium", "high", "xhigh" or "max".
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[ToolDefinition] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    structured: StructuredOutputsParams | None = None
    reasoning_effort: str | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDialogue:
    """The request for the engine, and how its answers are read."""

    request: Request
    plan: AnswerPlan
    num_truncated: int = 0
