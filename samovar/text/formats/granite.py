"""Granite 3: a list of JSON objects after a tag; and the phrases around its thoughts. Granite 4 writes hermes."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ReasoningFormat, ToolFormat
from samovar.text.formats.json_reader import JsonCalls, any_call
from samovar.text.lark import Lark


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """One list."""
    calls = lark.many(any_call(lark, tools), least=1, most=None if parallel else 1, separator=lark.text(", "))
    return lark.seq(lark.text("<|tool_call|>["), calls, lark.text("]"))


FORMAT = ToolFormat(
    name="granite",
    opens=("<|tool_call|>", "<tool_call>"),
    closes=("</tool_call>",),
    template_marks=(("<|tool_call|>", "<|start_of_role|>"),),
    read=JsonCalls,
    grammar=grammar,
)
REASONING = ReasoningFormat(
    name="granite",
    opens=("Here is my thought process:", "Here's my thought process:"),
    closes=("Here is my response:", "Here's my response:"),
    template_marks=(("Here is my thought process",), ("Here's my thought process",)),
)
