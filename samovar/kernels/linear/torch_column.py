"""The product with the weight on the left: what torch's bfloat16 matmul on a CPU is good at.

oneDNN packs its right operand on every call. With few tokens the weight is by far the larger operand, so it belongs on
the left: 1.4 to 2.1 times the speed of `linear` from 1 to 64 tokens on a Xeon with AMX, no gain beyond 256.
"""

from __future__ import annotations

import torch

from samovar.kernels.linear import linear
from samovar.kernels.op import Target

MOST_TOKENS = 128


def accepts(target: Target) -> str | None:
    """Only bfloat16 has this preference; float32 goes through another library."""
    return None if target.dtype is torch.bfloat16 else f"{target.dtype} is faster the usual way round"


@linear.impl("torch_column", devices=("cpu",), accepts=accepts)
def linear_torch_column(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(W x^T)^T; many tokens go through `torch.nn.functional.linear`."""
    tokens = len(x)
    if tokens > MOST_TOKENS:
        return torch.nn.functional.linear(x, weight, bias)
    if tokens == 1:
        y = torch.mv(weight, x[0]).unsqueeze(0)
    else:
        y = torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)
