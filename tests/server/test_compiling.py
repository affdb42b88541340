"""Grammars are compiled where they hold up nobody: not on the event loop, and not on the threads that render prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import Any

import httpx
import pytest

from samovar.config.groups import ServerConfig
from samovar.grammar.compiler import GrammarCompiler
from samovar.server.state import OFFLOAD_CHARS
from samovar.text.prepare import Preparer
from samovar.text.tokenizer import Tokenizer
from tests.server.live import LiveServer, live_server
from tests.server.scripted_engine import VOCAB, ScriptedEngine, saying
from tests.server.wire import CHAT

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TURNS = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "parameters": SCHEMA}
ASKING: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": TURNS, "response_format": {"type": "json_object"}}),
    "chat-tool": (
        CHAT,
        {"messages": TURNS, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    "completions": ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": SCHEMA}}),
    "responses": (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    ),
    "responses-tool": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", **TOOL}], "tool_choice": "required"},
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "default",
            "max_tokens": 9,
            "messages": TURNS,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    "messages-tool": (
        "/v1/messages",
        {
            "model": "default",
            "max_tokens": 9,
            "messages": TURNS,
            "tools": [{"name": "look", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
}
AT_ONCE = 3
"""More than the threads that render prompts."""


class Held(GrammarCompiler):
    """Compiles when it is told to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, VOCAB, [258])
        self.entered = threading.Semaphore(0)
        self.may_go_on = threading.Event()

    def check(self, grammar: str) -> None:
        """Wait, then check."""
        self.entered.release()
        assert self.may_go_on.wait(60)
        super().check(grammar)


@pytest.fixture
def held(preparer: Preparer) -> Iterator[tuple[Held, LiveServer]]:
    """A server whose grammars are compiled when the test says so."""
    assert preparer.tokenizer is not None
    door, grammar = copy(preparer), Held(preparer.tokenizer)
    door.grammar, door.limits = grammar, replace(preparer.limits, max_model_len=8192)  # tools are told of at length
    with live_server(lambda: ScriptedEngine(saying("{}")), door, ServerConfig(port=0)) as running:
        yield grammar, running
        grammar.may_go_on.set()
    grammar.close()


@pytest.mark.parametrize("api", ASKING)
def test_nobody_waits_for_a_grammar_of_others(api: str, held: tuple[Held, LiveServer]) -> None:
    """While the grammars of several calls are compiled, short prompts and long ones of other calls are answered."""
    grammar, server = held
    path, body = ASKING[api]
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as http, ThreadPoolExecutor(AT_ONCE) as threads:
        waiting = [threads.submit(http.post, path, json=body) for _ in range(AT_ONCE)]
        try:
            for _ in waiting:
                assert grammar.entered.acquire(timeout=20)
            # Messages that render to little and are long enough for a thread: an empty tool result is left out.
            padding = [{"role": "tool", "tool_call_id": "x" * OFFLOAD_CHARS, "content": ""}]
            for messages in (TURNS, padding + TURNS):
                answer = http.post(CHAT, json={"messages": messages}, timeout=20)
                assert answer.status_code == 200, answer.text
            assert not any(call.done() for call in waiting)
        finally:
            grammar.may_go_on.set()
        assert [call.result().status_code for call in waiting] == [200] * AT_ONCE
