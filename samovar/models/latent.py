"""What families with latent attention share: their fields of config.json, the attention and the block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from samovar.core.cache_spec import LatentDims
from samovar.errors import CheckpointError
from samovar.layers import ColumnLinear, ForwardBatch, Linear, PositionScale, RMSNorm, RowLinear
from samovar.layers.latent_attention import Expansion, LatentAttention, LatentRows
from samovar.layers.rope import RopeParameters
from samovar.models.config import DecoderConfig
from samovar.models.fields import integer
from samovar.models.llama import LlamaBlock

LATENT_EPS = 1e-6
"""Of the norms of latent numbers: not a field of config.json."""


@dataclass(frozen=True, slots=True)
class LatentFields:
    """The sizes of latent attention; `query_rank` None: queries are not made from latent numbers. `interleaved` as in
    `LatentRows`."""

    dims: LatentDims
    query_rank: int | None
    interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """A dense decoder with latent attention."""

    latent: LatentFields


class HasLatent(Protocol):
    """A configuration that has the fields of latent attention."""

    @property
    def latent(self) -> LatentFields: ...


def with_latent(raw: Mapping[str, Any], *, interleaved: bool = True) -> dict[str, Any]:
    """`raw` with the fields of latent attention in one; raises `CheckpointError` for one that is missing or wrong.

    `interleaved` is meant where `rope_interleave` is left out.
    """
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    dims = LatentDims(*(integer(raw, name) for name in names))
    if dims.rope % 2:
        raise CheckpointError(f"config.json: qk_rope_head_dim must be even, got {dims.rope}")
    given = raw.get("rope_interleave")
    if given is not None and not isinstance(given, bool):
        raise CheckpointError(f"config.json: rope_interleave must be true or false, got {given!r}")
    rank = None if raw.get("q_lora_rank") is None else integer(raw, "q_lora_rank")
    fields = LatentFields(dims, rank, interleaved if given is None else given)
    return {**raw, "latent": fields, "head_dim": dims.query, "num_key_value_heads": raw.get("num_attention_heads")}


def latent_scale(dims: LatentDims, rope: RopeParameters) -> float:
    """What scores are multiplied by: YaRN's correction of their temperature (Peng et al., 2023) is here, and not in the
    rotation, where a file has `mscale_all_dim`."""
    scale: float = dims.query**-0.5
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor is None or rope.factor <= 1:
        return scale
    return scale * float(0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2


class LatentSelfAttention(nn.Module):
    """Multi-head latent attention. Read beside transformers/models/deepseek_v3: same names."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        fields, heads, rope = latent_of(c), c.num_attention_heads, replace(c.rope_of(layer), partial_rotary_factor=1.0)
        dims, hidden, rank = fields.dims, c.hidden_size, fields.query_rank
        self.widths = [rank or heads * dims.query, dims.row]
        if rank is None:
            self.q_proj = ColumnLinear(hidden, heads * dims.query)
            self.kv_a_proj_with_mqa = Linear(hidden, dims.row, bias=c.attention_bias)
        else:
            parts = {"q_a_proj": rank, "kv_a_proj_with_mqa": dims.row}
            self.qkv_a_proj = Linear(hidden, parts, bias=c.attention_bias)
            self.q_a_layernorm = RMSNorm(rank, LATENT_EPS)
            self.q_b_proj = ColumnLinear(rank, heads * dims.query)
        self.has_query_rank = rank is not None
        self.growth: PositionScale | None = None
        self.kv_b_proj = Expansion(heads, dims)
        self.attn = LatentAttention(heads, dims, self.kv_b_proj, scale=latent_scale(dims, rope))
        self.kv_a_layernorm = LatentRows(self.attn, LATENT_EPS, rope, interleaved=fields.interleaved)
        self.o_proj = RowLinear(heads * dims.value, hidden, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        if self.has_query_rank:
            q, row = torch.split(self.qkv_a_proj(x), self.widths, dim=1)
            q = self.q_b_proj(self.q_a_layernorm(q))
        else:
            q, row = self.q_proj(x), self.kv_a_proj_with_mqa(x)
        q = self.kv_a_layernorm(q, row, batch)
        if self.growth is not None:
            q = self.growth(q, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, batch))
        return y


def latent_of(c: DecoderConfig) -> LatentFields:
    """The fields that `with_latent` put there."""
    fields: LatentFields = c.latent  # type: ignore[attr-defined]
    return fields


class LatentBlock(LlamaBlock):
    """Llama's block with latent attention."""

    attention = LatentSelfAttention
