"""Grammars of calls written in tags: what `tagged_reader` reads back as arguments that the tool's schema allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samovar.core.tools import ToolDefinition
from samovar.text.formats.argument_grammar import Free, Json, alternatives, free_parameters, parameters_of, refuse
from samovar.text.formats.tagged_reader import Tags, is_name
from samovar.text.lark import Lark

BREAK = "\0"
"""In a layout: a line break that may be missing."""
ANY_KEY = "\1"
"""In a layout: the name of a parameter that may have any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model of one format writes a region: blanks included, where `Tags` has only what is looked for.

    `key` gets a parameter's name and whether its value is raw text. `ending` are the blanks after a value's end tag.
    `separator` stands between regions of one call each; None: one region has all the calls.
    """

    opening: str
    closing: str
    separator: str | None
    call: Callable[[str], str]
    call_end: str
    key: Callable[[str, bool], str]
    ending: str = "\n"


def tagged_grammar(lark: Lark, tools: Sequence[ToolDefinition], parallel: bool, tags: Tags, layout: Layout) -> str:
    """One or more calls of `tools` (exactly one unless `parallel`), with the marks around them."""
    call = lark.any_of(*(lark.rule(f"call_{tool.name}", _call(lark, tool, tags, layout)) for tool in tools))
    most = None if parallel else 1
    if layout.separator is None:
        return lark.seq(lark.text(layout.opening), lark.many(call, least=1, most=most), lark.text(layout.closing))
    region = lark.seq(lark.text(layout.opening), call, lark.text(layout.closing))
    return lark.many(region, least=1, most=most, separator=lark.text(layout.separator))


def _call(lark: Lark, tool: ToolDefinition, tags: Tags, layout: Layout) -> str:
    if not is_name(tool.name):
        refuse(f"the name {tool.name!r}", tool.name)
    schemas, required = parameters_of(tool)
    parts = [_written(lark, layout.call(tool.name))]
    free = free_parameters(tool)
    if free is not None:
        parts.append(lark.many(_parameter(lark, tool, None, free, tags, layout)))
    for key, schema in schemas.items():
        if not is_name(key):
            refuse(f"a parameter named {key!r}", tool.name)
        parameter = _parameter(lark, tool, key, schema, tags, layout)
        parts.append(parameter if key in required else lark.optional(parameter))
    return lark.seq(*parts, _written(lark, layout.call_end))


def _parameter(lark: Lark, tool: ToolDefinition, key: str | None, schema: Any, tags: Tags, layout: Layout) -> str:
    """One parameter with its tags; without a key, one of any name."""
    ways = []
    end = ("\n" if tags.framed else "") + tags.value_end
    for way in alternatives(schema, tool.parameters, tool.name):
        head = layout.key(ANY_KEY if key is None else key, not isinstance(way, Json))
        if isinstance(way, Json):
            value = lark.seq(lark.json(way.schema), lark.text(end))
        elif isinstance(way, Free):
            value = lark.matching_until(way.patterns, end, without=tags.value_end)
        elif tags.value_end in way.text:
            refuse(f"the value {way.text!r}", tool.name)
        else:
            value = lark.seq(lark.plain(way.text), lark.text(end))
        ways.append(lark.seq(_written(lark, head), value))
    return lark.seq(lark.any_of(*ways), _written(lark, layout.ending))


def _written(lark: Lark, text: str) -> str:
    """A text of the layout, with its optional line breaks and free key."""
    parts = []
    for piece in re.split(f"([{BREAK}{ANY_KEY}])", text):
        if piece == BREAK:
            parts.append(lark.optional(lark.text("\n")))
        elif piece == ANY_KEY:
            parts.append(lark.regex("[A-Za-z_][A-Za-z0-9_]*"))
        elif piece:
            parts.append(lark.text(piece))
    return lark.seq(*parts)
