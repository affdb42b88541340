"""A body of /v1/responses -> a `Request` and the response object that its answer will fill."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from samovar.core.request import Request
from samovar.core.sampling_params import OutputKind
from samovar.core.structured import StructuredOutputsParams
from samovar.errors import ValidationError
from samovar.server.dialogues import prepare_dialogue, spelled
from samovar.server.exchange import Exchange
from samovar.server.keys import caller_of
from samovar.server.openai.structured import given_values
from samovar.server.responses import refusals
from samovar.server.responses.items import Conversation, item_type
from samovar.server.responses.notices import Notices
from samovar.server.responses.output import new_id
from samovar.server.responses.schema import ReasoningEcho, ResponseObject, ResponseRequest
from samovar.server.responses.store import KeptResponse, ResponseStore, ids_of
from samovar.server.responses.tools import ToolSet, read_choice, read_tools
from samovar.server.state import ServingState
from samovar.text.answer import AnswerPlan
from samovar.text.dialogue import Dialogue
from samovar.text.nesting import check_depth
from samovar.text.prepare import Preparer

LOGPROBS = "message.output_text.logprobs"

_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "bad_words", "allowed_token_ids", "logit_bias", "thinking_token_budget",
)  # fmt: skip
_SPELLINGS = {
    "messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
"""Our name of a field -> its name here."""


@dataclass(slots=True, kw_only=True)
class ReadResponse:
    """A response that is ready to be generated. `input_items` (a JSON list) are its own, without those of earlier
    responses; empty if the response is not to be stored."""

    owner: str
    response: ResponseObject
    request: Request
    plan: AnswerPlan
    tools: ToolSet
    input_items: bytes
    item_ids: tuple[str, ...]
    top_logprobs: int | None
    obfuscates: bool


class _Read(NamedTuple):
    """What a request says, before it is rendered."""

    dialogue: Dialogue
    tools: ToolSet
    input_items: bytes
    item_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sources:
    """Where the items of a request come from."""

    owner: str
    store: ResponseStore
    earlier: Sequence[KeptResponse]
    given: list[dict[str, Any]]

    def find(self, item_id: str) -> dict[str, Any] | None:
        """The item that a reference means: one of the same request, or a stored one."""
        for item in self.given:
            if item.get("id") == item_id and item_type(item, "input") != "item_reference":
                return item
        return self.store.find_item(self.owner, item_id)


async def prepare_response(
    state: ServingState, exchange: Exchange, asked: ResponseRequest, body: bytes, model: str
) -> ReadResponse:
    """Check everything, render and encode. Raises `ValidationError` and `NotFoundError`."""
    store, notices, owner = state.responses, Notices(), caller_of(exchange.scope).name
    _check(asked)
    _note_skipped(asked, body, notices)
    response = _response(asked, model, store, notices)
    earlier = _chain(store, owner, asked.previous_response_id)
    sources = _Sources(owner=owner, store=store, earlier=earlier, given=_as_items(asked))
    values, names = _sampling(asked), _names(asked)

    def work() -> _Read:
        dialogue, tools = _dialogue(asked, sources, notices)
        if asked.truncation == "auto":
            dialogue = _shortened(state.preparer, dialogue, notices)
        kept = [_with_id(item, sources) for item in sources.given] if response.store else []
        return _Read(dialogue, tools, msgspec.json.encode(kept), ids_of(kept))

    size = len(body) + sum(response.size for response in earlier)
    said = await state.offload(size, lambda: spelled(work, names))
    prepared = await prepare_dialogue(
        state,
        exchange,
        said.dialogue,
        values,
        size=size,
        spelling=names,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
    )
    params = prepared.request.params
    response.temperature, response.top_p = params.temperature, params.top_p
    if notices.texts:
        response.notices = notices.texts
    return ReadResponse(
        owner=owner,
        response=response,
        request=prepared.request,
        plan=prepared.plan,
        tools=said.tools,
        input_items=said.input_items,
        item_ids=said.item_ids,
        top_logprobs=values["logprobs"],
        obfuscates=bool(asked.stream_options and asked.stream_options.include_obfuscation),
    )


# --- what is asked


def _check(asked: ResponseRequest) -> None:
    """What can be refused without looking at items, tools or the model."""
    if asked.stream_options is not None and not asked.stream:
        raise ValidationError("stream_options is only allowed with stream: true", parameter="stream_options")
    if asked.top_logprobs and LOGPROBS not in (asked.include or ()):
        raise ValidationError(f'top_logprobs needs include: ["{LOGPROBS}"]', parameter="top_logprobs")
    if asked.background and asked.store is False:
        raise ValidationError("background needs store: true: its answer is fetched later", parameter="background")


def _note_skipped(asked: ResponseRequest, body: bytes, notices: Notices) -> None:
    """Tell of what is accepted and changes nothing."""
    names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, reason in refusals.SKIPPED.items():
        if name in names:
            notices.add(f"{name} was skipped: {reason}")
    reasoning = asked.reasoning
    if reasoning is not None:
        if (reasoning.summary or "none") != "none" or reasoning.generate_summary:
            notices.add("reasoning.summary was skipped: reasoning is given as it is, and not summarized")
        if (reasoning.context or "auto") != "auto" or (reasoning.mode or "standard") != "standard":
            notices.add("reasoning.context and reasoning.mode were skipped: models served here have no such settings")
    if asked.text is not None and (asked.text.verbosity or "medium") != "medium":
        notices.add("text.verbosity was skipped: models served here have no such setting")
    if "reasoning.encrypted_content" in (asked.include or ()):
        notices.add("reasoning is given as it is, not encrypted; send its items back and it is used")


def _as_items(asked: ResponseRequest) -> list[dict[str, Any]]:
    given = asked.input
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not given and asked.previous_response_id is None:
        raise ValidationError("input must not be an empty list", parameter="input")
    return given


def _chain(store: ResponseStore, owner: str, response_id: str | None) -> list[KeptResponse]:
    """The responses that the request goes on from."""
    name = "previous_response_id"
    if response_id is None:
        return []
    if not store.max_bytes:
        message = f"{name}: this server stores no responses (--no-enable-responses-store); send all items as input"
        raise ValidationError(message, parameter=name, value=response_id)
    if store.running(owner, response_id) is not None:
        message = f"{name}: {response_id} is still running; wait for its end, or cancel it"
        raise ValidationError(message, parameter=name, value=response_id)
    return store.chain(owner, response_id)


def _dialogue(asked: ResponseRequest, sources: _Sources, notices: Notices) -> tuple[Dialogue, ToolSet]:
    """All items and tools -> messages and definitions."""
    check_depth("input", sources.given)
    conversation = Conversation(notices, sources.find)
    if asked.instructions:
        conversation.instruct(asked.instructions)
    for earlier in sources.earlier:
        for at, item in enumerate([*earlier.items(), *earlier.output()]):
            conversation.add(item, f"previous_response_id: item {at} of {earlier.response_id}")
    for at, item in enumerate(sources.given):
        conversation.add(item, "input" if isinstance(asked.input, str) else f"input[{at}]")
    if not conversation.messages:
        raise ValidationError("input holds nothing that the model can read", parameter="input")
    tools = read_tools([*(asked.tools or ()), *conversation.tools], notices)
    choice, definitions = read_choice(asked.tool_choice, tools)
    variables = asked.chat_template_kwargs or {}
    check_depth("chat_template_kwargs", variables)
    dialogue = Dialogue(
        messages=conversation.messages,
        tools=definitions,
        tool_choice=choice,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        structured=_structured(asked),
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
        template_variables=variables,
    )
    return dialogue, tools


def _structured(asked: ResponseRequest) -> StructuredOutputsParams | None:
    """What text.format or structured_outputs asks of the answer."""
    wanted = asked.text.format if asked.text else None
    own = None
    if asked.structured_outputs is not None:
        given = given_values(asked.structured_outputs)
        check_depth("structured_outputs", given)
        own = StructuredOutputsParams(**given)
    if wanted is None or wanted.type == "text":
        return own
    if own is not None:
        message = "structured_outputs and text.format exclude each other; send one"
        raise ValidationError(message, parameter="structured_outputs")
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.schema is None:
        raise ValidationError("text.format.schema is required", parameter="text.format.schema")
    check_depth("text.format.schema", wanted.schema)
    return StructuredOutputsParams(json=wanted.schema)


def _sampling(asked: ResponseRequest) -> dict[str, Any]:
    """The sampling values the caller gave."""
    values = {name: getattr(asked, name) for name in _SAMPLING_FIELDS}
    values["max_tokens"] = asked.max_output_tokens
    values["logprobs"] = (asked.top_logprobs or 0) if LOGPROBS in (asked.include or ()) else None
    values["output_kind"] = OutputKind.DELTA
    return values


def _names(asked: ResponseRequest) -> dict[str, str]:
    """Our name of a field -> its name here."""
    if asked.structured_outputs is not None:
        return _SPELLINGS
    return _SPELLINGS | {"structured_outputs": "text.format", "structured_outputs.json": "text.format.schema"}


# --- truncation


def _shortened(preparer: Preparer, dialogue: Dialogue, notices: Notices) -> Dialogue:
    """The dialogue without its oldest turns, if it is too long for the context: instructions and the last turn stay.

    It begins with a user's message then. What is still too long is refused later, as without truncation.
    """
    room = preparer.limits.max_model_len - 1
    messages = list(dialogue.messages)
    if len(messages) <= room and len(preparer.encode_dialogue(dialogue)) <= room:
        return dialogue
    first = next((at for at, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    # Every message has a token, so that what is further back than `room` of them need not be tried.
    oldest = max(first, len(messages) - room)
    starts = [at for at in range(oldest + 1, len(messages)) if messages[at]["role"] == "user"]
    low, high = 0, len(starts) - 1
    while low < high:  # the earliest start that fits; the last one, if none does
        middle = (low + high) // 2
        shorter = replace(dialogue, messages=[*messages[:first], *messages[starts[middle] :]])
        if len(preparer.encode_dialogue(shorter)) <= room:
            high = middle
        else:
            low = middle + 1
    if not starts:
        return dialogue
    notices.add(f"truncation: the conversation was too long; its first {starts[low] - first} messages were left out")
    return replace(dialogue, messages=[*messages[:first], *messages[starts[low] :]])


# --- what is answered


def _response(asked: ResponseRequest, model: str, store: ResponseStore, notices: Notices) -> ResponseObject:
    """The response before anything was generated."""
    is_stored = asked.store is not False and store.max_bytes > 0
    if asked.store and not is_stored:
        notices.add("store was skipped: this server keeps no responses (--no-enable-responses-store)")
    if asked.background and not is_stored:
        message = (
            "background: this server keeps no responses (--no-enable-responses-store), so none could be fetched later"
        )
        raise ValidationError(message, parameter="background")
    text = asked.text
    wanted = text.format if text else None
    return ResponseObject(
        id=new_id("resp_"),
        created_at=int(time.time()),
        status="in_progress",
        background=bool(asked.background),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        max_tool_calls=asked.max_tool_calls,
        metadata=asked.metadata or {},
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        prompt_cache_key=asked.prompt_cache_key,
        reasoning=ReasoningEcho(effort=asked.reasoning.effort if asked.reasoning else None),
        safety_identifier=asked.safety_identifier,
        store=is_stored,
        text={
            "format": {"type": "text"} if wanted is None else _without_nulls(wanted),
            "verbosity": (text.verbosity if text else None) or "medium",
        },
        tool_choice="auto" if asked.tool_choice is None else asked.tool_choice,
        tools=asked.tools or [],
        top_logprobs=asked.top_logprobs or 0,
        truncation=asked.truncation or "disabled",
        user=asked.user,
    )


def _without_nulls(record: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(record).items() if value is not None}


_PREFIXES = {
    "message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_",
    "custom_tool_call": "ctc_", "custom_tool_call_output": "ctco_",
}  # fmt: skip


def _with_id(item: dict[str, Any], sources: _Sources) -> dict[str, Any]:
    """An input item as it is kept: with its type, an id and a status, messages in their long form, references resolved."""
    kind = item_type(item, "input")
    if kind == "item_reference":
        return sources.find(item["id"]) or item
    kept: dict[str, Any] = {"id": new_id(_PREFIXES.get(kind, "item_")), "type": kind, "status": "completed"}
    kept |= {name: value for name, value in item.items() if value is not None}
    if kind == "message" and isinstance(kept.get("content"), str):
        part: dict[str, Any] = {"type": "input_text", "text": kept["content"]}
        if kept.get("role") == "assistant":
            part = {"type": "output_text", "text": kept["content"], "annotations": []}
        kept["content"] = [part]
    return kept
