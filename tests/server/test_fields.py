"""One effect and one bad value of every request field; known fields of absent capabilities; what is accepted in vain."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from samovar.core.request import Request
from samovar.server.openai.refusals import CHAT as REFUSED_IN_CHAT
from samovar.server.openai.refusals import COMPLETIONS as REFUSED_IN_COMPLETIONS
from samovar.server.openai.schema import ChatCompletionRequest, CompletionRequest
from samovar.text.prepare import Preparer, limits_from
from tests.server.live import LiveServer, live_client
from tests.server.scripted_engine import MAX_LEN, VOCAB, ScriptedEngine, engine_facts
from tests.server.truth_table import TruthServer, prompt_text
from tests.server.wire import CHAT, COMPLETIONS, HELLO, chunks_of, error_of

Effect = Callable[[Request, dict[str, Any]], bool]


def ask(http: httpx.Client, path: str, fields: dict[str, Any]) -> httpx.Response:
    base: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    return http.post(path, json=base | fields)


def param(name: str, value: Any) -> Effect:
    return lambda request, answer: getattr(request.params, name) == value


def usage_is(**counts: int) -> Effect:
    return lambda request, answer: answer["usage"] | counts == answer["usage"]


def has(*keys: str) -> Effect:
    return lambda request, answer: all(k in answer or k in answer["choices"][0] for k in keys)


def enforces(request: Request, answer: dict[str, Any]) -> bool:
    return request.constraint is not None and bool(request.constraint.grammar)


def told(request: Request, answer: dict[str, Any]) -> bool:
    """Whether the tool's name and description are in the prompt."""
    text = prompt_text(request)
    return FUNCTION["name"] in text and FUNCTION["description"] in text and request.constraint is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "look_up", "description": "Looks a word up.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}

SHARED: dict[str, tuple[Any, Effect, Any]] = {
    "model": ("tiny", lambda r, a: a["model"] == "tiny", "nobody/nothing"),
    "n": (2, lambda r, a: [c["index"] for c in a["choices"]] == [0, 1], 0),
    "stream": (False, lambda r, a: a["object"] in ("chat.completion", "text_completion"), "yes"),
    "stream_options": (None, lambda r, a: True, {"include_usage": True}),
    "max_tokens": (3, usage_is(completion_tokens=3), -1),
    "temperature": (0.5, param("temperature", 0.5), 2.5),
    "top_p": (0.5, param("top_p", 0.5), 0),
    "top_k": (7, param("top_k", 7), -2),
    "min_p": (0.25, param("min_p", 0.25), 1.5),
    "presence_penalty": (1.5, param("presence_penalty", 1.5), 2.1),
    "frequency_penalty": (-1.5, param("frequency_penalty", -1.5), "1"),
    "repetition_penalty": (1.25, param("repetition_penalty", 1.25), 0),
    "seed": (-(2**63), param("seed", -(2**63)), 10**20),
    "stop": (["wörld"], lambda r, a: a["choices"][0]["stop_reason"] == "wörld", [""]),
    "stop_token_ids": ([5], param("stop_token_ids", [5]), [VOCAB]),
    "include_stop_str_in_output": (True, param("include_stop_str_in_output", True), 1),
    "ignore_eos": (True, param("ignore_eos", True), "true"),
    "min_tokens": (4, param("min_tokens", 4), -1),
    "skip_special_tokens": (False, param("skip_special_tokens", False), 0),
    "spaces_between_special_tokens": (False, param("spaces_between_special_tokens", False), []),
    "bad_words": (["hi"], lambda r, a: bool(r.params.bad_words_token_ids), [1]),
    "allowed_token_ids": ([1, 2], param("allowed_token_ids", [1, 2]), []),
    "logit_bias": ({"5": 1.0}, param("logit_bias", {5: 1.0}), {"AI": -100}),
    "prompt_logprobs": (1, has("prompt_logprobs"), 1.5),
    "truncate_prompt_tokens": (1, usage_is(prompt_tokens=1), 0),
    "truncation_side": (None, lambda r, a: True, "left"),
    "echo": (True, lambda r, a: True, 1),
    "add_special_tokens": (False, lambda r, a: True, "no"),
    "priority": (0, lambda r, a: r.priority == 0, 1),
    "request_id": ("abc-1", lambda r, a: a["id"].endswith("-abc-1") and "abc" not in r.request_id, "a b"),
    "cache_salt": ("pepper", lambda r, a: r.cache_salt == "pepper", ""),
    "return_token_ids": (True, has("token_ids", "prompt_token_ids"), "x"),
    "return_tokens_as_token_ids": (True, lambda r, a: True, 2),
    "stream_interval": (5, param("stream_interval", 5), 0),
    "user": ("me", lambda r, a: True, 5),
    "thinking_token_budget": (5, param("thinking_token_budget", 5), -2),
    "response_format": ({"type": "json_object"}, enforces, {"type": "yaml"}),
    "structured_outputs": ({"regex": "a+"}, enforces, {"regex": "a", "choice": ["b"]}),
    "guided_json": (json.dumps(SCHEMA), enforces, 5),
    "guided_regex": ("a{2}b", enforces, "("),
    "guided_choice": (["yes", "no"], enforces, []),
    "guided_grammar": ('start: "a" | "b"', enforces, "start: ("),
    "guided_whitespace_pattern": (None, lambda r, a: True, " ?"),
    "guided_decoding_backend": ("llguidance", lambda r, a: r.constraint is None, "outlines"),
    "grammar": ('root ::= "a" | "b"', enforces, "root ::= ("),
    "json_schema": (SCHEMA, enforces, "text"),
}
IN_CHAT: dict[str, tuple[Any, Effect, Any]] = SHARED | {
    "messages": (HELLO, lambda r, a: True, []),
    "max_completion_tokens": (2, usage_is(completion_tokens=2), -5),
    "logprobs": (True, lambda r, a: len(a["choices"][0]["logprobs"]["content"]) == a["usage"]["completion_tokens"], 1),
    "top_logprobs": (None, lambda r, a: True, 3),
    "chat_template": (None, lambda r, a: True, "{{ messages }}"),
    "chat_template_kwargs": ({"mood": "glad"}, usage_is(prompt_tokens=27), {"messages": []}),
    "add_generation_prompt": (False, usage_is(prompt_tokens=10), "no"),
    "continue_final_message": (False, lambda r, a: True, "yes"),
    "documents": ([{"text": "xyz"}], usage_is(prompt_tokens=26), ["x"]),
    "tools": ([TOOL], told, [{"type": "function"}]),
    "tool_choice": ("auto", lambda r, a: r.constraint is None, "required"),
    "parallel_tool_calls": (False, lambda r, a: True, "no"),
    "functions": ([FUNCTION], told, [{"name": "two words"}]),
    "function_call": ("none", lambda r, a: True, {"name": "absent"}),
    "reasoning_effort": ("low", lambda r, a: True, "huge"),
    "reasoning": ({"effort": "high", "max_tokens": 7}, param("thinking_token_budget", 7), {"effort": "huge"}),
    "include_reasoning": (False, lambda r, a: True, "no"),
}
IN_COMPLETIONS: dict[str, tuple[Any, Effect, Any]] = SHARED | {
    "prompt": ([1, 2, 3], usage_is(prompt_tokens=3), [1, "a"]),
    "logprobs": (
        2,
        lambda r, a: len(a["choices"][0]["logprobs"]["tokens"]) == a["usage"]["completion_tokens"],
        VOCAB + 1,
    ),
}


def test_tables_cover_every_field() -> None:
    """No field of the schema is without a row."""
    assert IN_CHAT.keys() == set(ChatCompletionRequest.__struct_fields__)
    assert IN_COMPLETIONS.keys() == set(CompletionRequest.__struct_fields__)


CASES = [(CHAT, name) for name in IN_CHAT] + [(COMPLETIONS, name) for name in IN_COMPLETIONS]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_effect_and_bad_value(
    server: LiveServer, http: httpx.Client, truth: TruthServer, truth_http: httpx.Client, path: str, name: str
) -> None:
    """B001, B005, B010, B023: a field does what it says, and its bad value is a 400 (404 for model) that names it."""
    if name in ("tools", "functions"):  # the words about tools are longer than the tiny context
        server, http = truth.live, truth_http
    good, effect, bad = (IN_CHAT if path == CHAT else IN_COMPLETIONS)[name]
    answer = ask(http, path, {name: good})
    assert answer.status_code == 200, answer.text
    assert effect(server.engine.requests[-1], answer.json())
    seen = len(server.engine.requests)
    refused = ask(http, path, {name: bad})
    error = error_of(refused)
    assert refused.status_code == (404 if name == "model" else 400)
    assert error["param"].split(".")[0].split("[")[0] == name, error
    assert len(server.engine.requests) == seen
    assert ask(http, path, {name: None}).status_code == (400 if name in ("messages", "prompt") else 200)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**20, "100", 1.5, True])
def test_seed_outside_int64(http: httpx.Client, value: Any) -> None:
    """B010: wide and wrong-typed seeds are refused; the edges, 0 and -1 are taken."""
    assert error_of(ask(http, CHAT, {"seed": value}))["param"] == "seed"
    for fine in (2**63 - 1, 0, -1, None):
        assert ask(http, CHAT, {"seed": fine}).status_code == 200


INTEGERS = [n for n, (good, _, _) in IN_COMPLETIONS.items() if isinstance(good, int) and not isinstance(good, bool)]


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_edges(http: httpx.Client, name: str) -> None:
    """B023: -2^63, -1, 0, 2^63 in each integer field: an answer or a 400 that names it, never a 5xx."""
    for value in (-(2**63), -(2**63) - 1, -1, 0, 2**63, 2**70):
        answer = ask(
            http, COMPLETIONS, {name: value, "max_tokens": 1} | ({"max_tokens": value} if name == "max_tokens" else {})
        )
        assert answer.status_code in (200, 400)
        if answer.status_code == 400:
            error_of(answer)
    assert ask(http, COMPLETIONS, {}).status_code == 200


@pytest.mark.parametrize("value", [21, VOCAB + 1, 1_000_000, -1, 1.5])
def test_logprobs_over_the_limit(http: httpx.Client, value: Any) -> None:
    """B002: more alternatives than the limit is a 400 naming the caller's own field."""
    assert error_of(ask(http, CHAT, {"logprobs": True, "top_logprobs": value}))["param"] == "top_logprobs"
    assert error_of(ask(http, COMPLETIONS, {"logprobs": value}))["param"] == "logprobs"
    assert error_of(ask(http, COMPLETIONS, {"prompt_logprobs": value}))["param"] == "prompt_logprobs"


@pytest.mark.parametrize("value", [0, 1, 5, 6, 20])
def test_logprobs_up_to_the_limit(http: httpx.Client, value: int) -> None:
    """B062: every number of alternatives up to the limit is served."""
    for content in ask(http, CHAT, {"logprobs": True, "top_logprobs": value}).json()["choices"][0]["logprobs"][
        "content"
    ]:
        assert len(content["top_logprobs"]) == value


def test_logit_bias_is_counted_before_it_is_read(http: httpx.Client) -> None:
    """Half a million entries are refused by their number, whatever they say."""
    for path in (CHAT, COMPLETIONS):
        error = error_of(ask(http, path, {"logit_bias": {f"x{i}": 1 for i in range(1025)}}))
        assert error["param"] == "logit_bias" and "at most 1024 entries, got 1025" in error["message"]


@pytest.mark.parametrize("key", ["AI", "1.5", "", " 7", "-1", str(VOCAB), "9" * 30])
def test_logit_bias_keys(http: httpx.Client, key: str) -> None:
    """B005: keys that are not token ids are refused at the door."""
    assert error_of(ask(http, CHAT, {"logit_bias": {key: 1}}))["param"] == "logit_bias"


@pytest.mark.parametrize("value", [-2, -1, 0, 1, VOCAB, VOCAB + 1, 9_999_999])
def test_top_k_has_one_meaning(http: httpx.Client, value: int) -> None:
    """B011: 0, -1 and values above the vocabulary are taken; less is refused."""
    assert ask(http, CHAT, {"top_k": value}).status_code == (400 if value < -1 else 200)


def test_token_ids_as_prompt(server: LiveServer, http: httpx.Client) -> None:
    """B022: ids, and lists of ids, work like the text they stand for; usage counts all prompts."""
    ids = http.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
    assert ask(http, COMPLETIONS, {"prompt": ids}).json()["usage"]["prompt_tokens"] == 3
    answer = ask(http, COMPLETIONS, {"prompt": [ids, ids[:1]], "n": 2, "max_tokens": 1}).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert {len(r.prompt_token_ids) for r in server.engine.requests[-2:]} == {1, 3}


@pytest.mark.parametrize(
    "prompt", [[], [[]], "", [1, [2]], ["a", 1], [-1], [VOCAB], [True], [1.5], {}, 5, [[1], ["a"]], [10**30]]
)
def test_bad_prompts(http: httpx.Client, prompt: Any) -> None:
    """B022: every other form of `prompt` is a 400 that names it."""
    assert error_of(ask(http, COMPLETIONS, {"prompt": prompt}))["param"].startswith("prompt")


def test_max_tokens_is_a_cap(http: httpx.Client) -> None:
    """B004: a cap above the room left is clamped, and the answer ends with `length` at most."""
    body = {"messages": [{"role": "user", "content": "x" * 480}], "max_tokens": 500}
    answer = http.post(CHAT, json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == MAX_LEN


def test_operators_ceiling(preparer: Preparer) -> None:
    """B019: the ceiling holds for absent, null and large values alike; negative ones are refused."""
    limits = limits_from(engine_facts(), max_tokens_ceiling=64)
    capped = Preparer(preparer.tokenizer, preparer.template, limits, [258])
    with live_client(lambda: ScriptedEngine(lambda r, i: [5] * 400), capped) as (_, http):
        for path in (CHAT, COMPLETIONS):
            for fields in ({}, {"max_tokens": None}, {"max_tokens": 500}, {"max_tokens": 2**62}):
                answer = ask(http, path, fields | {"ignore_eos": True}).json()
                assert answer["usage"]["completion_tokens"] == (64 if path == CHAT or fields.get("max_tokens") else 16)
            assert error_of(ask(http, path, {"max_tokens": -1}))["param"] == "max_tokens"


def test_defaults_of_the_model(preparer: Preparer) -> None:
    """Sampling defaults of the checkpoint or operator hold where a request says nothing, and only there."""
    defaults = {"temperature": 0.25, "top_k": 9, "max_new_tokens": 5}
    own = Preparer(preparer.tokenizer, preparer.template, preparer.limits, [258], defaults)
    with live_client(lambda: ScriptedEngine(lambda r, i: [5] * 400), own) as (server, http):
        for path in (CHAT, COMPLETIONS):
            assert ask(http, path, {"top_k": 3}).json()["usage"]["completion_tokens"] == 5
            params = server.engine.requests[-1].params
            assert (params.temperature, params.top_k) == (0.25, 3)


@pytest.mark.parametrize("length", [MAX_LEN - 1, MAX_LEN, MAX_LEN + 1, 3 * MAX_LEN])
def test_prompts_at_the_context_limit(http: httpx.Client, length: int) -> None:
    """B016, B173: over-long prompts are refused with both numbers, never cut in silence; one that leaves room is served."""
    answer = ask(http, COMPLETIONS, {"prompt": "x" * length, "max_tokens": 1})
    if length < MAX_LEN:
        assert answer.json()["usage"]["prompt_tokens"] == length
    else:
        message = error_of(answer)["message"]
        assert str(length) in message and str(MAX_LEN) in message
    assert ask(http, COMPLETIONS, {}).status_code == 200


@pytest.mark.parametrize(("side", "kept"), [("left", "ef"), ("right", "ab")])
def test_truncation_is_reported(server: LiveServer, http: httpx.Client, side: str, kept: str) -> None:
    """D3, B173: truncation happens only when asked for, on the side asked for, and the answer says how much."""
    answer = ask(
        http, COMPLETIONS, {"prompt": "abcdef", "truncate_prompt_tokens": 2, "truncation_side": side, "echo": True}
    ).json()
    assert answer["choices"][0]["text"].startswith(kept)
    assert answer["choices"][0]["num_truncated_prompt_tokens"] == 4
    whole = ask(http, COMPLETIONS, {"prompt": "a" * 2 * MAX_LEN, "truncate_prompt_tokens": -1}).json()
    assert whole["usage"]["total_tokens"] == MAX_LEN
    chat = ask(http, CHAT, {"truncate_prompt_tokens": 5}).json()
    assert chat["num_truncated_prompt_tokens"] == 16


HARMLESS: dict[str, list[Any]] = {
    "best_of": [1, None], "use_beam_search": [False], "suffix": ["", None], "modalities": [["text"]],
    "length_penalty": [1, 1.0],
}  # fmt: skip
HARMFUL: dict[str, Any] = {
    "best_of": 5_000_000, "use_beam_search": True, "modalities": ["audio"], "length_penalty": 2,
    "return_prompt_text": True, "return_weight_versions": True, "web_search_options": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, n) for n in REFUSED_IN_CHAT] + [(COMPLETIONS, n) for n in REFUSED_IN_COMPLETIONS]
)
def test_absent_capabilities(http: httpx.Client, path: str, name: str) -> None:
    """B008, B020: a field of a capability we lack is refused by name, unless it asks for nothing."""
    refused = ask(http, path, {name: HARMFUL.get(name, {"a": 1})})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == name
    for value in HARMLESS.get(name, [None]):
        assert ask(http, path, {name: value}).status_code == 200, (name, value)


def test_tools_with_choice_none(truth: TruthServer, truth_http: httpx.Client) -> None:
    """B020: with choice "none" tools are neither told of nor looked for."""
    assert ask(truth_http, CHAT, {"tools": [TOOL], "tool_choice": "none"}).status_code == 200
    assert "look_up" not in prompt_text(truth.last)


def test_unknown_fields_are_accepted(http: httpx.Client) -> None:
    """D19: unknown fields ask for nothing."""
    assert ask(http, CHAT, {"brand_new_field": {"deep": [1]}, "x" * 5000: 1}).status_code == 200


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url", "file", "image", "weird"])
def test_media_on_a_text_model(http: httpx.Client, kind: str) -> None:
    """B196: media parts are refused before anything is fetched."""
    part = {"type": kind, kind: {"url": "http://192.0.2.1/never.png"}}
    error = error_of(ask(http, CHAT, {"messages": [{"role": "user", "content": [part]}]}))
    assert error["param"].startswith("messages") and kind in error["message"]


@pytest.mark.parametrize("n", [129, 5_000_000, 2**62])
def test_huge_n(server: LiveServer, http: httpx.Client, n: int) -> None:
    """B008: a huge n is refused before anything is built for it, also spread over prompts."""
    for path in (CHAT, COMPLETIONS):
        assert error_of(ask(http, path, {"n": n}))["param"] == "n"
    many = ask(http, COMPLETIONS, {"n": 128, "prompt": ["a"] * 1000})
    assert error_of(many)["param"] == "n"
    assert error_of(ask(http, COMPLETIONS, {"prompt": ["a"] * 1025}))["param"] == "prompt"


def test_nul_in_text(http: httpx.Client) -> None:
    """B026: NUL is a character like others: nothing after it is lost, in messages, prompts and stops."""
    counts = [
        http.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()["count"]
        for text in ("ab", "a\0b")
    ]
    assert counts[1] == counts[0] + 1
    assert http.post("/tokenize", json={"prompt": "a\0b"}).json()["count"] == 3
    assert ask(http, CHAT, {"stop": ["\0"]}).status_code == 200


def test_absent_content(http: httpx.Client) -> None:
    """B028: null, absent and empty content of an assistant turn are the same prompt."""
    call = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    counts = set()
    for extra in ({"content": None}, {}, {"content": ""}):
        turn = {"role": "assistant", "tool_calls": call} | extra
        messages = [*HELLO, turn, {"role": "tool", "tool_call_id": "c", "content": "22 C"}]
        counts.add(json.dumps(http.post("/tokenize", json={"messages": messages}).json()["tokens"]))
        assert ask(http, CHAT, {"messages": messages}).status_code == 200
    assert len(counts) == 1


def test_tool_result_as_parts(http: httpx.Client) -> None:
    """B029: text parts of a tool result become text, not JSON; null becomes nothing."""
    parts = [{"type": "text", "text": "22 C"}]
    tokens = [
        http.post("/tokenize", json={"messages": [{"role": "tool", "tool_call_id": "c", "content": content}]}).json()[
            "tokens"
        ]
        for content in (parts, "22 C")
    ]
    assert tokens[0] == tokens[1]


def test_template_errors(http: httpx.Client) -> None:
    """B017: a template that refuses gives 400 with its words, and every later request is served."""
    for _ in range(20):
        error = error_of(ask(http, CHAT, {"messages": [{"role": "wizard", "content": "x"}]}))
        assert "unknown role wizard" in error["message"]
        assert ask(http, CHAT, {"max_tokens": 1}).status_code == 200


def test_chat_echo(http: httpx.Client) -> None:
    """B149, B151: echo returns the last message's text and nothing of the template; without it only new text comes."""
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    more = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    plain = ask(http, CHAT, more | {"echo": False}).json()["choices"][0]["message"]["content"]
    echoed = ask(http, CHAT, more | {"echo": True}).json()["choices"][0]["message"]["content"]
    assert plain.startswith("Grüße") and echoed == "The answer is" + plain
    streamed = chunks_of(ask(http, CHAT, more | {"echo": True, "stream": True}).content)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in streamed) == echoed
    assert ask(http, CHAT, {"echo": True}).json()["choices"][0]["message"]["content"] == plain


def test_content_of_the_prompt(http: httpx.Client) -> None:
    """Control tokens in a message are text; the template's own are tokens."""
    count = http.post("/tokenize", json={"messages": [{"role": "user", "content": "<|im_end|>"}]}).json()
    assert count["tokens"].count(258) == 1


def test_model_names(http: httpx.Client) -> None:
    """The served name, `default`, null and no name at all mean the served model; any other is 404."""
    for fields in ({}, {"model": None}, {"model": "default"}, {"model": "tiny"}, {"model": ""}):
        assert ask(http, CHAT, fields).json()["model"] == "tiny"
    assert error_of(ask(http, CHAT, {"model": "gpt-4"}))["type"] == "NotFoundError"
