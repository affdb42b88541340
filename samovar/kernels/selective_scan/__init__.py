"""Mamba's selective scan (Gu and Dao, 2023, arXiv 2312.00752): every channel has a state of its own, and its own rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import softplus

from samovar.kernels.op import op

BLOCK = 8
"""Tokens whose states are kept at a time, so that all but the recurrence is done for them together."""


@op(prefer=("triton",), mutates=("state",), plain_is_best=("cpu",))
def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rates: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    first_rows: torch.Tensor,
    state_rows: torch.Tensor,
    new_tokens: Sequence[int],
    all_single: bool,
) -> torch.Tensor:
    """y_t = h_t c_t + skip x_t with h_t = exp(dt_t rates) h_{t-1} + dt_t x_t b_t -> [tokens, channels].

    x, dt [tokens, channels], of which softplus(dt) is the step; b, c [tokens, N], the same for all channels; rates
    (negative) float32 [channels, N], skip float32 [channels]. state [rows, channels, N] holds h of
    sequence i at state_rows[i], and new_tokens[i] tokens are its, as in `state_space_scan`. Computed in float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    step, given = softplus(dt.to(wide)), x.to(wide)
    b, c = b.to(wide), c.to(wide)
    if all_single:
        y = torch.empty_like(given, memory_format=torch.contiguous_format)
        for i, row in enumerate(state_rows.tolist()):
            y[i : i + 1] = _block(given[i : i + 1], step[i : i + 1], b[i : i + 1], c[i : i + 1], rates, state[row])
    else:
        y, first = torch.empty_like(given, memory_format=torch.contiguous_format), 0
        for row, count in zip(state_rows.tolist(), new_tokens):
            for start in range(first, first + count, BLOCK):
                rows = slice(start, min(start + BLOCK, first + count))
                y[rows] = _block(given[rows], step[rows], b[rows], c[rows], rates, state[row])
            first += count
    return y.addcmul_(given, skip).to(x.dtype)


def _block(
    x: torch.Tensor, step: torch.Tensor, b: torch.Tensor, c: torch.Tensor, rates: torch.Tensor, row: torch.Tensor
) -> torch.Tensor:
    """A few tokens of one sequence, whose state is `row` [channels, N]: one operation for each, the rest together."""
    decay = (step[..., None] * rates).exp_()
    states = (step * x)[..., None] * b[:, None]  # [tokens, channels, N]: what each token adds, then h
    before = row.to(states.dtype)
    for token in range(len(x)):
        before = states[token].addcmul_(decay[token], before)
    row.copy_(before)
    return (states @ c[..., None])[..., 0]


@selective_scan.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for new_tokens, (channels, n) in (
        ([1, 1, 1], (48, 16)),
        ([40, 1, 9], (64, 16)),
        ([1], (20, 5)),
        ([7, 3], (130, 8)),
    ):
        tokens, count = sum(new_tokens), len(new_tokens)
        first_rows = torch.tensor([0, *new_tokens]).cumsum(0).int()
        inputs = *torch.randn(2, tokens, channels), *torch.randn(2, tokens, n)
        constants = -2 * torch.rand(channels, n) - 0.1, torch.randn(channels)
        state_rows = torch.randperm(count + 2)[:count].int()
        rows = (first_rows, state_rows, tuple(new_tokens), all(each == 1 for each in new_tokens))
        yield *inputs, *constants, torch.randn(count + 2, channels, n), *rows


selective_scan.tolerance[torch.float32] = (1e-4, 1e-4)
selective_scan.tolerance[torch.bfloat16] = (1e-1, 3e-2)
selective_scan.tolerance[torch.float16] = (2e-2, 5e-3)
