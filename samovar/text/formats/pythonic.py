"""Calls written as Python: bare, between marks (Llama 4, LFM 2), or one a line (OLMo 3)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from samovar.core.tools import ToolDefinition
from samovar.errors import ValidationError
from samovar.text.formats.base import ToolFormat
from samovar.text.formats.python_reader import PythonCalls
from samovar.text.lark import Lark

_argument_name = re.compile(r"[^\W\d][\w.-]*")


def calls(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool, separator: str = ", ") -> str:
    """The grammar of calls: keyword arguments in the order of the schema, each value as JSON."""
    one = lark.any_of(*(lark.rule(tool.name, _call(lark, tool)) for tool in tools))
    return lark.many(one, least=1, most=None if parallel else 1, separator=lark.text(separator))


def _call(lark: Lark, tool: ToolDefinition) -> str:
    """Every required argument, then any of the others: nothing else can be put between commas."""
    known = tool.parameters.get("properties") or {}
    bad = next((name for name in known if _argument_name.fullmatch(name) is None), None)
    if bad is not None:
        message = (
            f"tool {tool.name}: this model writes calls as Python, where {bad!r} cannot name an argument; rename it"
        )
        raise ValidationError(message, parameter="tools", value=bad)
    required = [name for name in known if name in (tool.parameters.get("required") or ())]
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}

    def argument(name: str) -> str:
        schema = known[name]
        if isinstance(schema, dict) and definitions:
            schema = {**definitions, **schema}
        return lark.seq(lark.text(f"{name}="), lark.json(schema))

    comma = lark.text(", ")
    parts: list[str] = []
    for name in required:
        parts += ([comma] if parts else []) + [argument(name)]
    optional = [name for name in known if name not in required]
    if required:
        parts += [lark.optional(lark.seq(comma, argument(name))) for name in optional]
    elif optional:
        tails = [
            lark.seq(argument(name), *(lark.optional(lark.seq(comma, argument(o))) for o in optional[at + 1 :]))
            for at, name in enumerate(optional)
        ]
        parts.append(lark.optional(lark.any_of(*tails)))
    return lark.seq(lark.text(f"{tool.name}("), *parts, lark.text(")"))


def _format(
    name: str, before: str, after: str, marks: tuple[tuple[str, ...], ...], separator: str = ", "
) -> ToolFormat:
    return ToolFormat(
        name=name,
        opens=(before.rstrip("[\n"),),
        closes=(after.lstrip("]\n"),),
        template_marks=marks,
        read=PythonCalls,
        grammar=lambda lark, tools, parallel: lark.seq(
            lark.text(before), calls(lark, tools, parallel, separator), lark.text(after)
        ),
    )


PYTHONIC = ToolFormat(
    name="pythonic",
    opens=("[",),
    closes=(),
    template_marks=(),
    read=PythonCalls,
    grammar=lambda lark, tools, parallel: lark.seq(lark.text("["), calls(lark, tools, parallel), lark.text("]")),
    only_at_start=True,
)
LLAMA4 = ToolFormat(
    name="llama4_pythonic",
    opens=("<|python_start|>", "["),
    closes=("<|python_end|>",),
    template_marks=(("<|header_start|>", "func_name1("),),
    read=lambda tools: PythonCalls(tools, prefix="<|python_start|>"),
    grammar=PYTHONIC.grammar,
    only_at_start=True,
)
LFM2 = _format(
    "lfm2",
    "<|tool_call_start|>[",
    "]<|tool_call_end|>",
    (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
)
OLMO3 = _format(
    "olmo3", "<function_calls>\n", "\n</function_calls>", (("<function_calls>", "</function_calls>"),), separator="\n"
)
