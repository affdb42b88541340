"""Which formats a model writes: by name, or by what its chat template teaches.

A format is found by looking through the files of this folder. The names that vLLM's parsers have are known too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import samovar.text.formats
from samovar.errors import ConfigError
from samovar.text.formats.base import ReasoningFormat, ToolFormat

TOOL_ALIASES: Mapping[str, str] = {
    "deepseek_v41": "deepseek_v4",
    "glm45": "glm4",
    "glm47": "glm4",
    "granite-20b-fc": "granite",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "ling3": "glm4",
    "llama4_json": "llama3_json",
    "mimo": "hermes",
    "nemotron_v3": "qwen3_coder",
    "openai": "harmony",
    "phi4_mini_json": "phi4_mini",
    "poolside_v1": "glm4",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
"""vLLM's name of a tool parser -> the name of the same format here."""

REASONING_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v4",
            "deepseek_v41",
            "ernie45",
            "glm45",
            "glm47",
            "holo2",
            "ling3",
            "kimi_k2",
            "mimo",
            "minimax_m2",
            "minicpmv",
            "nemotron_v3",
            "olmo3",
            "poolside_v1",
            "qwen3",
            "step3",
            "step3p5",
        ),
        "think",
    ),
    "granite_thinking_parser": "granite",
    "openai_gptoss": "harmony",
}
"""vLLM's name of a reasoning parser -> the name of the same format here."""

AUTO, NONE = "auto", "none"

_Format = TypeVar("_Format", ToolFormat, ReasoningFormat)


def choose(
    template_sources: Iterable[str], tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> tuple[ToolFormat | None, ReasoningFormat | None]:
    """The formats of a model with these chat templates. "auto" looks into them, "none" is none of them.

    Raises `ConfigError` for a name that is not known.
    """
    sources = list(template_sources)
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    if tool_parser == AUTO:
        tools = _taught(_tool_formats().values(), sources)
    elif tool_parser != NONE:
        tools = _dialect(tool_format(tool_parser), sources)
    if reasoning_parser == AUTO:
        reasoning = _taught(_reasoning_formats().values(), sources)
    elif reasoning_parser != NONE:
        reasoning = reasoning_format(reasoning_parser)
    return tools, reasoning


def tool_format(name: str) -> ToolFormat:
    """The tool format of this name; raises `ConfigError` that lists the names."""
    found = _tool_formats().get(TOOL_ALIASES.get(name, name))
    if found is None:
        raise _unknown("--tool-call-parser", name, {*_tool_formats(), *TOOL_ALIASES})
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """The reasoning format of this name; raises `ConfigError` that lists the names."""
    found = _reasoning_formats().get(REASONING_ALIASES.get(name, name))
    if found is None:
        raise _unknown("--reasoning-parser", name, {*_reasoning_formats(), *REASONING_ALIASES})
    return found


def names() -> tuple[list[str], list[str]]:
    """The names of all tool formats and of all reasoning formats, without aliases."""
    return sorted(_tool_formats()), sorted(_reasoning_formats())


def _unknown(flag: str, name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"{flag} {name!r} is not known; choose {AUTO}, {NONE} or one of {', '.join(sorted(known))}")


def _taught(formats: Iterable[_Format], sources: Sequence[str]) -> _Format | None:
    """The format with the longest marks that a template holds all of."""
    best: tuple[int, _Format] | None = None
    for format in formats:
        for marks in format.template_marks:
            length = sum(map(len, marks))
            if any(all(mark in source for mark in marks) for source in sources) and (best is None or length > best[0]):
                best = (length, format)
    return None if best is None else best[1]


def _dialect(format: ToolFormat, sources: Sequence[str]) -> ToolFormat:
    """Of formats that read alike and are written in several ways, the one the templates teach."""
    others = [other for other in _tool_formats().values() if other.name.partition("-")[0] == format.name]
    return _taught(others, sources) or format


@lru_cache(maxsize=1)
def _tool_formats() -> dict[str, ToolFormat]:
    return {found.name: found for found in _found() if isinstance(found, ToolFormat)}


@lru_cache(maxsize=1)
def _reasoning_formats() -> dict[str, ReasoningFormat]:
    return {found.name: found for found in _found() if isinstance(found, ReasoningFormat)}


@lru_cache(maxsize=1)
def _found() -> list[object]:
    """Every object at the top level of every file of the folder."""
    folder = samovar.text.formats
    files = sorted(module.name for module in pkgutil.iter_modules(folder.__path__) if module.name != "choose")
    return [thing for file in files for thing in vars(importlib.import_module(f"{folder.__name__}.{file}")).values()]
