"""RequestPipeline: engine outputs to events, the same however tokens are grouped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.core.events import GenerationEvent
from samovar.core.outputs import SequenceOutput, SequenceTiming, TokenLogprobs
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.sequence import FinishReason
from samovar.errors import ValidationError
from samovar.text.output import RequestPipeline
from tests.text.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer([b" the", "世界".encode()[:4], b"\n\n", b".\n\nx"], ["<eos>"])
EOS = TOKENIZER.first_special


def request(**params: Any) -> Request:
    params.setdefault("max_tokens", 1000)
    return Request(
        request_id="r", prompt_token_ids=[1], params=SamplingParams(**params), eos_token_ids=[EOS], arrival=0.0
    )


def outputs(
    ids: list[int], sizes: list[int], finish: FinishReason | None, stop_reason: int | None = None
) -> list[SequenceOutput]:
    """The ids in groups; the last group carries the end."""
    groups: list[list[int]] = []
    rest = list(ids)
    for size in [*sizes, len(ids)]:
        if rest or not groups:
            groups.append(rest[: max(size, 1)])
            rest = rest[max(size, 1) :]
    news = [SequenceOutput("r", 0, group) for group in groups]
    news[-1].finish_reason, news[-1].stop_reason = finish, stop_reason
    news[-1].timing = SequenceTiming(arrival=1.0)
    return news


def run(pipeline: RequestPipeline, news: list[SequenceOutput]) -> list[GenerationEvent]:
    return [event for output in news for event in pipeline.feed(output)]


def whole(events: list[GenerationEvent]) -> tuple[str, list[int], FinishReason | None, int | str | None]:
    text = "".join(event.text for event in events)
    ids = [token for event in events for token in event.token_ids]
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    return text, ids, events[-1].finish_reason, events[-1].stop_reason


TOKENS = st.lists(st.sampled_from([*b"ab\n", 0xE4, 0xB8, 0x96, 256, 257, 258, 259, EOS]), min_size=1, max_size=25)


@given(
    ids=TOKENS,
    sizes=st.lists(st.integers(1, 5), max_size=25),
    stop=st.lists(st.text("ab\n x", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]),
)
def test_grouping_does_not_matter(
    ids: list[int], sizes: list[int], stop: list[str], min_tokens: int, include: bool, finish: FinishReason
) -> None:
    """B031, B037, B049, B050: streamed in any groups == all at once; and never more tokens than were needed."""
    params = {"stop": stop, "min_tokens": min_tokens, "include_stop_str_in_output": include}
    streamed = whole(run(RequestPipeline(TOKENIZER, request(**params)), outputs(ids, sizes, finish)))
    at_once = whole(run(RequestPipeline(TOKENIZER, request(**params)), outputs(ids, [], finish)))
    single = whole(run(RequestPipeline(TOKENIZER, request(**params)), outputs(ids, [1] * 30, finish)))
    assert streamed == at_once == single
    if not stop:
        shown = ids[:-1] if finish is FinishReason.STOP and ids[-1] == EOS and not include else ids
        assert at_once == (TOKENIZER.decode(shown), ids, finish, None)


def test_stop_string_ends_a_choice() -> None:
    """B031, B037: text is cut, later outputs are dropped, and the engine's side is named once for aborting."""
    pipeline = RequestPipeline(TOKENIZER, request(stop=["\n\n"]))
    (first,) = pipeline.feed(SequenceOutput("r", 0, [*b"ab", 259, *b"more"]))
    assert (first.text, first.finish_reason, first.stop_reason) == ("ab.", FinishReason.STOP, "\n\n")
    assert first.token_ids == [*b"ab", 259]
    assert pipeline.take_stopped() == [0] and pipeline.take_stopped() == [] and pipeline.is_finished
    assert pipeline.feed(SequenceOutput("r", 0, [*b"z"], finish_reason=FinishReason.LENGTH)) == []


def test_engine_ended_already() -> None:
    """B031: a stop string in the last output needs no abort; it is the reason that counts."""
    pipeline = RequestPipeline(TOKENIZER, request(stop=["b"]))
    (event,) = pipeline.feed(SequenceOutput("r", 0, [*b"ab"], finish_reason=FinishReason.LENGTH))
    assert (event.text, event.stop_reason) == ("a", "b")
    assert pipeline.take_stopped() == []


def test_choices_are_apart() -> None:
    """B035: every choice has its own buffers."""
    pipeline = RequestPipeline(TOKENIZER, request(n=2, temperature=1.0, stop=["ab"]))
    tokens = ((0, 0x61), (1, 0x62), (1, 0x63), (0, 0x62))
    events = [event for index, token in tokens for event in pipeline.feed(SequenceOutput("r", index, [token]))]
    assert [e.text for e in events] == ["", "b", "c", ""]
    assert pipeline.take_stopped() == [0] and not pipeline.is_finished


def test_stop_and_eos_tokens_are_not_text() -> None:
    """B040, B043: a stop token is among the ids and not in the text, unless asked for; eos shows only when not skipped."""
    cases: list[tuple[int, int | None, dict[str, Any], str]] = [
        (0x7A, 0x7A, {}, "a"),
        (0x7A, 0x7A, {"include_stop_str_in_output": True}, "az"),
        (EOS, None, {"include_stop_str_in_output": True}, "a"),
        (EOS, None, {"include_stop_str_in_output": True, "skip_special_tokens": False}, "a<eos>"),
        (EOS, None, {"skip_special_tokens": False}, "a"),
    ]
    for token, reason, params, text in cases:
        pipeline = RequestPipeline(TOKENIZER, request(stop_token_ids=[0x7A], **params))
        got = whole(run(pipeline, outputs([0x61, token], [1], FinishReason.STOP, reason)))
        assert got == (text, [0x61, token], FinishReason.STOP, reason)


def test_held_back_text_comes_with_the_end() -> None:
    """B031, B032: what might have become a stop string is delivered when it cannot any more."""
    events = run(RequestPipeline(TOKENIZER, request(stop=["abc"])), outputs([*b"xab"], [1, 1, 1], FinishReason.LENGTH))
    assert [event.text for event in events] == ["x", "", "ab"]


def test_no_delay_with_long_stops() -> None:
    """B032: each token's text is in its own event when no stop string can have begun."""
    events = run(
        RequestPipeline(TOKENIZER, request(stop=["z" * 40])), outputs([*b"hello"], [1] * 5, FinishReason.LENGTH)
    )
    assert [event.text for event in events] == list("hello")


def test_min_tokens_and_stop_strings() -> None:
    """B041, B043: no stop string counts in the first min_tokens tokens; one that lies behind them does."""
    for text, shown in ((b"aXbXcXd", "aXbXc"), (b"aXbcdX", "aXbcd"), (b"XXXX", "XXXX")):
        events = run(
            RequestPipeline(TOKENIZER, request(stop=["X"], min_tokens=4)),
            outputs([*text], [1] * 9, FinishReason.LENGTH),
        )
        assert "".join(event.text for event in events) == shown
        assert sum(len(event.token_ids) for event in events) >= 4


@pytest.mark.parametrize("kept", range(1, 7))
def test_max_tokens_inside_a_character(kept: int) -> None:
    """B050: finish `length` inside a character: one U+FFFD, the same streamed and at once."""
    ids = list("世界".encode())[:kept]
    whole_chars, rest = divmod(kept, 3)
    expected = "世界"[:whole_chars] + ("\ufffd" if rest else "")
    for sizes in ([], [1] * 6):
        got = whole(run(RequestPipeline(TOKENIZER, request()), outputs(ids, sizes, FinishReason.LENGTH)))
        assert got == (expected, ids, FinishReason.LENGTH, None)


def test_logprobs() -> None:
    """B052, B059: tokens that are no text have replacement text and raw bytes; entries follow the tokens they belong to."""
    pipeline = RequestPipeline(TOKENIZER, request(logprobs=2, prompt_logprobs=1, stop=["b"]))
    entry = TokenLogprobs([0xE4, 0x61, 256], [-0.5, -0.1, -0.2], 3)
    output = SequenceOutput("r", 0, [0xE4, 0x62, 0x63], logprobs=[entry, entry, entry])
    output.prompt_logprobs = [None, TokenLogprobs([0x80, 0x61], [-9.0, -1.0], 77)]
    (event,) = pipeline.feed(output)
    assert event.logprobs is not None and event.prompt_logprobs is not None
    assert len(event.logprobs) == len(event.token_ids) == 2
    chosen, top = event.logprobs[0].chosen, event.logprobs[0].top
    assert (chosen.token_id, chosen.text, chosen.raw, chosen.logprob, chosen.rank) == (0xE4, "\ufffd", b"\xe4", -0.5, 3)
    assert [(e.text, e.raw, e.rank) for e in top] == [("a", b"a", 1), (" the", b" the", 2)]
    assert event.prompt_logprobs[0] is None and event.prompt_logprobs[1] is not None
    assert event.prompt_logprobs[1].chosen.rank == 77
    for position in event.logprobs:
        for e in (position.chosen, *position.top):
            assert isinstance(e.text, str) and e.text.encode() and isinstance(e.raw, bytes)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_without_text(tokenizer: ByteTokenizer | None) -> None:
    """B059: `detokenize` off, or no tokenizer: ids only, no text, entries still complete."""
    params: dict[str, Any] = {"logprobs": 0} | ({"detokenize": False} if tokenizer is not None else {})
    pipeline = RequestPipeline(tokenizer, request(**params))
    (event,) = pipeline.feed(SequenceOutput("r", 0, [0x61, 0xE4], logprobs=[TokenLogprobs([0x61], [-1.0], 1)] * 2))
    assert event.text == "" and event.token_ids == [0x61, 0xE4]
    assert event.logprobs is not None and event.logprobs[0].chosen.token_id == 0x61


def test_errors_and_figures_pass_through() -> None:
    """B055: an engine error ends the choice with its message; timing and cached tokens are handed on."""
    pipeline = RequestPipeline(TOKENIZER, request())
    output = SequenceOutput("r", 0, [], num_cached_tokens=7, finish_reason=FinishReason.ERROR, error="row failed")
    output.timing = SequenceTiming(arrival=3.0)
    (event,) = pipeline.feed(output)
    assert (event.finish_reason, event.error, event.num_cached_tokens) == (FinishReason.ERROR, "row failed", 7)
    assert event.timing is not None and event.timing.arrival == 3.0


def test_max_tokens_zero() -> None:
    """B056: a prompt scored without generating: an event with the end and no token."""
    pipeline = RequestPipeline(TOKENIZER, request(max_tokens=0, stop=["a"]))
    (event,) = pipeline.feed(SequenceOutput("r", 0, [], finish_reason=FinishReason.LENGTH))
    assert (event.text, event.token_ids, event.finish_reason) == ("", [], FinishReason.LENGTH)


@pytest.mark.parametrize("stop", ["", [""], [None], ["", "END"], [b"x"], 3])
def test_bad_stop_entries_are_refused(stop: Any) -> None:
    """B034, B035: an empty or non-string entry is refused by name, so that none is dropped and none shifts."""
    with pytest.raises(ValidationError) as error:
        SamplingParams(stop=stop)
    assert error.value.parameter == "stop"
    assert SamplingParams(stop=None).stop == [] and SamplingParams(stop=[]).stop == []  # type: ignore[arg-type]
