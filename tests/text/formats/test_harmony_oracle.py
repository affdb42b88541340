"""OpenAI's own library as an oracle: answers it renders are read as what they were made of.

It needs the file `o200k_base.tiktoken` and would load it from the net: `TIKTOKEN_ENCODINGS_BASE`, which it reads itself,
names the folder that has it.
"""

from __future__ import annotations

import itertools
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.text.formats.base import Arguments, CallEnd, CallStart, Said, Thought
from samovar.text.formats.harmony_reader import MARKS, HarmonyReader
from tests.text.formats.reading import TOOLS

harmony = pytest.importorskip("openai_harmony")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path(os.environ.get("TIKTOKEN_ENCODINGS_BASE", "/nowhere"), "o200k_base.tiktoken").is_file(),
        reason="TIKTOKEN_ENCODINGS_BASE names no folder with o200k_base.tiktoken",
    ),
]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda text: bool(text.strip())
)
PARTS = st.one_of(
    st.tuples(st.just("analysis"), TEXT),
    st.tuples(st.just("commentary"), TEXT),
    st.tuples(st.just("call"), st.dictionaries(TEXT, st.integers() | TEXT | st.lists(TEXT, max_size=2), max_size=3)),
)


@cache
def _encoding() -> Any:
    return harmony.load_harmony_encoding("HarmonyGptOss")


@settings(deadline=None, max_examples=200)
@given(parts=st.lists(PARTS, max_size=4), answer=TEXT)
def test_what_openai_renders_is_read(parts: list[tuple[str, Any]], answer: str) -> None:
    encoding = _encoding()
    marks = {encoding.encode(mark, allowed_special="all")[0]: mark for mark in MARKS}
    messages, thoughts, said, calls = [], [], [], []
    for kind, value in [*parts, ("final", answer)]:
        text = json.dumps(value) if kind == "call" else value
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text)
        message = message.with_channel("commentary" if kind == "call" else kind)
        if kind == "call":
            message = message.with_recipient("functions.get_weather").with_content_type("<|constrain|>json")
            calls.append(value)
        else:
            (thoughts if kind == "analysis" else said).append(text)
        messages.append(message)
    tokens = [token for message in messages for token in encoding.render(message)]
    tokens = tokens[2:]  # the prompt ends with <|start|>assistant
    reader, pieces = HarmonyReader(TOOLS, False), []
    for is_mark, group in itertools.groupby(tokens, marks.__contains__):
        for part in [marks[token] for token in group] if is_mark else encoding.decode_utf8(list(group)):
            pieces += reader.feed_mark(part) if is_mark else reader.feed(part)
    pieces += reader.finish(is_complete=True)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Thought)) == "\n".join(thoughts)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Said)) == "\n".join(said)
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert len(starts) == len(calls) == sum(isinstance(piece, CallEnd) for piece in pieces)
    given_out = "".join(
        "\n" if isinstance(p, CallEnd) else p.text for p in pieces if isinstance(p, Arguments | CallEnd)
    )
    assert [json.loads(line) for line in given_out.splitlines()] == calls
