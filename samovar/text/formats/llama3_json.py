"""Llama 3: a bare JSON object, perhaps after `<|python_tag|>`, with `;` before the next one."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.json_reader import JsonCalls, any_call
from samovar.text.lark import Lark

TAG = "<|python_tag|>"


def grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool) -> str:
    """Objects without the tag: the models are taught to write them so."""
    one = any_call(lark, tools, arguments="parameters")
    return lark.many(one, least=1, most=None if parallel else 1, separator=lark.text("; "))


FORMAT = ToolFormat(
    name="llama3_json",
    opens=(TAG, "{"),
    closes=(),
    template_marks=(("<|start_header_id|>", '{"name": function name, "parameters": '),),
    read=lambda tools: JsonCalls(tools, known_keys=True, prefix=TAG),
    grammar=grammar,
    only_at_start=True,
)
