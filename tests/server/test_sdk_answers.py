"""The official openai SDK, sync: tools, thoughts and structured output, with its own parse helpers and accumulators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion

from tests.server.test_truth_chat import CHOICES
from tests.server.truth_table import CALLS, CASES, TOOLS, Case, TruthServer, prompt_text


class GetWeather(pydantic.BaseModel):
    """Weather of a city."""

    city: str


class Answer(pydantic.BaseModel):
    """What the schema cases say."""

    a: int


FUNCTIONS: list[Any] = [
    {"type": "function", "function": {"name": n, "description": d, "parameters": p}} for n, d, p in TOOLS
]
STRICT: list[Any] = [
    {"type": "function", "function": {"name": n, "description": d, "parameters": p, "strict": True}}
    for n, d, p in TOOLS
]


@pytest.fixture(scope="module")
def sdk(truth: TruthServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{truth.live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def case_of(tools: str, *, think: str = "on", schema: bool = False, calls: bool = True) -> Case:
    return next(c for c in CASES if (c.tools, c.think, c.schema, bool(c.calls)) == (tools, think, schema, calls))


def asking(case: Case) -> Any:
    return [{"role": "user", "content": case.question}]


def on(case: Case) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": case.think == "on"}}


def calls_of(answer: ChatCompletion) -> list[tuple[str, str]]:
    calls = answer.choices[0].message.tool_calls or []
    assert all(call.type == "function" for call in calls)
    return [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]


@pytest.mark.parametrize("tools", ["auto", "required", "named"])
@pytest.mark.parametrize("definitions", [FUNCTIONS, STRICT], ids=["loose", "strict"])
def test_tools(sdk: openai.OpenAI, tools: str, definitions: Any) -> None:
    """F23 to F25: parallel calls, ids of their own, in every mode."""
    case = case_of(tools)
    answer = sdk.chat.completions.create(
        model="tiny", messages=asking(case), tools=definitions, tool_choice=CHOICES[tools], extra_body=on(case)
    )
    assert calls_of(answer) == list(case.calls) and answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    ids = [call.id for call in answer.choices[0].message.tool_calls or []]
    assert len(set(ids)) == len(case.calls)


def test_no_parallel_calls(sdk: openai.OpenAI) -> None:
    """F24: parallel_tool_calls false keeps the first call."""
    case = case_of("auto")
    answer = sdk.chat.completions.create(
        model="tiny", messages=asking(case), tools=FUNCTIONS, parallel_tool_calls=False, extra_body=on(case)
    )
    assert calls_of(answer) == [CALLS[0]]


def test_strict_auto_has_a_grammar(sdk: openai.OpenAI, truth: TruthServer) -> None:
    """A strict tool is enforced also where the model may choose; a loose one leaves it free."""
    case = case_of("auto")
    for tools, is_enforced in ((FUNCTIONS, False), (STRICT, True), ([STRICT[0], FUNCTIONS[1]], True)):
        sdk.chat.completions.create(model="tiny", messages=asking(case), tools=tools, extra_body=on(case))
        assert (truth.last.constraint is not None) == is_enforced


def test_allowed_tools(sdk: openai.OpenAI, truth: TruthServer) -> None:
    """Only the allowed tools are told of and may be called."""
    case = case_of("named")
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    answer = sdk.chat.completions.create(
        model="tiny", messages=asking(case), tools=FUNCTIONS, extra_body=on(case),
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )  # fmt: skip
    assert calls_of(answer) == list(case.calls)


def test_stream_accumulator(sdk: openai.OpenAI) -> None:
    """The SDK's own accumulator ends with the same message, and parses the arguments of strict tools."""
    for tools in ("auto", "required", "named"):
        case = case_of(tools)
        with sdk.chat.completions.stream(
            model="tiny", messages=asking(case), tools=STRICT, tool_choice=CHOICES[tools], extra_body=on(case)
        ) as events:
            kinds = {event.type for event in events}
            final = events.get_final_completion()
        assert {"chunk", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        assert calls_of(final) == list(case.calls) and final.choices[0].finish_reason == "tool_calls"
        assert [c.function.parsed_arguments for c in final.choices[0].message.tool_calls or []] == [
            json.loads(arguments) for _, arguments in case.calls
        ]


def test_parse_tools(sdk: openai.OpenAI) -> None:
    """`parse` with a pydantic tool gives an instance of it."""
    case = case_of("named")
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    parsed = sdk.chat.completions.parse(model="tiny", messages=asking(case), tools=[tool], extra_body=on(case))
    (call,) = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Rome")


@pytest.mark.parametrize("think", ["on", "off", "absent"])
def test_parse_schema(sdk: openai.OpenAI, think: str) -> None:
    """`parse` with a pydantic response_format, streamed as well; thoughts do not get in the way."""
    case = case_of("absent", schema=True, think=think, calls=False)
    extra = on(case) if think != "absent" else {}
    parsed = sdk.chat.completions.parse(model="tiny", messages=asking(case), response_format=Answer, extra_body=extra)
    assert parsed.choices[0].message.parsed == Answer(a=1)
    with sdk.chat.completions.stream(
        model="tiny", messages=asking(case), response_format=Answer, extra_body=extra
    ) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.parsed == Answer(a=1)


def test_reasoning_is_readable(sdk: openai.OpenAI) -> None:
    """`reasoning` and `reasoning_content` reach the SDK's extra fields; usage counts it."""
    case = case_of("absent", calls=False)
    answer = sdk.chat.completions.create(model="tiny", messages=asking(case), reasoning_effort="high")
    extra = answer.choices[0].message.model_extra or {}
    assert extra["reasoning"] == extra["reasoning_content"] == case.reasoning
    assert answer.usage and answer.usage.completion_tokens_details
    assert (answer.usage.completion_tokens_details.reasoning_tokens or 0) >= len(case.reasoning)


def test_a_whole_turn(sdk: openai.OpenAI, truth: TruthServer) -> None:
    """Calls, their results, and the thought before them go back into the next prompt."""
    case = case_of("auto", think="absent")
    first = sdk.chat.completions.create(model="tiny", messages=asking(case), tools=FUNCTIONS)
    message = first.choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {at}"}
        for at, call in enumerate(message.tool_calls or [])
    ]
    history: list[Any] = [*asking(case), message.model_dump(exclude_none=True), *results]
    sdk.chat.completions.create(model="tiny", messages=history, tools=FUNCTIONS)
    prompt = prompt_text(truth.last)
    assert case.says.strip() in prompt  # thought and calls stand there as the model wrote them
    assert "result 0" in prompt and "result 1" in prompt


def test_functions_of_2023(sdk: openai.OpenAI) -> None:
    """functions and function_call in, function_call out, whole and streamed."""
    case = case_of("named")
    functions: Any = [tool["function"] for tool in FUNCTIONS]
    asked: dict[str, Any] = {
        "model": "tiny", "messages": asking(case), "functions": functions, "function_call": {"name": "get_weather"},
        "extra_body": on(case),
    }  # fmt: skip
    answer = sdk.chat.completions.create(**asked)
    call = answer.choices[0].message.function_call
    assert call is not None and (call.name, call.arguments) == CALLS[0]
    assert answer.choices[0].finish_reason == "function_call" and not answer.choices[0].message.tool_calls
    name, arguments, finish = "", "", None
    for chunk in sdk.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta.function_call
        name += (delta and delta.name) or ""
        arguments += (delta and delta.arguments) or ""
        finish = chunk.choices[0].finish_reason
    assert (name, arguments) == CALLS[0] and finish == "function_call"


def test_refusals(sdk: openai.OpenAI) -> None:
    """What cannot be is refused by name."""
    hello: Any = [{"role": "user", "content": "hi"}]
    bad: list[tuple[str, dict[str, Any]]] = [
        ("tool_choice", {"tools": FUNCTIONS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tools", {"tools": [FUNCTIONS[0], FUNCTIONS[0]]}),
        ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
        ("functions", {"functions": [{"name": "a"}], "tools": FUNCTIONS}),
        ("guided_regex", {"extra_body": {"guided_regex": "a", "response_format": {"type": "json_object"}}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ]
    for param, fields in bad:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.chat.completions.create(model="tiny", messages=hello, **fields)
        assert (caught.value.param or "").startswith(param), (param, caught.value.message)
