"""Attention of a generic model: Transformers calls `attend` for every layer, and it uses the layer's `RoutedAttention`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from samovar.layers import Attention, ForwardBatch, Placement, Source
from samovar.models.generic.masks import Masks, Seen, Unsupported

CHILD, STEP = "samovar_attention", "samovar_step"
"""Attributes that a module of Transformers gets: its attention, and the step under way."""
HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k"})
"""Tensors that models hand to every attention implementation and that ours does not need."""
USED = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""What they hand to it that ours takes; the last are sinks."""


@dataclass(slots=True)
class Step:
    """What a model's attention layers share: the batch of the step under way; None while the model is looked over."""

    batch: ForwardBatch | None = None
    masks: Masks = field(default_factory=Masks)
    chunk: int | None = None
    """`attention_chunk_size` of the model."""
    turns: dict[nn.Module, int] = field(default_factory=dict)
    """How often each module has attended in this pass: some do so several times, over keys of their own each time."""

    def turn(self, module: nn.Module) -> str:
        """Name of the layer of ours for the next attention of `module`."""
        count = self.turns.get(module, 0)
        self.turns[module] = count + 1
        return CHILD if count == 0 else f"{CHILD}_{count}"


class RoutedAttention(Attention):
    """`Attention` for heads as a model of Transformers has them: keys wider than values, or of an odd size, are padded."""

    def __init__(self, heads: int, kv_heads: int, key_dim: int, value_dim: int, **options: Any) -> None:
        width = max(key_dim, value_dim)
        super().__init__(heads, kv_heads, width + -width % 8, **options)
        self.key_dim, self.value_dim = key_dim, value_dim
        self.is_split = False
        """Whether the linears around it give each device its own heads."""

    def bind(self, place: Placement) -> None:
        """Cut the heads, if linears do. The sinks are a parameter of the model's own module."""
        has_sinks, self.has_sinks = self.has_sinks, False
        if self.is_split:
            place.tp.share(self.kv_heads, "the number of key/value heads")
        super().bind(place if self.is_split else replace(place, tp=type(place.tp)()))
        self.has_sinks, self.compute_dtype = has_sinks, place.dtype

    def sources(self) -> list[Source]:
        """The scales of the cache."""
        return list(self._scale_sources)

    def run(
        self, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sinks: torch.Tensor | None, batch: ForwardBatch
    ) -> torch.Tensor:
        """q, k, v [1, heads, tokens, head_dim] -> [1, tokens, heads, value_dim]."""
        self.sinks = None if sinks is None else sinks.float()
        q, k, v = (self._rows(x) for x in qkv)
        y: torch.Tensor = self(q, k, v, batch)
        return y.view(1, len(q), -1, self.head_dim)[..., : self.value_dim]

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens, size] -> [tokens, heads, head_dim]."""
        rows = x[0].transpose(0, 1).to(self.compute_dtype)
        missing = self.head_dim - rows.shape[-1]
        return pad(rows, (0, missing)) if missing else rows.contiguous()


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of Transformers: query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim] ->
    ([1, tokens, heads, value dim], None). `rest` holds the words of `USED`, and others."""
    step: Step = getattr(module, STEP)
    if step.batch is None:
        _check(module, query, key, rest)
        if not hasattr(module, name := step.turn(module)):
            seen = step.masks.seen(attention_mask, rest.get("sliding_window"), step.chunk)
            module.add_module(name, _layer((query, key, value), seen, rest))
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None
    layer: RoutedAttention = getattr(module, step.turn(module))
    y = layer.run((query, key, value), rest.get("s_aux"), step.batch)
    return y.to(query.dtype), None


def _check(module: nn.Module, query: torch.Tensor, key: torch.Tensor, rest: dict[str, Any]) -> None:
    """Refuse what is not causal self-attention over the tokens so far."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise Unsupported(f"its attention is not from the tokens to themselves ({query.shape[2]} to {key.shape[2]})")
    if getattr(module, "is_causal", True) is False or rest.get("is_causal") is False:
        raise Unsupported("its attention is bidirectional")
    unknown = [name for name, value in rest.items() if isinstance(value, torch.Tensor) and name not in HARMLESS | USED]
    if unknown:
        raise Unsupported(f"it gives attention {', '.join(sorted(unknown))}, which our attention does not take")


def _layer(qkv: tuple[torch.Tensor, ...], seen: Seen, rest: dict[str, Any]) -> RoutedAttention:
    """A layer of ours for an attention that was seen."""
    scale, softcap, sinks = (rest.get(name) for name in ("scaling", "softcap", "s_aux"))
    if isinstance(scale, torch.Tensor):
        raise Unsupported("it computes what scores are multiplied by")
    query, key, value = qkv
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "has_sinks": sinks is not None}
    sizes = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    return RoutedAttention(*sizes, **options, window=seen.window, chunk=seen.chunk)
