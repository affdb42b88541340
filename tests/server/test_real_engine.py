"""A real engine with random weights behind HTTP: required calls and schemas hold, thoughts keep their budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from samovar.config.engine import EngineConfig, with_settings
from samovar.config.groups import ServerConfig
from samovar.engine.build import build_engine, find_model
from samovar.engine.door import load_text, make_preparer
from samovar.engine.in_process_client import InProcessEngineClient
from tests.checkpoints import write_random_llama
from tests.server.live import live_server
from tests.server.test_every_format import PARAMETERS, TOOLS
from tests.server.test_truth_chat import accumulated
from tests.server.truth_table import TEMPLATE
from tests.server.wire import CHAT, COMPLETIONS, stream

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = PARAMETERS["set_light"]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = write_random_llama(tmp_path_factory.mktemp("real"), max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = with_settings(
        EngineConfig(), model=str(folder), max_num_seqs=8, dtype="float32", threads=1, memory="400MiB", device="cpu"
    )
    description = find_model(config)
    engine, info = build_engine(config, lambda phase: None, description)
    text = load_text(config, description)
    preparer = make_preparer(config, description, info, text)
    assert preparer.formats[0] is not None and preparer.formats[1] is not None
    with (
        live_server(lambda: InProcessEngineClient(engine, info), preparer, ServerConfig(port=0)) as live,  # type: ignore[arg-type, return-value]
        httpx.Client(base_url=live.url, timeout=120, verify=False) as client,
    ):
        yield client
    preparer.close()


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 600} | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize("seed", range(3))
def test_required_calls(http: httpx.Client, seed: int) -> None:
    """F23, B124: whatever the weights, `required` gives valid calls, and a stream with the same seed the same ones."""
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "parallel_tool_calls": False} | OFF
    choice = ask(http, **body)["choices"][0]
    streamed, finish = accumulated(stream(http, CHAT, messages=HELLO, max_tokens=600, **body))
    assert choice["finish_reason"] == finish
    calls = choice["message"].get("tool_calls", [])
    assert [c["function"] for c in calls] == [c["function"] for c in streamed.get("tool_calls", [])]
    if finish == "length":
        return
    assert finish == "tool_calls" and len(calls) == 1 and choice["message"]["content"] is None
    function = calls[0]["function"]
    jsonschema.validate(json.loads(function["arguments"]), PARAMETERS[function["name"]])


@pytest.mark.parametrize("think", [True, False])
def test_schema(http: httpx.Client, think: bool) -> None:
    """D7, B137, B140: with n choices and thoughts of a bounded length the content is what the schema says."""
    answer = ask(
        http, n=3, seed=5, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        chat_template_kwargs={"enable_thinking": think}, thinking_token_budget=12,
    )  # fmt: skip
    for choice in answer["choices"]:
        assert bool(choice["message"].get("reasoning")) <= think
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert any(choice["finish_reason"] == "stop" for choice in answer["choices"])
    thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert thought <= 3 * (12 + len("</think>")) if think else thought == 0


def test_completions_and_ends(http: httpx.Client) -> None:
    """Structured outputs of completions, with a stop string and logprobs beside it."""
    answer = http.post(
        COMPLETIONS, json={"prompt": ["a", "b"], "guided_regex": "(yes|no), [0-9]{3}", "logprobs": 2, "seed": 1}
    ).json()
    for choice in answer["choices"]:
        assert choice["text"][:-3] in ("yes, ", "no, ") and choice["text"][-3:].isdigit()
        assert choice["finish_reason"] == "stop"
    stopped = http.post(COMPLETIONS, json={"prompt": "a", "guided_regex": "(yes|no), [0-9]{3}", "stop": ","}).json()
    assert stopped["choices"][0]["text"] in ("yes", "no") and stopped["choices"][0]["stop_reason"] == ","


def test_what_cannot_be_enforced(http: httpx.Client) -> None:
    """A keyword that nothing enforces is refused with its name; the next request is served."""
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}], "tool_choice": "required"},
    ):
        refused = http.post(CHAT, json={"messages": HELLO} | fields)
        assert refused.status_code == 400 and "not" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"].startswith(next(iter(fields)))
        assert refused.json()["error"]["message"].startswith(refused.json()["error"]["param"])
    for fields, name in (
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": schema}}, "response_format.schema"),
        ({"guided_json": schema}, "guided_json"), ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    ):  # fmt: skip
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hi"})):
            error = http.post(path, json=body | fields).json()["error"]
            assert error["param"] == name and error["message"].startswith(f"{name}:"), error
    assert ask(http, max_tokens=2)["usage"]["completion_tokens"] <= 2


def test_settings_that_contradict_each_other(http: httpx.Client) -> None:
    """A form that the allowed tokens cannot write is the request's own fault: 400, or an error inside the stream."""
    wish = {"structured_outputs": {"choice": ["aa", "bb"]}, "allowed_token_ids": [5]}
    for path, body in (
        (CHAT, {"messages": HELLO} | OFF),
        (COMPLETIONS, {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"} | OFF),
    ):
        refused = http.post(path, json=body | wish)
        assert refused.status_code == 400 and "structured outputs" in refused.json()["error"]["message"], path
        assert http.post(path, json=body | wish | {"stream": True}).status_code == 400
    assert ask(http, max_tokens=2)["usage"]["completion_tokens"] <= 2
