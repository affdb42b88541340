"""What people read about a worker's model besides the routes of its ops: how steps run, and what its cache uses."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from samovar.layers.attention import attention_layers
from samovar.quant.cache_scales import unused_line
from samovar.worker.native_model import Lowered
from samovar.worker.native_support import NativeSupport


def cache_lines(model: nn.Module, stored: Collection[str]) -> list[str]:
    """What became of scales that the checkpoint, which has the tensors `stored`, has for cached keys and values."""
    layers = attention_layers(model)
    used = {source.name for layer in layers for source in layer.sources() if layer.cache_scales}
    if used:
        return [f"kv cache: {len(used & set(stored))} scales of the checkpoint are used"]
    line = unused_line(set().union(*(layer.unread() for layer in layers)) & set(stored))
    return [] if line is None else [line]


def step_lines(model: nn.Module, native: NativeSupport | None, lowered: Lowered | str) -> list[str]:
    """What the CPU library does for a model, or what is lost without it; `lowered` may be why it is not all."""
    if native is None:
        return [f"model step: torch, layer by layer, several times slower: {lowered}"]
    how = f"native ({native.isa}, {native.num_threads} threads)"
    if isinstance(lowered, str):
        return [f"model step: {how}, layer by layer: {lowered}", *native.lines(model)]
    what = f"whole step in one call: {lowered.num_instructions} instructions"
    return [f"model step: {how}, {what}", *native.lines(model)]
