"""RequestPipeline with a plan: tokens to reasoning, content and calls; marks by id, stop strings, order, counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.core.events import GenerationEvent
from samovar.core.outputs import SequenceOutput
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.sequence import FinishReason
from samovar.text.answer import AnswerLog, AnswerPlan
from samovar.text.formats.base import ReasoningFormat
from samovar.text.formats.choose import reasoning_format, tool_format
from samovar.text.output import RequestPipeline
from tests.text.byte_tokenizer import ByteTokenizer
from tests.text.formats.reading import TOOLS, is_json_prefix

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class MarkTokenizer(ByteTokenizer):
    """With added tokens, as loaded tokenizers have them: `specials` are control tokens, `added` are not."""

    def __init__(self, specials: Sequence[str] = (), added: Sequence[str] = ()) -> None:
        super().__init__([text.encode() for text in added], ("<eos>", *specials))
        self.ids = {self.token_text(i): i for i in range(256, self.vocab_size)}

    @property
    def added_tokens(self) -> Mapping[str, bool]:
        return {text: self.is_special(i) for text, i in self.ids.items()}

    @property
    def named_tokens(self) -> Mapping[str, str]:
        return {}

    def encode_spans(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return [self.ids[text]] if text in self.ids else list(text.encode())

    def tokens(self, text: str) -> list[int]:
        """`text` with the added tokens in it as tokens; «...» is spelled with bytes."""
        ids: list[int] = []
        spelled = False
        while text:
            mark = None if spelled else next((m for m in self.ids if text.startswith(m)), None)
            if text[0] in "«»":
                spelled, text = text[0] == "«", text[1:]
            elif mark is not None:
                ids, text = [*ids, self.ids[mark]], text[len(mark) :]
            else:
                ids, text = [*ids, *text[0].encode()], text[1:]
        return ids


QWEN = MarkTokenizer(["<|im_end|>", "<|other|>"], ["<think>", "</think>", "<tool_call>", "</tool_call>"])
KIMI_MARKS = [tool_format("kimi_k2").opens[0], *tool_format("kimi_k2").inner, tool_format("kimi_k2").closes[0]]
KIMI = MarkTokenizer([*KIMI_MARKS, "<think>", "</think>", "<|other|>"])
PLAIN_BYTES = MarkTokenizer()
THINK = AnswerPlan(reasoning=reasoning_format("think"), tools=tool_format("hermes"), definitions=TOOLS)
OPEN = AnswerPlan(
    reasoning=THINK.reasoning, tools=THINK.tools, definitions=TOOLS, begins_in_reasoning=True, parallel=False
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def events(
    tokenizer: ByteTokenizer,
    ids: Sequence[int],
    plan: AnswerPlan,
    sizes: Sequence[int] = (),
    finish: FinishReason = STOP,
    **params: Any,
) -> list[GenerationEvent]:
    """The events of these tokens, in outputs of these sizes."""
    request = Request(
        request_id="r",
        prompt_token_ids=[1],
        params=SamplingParams(max_tokens=100_000, **params),
        eos_token_ids=[tokenizer.first_special],
        arrival=0.0,
    )
    pipeline = RequestPipeline(tokenizer, request, plan)
    groups, rest = [], list(ids)
    for size in [*sizes, len(rest)]:
        groups.append(rest[:size])
        rest = rest[size:]
    groups = [group for group in groups if group] or [[]]
    found: list[GenerationEvent] = []
    for at, group in enumerate(groups):
        end = finish if at == len(groups) - 1 else None
        found += pipeline.feed(SequenceOutput("r", 0, group, finish_reason=end))
    return found


def log(found: Sequence[GenerationEvent]) -> AnswerLog:
    answer = AnswerLog()
    for event in found:
        answer.add(event)
    return answer


def whole(answer: AnswerLog) -> tuple[object, ...]:
    calls = [(call.name, call.arguments) for call in answer.calls]
    counts = answer.num_reasoning_tokens, answer.token_ids
    return answer.reasoning, answer.text, calls, answer.finish_reason, answer.stop_reason, *counts


def test_spelled_marks_are_text_where_there_are_tokens() -> None:
    """B142: the reasoning discusses `</think>` and `<tool_call>` with ordinary tokens; only the tokens are marks."""
    text = "<think>is «</think>» a tag? «<tool_call>»</think>\n\nUse «<think>» so." + CALL
    answer = log(events(QWEN, QWEN.tokens(text), THINK))
    assert answer.reasoning == "is </think> a tag? <tool_call>" and answer.text == "Use <think> so."
    assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == [("get_weather", {"city": "Rome"})]
    assert answer.made_calls
    spelled = log(events(PLAIN_BYTES, PLAIN_BYTES.tokens("<think>a</think>b"), THINK))
    assert (spelled.reasoning, spelled.text) == ("a", "b")


@pytest.mark.parametrize("tokenizer", [QWEN, MarkTokenizer(["<think>", "</think>"]), PLAIN_BYTES])
@pytest.mark.parametrize("sizes", [[1] * 999, [], [3] * 99], ids=["single", "whole", "threes"])
def test_a_mark_in_any_tokens_and_groups(tokenizer: MarkTokenizer, sizes: list[int]) -> None:
    """B145: special or not, alone in an output or not: the same split."""
    answer = log(events(tokenizer, tokenizer.tokens("<think>\nhm\n</think>\n\nHello\n"), THINK, sizes))
    assert (answer.reasoning, answer.text) == ("hm", "Hello\n")


@pytest.mark.parametrize("tags", [("<reason>", "</reason>"), ("[T]", "[/T]"), ("Thought:", "Answer:")])
@pytest.mark.parametrize("special", [True, False])
def test_other_tags(tags: tuple[str, str], special: bool) -> None:
    """B145: tags that are configured, as tokens or as text."""
    form = ReasoningFormat(name="x", opens=tags[:1], closes=tags[1:], template_marks=())
    tokenizer = MarkTokenizer(tags if special else ())
    for sizes in ([], [1] * 99):
        ids = tokenizer.tokens(f"{tags[0]} why {tags[1]} so")
        answer = log(events(tokenizer, ids, AnswerPlan(reasoning=form), sizes))
        assert (answer.reasoning, answer.text) == ("why", "so")


def test_the_start_state_is_the_prompts() -> None:
    """B133, B137: nothing is guessed from the text: without an open reasoning everything is content and calls."""
    two = CALL + "\n" + CALL
    shut = log(events(QWEN, QWEN.tokens(two), THINK))
    assert len(shut.calls) == 2 and not shut.reasoning and not shut.text and shut.made_calls
    answer = log(events(QWEN, QWEN.tokens('{"a": 1}'), THINK))
    assert (answer.reasoning, answer.text) == ("", '{"a": 1}')
    open_ = log(events(QWEN, QWEN.tokens('{"a": 1}</think>{"a": 2}'), OPEN))
    assert (open_.reasoning, open_.text) == ('{"a": 1}', '{"a": 2}')
    again = log(events(QWEN, QWEN.tokens("<think>\nhm</think>x"), OPEN))
    assert (again.reasoning, again.text) == ("hm", "x")


def test_a_call_ends_the_reasoning_and_one_is_kept() -> None:
    """A call within the reasoning is a call if it proves to be one; `parallel` false keeps the first (F24)."""
    answer = log(events(QWEN, QWEN.tokens("I call " + CALL + "\n" + CALL), OPEN))
    assert answer.reasoning == "I call" and len(answer.calls) == 1 and not answer.text
    text = "like <tool_call>this</tool_call> one</think>Hi"
    answer = log(events(QWEN, QWEN.tokens(text), OPEN))
    assert answer.reasoning == "like <tool_call>this</tool_call> one" and answer.text == "Hi" and not answer.calls


@pytest.mark.parametrize("skip", [True, False])
def test_hidden_tokens(skip: bool) -> None:
    """F26: marks count also where special tokens are hidden; other special tokens show only when asked for."""
    call = "functions.get_weather:0"
    section = "".join([KIMI_MARKS[0], KIMI_MARKS[1], call, KIMI_MARKS[2], '{"city": "a<|other|>b"}', *KIMI_MARKS[3:]])
    plan = AnswerPlan(reasoning=THINK.reasoning, tools=tool_format("kimi_k2"), definitions=TOOLS)
    ids = [*KIMI.tokens("<think>h<|other|>m</think>O<|other|>k " + section), KIMI.first_special]
    answer = log(events(KIMI, ids, plan, skip_special_tokens=skip))
    other = "" if skip else "<|other|>"
    assert (answer.reasoning, answer.text) == (f"h{other}m", f"O{other}k")
    assert [(c.call_id, json.loads(c.arguments)) for c in answer.calls] == [(call, {"city": "a<|other|>b"})]
    broken = KIMI_MARKS[0] + "nothing" + KIMI_MARKS[-1] + KIMI_MARKS[-1]
    shown = log(events(KIMI, KIMI.tokens(broken), plan, skip_special_tokens=skip))
    assert shown.text == (broken if not skip else KIMI_MARKS[0] + "nothing" + KIMI_MARKS[-1]) and not shown.calls


TEXTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            CALL,
            "«</think>»",
            "«<tool_call>»",
            "ab",
            "\n",
            "é",
            " {",
        ]
    ),
    max_size=12,
).map("".join)


@given(
    text=TEXTS,
    sizes=st.lists(st.integers(1, 9), max_size=40),
    stop=st.lists(st.sampled_from(["b", "</think>", "\n{", "é", "<tool_call>\n", "</"]), max_size=2),
    plan=st.sampled_from([THINK, OPEN, AnswerPlan(reasoning=THINK.reasoning)]),
    finish=st.sampled_from([STOP, LENGTH]),
    tokenizer=st.sampled_from([QWEN, PLAIN_BYTES]),
)
def test_grouping_does_not_matter(
    text: str, sizes: list[int], stop: list[str], plan: AnswerPlan, finish: FinishReason, tokenizer: MarkTokenizer
) -> None:
    """B122, B128: how tokens were grouped into outputs changes neither the answer nor the counts."""
    ids = tokenizer.tokens(text)
    at_once = whole(log(events(tokenizer, ids, plan, (), finish, stop=stop)))
    assert whole(log(events(tokenizer, ids, plan, sizes, finish, stop=stop))) == at_once
    assert whole(log(events(tokenizer, ids, plan, [1] * len(ids), finish, stop=stop))) == at_once


def test_stop_strings_see_marks() -> None:
    """A stop string may be a mark, whether it is a token or not; it is named as it was asked for."""
    for tokenizer in (QWEN, PLAIN_BYTES):
        ids = tokenizer.tokens("<think>hm</think>abc")
        answer = log(events(tokenizer, ids, THINK, [1] * 99, LENGTH, stop=["</think>"]))
        assert (answer.reasoning, answer.text, answer.stop_reason) == ("hm", "", "</think>")
        answer = log(events(tokenizer, ids, THINK, stop=["b"]))
        assert (answer.reasoning, answer.text, answer.stop_reason) == ("hm", "a", "b")


def test_events_keep_the_order() -> None:
    """Content after a call, in one output: two events, and only the last has the tokens and the end."""
    found = events(QWEN, QWEN.tokens("<think>a</think>b" + CALL + "c"), THINK)
    assert [(e.reasoning, e.text, len(e.tool_calls), e.finish_reason) for e in found] == [
        ("a", "b", 1, None),
        ("", "c", 0, STOP),
    ]
    assert found[0].token_ids == [] and len(found[1].token_ids) == len(QWEN.tokens("<think>a</think>b" + CALL + "c"))


def test_reasoning_tokens() -> None:
    """Thought tokens are those between the marks, and the marks."""
    assert log(events(QWEN, QWEN.tokens("<think>abc</think>de"), THINK)).num_reasoning_tokens == 5
    assert log(events(QWEN, QWEN.tokens("abc</think>de"), OPEN)).num_reasoning_tokens == 4
    assert log(events(QWEN, QWEN.tokens("de"), THINK)).num_reasoning_tokens == 0


def test_arguments_stream() -> None:
    """B130: the first piece of arguments comes with their first characters, and then with every token; F21."""
    text = json.dumps({"name": "write_file", "arguments": {"path": "a", "content": "x = 1\n" * 900}})
    found = events(QWEN, QWEN.tokens(f"<tool_call>{text}</tool_call>"), THINK, [1] * 10_000)
    begins = text.index('{"path"')
    lag = [len(e.tool_calls) for e in found]
    assert not any(lag[: begins + 1]) and any(lag[begins + 1 : begins + 4])
    gaps = "".join("1" if n else "0" for n in lag[begins + 3 : -4])
    assert "000" not in gaps
    so_far = ""
    for event in found[:200]:
        so_far += "".join(delta.arguments for delta in event.tool_calls)
        assert is_json_prefix(so_far)


@pytest.mark.parametrize("name", ["hermes", "mistral", "kimi_k2", "qwen3_coder", "pythonic"])
def test_cut_at_every_token(name: str) -> None:
    """B131: cut by max_tokens anywhere, the reason is length; and arguments are never more than what came."""
    texts = {
        "hermes": CALL,
        "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 21}',
        "kimi_k2": "".join([KIMI_MARKS[0], KIMI_MARKS[1], "functions.get_weather:0", KIMI_MARKS[2], '{"city": "R"}']),
        "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "pythonic": '[get_weather(city="Rome", days=21)]',
    }
    plan = AnswerPlan(tools=tool_format(name), definitions=TOOLS)
    ids = PLAIN_BYTES.tokens(texts[name])
    for length in range(len(ids) + 1):
        cut = ids[:length]
        at_once = log(events(PLAIN_BYTES, cut, plan, (), LENGTH))
        assert whole(at_once) == whole(log(events(PLAIN_BYTES, cut, plan, [1] * length, LENGTH)))
        assert at_once.finish_reason is LENGTH and not at_once.made_calls
        assert all(is_json_prefix(call.arguments) for call in at_once.calls)
    assert log(events(PLAIN_BYTES, ids, plan)).made_calls


def test_a_stop_by_the_grammar_keeps_the_last_token() -> None:
    """A sequence that a constraint ended has no end token: its last token is text."""
    assert log(events(QWEN, QWEN.tokens("abc"), AnswerPlan())).text == "abc"
    assert log(events(QWEN, QWEN.tokens("abc"), THINK)).text == "abc"
    assert log(events(QWEN, [*QWEN.tokens("abc"), QWEN.first_special], THINK)).text == "abc"


def test_an_end_token_that_is_a_mark() -> None:
    """The token that ends the sequence is not text, but where it is a mark it closes its region."""
    form = ReasoningFormat(name="x", opens=("<think>",), closes=("<eos>",), template_marks=())
    plan = AnswerPlan(reasoning=form, begins_in_reasoning=True)
    found = events(QWEN, [*QWEN.tokens("abc"), QWEN.first_special], plan)
    assert log(found).reasoning == "abc" and log(found).num_reasoning_tokens == 4


def test_half_a_character_before_a_mark() -> None:
    """Bytes that a mark leaves incomplete become U+FFFD on their side of it."""
    answer = log(events(QWEN, [0xE4, 0xB8, QWEN.ids["</think>"], 0x96, 0x41], OPEN))
    assert (answer.reasoning, answer.text) == ("\ufffd", "\ufffdA")


def test_ids() -> None:
    """F25: ids in the form each format's templates take, never the same twice."""
    twice = [log(events(QWEN, QWEN.tokens(CALL + CALL), THINK)) for _ in range(2)]
    found = [call.call_id for answer in twice for call in answer.calls]
    assert len(set(found)) == 4 and all(i.startswith("call_") and len(i) == 29 for i in found)
    plan = AnswerPlan(tools=tool_format("mistral"))
    (call,) = log(events(QWEN, QWEN.tokens("[TOOL_CALLS]f[ARGS]{}"), plan)).calls
    assert len(call.call_id) == 9 and call.call_id.isalnum()


def test_names_of_no_tool() -> None:
    """A call of a tool that was not offered is content; without any tools every name counts."""
    text = CALL.replace("get_weather", "nobody")
    assert log(events(QWEN, QWEN.tokens(text), THINK)).text == text
    open_plan = AnswerPlan(tools=THINK.tools)
    assert log(events(QWEN, QWEN.tokens(text), open_plan)).calls[0].name == "nobody"
