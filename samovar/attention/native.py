"""Paged attention by the CPU library, for models that run layer by layer: keys are read where the cache has them.

A model that runs as whole steps does not come here: there attention is one instruction among others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.attention.base import AttentionCall, AttentionPlan, AttentionSpec, LayerCache, Spans
from samovar.core.device_facts import DeviceFacts
from samovar.native.abi import CInstruction, Count, CRegister, CStep, Format, Op
from samovar.native.library import NativeError
from samovar.native.team import Team, make_team

FORMATS = {
    torch.float32: Format.F32,
    torch.float16: Format.F16,
    torch.bfloat16: Format.BF16,
    torch.float8_e4m3fn: Format.KV_FP8_E4M3,
}
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, eq=False)
class NativePlan:
    """One step. `first_rows` [num_seqs + 1], `totals` [num_seqs] and `tables` [num_seqs, width] are int32."""

    first_rows: NDArray[np.int32]
    totals: NDArray[np.int32]
    tables: torch.Tensor

    def step(self, block_size: int) -> CStep:
        """The library's description of the step, which points into this plan."""
        step = CStep()
        step.num_sequences, step.counts[Count.TOKENS] = len(self.totals), int(self.first_rows[-1])
        step.first_rows, step.totals = self.first_rows.ctypes.data, self.totals.ctypes.data
        step.tables, step.table_width, step.block_size = self.tables.data_ptr(), self.tables.shape[1], block_size
        return step


class NativeAttention:
    """See the module. Its threads are made when it first runs, as many as torch has."""

    name = "native"
    captures = False

    def __init__(self) -> None:
        self._team: Team | None = None

    def launch_shape(self, spans: Spans) -> None:
        """Nothing: it is never captured."""

    def accepts(self, spec: AttentionSpec, facts: DeviceFacts) -> str | None:
        """CPUs for which the library is there; its head sizes, and caches without scales."""
        if facts.kind != "cpu":
            return "made for CPUs"
        if not facts.has_kernels:
            return "the CPU kernels are not built"
        if spec.cache.latent is not None:
            return "no latent caches"
        if spec.cache.head_dim % 8 or spec.cache.head_dim > MAX_HEAD_DIM:
            return f"head dim {spec.cache.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
        if spec.cache.chunk is not None:
            return "no chunks"
        if spec.cache.scale_bytes:
            return "an int8 cache is for whole steps"
        if spec.cache.packed or spec.cache.is_e5m2 or spec.has_head_scales:
            return "no packed caches, e5m2 or scales of a checkpoint"
        return None

    def plan(self, spans: Spans) -> AttentionPlan:
        """Where the rows of each sequence begin, and its blocks."""
        first_rows = np.zeros(len(spans.new_tokens) + 1, dtype=np.int32)
        np.cumsum(spans.new_tokens, out=first_rows[1:])
        totals = np.array(spans.total_tokens, dtype=np.int32)
        return NativePlan(first_rows, totals, spans.block_tables.to(torch.int32).contiguous())

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        call: AttentionCall,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`. The cache must lie token by token, as it does on CPUs."""
        keys, values = cache
        if not (keys.is_contiguous() and values.is_contiguous()):
            raise NativeError("attention native: the cache lies head by head; use --attention-backend torch_sdpa")
        if self._team is None:
            self._team = make_team(torch.get_num_threads())
        rows = q.float().contiguous()
        y = torch.empty_like(rows)
        scores = None if sinks is None else sinks.float().contiguous()
        step = cast(NativePlan, plan).step(keys.shape[1])
        registers = (CRegister * 2)(*(CRegister(x.data_ptr(), x.shape[1] * x.shape[2]) for x in (rows, y)))
        step.registers, step.num_registers = registers, len(registers)
        program = (CInstruction * 1)()
        _fill(program[0], rows, cache, call, scores)
        self._team.run(program, step)
        self._team.forget()  # a thread that is late may still look at what goes away here
        return y.to(q.dtype)


def _fill(
    instruction: CInstruction,
    q: torch.Tensor,
    cache: LayerCache,
    call: AttentionCall,
    sinks: torch.Tensor | None,
) -> None:
    """The instruction for register 0 to register 1."""
    keys, values = cache
    instruction.op, instruction.rows = Op.ATTENTION, Count.TOKENS
    instruction.input[:], instruction.output[:] = (0, -1, -1, -1), (1, -1)
    instruction.i[:6] = (q.shape[1], keys.shape[2], q.shape[2], 0, FORMATS[keys.dtype], call.window or 0)
    instruction.f[:2] = (call.scale, call.softcap or 0.0)
    instruction.p[:3] = (keys.data_ptr(), values.data_ptr(), None if sinks is None else sinks.data_ptr())
