"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts. Read beside
transformers/models/qwen3_next/modeling_qwen3_next.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from samovar.layers import SharedGate, SparseMLP
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.delta import DELTA_DEFAULTS, DeltaBlock, DeltaConfig, DeltaMixtureConfig, with_delta
from samovar.models.mixture import mixture, softmax_routing, with_mixture
from samovar.models.qwen3_moe import qwen_sparse_layers


class Qwen3NextBlock(DeltaBlock):
    """Experts, and beside them a network for every token, which a gate weighs."""

    by_key_head = True

    def make_mlp(self, c: DeltaConfig | DeltaMixtureConfig, layer: int) -> nn.Module:
        """See `DeltaBlock`."""
        if not isinstance(c, DeltaMixtureConfig) or layer not in c.sparse_layers:
            return super().make_mlp(c, layer)
        plain = mixture(c, softmax_routing(c))
        return SparseMLP(plain.gate, plain.experts, plain.shared_experts, SharedGate(c.hidden_size))


class Qwen3NextForCausalLM(DecoderLM):
    """Qwen3-Next."""

    block: ClassVar[type[nn.Module]] = Qwen3NextBlock
    config_class: ClassVar[type[DecoderConfig]] = DeltaMixtureConfig
    config_defaults: ClassVar[dict[str, Any]] = {
        **DELTA_DEFAULTS,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
    }
    renames: ClassVar[dict[str, str]] = {"mlp.shared_experts": "mlp.shared_expert"}
    ignore_beginnings = ("mtp.",)
    norm_offset = True
    default_experts: ClassVar[int] = 512

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Every fourth layer attends, unless the file says otherwise."""
        values = {**cls.config_defaults, **raw}
        values["shared_intermediate_size"] = values["shared_expert_intermediate_size"]
        sparse = with_mixture(values, qwen_sparse_layers(values), cls.default_experts)
        return super().read_config(with_delta(sparse))
