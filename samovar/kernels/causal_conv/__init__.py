"""Short causal convolutions, one filter for each channel: what a recurrent layer sees of the tokens right before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch.nn.functional import silu

from samovar.kernels.op import op


@op(prefer=("triton",), mutates=("state",), plain_is_best=("cpu",))
def causal_conv(
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
    """y_t = activation(bias + sum_w weight[:, w] x_{t - width + 1 + w}) for every sequence -> [tokens, channels].

    x [tokens, channels] (rows may lie apart), weight [channels, width], bias [channels]. state [rows, channels,
    width - 1] holds the last inputs of sequence i, oldest first, at state_rows[i]; it is written in place. Sequence i has
    the `new_tokens[i]` rows of x from first_rows[i] on; with `all_single` each has one. Computed in float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    filters, width = weight.to(wide), weight.shape[1]
    if all_single:
        seen = torch.cat((state[state_rows].to(wide), x.to(wide)[:, :, None]), 2)
        state[state_rows] = seen[:, :, 1:].to(state.dtype)
        y = (seen * filters).sum(2)
    else:
        y, first = x.new_empty(x.shape, dtype=wide), 0
        for row, count in zip(state_rows.tolist(), new_tokens, strict=True):
            seen = torch.cat((state[row].T.to(wide), x[first : first + count].to(wide)))
            into = torch.mul(seen[:count], filters[:, 0], out=y[first : first + count])
            for tap in range(1, width):
                into.addcmul_(seen[tap : tap + count], filters[:, tap])
            state[row] = seen[count:].T.to(state.dtype)
            first += count
    if bias is not None:
        y += bias.to(wide)
    return (y if activation is None else silu(y, inplace=True)).to(x.dtype)


@causal_conv.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for new_tokens, channels, width, activation in (
        ([1, 1, 1], 40, 4, "silu"),
        ([70, 1, 9, 2], 64, 4, "silu"),
        ([3, 2], 33, 3, None),
        ([130, 1], 300, 4, "silu"),
    ):
        tokens, count = sum(new_tokens), len(new_tokens)
        first_rows = torch.tensor([0, *new_tokens]).cumsum(0).int()
        rows = (first_rows, torch.randperm(count + 2)[:count].int(), tuple(new_tokens), max(new_tokens) == 1)
        bias = torch.randn(channels) if channels % 3 == 0 else None
        state = torch.randn(count + 2, channels, width - 1)
        yield torch.randn(tokens, channels), torch.randn(channels, width), bias, state, *rows, activation


causal_conv.tolerance[torch.float32] = (1e-5, 1e-5)
causal_conv.tolerance[torch.bfloat16] = (2e-2, 1e-2)
causal_conv.tolerance[torch.float16] = (3e-3, 2e-3)
