"""DeepSeek V3.2 and V4: DSML tags, whose parameters say themselves whether they are strings."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.tagged_grammar import Layout, tagged_grammar
from samovar.text.formats.tagged_reader import TaggedReader, Tags
from samovar.text.lark import Lark

DSML = "｜DSML｜"
TAGS = Tags(
    call=f'<{DSML}invoke name="',
    call_end=f"</{DSML}invoke>",
    key=f'<{DSML}parameter name="',
    value_end=f"</{DSML}parameter>",
)


def dsml_format(name: str, region: str) -> ToolFormat:
    """The format whose regions are called `region`."""
    opening, closing = f"<{DSML}{region}>", f"</{DSML}{region}>"
    layout = Layout(
        opening=opening + "\n",
        closing=closing,
        separator=None,
        call=lambda name: f'<{DSML}invoke name="{name}">\n',
        call_end=f"</{DSML}invoke>\n",
        key=lambda key, is_text: f'<{DSML}parameter name="{key}" string="{"true" if is_text else "false"}">',
    )

    def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
        return tagged_grammar(lark, tools, parallel, TAGS, layout)

    return ToolFormat(
        name=name,
        opens=(opening,),
        closes=(closing,),
        template_marks=((DSML, f"{region}>", 'string="true|false"'),),
        read=lambda tools: TaggedReader(TAGS, tools),
        grammar=grammar,
        inner=(DSML,),
    )


FORMAT = dsml_format("deepseek_v32", "function_calls")
