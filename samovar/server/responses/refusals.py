"""Fields of /v1/responses that this server has no use for: refused by name, or skipped with a notice."""

from __future__ import annotations

from typing import Any

from samovar.server.refusal import Fields, Refusal, absent_or, empty


def _anything(value: Any, fields: Fields) -> bool:
    return True


REFUSED: dict[str, Refusal] = {
    "conversation": Refusal(empty, "conversations are not kept; use previous_response_id, or send all items"),
    "prompt": Refusal(empty, "stored prompt templates are not available; send input and instructions"),
    "context_management": Refusal(empty, "the server does not shorten conversations; use truncation, or send less"),
    "moderation": Refusal(empty, "nothing is moderated here; leave the field out"),
    "n": Refusal(absent_or(1), "a response is one answer; send several requests"),
    "max_tokens": Refusal(empty, "use max_output_tokens"),
    "max_completion_tokens": Refusal(empty, "use max_output_tokens"),
    "messages": Refusal(empty, "use input"),
    "response_format": Refusal(empty, "use text.format"),
    "reasoning_effort": Refusal(empty, "use reasoning.effort"),
    "logprobs": Refusal(empty, 'use include: ["message.output_text.logprobs"] and top_logprobs'),
    "lora_request": Refusal(empty, "adapters are not available; leave the field out"),
    "kv_transfer_params": Refusal(empty, "leave the field out"),
    "previous_input_messages": Refusal(empty, "send the items as input"),
}
"""Fields that would change the answer, with what to do instead."""

SKIPPED: dict[str, str] = {
    "access_programs": "this server has none",
    "background_options": "background responses start at once",
    "image": "pictures are not taken here",
    "prompt_cache_options": "equal beginnings of prompts are reused anyhow, for as long as there is room",
}
"""Fields that cannot change the answer, with why they are skipped."""

KNOWN: dict[str, Refusal] = REFUSED | {name: Refusal(_anything, reason) for name, reason in SKIPPED.items()}
"""All of them: what a body is decoded with."""
