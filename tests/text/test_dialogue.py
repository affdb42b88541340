"""Dialogues: tools and effort in the template's words, where the prompt ends, plans, constraints, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.core.structured import StructuredOutputsParams
from samovar.core.tools import NamedTool, ToolDefinition
from samovar.core.validation import RequestLimits
from samovar.errors import ValidationError
from samovar.text.chat_template import ChatTemplate, RenderedPrompt
from samovar.text.dialogue import Dialogue
from samovar.text.effort import EFFORTS, effort_variables
from samovar.text.formats.base import ReasoningFormat
from samovar.text.formats.choose import choose, reasoning_format, tool_format
from samovar.text.lark import Lark
from samovar.text.prepare import Preparer
from samovar.text.reasoning import prompt_end
from samovar.text.tool_preamble import history_as_text, with_preamble
from samovar.text.tool_schema import choice_from_openai, from_openai
from tests.text.byte_tokenizer import ByteTokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Which."}}}
WEATHER = ToolDefinition(name="weather", description="Weather.", parameters=SCHEMA)
TIME = ToolDefinition(name="time", strict=True)
HELLO = [{"role": "user", "content": "hi"}]
THINK = reasoning_format("think")
QWEN = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments | items %}({{ k }}={{ v }}){% endfor %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
BARE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


class Source:
    """A grammar compiler that writes down what it was asked."""

    def __init__(self) -> None:
        self.checked: list[str] = []

    def lark(self, *, field: str = "structured_outputs") -> Lark:
        return Lark(lambda text: None)

    def structured(self, params: StructuredOutputsParams) -> str:
        lark = self.lark()
        return lark.document(self.json_expression(params, lark))

    def json_expression(self, params: StructuredOutputsParams, lark: Lark) -> str:
        return lark.json(params.json if isinstance(params.json, dict) else None)

    def check(self, grammar: str) -> None:
        self.checked.append(grammar)

    def close(self) -> None:
        self.checked.clear()


def door(template: str = QWEN, **changes: Any) -> Preparer:
    parts: dict[str, Any] = {"formats": (tool_format("hermes"), THINK), "grammar": Source()}
    limits = RequestLimits(vocab_size=257, max_model_len=4096, max_tools=3, max_tools_bytes=2000)
    return Preparer(ByteTokenizer(), ChatTemplate({"default": template}), limits, [256], **(parts | changes))


def prompt(prepared: Any) -> str:
    return bytes(prepared.request.prompt_token_ids).decode()


def refused(field: str, *args: Any, preparer: Preparer | None = None, **fields: Any) -> str:
    with pytest.raises(ValidationError) as error:
        (preparer or door()).from_dialogue(Dialogue(messages=HELLO, **fields), *args)
    assert error.value.parameter is not None and error.value.parameter.startswith(field)
    return str(error.value)


# --- tools


def test_tools_reach_the_template() -> None:
    """Choice none hides them; any other shows all, also a named one."""
    for choice, shown in (("none", ""), ("auto", "[weather][time]"), ("required", "[weather][time]")):
        prepared = door().from_dialogue(Dialogue(messages=HELLO, tools=[WEATHER, TIME], tool_choice=choice))  # type: ignore[arg-type]
        assert prompt(prepared).startswith(shown + "<user>")
        assert (prepared.plan.tools is None) == (choice == "none")
    named = door().from_dialogue(Dialogue(messages=HELLO, tools=[WEATHER, TIME], tool_choice=NamedTool("time")))
    assert prompt(named).startswith("[weather][time]") and set(named.plan.definitions) == {"weather", "time"}
    assert named.request.constraint is not None and '"weather' not in (named.request.constraint.grammar or "")


@pytest.mark.parametrize(
    ("tools", "choice", "structured", "enforced"),
    [
        ([WEATHER], "auto", False, ()),
        ([WEATHER], "none", False, ()),
        ([WEATHER], "none", True, ("a",)),
        ([WEATHER], "required", False, ("weather", "city")),
        ([WEATHER], "auto", True, ("a", "weather")),
        ([WEATHER, TIME], "auto", False, ("weather", "time")),
        ([], "auto", True, ("a",)),
    ],
)
def test_when_a_grammar_is_needed(tools: Any, choice: Any, structured: bool, enforced: tuple[str, ...]) -> None:
    """Structured output, a call that must come, or a strict tool; loose tools beside a strict one keep free arguments."""
    form = StructuredOutputsParams(json={"properties": {"a": {}}}) if structured else None
    preparer = door()
    prepared = preparer.from_dialogue(Dialogue(messages=HELLO, tools=tools, tool_choice=choice, structured=form))
    constraint = prepared.request.constraint
    if not enforced:
        assert constraint is None and isinstance(preparer.grammar, Source) and not preparer.grammar.checked
        return
    assert constraint is not None and constraint.grammar is not None and constraint.reasoning is not None
    assert isinstance(preparer.grammar, Source) and preparer.grammar.checked == [constraint.grammar]
    assert all(word in constraint.grammar for word in enforced), constraint.grammar
    if choice == "auto":
        assert "city" not in constraint.grammar


def test_refused_tools() -> None:
    """Names, duplicates, counts, sizes and depth have limits, and a choice must be one."""
    refused("tool_choice", tool_choice="required")
    assert "nobody" in refused("tool_choice", tools=[WEATHER], tool_choice=NamedTool("nobody"))
    refused("tools", tools=[WEATHER, WEATHER])
    refused("tools", tools=[ToolDefinition(name="two words")])
    refused("tools", tools=[ToolDefinition(name=f"t{i}") for i in range(4)])
    refused("tools", tools=[ToolDefinition(name="t", description="x" * 3000)])
    deep: Any = {}
    for _ in range(100):
        deep = {"properties": {"x": deep}}
    refused("tools", tools=[ToolDefinition(name="t", parameters=deep)])
    refused("structured_outputs", preparer=door(grammar=None), tools=[WEATHER], tool_choice="required")
    twice = StructuredOutputsParams(json={})
    refused("structured_outputs", {"structured_outputs": twice}, structured=twice)
    refused("reasoning_effort", reasoning_effort="enormous")


@pytest.mark.parametrize(
    "tool",
    [
        5, {}, {"type": "custom", "custom": {}}, {"type": "function"}, {"type": "function", "function": 5},
        *({"type": "function", "function": {"name": name}} for name in ("", "a b", "ä", "x" * 129, None, 7)),
        {"type": "function", "function": {"name": "f", "parameters": []}},
        {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
        {"type": "function", "function": {"name": "f", "description": 1}},
        {"type": "function", "function": {"name": "f", "strict": "yes"}},
    ],
)  # fmt: skip
def test_bad_definitions(tool: Any) -> None:
    """Each is refused with its place."""
    with pytest.raises(ValidationError) as error:
        from_openai([{"type": "function", "function": {"name": "fine"}}, tool])
    assert error.value.parameter == "tools[1]"


def test_choices() -> None:
    """Every spelling of tool_choice, and what is none."""
    tools = [WEATHER, TIME]
    assert choice_from_openai(None, tools)[0] == "auto" and choice_from_openai(None, [])[0] == "none"
    assert choice_from_openai({"type": "function", "function": {"name": "time"}}, tools)[0] == NamedTool("time")
    assert choice_from_openai({"type": "function", "name": "time"}, tools)[0] == NamedTool("time")
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
    assert choice_from_openai({"type": "allowed_tools", "allowed_tools": allowed}, tools) == ("required", [TIME])
    for bad in (
        "any",
        5,
        {},
        {"type": "function"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}},
    ):
        with pytest.raises(ValidationError):
            choice_from_openai(bad, tools)


# --- templates that know no tools


def test_preamble() -> None:
    """Definitions and instructions in the system message, history in words, hermes as the format."""
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "time", "arguments": "{}"}}]}
    results = [{"role": "tool", "content": "noon"}, {"role": "tool", "content": "dusk"}]
    chat = [*HELLO, turn, *results, {"role": "user", "content": "so?"}]
    preparer = door(BARE, formats=(None, None))
    prepared = preparer.from_dialogue(Dialogue(messages=chat, tools=[WEATHER]))
    text = prompt(prepared)
    assert text.startswith("<system>") and '"name": "weather"' in text and prepared.plan.tools == tool_format("hermes")
    assert text.endswith(
        '<user>hi<assistant><tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><user><tool_response>\nnoon\n'
        "</tool_response>\n<tool_response>\ndusk\n</tool_response>\n\nso?<assistant>"
    )
    with_system = [{"role": "system", "content": "Be kind."}, *HELLO]
    text = prompt(preparer.from_dialogue(Dialogue(messages=with_system, tools=[WEATHER])))
    assert text.startswith("<system>Be kind.\n\nYou may call") and text.count("<system>") == 1


def test_preamble_without_system_role() -> None:
    """A template that refuses system messages gets it in the first user message."""
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + BARE
    text = prompt(door(strict).from_dialogue(Dialogue(messages=HELLO, tools=[WEATHER])))
    assert text.startswith("<user>You may call") and text.endswith("hi<assistant>")


def test_parts_stay_parts() -> None:
    """Content parts are joined with the preamble as parts."""
    part = {"type": "text", "text": "x"}
    (system, _) = with_preamble(
        [{"role": "system", "content": [part]}, {"role": "user", "content": "y"}], [{"name": "f"}]
    )
    assert system["content"][0] == part and "tool_call" in system["content"][1]["text"]
    (user,) = history_as_text([{"role": "tool", "content": [part]}])
    assert user["role"] == "user" and part in user["content"]


@pytest.mark.parametrize("arguments", ["{", "", "null", "not json", "[1]", '"x"', None, {"a": 1}, 5, "1e999"])
@pytest.mark.parametrize("template", [QWEN, BARE], ids=["walks", "bare"])
def test_broken_arguments_in_history(arguments: Any, template: str) -> None:
    """B134: a history with arguments a model broke is a prompt, never an error."""
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    text = prompt(door(template).from_dialogue(Dialogue(messages=[*HELLO, turn], tools=[WEATHER])))
    if isinstance(arguments, str) and arguments not in ("", "null"):
        assert arguments in text or json.dumps(arguments)[1:-1] in text


# --- effort


def test_effort_switches_and_levels() -> None:
    """A switch goes on or off, a level to the nearest one the template speaks of, ties to the higher."""
    assert effort_variables(None, None, {"enable_thinking"}, ()) == [{}]
    assert effort_variables("none", None, {"enable_thinking", "thinking"}, ()) == [
        {"enable_thinking": False, "thinking": False}
    ]
    for effort in EFFORTS[1:]:
        assert effort_variables(effort, None, {"enable_thinking"}, ())[0] == {"enable_thinking": True}
    first = {e: effort_variables(e, None, {"reasoning_effort"}, ("medium",))[0]["reasoning_effort"] for e in EFFORTS}
    assert first == {
        "none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
    }  # fmt: skip
    assert effort_variables("none", None, {"reasoning_effort"}, ("no_think",))[0] == {"reasoning_effort": "no_think"}
    assert effort_variables("max", None, {"thinking_effort"}, ("max",))[0] == {"thinking_effort": "max"}
    assert effort_variables(None, 5, {"thinking_budget"}, ()) == [{"thinking_budget": 5}]


def test_who_is_told_that_an_effort_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not whoever wants no thoughts from a model that has none: some APIs ask for that by default."""
    said: list[str] = []
    monkeypatch.setattr("samovar.text.effort._once", SimpleNamespace(warn=said.append))
    assert effort_variables("none", None, (), (), thinks=False) == [{}] and not said
    for effort, thinks in (("none", True), ("low", False), ("low", True)):
        assert effort_variables(effort, None, (), (), thinks=thinks) == [{}]
        assert repr(effort) in said.pop() and not said


def test_a_template_may_refuse_a_level() -> None:
    """Then the next one is tried; a template that refuses for another reason is heard."""
    picky = (
        "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('no ' ~ reasoning_effort) }}{% endif %}"
        "{{ reasoning_effort }}" + BARE
    )
    text = prompt(door(picky).from_dialogue(Dialogue(messages=HELLO, reasoning_effort="medium")))
    assert text.startswith("high")
    never = "{{ raise_exception('never') }}{{ reasoning_effort }}"
    assert "never" in refused("messages", preparer=door(never), reasoning_effort="low")


def test_who_sets_a_variable() -> None:
    """The request's own variables go before its effort, the effort before the operator's."""
    preparer = door(default_variables={"enable_thinking": False})
    for effort, own, is_open in ((None, {}, False), ("low", {}, True), ("low", {"enable_thinking": False}, False)):
        asked = Dialogue(messages=HELLO, reasoning_effort=effort, template_variables=own)
        assert preparer.from_dialogue(asked).plan.begins_in_reasoning == is_open


# --- where the prompt ends


@pytest.mark.parametrize(
    ("text", "literal", "expected"),
    [
        ("<user>hi<assistant>", (), "free"),
        ("<assistant><think>\n", (), "open"),
        ("<assistant><think>", (), "open"),
        ("<assistant><think>\n\n</think>\n\n", (), "closed"),
        ("<user>why <think>?<assistant>", (), "free"),
        ("<user><think><assistant>", ((6, 13),), "free"),
        ("<user></think><assistant><think>\n", (), "open"),
        ("<assistant><think>a</think>b<user>c<assistant>", (), "free"),
        ("<assistant><think>a</think>b<user>c<assistant><think>", (), "open"),
    ],
)
def test_prompt_end(text: str, literal: Any, expected: str) -> None:
    """B133, B137, B142: the template's own last mark decides; what clients wrote counts for nothing."""
    without = text.rpartition("<assistant>")[0]
    assert prompt_end(RenderedPrompt(text, literal), THINK, without_opening=lambda: without) == expected


def test_words_after_the_mark() -> None:
    """A template may begin the thought itself."""
    text = "<user>go<assistant><think>\nLet me see. "
    assert prompt_end(RenderedPrompt(text), THINK, without_opening=lambda: "<user>go") == "open"
    assert prompt_end(RenderedPrompt(text), THINK, without_opening=lambda: text) == "free"


@pytest.mark.parametrize(
    ("last", "is_open"),
    [("The answer", False), ("<think>\nHm, so", True), ("<think>a</think>b", False), ("a <think> b", True)],
)
def test_continued_thoughts(last: str, is_open: bool) -> None:
    """B149: a last message that is continued is inside its thought, or past it."""
    asked = Dialogue(
        messages=[*HELLO, {"role": "assistant", "content": last}], add_generation_prompt=False,
        continue_final_message=True, structured=StructuredOutputsParams(json_object=True),
    )  # fmt: skip
    prepared = door(BARE).from_dialogue(asked)
    assert prepared.plan.begins_in_reasoning == is_open
    constraint = prepared.request.constraint
    assert constraint is not None and (constraint.reasoning is not None) == is_open


@given(st.lists(st.sampled_from(["<think>", "</think>", "x", "\n", "<assistant>", "<user>"]), max_size=12))
def test_open_means_unclosed(parts: list[str]) -> None:
    """Whatever the prompt: open only with a mark after which none closes; with blanks only after it, always."""
    text = "".join(parts)
    end = prompt_end(RenderedPrompt(text), THINK, without_opening=lambda: "")
    opened, closed = text.rfind("<think>"), text.rfind("</think>")
    assert (end == "open") == (opened > closed)


def test_constraints_of_thoughts() -> None:
    """B140, B143: grammar and thought meet at one token; effort none and a closed thought leave no room for one."""
    form = StructuredOutputsParams(json_object=True)
    marks = list(b"<think>"), list(b"</think>")
    expected: dict[tuple[str, str | None], Any] = {
        (QWEN, None): (True, []), (QWEN, "none"): None, (BARE, None): (False, marks[0]), (BARE, "none"): None,
    }  # fmt: skip
    for (template, effort), span in expected.items():
        asked = Dialogue(messages=HELLO, structured=form, reasoning_effort=effort)
        constraint = door(template).from_dialogue(asked).request.constraint
        assert constraint is not None and constraint.grammar
        found = constraint.reasoning
        assert (found and (found.is_open, found.start_ids)) == span
        assert found is None or found.end_ids == marks[1]


def test_budgets() -> None:
    """A budget alone is a constraint without grammar; -1 and None are none; without known marks it changes nothing."""
    asked = Dialogue(messages=HELLO)
    for budget, expected in ((0, 0), (7, 7), (-1, None), (None, None)):
        constraint = door().from_dialogue(asked, {"thinking_token_budget": budget}).request.constraint
        if expected is None:
            assert constraint is None
        else:
            assert constraint is not None and constraint.grammar is None
            assert constraint.reasoning is not None and constraint.reasoning.budget == expected
    plain = door(formats=(None, None)).from_dialogue(asked, {"thinking_token_budget": 5})
    assert plain.request.constraint is None
    closed = door().from_dialogue(
        Dialogue(messages=HELLO, template_variables={"enable_thinking": False}), {"thinking_token_budget": 5}
    )
    assert closed.request.constraint is None


def test_prompts_of_text() -> None:
    """Completions: structured output from the first token; a budget where the text ends inside a thought, or may open one."""
    form = StructuredOutputsParams(json_object=True)
    preparer = door()
    request = preparer.from_ids(preparer.encode_text("x"), preparer.params({"structured_outputs": form}))
    assert request.constraint is not None and request.constraint.grammar and request.constraint.reasoning is None
    assert request.params.structured_outputs is None
    for text, is_open in (("a<think>\n", True), ("a", False), ("a<think></think>\n", None)):
        constraint = preparer.from_ids(
            preparer.encode_text(text), preparer.params({"thinking_token_budget": 3})
        ).constraint
        span = None if constraint is None else constraint.reasoning
        assert (span and span.is_open) == is_open


def test_truncation_of_the_end() -> None:
    """A prompt cut at its end does not end where the template's did."""
    asked = Dialogue(messages=HELLO)
    assert not door().from_dialogue(asked, truncate_prompt_tokens=5, truncation_side="right").plan.begins_in_reasoning
    cut = door().from_dialogue(asked, truncate_prompt_tokens=5)
    assert cut.plan.begins_in_reasoning and cut.num_truncated > 0


def test_published_templates(chat_templates: list[Path]) -> None:
    """70 templates, every effort: they render, and what they open or close with is seen by the format chosen for them."""
    ends: dict[str, set[str]] = {}
    refusing: set[str] = set()
    for path in chat_templates:
        source = path.read_text(encoding="utf-8")
        formats = choose([source])
        limits = RequestLimits(vocab_size=257, max_model_len=10**6)
        template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
        preparer = Preparer(ByteTokenizer(), template, limits, [256], formats=formats, grammar=Source())
        seen = set()
        for effort in (None, "none", "minimal", "medium", "max"):
            try:
                prepared = preparer.from_dialogue(Dialogue(messages=HELLO, tools=[WEATHER], reasoning_effort=effort))
            except ValidationError:
                refusing.add(path.name)
                continue
            seen.add("open" if prepared.plan.begins_in_reasoning else "not")
            tail = prompt(prepared)[-300:]
            format: ReasoningFormat | None = formats[1]
            if format is not None and format.whole is None:
                is_open = max(map(tail.rfind, format.opens)) > max(map(tail.rfind, format.closes))
                assert prepared.plan.begins_in_reasoning == is_open, (path.name, effort, tail)
        ends[path.name] = seen
    # One wants functions as text, one a filter that only llama.cpp has.
    assert refusing == {"fireworks-ai-llama-3-firefunction-v2.jinja", "llama-cpp-deepseek-r1.jinja"}
    switching = [name for name, seen in ends.items() if seen == {"open", "not"}]
    assert any("Qwen3" in name for name in switching) and len(switching) >= 8, switching
