"""Qwen3-Coder, Qwen3.5, Nemotron 3 and Step 3.5: a tag a parameter, its value on lines of its own."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.tagged_grammar import Layout, tagged_grammar
from samovar.text.formats.tagged_reader import TaggedReader, Tags
from samovar.text.lark import Lark

TAGS = Tags(
    call="<function=", call_end="</function>", key="<parameter=", value_end="</parameter>", framed=True, bare_call=True
)
LAYOUT = Layout(
    opening="<tool_call>\n",
    closing="</tool_call>",
    separator="\n",
    call=lambda name: f"<function={name}>\n",
    call_end="</function>\n",
    key=lambda key, _: f"<parameter={key}>\n",
)


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """Calls as the template prints them."""
    return tagged_grammar(lark, tools, parallel, TAGS, LAYOUT)


FORMAT = ToolFormat(
    name="qwen3_coder",
    opens=("<tool_call>", "<function="),  # these models sometimes leave the first one out
    closes=("</tool_call>",),
    template_marks=(("<tool_call>\\n<function=", "<parameter=", "</tool_call>"),),
    read=lambda tools: TaggedReader(TAGS, tools),
    grammar=grammar,
)
