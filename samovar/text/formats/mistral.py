"""Mistral: `[TOOL_CALLS]name[ARGS]{...}` repeated, or a list of JSON objects (before version 11); and its thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ReasoningFormat, ToolFormat
from samovar.text.formats.json_reader import any_call
from samovar.text.formats.mistral_reader import ARGUMENTS, CALL_ID, OPEN, MistralCalls
from samovar.text.lark import Lark


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """Names and arguments, with the mark before each call."""
    one = lark.any_of(*(lark.rule(tool.name, _call(lark, tool)) for tool in tools))
    return lark.many(one, least=1, most=None if parallel else 1)


def _call(lark: Lark, tool: ToolDefinition) -> str:
    return lark.seq(lark.text(f"{OPEN}{tool.name}{ARGUMENTS}"), lark.json(tool.parameters or None))


def list_grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """One list, after one mark."""
    calls = lark.many(any_call(lark, tools), least=1, most=None if parallel else 1, separator=lark.text(", "))
    return lark.seq(lark.text(f"{OPEN}["), calls, lark.text("]"))


MISTRAL = ToolFormat(
    name="mistral",
    opens=(OPEN,),
    closes=(),
    template_marks=((OPEN, ARGUMENTS),),
    read=MistralCalls,
    grammar=grammar,
    inner=(CALL_ID, ARGUMENTS),
)
LIST = ToolFormat(
    name="mistral-list", opens=(OPEN,), closes=(), template_marks=((OPEN,),), read=MistralCalls, grammar=list_grammar
)
REASONING = ReasoningFormat(
    name="mistral", opens=("[THINK]",), closes=("[/THINK]",), template_marks=(("[THINK]", "[/THINK]"),)
)
