"""OpenAI bodies -> engine Requests, through `text.prepare.Preparer`: sampling fields, echo, truncation, and names of
fields as the caller spelled them in every refusal."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from samovar.core.events import PositionLogprobs
from samovar.core.request import Request
from samovar.core.sampling_params import OutputKind, SamplingParams
from samovar.errors import ValidationError
from samovar.server.exchange import Exchange
from samovar.server.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateFields,
    TokenizeRequest,
)
from samovar.server.state import ServingState
from samovar.text.messages import last_text
from samovar.text.tokenizer import Tokenizer

T = TypeVar("T")

COMPLETION_MAX_TOKENS = 16
"""What OpenAI's completions endpoint generates when max_tokens is absent."""
MAX_CHOICES_PER_CALL = 4096
"""Most prompts times n of one call."""
MAX_DEPTH = 64
"""Levels of objects and lists in messages, documents and template variables."""

_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "bad_words", "allowed_token_ids", "logit_bias", "prompt_logprobs", "stream_interval",
)  # fmt: skip


class _RawMessages(msgspec.Struct):
    """The messages with every field, also those only a template knows."""

    messages: list[dict[str, Any]]


@dataclass(slots=True)
class ChatPrompt:
    """A chat call ready for the engine."""

    request: Request
    role: str
    echo: str
    """Text to put before the answer; empty unless asked for."""
    num_truncated: int


@dataclass(slots=True)
class TextPrompt:
    """One prompt of a completions call, ready for the engine."""

    request: Request
    echo: str
    num_truncated: int
    logprobs: list[PositionLogprobs | None] | None = None
    """The prompt's logprobs, once the engine sent them."""


def response_id(prefix: str, wanted: str | None, exchange: Exchange) -> str:
    """The id the caller sees. Never used inside the engine: two calls may ask for the same one."""
    return prefix + (wanted or exchange.scope.get("samovar.request_id") or uuid.uuid4().hex)


def require_tokenizer(state: ServingState, parameter: str) -> Tokenizer:
    """The tokenizer, or a refusal if the server runs without one."""
    tokenizer = state.preparer.tokenizer
    if tokenizer is None:
        raise ValidationError(f"{parameter}: this server runs without a tokenizer; send token ids", parameter=parameter)
    return tokenizer


def _check_generate(state: ServingState, asked: GenerateFields) -> None:
    """What chat and completions refuse alike, before any prompt is looked at."""
    if asked.stream_options is not None and not asked.stream:
        raise ValidationError("stream_options is only allowed with stream: true", parameter="stream_options")
    if asked.prompt_logprobs is not None and asked.stream:
        raise ValidationError("prompt_logprobs cannot be streamed; set stream to false", parameter="prompt_logprobs")
    if asked.truncation_side is not None and asked.truncate_prompt_tokens is None:
        raise ValidationError("truncation_side needs truncate_prompt_tokens", parameter="truncation_side")


def _sampling(asked: GenerateFields, **more: Any) -> dict[str, Any]:
    """The sampling values the caller gave."""
    values = {name: getattr(asked, name) for name in _SAMPLING_FIELDS}
    return values | more | {"output_kind": OutputKind.DELTA}


def _routing(asked: GenerateFields) -> dict[str, Any]:
    """What `Preparer.from_ids` takes besides ids and sampling."""
    return {
        "truncate_prompt_tokens": asked.truncate_prompt_tokens,
        "truncation_side": asked.truncation_side or "left",
        "priority": asked.priority or 0,
        "cache_salt": asked.cache_salt,
    }


def _spelled(work: Callable[[], T], names: Mapping[str, str]) -> T:
    """Run `work`; a refusal names fields as the caller spelled them."""
    try:
        return work()
    except ValidationError as error:
        ours = error.parameter
        if ours is None or names.get(ours, ours) == ours:
            raise
        theirs = names[ours]
        message = str(error)
        if message.startswith(ours):
            message = theirs + message[len(ours) :]
        raise type(error)(message, parameter=theirs, value=error.value) from None


# --- chat


def read_messages(body: bytes) -> list[dict[str, Any]]:
    """The messages as they came; the chat template's own reading of them comes later, and refuses what is not text."""
    messages = msgspec.json.decode(body, type=_RawMessages).messages
    _check_depth("messages", messages)
    return messages


def _check_depth(parameter: str, value: Any) -> None:
    """Refuse free-form data nested deeper than any template needs: what walks it later may recurse."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for part in level if isinstance(part, (dict, list)) for item in _items(part)]
        if not level:
            return
    raise ValidationError(f"{parameter}: nested deeper than {MAX_DEPTH} levels", parameter=parameter)


def _items(part: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part


def _rendering(state: ServingState, asked: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    """Everything about rendering, checked."""
    if asked.chat_template is not None and not state.config.trust_request_chat_template:
        message = "chat_template: this server takes none from requests (--trust-request-chat-template)"
        raise ValidationError(message, parameter="chat_template")
    _check_depth("chat_template_kwargs", asked.chat_template_kwargs)
    _check_depth("documents", asked.documents)
    goes_on = bool(asked.continue_final_message)
    opens_turn = not goes_on if asked.add_generation_prompt is None else asked.add_generation_prompt
    if goes_on and opens_turn:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise ValidationError(message, parameter="continue_final_message")
    variables = state.config.default_chat_template_kwargs | (asked.chat_template_kwargs or {})
    return {
        "add_special_tokens": bool(asked.add_special_tokens),
        "documents": asked.documents,
        "add_generation_prompt": opens_turn,
        "continue_final_message": goes_on,
        "chat_template": asked.chat_template,
        "template_variables": variables,
    }


async def encode_chat(state: ServingState, asked: TokenizeRequest, body: bytes) -> list[int]:
    """Messages -> token ids, as a chat request would make them."""
    messages = read_messages(body)
    rendering, preparer = _rendering(state, asked), state.preparer
    is_foreign = asked.chat_template is not None
    return await state.offload(
        len(body), lambda: preparer.encode_messages(messages, **rendering), is_foreign=is_foreign
    )


async def prepare_chat(state: ServingState, asked: ChatCompletionRequest, body: bytes) -> ChatPrompt:
    """A chat body -> one Request."""
    _check_generate(state, asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ValidationError("top_logprobs needs logprobs: true", parameter="top_logprobs")
    messages = read_messages(body)
    rendering, routing = _rendering(state, asked), _routing(asked)
    limit_name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    names = {"logprobs": "top_logprobs", "max_tokens": limit_name}
    given = _sampling(
        asked, max_tokens=getattr(asked, limit_name), logprobs=(asked.top_logprobs or 0) if asked.logprobs else None
    )
    preparer = state.preparer

    def work() -> tuple[Request, int]:
        params = preparer.params(given)
        ids = preparer.encode_messages(messages, **rendering)
        request = preparer.from_ids(ids, params, parameter="messages", **routing)
        return request, len(ids) - len(request.prompt_token_ids)

    is_foreign = asked.chat_template is not None
    request, num_truncated = await state.offload(len(body), lambda: _spelled(work, names), is_foreign=is_foreign)
    role = state.config.response_role if rendering["add_generation_prompt"] else asked.messages[-1].role
    echo = last_text(messages) if asked.echo and messages[-1]["role"] == role else ""
    return ChatPrompt(request, role, echo, num_truncated)


# --- completions


async def prepare_completion(state: ServingState, asked: CompletionRequest) -> list[TextPrompt]:
    """A completions body -> one Request a prompt."""
    _check_generate(state, asked)
    prompts = split_prompts(asked.prompt, state.config.max_prompts)
    if len(prompts) * (asked.n or 1) > MAX_CHOICES_PER_CALL:
        raise ValidationError(f"n: prompts times n may be {MAX_CHOICES_PER_CALL} at most, send fewer", parameter="n")
    logprobs = asked.logprobs
    wanted = [k for k in (asked.prompt_logprobs, logprobs if asked.echo else None) if k is not None]
    prompt_logprobs = None if not wanted else -1 if -1 in wanted else max(wanted)

    given = _sampling(asked, max_tokens=asked.max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def work() -> list[TextPrompt]:
        params = state.preparer.params(given, max_tokens=COMPLETION_MAX_TOKENS)
        return [_text_prompt(state, asked, prompt, params) for prompt in prompts]

    return await state.offload(sum(map(len, prompts)), work)


def split_prompts(prompt: str | Sequence[str | int | Sequence[int]], most: int) -> list[str | list[int]]:
    """The four spellings of `prompt` -> a list of texts or of id lists. Raises `ValidationError`."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ValidationError("prompt must not be an empty list", parameter="prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [cast(list[int], list(prompt))]
    if kinds not in ({str}, {list}):
        raise ValidationError("prompt mixes texts, ids and lists; send one kind", parameter="prompt")
    if len(prompt) > most:
        raise ValidationError(f"prompt: at most {most} prompts per request, got {len(prompt)}", parameter="prompt")
    return cast(list[str | list[int]], list(prompt))


def _text_prompt(
    state: ServingState, asked: CompletionRequest, prompt: str | list[int], params: SamplingParams
) -> TextPrompt:
    preparer = state.preparer
    ids = prompt
    if isinstance(ids, str):
        ids = preparer.encode_text(ids, add_special_tokens=asked.add_special_tokens is not False)
    request = preparer.from_ids(ids, params, **_routing(asked))
    num_truncated = len(ids) - len(request.prompt_token_ids)
    echo = ""
    if asked.echo and isinstance(prompt, str) and not num_truncated:
        echo = prompt
    elif asked.echo:
        tokenizer = require_tokenizer(state, "echo")
        echo = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
    return TextPrompt(request, echo, num_truncated)
