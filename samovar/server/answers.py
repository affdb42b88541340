"""What a start says about answers: which formats calls and reasoning are read in, and why these."""

from __future__ import annotations

from samovar.config.groups import ServerConfig
from samovar.text.chat_template import ChatTemplate
from samovar.text.formats.choose import AUTO
from samovar.text.prepare import Formats
from samovar.text.tool_preamble import FORMAT as PREAMBLE_FORMAT


def formats_text(template: ChatTemplate | None, formats: Formats, config: ServerConfig) -> str:
    """One line on the formats of a model."""
    tools, reasoning = formats
    if template is None:
        return "no chat template: no tools, no reasoning"
    if not template.knows_tools():
        calls = f"{PREAMBLE_FORMAT} (the chat template knows no tools; the system message tells of them)"
    elif tools is None:
        calls = f"{PREAMBLE_FORMAT} (the chat template shows no format that is known here)"
    else:
        calls = f"{tools.name} ({_why(config.tool_call_parser)})"
    if not config.enable_auto_tool_choice:
        calls += ", only where a request requires them"
    thoughts = "none" if reasoning is None else f"{reasoning.name} ({_why(config.reasoning_parser)})"
    return f"tool calls: {calls}; reasoning: {thoughts}"


def _why(setting: str) -> str:
    return "as the chat template shows" if setting == AUTO else "as set"
