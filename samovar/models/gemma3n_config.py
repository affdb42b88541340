"""What a Gemma 3n is: its config.json, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.errors import CheckpointError
from samovar.models.config import FULL, SLIDING
from samovar.models.fields import integer, num_layers, positive, section
from samovar.models.gemma4_config import Gemma4Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nConfig(Gemma4Config):
    """Widths of the MLPs, and which part of their gates is zero, layer by layer; and what the streams are made with."""

    widths: tuple[int, ...]
    sparsity: tuple[float, ...]
    laurel_rank: int = 64
    altup_num_inputs: int = 4
    altup_active_idx: int | float = 0
    altup_correct_scale: bool = True

    @property
    def active_intermediate_size(self) -> int:
        """See `DecoderConfig`: the streams, and what is added to all layers, which lives from the first to the last."""
        added = self.num_hidden_layers * (self.hidden_size_per_layer_input or 0)
        return max(self.widths) + 2 * self.altup_num_inputs * self.hidden_size + added


def with_streams(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every fifth layer sees everything; widths and sparsity are given once, or layer by layer."""
    values = dict(raw)
    count = num_layers(values)
    kinds = values.get("layer_types") or [SLIDING if (i + 1) % 5 else FULL for i in range(count)]
    widths, given = values["intermediate_size"], section(values, "rope_parameters")
    widths = [integer({"width": width}, "width") for width in _by_layer(widths, count, "intermediate_size")]
    parts = values.get("activation_sparsity_pattern")
    parts = [0.95 * (i < 10 < count) for i in range(count)] if parts is None else parts
    parts = _by_layer(parts, count, "activation_sparsity_pattern")
    if not all(isinstance(part, (int, float)) and 0 <= part < 1 for part in parts):
        raise CheckpointError(f"config.json: activation_sparsity_pattern must hold numbers from 0 to 1, got {parts!r}")
    active = values.get("altup_active_idx") or 0
    streams = positive(values, "altup_num_inputs", 4)
    if not isinstance(active, int) or not 0 <= active < streams:
        raise CheckpointError(f"config.json: altup_active_idx must be from 0 to {streams - 1}, got {active!r}")
    local = {"rope_theta": values.get("rope_local_base_freq", 10_000.0), **section(given, SLIDING)}
    wide = {"rope_theta": values.get("rope_theta", 1_000_000.0), **section(values, "rope_scaling")}
    values |= {
        "layer_types": kinds,
        "rope_parameters": {SLIDING: local, FULL: {**wide, **section(given, FULL)}},
        "global_head_dim": integer(values, "head_dim"),
        "intermediate_size": max(widths),
        "hidden_size_per_layer_input": positive(values, "hidden_size_per_layer_input", 256),
        "widths": widths,
        "sparsity": [float(part) for part in parts],
        "altup_active_idx": active,
        **dict.fromkeys(("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"), False),
    }
    return values


def _by_layer(given: Any, count: int, name: str) -> list[Any]:
    """One entry for each layer, of a field that may be given once."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise CheckpointError(f"config.json: {name} has {len(given)} entries for {count} layers")
    return list(given)
