"""Reads a text in chunks with a format, for tests: what came out, joined; and checks of what must hold of every text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence

from samovar.core.tools import ToolCallDelta, ToolDefinition
from samovar.text.answer import AnswerPlan
from samovar.text.formats.base import Said, Thought
from samovar.text.regions import News, RegionParser

TOOLS = {
    tool.name: tool
    for tool in (
        ToolDefinition(
            name="get_weather",
            parameters={
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        ),
        ToolDefinition(
            name="write_file",
            parameters={
                "type": "object",
                "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "object"}},
            },
        ),
        ToolDefinition(name="ping", parameters={"type": "object", "properties": {}}),
    )
}

Piece = tuple[str, ...]
"""("thought", text), ("said", text) or ("call", name, arguments)."""


def joined(news: Iterable[News]) -> list[Piece]:
    """Neighbours of one kind as one piece. Checks that the deltas of calls fit together."""
    heads: list[tuple[str, ...]] = []
    bodies: list[list[str]] = []
    num_calls = 0
    for item in news:
        if isinstance(item, ToolCallDelta):
            if item.name is not None:
                assert item.index == num_calls and item.call_id, item
                num_calls += 1
                heads.append(("call", item.name))
                bodies.append([])
            else:
                assert item.index == num_calls - 1 and item.call_id is None and heads[-1][0] == "call", item
            bodies[-1].append(item.arguments)
            continue
        kind = "thought" if isinstance(item, Thought) else "said"
        assert isinstance(item, Said | Thought) and item.text, item
        if not heads or heads[-1][0] != kind:
            heads.append((kind,))
            bodies.append([])
        bodies[-1].append(item.text)
    return [(*head, "".join(body)) for head, body in zip(heads, bodies, strict=True)]


def read(plan: AnswerPlan, chunks: Iterable[str], *, truncated: bool = False) -> list[Piece]:
    """What comes of these chunks."""
    parser = RegionParser(plan)
    news: list[News] = []
    for chunk in chunks:
        news += parser.feed(chunk)
    return joined([*news, *parser.finish(truncated=truncated)])


def split(text: str, rng: random.Random) -> list[str]:
    """The text in random chunks."""
    chunks, at = [], 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 3, 5, 8, 40))
        chunks.append(text[at : at + size])
        at += size
    return chunks


def summary(pieces: Sequence[Piece]) -> dict[str, object]:
    """As the data files have it: reasoning, content and calls with parsed arguments (text where they are broken)."""
    return {
        "reasoning": "".join(p[1] for p in pieces if p[0] == "thought"),
        "content": "".join(p[1] for p in pieces if p[0] == "said"),
        "calls": [[p[1], _parsed(p[2])] for p in pieces if p[0] == "call"],
    }


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def is_json_prefix(text: str) -> bool:
    """Whether a JSON object may begin with this text: tries what may come next, then closes what is open."""
    closers, quoted, escaped = [], False, False
    for char in text:
        if quoted:
            quoted, escaped = (char != '"' or escaped), char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
        elif char in "}]":
            if not closers or closers.pop() != char:
                return False
    tail = "".join(reversed(closers))
    starts = (
        "",
        '"',
        '":0',
        ":0",
        "0",
        '"":0',
        "0000",
        "000",
        "00",
        '\\"',
        "rue",
        "ue",
        "e",
        "alse",
        "lse",
        "se",
        "ull",
        "ll",
        "l",
    )
    return not text or any(_parses(text + start + end + tail) for start in starts for end in ("", '"', '":0'))


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
