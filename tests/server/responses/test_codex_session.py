"""Pain 16: a coding agent's session, turn after turn: always 200, complete events, stable ids, history that comes back."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import openai

from tests.server.responses.checker import check_stream, events_of
from tests.server.responses.codex_session import SCRIPT, TOOLS, as_history, output_of, request, user
from tests.server.responses.conftest import PATH, Talker


def test_session(talker: Talker) -> None:
    """B181, B182, B184: the whole loop, as raw events."""
    items: list[dict[str, Any]] = [user("Make x a string.")]
    ids: set[str] = set()
    prompts: list[str] = []
    for says, kinds in SCRIPT:
        talker.says = says
        answer = talker.http.post(PATH, json=request(items), headers={"accept": "text/event-stream"})
        assert answer.status_code == 200, answer.text
        events = events_of(answer.content)
        last = check_stream(events)
        assert last["status"] == "completed" and [item["type"] for item in last["output"]] == kinds
        assert last["store"] is False and last["prompt_cache_key"] and last["service_tier"] == "default"
        for skipped in (
            "web_search",
            "local_shell",
            "image_generation",
            "tool_search",
            "summary",
            "encrypted",
            "apply_patch",
        ):
            assert any(skipped in notice for notice in last["notices"]), skipped
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == last["output"]
        new = {item["id"] for item in done} | {item["call_id"] for item in done if "call_id" in item}
        assert len(new) == len(done) + sum("call_id" in item for item in done) and not new & ids
        ids |= new
        items += [as_history(item) for item in done]
        items += [output_of(item) for item in done if "call_id" in item]
        prompts.append(talker.prompt)
    for shorter, longer in itertools.pairwise(prompts):
        head = shorter.removesuffix("<|im_start|>assistant\n<think>\n")
        assert longer.startswith(head), "the history of a turn does not begin with the turn before: no prefix is reused"
    final = prompts[-1]
    assert "mcp__docs__lookup" in final and "*** Begin Patch" in final and "a.py\nexit code 0" in final
    assert final.count("<|im_start|>system") == 2, "tools, and one message with all instructions"


def test_session_through_the_sdk(talker: Talker) -> None:
    """The same with the official SDK's accumulator, over a chain of stored responses."""
    previous: Any = openai.omit
    pending: list[dict[str, Any]] = [user("Make x a string.")]
    for says, kinds in SCRIPT:
        talker.says = says
        body = {k: v for k, v in request(pending).items() if k not in ("stream", "store", "client_metadata")}
        with talker.sdk.responses.stream(**body, previous_response_id=previous) as events:
            events.until_done()
            final = events.get_final_response()
        assert [item.type for item in final.output] == kinds
        previous = final.id
        pending = [output_of(item.to_dict()) for item in final.output if hasattr(item, "call_id")]
    assert len(msgspec.json.encode(TOOLS)) > 1000
