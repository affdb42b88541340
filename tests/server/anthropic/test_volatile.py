"""Lines of a system prompt that change with every turn: what is left out, what moves, and where nothing may be touched."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.server.anthropic.asking import Keeping, read_dialogue
from samovar.server.anthropic.schema import MessagesRequest
from samovar.server.anthropic.volatile import (
    INTRODUCTION,
    MAX_CONVERSATIONS,
    MIN_CHARS,
    SystemMemory,
    conversation_key,
    split_volatile,
    without_headers,
)

RULES = "\n".join(f"Rule {i}: be careful with the files of this project." for i in range(200))


def _chat(system: Any, *messages: str, keeping: Keeping | None) -> list[dict[str, Any]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
    asked = msgspec.convert({"model": "m", "max_tokens": 5, "system": system, "messages": turns}, MessagesRequest)
    return list(read_dialogue(asked, keeping).messages)  # type: ignore[arg-type]


def _keeping(owner: str = "me") -> Keeping:
    return Keeping(memory=SystemMemory(), owner=owner)


def test_billing_header_is_left_out() -> None:
    """B098: whatever it says, as a block or as a line, the prompt is the same."""
    rest = "You are a coding agent.\nx-anthropic-note: stays, it is not at the top"
    for nonce in ("36ee5", "0aaa9"):
        line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={nonce};"
        blocks = [{"type": "text", "text": line}, {"type": "text", "text": rest}]
        for system in (blocks, f"{line}\n{rest}"):
            assert _chat(system, "hi", keeping=_keeping())[0]["content"] == rest
        assert line in _chat(blocks, "hi", keeping=None)[0]["content"]
    assert without_headers("X-Anthropic-A: 1\nx-anthropic-b: 2") == ""


@pytest.mark.parametrize(
    "line",
    [
        "Current time: 12:03:59", "- Time: 2026-03-01T09:15Z", "Session id: 3f2504e0-4f89-11d3-9a0c-0305e82c3301",
        "now=1780000000", "nonce: 7c4f1", "cc_version=2.1; cch=36ee5;",
    ],
)  # fmt: skip
def test_values_of_the_moment_move(line: str) -> None:
    """Rule 2: from the first turn on, to the end of the last message; nothing is lost."""
    system = f"You are a coding agent.\n{line}\n{RULES}"
    chat = _chat(system, "hi", "yes", "go on", keeping=_keeping())
    assert chat[0]["content"] == f"You are a coding agent.\n{RULES}"
    assert chat[1]["content"] == "hi"
    assert chat[-1]["content"] == f"go on\n\n{INTRODUCTION}\n{line}"


@pytest.mark.parametrize(
    "line",
    ["You work from 10:30 on, mind that.", "Model: good-3", "Be fast: always", "Version: 2.1.3", "Date: 2026-03-01"],
)
def test_other_lines_stay(line: str) -> None:
    """What does not look like a value of the moment stays."""
    system = f"You are a coding agent.\n{line}\n{RULES}"
    assert _chat(system, "hi", keeping=_keeping())[0]["content"] == system


def test_a_changed_line_moves() -> None:
    """Rule 3: a line of no known form that changed within a conversation moves from then on."""
    keeping = _keeping()
    prompts = [f"You are a coding agent.\nMood is {mood}\n{RULES}" for mood in ("good", "bad", "so so")]
    first, second, third = (_chat(p, "hi", "a", "b", keeping=keeping) for p in prompts)
    assert first[0]["content"] == prompts[0] and first[-1]["content"] == "b"
    assert second[0]["content"] == third[0]["content"] == f"You are a coding agent.\n{RULES}"
    assert third[-1]["content"].endswith("\nMood is so so") and third[-1]["content"].startswith("b")


def test_nothing_is_shared() -> None:
    """Neither between owners, nor between conversations; and another prompt altogether is left alone."""
    memory = SystemMemory()
    one, other = f"Mood is good\n{RULES}", f"Mood is bad\n{RULES}"
    me, you = Keeping(memory=memory, owner="me"), Keeping(memory=memory, owner="you")
    assert _chat(one, "hi", keeping=me)[0]["content"] == one
    assert _chat(other, "hi", keeping=you)[0]["content"] == other
    assert _chat(other, "hello", keeping=me)[0]["content"] == other
    rewritten = RULES.replace("careful", "brave")
    assert _chat("Mood is good\n" + rewritten, "hi", keeping=me)[0]["content"] == "Mood is good\n" + rewritten


def test_short_prompts_are_left_alone() -> None:
    """Where there is nothing to gain, a prompt is what its author wrote."""
    keeping = _keeping()
    for clock in ("12:01", "12:02"):
        system = f"Time: {clock}\nBe nice."
        assert _chat(system, "hi", keeping=keeping)[0]["content"] == system


def test_continued_message_stays_last() -> None:
    """With a prefill, moved lines go before it."""
    chat = _chat(f"Time: 12:01\n{RULES}", "hi", "So", keeping=_keeping())
    assert chat[1]["content"] == f"hi\n\n{INTRODUCTION}\nTime: 12:01" and chat[2]["content"] == "So"


@given(st.lists(st.text(st.characters(exclude_characters="\n"), max_size=40), min_size=1, max_size=80), st.data())
def test_no_line_is_lost(lines: list[str], data: st.DataObject) -> None:
    """Whatever changes: what stays and what moves are the lines of the prompt, each once, in order."""
    memory, key = SystemMemory(), conversation_key("me", [], "hi")
    for _ in range(3):
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = data.draw(st.sampled_from(["Time: 12:01", "a", "b", "nonce=7c4f1"]))
        text = "\n".join([*lines, "x" * MIN_CHARS])
        stays, moved = split_volatile(text, key, memory)
        both = stays.split("\n") + (moved.split("\n") if moved else [])
        assert sorted(both) == sorted(text.split("\n")) or (not moved and stays == text)
        assert stays.endswith("x" * MIN_CHARS)


def test_memory_is_bounded() -> None:
    """The conversations of thousands of clients, from several threads."""
    memory = SystemMemory()

    def use(start: int) -> None:
        for i in range(MAX_CONVERSATIONS):
            memory.changing(conversation_key("me", [], f"{start} {i}"), ["a", "b"])

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(memory) == MAX_CONVERSATIONS
