"""RMS norm of the heads or groups of a recurrent layer, gated before it (Mamba2) or after it (gated delta net)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import silu

from samovar.kernels.op import op


@op(prefer=("triton",), plain_is_best=("cpu",))
def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gates_last: bool
) -> torch.Tensor:
    """norm(x * silu(gate)) or, with `gates_last`, norm(x) * silu(gate), over each `group` numbers of a row.

    x, gate [tokens, dim], whose rows may lie apart; weight [dim], or [group] where all groups share it. Computed in
    float32.
    """
    tokens, dim = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    value, opened = x.to(wide), silu(gate.to(wide))
    if not gates_last:
        value = value * opened
    value = value.reshape(tokens, dim // group, group)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.to(wide).view(-1, group)
    value = value.view(tokens, dim)
    return (value * opened if gates_last else value).to(x.dtype)


@gated_rms_norm.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, groups, group, is_shared, gates_last in (
        (3, 4, 32, True, True),
        (1, 2, 128, True, True),
        (5, 3, 24, False, False),
        (7, 1, 300, False, False),
        (2, 6, 20, False, True),
    ):
        dim = groups * group
        yield *torch.randn(2, tokens, dim), torch.randn(group if is_shared else dim), 1e-6, group, gates_last


gated_rms_norm.tolerance[torch.float32] = (5e-6, 5e-6)
gated_rms_norm.tolerance[torch.bfloat16] = (1e-2, 1.6e-2)
gated_rms_norm.tolerance[torch.float16] = (1e-3, 2e-3)
