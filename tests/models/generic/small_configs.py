"""A tiny random config for every causal language model of Transformers: sizes by name, and what single ones need."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "attention_hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "n_inner": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 40,
    "expert_ffn_hidden_size": 40,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "decoder_layers": 3,
    "encoder_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "kv_channels": 16,
    "rotary_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "max_position_embeddings": 96,
    "n_positions": 96,
    "n_ctx": 96,
    "seq_length": 96,
    "sliding_window": 7,
    "sliding_window_size": 7,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "unpadded_vocab_size": 131,
    "pronunciation_vocab_size": 131,
    "shape_vocab_size": 131,
    "vocab_size_per_layer_input": 131,
    "hidden_size_per_layer_input": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 6.0,
    "is_decoder": True,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
"""Set wherever a config has the field."""

SPECIAL: dict[str, dict[str, Any]] = {
    "llama4_text": {"attention_chunk_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "helium": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note_text": {"moe_intermediate_size": 40},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 96,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
}
"""model_type -> fields over `SIZES`; None leaves a field as the class has it."""


def small_config(model_type: str, special: dict[str, Any] | None = None) -> Any:
    """A config object of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[model_type]
    known = set(made().to_dict()) | set(made.attribute_map)
    fields = {name: value for name, value in SIZES.items() if name in known}
    if "layer_types" in known:
        fields["layer_types"] = None
    if "qk_rope_head_dim" in known:
        fields |= {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
    fields |= SPECIAL.get(model_type, {}) | (special or {})
    return made(**{name: value for name, value in fields.items() if value != "default"})
