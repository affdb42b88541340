"""Writes tiny GGUF files with the `gguf` package: another implementation than the one under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODEL_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma2": (
        "gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 24, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 24, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 24, "num_hidden_layers": 4}),
    "gemma": ("gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "glm4": ("glm4", {"head_dim": 24}),
    "glm4-whole-rope": ("glm4", {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "ernie4_5": ("ernie4_5", {"head_dim": 24, "use_bias": True}),
    "cohere2": (
        "cohere2",
        {"sliding_window": 24, "num_hidden_layers": 4, "logit_scale": 0.25, "tie_word_embeddings": True},
    ),
    "exaone4": ("exaone4", {"sliding_window": 24, "num_hidden_layers": 4}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "seed_oss": ("seed_oss", {"head_dim": 24}),
}
"""Name -> (Hugging Face model type, fields that differ from `SHAPE`)."""

_ARCH = {"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"}
_ENUM = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def tiny_model(name: str, **fields: Any) -> PreTrainedModel:
    """A random Transformers model of one row, float32; norm weights are random too."""
    model_type, own = MODEL_TYPES[name]
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **own, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write_gguf(path: Path, model: PreTrainedModel, *, quant: str = "F32", extra: dict[str, Any] | None = None) -> None:
    """The model as its converter would write it; `quant` names the type of matrices, `extra` more metadata."""
    config = model.config
    arch = _ARCH.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), arch)
    _write_settings(writer, config, arch)
    for key, value in (extra or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    names = gguf.get_tensor_name_map(_ENUM[arch], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        values = _as_stored(arch, config, name, tensor.detach()).numpy().astype(np.float32)
        kind = gguf.GGMLQuantizationType[quant if values.ndim == 2 else "F32"]
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if arch == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_bos_token_id(config.bos_token_id)


def _as_stored(arch: str, config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if arch in ("llama", "smollm3") and any(f"{part}_proj." in name for part in "qk"):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor
