"""Attention over the paged cache, and `attach`, which gives every layer its backend and its cache."""

from __future__ import annotations

import torch
from torch import nn

from samovar.attention.base import AttentionBackend, AttentionCall, AttentionSpec
from samovar.attention.choose import AttentionRoute
from samovar.cache.kv_cache import KVCache
from samovar.core.cache_spec import CacheSpec
from samovar.kernels.write_kv import write_kv
from samovar.layers.batch import ForwardBatch
from samovar.layers.layer import Layer, Placement, Source
from samovar.layers.norm import head_shard

SCALE_BYTES = 4
"""Of the float32 scale behind each row of an int8 cache."""


class Attention(Layer):
    """Causal attention of one layer.

    `scale` multiplies scores (default head_dim ** -0.5); `window` counts the keys a token sees, its own included;
    `softcap` bounds scores; `sinks` adds one learned score per head that takes weight but gives no value.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.has_sinks = heads, kv_heads, head_dim, has_sinks
        self.call = AttentionCall(head_dim**-0.5 if scale is None else scale, window, softcap)
        self.sinks: torch.Tensor | None = None

    def bind(self, place: Placement) -> None:
        """Cut the heads; allocate the sinks if there are any."""
        self.head_shard, kv_shard = head_shard(self.heads, place), head_shard(self.kv_heads, place)
        self.local_heads, self.local_kv_heads = self.heads // self.head_shard[1], self.kv_heads // kv_shard[1]
        self.cache_dtype = place.cache_dtype or place.dtype
        self.write_kv = place.kernels.use(write_kv)
        if self.has_sinks:
            self.sinks = place.empty(self.local_heads, dtype=torch.float32)

    def sources(self) -> list[Source]:
        """The sinks, if any, stored beside the projections."""
        if self.sinks is None:
            return []
        return [Source(self.stored(f"{self.path.rpartition('.')[0]}.sinks"), self.sinks, axis=0, shard=self.head_shard)]

    def spec(self) -> AttentionSpec:
        """What this layer needs from cache and backend on this rank; valid after `bind`."""
        window = self.call.window
        cache = CacheSpec(
            kind="full" if window is None else "sliding",
            num_kv_heads=self.local_kv_heads,
            head_dim=self.head_dim,
            bytes_per_element=self.cache_dtype.itemsize,
            window=window,
            scale_bytes=SCALE_BYTES if self.cache_dtype is torch.int8 else 0,
        )
        return AttentionSpec(cache, self.local_heads, self.call.softcap, self.has_sinks)

    def attach(self, backend: AttentionBackend, cache: tuple[torch.Tensor, torch.Tensor], group: int) -> None:
        """Take a backend, this layer's (keys, values) and the index of the plan to use in every batch."""
        self.backend, self.cache, self.group = backend, cache, group

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q, k, v [tokens, heads, head_dim] of this rank -> [tokens, heads * head_dim]."""
        self.write(k, v, batch)
        return self.attend(q, batch)

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        """k, v [tokens, heads, head_dim] into the cache."""
        self.write_kv(k, v, *self.cache, batch.slot_mapping)

    def attend(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q [tokens, heads, head_dim] over the cache, the step's keys and values included -> [tokens, heads * head_dim]."""
        return self.backend.run(q, self.cache, batch.plans[self.group], self.call, self.sinks).flatten(1)


def attention_layers(model: nn.Module) -> list[Attention]:
    """The attention layers in order; layer i owns `KVCache.layers[i]`."""
    return [layer for layer in model.modules() if isinstance(layer, Attention)]


def attach(model: nn.Module, cache: KVCache, route: AttentionRoute) -> None:
    """Give every attention layer of a bound model its backend and its part of the cache."""
    for layer, tensors, group in zip(attention_layers(model), cache.layers, route.groups, strict=True):
        layer.attach(route.backends[group], tensors, group)
