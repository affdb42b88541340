"""Seed-OSS: tags as Qwen3-Coder has them, around them tags of its own; values are not on lines of their own."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.tagged_grammar import Layout, tagged_grammar
from samovar.text.formats.tagged_reader import TaggedReader, Tags
from samovar.text.lark import Lark

TAGS = Tags(call="<function=", call_end="</function>", key="<parameter=", value_end="</parameter>")
LAYOUT = Layout(
    opening="<seed:tool_call>\n",
    closing="</seed:tool_call>",
    separator="\n",
    call=lambda name: f"<function={name}>\n",
    call_end="</function>\n",
    key=lambda key, _: f"<parameter={key}>",
)


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """Calls as the template prints them."""
    return tagged_grammar(lark, tools, parallel, TAGS, LAYOUT)


FORMAT = ToolFormat(
    name="seed_oss",
    opens=("<seed:tool_call>",),
    closes=("</seed:tool_call>",),
    template_marks=(("<seed:tool_call>", "<function=", "<parameter="),),
    read=lambda tools: TaggedReader(TAGS, tools),
    grammar=grammar,
)
