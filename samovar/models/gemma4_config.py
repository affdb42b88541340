"""What a Gemma 4 is: its config.json, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.errors import CheckpointError
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.fields import integer, num_layers, positive, section

ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""Rope parameters that files leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """`head_dims` and `kv_heads` have one entry per layer; `owners` says whose keys and values a layer reads, its own
    unless it is one of the last, which share. With `attention_k_eq_v` full layers have no projection of values. Sizes of
    what is added to each layer, and of experts, are None where there is none."""

    head_dims: tuple[int, ...]
    kv_heads: tuple[int, ...]
    owners: tuple[int, ...]
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int | None = None
    vocab_size_per_layer_input: int | None = None
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    def is_shared(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of another."""
        return self.owners[layer] != layer

    def mlp_width(self, layer: int) -> int:
        """Of the network for all tokens."""
        return self.intermediate_size * (2 if self.use_double_wide_mlp and self.is_shared(layer) else 1)

    @property
    def active_intermediate_size(self) -> int:
        """See `DecoderConfig`: experts, and what is added to all layers, which lives from the first to the last."""
        wide = max(self.mlp_width(layer) for layer in range(self.num_hidden_layers))
        chosen = (self.top_k_experts or 0) * ((self.moe_intermediate_size or 0) + self.hidden_size)
        return wide + chosen + self.num_hidden_layers * (self.hidden_size_per_layer_input or 0)


def with_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of full layers and sharing as lists; images would see each other, text does not."""
    values = dict(raw)
    if values.get("use_bidirectional_attention") == "vision":
        values["use_bidirectional_attention"] = None
    count = num_layers(values)
    given = values.get("layer_types") or [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    if not isinstance(given, (list, tuple)) or not all(isinstance(kind, str) for kind in given):
        raise CheckpointError(f"config.json: layer_types must be a list of names, got {given!r}")
    kinds = [*given[:-1], FULL]
    values["layer_types"] = kinds
    ropes = section(values, "rope_parameters")
    values["rope_parameters"] = {kind: section(ropes, kind) or ROPE[kind] for kind in (SLIDING, FULL)}
    values.update(_layer_sizes(values, kinds))
    values["owners"] = owners(values, kinds)
    if not values.get("hidden_size_per_layer_input"):
        values["hidden_size_per_layer_input"] = None
    if not values.get("enable_moe_block"):
        values |= dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"))
    return values


def owners(values: Mapping[str, Any], kinds: list[str]) -> list[int]:
    """For each layer the one whose keys and values it reads: of the last `num_kv_shared_layers` the last one of their kind
    before them."""
    shared = values.get("num_kv_shared_layers") or 0
    count = len(kinds)
    if not isinstance(shared, int) or isinstance(shared, bool) or not 0 <= shared < count:
        raise CheckpointError(f"config.json: num_kv_shared_layers must be from 0 to {count - 1}, got {shared!r}")
    first = count - shared
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    if missing := [kind for kind in kinds[first:] if kind not in last]:
        raise CheckpointError(f"config.json: no layer has keys and values for layers of {missing[0]!r} to share")
    return [*range(first), *(last[kind] for kind in kinds[first:])]


def _layer_sizes(values: Mapping[str, Any], kinds: list[str]) -> dict[str, list[int]]:
    """`head_dims` and `kv_heads`: those of full layers under names of their own, or layer by layer."""
    dim, kv_heads = integer(values, "head_dim"), positive(values, "num_key_value_heads", 1)
    by_layer = section(values, "per_layer_config")
    wide = positive(values, "global_head_dim", 512)
    few = positive(values, "num_global_key_value_heads", kv_heads) if values.get("attention_k_eq_v") else kv_heads
    dims, heads, queries = [], [], integer(values, "num_attention_heads")
    for layer, kind in enumerate(kinds):
        own = {"head_dim": wide, "num_key_value_heads": few} if kind == FULL and not by_layer else {}
        own |= section(by_layer, str(layer))
        dims.append(positive(own, "head_dim", dim))
        heads.append(positive(own, "num_key_value_heads", kv_heads))
        if queries % heads[-1]:
            raise CheckpointError(
                f"config.json: num_attention_heads {queries} is not a multiple of the "
                f"{heads[-1]} key/value heads of layer {layer}"
            )
    return {"head_dims": dims, "kv_heads": heads}
