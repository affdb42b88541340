"""DecoderConfig: the fields of config.json that decoder families read, typed and checked once.

A field without a default must be in the file (or in the family's `config_defaults`). Names are Hugging Face's. A family
with fields of its own declares them in a subclass, in its own file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from samovar.errors import CheckpointError
from samovar.layers.rope import RopeParameters
from samovar.models.fields import check_type, integer, num_layers, rope_parameters

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder's sizes and options. `layer_types` has one entry per layer; `rope` one per layer type in use."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, RopeParameters]
    layer_types: tuple[str, ...]
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    def window_of(self, layer: int) -> int | None:
        """Tokens that `layer` sees, the current one included; None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def rope_of(self, layer: int) -> RopeParameters:
        """Rope parameters of `layer`."""
        return self.rope[self.layer_types[layer]]

    @property
    def attention_scale(self) -> float | None:
        """What scores are multiplied by; None for the usual head_dim ** -0.5."""
        return None if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar**-0.5

    @property
    def active_intermediate_size(self) -> int:
        """Width of an MLP that takes as much memory for a token as what this model has in a layer."""
        return self.intermediate_size

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read a config.json; raises `CheckpointError` naming the field that is missing or wrong."""
        values = {name: value for name, value in raw.items() if value is not None}
        heads, hidden = integer(values, "num_attention_heads"), integer(values, "hidden_size")
        values.setdefault("num_key_value_heads", heads)
        values.setdefault("head_dim", hidden // heads)
        values["hidden_act"] = values.get("hidden_activation") or values.get("hidden_act", "silu")
        _refuse_unsupported(values)
        values["layer_types"] = _layer_types(values)
        values["rope"] = {kind: rope_parameters(values, kind) for kind in dict.fromkeys(values["layer_types"])}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name, field in fields.items():
            if name not in values and field.default is dataclasses.MISSING:
                raise CheckpointError(f"config.json has no {name!r}, which this architecture needs")
            check_type(name, str(field.type), values)
        config = cls(**{name: values[name] for name in fields if name in values})
        if heads % config.num_key_value_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads "
                f"{config.num_key_value_heads}"
            )
        return config


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Options that would change the mathematics and that no family here implements."""
    if values.get("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is not supported: this is a causal decoder")


def _layer_types(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Kind of every layer; full where nothing is said. Without a window there is nothing to slide."""
    count = num_layers(values)
    given = values.get("layer_types") or (FULL,) * count
    if not isinstance(given, (list, tuple)) or not all(isinstance(kind, str) for kind in given):
        raise CheckpointError(f"config.json: layer_types must be a list of names, got {given!r}")
    kinds = tuple(given)
    if len(kinds) != count:
        raise CheckpointError(f"config.json: layer_types has {len(kinds)} entries for {count} layers")
    if unknown := set(kinds) - {SLIDING, FULL}:
        raise CheckpointError(f"config.json: layer_types holds {sorted(unknown)}, there are {FULL} and {SLIDING}")
    if SLIDING in kinds and "sliding_window" not in values:
        kinds = (FULL,) * count
    return kinds
