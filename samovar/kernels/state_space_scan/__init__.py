"""Mamba2's state-space scan in its dual form (Dao and Gu, 2024, "Transformers are SSMs", arXiv 2405.21060).

Each head keeps a state S [head_dim, N]. A token decays it by exp(dt a), adds dt x b^T, and reads S c. Over a chunk of
tokens that is a masked product of matrices plus what the state before the chunk gives, so that long prompts take no loop
over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import softplus

from samovar.kernels.op import op

CHUNK = 64
"""Tokens that are multiplied as one matrix. Work within a chunk grows with its square, work between chunks with their
number."""


@op(prefer=("triton",), mutates=("state",), plain_is_best=("cpu",))
def state_space_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rates: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    first_rows: torch.Tensor,
    state_rows: torch.Tensor,
    new_tokens: Sequence[int],
    all_single: bool,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """y_t = S_t c_t + skip x_t with S_t = exp(dt_t rates) S_{t-1} + dt_t x_t b_t^T -> [tokens, heads, head_dim].

    x [tokens, heads, head_dim]; dt [tokens, heads], of which softplus(dt + dt_bias) within `dt_limit` is the step; b, c
    [tokens, groups, N], a group for heads / groups heads in a row; rates (negative), dt_bias, skip float32 [heads].
    state [rows, heads, head_dim, N] holds S of sequence i at state_rows[i] (int32 [n]) and is left as it is after the
    sequence's last token. Sequence i has new_tokens[i] tokens from first_rows[i] (int32 [n + 1]) on; `all_single`: one
    each. Computed in float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    step = softplus(dt.to(wide) + dt_bias).clamp(*dt_limit)
    if all_single:
        y = _one_each(x, step, b, c, rates, state, state_rows)
    else:
        y, first = torch.empty(x.shape, dtype=wide, device=x.device), 0
        for row, count in zip(state_rows.tolist(), new_tokens):
            for start in range(first, first + count, CHUNK):
                rows = slice(start, min(start + CHUNK, first + count))
                y[rows] = _chunk(x[rows], step[rows], b[rows], c[rows], rates, state[row])
            first += count
    return y.addcmul_(x.to(wide), skip[:, None]).to(x.dtype)


def _one_each(
    x: torch.Tensor,
    step: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rates: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
) -> torch.Tensor:
    """One token of each sequence: the recurrence itself, in place, as states are what takes the time."""
    (heads, dim), (groups, n) = x.shape[1:], b.shape[1:]
    decay, values = (step * rates).exp(), (x * step[..., None]).view(len(x), groups, -1, 1)
    keys, queries = b.to(step.dtype)[:, :, None], c.to(step.dtype)[..., None]
    y = values.new_empty(len(x), groups, heads // groups * dim, 1)
    for i, row in enumerate(state_rows.tolist()):
        held = state[row].to(step.dtype)
        by_group = held.mul_(decay[i, :, None, None]).view(groups, -1, n).addcmul_(values[i], keys[i])
        torch.bmm(by_group, queries[i], out=y[i])
        if held.dtype != state.dtype:
            state[row] = held
    return y.view(len(x), heads, dim)


def _chunk(
    x: torch.Tensor,
    step: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rates: torch.Tensor,
    row: torch.Tensor,
) -> torch.Tensor:
    """The same for a chunk of one sequence, whose state is `row` [heads, head_dim, N]. Heads of a group are one matrix where
    they share an operand."""
    (tokens, heads, dim), groups = x.shape, b.shape[1]
    wide = step.dtype
    # Sums of logarithms in float64: the decay between two tokens is a difference of two of them that may be far larger.
    total = (step * rates).double().cumsum(0)  # [tokens, heads]
    between = (total.T[:, :, None] - total.T[:, None, :]).to(wide)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu_(1)
    weights = between.masked_fill_(later, -torch.inf).exp_()
    keys, queries = (each.to(wide).transpose(0, 1) for each in (b, c))  # [groups, tokens, N]
    weights.view(groups, -1, tokens, tokens).mul_((queries @ keys.mT)[:, None])
    values = x * step[..., None]
    held = row.to(wide)
    by_group = held.view(groups, -1, held.shape[2])
    y = (queries @ by_group.mT).transpose(0, 1).reshape(tokens, heads, dim) * total.exp().to(wide)[..., None]
    y += (weights @ values.transpose(0, 1)).transpose(0, 1)
    values *= (total[-1] - total).exp().to(wide)[..., None]
    held.mul_(total[-1].exp().to(wide)[:, None, None])
    by_group.baddbmm_(values.view(tokens, groups, -1).permute(1, 2, 0), keys)
    if held.dtype != row.dtype:
        row.copy_(held)
    return y


@state_space_scan.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for new_tokens, (heads, dim, groups, n) in (
        ([1, 1, 1], (4, 16, 2, 32)),
        ([70, 1, 9], (4, 32, 1, 16)),
        ([130], (2, 16, 2, 64)),
        ([1], (3, 24, 1, 20)),
        ([5, 33], (6, 20, 3, 24)),
    ):
        tokens, count = sum(new_tokens), len(new_tokens)
        first_rows = torch.tensor([0, *new_tokens]).cumsum(0).int()
        inputs = torch.randn(tokens, heads, dim), torch.randn(tokens, heads), *torch.randn(2, tokens, groups, n)
        constants = -2 * torch.rand(heads) - 0.1, torch.rand(heads) - 1, torch.randn(heads)
        state_rows = torch.randperm(count + 2)[:count].int()
        rows = (first_rows, state_rows, tuple(new_tokens), all(each == 1 for each in new_tokens))
        yield *inputs, *constants, torch.randn(count + 2, heads, dim, n), *rows
        if heads == 3:
            yield *inputs, *constants, torch.randn(count + 2, heads, dim, n), *rows, (0.1, 0.4)


state_space_scan.tolerance[torch.float32] = (1e-4, 1e-4)
state_space_scan.tolerance[torch.bfloat16] = (1e-1, 3e-2)
state_space_scan.tolerance[torch.float16] = (2e-2, 5e-3)
