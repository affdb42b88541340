"""What a Llama 4 is: its config.json, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.errors import CheckpointError
from samovar.models.config import FULL
from samovar.models.fields import integer, num_layers, positive
from samovar.models.mixture import MixtureConfig, with_mixture

CHUNKED = "chunked_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config(MixtureConfig):
    """`no_rope_layers` has 0 where a layer has no rope (sic), `chunked_layers` lists those that attend in chunks of
    `attention_chunk_size`. Queries without rope grow by `attn_scale` with every `floor_scale` tokens, logarithmically."""

    no_rope_layers: tuple[int, ...]
    chunked_layers: tuple[int, ...]
    intermediate_size_mlp: int
    attention_chunk_size: int | None = None
    use_qk_norm: bool = True
    attn_temperature_tuning: bool = True
    floor_scale: float = 8192.0
    attn_scale: float = 0.1


def with_kinds(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers are mixtures, have rope and attend in chunks: lists, or every so many."""
    values = dict(raw)
    layers = range(num_layers(values))
    if integer(values, "num_experts_per_tok") != 1:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {values['num_experts_per_tok']} is not supported: experts are weighed "
            "at their input, which only 1 allows"
        )
    every = positive(values, "no_rope_layer_interval", 4)
    has_rope = values.get("no_rope_layers") or [int((i + 1) % every != 0) for i in layers]
    if not isinstance(has_rope, (list, tuple)) or len(has_rope) < len(layers):
        raise CheckpointError(f"config.json: no_rope_layers must have {len(layers)} entries, got {has_rope!r}")
    kinds = values.get("layer_types") or [CHUNKED if has_rope[i] else FULL for i in layers]
    if not isinstance(kinds, (list, tuple)) or len(kinds) != len(layers) or set(map(str, kinds)) - {CHUNKED, FULL}:
        raise CheckpointError(
            f"config.json: layer_types must have {len(layers)} entries of {CHUNKED} and {FULL}, got {kinds!r}"
        )
    step = positive(values, "interleave_moe_layer_step", 1)
    sparse = values.get("moe_layers")
    sparse = list(layers[step - 1 :: step]) if sparse is None else sparse
    if not isinstance(sparse, (list, tuple)):
        raise CheckpointError(f"config.json: moe_layers must be a list, got {sparse!r}")
    values |= {
        "no_rope_layers": has_rope,
        "chunked_layers": [i for i in layers if kinds[i] == CHUNKED],
        "layer_types": [FULL] * len(layers),
        "moe_intermediate_size": values.get("intermediate_size"),
        "shared_intermediate_size": values.get("intermediate_size"),
    }
    return with_mixture(values, sparse, 16)
