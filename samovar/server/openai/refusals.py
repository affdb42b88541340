"""Fields of capabilities this build does not have. Their harmless values are accepted; any other is refused by name.

A field that would change the answer is never ignored. When a capability arrives, its row leaves this table.
"""

from __future__ import annotations

from typing import Any

import msgspec

from samovar.server.refusal import Fields, Refusal, absent_or, empty


def _plain(name: str, fields: Fields) -> Any:
    raw = fields.get(name)
    return None if raw is None else msgspec.json.decode(raw)


def _same_as_n(value: Any, fields: Fields) -> bool:
    n = _plain("n", fields)
    return value is None or (type(value) is int and value == (1 if n is None else n))


_MEDIA = Refusal(empty, "the model takes text only; leave the field out")
_LORA = Refusal(empty, "adapters are not available; leave the field out")
_PRIVATE = Refusal(empty, "leave the field out")

SHARED: dict[str, Refusal] = {
    "best_of": Refusal(_same_as_n, "use n; best_of may only repeat it"),
    "use_beam_search": Refusal(absent_or(False), "beam search is offered by LLM.beam_search in Python"),
    "length_penalty": Refusal(absent_or(1, 1.0), "it belongs to beam search; leave it at 1"),
    "prompt_embeds": Refusal(empty, "send text or token ids"),
    "logits_processors": Refusal(empty, "use logit_bias, bad_words or allowed_token_ids"),
    "logit_processors": Refusal(empty, "use logit_bias, bad_words or allowed_token_ids"),
    "vllm_xargs": _PRIVATE,
    "lora_request": _LORA,
    "lora_name": _LORA,
    "lora_path": _LORA,
    "mm_processor_kwargs": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "kv_transfer_params": _PRIVATE,
    "ec_transfer_params": _PRIVATE,
    "repetition_detection": Refusal(empty, "use the penalties"),
    "watermarking": _PRIVATE,
    "logprob_token_ids": Refusal(empty, "use logprobs"),
    "return_prompt_text": Refusal(absent_or(False), "use echo"),
    "return_weight_versions": Refusal(absent_or(False), "leave the field out"),
    "routed_experts_prompt_start": _PRIVATE,
}

CHAT: dict[str, Refusal] = SHARED | {
    "audio": _MEDIA,
    "modalities": Refusal(absent_or([], ["text"]), 'only ["text"] is available'),
    "web_search_options": Refusal(absent_or(), "the server does not search; leave the field out"),
}

COMPLETIONS: dict[str, Refusal] = SHARED | {
    "suffix": Refusal(empty, "put the model's own fill-in-the-middle tokens into the prompt"),
}

NONE: dict[str, Refusal] = {}
