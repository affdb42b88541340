"""Kimi K2: a section of calls, each with an id that holds its name: `functions.NAME:0`."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat, Tools
from samovar.text.formats.headed_reader import HeadedCalls
from samovar.text.lark import Lark

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiCalls(HeadedCalls):
    """Reads one section. The id of a call is the text's own, which the model expects to see again."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools, begin=BEGIN, separator=ARGUMENTS, tail=(END,))

    def _read_head(self, head: str) -> bool:
        self._call_id = head.strip()
        name, colon, number = self._call_id.rpartition(":")
        self._name = (name if colon and number.isdecimal() else self._call_id).removeprefix("functions.")
        return True


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """One section."""
    one = lark.any_of(*(lark.rule(tool.name, _call(lark, tool)) for tool in tools))
    return lark.seq(lark.text(OPEN), lark.many(one, least=1, most=None if parallel else 1), lark.text(CLOSE))


def _call(lark: Lark, tool: ToolDefinition) -> str:
    head = lark.text(f"{BEGIN}functions.{tool.name}:")
    return lark.seq(
        head, lark.regex("[0-9]{1,6}"), lark.text(ARGUMENTS), lark.json(tool.parameters or None), lark.text(END)
    )


FORMAT = ToolFormat(
    name="kimi_k2",
    opens=(OPEN,),
    closes=(CLOSE,),
    template_marks=((OPEN, BEGIN, ARGUMENTS),),
    read=KimiCalls,
    grammar=grammar,
    inner=(BEGIN, ARGUMENTS, END),
)
