"""The gated activation of an MLP: gelu(gate) * up (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import gelu

from samovar.kernels.op import op


@op(prefer=("triton",), plain_is_best=("cpu",))
def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with the tanh approximation of gelu, for gate_up [tokens, 2 * hidden] holding gate then up -> [tokens, hidden]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh").mul_(up)


@gelu_mul.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, hidden in ((3, 64), (1, 1536), (65, 24)):
        yield (torch.randn(tokens, 2 * hidden),)


gelu_mul.tolerance[torch.float32] = (2e-6, 2e-6)
gelu_mul.tolerance[torch.bfloat16] = (1e-2, 1.6e-2)
gelu_mul.tolerance[torch.float16] = (1e-3, 2e-3)
