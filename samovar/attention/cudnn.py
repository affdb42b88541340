"""Long prompts through cuDNN's attention; everything else as `TritonAttention` does it.

cuDNN wants contiguous keys, and builds a plan for each new shape: 40 to 80 ms once, kept for the life of the process. So
shapes come in steps: a sequence's keys are gathered, its history is cut to a multiple of `HISTORY_STEP`, and what is over
joins the chunk as rows whose results nobody reads. A causal square over those keys and one over the history are joined
by log-sum-exp. The square's keys are repeated for every query head that shares them, which cuDNN is faster with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from samovar.attention.base import AttentionCall, AttentionSpec, LayerCache, Spans
from samovar.attention.triton import (
    TritonAttention,
    TritonPlan,
    is_coded,
    layout_of_rows,
    meta_rows,
    meta_spans,
    padded,
    prefill,
    scales_of,
)
from samovar.core.device_facts import DeviceFacts
from samovar.hardware.memory import HISTORY_STEP, SQUARE_STEP
from samovar.kernels.triton_launch import launch

LONG = 4096
"""New tokens from which a sequence goes to cuDNN, measured on an H200."""
LONG_AFTER, LONG_HISTORY = 2048, 8192
"""The same for a sequence with a history of at least so many tokens."""
GATHER_ROWS = 64
"""Tokens that one program gathers."""


@dataclass(frozen=True, slots=True)
class LongSpan:
    """One sequence: rows first .. first + new; `history` keys apart, then a square of `square` rows and keys, of which
    `lead` come before the first row that counts."""

    seq: int
    first: int
    new: int
    history: int
    lead: int
    square: int


class CudnnAttention(TritonAttention):
    """See the module. Decode steps, which can be captured, and all short chunks are those of `TritonAttention`."""

    name = "cudnn"

    def accepts(self, spec: AttentionSpec, facts: DeviceFacts) -> str | None:
        """Plain causal attention in 16 bits on Hopper and later, with a torch that brings cuDNN."""
        return self._refusal(spec, facts) or super().accepts(spec, facts)

    def _refusal(self, spec: AttentionSpec, facts: DeviceFacts) -> str | None:
        if facts.kind != "cuda":
            return "for CUDA GPUs"
        if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            return "torch is built without cuDNN"
        if not facts.architecture.startswith("sm_") or int(facts.architecture[3:]) < 90:
            return "for sm_90 and later"
        if spec.cache.latent is not None:
            return "no latent caches"
        if spec.softcap is not None or spec.has_sinks or spec.cache.window is not None or spec.cache.chunk is not None:
            return "no windows, chunks, soft caps or sinks"
        if spec.cache.bytes_per_element > 2 or spec.cache.head_dim > 128:
            return "caches of 16 bits and less with head dims up to 128 only"
        return "not deterministic" if self.is_deterministic else None

    def prefill(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        cache: LayerCache,
        plan: TritonPlan,
        call: AttentionCall,
        sinks: torch.Tensor | None,
    ) -> None:
        """Long sequences one by one, those between them together."""
        begin = plan.num_decodes
        is_served = q.itemsize == 2 and (is_coded(cache) or q.dtype == cache[0].dtype)
        for span in long_spans(plan) if is_served else ():
            if begin < span.seq:
                prefill(out, q, cache, plan, call, sinks, (begin, span.seq))
            attend_long(out, q, cache, plan, call, span)
            begin = span.seq + 1
        if begin < len(plan.spans.new_tokens):
            prefill(out, q, cache, plan, call, sinks, (begin, len(plan.spans.new_tokens)))

    def warm_examples(
        self, spec: AttentionSpec, dtypes: tuple[torch.dtype, torch.dtype], block_size: int, scale: float
    ) -> Iterator[tuple[torch.Tensor, LayerCache, Spans, AttentionCall, torch.Tensor | None]]:
        """Those of `TritonAttention`, and a long chunk with history."""
        for example in super().warm_examples(spec, dtypes, block_size, scale):
            yield example
        _, cache, _, call, sinks = example
        queries = meta_rows(LONG, spec.num_heads, spec.cache.head_dim, dtypes[0])
        yield queries, cache, meta_spans(LONG, LONG + HISTORY_STEP), call, sinks


def long_spans(plan: TritonPlan) -> list[LongSpan]:
    """The sequences of a step that go to cuDNN."""
    found, first = [], 0
    for seq, (new, total) in enumerate(zip(plan.spans.new_tokens, plan.spans.total_tokens, strict=True)):
        if new >= LONG or (new >= LONG_AFTER and total - new >= LONG_HISTORY):
            history = (total - new) // HISTORY_STEP * HISTORY_STEP
            square = -(-(total - history) // SQUARE_STEP) * SQUARE_STEP
            found.append(LongSpan(seq, first, new, history, total - new - history, square))
        first += new
    return found


def attend_long(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: LayerCache,
    plan: TritonPlan,
    call: AttentionCall,
    span: LongSpan,
) -> None:
    """The rows of one sequence, into those of `out`."""
    from samovar.attention.triton_gather import join_two

    rows = slice(span.first, span.first + span.new)
    queries = q[rows]
    if span.square != span.new:
        queries = q.new_empty((span.square, *q.shape[1:]))
        queries[span.lead : span.lead + span.new] = q[rows]
    copies = q.shape[1] // cache[0].shape[2]
    keys, values = gather(q, cache, plan, span.seq, span.history, span.square, copies)
    own, own_sums = attend_dense(queries, keys, values, call, is_causal=True)
    if not span.history:
        out[rows] = own[span.lead : span.lead + span.new]
        return
    del keys, values  # before more are gathered: a cache's worth of them may be
    keys, values = gather(q, cache, plan, span.seq, 0, span.history, 1)
    before, before_sums = attend_dense(queries, keys, values, call, is_causal=False)
    heads, dim = q.shape[1:]
    launch(
        join_two,
        (span.new,),
        *(out[rows], own, own_sums, before, before_sums, span.lead, span.square),
        HEADS=heads,
        HEAD_DIM=dim,
        ROWS=padded(heads),
        DIM=padded(dim),
    )


def gather(
    q: torch.Tensor, cache: LayerCache, plan: TritonPlan, seq: int, begin: int, size: int, copies: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence from token `begin` on, each [kv_heads * copies, size, head_dim] of q's dtype; zeros
    past its end, and `copies` of each head side by side."""
    from samovar.attention.triton_gather import gather_keys

    kv_heads, dim = cache[0].shape[2], q.shape[2]
    gathered = q.new_empty((2, kv_heads * copies, size, dim))
    on_device = plan.tensors
    launch(
        gather_keys,
        (-(-size // GATHER_ROWS), kv_heads),
        *(gathered[0], gathered[1], *cache[:2], on_device.totals, on_device.table_rows, on_device.tables),
        *(on_device.tables.stride(0), seq, begin, size, *scales_of(cache)),
        HEAD_DIM=dim,
        PAGE=cache[0].shape[1],
        **layout_of_rows(cache, dim),
        DIM=padded(dim),
        COPIES=copies,
        BLOCK=GATHER_ROWS,
    )
    return gathered[0], gathered[1]


def attend_dense(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: AttentionCall, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [rows, heads, dim] over keys and values [kv_heads, n, dim] -> ([rows, heads, dim], log-sum-exp [heads, rows])."""
    if q.is_meta:
        # torch would derive this in Python, and import its compiler for that.
        return torch.empty_like(q), torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1)[None], keys[None], values[None], None, True, 0.0, is_causal, False, scale=call.scale
    )
    return result[0][0].transpose(0, 1).contiguous(), result[1].reshape(q.shape[1], q.shape[0]).contiguous()
