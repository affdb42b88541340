"""Arguments in tags, as they stream: every beginning is a beginning of JSON, and they come as they are written."""

from __future__ import annotations

import json
import random

import pytest

from samovar.core.tools import ToolCallDelta, ToolDefinition
from samovar.text.answer import AnswerPlan
from samovar.text.formats import gemma4, harmony, qwen3_coder
from samovar.text.formats.choose import tool_format
from samovar.text.marks import Alphabet
from samovar.text.regions import RegionParser
from tests.text.formats.reading import TOOLS, is_json_prefix, joined, read

LINES = "".join(f'    print("line {n}: <b> & {{x}} \\\\n ü日😀")\n' for n in range(130))
D = "｜DSML｜"
LONG_CALLS = {
    "qwen3_coder": "<tool_call>\n<function=write_file>\n<parameter=content>\n@@\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=write_file>\n<parameter=content>@@</parameter>\n</function>\n</seed:tool_call>",
    "glm4": "<tool_call>write_file\n<arg_key>content</arg_key>\n<arg_value>@@</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="content">@@</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v32": f'<{D}function_calls>\n<{D}invoke name="write_file">\n<{D}parameter name="content" string="true">@@'
    f"</{D}parameter>\n</{D}invoke>\n</{D}function_calls>",
    "gemma4": '<|tool_call>call:write_file{content:<|"|>@@<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:write_file{content:<escape>@@<escape>}<end_function_call>",
    "harmony": '<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>{"content": @@}<|call|>',
}
"""A call of each format; "@@" is where the value of its argument stands."""


def call_with(name: str, value: str) -> tuple[str, str]:
    """The call with this argument, and how the argument is written in it."""
    written = json.dumps(value, ensure_ascii=False) if name == "harmony" else value
    return LONG_CALLS[name].replace("@@", written), written


assert len(LINES) > 5000


@pytest.mark.parametrize("name", LONG_CALLS)
def test_a_long_string_comes_as_it_is_written(name: str) -> None:
    """B122, B130: 5 KB in one argument. No five chunks in a row bring nothing, and the pieces are the whole."""
    text, written = call_with(name, LINES)
    start = text.index(written)
    parser = RegionParser(AnswerPlan(tools=tool_format(name), definitions=TOOLS))
    rng, given, silent, at = random.Random(name), "", 0, 0
    while at < len(text):
        size = rng.randint(1, 6)
        news = parser.feed(text[at : at + size])
        at += size
        given += "".join(item.arguments for item in news if isinstance(item, ToolCallDelta))
        assert is_json_prefix(given)
        silent = 0 if news else silent + 1
        assert silent <= 5 or not start + 5 < at < start + len(written), (at, text[at - 30 : at])
        if start + 30 < at <= start + len(written):
            assert len(given) > at - start - 30
    parser.finish(truncated=False)
    assert json.loads(given) == {"content": LINES}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_cut_anywhere_arguments_are_the_beginning_of_json(name: str) -> None:
    """F21: after each character, and wherever generation ends."""
    text, _ = call_with(name, 'a "b"\n<c>')
    plan = AnswerPlan(tools=tool_format(name), definitions=TOOLS)
    complete = [piece for piece in read(plan, [text]) if piece[0] == "call"]
    for at in range(len(text)):
        calls = [piece for piece in read(plan, [text[:at]], truncated=True) if piece[0] == "call"]
        assert all(is_json_prefix(call[2]) and complete[0][2].startswith(call[2]) for call in calls)


def test_an_argument_with_types_waits_only_while_it_may_be_something_else() -> None:
    tool = ToolDefinition(name="f", parameters={"properties": {"a": {"type": ["string", "null"]}}})
    reader = qwen3_coder.FORMAT.read({"f": tool})
    list(reader.feed("\n<function=f>\n<parameter=a>\nnul"))
    assert list(reader.feed("l")) == []
    assert "".join(getattr(piece, "text", "") for piece in reader.feed("ify")) == '"nullify'


THOUGHT = "<|channel>thought\nHm.\n<channel|>"
CALL = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'


@pytest.mark.parametrize(
    ("text", "begins", "expected"),
    [
        (THOUGHT + "Hi!", False, [("thought", "Hm."), ("said", "Hi!")]),
        ("Hm.<channel|>Hi!", True, [("thought", "Hm."), ("said", "Hi!")]),
        ("thought\nHm.<channel|>Hi!", True, [("thought", "Hm."), ("said", "Hi!")]),
        ("<|channel>thought\n<channel|>Hi!", False, [("said", "Hi!")]),
        ("<|channel>thought<channel|>Hi!", False, [("thought", "thought"), ("said", "Hi!")]),
        (THOUGHT + CALL, False, [("thought", "Hm."), ("call", "get_weather", '{"city": "Rome"}')]),
        ("<|channel>thought\nHm." + CALL, False, [("thought", "Hm."), ("call", "get_weather", '{"city": "Rome"}')]),
        ("Hi!", False, [("said", "Hi!")]),
    ],
)
def test_the_thoughts_of_gemma_4(text: str, begins: bool, expected: list[tuple[str, ...]]) -> None:
    plan = AnswerPlan(tools=gemma4.FORMAT, reasoning=gemma4.REASONING, begins_in_reasoning=begins, definitions=TOOLS)
    assert read(plan, [text]) == expected
    assert read(plan, list(text)) == expected


def test_marks_that_are_tokens_count_only_as_tokens() -> None:
    """B142: a tag spelled with ordinary tokens within a value is text of the value."""
    alphabet = Alphabet({1: ("<tool_call>", True), 2: ("</tool_call>", True)})
    parser = RegionParser(AnswerPlan(tools=qwen3_coder.FORMAT, definitions=TOOLS), alphabet)
    news = parser.feed_mark("<tool_call>")
    news += parser.feed("\n<function=get_weather>\n<parameter=city>\n</tool_call>\n</parameter>\n</function>\n")
    news += parser.feed_mark("</tool_call>") + parser.finish(truncated=False)
    assert joined(news) == [("call", "get_weather", '{"city": "</tool_call>"}')]


@pytest.mark.parametrize("has_tools", [True, False])
def test_harmony_without_tools_makes_no_calls(has_tools: bool) -> None:
    """With choice "none" a call is text; thoughts are thoughts in both cases, and counted as such."""
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.ping<|message|>{}<|call|>"
    plan = AnswerPlan(tools=harmony.FORMAT if has_tools else None, reasoning=harmony.REASONING, definitions=TOOLS)
    call = ("call", "ping", "{}") if has_tools else ("said", "{}")
    assert read(plan, list(text)) == [("thought", "Hm."), call]
    parser = RegionParser(plan)
    parser.feed(text[:31])
    assert parser.is_thinking
    parser.feed(text[31:])
    assert not parser.is_thinking


def test_a_prompt_may_end_within_the_thoughts_of_harmony() -> None:
    plan = AnswerPlan(reasoning=harmony.REASONING, begins_in_reasoning=True)
    assert read(plan, ["Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"]) == [
        ("thought", "Hm."),
        ("said", "Hi"),
    ]
