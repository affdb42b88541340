"""Published chat templates as oracles: which format they teach, and that the calls they print are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samovar.core.tools import ToolDefinition
from samovar.text.answer import AnswerPlan
from samovar.text.chat_template import ChatTemplate
from samovar.text.formats.choose import choose
from samovar.text.regions import RegionParser
from tests.text.formats.reading import joined

TEMPLATES = {
    "qwen3_coder": ["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash"],
    "seed_oss": ["ByteDance-Seed-OSS"],
    "glm4": [
        "GLM-4.6",
        "GLM-4.7-Flash",
        "Spark2.5",
        "inclusionai-ling-3.0-flash",
        "poolside-Laguna-S-2.1",
        "poolside-Laguna-XS-2.1",
        "poolside-Laguna-XS.2",
    ],
    "minimax_m2": ["MiniMax-M2"],
    "deepseek_v32": ["deepseek-ai-DeepSeek-V3.2"],
    "deepseek_v4": ["deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"],
    "gemma4": ["google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"],
    "harmony": ["openai-gpt-oss-120b"],
}
"""Of the 70 templates, all that teach one of these formats."""

PROPERTIES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "boolean"},
    "none": {"type": ["string", "null"]},
    "items": {"type": "array", "items": {"type": "object"}},
    "options": {"type": "object"},
}
TOOL = ToolDefinition(name="edit_file", parameters={"type": "object", "properties": PROPERTIES})
ARGUMENTS: list[dict[str, Any]] = [
    {"text": "Rome"},
    {"text": 'def f():\n    return "a" < b > {c}\n\n', "count": 3, "deep": True},
    {"text": "12", "count": -1, "ratio": 2.5, "deep": False, "none": None},
    {"none": "null and void", "items": [{"a": [1, None]}, {"type": "web", "b": {"c": "日本 😀"}}], "options": {}},
    {"text": "", "options": {"k": {"l": [True, "</x>", ""]}}, "items": []},
]


def test_each_template_teaches_its_format(chat_templates: list[Path]) -> None:
    found: dict[str, list[str]] = {name: [] for name in TEMPLATES}
    for path in chat_templates:
        tools, _ = choose([path.read_text(encoding="utf-8")])
        if tools is not None and tools.name in found:
            found[tools.name].append(path.stem)
    assert {name: sorted(stems) for name, stems in found.items()} == TEMPLATES


@pytest.mark.parametrize("name", [name for names in TEMPLATES.values() for name in names])
def test_printed_calls_are_read_back(chat_templates: list[Path], name: str) -> None:
    """A call in the history, printed by the model's own template, is the call it was."""
    source = next(path for path in chat_templates if path.stem == name).read_text(encoding="utf-8")
    tools, reasoning = choose([source])
    assert tools is not None
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    listed = [{"type": "function", "function": {"name": TOOL.name, "description": "", "parameters": TOOL.parameters}}]
    plan = AnswerPlan(tools=tools, reasoning=reasoning if tools.whole else None, definitions={TOOL.name: TOOL})
    for arguments in ARGUMENTS:
        call = {"id": "c1", "type": "function", "function": {"name": TOOL.name, "arguments": arguments}}
        messages = [{"role": "user", "content": "Do"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        text = template.render(messages, tools=listed, add_generation_prompt=False).text
        begin = text.rindex(tools.opens[0] if tools.whole is None else "<|start|>assistant")
        for chunks in ([text[begin:]], list(text[begin:])):
            parser = RegionParser(plan)
            news = [item for chunk in chunks for item in parser.feed(chunk)]
            calls = [piece for piece in joined([*news, *parser.finish(truncated=False)]) if piece[0] == "call"]
            assert [(made, json.loads(given)) for _, made, given in calls] == [(TOOL.name, arguments)], text[begin:]
