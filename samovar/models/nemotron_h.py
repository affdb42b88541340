"""Nemotron-H and Nemotron 3: layers of one mixer each. Read beside transformers/models/nemotron_h/modeling_nemotron_h.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.errors import CheckpointError
from samovar.layers import MLP, AddRMSNorm, Experts, ForwardBatch, Linear, Router
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.hybrid import (
    ATTENTION,
    KINDS,
    RECURRENT,
    HybridMixtureConfig,
    Mamba2Mixer,
    NoRopeAttention,
    with_mixers,
)
from samovar.models.mixture import biased_routing, with_mixture
from samovar.models.state_space import mamba2_sizes

DENSE, SPARSE = "mlp", "moe"
KINDS_HERE = {**KINDS, "mlp": DENSE, "moe": SPARSE, "M": RECURRENT, "*": ATTENTION, "-": DENSE, "E": SPARSE}


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(HybridMixtureConfig):
    """`moe_latent_size`: what tokens are projected to before experts see them; None if they are not."""

    mlp_hidden_act: str = "relu2"
    moe_latent_size: int | None = None


class NemotronHMixture(nn.Module):
    """Experts that may see tokens through a narrow projection, and a network for every token beside them."""

    def __init__(self, c: NemotronHConfig) -> None:
        super().__init__()
        seen = c.moe_latent_size or c.hidden_size
        self.gate = Router(c.hidden_size, c.num_experts, biased_routing(c))
        self.experts = Experts(seen, c.moe_intermediate_size, c.num_experts, c.mlp_hidden_act)
        assert c.shared_intermediate_size is not None, "read_config"
        self.shared_experts = MLP(c.hidden_size, c.shared_intermediate_size, c.mlp_hidden_act, bias=c.mlp_bias)
        self.is_narrow = c.moe_latent_size is not None
        if self.is_narrow:
            self.fc1_latent_proj = Linear(c.hidden_size, seen, bias=c.mlp_bias)
            self.fc2_latent_proj = Linear(seen, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        weights, ids = self.gate(x)
        shared: torch.Tensor = self.shared_experts(x)
        y: torch.Tensor
        if not self.is_narrow:
            y = self.experts(x, weights, ids, shared)
            return y
        y = shared + self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x), weights, ids))
        return y


class NemotronHBlock(nn.Module):
    """A norm, and one of four mixers."""

    def __init__(self, c: NemotronHConfig, layer: int) -> None:
        super().__init__()
        self.norm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        kind = c.mixers[layer]
        self.has_history = kind in (ATTENTION, RECURRENT)
        if kind == ATTENTION:
            self.mixer: nn.Module = NoRopeAttention(c, layer)
        elif kind == RECURRENT:
            self.mixer = Mamba2Mixer(c.hidden_size, c.state_space, c.rms_norm_eps)
        elif kind == SPARSE:
            self.mixer = NemotronHMixture(c)
        else:
            self.mixer = MLP(c.hidden_size, c.intermediate_size, c.mlp_hidden_act, bias=c.mlp_bias)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.norm(x, residual)
        return (self.mixer(x, batch) if self.has_history else self.mixer(x)), residual


class NemotronHForCausalLM(DecoderLM):
    """Nemotron-H."""

    block: ClassVar[type[nn.Module]] = NemotronHBlock
    config_class: ClassVar[type[DecoderConfig]] = NemotronHConfig
    config_defaults: ClassVar[dict[str, Any]] = {
        "attention_head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "intermediate_size": 21504,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "mlp_hidden_act": "relu2",
    }
    renames: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "backbone.embeddings",
        "model.layers": "backbone.layers",
        "model.norm": "backbone.norm_f",
    }
    ignore_beginnings = ("mtp.",)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Kinds of layers come as a list, or as a string of a letter each."""
        values = {**cls.config_defaults, **raw}
        kinds = values.get("layers_block_type") or values.get("hybrid_override_pattern") or ()
        if not isinstance(kinds, (list, tuple, str)) or not kinds:
            raise CheckpointError(f"config.json: layers_block_type or hybrid_override_pattern must say, got {kinds!r}")
        values |= {"num_hidden_layers": len(kinds), "rms_norm_eps": values["layer_norm_epsilon"]}
        values["head_dim"] = values.get("head_dim") or values["attention_head_dim"]
        if values["mlp_hidden_act"] != "relu2":
            raise CheckpointError(f"config.json: mlp_hidden_act must be relu2, got {values['mlp_hidden_act']!r}")
        values["shared_intermediate_size"] = values["moe_shared_expert_intermediate_size"]
        values["state_space"] = mamba2_sizes(values, "mamba_num_heads", "mamba_head_dim", "ssm_state_size")
        values = with_mixers(values, kinds, KINDS_HERE)
        return super().read_config(with_mixture(values, (), 8))
