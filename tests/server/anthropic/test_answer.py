"""MessageWriter: the order of events, and that an answer does not depend on how its events were cut."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.core.events import GenerationEvent
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.sequence import FinishReason
from samovar.core.tools import ToolCallDelta
from samovar.server.anthropic.answer import MessageWriter, fold, frame
from samovar.server.anthropic.partial_json import complete_members
from samovar.server.anthropic.schema import Message, MessagesRequest, StreamEvent, Thinking
from samovar.server.anthropic.stream_rules import StreamOrderError, StreamRules
from samovar.server.anthropic.tool_ids import own_id, public_id
from samovar.server.pacing import Pacer
from samovar.server.problems import ChoiceFailedError
from tests.server.anthropic.wire import events_of, joined

ASKED = MessagesRequest(model="m", max_tokens=1000, messages=[Message(role="user", content="hi")])


def _request(max_tokens: int = 1000) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=[1] * 40,
        params=SamplingParams(max_tokens=max_tokens),
        eos_token_ids=[2],
        arrival=0.0,
    )


def _writer(asked: MessagesRequest = ASKED, max_tokens: int = 1000, context: int = 10_000) -> MessageWriter:
    return MessageWriter(asked, _request(max_tokens), "m", "msg_1", context=context)


def _run(pieces: list[GenerationEvent], writer: MessageWriter | None = None) -> list[StreamEvent]:
    writer = writer or _writer()
    return [event for piece in pieces for event in writer.feed(piece)]


def _end(reason: FinishReason = FinishReason.STOP, stop: int | str | None = None) -> GenerationEvent:
    return GenerationEvent(0, token_ids=[2], finish_reason=reason, stop_reason=stop)


def _call(index: int, name: str, arguments: str) -> list[GenerationEvent]:
    opening = GenerationEvent(0, token_ids=[5], tool_calls=[ToolCallDelta(index, f"call_{index}", name)])
    return [
        opening,
        *(GenerationEvent(0, token_ids=[6], tool_calls=[ToolCallDelta(index, arguments=c)]) for c in arguments),
    ]


parts = st.lists(
    st.one_of(
        st.tuples(st.just("reasoning"), st.text(min_size=1, max_size=8)),
        st.tuples(st.just("text"), st.text(min_size=1, max_size=8)),
        st.tuples(st.just("text"), st.sampled_from([" ", "\n\n", "\t"])),
        st.tuples(
            st.just("call"), st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=4), max_size=3)
        ),
    ),
    max_size=7,
)


@given(parts, st.data())
def test_any_cut_gives_the_same_message(said: list[tuple[str, Any]], data: st.DataObject) -> None:
    """Character by character or at once: the same message, in the published order, streamed or not."""
    fine, coarse, calls = [], [], 0
    for kind, content in said:
        if kind == "call":
            arguments = json.dumps(content)
            fine += _call(calls, "tool", arguments)
            coarse.append(
                GenerationEvent(
                    0,
                    token_ids=[5] + [6] * len(arguments),
                    tool_calls=[ToolCallDelta(calls, f"call_{calls}", "tool", arguments)],
                )
            )
            calls += 1
        else:
            count = 1 if kind == "reasoning" else 0
            fine += [GenerationEvent(0, token_ids=[1], num_reasoning_tokens=count, **{kind: char}) for char in content]
            coarse.append(
                GenerationEvent(
                    0, token_ids=[1] * len(content), num_reasoning_tokens=count * len(content), **{kind: content}
                )
            )
    fine.append(_end())
    coarse.append(_end())
    first, second = _run(deepcopy(fine)), _run(coarse)
    pacer = Pacer(data.draw(st.integers(1, 8)))
    paced = [event for piece in deepcopy(fine) for event in pacer.take(0, piece)]
    streamed = b"".join(map(frame, _run(paced)))
    message = fold(first)
    # What was known when the message began differs with the cut; what it was when it ended does not.
    assert message == fold(second)
    assert joined(events_of(streamed)) == msgspec.to_builtins(message)
    assert message.stop_reason == ("tool_use" if calls else "end_turn")
    texts = "".join(c for k, c in said if k == "text")
    if not texts.isspace() and not calls and all(k == "text" for k, _ in said):
        assert "".join(b.text for b in message.content) == texts  # type: ignore[union-attr]
    assert all(not b.text.isspace() for b in message.content if b.__struct_config__.tag == "text" and b.text)  # type: ignore[union-attr]


def test_order_of_blocks() -> None:
    """Thinking, text, calls: each its own block, signed, closed, numbered."""
    events = _run(
        [
            GenerationEvent(0, reasoning="hm", token_ids=[1], num_reasoning_tokens=1, num_cached_tokens=32),
            GenerationEvent(0, text="\n\n", token_ids=[1]),
            GenerationEvent(0, text="I look.", token_ids=[1]),
            *_call(0, "look", '{"at": 1}'),
            *_call(1, "look", "{}"),
            _end(),
        ]
    )
    message = msgspec.to_builtins(fold(events))
    signature = message["content"][0].pop("signature")
    assert len(signature) == 32
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "\n\nI look."},
        {"type": "tool_use", "id": public_id("call_0"), "name": "look", "input": {"at": 1}},
        {"type": "tool_use", "id": public_id("call_1"), "name": "look", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == 40
    assert usage["cache_read_input_tokens"] == 32 and usage["output_tokens_details"] == {"thinking_tokens": 1}
    assert usage["output_tokens"] == 3 + 10 + 3 + 1


def test_first_event_waits_for_tokens() -> None:
    """Text of an output may come before its tokens and counts; message_start has the counts all the same."""
    writer = _writer()
    assert writer.feed(GenerationEvent(0, reasoning="a")) == []
    events = writer.feed(GenerationEvent(0, text="b", token_ids=[1, 2], num_cached_tokens=16))
    start = msgspec.to_builtins(events[0])["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"], start["output_tokens"]) == (24, 16, 2)
    assert [e.__struct_config__.tag for e in events[1:]] == [
        "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop", "content_block_start",
        "content_block_delta",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("end", "max_tokens", "expected"),
    [
        (_end(), 1000, ("end_turn", None)),
        (_end(stop=7), 1000, ("end_turn", None)),
        (_end(stop="\n\nHuman:"), 1000, ("stop_sequence", "\n\nHuman:")),
        (_end(FinishReason.LENGTH), 1000, ("max_tokens", None)),
        (_end(FinishReason.LENGTH), 60, ("model_context_window_exceeded", None)),
    ],
)
def test_stop_reasons(end: GenerationEvent, max_tokens: int, expected: tuple[str, str | None]) -> None:
    """D41. The fourth request gets what it asked for, the fifth what is left of the context."""
    message = fold(_run([end], _writer(max_tokens=max_tokens, context=100)))
    assert (message.stop_reason, message.stop_sequence) == expected and message.content == []


def test_cut_call_is_no_tool_use() -> None:
    """B131: a call cut off by max_tokens ends with max_tokens, and has only the members that are whole."""
    for size in range(len('{"a": 12, "b": "xyz"}')):
        events = _run([*_call(0, "f", '{"a": 12, "b": "xyz"}')[: size + 1], _end(FinishReason.LENGTH)])
        message = fold(events)
        assert message.stop_reason == "max_tokens"
        assert message.content[0].input == ({"a": 12} if size > 8 else {})  # type: ignore[union-attr]


def test_aborted_answers_are_errors() -> None:
    """Nothing that the server itself broke off looks like an answer."""
    with pytest.raises(ChoiceFailedError):
        _run([_end(FinishReason.ABORT)])


def test_display_omitted() -> None:
    """Thinking may be left out of sight; its block and signature stay."""
    asked = MessagesRequest(
        model="m", max_tokens=9, messages=ASKED.messages, thinking=Thinking(type="adaptive", display="omitted")
    )
    events = _run([GenerationEvent(0, reasoning="secret", token_ids=[1]), _end()], _writer(asked))
    (block,) = fold(events).content
    assert msgspec.to_builtins(block)["thinking"] == "" and b"secret" not in b"".join(map(frame, events))
    assert msgspec.to_builtins(block)["signature"]


values = st.recursive(st.integers() | st.text(max_size=5) | st.booleans(), lambda inner: st.lists(inner, max_size=3))


@given(st.dictionaries(st.text(max_size=5), values), st.data())
def test_partial_json(value: dict[str, Any], data: st.DataObject) -> None:
    """Every beginning of an object gives its whole members, in order; the whole gives all."""
    text = json.dumps(value)
    assert complete_members(text) == value
    found = complete_members(text[: data.draw(st.integers(0, len(text)))])
    assert list(value.items())[: len(found)] == list(found.items())


@given(st.text(max_size=30))
def test_partial_json_never_raises(text: str) -> None:
    """Models write anything."""
    assert isinstance(complete_members("{" + text), dict)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_tool_ids_go_round(call_id: str) -> None:
    """Any id a format writes becomes one Anthropic's clients take, and comes back."""
    public = public_id(call_id)
    assert public.startswith("toolu_") and all(c.isascii() and (c.isalnum() or c in "_-") for c in public)
    assert own_id(public) == call_id


def test_foreign_tool_ids() -> None:
    """Ids that were made elsewhere keep their identity."""
    foreign = ["toolu_01D7FLrfh4GYq7yT1ULFeyMV", "call_abc", "toolu_a_b", "toolu__"]
    assert len({own_id(i) for i in foreign}) == len(foreign) and own_id("call_abc") == "call_abc"


def test_rules_refuse() -> None:
    """The checker can fail: each of these is out of order."""
    for symbols in (
        [("content_block_start text", 0)],
        [("message_start", None), ("content_block_delta text_delta", 0)],
        [("message_start", None), ("content_block_start text", 1)],
        [("message_start", None), ("content_block_start text", 0), ("content_block_delta input_json_delta", 0)],
        [("message_start", None), ("content_block_start thinking", 0), ("content_block_stop", 0)],
        [("message_start", None), ("content_block_start text", 0), ("message_delta", None)],
        [("message_start", None), ("message_start", None)],
        [("message_start", None), ("message_stop", None)],
        [("ping", None)],
        [("error", None), ("message_start", None)],
    ):
        rules = StreamRules()
        with pytest.raises(StreamOrderError):
            for symbol in symbols:
                rules.advance(*symbol)
