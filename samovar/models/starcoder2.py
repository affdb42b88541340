"""StarCoder2, StableLM and Nemotron: Llama's order with layer norms. Read beside their folders in transformers/models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import MLP, AddLayerNorm, ForwardBatch, HeadsLayerNorm, QKVLinear, RowLinear
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers
from samovar.models.llama import LlamaAttention, LlamaBlock


class LayerNormBlock(LlamaBlock):
    """Llama's block with layer norms. `norm_options` are those of `AddLayerNorm`."""

    norm_options: ClassVar[dict[str, bool]] = {}

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.input_layernorm = AddLayerNorm(c.hidden_size, c.rms_norm_eps, **self.norm_options)
        self.post_attention_layernorm = AddLayerNorm(c.hidden_size, c.rms_norm_eps, **self.norm_options)


class LayerNormLM(DecoderLM):
    """A decoder of such blocks; `epsilon` names the field of config.json that holds the norms' one."""

    block: ClassVar[type[LayerNormBlock]]
    epsilon: ClassVar[str] = "layer_norm_eps"

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Norms have an epsilon of another name."""
        return super().read_config({**raw, "rms_norm_eps": raw.get(cls.epsilon, 1e-5)})

    def final_norm(self, config: DecoderConfig) -> nn.Module:
        """See `DecoderLM`."""
        return AddLayerNorm(config.hidden_size, config.rms_norm_eps, **self.block.norm_options)


class Starcoder2Block(LayerNormBlock):
    """Biases everywhere, and an MLP that gates nothing."""

    def feed_forward(self, c: DecoderConfig) -> nn.Module:
        """See `LlamaBlock`."""
        return MLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)


class Starcoder2ForCausalLM(LayerNormLM):
    """StarCoder2."""

    block = Starcoder2Block
    epsilon = "norm_epsilon"
    config_defaults = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "use_bias": True}
    renames = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers slide if there is a window; one option for all biases."""
        values = {**cls.config_defaults, **raw}
        kind = FULL if values.get("sliding_window") is None else SLIDING
        values |= {"attention_bias": values["use_bias"], "mlp_bias": values["use_bias"]}
        return super().read_config({**values, "layer_types": [kind] * num_layers(values)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    """`use_qkv_bias`, `qk_layernorm` and `use_parallel_residual`: attention and MLP side by side."""

    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


class StableLmAttention(LlamaAttention):
    """Llama's attention; heads of q and k may be normed, each with a weight of its own."""

    def __init__(self, c: StableLmConfig, layer: int) -> None:
        super().__init__(c, layer)
        heads, kv_heads, dim, eps = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.use_qkv_bias)
        self.o_proj = RowLinear(heads * dim, c.hidden_size)
        self.q_layernorm = HeadsLayerNorm(heads, dim, eps, stored_apart=True) if c.qk_layernorm else None
        self.k_layernorm = HeadsLayerNorm(kv_heads, dim, eps, stored_apart=True) if c.qk_layernorm else None

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class StableLmBlock(LayerNormBlock):
    """Pre-norm attention and MLP, one after the other or side by side."""

    attention = StableLmAttention

    def __init__(self, c: StableLmConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.is_parallel = c.use_parallel_residual
        if self.is_parallel:
            del self.post_attention_layernorm

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        if not self.is_parallel:
            return super().forward(x, residual, batch)
        x, residual = self.input_layernorm(x, residual)
        return self.self_attn(x, batch) + self.mlp(x), residual


class StableLmForCausalLM(LayerNormLM):
    """StableLM 2 and 3B."""

    block = StableLmBlock
    config_class = StableLmConfig
    config_defaults = {"partial_rotary_factor": 0.25}


class NemotronBlock(LayerNormBlock):
    """Norm weights are stored as differences from one; the MLP squares what is above zero."""

    norm_options: ClassVar[dict[str, bool]] = {"offset": True}

    def feed_forward(self, c: DecoderConfig) -> nn.Module:
        """See `LlamaBlock`."""
        return MLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)


class NemotronForCausalLM(LayerNormLM):
    """Nemotron 4 and Minitron."""

    block = NemotronBlock
    epsilon = "norm_eps"
    config_defaults = {"hidden_act": "relu2", "partial_rotary_factor": 0.5}
