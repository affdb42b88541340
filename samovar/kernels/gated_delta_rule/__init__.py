"""The gated delta rule (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464): a matrix per head that forgets, and corrects
what it would have answered to a key.

Tokens of a chunk are computed together. What they write depends on what those before them in the chunk wrote, which is a
triangular system of equations (the UT transform of Yang et al., 2024, arXiv 2406.06484).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad, softplus

from samovar.kernels.op import op

CHUNK = 64
"""Tokens whose mutual influence is solved for at once."""
AT_ONCE = 16
"""Chunks for which that is done together: bounds the memory it takes."""
NORM_EPS = 1e-6


@op(prefer=("triton",), mutates=("state",), plain_is_best=("cpu",))
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rates: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    first_rows: torch.Tensor,
    state_rows: torch.Tensor,
    new_tokens: Sequence[int],
    all_single: bool,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """y_t = S_t^T q_t with S_t = e^g_t S_{t-1} + k_t u_t^T, u_t = beta_t (v_t - e^g_t S_{t-1}^T k_t) -> [tokens, heads, dv].

    q, k [tokens, key_heads, dk] are divided by their lengths, and q by sqrt(dk) besides; v [tokens, heads, dv]: `heads` is a
    multiple of `key_heads`, and neighbours share a key head. a, b [tokens, heads] give the gates: g = rates *
    softplus(a + dt_bias) with rates (negative) and dt_bias [heads], beta = beta_scale * sigmoid(b). state [rows, heads,
    dv, dk] holds S^T of sequence i at state_rows[i] and is written in place; its tokens are those from first_rows[i] on,
    new_tokens[i] of them, or one each with `all_single`. Rows of all operands may lie apart. Computed in float32 at least.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = (unit(each.to(wide)) for each in (q, k))
    q, v = q * q.shape[-1] ** -0.5, v.to(wide)
    decay = rates.to(wide) * softplus(a.to(wide) + dt_bias.to(wide))
    beta = beta_scale * torch.sigmoid(b.to(wide))
    if all_single:
        return _step(q, k, v, decay, beta, state, state_rows).to(b.dtype)
    y, first = torch.empty_like(v, memory_format=torch.contiguous_format), 0
    singles = [i for i, count in enumerate(new_tokens) if count == 1]
    for row, count in zip(state_rows.tolist(), new_tokens, strict=True):
        for start in range(first, first + count if count > 1 else first, AT_ONCE * CHUNK):
            some = slice(start, min(start + AT_ONCE * CHUNK, first + count))
            y[some] = _chunks(q[some], k[some], v[some], decay[some], beta[some], state[row])
        first += count
    if singles:
        rows = first_rows[:-1][singles]
        y[rows] = _step(q[rows], k[rows], v[rows], decay[rows], beta[rows], state, state_rows[singles])
    return y.to(b.dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    """x [..., dim] divided by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_rows: torch.Tensor,
) -> torch.Tensor:
    """One token of each sequence."""
    share = v.shape[1] // k.shape[1]
    q, k = (each.repeat_interleave(share, 1)[..., None] for each in (q, k))
    memory = state[state_rows].to(v.dtype).mul_(decay.exp()[..., None, None])
    added = beta[..., None] * (v - (memory @ k)[..., 0])
    memory.addcmul_(added[..., None], k.mT)
    state[state_rows] = memory.to(state.dtype)
    return (memory @ q)[..., 0]


def _chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, memory: torch.Tensor
) -> torch.Tensor:
    """Some tokens of one sequence, whose state is `memory` [heads, dv, dk]."""
    tokens, heads = beta.shape
    key_heads, size = k.shape[1], min(CHUNK, tokens)
    count = -(-tokens // size)
    by_key = (count, key_heads, heads // key_heads, size)

    def cut(x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, ...] -> [chunks, heads, tokens of a chunk, ...], with zeros behind the last one."""
        filled = pad(x, (*(0, 0) * (x.dim() - 1), 0, count * size - tokens))
        return filled.view(count, size, *x.shape[1:]).transpose(1, 2)

    q, k, v, beta = cut(q), cut(k), cut(v), cut(beta)
    # Sums of logarithms in float64: a decay between two tokens is a difference of two of them that may be far larger.
    total = cut(decay.double()).cumsum(2)
    later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).to(v.dtype).masked_fill_(later, -torch.inf).exp_()
    by_pair = between.view(*by_key, size)
    ahead, rest = total.exp().to(v.dtype)[..., None], (total[..., -1:] - total).exp().to(v.dtype)[..., None]
    end = total[..., -1].exp().to(v.dtype)[..., None, None]
    scores = ((q @ k.mT)[:, :, None] * by_pair).view(count, heads, size, size)
    q, wide_k = (each.repeat_interleave(heads // key_heads, 1) for each in (q, k))
    influence = ((k @ k.mT)[:, :, None] * by_pair).view(count, heads, size, size) * beta[..., None]
    given = torch.cat((v, wide_k * ahead), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(influence.tril_(-1), given, upper=False, unitriangular=True)
    own, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    q, kept, y = q * ahead, (wide_k * rest).mT, torch.empty_like(v)
    before = memory.mT.to(v.dtype)
    for chunk in range(count):
        added = own[chunk] - read[chunk] @ before
        y[chunk] = q[chunk] @ before + scores[chunk] @ added
        before = before * end[chunk] + kept[chunk] @ added
    memory.copy_(before.mT)
    return y.transpose(1, 2).reshape(count * size, heads, -1)[:tokens]


@gated_delta_rule.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for new_tokens, (key_heads, heads, dk, dv) in (
        ([1, 1, 1], (2, 4, 32, 32)),
        ([70, 1, 9], (1, 3, 32, 16)),
        ([130, 2], (2, 2, 16, 64)),
        ([1, 1], (1, 2, 24, 20)),
        ([5, 66], (2, 4, 20, 24)),
    ):
        tokens, count = sum(new_tokens), len(new_tokens)
        first_rows = torch.tensor([0, *new_tokens]).cumsum(0).int()
        inputs = *torch.randn(2, tokens, key_heads, dk), torch.randn(tokens, heads, dv), *torch.randn(2, tokens, heads)
        constants = -2 * torch.rand(heads) - 0.05, torch.randn(heads) - 1
        state_rows = torch.randperm(count + 2)[:count].int()
        rows = (first_rows, state_rows, tuple(new_tokens), max(new_tokens) == 1)
        yield *inputs, *constants, torch.randn(count + 2, heads, dv, dk), *rows, 1.0 if dk == 32 else 2.0


gated_delta_rule.tolerance[torch.float32] = (1e-4, 1e-4)
gated_delta_rule.tolerance[torch.bfloat16] = (6e-2, 3e-2)
gated_delta_rule.tolerance[torch.float16] = (1e-2, 5e-3)
