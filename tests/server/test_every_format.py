"""Every tool format behind HTTP: a random model under `required` makes schema-valid calls, and streams say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from samovar.grammar.compiler import GrammarCompiler
from samovar.text.formats.choose import names, reasoning_format, tool_format
from samovar.text.tokenizer import load_tokenizer
from tests.server.random_model import random_script
from tests.server.scripted_engine import Script
from tests.server.test_truth_chat import accumulated
from tests.server.truth_table import END_ID, VOCAB, scripted_server, write_thinking_model
from tests.server.wire import CHAT, stream

PARAMETERS: dict[str, dict[str, Any]] = {
    "set_light": {
        "type": "object", "required": ["level", "mode"], "additionalProperties": False,
        "properties": {"level": {"type": "integer", "minimum": -5, "maximum": 120}, "mode": {"enum": ["on", "off", "dim"]}},
    },
    "move": {
        "type": "object", "required": ["to"], "additionalProperties": False,
        "properties": {"to": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
                       "fast": {"type": "boolean"}},
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": p}} for name, p in PARAMETERS.items()]
HELLO = [{"role": "user", "content": "hi"}]
SEEDS = 2


@dataclass
class Model:
    """One tokenizer, compiler and random model for all formats."""

    folder: Path
    compiler: GrammarCompiler
    script: Script

    @contextmanager
    def serve(self, **parts: Any) -> Iterator[httpx.Client]:
        """A client of a server in front of it."""
        with (
            scripted_server(self.folder, self.script, grammar=self.compiler, **parts) as server,
            httpx.Client(base_url=server.live.url, timeout=60, verify=False) as http,
        ):
            yield http


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("formats")
    tokenizer = load_tokenizer(write_thinking_model(folder))
    compiler = GrammarCompiler(tokenizer, VOCAB, [END_ID])
    yield Model(folder, compiler, random_script(tokenizer, VOCAB, END_ID))
    compiler.close()


def _whole(http: httpx.Client, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"], choice["finish_reason"]


def _calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


@pytest.mark.parametrize("name", names()[0])
def test_required(model: Model, name: str) -> None:
    """B122, B124, B131, F23: valid calls of known tools; stream and whole agree byte for byte, also where it is cut."""
    format = tool_format(name)
    thinks = None if format.whole is None else reasoning_format(name)
    with model.serve(formats=(format, thinks)) as http:
        for seed in range(SEEDS):
            for choice in ("required", {"type": "function", "function": {"name": "move"}}):
                body: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "seed": seed}
                if thinks is not None:
                    body["thinking_token_budget"] = 10 * seed
                message, finish = _whole(http, body)
                streamed, streamed_finish = accumulated(stream(http, CHAT, **body))
                calls = _calls(message)
                assert calls == _calls(streamed) and finish == streamed_finish == "tool_calls"
                assert message["content"] is streamed["content"] is None
                for called, arguments in calls:
                    jsonschema.validate(json.loads(arguments), PARAMETERS[called])
                assert choice == "required" or {called for called, _ in calls} == {"move"}
                one = _calls(_whole(http, body | {"parallel_tool_calls": False})[0])
                assert len(one) == 1
            cut = body | {"max_tokens": 7 + 5 * seed}
            (message, finish), (streamed, streamed_finish) = _whole(http, cut), accumulated(stream(http, CHAT, **cut))
            assert _calls(message) == _calls(streamed) and finish == streamed_finish
            assert (message["content"] or "") == (streamed["content"] or "")


def test_structured_outputs(model: Model) -> None:
    """D7: what a random model says under each kind of structured output is what was asked for."""
    schema = PARAMETERS["set_light"]
    asked: list[tuple[dict[str, Any], Any]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}, schema),
        ({"response_format": {"type": "json_object", "schema": schema}}, schema),
        ({"structured_outputs": {"json": schema}}, schema),
        ({"guided_json": schema}, schema),
        ({"json_schema": schema}, schema),
        ({"guided_choice": ["red", "green"]}, {"red", "green"}),
        ({"guided_regex": "[ab]{2}c"}, {f"{a}{b}c" for a in "ab" for b in "ab"}),
        ({"grammar": 'root ::= "x" | "yy"'}, {"x", "yy"}),
    ]
    with model.serve() as http:
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        for seed, (fields, expected) in enumerate(asked * 2):
            message, finish = _whole(http, {"messages": HELLO, "seed": seed} | off | fields)
            text = http.post("/v1/completions", json={"prompt": "x", "seed": seed, "max_tokens": 3000} | fields).json()
            for content in (message["content"], text["choices"][0]["text"]):
                if isinstance(expected, set):
                    assert content in expected
                else:
                    jsonschema.validate(json.loads(content), expected)
            assert finish == "stop"
