"""The official openai SDK on /v1/responses: create, stream, parse, chains, retrieval, tools, errors."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

from tests.server.responses.conftest import Talker

TOOL: Any = {
    "type": "function", "name": "get_weather", "description": "Weather.", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
    },
}  # fmt: skip
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Answer(pydantic.BaseModel):
    """What `parse` is to make."""

    a: int


def test_create(talker: Talker) -> None:
    """A whole answer: reasoning and message items, usage, echoes of the request."""
    talker.says = "<think>\nHm.\n</think>\n\nHello."
    answer = talker.sdk.responses.create(
        model="tiny",
        input="hi",
        instructions="Be short.",
        metadata={"k": "v"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=99,
    )
    assert answer.status == "completed" and answer.output_text == "Hello." and answer.error is None
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "Hm."  # type: ignore[union-attr, index]
    assert (answer.instructions, answer.metadata, answer.temperature, answer.top_p) == (
        "Be short.",
        {"k": "v"},
        0.5,
        0.9,
    )
    assert (answer.max_output_tokens, answer.store, answer.tool_choice, answer.tools) == (99, True, "auto", [])
    usage = answer.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (
        usage.input_tokens == len(talker.request.prompt_token_ids) and usage.output_tokens_details.reasoning_tokens > 0
    )
    assert "<|im_start|>system\nBe short." in talker.prompt


def test_input_tokens(talker: Talker) -> None:
    """The count is that of the request itself, and nothing runs for it."""
    counted = talker.sdk.responses.input_tokens.count(model="tiny", input="hi", instructions="Be short.", tools=[TOOL])
    assert counted.object == "response.input_tokens"
    talker.says = "Hello."
    answer = talker.sdk.responses.create(model="tiny", input="hi", instructions="Be short.", tools=[TOOL])
    assert answer.usage is not None and counted.input_tokens == answer.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="input"):
        talker.sdk.responses.input_tokens.count(model="tiny", input=3)  # type: ignore[arg-type]


def test_stream_accumulates(talker: Talker) -> None:
    """B181: the SDK's accumulator, strict about order and identity, ends with exactly the final object."""
    talker.says = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
    kinds, arguments = set(), ""
    with talker.sdk.responses.stream(model="tiny", input="hi", tools=[TOOL]) as events:
        for event in events:
            kinds.add(event.type)
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
                assert event.snapshot == arguments
        final = events.get_final_response()
    assert {
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    } <= kinds
    fetched = talker.sdk.responses.retrieve(final.id)
    assert fetched.to_dict() == _unparsed(final.model_dump(mode="json", exclude_unset=True, warnings=False))
    call = final.output[-1]
    assert (
        call.type == "function_call" and call.parsed_arguments == {"city": "Rome"} and arguments == '{"city": "Rome"}'
    )
    assert call.id is not None and call.id.startswith("fc_") and call.call_id.startswith("call_")


def _unparsed(value: Any) -> Any:
    """A response without what the SDK put into it."""
    if isinstance(value, list):
        return [_unparsed(item) for item in value]
    if isinstance(value, dict):
        return {name: _unparsed(item) for name, item in value.items() if name not in ("parsed", "parsed_arguments")}
    return value


def test_parse(talker: Talker) -> None:
    """Structured output through `parse`, whole and streamed: the request carries a grammar."""
    talker.says = '{"a": 7}'
    whole = talker.sdk.responses.parse(model="tiny", input="hi", text_format=Answer, reasoning={"effort": "none"})
    assert whole.output_parsed == Answer(a=7)
    assert talker.request.constraint is not None and talker.request.constraint.grammar
    with talker.sdk.responses.stream(
        model="tiny", input="hi", text_format=Answer, reasoning={"effort": "none"}
    ) as events:
        events.until_done()
        assert events.get_final_response().output_parsed == Answer(a=7)


def test_tool_loop(talker: Talker) -> None:
    """A call, its output as the next input, and the answer: over a chain, and with all items sent again."""
    talker.says = CALL
    first = talker.sdk.responses.create(model="tiny", input="Weather?", tools=[TOOL], tool_choice="required")
    call = first.output[-1]
    assert call.type == "function_call" and first.output_text == ""
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    talker.says = "It is sunny."
    chained = talker.sdk.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[TOOL])
    chained_prompt = talker.prompt
    resent: Any = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), result]
    again = talker.sdk.responses.create(model="tiny", input=resent, tools=[TOOL], store=False)
    assert chained.output_text == again.output_text == "It is sunny."
    assert talker.prompt == chained_prompt and "Sunny." in chained_prompt and '{"city": "Rome"}' in chained_prompt
    with pytest.raises(openai.NotFoundError):
        talker.sdk.responses.retrieve(again.id)


def test_instructions_are_not_inherited(talker: Talker) -> None:
    """A chain brings items, and not the earlier instructions."""
    first = talker.sdk.responses.create(model="tiny", input="one", instructions="Old orders.")
    talker.sdk.responses.create(model="tiny", input="two", instructions="New orders.", previous_response_id=first.id)
    assert "New orders." in talker.prompt and "Old orders." not in talker.prompt
    assert talker.prompt.index("one") < talker.prompt.index("Hello.") < talker.prompt.index("two")


def test_input_items(talker: Talker) -> None:
    """What a response was made from, chain included, in pages; items can be referred to by their ids."""
    first = talker.sdk.responses.create(model="tiny", input="one")
    second = talker.sdk.responses.create(model="tiny", input="two", previous_response_id=first.id)
    items = list(talker.sdk.responses.input_items.list(second.id, order="asc", limit=2))
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr, index]
    assert texts == ["one", "Hello.", "two"]
    newest = talker.sdk.responses.input_items.list(second.id)
    assert [item.id for item in newest.data] == [item.id for item in items[::-1]]
    talker.sdk.responses.create(model="tiny", input=[{"type": "item_reference", "id": str(items[2].id)}])
    assert "two" in talker.prompt and "one" not in talker.prompt


def test_delete(talker: Talker) -> None:
    """A deleted response is gone, and cannot be continued."""
    first = talker.sdk.responses.create(model="tiny", input="one")
    talker.sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        talker.sdk.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        talker.sdk.responses.create(model="tiny", input="two", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_custom_tool(talker: Talker) -> None:
    """A custom tool's call and its output, over two turns."""
    tool: Any = {"type": "custom", "name": "run", "description": "Runs code."}
    talker.says = '<tool_call>\n{"name": "run", "arguments": {"input": "print(1)\\n"}}\n</tool_call>'
    with talker.sdk.responses.stream(model="tiny", input="hi", tools=[tool]) as events:
        events.until_done()
        first = events.get_final_response()
    call = first.output[-1]
    assert call.type == "custom_tool_call" and (call.name, call.input) == ("run", "print(1)\n")
    talker.says = "Done."
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "1"}
    talker.sdk.responses.create(model="tiny", input=[output], previous_response_id=first.id, tools=[tool])
    assert '"input": "print(1)\\n"' in talker.prompt


def test_cut(talker: Talker) -> None:
    """B131: cut by max_output_tokens, in text and inside a call."""
    for says, kind in (("A long answer.", "message"), (CALL, "function_call")):
        talker.says = says
        tokens = 5 if kind == "message" else 50
        answer = talker.sdk.responses.create(model="tiny", input="hi", tools=[TOOL], max_output_tokens=tokens)
        assert answer.status == "incomplete" and answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[-1].type == kind and answer.output[-1].status == "incomplete"  # type: ignore[union-attr]
        assert answer.usage is not None and answer.usage.output_tokens == tokens


def test_logprobs(talker: Talker) -> None:
    """Log-probabilities of the text's tokens, whole and streamed."""
    talker.says = "<think>\nHm.\n</think>\n\nHi"
    body: Any = {"model": "tiny", "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = talker.sdk.responses.create(**body)
    logprobs = answer.output[1].content[0].logprobs  # type: ignore[union-attr, index]
    assert "".join(entry.token for entry in logprobs).strip() == "Hi"
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    streamed = [
        entry for event in talker.sdk.responses.create(**body, stream=True)
        if event.type == "response.output_text.delta" for entry in event.logprobs
    ]  # fmt: skip
    assert [entry.to_dict() for entry in streamed] == [entry.to_dict() for entry in logprobs]


async def test_async(talker: Talker) -> None:
    """The asynchronous client."""
    async with openai.AsyncOpenAI(base_url=f"{talker.live.url}/v1", api_key="none", max_retries=0) as sdk:
        assert (await sdk.responses.create(model="tiny", input="hi")).output_text == "Hello."
        async with sdk.responses.stream(model="tiny", input="hi") as events:
            assert (await events.get_final_response()).output_text == "Hello."


def test_errors(talker: Talker) -> None:
    """The SDK reads message and param."""
    with pytest.raises(openai.BadRequestError) as caught:
        talker.sdk.responses.create(model="tiny", input="hi", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        talker.sdk.responses.create(model="other", input="hi")
