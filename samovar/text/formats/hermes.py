"""Hermes, Qwen 2.5 and 3, Granite 4 and others: one JSON object between tags. Longcat has other tags."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.json_reader import JsonCalls, any_call
from samovar.text.lark import Lark


def _format(name: str, tag: str, marks: tuple[tuple[str, ...], ...]) -> ToolFormat:
    opening, closing = f"<{tag}>", f"</{tag}>"

    def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
        one = lark.seq(any_call(lark, tools, before=f"{opening}\n"), lark.text(f"\n{closing}"))
        return lark.many(one, least=1, most=None if parallel else 1, separator=lark.text("\n"))

    return ToolFormat(
        name=name, opens=(opening,), closes=(closing,), template_marks=marks, read=JsonCalls, grammar=grammar
    )


HERMES = _format("hermes", "tool_call", (("<tool_call>", '"name"'), ("<tool_call>", '\\"name\\"')))
LONGCAT = _format("longcat", "longcat_tool_call", (("<longcat_tool_call>", "</longcat_tool_call>"),))
