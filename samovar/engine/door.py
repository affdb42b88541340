"""make_preparer: tokenizer, chat template and limits of a loaded model, as the single door for requests. Torch-free."""

from __future__ import annotations

from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig
from samovar.core.outputs import EngineInfo
from samovar.text.chat_template import load_chat_template
from samovar.text.prepare import Preparer, end_token_ids, limits_from
from samovar.text.tokenizer import load_tokenizer

DEFAULT_MAX_TOKENS = 16
"""New tokens where neither the caller nor the model says a number, as in vLLM."""


def make_preparer(
    config: EngineConfig,
    description: ModelDescription,
    info: EngineInfo,
    *,
    chat_template: str | None = None,
    max_choices: int = 128,
    max_tokens_ceiling: int | None = None,
) -> Preparer:
    """The door to an engine with these facts. `chat_template` is a file or the template itself.

    Raises `CheckpointError` or `ConfigError` if the tokenizer or the template cannot be loaded.
    """
    tokenizer = None if config.model.skip_tokenizer_init else load_tokenizer(description, config.model.tokenizer)
    limits = limits_from(
        info, max_logprobs=config.model.max_logprobs, max_choices=max_choices, max_tokens_ceiling=max_tokens_ceiling
    )
    return Preparer(
        tokenizer,
        None if tokenizer is None else load_chat_template(description, chat_template),
        limits,
        end_token_ids(description, tokenizer),
        description.generation_config,
    )
