"""load_text, make_preparer: tokenizer, chat template and limits of a model, as the single door for requests. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig
from samovar.config.groups import ServerConfig
from samovar.core.outputs import EngineInfo
from samovar.engine.grammar_source import LazyGrammar
from samovar.hub.locate import locate_tokenizer
from samovar.text.chat_template import ChatTemplate, load_chat_template
from samovar.text.messages import ContentFormat
from samovar.text.prepare import Formats, Preparer, end_token_ids, limits_from, sampling_defaults
from samovar.text.tokenizer import Tokenizer, load_tokenizer

DEFAULT_MAX_TOKENS = 16
"""New tokens where neither the caller nor the model says a number, as in vLLM."""


class TextParts(NamedTuple):
    """What turns text into ids and back; None where a model has none or none is wanted."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None


def load_text(
    config: EngineConfig,
    description: ModelDescription,
    *,
    chat_template: str | None = None,
    content_format: ContentFormat = "auto",
) -> TextParts:
    """Tokenizer and chat template, downloaded if they are named and not here. Needs no engine.

    `chat_template` is a file or the template itself. Raises `CheckpointError` or `ConfigError`.
    """
    sampling_defaults(description.generation_config)  # refused now rather than when the model is loaded
    if config.model.skip_tokenizer_init:
        return TextParts(None, None)
    place, tokenizer = locate_tokenizer(config.model), load_tokenizer_of(config, description)
    template = load_chat_template(description, chat_template, content_format=content_format, tokenizer=place)
    return TextParts(tokenizer, template)


def load_tokenizer_of(config: EngineConfig, description: ModelDescription) -> Tokenizer:
    """The tokenizer that `load_text` would give. Raises `CheckpointError`."""
    place = locate_tokenizer(config.model)
    return load_tokenizer(description, None if place is None else str(place))


def make_preparer(
    config: EngineConfig,
    description: ModelDescription,
    info: EngineInfo,
    text: TextParts,
    *,
    server: ServerConfig | None = None,
) -> Preparer:
    """The door to an engine with these facts: its limits, the operator's, and the model's defaults.

    How answers are written is seen from the chat template unless `server` names it. Raises `ConfigError` for a format
    that is not known.
    """
    s = server or ServerConfig()
    limits = limits_from(
        info, max_logprobs=config.model.max_logprobs, max_choices=s.max_choices, max_tokens_ceiling=s.max_tokens_ceiling
    )
    limits = replace(limits, max_tools=s.max_tools, max_tools_bytes=s.max_tools_bytes)
    ends = end_token_ids(description, text.tokenizer)
    return Preparer(
        text.tokenizer,
        text.template,
        limits,
        ends,
        description.generation_config,
        formats=_formats(text, s),
        grammar=None if text.tokenizer is None else LazyGrammar(text.tokenizer, info.vocab_size, ends, s),
    )


def _formats(text: TextParts, server: ServerConfig) -> Formats:
    """How the model writes calls and reasoning, by the flags or by its templates."""
    if text.template is None or text.tokenizer is None:
        return (None, None)
    from samovar.text.formats.choose import choose  # loads every format

    return choose(text.template.sources.values(), server.tool_call_parser, server.reasoning_parser)
