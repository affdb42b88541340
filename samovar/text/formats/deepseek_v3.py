"""DeepSeek V3 and R1: calls with a type and fenced JSON; V3.1: calls with neither."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat, Tools
from samovar.text.formats.headed_reader import HeadedCalls
from samovar.text.lark import Lark

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


class DeepseekCalls(HeadedCalls):
    """Reads both forms: `function`, the separator, the name, and JSON in a fence; or the name, the separator, and JSON."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools, begin=BEGIN, separator=SEPARATOR, tail=(END,))

    def _start_object(self) -> None:
        super()._start_object()
        self._separator, self._tail = SEPARATOR, (END,)

    def _read_head(self, head: str) -> bool:
        if self._separator == SEPARATOR and head.strip() == "function" and "function" not in self._tools:
            self._separator, self._tail = f"{FENCE}json", (FENCE, END)
            return False
        self._name = head.strip()
        return True


def _format(name: str, before: str, between: str, after: str, marks: tuple[str, ...]) -> ToolFormat:
    def call(lark: Lark, tool: ToolDefinition) -> str:
        opening, ending = f"{BEGIN}{before}{tool.name}{between}", f"{after}{END}"
        return lark.seq(lark.text(opening), lark.json(tool.parameters or None), lark.text(ending))

    def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
        one = lark.any_of(*(lark.rule(tool.name, call(lark, tool)) for tool in tools))
        separator = lark.text("\n") if before else None
        calls = lark.many(one, least=1, most=None if parallel else 1, separator=separator)
        return lark.seq(lark.text(OPEN), calls, lark.text(CLOSE))

    return ToolFormat(
        name=name,
        opens=(OPEN,),
        closes=(CLOSE,),
        template_marks=(marks,),
        read=DeepseekCalls,
        grammar=grammar,
        inner=(BEGIN, SEPARATOR, END),
    )


V3 = _format("deepseek_v3", f"function{SEPARATOR}", f"\n{FENCE}json\n", f"\n{FENCE}", (OPEN, SEPARATOR, FENCE))
V31 = _format("deepseek_v31", "", SEPARATOR, "", (OPEN, SEPARATOR))
