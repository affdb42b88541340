"""Attention over the paged cache, and `attach`, which gives every layer its backend and its cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn.functional import linear

from samovar.attention.base import AttentionBackend, AttentionCall, AttentionSpec, LayerCache
from samovar.attention.choose import AttentionRoute
from samovar.cache.kv_cache import KVCache
from samovar.core.cache_spec import PACKED, CacheSpec
from samovar.errors import CheckpointError
from samovar.kernels.write_kv import write_kv
from samovar.layers.batch import ForwardBatch
from samovar.layers.layer import Layer, Placement, Source
from samovar.layers.norm import head_shard
from samovar.layers.rotation import rotations
from samovar.quant.cache_scales import cache_scale_names, scale_pair

SCALE_BYTES = 4
"""Of the float32 scale of each row of an int8 cache."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of caches to which scales of a checkpoint apply."""


class Attention(Layer):
    """Causal attention of one layer.

    `scale` multiplies scores (default head_dim ** -0.5); `window` counts the keys a token sees, its own included;
    `softcap` bounds scores; `sinks` adds one learned score per head that takes weight but gives no value. With `chunk` a
    token sees the keys from the last multiple of that on.
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
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.has_sinks = heads, kv_heads, head_dim, has_sinks
        self.declared = AttentionCall(head_dim**-0.5 if scale is None else scale, window, softcap, chunk)
        self.call = self.declared
        self.sinks: torch.Tensor | None = None
        self.cache_scales: tuple[torch.Tensor, ...] = ()
        self._scale_sources: list[Source] = []

    def bind(self, place: Placement) -> None:
        """Cut the heads; allocate the sinks if there are any."""
        self.head_shard, self.kv_shard = head_shard(self.heads, place), head_shard(self.kv_heads, place)
        self.local_heads, self.local_kv_heads = self.heads // self.head_shard[1], self.kv_heads // self.kv_shard[1]
        self.call = whole_if_short(self.declared, place.max_model_len)
        self.cache_dtype, self.packed = place.cache_dtype or place.dtype, place.packed_cache
        self.turns_keys, self.turns_values = (
            (row.bits < 8 for row in PACKED[self.packed]) if self.packed else (False, False)
        )
        if self.turns_values:
            self.turn, self.turn_back = rotations(self.head_dim, place.dtype, place.device)
        self._bind_scales(place)
        self.write_kv = place.kernels.use(write_kv)
        if self.has_sinks:
            self.sinks = place.empty(self.local_heads, dtype=torch.float32)

    @property
    def _parent(self) -> str:
        """The checkpoint's name of the module that has the projections, too."""
        return self.stored(self.path.rpartition(".")[0])

    def _bind_scales(self, place: Placement) -> None:
        """Make room for the scales that the checkpoint has for an 8-bit cache."""
        self.cache_scales, self._scale_sources = (), []
        pair = scale_pair(self._parent, self.kv_heads, place.stored_shapes) if self.cache_dtype in FLOAT8 else None
        for name in pair or ():
            shape = place.stored_shapes[name] or (1,)
            is_split = shape[0] == self.kv_heads > 1
            if is_split:
                shape = (self.local_kv_heads, *shape[1:])
            target = place.empty(*shape, dtype=torch.float32)
            self._scale_sources.append(
                Source(name, target, 0 if is_split else None, self.kv_shard if is_split else (0, 1))
            )
        self._spread_scales()

    def _spread_scales(self) -> None:
        """One scale for each head, side by side, as kernels read them."""
        heads = self.local_kv_heads
        self.cache_scales = tuple(s.target.reshape(-1).expand(heads).contiguous() for s in self._scale_sources)

    def sources(self) -> list[Source]:
        """The sinks, if any, stored beside the projections, and the scales of the cache."""
        if self.sinks is None:
            return list(self._scale_sources)
        sinks = Source(self.stored(f"{self.path.rpartition('.')[0]}.sinks"), self.sinks, axis=0, shard=self.head_shard)
        return [sinks, *self._scale_sources]

    def unread(self) -> set[str]:
        """Scales of a cache that is none of 8-bit floats, and those of queries."""
        return cache_scale_names(self._parent) - {source.name for source in self._scale_sources}

    def after_load(self) -> None:
        """Spread the scales; refuse what cannot be divided by."""
        self._spread_scales()
        for source, scales in zip(self._scale_sources, self.cache_scales, strict=True):
            if scales.device.type != "meta" and not bool((scales.isfinite() & (scales > 0)).all()):
                raise CheckpointError(
                    f"{source.name}: a scale of the cache is {float(scales.min()):g}, which nothing can be divided by; use "
                    "another --kv-cache-dtype than fp8"
                )

    def spec(self) -> AttentionSpec:
        """What this layer needs from cache and backend on this rank; valid after `bind`."""
        window = self.call.window
        cache = CacheSpec(
            kind="full" if window is None else "sliding",
            num_kv_heads=self.local_kv_heads,
            head_dim=self.head_dim,
            bytes_per_element=1 if self.packed else self.cache_dtype.itemsize,
            window=window,
            scale_bytes=SCALE_BYTES if self.cache_dtype is torch.int8 and not self.packed else 0,
            packed=self.packed,
            is_e5m2=self.cache_dtype is torch.float8_e5m2,
            chunk=self.call.chunk,
        )
        return AttentionSpec(cache, self.local_heads, self.call.softcap, self.has_sinks, bool(self._scale_sources))

    def attach(self, backend: AttentionBackend, cache: LayerCache, group: int) -> None:
        """Take a backend, this layer's cache and the index of the plan to use in every batch."""
        self.backend, self.cache, self.group = backend, (*cache, *self.cache_scales), group

    def cached(self) -> LayerCache:
        """What the backend reads."""
        return self.cache

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q, k, v [tokens, heads, head_dim] of this rank -> [tokens, heads * head_dim]."""
        self.write(k, v, batch)
        return self.attend(q, batch)

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        """k, v [tokens, heads, head_dim] into the cache, rotated where its rows have few bits."""
        k = linear(k, self.turn.T) if self.turns_keys else k
        v = linear(v, self.turn.T) if self.turns_values else v
        key_scales, value_scales = self.cache[2:] or (None, None)
        self.write_kv(k, v, self.cache[0], self.cache[1], batch.slot_mapping, key_scales, value_scales)

    def attend(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q [tokens, heads, head_dim] over the cache, the step's keys and values included -> [tokens, heads * head_dim]."""
        q = linear(q, self.turn_back.T) if self.turns_keys else q
        y = self.backend.run(q, self.cached(), batch.plans[self.group], self.call, self.sinks)
        return (linear(y, self.turn_back) if self.turns_values else y).flatten(1)


def whole_if_short(call: AttentionCall, max_model_len: int | None) -> AttentionCall:
    """The same attention without a chunk that no sequence will outgrow: every backend serves that."""
    if call.chunk is None or max_model_len is None or max_model_len > call.chunk:
        return call
    return replace(call, chunk=None)


def attention_layers(model: nn.Module) -> list[Attention]:
    """The attention layers in order; layer i owns `KVCache.layers[i]`."""
    return [layer for layer in model.modules() if isinstance(layer, Attention)]


def attach(model: nn.Module, cache: KVCache, route: AttentionRoute) -> None:
    """Give every attention layer of a bound model its backend and its part of the cache."""
    for layer, tensors, group in zip(attention_layers(model), cache.layers, route.groups, strict=True):
        layer.attach(route.backends[group], tensors, group)
