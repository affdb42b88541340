"""The official openai SDK against a real socket: sync, async, streams, n, logprobs, stops, usage, errors, models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.server.conftest import REPLY
from tests.server.live import LiveServer

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_sdk(server: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(sdk: openai.OpenAI) -> None:
    """The list has the real context; one can be fetched by name."""
    listed = sdk.models.list().data
    assert [m.id for m in listed] == ["tiny"] and listed[0].model_extra is not None
    assert listed[0].model_extra["max_model_len"] == 512
    assert sdk.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("other/name")


def test_chat(sdk: openai.OpenAI) -> None:
    """A whole answer with two choices, logprobs and usage."""
    answer = sdk.chat.completions.create(model="tiny", messages=HELLO, n=2, logprobs=True, top_logprobs=2, seed=7)  # type: ignore[arg-type]
    assert [c.message.content for c in answer.choices] == [REPLY, f"{REPLY}1"]
    assert answer.usage is not None and answer.usage.total_tokens == 21 + 37 + 38
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and choice.logprobs is not None
        assert all(len(e.top_logprobs) == 2 for e in choice.logprobs.content or [])
    assert answer.system_fingerprint


def test_chat_stream(sdk: openai.OpenAI) -> None:
    """A stream with two choices and usage at the end."""
    texts, reasons, usage = ["", ""], [None, None], None
    options = {"include_usage": True}
    for chunk in sdk.chat.completions.create(model="default", messages=HELLO, n=2, stream=True, stream_options=options):  # type: ignore[arg-type]
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [REPLY, f"{REPLY}1"] and reasons == ["stop", "stop"]
    assert usage is not None and usage.completion_tokens == 75


def test_accumulating_stream_helper(sdk: openai.OpenAI) -> None:
    """The SDK's own accumulator, which is strict about chunk shapes."""
    with sdk.chat.completions.stream(model="tiny", messages=HELLO) as events:  # type: ignore[arg-type]
        for _ in events:
            pass
        final = events.get_final_completion()
    assert final.choices[0].message.content == REPLY and final.choices[0].finish_reason == "stop"


async def test_async(async_sdk: openai.AsyncOpenAI) -> None:
    """Async, whole and streamed, with a stop string."""
    whole = await async_sdk.chat.completions.create(model="tiny", messages=HELLO, stop=["wörld"])  # type: ignore[arg-type]
    assert whole.choices[0].message.content == "Grüße, " and whole.choices[0].finish_reason == "stop"
    text = ""
    async for chunk in await async_sdk.completions.create(
        model="tiny", prompt="x", stop="wörld", stream=True, max_tokens=60
    ):
        text += chunk.choices[0].text
    assert text == "Grüße, "


def test_completions(sdk: openai.OpenAI) -> None:
    """Prompt lists, echo, logprobs, the default of 16 tokens."""
    answer = sdk.completions.create(model="tiny", prompt=["a", "b"], n=2, echo=True, logprobs=1)
    assert [c.text[:2] for c in answer.choices] == ["aG", "aG", "bG", "bG"]
    assert [c.finish_reason for c in answer.choices] == ["length"] * 4
    assert answer.choices[0].logprobs is not None and len(answer.choices[0].logprobs.tokens or []) == 17
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 64)


def test_errors(sdk: openai.OpenAI) -> None:
    """The SDK reads message and param of our errors."""
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="tiny", messages=HELLO, temperature=9)  # type: ignore[arg-type]
    assert caught.value.param == "temperature" and "temperature" in caught.value.message
