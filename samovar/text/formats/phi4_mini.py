"""Phi 4 mini: `functools[...]`, or a list of JSON objects between marks."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.json_reader import JsonCalls, any_call
from samovar.text.lark import Lark


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """One list."""
    calls = lark.many(any_call(lark, tools), least=1, most=None if parallel else 1, separator=lark.text(", "))
    return lark.seq(lark.text("functools["), calls, lark.text("]"))


FORMAT = ToolFormat(
    name="phi4_mini",
    opens=("functools[", "<|tool_call|>["),
    closes=("<|/tool_call|>",),
    template_marks=(("<|tool|>", "<|/tool|>"), ("functools[",)),
    read=lambda tools: JsonCalls(tools, in_list=True),
    grammar=grammar,
)
