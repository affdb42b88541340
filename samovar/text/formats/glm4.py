"""GLM 4.5 to 4.7, and Ling 3, Spark, Laguna: a name, then pairs of tags for keys and values, with or without breaks."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.tagged_grammar import BREAK, Layout, tagged_grammar
from samovar.text.formats.tagged_reader import TaggedReader, Tags
from samovar.text.lark import Lark

TAGS = Tags(call="", call_end="", key="<arg_key>", key_end="</arg_key>", value="<arg_value>", value_end="</arg_value>")
LAYOUT = Layout(
    opening="<tool_call>",
    closing="</tool_call>",
    separator="\n",
    call=lambda name: f"{name}{BREAK}",
    call_end="",
    key=lambda key, _: f"<arg_key>{key}</arg_key>{BREAK}<arg_value>",
    ending=BREAK,
)


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """Calls as the templates print them; the break between two tags may be left out."""
    return tagged_grammar(lark, tools, parallel, TAGS, LAYOUT)


FORMAT = ToolFormat(
    name="glm4",
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    template_marks=(("<tool_call>", "<arg_key>", "<arg_value>"),),
    read=lambda tools: TaggedReader(TAGS, tools),
    grammar=grammar,
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
