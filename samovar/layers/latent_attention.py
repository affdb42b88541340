"""Multi-head latent attention (DeepSeek V2, 2024): a row of latent numbers is cached for each token, shared by all heads.

Three layers, named as the checkpoint names their weights: `LatentRows` norms and turns what is cached, `Expansion` is the
projection from latent numbers to keys and values, which is never applied as a linear but taken apart by attention, and
`LatentAttention` attends. See `attention.latent` for how.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from samovar.attention.base import AttentionCall, AttentionSpec, LayerCache
from samovar.core.cache_spec import CacheSpec, LatentDims
from samovar.errors import ConfigError
from samovar.kernels.write_latent import write_latent
from samovar.layers.attention import Attention
from samovar.layers.batch import ForwardBatch
from samovar.layers.layer import Placement
from samovar.layers.linear import ColumnLinear
from samovar.layers.norm import RMSNorm, head_shard
from samovar.layers.rope import Rope, RopeParameters
from samovar.quant.in_library import InLibrary
from samovar.quant.stored import Stored
from samovar.quant.unquantized import Unquantized


class Expansion(ColumnLinear):
    """Weight [heads * (nope + value), rank]; plain, whatever the checkpoint has it as. `of_heads` is the same as [heads,
    nope + value, rank]."""

    def __init__(self, heads: int, dims: LatentDims) -> None:
        super().__init__(dims.rank, heads * (dims.nope + dims.value))
        self.heads, self.dims = heads, dims

    def bind(self, place: Placement) -> None:
        """Allocate this rank's heads."""
        quant = place.quant(self.path).of_parts([self.stored(f"{self.path}.weight")])
        stored = quant.method if isinstance(quant, InLibrary) else quant
        plain = Unquantized(place.dtype, place.kernels)
        chosen = stored if isinstance(stored, Stored) else plain
        super().bind(replace(place, quant_for=lambda path: chosen))
        self.plain, self.local_heads = plain, self.heads // head_shard(self.heads, place)[1]
        weight = self.weights["weight"] if chosen is plain else place.empty(self.rows[0], self.in_features)
        self.of_heads = weight.view(self.local_heads, -1, self.dims.rank)

    def resident_bytes(self) -> int:
        """See `Layer`."""
        return self.rows[0] * self.in_features * self.compute_dtype.itemsize

    def after_load(self) -> None:
        """Make plain what is not."""
        if isinstance(self.quant, Stored):
            weight = self.of_heads.view(-1, self.dims.rank)
            weight.copy_(self.quant.dequantize(self.quant.repack(self.weights)))
            self.weights, self.quant = {"weight": weight}, self.plain


class LatentAttention(Attention):
    """Causal attention over latent rows. `expansion` is the layer that makes keys and values of them."""

    def __init__(self, heads: int, dims: LatentDims, expansion: Expansion, *, scale: float | None = None) -> None:
        super().__init__(heads, 1, dims.row, scale=dims.query**-0.5 if scale is None else scale)
        self.dims = dims
        self.declared = replace(self.declared, latent=dims)
        self.call: AttentionCall = self.declared
        self._expansion = (expansion,)  # it belongs to the module around both

    def bind(self, place: Placement) -> None:
        """Cut the heads. Raises `ConfigError` for a cache of codes."""
        cache_dtype = place.cache_dtype or place.dtype
        if place.packed_cache or cache_dtype.itemsize == 1:
            name = place.packed_cache or str(cache_dtype).removeprefix("torch.")
            raise ConfigError(f"--kv-cache-dtype {name}: latent rows ({self.path}) are cached in 16 bits: use auto")
        super().bind(place)

    def spec(self) -> AttentionSpec:
        """One row for all heads, on every rank."""
        cache = CacheSpec("latent", 1, self.dims.row, self.cache_dtype.itemsize, latent=self.dims)
        return AttentionSpec(cache, self.local_heads)

    def cached(self) -> LayerCache:
        """The rows, and what makes keys and values of them."""
        return self.cache[0], self._expansion[0].of_heads

    forward = Attention.attend  # type: ignore[assignment]  # rows are written before; named so, fusions recognise it


class LatentRows(RMSNorm):
    """Norms a token's latent numbers, turns its key and the queries, and writes the row into the cache of `attention`.

    `interleaved`: neighbouring features are turned together.
    """

    def __init__(self, attention: LatentAttention, eps: float, rope: RopeParameters, *, interleaved: bool) -> None:
        super().__init__(attention.dims.rank, eps)
        self.interleaved = interleaved
        self._attention = (attention,)  # it belongs to the module around both
        self._rope = (Rope(attention.dims.rope, rope),)

    def bind(self, place: Placement) -> None:
        """Allocate the weight; frequencies are shared as those of every `Rope`."""
        super().bind(place)
        self._rope[0].bind(place)
        self.write = place.kernels.use(write_latent)

    def forward(self, q: torch.Tensor, row: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:  # type: ignore[override]
        """q [tokens, heads * (nope + rope)], row [tokens, rank + rope] -> q by heads, turned in place."""
        attention = self._attention[0]
        q = q.view(len(q), -1, attention.dims.query)
        tables = self._rope[0].table(batch)
        rows = attention.cache[0]
        self.write(q, row, self.weight, self.eps, *tables, rows, batch.slot_mapping, self.interleaved)
        return q
