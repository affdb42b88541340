"""Runs a model over a paged cache, step by step, the way a worker does but in twenty lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from samovar.attention.base import AttentionBackend, Spans
from samovar.attention.choose import AttentionRoute
from samovar.cache.kv_cache import KVCache
from samovar.kernels.op import Kernels, Target
from samovar.layers import ForwardBatch, Layer, Placement, bind
from samovar.layers.attention import attach
from samovar.layers.batch import SequenceRows
from samovar.layers.recurrent import recurrent_layers
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build

BLOCK = 4
"""Tokens in a cache block."""


def placement(dtype: torch.dtype = torch.float32, **fields: Any) -> Placement:
    """A place on the CPU."""
    kernels = Kernels(Target("cpu", "", dtype), "cpu")
    return Placement(dtype=dtype, device=torch.device("cpu"), kernels=kernels, **fields)


def fill(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Copy what the layers ask for; returns the names they claim."""
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    for layer in layers:
        for source in layer.sources():
            tensor, (which, count) = tensors[source.name], source.shard
            if source.axis is not None:
                part = tensor.shape[source.axis] // count
                tensor = tensor.narrow(source.axis, which * part, part)
            assert source.target.shape == tensor.shape, source.name
            source.target.copy_(tensor)
    for layer in layers:
        layer.after_load()
    return set().union(*(layer.claims() for layer in layers))


def load(architecture: str, raw: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], **fields: Any) -> DecoderLM:
    """A filled model with room for `fields` of `Placement`."""
    model = build(architecture, raw)
    bind(model, placement(**fields))
    fill(model, tensors)
    return model


def rows_of(work: Sequence[tuple[Stream, list[int]]]) -> SequenceRows:
    """Whose rows are whose."""
    counts = [len(new) for _, new in work]
    first_rows = torch.tensor([0, *counts]).cumsum(0).int()
    state_rows = torch.tensor([stream.row for stream, _ in work], dtype=torch.int32)
    return SequenceRows(first_rows, state_rows, counts, all(count == 1 for count in counts))


@dataclass
class Stream:
    """One sequence: ids computed so far, its blocks in an order of no meaning, and its row of the states."""

    blocks: list[int]
    ids: list[int] = field(default_factory=list)
    row: int = 0


class PagedRun:
    """A bound model with a cache of `num_blocks` blocks of `BLOCK` tokens, poisoned with NaN, and as many states."""

    def __init__(
        self,
        model: DecoderLM,
        backend: AttentionBackend,
        num_blocks: int = 64,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, specs = model, model.cache_specs()
        self.cache = KVCache(specs, num_blocks, BLOCK, cache_dtype)
        for tensors in self.cache.layers:
            for tensor in tensors:
                tensor.fill_(torch.nan)
        self.route = AttentionRoute((backend,), (0,) * len(specs), ())
        attach(model, self.cache, self.route)
        self.recurrent = recurrent_layers(model)
        for layer in self.recurrent:
            wanted = [((num_blocks, *t.shape), getattr(torch, t.dtype)) for t in layer.state_spec().tensors]
            layer.attach_state([torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in wanted])
        self.free_rows = list(range(num_blocks))
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def stream(self, length: int, shared: Stream | None = None, shared_tokens: int = 0) -> Stream:
        """A sequence of up to `length` tokens; its first `shared_tokens` come cached from `shared`."""
        kept = shared.blocks[: shared_tokens // BLOCK] if shared else []
        blocks = kept + [self.free.pop() for _ in range(-(-length // BLOCK) - len(kept))]
        row = self.free_rows.pop(len(self.free_rows) // 2)
        for tensor in (tensor for layer in self.recurrent for tensor in layer.state):
            assert shared is None or len(shared.ids) == shared_tokens, "a state is that of all tokens so far"
            tensor[row] = 0 if shared is None else tensor[shared.row]
        return Stream(blocks, list(shared.ids[:shared_tokens]) if shared else [], row)

    def release(self, stream: Stream) -> None:
        """Give a sequence's blocks and its row back."""
        self.free += stream.blocks
        self.free_rows.append(stream.row)

    @torch.inference_mode()
    def step(self, work: list[tuple[Stream, list[int]]]) -> list[torch.Tensor]:
        """Compute the given new ids of each stream in one batch; logits [new, vocab] of each."""
        width = max(len(stream.blocks) for stream, _ in work)
        tables, ids, positions, slots = [], [], [], []
        for stream, new in work:
            at = range(len(stream.ids), len(stream.ids) + len(new))
            stream.ids += new
            tables.append(stream.blocks + [0] * (width - len(stream.blocks)))
            ids += new
            positions += at
            slots += [stream.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in at]
        spans = Spans([len(new) for _, new in work], [len(s.ids) for s, _ in work], torch.tensor(tables))
        tensors = [torch.tensor(values) for values in (ids, positions, slots)]
        batch = ForwardBatch(*tensors, self.route.plan(spans), sequences=rows_of(work))
        return list(self.model.logits(self.model(batch)).split(list(spans.new_tokens)))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` most likely ids after `prompt`, one step each."""
        stream, new, found = self.stream(len(prompt) + count), prompt, []
        for _ in range(count):
            (logits,) = self.step([(stream, new)])
            new = [int(logits[-1].argmax())]
            found += new
        return found
