"""The one interface of attention: `accepts` once at start, `plan` once per step on the host, `run` once per layer.

A step has one description, `Spans`. Prefill, a chunk with history, decode and draft verification are the same thing
with other `new_tokens`; a backend that treats them apart splits them inside `plan`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from samovar.core.cache_spec import CacheSpec, LatentDims
from samovar.core.device_facts import DeviceFacts

LayerCache = tuple[torch.Tensor, ...]
"""What one layer has cached: (keys, values), each [num_blocks, block_size, kv_heads, head_dim], or bytes of codes in its
last dimension; (keys, values, key scales, value scales) where there are scales, of heads or of rows. See
`kernels.write_kv.rows`. Of a latent layer (rows [num_blocks, block_size, 1, rank + rope], expansion [heads, nope + value,
rank]): see `core.cache_spec.LatentDims`."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer on this rank: what it caches and which features it needs from a backend. With
    `has_head_scales` the cache has a scale for each head from the checkpoint."""

    cache: CacheSpec
    num_heads: int
    softcap: float | None = None
    has_sinks: bool = False
    has_head_scales: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SpanTensors:
    """`Spans` on the device, all int32, for kernels that read it there.

    `first_rows` [num_seqs + 1]: sequence i has the rows first_rows[i] to first_rows[i + 1]; `totals` [num_seqs]:
    total_tokens; `table_rows` [num_seqs]: the row of `tables` [rows, width] that holds sequence i's block ids. In a
    captured graph only these tensors change from step to step; a padding sequence has total 0 and writes and reads
    nothing.
    """

    first_rows: torch.Tensor
    totals: torch.Tensor
    table_rows: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class Spans:
    """The sequences of one step, in the order of their rows.

    `new_tokens[i]` rows belong to sequence i: 1 in decode, a chunk in prefill, 1 + k when verifying drafts.
    `total_tokens[i]` counts the keys visible to its last row, cached ones included. `block_tables` [num_seqs, width]
    (int32 or int64, on the model's device) holds its block ids in order; entries past its length are never read as
    keys but must be valid block ids.
    """

    new_tokens: Sequence[int]
    total_tokens: Sequence[int]
    block_tables: torch.Tensor
    tensors: SpanTensors | None = None


class AttentionPlan(Protocol):
    """What a backend prepared for one step; opaque to everyone else."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What distinguishes one layer's attention from another's: constants fixed when the layer is declared.

    `window` counts the keys a query sees, its own included; `softcap` bounds scores as cap * tanh(score / cap). With
    `chunk` a query sees the keys from the last multiple of that on, up to its own; never beside a window. With `latent`
    the cache is that of a latent layer, and there is nothing else but the scale.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    chunk: int | None = None
    latent: LatentDims | None = None

    @property
    def reach(self) -> int | None:
        """Most keys that a query sees; None for all."""
        return self.window or self.chunk


class AttentionBackend(Protocol):
    """A way to attend over a paged cache. Instances hold no per-step state; the plan does."""

    name: str
    captures: bool
    """Plans of decode steps may be captured in a device graph: they depend on `Spans.tensors` and `launch_shape` only."""

    def launch_shape(self, spans: Spans) -> Hashable:
        """What else the launches of a decode step depend on (how often keys are split, for instance): decode steps of
        equally many sequences and equal launch shape can share one captured graph."""
        ...

    def accepts(self, spec: AttentionSpec, facts: DeviceFacts) -> str | None:
        """None if this backend serves `spec` on this device, otherwise the reason why not, in words."""
        ...

    def plan(self, spans: Spans) -> AttentionPlan:
        """Prepare one step for all layers."""
        ...

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        call: AttentionCall,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with q [tokens, heads, head_dim] over the cached keys and values, to which this step's have been
        written already.

        `sinks` [heads], float32, are scores of a key that has no value. Returns [tokens, heads, head_dim] in q's dtype; for
        a latent layer q is [tokens, heads, nope + rope], and the result [tokens, heads, value].
        """
        ...
