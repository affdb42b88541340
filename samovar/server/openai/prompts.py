"""OpenAI bodies -> engine Requests, through `text.prepare.Preparer`: sampling fields, echo, truncation, and names of
fields as the caller spelled them in every refusal."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from samovar.core.events import PositionLogprobs
from samovar.core.request import Request
from samovar.core.sampling_params import OutputKind, SamplingParams
from samovar.errors import ValidationError
from samovar.server.dialogues import prepare_dialogue, spelled
from samovar.server.exchange import Exchange
from samovar.server.keys import routing_of
from samovar.server.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateFields,
    TokenizeRequest,
)
from samovar.server.openai.structured import structured_of
from samovar.server.openai.tools import definitions, modern_history, read_tools
from samovar.server.state import ServingState
from samovar.text.answer import AnswerPlan
from samovar.text.dialogue import Dialogue
from samovar.text.messages import last_text
from samovar.text.nesting import check_depth
from samovar.text.tokenizer import Tokenizer
from samovar.text.tool_schema import choice_from_openai

COMPLETION_MAX_TOKENS = 16
"""What OpenAI's completions endpoint generates when max_tokens is absent."""
MAX_CHOICES_PER_CALL = 4096
"""Most prompts times n of one call."""

_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "bad_words", "allowed_token_ids", "logit_bias", "prompt_logprobs", "stream_interval",
    "thinking_token_budget",
)  # fmt: skip


class _RawMessages(msgspec.Struct):
    """The messages with every field, also those only a template knows."""

    messages: list[dict[str, Any]]


@dataclass(slots=True)
class ChatPrompt:
    """A chat call ready for the engine."""

    request: Request
    plan: AnswerPlan
    role: str
    echo: str
    """Text to put before the answer; empty unless asked for."""
    num_truncated: int
    shows_reasoning: bool = True
    is_legacy: bool = False
    """Tools were asked for as functions."""


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
    exchange.response_id = prefix + (wanted or exchange.scope.get("samovar.request_id") or uuid.uuid4().hex)
    return exchange.response_id


def require_tokenizer(state: ServingState, parameter: str) -> Tokenizer:
    """The tokenizer, or a refusal if the server runs without one."""
    tokenizer = state.preparer.tokenizer
    if tokenizer is None:
        raise ValidationError(f"{parameter}: this server runs without a tokenizer; send token ids", parameter=parameter)
    return tokenizer


def _check_generate(asked: GenerateFields) -> None:
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


def _truncation(asked: GenerateFields) -> dict[str, Any]:
    return {
        "truncate_prompt_tokens": asked.truncate_prompt_tokens,
        "truncation_side": asked.truncation_side or "left",
    }


# --- chat


def read_messages(body: bytes) -> list[dict[str, Any]]:
    """The messages as they came; the chat template's own reading of them comes later, and refuses what is not text."""
    messages = msgspec.json.decode(body, type=_RawMessages).messages
    check_depth("messages", messages)
    return modern_history(messages)


def _wording(state: ServingState, asked: ChatCompletionRequest | TokenizeRequest, body: bytes) -> dict[str, Any]:
    """What a `Dialogue` takes about messages and rendering, checked."""
    if asked.chat_template is not None and not state.config.trust_request_chat_template:
        message = "chat_template: this server takes none from requests (--trust-request-chat-template)"
        raise ValidationError(message, parameter="chat_template")
    check_depth("chat_template_kwargs", asked.chat_template_kwargs)
    check_depth("documents", asked.documents)
    goes_on = bool(asked.continue_final_message)
    opens_turn = not goes_on if asked.add_generation_prompt is None else asked.add_generation_prompt
    if goes_on and opens_turn:
        message = "continue_final_message and add_generation_prompt exclude each other"
        raise ValidationError(message, parameter="continue_final_message")
    return {
        "messages": read_messages(body),
        "add_special_tokens": bool(asked.add_special_tokens),
        "documents": asked.documents,
        "add_generation_prompt": opens_turn,
        "continue_final_message": goes_on,
        "chat_template": asked.chat_template,
        "template_variables": asked.chat_template_kwargs or {},
    }


async def encode_chat(state: ServingState, asked: TokenizeRequest, body: bytes) -> list[int]:
    """Messages -> token ids, as a chat request would make them."""
    choice, tools = choice_from_openai(asked.tool_choice, definitions(asked.tools or ()))
    dialogue = Dialogue(
        **_wording(state, asked, body), tools=tools, tool_choice=choice, reasoning_effort=asked.reasoning_effort
    )
    preparer = state.preparer
    is_foreign = asked.chat_template is not None
    return await state.offload(len(body), lambda: preparer.encode_dialogue(dialogue), is_foreign=is_foreign)


def read_dialogue(
    state: ServingState, asked: ChatCompletionRequest, body: bytes
) -> tuple[Dialogue, dict[str, str], bool]:
    """A chat body -> what is asked, how the caller spells our names of fields, and whether tools are functions there."""
    tools = read_tools(asked, may_choose=state.config.enable_auto_tool_choice)
    wanted = structured_of(asked)
    options = asked.reasoning
    effort = asked.reasoning_effort
    if effort is None and options is not None:
        effort = options.effort or {True: "medium", False: "none", None: None}[options.enabled]
    dialogue = Dialogue(
        **_wording(state, asked, body),
        tools=tools.tools,
        tool_choice=tools.choice,
        parallel_tool_calls=tools.parallel,
        structured=None if wanted is None else wanted.params,
        reasoning_effort=effort,
    )
    spelling = {"max_tokens": "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"}
    spelling |= {"logprobs": "top_logprobs"}
    if wanted is not None:
        spelling |= wanted.spelling
    if tools.is_legacy:
        spelling |= {"tools": "functions", "tool_choice": "function_call"}
    return dialogue, spelling, tools.is_legacy


async def prepare_chat(
    state: ServingState, exchange: Exchange, asked: ChatCompletionRequest, body: bytes
) -> ChatPrompt:
    """A chat body -> one Request."""
    _check_generate(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ValidationError("top_logprobs needs logprobs: true", parameter="top_logprobs")
    dialogue, spelling, is_legacy = read_dialogue(state, asked, body)
    options = asked.reasoning
    given = _sampling(
        asked,
        max_tokens=asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
    )
    if asked.thinking_token_budget is None and options is not None:
        given["thinking_token_budget"] = options.max_tokens
    prepared = await prepare_dialogue(
        state,
        exchange,
        dialogue,
        given,
        size=len(body),
        spelling=spelling,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        **_truncation(asked),
    )
    messages = dialogue.messages
    role = state.config.response_role if dialogue.add_generation_prompt else asked.messages[-1].role
    echo = last_text(messages) if asked.echo and messages[-1]["role"] == role else ""
    is_hidden = asked.include_reasoning is False or bool(options and options.exclude)
    return ChatPrompt(
        prepared.request,
        prepared.plan,
        role,
        echo,
        prepared.num_truncated,
        shows_reasoning=not is_hidden,
        is_legacy=is_legacy,
    )


# --- completions


async def prepare_completion(state: ServingState, exchange: Exchange, asked: CompletionRequest) -> list[TextPrompt]:
    """A completions body -> one Request a prompt."""
    _check_generate(asked)
    prompts = split_prompts(asked.prompt, state.config.max_prompts)
    if len(prompts) * (asked.n or 1) > MAX_CHOICES_PER_CALL:
        raise ValidationError(f"n: prompts times n may be {MAX_CHOICES_PER_CALL} at most, send fewer", parameter="n")
    logprobs = asked.logprobs
    wanted = [k for k in (asked.prompt_logprobs, logprobs if asked.echo else None) if k is not None]
    prompt_logprobs = None if not wanted else -1 if -1 in wanted else max(wanted)

    wanted_form = structured_of(asked)
    given = _sampling(
        asked,
        max_tokens=asked.max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=None if wanted_form is None else wanted_form.params,
    )
    spelling = {} if wanted_form is None else wanted_form.spelling
    routing = _truncation(asked) | routing_of(exchange.scope, priority=asked.priority, cache_salt=asked.cache_salt)

    def work() -> list[TextPrompt]:
        params = state.preparer.params(given, max_tokens=COMPLETION_MAX_TOKENS)
        return [_text_prompt(state, asked, prompt, params, routing) for prompt in prompts]

    size = sum(map(len, prompts)) + sum(len(v) for v in given.values() if isinstance(v, (str, list, dict)))
    return await state.offload(size, lambda: spelled(work, spelling), waits=wanted_form is not None)


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
    state: ServingState,
    asked: CompletionRequest,
    prompt: str | list[int],
    params: SamplingParams,
    routing: dict[str, Any],
) -> TextPrompt:
    preparer = state.preparer
    ids = prompt
    if isinstance(ids, str):
        ids = preparer.encode_text(ids, add_special_tokens=asked.add_special_tokens is not False)
    request = preparer.from_ids(ids, params, **routing)
    num_truncated = len(ids) - len(request.prompt_token_ids)
    echo = ""
    if asked.echo and isinstance(prompt, str) and not num_truncated:
        echo = prompt
    elif asked.echo:
        tokenizer = require_tokenizer(state, "echo")
        echo = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
    return TextPrompt(request, echo, num_truncated)
