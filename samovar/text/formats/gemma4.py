"""Gemma 4: calls in a syntax of their own, with tokens for quotes; thinking in a channel called "thought"."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ReasoningFormat, ToolFormat
from samovar.text.formats.call_literal import CallLiteralReader
from samovar.text.formats.call_literal_grammar import CallLiteralGrammar
from samovar.text.lark import Lark

QUOTE = '<|"|>'


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """Calls as the template prints them, each in marks of its own."""
    calls = CallLiteralGrammar(lark, QUOTE)
    call = lark.any_of(*(calls.call(tool) for tool in tools))
    region = lark.seq(lark.text("<|tool_call>"), call, lark.text("<tool_call|>"))
    return lark.many(region, least=1, most=None if parallel else 1)


FORMAT = ToolFormat(
    name="gemma4",
    opens=("<|tool_call>",),
    closes=("<tool_call|>",),
    template_marks=(("<|tool_call>call:", "<tool_call|>", QUOTE),),
    read=lambda tools: CallLiteralReader(QUOTE, tools),
    grammar=grammar,
    inner=(QUOTE,),
)

REASONING = ReasoningFormat(
    name="gemma4",
    opens=("<|channel>",),
    closes=("<channel|>",),
    template_marks=(("<|channel>thought\\n", "<channel|>"),),
    heading="thought\n",
    ends_at_tools=True,
)
