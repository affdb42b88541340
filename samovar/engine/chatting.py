"""What `LLM.chat` is given, as a `Dialogue`: tools in OpenAI's form, sampling parameters as values."""

from __future__ import annotations

from copy import copy
from dataclasses import fields
from typing import Any, get_args

from samovar.core.sampling_params import SamplingParams
from samovar.errors import ValidationError
from samovar.text.messages import ContentFormat
from samovar.text.prepare import Preparer
from samovar.text.tool_schema import choice_from_openai, from_openai


def door_for(preparer: Preparer, content_format: ContentFormat) -> Preparer:
    """`preparer` for sampling parameters that are complete, and messages whose content the template takes in this form."""
    if content_format not in get_args(ContentFormat):
        message = f"chat_template_content_format must be auto, string or openai, got {content_format!r}"
        raise ValidationError(message, parameter="chat_template_content_format", value=content_format)
    door = copy(preparer)
    door.default_sampling = {}
    if content_format != "auto" and door.template is not None:
        door.template = door.template.with_format(content_format)
    return door


def values_of(params: SamplingParams) -> dict[str, Any]:
    """Every parameter by name."""
    return {field.name: getattr(params, field.name) for field in fields(params)}


def tool_options(options: dict[str, Any]) -> dict[str, Any]:
    """Takes `tools`, `tool_choice` and `parallel_tool_calls` out of `options`; returns them as a `Dialogue` has them."""
    tools = options.pop("tools", None) or []
    if not isinstance(tools, (list, tuple)):
        raise ValidationError(f"tools must be a list of tools, got {tools!r}", parameter="tools", value=tools)
    choice, left = choice_from_openai(options.pop("tool_choice", None), from_openai(tools))
    parallel = options.pop("parallel_tool_calls", None)
    return {"tools": left, "tool_choice": choice, "parallel_tool_calls": True if parallel is None else bool(parallel)}
