"""Harmony, of gpt-oss: reasoning, content and calls are messages on channels, told apart by one reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.argument_grammar import refuse
from samovar.text.formats.base import Failed, Piece, ReasoningFormat, ToolFormat, Tools, WholeAnswer
from samovar.text.formats.harmony_reader import CALL, CHANNEL, CONSTRAIN, END, MARKS, MESSAGE, START, HarmonyReader
from samovar.text.formats.tagged_reader import is_name
from samovar.text.lark import Lark

ANY_TEXT = "(?s:.*)"
FINAL = f"{CHANNEL}final{MESSAGE}"
"""The header of the answer proper. The prompt ends with the start of the first message, others begin with one."""


class NoRegion:
    """What is read by `whole` has no regions of its own: every payload fails."""

    def feed(self, text: str) -> Iterator[Piece]:
        """All of it is text."""
        yield Failed("", text)

    def close(self, *, is_complete: bool) -> Iterator[Piece]:
        """Nothing was read."""
        yield Failed()


def _header(lark: Lark, text: str) -> str:
    return lark.any_of(lark.text(f"{START}assistant{text}"), lark.text(text))


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """Calls in messages on the commentary channel."""
    calls = []
    for tool in tools:
        if not is_name(tool.name):
            refuse(f"the name {tool.name!r}", tool.name)
        header = _header(lark, f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}")
        call = lark.seq(header, lark.json(tool.parameters or None), lark.text(CALL))
        calls.append(lark.rule(f"call_{tool.name}", call))
    return lark.many(lark.any_of(*calls), least=1, most=None if parallel else 1)


def free(lark: Lark, calls: str) -> str:
    """Thoughts and remarks; then an answer, or calls."""
    text = lark.regex(ANY_TEXT)
    header = lark.any_of(*(_header(lark, f"{CHANNEL}{channel}{MESSAGE}") for channel in ("analysis", "commentary")))
    before = lark.rule("before", lark.seq(header, text, lark.text(END)))
    return lark.seq(lark.many(before), lark.any_of(calls, lark.seq(_header(lark, FINAL), text)))


def _whole(*, has_calls: bool) -> WholeAnswer:
    def read(tools: Tools, begins_in_reasoning: bool) -> HarmonyReader:
        return HarmonyReader(tools, begins_in_reasoning, has_calls=has_calls)

    return WholeAnswer(marks=MARKS, read=read, between=(f"{START}assistant{FINAL}", FINAL), free=free)


FORMAT = ToolFormat(
    name="harmony",
    opens=(f"{CHANNEL}commentary to=functions.",),
    closes=(CALL,),
    template_marks=((f"{CHANNEL}analysis{MESSAGE}", f"{START}assistant", CALL),),
    read=lambda tools: NoRegion(),
    grammar=grammar,
    whole=_whole(has_calls=True),
)

REASONING = ReasoningFormat(
    name="harmony",
    opens=(f"{CHANNEL}analysis{MESSAGE}",),
    closes=(END,),
    template_marks=((f"{CHANNEL}analysis{MESSAGE}", f"{START}assistant"),),
    whole=_whole(has_calls=False),
)
