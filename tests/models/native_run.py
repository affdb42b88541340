"""Runs a lowered model over a paged cache, step by step, as `paged_run.PagedRun` runs layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from samovar.attention.base import Spans
from samovar.attention.choose import AttentionRoute
from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.cache.kv_cache import KVCache
from samovar.kernels.op import Kernels, Target
from samovar.layers import bind
from samovar.layers.attention import attach
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.native import library
from samovar.native.team import Team
from samovar.quant.formats import PLAIN
from samovar.quant.packed import Packed
from samovar.quant.products import Products
from samovar.sample.pipeline import SampleRows
from samovar.worker.native_inputs import StepInputs
from samovar.worker.native_model import Lowered, NativeModel
from samovar.worker.step_builder import BuiltStep
from tests.models.paged_run import BLOCK, Stream, fill, placement


def team_or_skip(num_threads: int = 2, isa: str | None = None) -> Team:
    """A team, where the library is built."""
    if library.find() is None:
        pytest.skip("the CPU kernels are not built")
    return Team(num_threads, isa)


def load_packed(
    architecture: str,
    raw: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    team: Team,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> DecoderLM:
    """A filled model with packed weights of `dtype`."""
    model = build(architecture, raw)
    kernels = Kernels(Target("cpu", "", torch.float32), "cpu")
    packed = Packed(PLAIN[dtype], Products(lambda: team), kernels)
    bind(model, placement(quant_for=lambda path: packed, **fields))
    fill(model, tensors)
    return model


class NativeRun:
    """A bound model with packed weights, its programs, and a cache of `num_blocks` blocks poisoned with NaN."""

    def __init__(self, model: DecoderLM, team: Team, num_blocks: int = 64) -> None:
        self.model, specs = model, model.cache_specs()
        dtype = next(module.cache_dtype for module in model.modules() if hasattr(module, "cache_dtype"))
        self.cache = KVCache(specs, num_blocks, BLOCK, dtype)
        for tensors in self.cache.layers:
            for tensor in tensors:
                tensor.view(torch.uint8).fill_(0xFF)
        attach(model, self.cache, AttentionRoute((TorchSdpaAttention(),), (0,) * len(specs), ()))
        self.native = NativeModel(Lowered(model), team, StepInputs(2, 1, BLOCK), max_tokens=8, logits_rows=64)
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def stream(self, length: int) -> Stream:
        """A sequence of up to `length` tokens."""
        return Stream([self.free.pop() for _ in range(-(-length // BLOCK))])

    def load(self, work: list[tuple[Stream, list[int]]], samples: list[int] | None = None) -> list[int]:
        """Hand over a step that computes the given new ids of each stream; `samples` are those of which the last row is
        wanted (None: all). Returns how many rows each stream has."""
        width = max(len(stream.blocks) for stream, _ in work)
        tables, ids, positions, slots = [], [], [], []
        for stream, new in work:
            at = range(len(stream.ids), len(stream.ids) + len(new))
            stream.ids += new
            tables.append(stream.blocks + [0] * (width - len(stream.blocks)))
            ids += new
            positions += at
            slots += [stream.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in at]
        counts = [len(new) for _, new in work]
        first_rows = np.concatenate(([0], np.cumsum(counts)))
        wanted = np.array(range(len(work)) if samples is None else samples, np.int64)
        built = BuiltStep(
            sequences=[],
            failed={},
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            spans=Spans(counts, [len(stream.ids) for stream, _ in work], torch.tensor(tables)),
            first_rows=first_rows[:-1],
            sampling=SampleRows(wanted, wanted),
            sample_rows=torch.from_numpy(first_rows[wanted + 1] - 1),
        )
        self.native.inputs.load(built)
        return counts

    @torch.inference_mode()
    def step(self, work: list[tuple[Stream, list[int]]]) -> list[torch.Tensor]:
        """Logits [new, vocab] of each stream."""
        counts = self.load(work)
        return list(self.model.logits(self.native.hidden("every")).split(counts))

    @torch.inference_mode()
    def last(self, work: list[tuple[Stream, list[int]]], samples: list[int] | None = None) -> torch.Tensor:
        """Logits of the last row of each stream that samples."""
        self.load(work, samples)
        return self.native.logits("last").clone()
