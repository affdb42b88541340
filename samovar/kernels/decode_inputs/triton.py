"""The inputs of a decode step in one small Triton kernel, the first of a decode graph."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.decode_inputs import decode_inputs
from samovar.kernels.triton_launch import cdiv, launch

ROWS_PER_PROGRAM = 128


@triton.jit(do_not_specialize=["rows", "packed_stride", "table_stride"])
def decode_inputs_kernel(
    packed: tl.tensor, last_sampled: tl.tensor, tables: tl.tensor,
    token_ids: tl.tensor, positions: tl.tensor, slot_mapping: tl.tensor, totals: tl.tensor,
    rows: tl.tensor, packed_stride: tl.tensor, table_stride: tl.tensor, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows, one a thread."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    slot = tl.load(packed + row, mask, 0).to(tl.int64)
    position = tl.load(packed + packed_stride + row, mask, -1)
    token = tl.load(packed + 2 * packed_stride + row, mask, 0).to(tl.int64)
    is_real = mask & (position >= 0)
    token = tl.where(token >= 0, token, tl.load(last_sampled + slot, is_real & (token < 0), 0))
    at = tl.where(is_real, position, 0)
    block = tl.load(tables + slot * table_stride + at // BLOCK_SIZE, is_real, 0).to(tl.int64)
    tl.store(token_ids + row, tl.where(is_real, token, 0), mask)
    tl.store(positions + row, at.to(tl.int64), mask)
    tl.store(slot_mapping + row, tl.where(is_real, block * BLOCK_SIZE + at % BLOCK_SIZE, -1), mask)
    tl.store(totals + row, tl.where(is_real, at + 1, 0), mask)


@decode_inputs.impl("triton", devices=("cuda",))
def decode_inputs_triton(
    packed: torch.Tensor,
    last_sampled: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    totals: torch.Tensor,
) -> None:
    """One kernel; rows of `packed` and `tables` may lie apart."""
    rows = packed.shape[1]
    launch(
        decode_inputs_kernel, (cdiv(rows, ROWS_PER_PROGRAM),),
        packed, last_sampled, tables, token_ids, positions, slot_mapping, totals,
        rows, packed.stride(0), tables.stride(0), BLOCK_SIZE=block_size, ROWS=ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
