"""GGUF tensor names -> Hugging Face names, as tables; and how a tensor's values differ between the two."""

from __future__ import annotations

from typing import Literal

Change = Literal["none", "interleaved", "plus_one"]
"""`interleaved`: the rows of a head alternate between its rotary halves (0, d/2, 1, ...). `plus_one`: 1 + weight."""

CONSUMED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that `config.gguf_config` has turned into settings; no layer reads them."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_POST_NORMS = {name: theirs for name, theirs in _SANDWICH.items() if name != "ffn_norm"}

_FAMILY = {
    "exaone4": _POST_NORMS,
    "glm4": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "olmo2": _POST_NORMS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}

_INTERLEAVED = ("llama", "smollm3")
_PLUS_ONE = ("gemma", "gemma2", "gemma3")


def hf_name(architecture: str, name: str) -> str:
    """Hugging Face name of a GGUF tensor; the name itself if the tables do not know it (a plan will then report it)."""
    stem, dot, kind = name.rpartition(".")
    if kind not in ("weight", "bias") or not dot:
        return name
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    prefix, number, part = ([*stem.split(".", 2), "", ""])[:3]
    known = _FAMILY.get(architecture, {}).get(part, _BLOCK.get(part))
    if prefix != "blk" or not number.isdecimal() or known is None:
        return name
    return f"model.layers.{int(number)}.{known}.{kind}"


def change_of(architecture: str, name: str) -> Change:
    """How the GGUF tensor `name` differs from its Hugging Face counterpart."""
    part = name.rpartition(".")[0].rpartition(".")[2]
    if architecture in _INTERLEAVED and part in ("attn_q", "attn_k"):
        return "interleaved"
    if architecture in _PLUS_ONE and part.endswith("norm"):
        return "plus_one"
    return "none"
