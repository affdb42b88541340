"""Causal convolutions in Triton: a tile of one sequence's tokens by channels; the taps are reads of neighbouring rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from samovar.kernels.causal_conv import causal_conv
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.ragged import most_tiles
from samovar.kernels.ragged.triton import locate
from samovar.kernels.triton_launch import cdiv, launch


class ConvTile(NamedTuple):
    """What one program makes: `tokens` rows of one sequence by `columns` channels."""

    tokens: int
    columns: int
    warps: int


SINGLE = ConvTile(1, 256, 2)
"""Every sequence has one token: programs enough to fetch all states at once."""
CHUNK = ConvTile(32, 128, 4)


@triton.jit(do_not_specialize=["sequences"])
def causal_conv_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, state: tl.tensor, first_rows: tl.tensor, state_rows: tl.tensor, out: tl.tensor,
    sequences: tl.tensor, row_stride: tl.tensor,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, ALL_SINGLE: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """out [TOKENS, COLUMNS]. The first tile of a sequence also writes what the sequence leaves behind: nobody else reads
    what it began with."""
    if ALL_SINGLE:
        sequence = tl.program_id(0)
        first, rows, start = sequence, 1, 0
    else:
        sequence, first, rows, start = locate(first_rows, sequences, tl.program_id(0), TOKENS)
    PAST: tl.constexpr = WIDTH - 1
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < CHANNELS
    sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
    if bias is not None:
        sums += tl.load(bias + channel, inside, 0.0).to(tl.float32)[None, :]
    await_previous(OVERLAP)
    start_next(OVERLAP)
    if start < rows:
        token = start + tl.arange(0, TOKENS)
        is_new = (token < rows)[:, None] & inside[None, :]
        own = state + tl.load(state_rows + sequence).to(tl.int64) * (CHANNELS * PAST) + channel * PAST
        new = x + (first + token).to(tl.int64)[:, None] * row_stride + channel[None, :]
        if start >= PAST:
            for tap in tl.static_range(WIDTH):
                value = tl.load(new + (tap - PAST) * row_stride, is_new, 0.0).to(tl.float32)
                sums += value * tl.load(weight + channel * WIDTH + tap, inside, 0.0).to(tl.float32)[None, :]
        else:
            for tap in tl.static_range(WIDTH):
                past = (token + tap < PAST)[:, None]
                value = tl.load(new + (tap - PAST) * row_stride, is_new & ~past, 0.0).to(tl.float32)
                value += tl.load(own[None, :] + (token + tap)[:, None], is_new & past, 0.0).to(tl.float32)
                sums += value * tl.load(weight + channel * WIDTH + tap, inside, 0.0).to(tl.float32)[None, :]
        if SILU:
            sums = sums * tl.sigmoid(sums)
        to = out + (first + token).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(to, sums.to(out.dtype.element_ty), is_new)
        if PAST > 0 and start == 0:
            # Slot s of the new state is input rows - PAST + s: of this step, or slot rows + s of the old state. Slots are
            # written from the first on, and read from behind it, but by all threads: each waits for the others' reads.
            last = x + (first + rows - PAST).to(tl.int64) * row_stride + channel
            tl.debug_barrier()
            for slot in tl.static_range(PAST):
                is_old = channel * 0 + slot + rows < PAST
                kept = tl.load(own + slot + rows, inside & is_old, 0.0)
                seen = tl.load(last + slot * row_stride, inside & ~is_old, 0.0)
                tl.store(own + slot, tl.where(is_old, kept, seen.to(kept.dtype)), inside)


@causal_conv.impl("triton", devices=("cuda",))
def causal_conv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    first_rows: torch.Tensor,
    state_rows: torch.Tensor,
    new_tokens: Sequence[int],
    all_single: bool,
    activation: Literal["silu"] | None = None,
) -> torch.Tensor:
    """One kernel."""
    return conv(
        SINGLE if all_single else CHUNK, x, weight, bias, state, (first_rows, state_rows), all_single, activation
    )


def conv(
    tile: ConvTile,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    all_single: bool,
    activation: Literal["silu"] | None,
) -> torch.Tensor:
    """`causal_conv` with a given tile."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, channels), count = x.shape, len(rows[1])
    out = x.new_empty(tokens, channels)
    tiles = tokens if all_single else most_tiles(tokens, count, tile.tokens)
    launch(
        causal_conv_kernel, (tiles, cdiv(channels, tile.columns)),
        x, weight.contiguous(), bias, state, *rows, out, count, x.stride(0),
        CHANNELS=channels, WIDTH=weight.shape[1], SILU=activation == "silu", ALL_SINGLE=all_single,
        TOKENS=tile.tokens, COLUMNS=tile.columns, num_warps=tile.warps, **launch_options(),
    )  # fmt: skip
    return out
