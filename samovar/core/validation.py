"""The one door into the engine: sampling parameters checked against the model and the server's limits.

What passes here is inside the vocabulary and fits the context; a client hears of anything else with the name of its
field. What the engine still looks at behind this door guards against our own bugs. Knows no HTTP and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from samovar.core.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from samovar.errors import ValidationError

MAX_BAD_WORD_TOKENS = 1024
MAX_SALT_CHARS = 1024
MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may ask for. The first two come from the model, the rest from the configuration."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    max_choices: int = 128
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 256
    max_allowed_token_ids: int = 65536
    max_logit_bias: int = MAX_LOGIT_BIAS
    max_tools: int = 1024
    max_tools_bytes: int = 4 * 1024 * 1024
    max_tokens_ceiling: int | None = None
    """Operator's ceiling on generated tokens; applies to absent values as well."""
    allows_priority: bool = False


def _refuse(parameter: str, value: Any, message: str) -> None:
    raise ValidationError(f"{parameter}: {message}", parameter=parameter, value=value)


def check_prompt(token_ids: list[int], limits: RequestLimits, *, parameter: str = "prompt") -> None:
    """A prompt must be non-empty, inside the vocabulary, and leave room in the context."""
    if not token_ids:
        _refuse(parameter, token_ids, "must contain at least one token")
    if len(token_ids) > limits.max_model_len:
        _refuse(
            parameter,
            len(token_ids),
            f"has {len(token_ids)} tokens, but this model's context holds {limits.max_model_len}; shorten the prompt",
        )
    _check_ids(parameter, token_ids, limits.vocab_size)


def resolve_params(
    params: SamplingParams, num_prompt_tokens: int, limits: RequestLimits, eos_token_ids: Iterable[int] = ()
) -> SamplingParams:
    """Check `params` against the limits and fill what depends on them.

    `max_tokens` becomes an int: absent means the room left in the context, and larger values are clamped to that room
    (editors send large caps; the answer then ends with `length`). `eos_token_ids` are what the model ends with. Raises
    `ValidationError` naming the field.
    """
    if params.n > limits.max_choices:
        _refuse("n", params.n, f"at most {limits.max_choices} choices per request, got {params.n}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        wanted = limits.vocab_size if value == -1 else value
        if wanted is not None and wanted > limits.max_logprobs:
            _refuse(name, value, f"at most {limits.max_logprobs} (--max-logprobs), got {wanted}")
    _check_stops(params, limits)
    _check_token_lists(params, limits)
    room = limits.max_model_len - num_prompt_tokens
    ceiling = room if limits.max_tokens_ceiling is None else min(room, limits.max_tokens_ceiling)
    if room < 1 and params.max_tokens != 0:
        message = f"the prompt's {num_prompt_tokens} tokens fill the context of {limits.max_model_len}; nothing can be generated"
        _refuse("max_tokens", params.max_tokens, message)
    max_tokens = ceiling if params.max_tokens is None else min(params.max_tokens, ceiling)
    params = params.clone(max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
    if max_tokens > 0:
        _check_something_is_allowed(params, limits, eos_token_ids)
    return params


def _check_something_is_allowed(params: SamplingParams, limits: RequestLimits, eos_token_ids: Iterable[int]) -> None:
    """Some token must be left for the first place. What longer bad words forbid depends on what was sampled."""
    banned = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)} if params.min_tokens else set()
    allowed = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
    forbidden = {token for token in banned | ends if 0 <= token < limits.vocab_size}
    if (len(forbidden) < limits.vocab_size) if allowed is None else (allowed - forbidden):
        return
    taking_part = {"allowed_token_ids": allowed, "bad_words": banned, "min_tokens": ends}
    fields = [name for name, ids in taking_part.items() if ids]
    message = f"no token is left that may be sampled: {' and '.join(fields)} together forbid all; loosen one of them"
    _refuse(fields[0], getattr(params, fields[0]), message)


def _check_stops(params: SamplingParams, limits: RequestLimits) -> None:
    if len(params.stop) > limits.max_stop_strings:
        _refuse("stop", len(params.stop), f"at most {limits.max_stop_strings} stop strings, got {len(params.stop)}")
    for text in params.stop:
        if len(text) > limits.max_stop_chars:
            _refuse("stop", len(text), f"a stop string may have {limits.max_stop_chars} characters, got {len(text)}")


def _check_token_lists(params: SamplingParams, limits: RequestLimits) -> None:
    lists: tuple[tuple[str, Iterable[int] | None, int], ...] = (
        ("stop_token_ids", params.stop_token_ids, limits.max_stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids, limits.max_allowed_token_ids),
        ("logit_bias", params.logit_bias, limits.max_logit_bias),
    )
    for name, ids, most in lists:
        if ids is None:
            continue
        values = list(ids)
        if len(values) > most:
            _refuse(name, len(values), f"at most {most} entries, got {len(values)}")
        _check_ids(name, values, limits.vocab_size)
    words = params.bad_words_token_ids or []
    if sum(len(word) for word in words) > MAX_BAD_WORD_TOKENS:
        _refuse("bad_words", params.bad_words, f"at most {MAX_BAD_WORD_TOKENS} tokens in all")
    for word in words:
        _check_ids("bad_words", word, limits.vocab_size)


def _check_ids(parameter: str, ids: list[int], vocab_size: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            _refuse(parameter, token, f"token id {token!r} is outside the vocabulary of {vocab_size} tokens")


def check_routing(priority: int, cache_salt: str | None, limits: RequestLimits) -> None:
    """Priority needs the priority policy; a salt has 1 to 1024 characters."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        _refuse("priority", priority, f"must be a 64-bit integer, got {priority!r}")
    if priority and not limits.allows_priority:
        _refuse(
            "priority",
            priority,
            "this server schedules first come, first served; start it with --scheduling-policy priority",
        )
    if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_CHARS:
        _refuse("cache_salt", len(cache_salt), f"must have 1 to {MAX_SALT_CHARS} characters, got {len(cache_salt)}")
