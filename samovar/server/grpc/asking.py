"""GenerateRequest -> Request, through the same door as every other API; refusals name the message's own fields."""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.types import Scope

from samovar.core.request import Request
from samovar.core.sampling_params import OutputKind
from samovar.core.structured import StructuredOutputsParams
from samovar.errors import ValidationError
from samovar.server.dialogues import spelled
from samovar.server.keys import routing_of
from samovar.server.state import ServingState

MAX_TOKENS = 16
"""What is generated where a request does not say."""
MAX_REQUEST_ID = 256

_GROUPS: dict[str, tuple[str, ...]] = {
    "sampling": ("n", "top_k", "top_p", "min_p", "seed"),
    "decoding": ("presence_penalty", "frequency_penalty", "repetition_penalty"),
    "stopping": ("max_tokens", "min_tokens"),
    "output": ("logprobs", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens"),
}
"""Message -> its optional fields that are sampling parameters of the same name."""
_PATHS = {name: f"{group}.{name}" for group, names in _GROUPS.items() for name in names} | {
    "logit_bias": "decoding.logit_bias",
    "allowed_token_ids": "decoding.allowed_token_ids",
    "bad_words": "decoding.bad_words",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
    "cache_salt": "cache.salt",
}
"""Sampling parameter -> the field that a client knows."""


class Asked(NamedTuple):
    """A request ready for the engine, and what its replies have."""

    request: Request
    num_truncated: int
    shows_text: bool
    shows_token_ids: bool


async def prepare(state: ServingState, scope: Scope, asked: Any) -> Asked:
    """Check a GenerateRequest. `scope` has the caller and the metadata. Raises `ValidationError`."""
    state.check_model(asked.model or None)
    kind = asked.WhichOneof("prompt")
    if kind is None:
        raise ValidationError("prompt: give text or token_ids", parameter="prompt")
    if len(asked.request_id) > MAX_REQUEST_ID:
        message = f"request_id may have {MAX_REQUEST_ID} characters, got {len(asked.request_id)}"
        raise ValidationError(message, parameter="request_id")
    structured = _structured(asked.decoding)
    shows_text = asked.output.text if asked.output.HasField("text") else True
    values = _values(asked) | {"structured_outputs": structured, "output_kind": OutputKind.DELTA}
    priority = asked.priority if asked.HasField("priority") else None
    salt = asked.cache.salt if asked.cache.HasField("salt") else None
    field = asked.decoding.WhichOneof("structured")
    names = _PATHS | {"prompt": "token_ids" if kind == "token_ids" else kind}
    names |= dict.fromkeys(("structured_outputs", f"structured_outputs.{field}"), f"decoding.{field}")

    def work() -> tuple[Request, int]:
        routing = routing_of(scope, priority=priority, cache_salt=salt) | _truncation(asked)
        return _request(state, asked, values, routing)

    size = len(asked.text) if kind == "text" else len(asked.token_ids.ids)
    request, given = await state.offload(size, lambda: spelled(work, names), waits=structured is not None)
    shows_ids = asked.output.token_ids if asked.output.HasField("token_ids") else True
    return Asked(request, given - len(request.prompt_token_ids), shows_text, shows_ids)


def _request(state: ServingState, asked: Any, values: dict[str, Any], routing: dict[str, Any]) -> tuple[Request, int]:
    """The request, and how many tokens its prompt had before any was cut off."""
    preparer = state.preparer
    params = preparer.params(values, max_tokens=MAX_TOKENS)
    if asked.WhichOneof("prompt") == "text":
        adds = asked.add_special_tokens if asked.HasField("add_special_tokens") else True
        ids = preparer.encode_text(asked.text, add_special_tokens=adds)
    else:
        ids = list(asked.token_ids.ids)
    return preparer.from_ids(ids, params, **routing), len(ids)


def _values(asked: Any) -> dict[str, Any]:
    """The sampling parameters that are set."""
    values: dict[str, Any] = {"temperature": asked.temperature} if asked.HasField("temperature") else {}
    for group, names in _GROUPS.items():
        message = getattr(asked, group)
        values |= {name: getattr(message, name) for name in names if message.HasField(name)}
    decoding, stopping = asked.decoding, asked.stopping
    lists = {
        "logit_bias": dict(decoding.logit_bias),
        "allowed_token_ids": list(decoding.allowed_token_ids),
        "bad_words": list(decoding.bad_words),
        "stop": list(stopping.stop),
        "stop_token_ids": list(stopping.stop_token_ids),
    }
    values |= {name: items for name, items in lists.items() if items}
    if asked.cache.skip_reading_prefix_cache:
        values["skip_reading_prefix_cache"] = True
    return values | {
        "include_stop_str_in_output": stopping.include_stop_str_in_output,
        "ignore_eos": stopping.ignore_eos,
    }


def _structured(decoding: Any) -> StructuredOutputsParams | None:
    """What the text must look like."""
    field = decoding.WhichOneof("structured")
    if field is None:
        return None
    value: Any = getattr(decoding, field)
    wanted: dict[str, Any] = {field: list(value.texts) if field == "choice" else value}
    try:
        return StructuredOutputsParams(**wanted)
    except ValidationError as error:
        raise ValidationError(f"decoding.{field}: {error}", parameter=f"decoding.{field}", value=error.value) from None


def _truncation(asked: Any) -> dict[str, Any]:
    if not asked.HasField("truncate_prompt_tokens"):
        if asked.truncate_from_end:
            raise ValidationError("truncate_from_end needs truncate_prompt_tokens", parameter="truncate_from_end")
        return {}
    side = "right" if asked.truncate_from_end else "left"
    return {"truncate_prompt_tokens": asked.truncate_prompt_tokens, "truncation_side": side}
