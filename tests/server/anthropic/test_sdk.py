"""The official anthropic SDK over real sockets: messages, accumulators, tools, thinking, beta client, counts, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pydantic
import pytest

from tests.server.anthropic.conftest import Stage
from tests.server.anthropic.wire import HELLO

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALLING = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
THOUGHT = "<think>\nWhat is it?\n</think>\n\nIt is this."


def test_create(stage: Stage) -> None:
    """A whole answer."""
    stage.say("Hello, wörld 🙂.", cached=16)
    answer = stage.sdk.messages.create(model="tiny", max_tokens=100, messages=HELLO, system="Be nice.")
    assert [block.type for block in answer.content] == ["text"] and answer.content[0].text == "Hello, wörld 🙂."  # type: ignore[union-attr]
    assert answer.id.startswith("msg_") and answer.role == "assistant" and answer.model == "tiny"
    assert answer.stop_reason == "end_turn" and answer.stop_sequence is None
    usage = answer.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert total == len(stage.server.engine.requests[-1].prompt_token_ids) and usage.cache_read_input_tokens == 16
    assert usage.output_tokens == len("Hello, wörld 🙂.".encode()) + 1
    assert answer._request_id is not None and answer._request_id.startswith("req_")


def test_stream_accumulates_to_the_same_message(stage: Stage) -> None:
    """The SDK's accumulator, its text stream and its typed events."""
    whole = stage.sdk.messages.create(model="tiny", max_tokens=100, messages=HELLO)
    with stage.sdk.messages.stream(model="tiny", max_tokens=100, messages=HELLO) as events:
        assert "".join(events.text_stream) == "Hello, wörld 🙂."
        final = events.get_final_message()
    assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    raw = stage.sdk.messages.create(model="tiny", max_tokens=100, messages=HELLO, stream=True)
    kinds = [event.type for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tools_round_trip(stage: Stage) -> None:
    """B188, D41: calls come as tool_use blocks with stop_reason tool_use; results go back under the same id."""
    stage.say(CALLING)
    messages: list[Any] = [{"role": "user", "content": "Weather in Zürich?"}]
    for streams in (False, True):
        asking: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": messages, "tools": [WEATHER]}
        if streams:
            with stage.sdk.messages.stream(**asking) as events:
                snapshots = [e.snapshot for e in events if e.type == "input_json"]
                answer: Any = events.get_final_message()
            assert snapshots[-1] == {"city": "Zürich", "days": 2}
        else:
            answer = stage.sdk.messages.create(**asking)
        assert answer.stop_reason == "tool_use"
        text, call = answer.content
        assert text.text.strip() == "I look."
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Zürich", "days": 2})
        assert call.id.startswith("toolu_")
    assert '"name": "get_weather"' in stage.prompt.partition("Weather in")[0]

    stage.say("It rains.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    follow = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    second = stage.sdk.messages.create(model="tiny", max_tokens=500, messages=follow, tools=[WEATHER])
    assert second.content[0].text == "It rains." and second.stop_reason == "end_turn"  # type: ignore[union-attr]
    own = call.id.removeprefix("toolu_").replace("_5f_", "_")
    assert f"<tool_call>{own} " in stage.prompt and f"rain for {own} get_weather" in stage.prompt


@pytest.mark.parametrize("streams", [False, True])
def test_thinking(stage: Stage, streams: bool) -> None:
    """Thinking is a block of its own, first, signed; it is taken back, and counted."""
    stage.say(THOUGHT)
    asking: dict[str, Any] = {
        "model": "tiny", "max_tokens": 3000, "messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    if streams:
        with stage.sdk.messages.stream(**asking) as events:
            kinds = [e.type for e in events]
            answer: Any = events.get_final_message()
        assert "thinking" in kinds and "signature" in kinds
    else:
        answer = stage.sdk.messages.create(**asking)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking.strip() == "What is it?" and answer.content[0].signature
    assert answer.content[1].text.strip() == "It is this."
    assert answer.usage.output_tokens_details.thinking_tokens >= len("What is it?")
    constraint = stage.server.engine.requests[-1].constraint
    assert constraint is not None and constraint.reasoning is not None and constraint.reasoning.budget == 1024

    follow = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "go on"}]
    stage.sdk.messages.create(model="tiny", max_tokens=3000, messages=follow)
    assert "<think>\n" in stage.prompt and "What is it?" in stage.prompt


def test_beta_client(stage: Stage) -> None:
    """?beta=true, the anthropic-beta header, and what only the beta client sends."""
    answer = stage.sdk.beta.messages.create(
        model="tiny",
        max_tokens=3000,
        messages=HELLO,
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "adaptive"},
        output_config={"effort": "medium"},
        metadata={"user_id": "user_1_account__session_2"},
        service_tier="auto",
    )
    assert answer.content[0].text == "Hello, wörld 🙂."  # type: ignore[union-attr]
    assert answer.context_management is not None and answer.context_management.applied_edits == []
    with stage.sdk.beta.messages.stream(
        model="tiny",
        max_tokens=100,
        messages=HELLO,
        context_management={"edits": []},
    ) as events:
        assert events.get_final_message().content[0].text == "Hello, wörld 🙂."  # type: ignore[union-attr]


async def test_async_client(stage: Stage) -> None:
    """The asynchronous client, with a stop sequence."""
    stage.say("One, two, three.")
    async with anthropic.AsyncAnthropic(base_url=stage.server.url, api_key="none", max_retries=0) as sdk:
        answer = await sdk.messages.create(model="tiny", max_tokens=50, messages=HELLO, stop_sequences=["two", "x"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")
        async with sdk.messages.stream(model="tiny", max_tokens=5, messages=HELLO) as events:
            final = await events.get_final_message()
        assert final.content[0].text == "One, " and final.stop_reason == "max_tokens"  # type: ignore[union-attr]


def test_structured_output(stage: Stage) -> None:
    """output_config.format becomes a grammar; the SDK parses what comes."""
    stage.say('{"city": "Bern"}')
    form: Any = {"type": "json_schema", "schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
    answer = stage.sdk.messages.create(model="tiny", max_tokens=50, messages=HELLO, output_config={"format": form})
    assert answer.content[0].text == '{"city": "Bern"}'  # type: ignore[union-attr]
    constraint = stage.server.engine.requests[-1].constraint
    assert constraint is not None and constraint.grammar is not None


class City(pydantic.BaseModel):
    """What the SDK's parse helper makes of an answer."""

    name: str
    size: int


def test_parse_helper(stage: Stage) -> None:
    """messages.parse: a pydantic model becomes the schema, and the answer an object of it."""
    stage.say('{"name": "Bern", "size": 3}')
    parsed = stage.sdk.messages.parse(model="tiny", max_tokens=50, messages=HELLO, output_format=City)
    assert parsed.parsed_output == City(name="Bern", size=3)
    with stage.sdk.messages.stream(model="tiny", max_tokens=50, messages=HELLO, output_format=City) as events:
        assert events.get_final_message().parsed_output == City(name="Bern", size=3)


def test_schema_that_cannot_be_enforced(stage: Stage) -> None:
    """Refused by the caller's own name for the field."""
    schema = {"type": "object", "properties": {"a": {"$dynamicRef": "#x"}}}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema: .*dynamicRef"):
        stage.sdk.messages.create(model="tiny", max_tokens=5, messages=HELLO, output_config=form)


def test_tool_runner(stage: Stage) -> None:
    """The beta client's loop: it calls the function, sends the result, and ends with the answer."""
    called: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """The weather of a place."""
        called.append(f"{city} {days}")
        stage.say("It rains.")
        return "rain"

    stage.say(CALLING)
    runner = stage.sdk.beta.messages.tool_runner(model="tiny", max_tokens=500, messages=HELLO, tools=[get_weather])
    final = runner.until_done()
    assert called == ["Zürich 2"] and final.content[0].text == "It rains."  # type: ignore[union-attr]


@pytest.mark.parametrize("extra", [{}, {"tools": [WEATHER]}, {"system": [{"type": "text", "text": "Be nice."}]}])
def test_count_tokens(stage: Stage, extra: dict[str, Any]) -> None:
    """B187: counts are the prompt's length, and what an answer reports."""
    call: Any = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "x"}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    thought: Any = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages: Any = [*HELLO, {"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
    counted = stage.sdk.messages.count_tokens(model="tiny", messages=messages, **extra)
    beta = stage.sdk.beta.messages.count_tokens(model="tiny", messages=messages, **extra)
    stage.say("x", cached=32)
    answer = stage.sdk.messages.create(model="tiny", max_tokens=5, messages=messages, **extra)
    total = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == beta.input_tokens == total == len(stage.server.engine.requests[-1].prompt_token_ids)
    with stage.sdk.messages.stream(model="tiny", max_tokens=5, messages=messages, **extra) as events:
        start = next(e for e in events if e.type == "message_start").message.usage
    assert start.input_tokens + (start.cache_read_input_tokens or 0) == total and start.cache_read_input_tokens == 32


def test_count_tokens_beyond_the_context(stage: Stage) -> None:
    """A client asks whether it fits: what does not is counted, and refused only as a message."""
    messages: Any = [{"role": "user", "content": "x" * 70_000}]
    assert stage.sdk.messages.count_tokens(model="tiny", messages=messages).input_tokens > 70_000
    with pytest.raises(anthropic.BadRequestError, match="context holds"):
        stage.sdk.messages.create(model="tiny", max_tokens=5, messages=messages)


def test_errors(stage: Stage) -> None:
    """The SDK's exceptions."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        stage.sdk.messages.create(model="claude-opus-4-1", max_tokens=5, messages=HELLO)
    assert missing.value.type == "not_found_error" and "--anthropic-model-aliases" in str(missing.value)
    with pytest.raises(anthropic.BadRequestError) as wrong:
        stage.sdk.messages.create(model="tiny", max_tokens=-1, messages=HELLO)
    assert wrong.value.type == "invalid_request_error" and "max_tokens" in str(wrong.value)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        stage.sdk.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": [image]}])


def test_prefill(stage: Stage) -> None:
    """The answer goes on where the last message ends."""
    messages: Any = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    stage.sdk.messages.create(model="tiny", max_tokens=5, messages=messages)
    assert stage.prompt.endswith("The answer is")


def test_max_tokens_zero_reads_the_prompt(stage: Stage) -> None:
    """max_tokens 0 warms the cache and says nothing."""
    answer = stage.sdk.messages.create(model="tiny", max_tokens=0, messages=HELLO)
    assert answer.content == [] and answer.usage.output_tokens == 0 and answer.stop_reason == "max_tokens"
