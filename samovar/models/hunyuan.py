"""HunYuan, dense and with experts. Read beside transformers/models/hunyuan_v1_dense and hunyuan_v1_moe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from samovar.errors import CheckpointError
from samovar.layers import ForwardBatch, RMSNorm
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer, num_layers, section
from samovar.models.llama import LlamaAttention, LlamaBlock
from samovar.models.mixture import MixtureBlock, MixtureConfig, with_mixture

NORMS = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}


class HunYuanAttention(LlamaAttention):
    """Llama's attention; each head of q and k is normed after rope."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(self.q_norm(q), self.k_norm(k), v, batch))
        return y


class HunYuanBlock(LlamaBlock):
    """Pre-norm attention and MLP."""

    attention = HunYuanAttention


class HunYuanDenseV1ForCausalLM(DecoderLM):
    """HunYuan, dense."""

    block = HunYuanBlock
    renames = NORMS

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """See `with_stretched_theta`."""
        return super().read_config(with_stretched_theta(raw))


class HunYuanMoEBlock(MixtureBlock):
    """The same with experts."""

    attention = HunYuanAttention


class HunYuanMoEV1ForCausalLM(DecoderLM):
    """HunYuan with experts, and a network as wide as one for every token."""

    block = HunYuanMoEBlock
    config_class = MixtureConfig
    config_defaults = {"num_experts": 1, "moe_topk": 1}
    renames = {"mlp.gate": "mlp.gate.wg", "mlp.shared_experts": "mlp.shared_mlp", **NORMS}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers are mixtures; files may give a number for each of them, which must be the same."""
        values = {**cls.config_defaults, **with_stretched_theta(raw)}
        values["num_experts"] = _same(values, "num_experts")
        values["num_experts_per_tok"] = _same(values, "moe_topk")
        wide = values.get("intermediate_size")
        values |= {"moe_intermediate_size": wide, "shared_intermediate_size": wide, "norm_topk_prob": True}
        return super().read_config(with_mixture(values, range(num_layers(values))))


def with_stretched_theta(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A "dynamic" rope with `alpha` is one of a larger theta, whatever the length."""
    values = dict(raw)
    for name in ("rope_parameters", "rope_scaling"):
        rope = section(values, name)
        if rope.get("alpha") is None:
            continue
        alpha, theta = rope["alpha"], rope.get("rope_theta", values.get("rope_theta", 10_000.0))
        if not all(isinstance(number, (int, float)) and 0 < number <= 1e9 for number in (alpha, theta)):
            raise CheckpointError(
                f"config.json: {name} has alpha = {alpha!r} and theta {theta!r}, which is not possible"
            )
        dim = values.get("head_dim") or integer(values, "hidden_size") // integer(values, "num_attention_heads")
        if not isinstance(dim, int) or dim < 4:
            raise CheckpointError(f"config.json: head_dim must be at least 4 for a rope with alpha, got {dim!r}")
        values[name] = {"rope_type": "default", "rope_theta": theta * alpha ** (dim / (dim - 2))}
    return values


def _same(values: Mapping[str, Any], name: str) -> int:
    """A number that is given once, or once for each layer."""
    given = values[name]
    if isinstance(given, (list, tuple)) and given:
        if any(number != given[0] for number in given):
            raise CheckpointError(f"config.json: {name} must be the same for all layers, got {given!r}")
        given = given[0]
    return integer({name: given}, name)
