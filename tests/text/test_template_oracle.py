"""70 published chat templates: our renderer against Transformers', on conversations with and without everything."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from pathlib import Path
from typing import Any

from samovar.errors import ValidationError
from samovar.text.chat_template import ChatTemplate

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather <now> & "here" für 世界',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "days": {"type": ["integer", "null"], "minimum": 1},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": 'Hi é 世界 <b>"x"</b>'}],
    "system": [{"role": "system", "content": " Be nice. "}, {"role": "user", "content": "Hi\n\n"}],
    "turns": [
        {"role": "system", "content": "Be nice."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello there "},
        {"role": "user", "content": "More\r\nplease"},
    ],
    "reasoning": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
        {"role": "user", "content": "3+3?"},
    ],
    "tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "22 C"},
        {"role": "assistant", "content": "It is 22 C."},
        {"role": "user", "content": "Thanks"},
    ],
    "ends with assistant": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one two "}],
    "twice user": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


@cache
def _load(path: Path) -> tuple[str, ChatTemplate]:
    source = path.read_text(encoding="utf-8")
    return source, ChatTemplate({"default": source}, NAMES)


def _theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """Transformers' text, or None if the template refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        return render_jinja_template([copy.deepcopy(messages)], chat_template=source, **NAMES, **options)[0][0]  # type: ignore[no-any-return]
    except Exception:
        # Any error of a template counts as a refusal, and Transformers lets all kinds through.
        return None


def _ours(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str | None:
    before = copy.deepcopy(messages)
    try:
        return template.render(messages, **options).text
    except ValidationError:
        return None
    finally:
        assert messages == before, "render changed its input"


def _check_told(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> bool:
    """Where Transformers leaves tools or calls out, ours are in the prompt all the same. False if the template refuses."""
    text = _ours(template, messages, **options)
    if text is None:
        return False
    names = [tool["function"]["name"] for tool in options["tools"] or ()]
    names += [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
    assert all(f'"{name}"' in text for name in names), text
    return True


def test_published_templates(chat_templates: list[Path]) -> None:
    """Same text, or a refusal by both, for 70 templates, 7 conversations, tools, generation prompt (TEMPLATE)."""
    assert len(chat_templates) == 70
    compared = refused = told = 0
    for path in chat_templates:
        source, template = _load(path)
        for (name, messages), tools, prompt in itertools.product(CONVERSATIONS.items(), (None, TOOLS), (False, True)):
            if tools and name not in ("one", "system", "tool"):
                continue
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
            if (tools and "tools" not in template.reads(has_tools=True)[0]) or (
                name == "tool" and not template.knows_calls()
            ):
                if not _check_told(template, messages, **options):
                    assert _theirs(source, messages, **options | {"tools": None}) is None, path.name
                told += 1
                continue
            expected = _theirs(source, messages, **options)
            assert _ours(template, messages, **options) == expected, f"{path.name}, {name}, {options}"
            compared += 1
            refused += expected is None
    assert compared + told == 70 * (7 + 3) * 2 and 0 < told < 100
    assert refused < compared / 5


def test_continue_final_message(chat_templates: list[Path]) -> None:
    """The open end of the last message is where Transformers has it."""
    compared = 0
    for path in chat_templates:
        source, template = _load(path)
        for text in ("The capital of France is", "It is ", "a\n"):
            messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": text}]
            expected = _theirs(source, messages, continue_final_message=True)
            if expected is None:
                continue
            options = {"continue_final_message": True, "add_generation_prompt": False}
            assert _ours(template, messages, **options) == expected, path.name
            compared += 1
    assert compared > 150


def test_content_parts(chat_templates: list[Path]) -> None:
    """B029: one text part is the same prompt as the string, whatever form the template wants; no JSON, no "type"."""
    for path in chat_templates:
        _, template = _load(path)
        as_text = [{"role": "user", "content": "What is 22 C?"}]
        as_parts = [{"role": "user", "content": [{"type": "text", "text": "What is 22 C?"}]}]
        whole = _ours(template, as_text)
        assert whole == _ours(template, as_parts), path.name
        assert whole is None or "22 C" in whole


def test_empty_content(chat_templates: list[Path]) -> None:
    """B028: content that is null, absent or "" in an assistant tool turn gives one and the same prompt."""
    for path in chat_templates:
        _, template = _load(path)
        messages = copy.deepcopy(CONVERSATIONS["tool"])
        expected = _ours(template, messages, tools=TOOLS)
        messages[1]["content"] = None
        assert _ours(template, messages, tools=TOOLS) == expected, path.name
        del messages[1]["content"]
        assert _ours(template, messages, tools=TOOLS) == expected, path.name
