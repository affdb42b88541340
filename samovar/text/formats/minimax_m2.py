"""MiniMax M2: one region for all calls of an answer, an `invoke` element each."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.tagged_grammar import Layout, tagged_grammar
from samovar.text.formats.tagged_reader import TaggedReader, Tags
from samovar.text.lark import Lark

TAGS = Tags(call='<invoke name="', call_end="</invoke>", key='<parameter name="', value_end="</parameter>")
LAYOUT = Layout(
    opening="<minimax:tool_call>\n",
    closing="</minimax:tool_call>",
    separator=None,
    call=lambda name: f'<invoke name="{name}">\n',
    call_end="</invoke>\n",
    key=lambda key, _: f'<parameter name="{key}">',
)


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """Calls as the template prints them."""
    return tagged_grammar(lark, tools, parallel, TAGS, LAYOUT)


FORMAT = ToolFormat(
    name="minimax_m2",
    opens=("<minimax:tool_call>",),
    closes=("</minimax:tool_call>",),
    template_marks=(("<minimax:tool_call>", '<invoke name="', '<parameter name="'),),
    read=lambda tools: TaggedReader(TAGS, tools),
    grammar=grammar,
)
