"""Answers that went wrong elsewhere: malformed calls, spelled marks, broken histories, long arguments, many streams."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from samovar.core.request import Request
from tests.server.scripted_engine import encode
from tests.server.test_truth_chat import accumulated
from tests.server.truth_table import (
    CALLS,
    CASES,
    TOOLS,
    TruthServer,
    call_text,
    encode_marked,
    prompt_text,
    scripted_server,
)
from tests.server.wire import CHAT, chunks_of, stream

FUNCTIONS = [{"type": "function", "function": {"name": n, "description": d, "parameters": p}} for n, d, p in TOOLS]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ON = {"chat_template_kwargs": {"enable_thinking": True}}
SAID: dict[str, list[int]] = {}
"""What the scripted model says to a user message, by the message."""


def _script(request: Request, index: int) -> list[int]:
    prompt = prompt_text(request)
    question = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return SAID.get(question, encode("Fine."))


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        scripted_server(tmp_path_factory.mktemp("hard"), _script) as server,
        httpx.Client(base_url=server.live.url, timeout=60, verify=False) as client,
    ):
        yield client


def both(http: httpx.Client, tokens: list[int], **fields: Any) -> tuple[dict[str, Any], str]:
    """The answer when the model says these tokens; whole and streamed must be the same."""
    question = f"question {len(SAID)}"
    SAID[question] = tokens
    body = {"messages": [{"role": "user", "content": question}], "tools": FUNCTIONS} | OFF | fields
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    message, finish = accumulated(stream(http, CHAT, **body))
    whole = choice["message"]
    assert finish == choice["finish_reason"]
    assert [c["function"] for c in whole.get("tool_calls", [])] == [
        c["function"] for c in message.get("tool_calls", [])
    ]
    assert (whole["content"] or "", whole.get("reasoning")) == (message["content"] or "", message.get("reasoning"))
    return whole, finish


GOOD = call_text(CALLS[0])
ENDINGS = (
    "", "\nDone.", "</tool_call>", "\n<tool_call>", "\n<tool_call>{", "}}}}", "<think>", "</think>x",
    '\n<tool_call>\n{"name": "get_time", "arg',
)  # fmt: skip
BROKEN = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}\n</tool_call>', "<tool_call>\n</tool_call>",
    '<tool_call>{"name": "get_weather"}</tool_call>', "<tool_call>[1, 2]</tool_call>", "<tool_call>get_weather(1)",
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"arguments": {}, "name": "nobody"}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": "{}"}</tool_call>', "<tool_call>" * 3, "{" * 400, '"' * 50,
    '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud800"}}</tool_call>',
)  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS, ids=range(len(ENDINGS)))
@pytest.mark.parametrize("start", [GOOD, f"Hm. {GOOD}\n{call_text(CALLS[1])}", *BROKEN], ids=range(2 + len(BROKEN)))
def test_malformed(http: httpx.Client, start: str, ending: str) -> None:
    """B125, B136: whatever a model writes is an answer, the same in both modes; what does not parse is content."""
    message, finish = both(http, encode_marked(start + ending))
    calls = message.get("tool_calls", [])
    made = any(_is_object(call["function"]["arguments"]) for call in calls)
    assert finish == ("tool_calls" if made else "stop")
    if start == GOOD:
        assert calls[0]["function"] == {"name": CALLS[0][0], "arguments": CALLS[0][1]}
    if not calls:
        assert message["content"] is not None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_spelled_marks(http: httpx.Client) -> None:
    """B142: marks spelled with ordinary tokens are text, in thoughts and in content."""
    thought = "The tag </think> ends it, <tool_call> calls."
    tokens = encode(thought) + encode_marked("</think>") + encode("Say <think> and </think> and " + GOOD)
    message, finish = both(http, tokens, **ON)
    assert message["reasoning"] == thought and finish == "stop"
    assert message["content"] == "Say <think> and </think> and " + GOOD and "tool_calls" not in message


@pytest.mark.parametrize("arguments", ["{", "", "null", "not json", "[1]", '{"city": "Rome"}'])
def test_history_with_broken_arguments(http: httpx.Client, arguments: str) -> None:
    """B134: an agent's history with arguments that a model broke is answered, with and without tools."""
    turn = {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}],
    }  # fmt: skip
    for more in ({"tools": FUNCTIONS}, {}):
        result = {"role": "tool", "tool_call_id": "c", "content": "22 C"}
        body = {"messages": [{"role": "user", "content": "hi"}, turn, result]} | more
        assert http.post(CHAT, json=body).status_code == 200


def test_arguments_come_as_they_are_made(http: httpx.Client) -> None:
    """B130: a file of 5 KB arrives in pieces, the first of them at once."""
    text = "".join(random.Random(1).choices("abc \\n\u00e9", k=3000)).replace("\\", "")
    tokens = encode_marked(call_text(("get_weather", json.dumps({"city": text}, ensure_ascii=False))))
    question = f"question {len(SAID)}"
    SAID[question] = tokens
    body = {"messages": [{"role": "user", "content": question}], "tools": FUNCTIONS, "return_token_ids": True} | OFF
    chunks = stream(http, CHAT, **body)
    gap = longest = 0
    for chunk in chunks[1:]:
        choice = chunk["choices"][0]
        gap += len(choice["token_ids"])
        if any(call["function"].get("arguments") for call in choice["delta"].get("tool_calls", ())):
            longest, gap = max(longest, gap), 0
    assert longest <= 60  # the head of the call, mark and name included
    message, _ = accumulated([{**c} for c in chunks])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": text}


async def test_many_streams_end_well(truth: TruthServer) -> None:
    """B179, B178: 160 streams with tools, 16 at once; each says why it ended, exactly once."""
    wanted = [case for case in CASES if case.tools in ("auto", "required")]
    gate = asyncio.Semaphore(16)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        case = wanted[number % len(wanted)]
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": case.question}], "tools": FUNCTIONS, "stream": True,
            "tool_choice": case.tools,
        }  # fmt: skip
        if case.think != "absent":
            body["chat_template_kwargs"] = {"enable_thinking": case.think == "on"}
        async with gate:
            answer = await client.post(CHAT, json=body)
        message, finish = accumulated(chunks_of(answer.content))
        assert finish == ("tool_calls" if case.calls else "stop")
        assert len(message.get("tool_calls", [])) == len(case.calls)

    async with httpx.AsyncClient(base_url=truth.live.url, timeout=60, verify=False) as client:
        await asyncio.gather(*(one(client, number) for number in range(160)))


HOSTILE: list[dict[str, Any]] = [
    {"guided_regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000})b"},
    {"guided_regex": "(a|" * 4000 + "b" + ")" * 4000},
    {"guided_grammar": "start: " + " ".join(f"r{i}" for i in range(3000))},
    {"guided_choice": [f"choice {i}" for i in range(50_000)]},
    {"json_schema": {"properties": {f"p{i}": {"type": "string", "pattern": "(a|b)*c{500}"} for i in range(300)}}},
    {"json_schema": {"$ref": "#"}}, {"json_schema": {"$ref": "#/x"}},
]  # fmt: skip


async def test_hostile_forms(truth: TruthServer) -> None:
    """A form is taken or refused by name, never a 5xx, and a stream beside all of them goes on without a pause."""
    hello = [{"role": "user", "content": "hi"}]
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=truth.live.url, timeout=60, verify=False) as client:
        asked = [asyncio.ensure_future(client.post(CHAT, json={"messages": hello} | form | OFF)) for form in HOSTILE]
        longest, last = 0.0, loop.time()
        while not all(one.done() for one in asked):
            await client.post(CHAT, json={"messages": hello, "max_tokens": 2} | OFF)
            longest, last = max(longest, loop.time() - last), loop.time()
    for form, one in zip(HOSTILE, asked, strict=True):
        answer = one.result()
        assert answer.status_code in (200, 400), answer.text[:200]
        if answer.status_code == 400:
            assert answer.json()["error"]["param"].startswith(next(iter(form))), answer.text[:300]
    assert longest < 1.5
    assert sum(one.result().status_code == 400 for one in asked) >= 4
