"""Fields of capabilities this build does not have. Their harmless values are accepted; any other is refused by name.

A field that would change the answer is never ignored. When a capability arrives, its row leaves this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from samovar.errors import ValidationError

Fields = Mapping[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`accepts(value, fields)` says whether the value asks for nothing; `remedy` tells the caller what to do."""

    accepts: Callable[[Any, Fields], bool]
    remedy: str

    def check(self, name: str, value: Any, fields: Fields) -> None:
        """Raise `ValidationError` naming the field unless the value asks for nothing."""
        if not self.accepts(value, fields):
            raise ValidationError(f"{name} is not supported by this server: {self.remedy}", parameter=name)


def _empty(value: Any, fields: Fields) -> bool:
    return value is None or value == [] or value == {} or value == ""


def _absent_or(*harmless: Any) -> Callable[[Any, Fields], bool]:
    def accepts(value: Any, fields: Fields) -> bool:
        return value is None or any(type(value) is type(known) and value == known for known in harmless)

    return accepts


def _plain(name: str, fields: Fields) -> Any:
    raw = fields.get(name)
    return None if raw is None else msgspec.json.decode(raw)


def _same_as_n(value: Any, fields: Fields) -> bool:
    n = _plain("n", fields)
    return value is None or (type(value) is int and value == (1 if n is None else n))


def _tools(value: Any, fields: Fields) -> bool:
    return value is None or (isinstance(value, list) and (not value or _plain("tool_choice", fields) == "none"))


def _tool_choice(value: Any, fields: Fields) -> bool:
    if value is None or value == "none":
        return True
    return bool(value == "auto") and not _plain("tools", fields)


def _text_format(value: Any, fields: Fields) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


def _no_reasoning(value: Any, fields: Fields) -> bool:
    return _empty(value, fields) or value == "none" or value == {"effort": "none"}


_DECODING = Refusal(_empty, "constrained decoding is not available; leave the field out")
_MEDIA = Refusal(_empty, "the model takes text only; leave the field out")
_LORA = Refusal(_empty, "adapters are not available; leave the field out")
_PRIVATE = Refusal(_empty, "leave the field out")
_REASONING = "reasoning is not told apart from the answer; leave it out (templates take chat_template_kwargs)"

SHARED: dict[str, Refusal] = {
    "response_format": Refusal(_text_format, 'only {"type": "text"} is available'),
    "structured_outputs": _DECODING,
    "guided_json": _DECODING,
    "guided_regex": _DECODING,
    "guided_choice": _DECODING,
    "guided_grammar": _DECODING,
    "guided_decoding_backend": _DECODING,
    "guided_whitespace_pattern": _DECODING,
    "grammar": _DECODING,
    "json_schema": _DECODING,
    "best_of": Refusal(_same_as_n, "use n; best_of may only repeat it"),
    "use_beam_search": Refusal(_absent_or(False), "beam search is offered by LLM.beam_search in Python"),
    "length_penalty": Refusal(_absent_or(1, 1.0), "it belongs to beam search; leave it at 1"),
    "prompt_embeds": Refusal(_empty, "send text or token ids"),
    "logits_processors": Refusal(_empty, "use logit_bias, bad_words or allowed_token_ids"),
    "logit_processors": Refusal(_empty, "use logit_bias, bad_words or allowed_token_ids"),
    "vllm_xargs": _PRIVATE,
    "lora_request": _LORA,
    "lora_name": _LORA,
    "lora_path": _LORA,
    "mm_processor_kwargs": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "kv_transfer_params": _PRIVATE,
    "ec_transfer_params": _PRIVATE,
    "repetition_detection": Refusal(_empty, "use the penalties"),
    "watermarking": _PRIVATE,
    "logprob_token_ids": Refusal(_empty, "use logprobs"),
    "reasoning_effort": Refusal(_absent_or("none"), _REASONING),
    "reasoning": Refusal(_no_reasoning, _REASONING),
    "include_reasoning": Refusal(_absent_or(True), _REASONING),
    "thinking_token_budget": Refusal(_absent_or(), _REASONING),
    "return_prompt_text": Refusal(_absent_or(False), "use echo"),
    "return_weight_versions": Refusal(_absent_or(False), "leave the field out"),
    "routed_experts_prompt_start": _PRIVATE,
}

CHAT: dict[str, Refusal] = SHARED | {
    "tools": Refusal(_tools, 'tool calls are not available; leave tools out, or send tool_choice "none"'),
    "tool_choice": Refusal(_tool_choice, 'tool calls are not available; use "none"'),
    "functions": Refusal(_empty, "tool calls are not available; leave the field out"),
    "function_call": Refusal(_absent_or("none", "auto"), "tool calls are not available; leave the field out"),
    "parallel_tool_calls": Refusal(_absent_or(True, False), "it must be true or false"),
    "audio": _MEDIA,
    "modalities": Refusal(_absent_or([], ["text"]), 'only ["text"] is available'),
    "web_search_options": Refusal(_absent_or(), "the server does not search; leave the field out"),
}

COMPLETIONS: dict[str, Refusal] = SHARED | {
    "suffix": Refusal(_empty, "put the model's own fill-in-the-middle tokens into the prompt"),
}

NONE: dict[str, Refusal] = {}
TOKENIZE: dict[str, Refusal] = {"tools": Refusal(_empty, "tool calls are not available; leave the field out")}
