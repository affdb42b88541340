"""Formats by name, by vLLM's names, and by what chat templates teach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samovar.errors import ConfigError
from samovar.text.formats.choose import (
    REASONING_ALIASES,
    TOOL_ALIASES,
    choose,
    names,
    reasoning_format,
    tool_format,
)

EXPECTED = json.loads((Path(__file__).parent / "templates.json").read_text())


def test_published_templates(chat_templates: list[Path]) -> None:
    """F28: what is picked for each of the published templates; None where the format is not one we read."""
    picked = {}
    for file in chat_templates:
        tools, reasoning = choose([file.read_text(encoding="utf-8")])
        picked[file.stem] = [tools and tools.name, reasoning and reasoning.name]
    assert picked == EXPECTED


def test_names_and_aliases() -> None:
    """Every alias leads to a format, and no alias hides one."""
    tools, thoughts = names()
    assert len(tools) >= 20 and {"think", "mistral", "harmony", "gemma4"} <= set(thoughts)
    for alias, name in TOOL_ALIASES.items():
        assert tool_format(alias) is tool_format(name) and alias not in tools
    for alias, name in REASONING_ALIASES.items():
        assert reasoning_format(alias) is reasoning_format(name) and alias not in thoughts
    assert choose([], "qwen3_json", "deepseek_r1") == (tool_format("hermes"), reasoning_format("think"))
    assert choose(['<tool_call> "name" <think>'], "none", "none") == (None, None)


@pytest.mark.parametrize(("tools", "reasoning"), [("nosuch", "auto"), ("auto", "nosuch"), ("Hermes", "auto")])
def test_unknown_names_are_refused(tools: str, reasoning: str) -> None:
    """The error names the flag, the value and what there is."""
    with pytest.raises(ConfigError) as error:
        choose([], tools, reasoning)
    assert "nosuch" in str(error.value) or "Hermes" in str(error.value)
    assert "--tool-call-parser" in str(error.value) or "--reasoning-parser" in str(error.value)
    assert "think" in str(error.value) or "hermes" in str(error.value)


def test_dialects_of_a_name() -> None:
    """A name that stands for two ways of writing is made definite by the template."""
    assert choose(["[TOOL_CALLS]"], "mistral")[0] is tool_format("mistral-list")
    assert choose(["[TOOL_CALLS] [ARGS]"], "mistral")[0] is tool_format("mistral")
    assert choose([], "mistral")[0] is tool_format("mistral")
