"""load_text, make_preparer: tokenizer, chat template and limits of a model, as the single door for requests. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig
from samovar.core.outputs import EngineInfo
from samovar.hub.locate import locate_tokenizer
from samovar.text.chat_template import ChatTemplate, load_chat_template
from samovar.text.messages import ContentFormat
from samovar.text.prepare import Preparer, end_token_ids, limits_from, sampling_defaults
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
    place = locate_tokenizer(config.model)
    tokenizer = load_tokenizer(description, None if place is None else str(place))
    template = load_chat_template(description, chat_template, content_format=content_format, tokenizer=place)
    return TextParts(tokenizer, template)


def make_preparer(
    config: EngineConfig,
    description: ModelDescription,
    info: EngineInfo,
    text: TextParts,
    *,
    max_choices: int = 128,
    max_tokens_ceiling: int | None = None,
) -> Preparer:
    """The door to an engine with these facts: its limits, the operator's, and the model's defaults."""
    limits = limits_from(
        info, max_logprobs=config.model.max_logprobs, max_choices=max_choices, max_tokens_ceiling=max_tokens_ceiling
    )
    ends = end_token_ids(description, text.tokenizer)
    return Preparer(text.tokenizer, text.template, limits, ends, description.generation_config)
