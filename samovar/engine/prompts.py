"""The prompt forms `LLM` and `AsyncLLM` accept: text, token ids, or a dict of either with a cache salt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict

from samovar.core.sampling_params import SamplingParams
from samovar.errors import ValidationError


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is only shown in the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt

_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


def prompt_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or a sequence of them -> a list. A flat list of ints is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray, memoryview)):
        message = f"prompts must be a prompt (text or token ids) or a list of them, got {str(prompts)[:80]}"
        raise ValidationError(message, parameter="prompts", value=prompts)
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items]
    return items


def require_params(value: object) -> None:
    """Raise `ValidationError` unless `value` is `SamplingParams` or None; a dict is not taken for them."""
    if value is not None and not isinstance(value, SamplingParams):
        message = f"sampling_params must be SamplingParams, or one for each prompt, got {type(value).__name__}"
        raise ValidationError(message, parameter="sampling_params", value=value)


def split_prompt(prompt: PromptType) -> tuple[str | None, list[int] | None, str | None]:
    """A prompt -> (text, token ids, cache salt); ids win when both are given. Raises `ValidationError`."""
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, (list, tuple)):
        return None, list(prompt), None
    if not isinstance(prompt, dict):
        message = f"a prompt is text, a list of token ids or a dict, got {type(prompt).__name__}"
        raise ValidationError(message, parameter="prompts", value=prompt)
    if unknown := prompt.keys() - _KEYS:
        message = f"prompt key {min(unknown)!r} is not supported; use prompt, prompt_token_ids, cache_salt"
        raise ValidationError(message, parameter=min(unknown))
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if ids is None and not isinstance(text, str):
        raise ValidationError(
            "a prompt dict needs prompt (text) or prompt_token_ids", parameter="prompts", value=prompt
        )
    if ids is not None and not isinstance(ids, (list, tuple)):
        raise ValidationError("prompt_token_ids must be a list of ints", parameter="prompt_token_ids", value=ids)
    return text, None if ids is None else list(ids), salt
