"""FunctionGemma: the syntax of Gemma 4's calls, with other marks and quotes."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.call_literal import CallLiteralReader
from samovar.text.formats.call_literal_grammar import CallLiteralGrammar
from samovar.text.lark import Lark

QUOTE = "<escape>"


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """Calls as the template prints them, each in marks of its own."""
    calls = CallLiteralGrammar(lark, QUOTE)
    call = lark.any_of(*(calls.call(tool) for tool in tools))
    region = lark.seq(lark.text("<start_function_call>"), call, lark.text("<end_function_call>"))
    return lark.many(region, least=1, most=None if parallel else 1)


FORMAT = ToolFormat(
    name="functiongemma",
    opens=("<start_function_call>",),
    closes=("<end_function_call>",),
    template_marks=(("<start_function_call>call:", "<end_function_call>", QUOTE),),
    read=lambda tools: CallLiteralReader(QUOTE, tools),
    grammar=grammar,
    inner=(QUOTE,),
)
