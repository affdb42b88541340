"""Lists of JSON objects between tags: Jamba, Hunyuan, Apriel, Nemotron Nano 2, InternLM 2; MiniMax M1 leaves the list out."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.json_reader import JsonCalls, any_call
from samovar.text.lark import Lark


def _format(
    name: str,
    around: tuple[str, str],
    marks: tuple[tuple[str, ...], ...],
    *,
    inside: tuple[str, str, str] = ("[", ", ", "]"),
    arguments: str = "arguments",
) -> ToolFormat:
    """`inside`: what is written before, between and after the calls."""
    before, between, after = inside

    def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
        one = any_call(lark, tools, arguments=arguments)
        most = None if parallel and between else 1
        calls = lark.many(one, least=1, most=most, separator=lark.text(between) if between else None)
        return lark.seq(lark.text(around[0] + before), calls, lark.text(after + around[1]))

    return ToolFormat(
        name=name, opens=(around[0],), closes=(around[1],), template_marks=marks, read=JsonCalls, grammar=grammar
    )


TAGS = ("<tool_calls>", "</tool_calls>")
JAMBA = _format("jamba", TAGS, (("<tool_calls>[", "</tool_calls>"),))
MINIMAX = _format("minimax", TAGS, (("<tool_calls>\\n{",), ("<tool_calls>\n{",)), inside=("\n", "\n", "\n"))
NEMOTRON = _format("nemotron", ("<TOOLCALL>", "</TOOLCALL>"), (("<TOOLCALL>[", "</TOOLCALL>"),))
INTERNLM = _format(
    "internlm",
    ("<|action_start|><|plugin|>", "<|action_end|>"),
    (("<|action_start|>", "<|plugin|>"),),
    inside=("\n", "", ""),
    arguments="parameters",
)
