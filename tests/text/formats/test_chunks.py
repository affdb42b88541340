"""For every format: how a text was cut changes nothing, no text makes a parser raise, and time is linear in the text."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from samovar.text.answer import AnswerPlan
from samovar.text.formats.choose import names, reasoning_format, tool_format
from samovar.text.regions import marks_in
from tests.text.formats.reading import TOOLS, Piece, is_json_prefix, read, split

DATA = Path(__file__).parent / "data"
NUM_TEXTS = 200
ENDINGS = ("", "\n", " and so on", "}", '"', "]", "<", "\n\n{", "<think>", "</think>\n", "日本", '{"a": {"b": [', "\\")


def plans(name: str) -> list[AnswerPlan]:
    """The plans a format is used in: alone, and with a reasoning format, from within it or not."""
    tools, (_, thoughts) = tool_format(name), names()
    reasoning = reasoning_format(name if name in thoughts else "think")
    if tools.whole is not None:
        return [
            AnswerPlan(tools=tools, reasoning=reasoning, begins_in_reasoning=begins, definitions=TOOLS)
            for begins in (False, True)
        ]
    return [
        AnswerPlan(tools=tools, definitions=TOOLS),
        AnswerPlan(tools=tools, reasoning=reasoning, begins_in_reasoning=True, definitions=TOOLS),
        AnswerPlan(tools=tools, reasoning=reasoning, parallel=False),
    ]


def texts(name: str) -> list[str]:
    """Valid, malformed and truncated texts of a format, the same ones every time."""
    rng = random.Random(name)
    seeds = [case["text"] for case in json.loads((DATA / f"{name}.json").read_text())]
    marks = [*marks_in(plans(name)[-1]), *ENDINGS, '{"name": ', "ping", "get_weather"]
    found = list(seeds)
    while len(found) < NUM_TEXTS:
        text = rng.choice(seeds)
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            at = rng.randrange(len(text) + 1)
            change = rng.randrange(6)
            if change == 0:
                text = text[:at]
            elif change == 1:
                text = text[:at] + text[at + rng.randrange(1, 9) :]
            elif change == 2:
                text = text[:at] + rng.choice(marks) + text[at:]
            elif change == 3:
                text = text + rng.choice(ENDINGS) + rng.choice(seeds)
            elif change == 4:
                text = rng.choice(("Hm.", "\n", "<think>", "x</think>\n\n", "")) + text
            else:
                text = text[:at] + rng.choice("{}[]\"'\\<>|:,=\n\x00ü😀") + text[at:]
        found.append(text)
    return found


@pytest.mark.parametrize("name", names()[0])
def test_chunks_do_not_matter(name: str) -> None:
    """B122, B125, B128, B136: 200 texts give the same in any chunks; nothing raises; arguments are JSON so far (F21)."""
    rng = random.Random(1)
    for number, text in enumerate(texts(name)):
        plan = plans(name)[number % len(plans(name))]
        truncated = bool(number & 1)
        whole = read(plan, [text], truncated=truncated)
        for chunks in (list(text), split(text, rng), split(text, rng)):
            assert read(plan, chunks, truncated=truncated) == whole, (plan.begins_in_reasoning, text)
        check(plan, whole, text)


def check(plan: AnswerPlan, pieces: list[Piece], text: str) -> None:
    for piece in pieces:
        if piece[0] == "call":
            assert not plan.definitions or piece[1] in plan.definitions, text
            assert is_json_prefix(piece[2]), (piece, text)
    assert plan.parallel or sum(piece[0] == "call" for piece in pieces) <= 1


HOSTILE = (
    lambda size, mark: "a" * size,
    lambda size, mark: mark * (size // len(mark)),
    lambda size, mark: mark + "[" * size,
    lambda size, mark: mark + '{"' * (size // 2),
    lambda size, mark: mark + '{"arguments": "' + "\\" * size,
    lambda size, mark: mark + " " * size,
    lambda size, mark: "\n" * size + mark,
    lambda size, mark: mark + '{"name": "ping", "arguments": {' + '"a": 1, ' * (size // 8),
    lambda size, mark: mark.rstrip("[") + "[ping(" + ", ".join(f"a{i}={i}" for i in range(size // 10)),
    lambda size, mark: (mark + '{"x": "') * (size // (len(mark) + 7)),
    lambda size, mark: "<" * size,
    lambda size, mark: (mark[:-1] or mark) * (size // len(mark)),
    lambda size, mark: mark + "ping" + "0" * size,
    lambda size, mark: (mark + '{"name": "ping"}' + mark) * (size // (2 * len(mark) + 16)),
    lambda size, mark: "".join(
        random.Random(3).choices([mark, "{", "}", '"', "ping", ":", "<", ">", " ", "\n"], k=size // 4)
    ),
)


def seconds(name: str, size: int, step: int) -> float:
    """The longest time a hostile text of this size takes, at once and in chunks of `step`."""
    plan, mark = plans(name)[0], marks_in(plans(name)[0])[0]
    longest = 0.0
    for make in HOSTILE:
        text = make(size, mark)
        for length in (len(text), step):
            chunks = [text[at : at + length] for at in range(0, len(text), length)]
            started = time.process_time()
            read(plan, chunks)
            longest = max(longest, time.process_time() - started)
    return longest


@pytest.mark.parametrize("name", names()[0])
def test_hostile_texts_take_linear_time(name: str) -> None:
    """B127: 20 KB of each hostile text; what is quadratic or worse takes minutes."""
    assert seconds(name, 20_000, 7) < 5


@pytest.mark.slow
@pytest.mark.parametrize("name", names()[0])
def test_a_megabyte_of_hostile_text(name: str) -> None:
    """B127: 1 MB of each hostile text."""
    assert seconds(name, 1_000_000, 100) < 30
