"""Rotations that spread what a few channels of a head hold over all of them: signs, then a Hadamard matrix.

A rotated row is close to normal whatever it was, which quantizers of few bits rely on (QuaRot, Ashkboos et al. 2024;
TurboQuant, Zandieh et al. 2025). Products of rotated queries and keys are those of plain ones.
"""

from __future__ import annotations

import torch

SEED = 20_261_130
"""Of the signs. Cached rows last no longer than the process: it may change."""


def rotations(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(for what is stored, for what meets it), each [head_dim, head_dim]: (k a) . (q b) = k . q, and (v a) b^T = v.

    Entries are powers of two, so that no dtype rounds them: neither matrix is orthogonal, but their product is the
    identity. Heads that are no power of two are rotated in blocks of the largest that divides them.
    """
    size = head_dim & -head_dim
    hadamard = torch.ones((1, 1))
    while len(hadamard) < size:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    signs = torch.randint(0, 2, (head_dim, 1), generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    whole = signs * torch.kron(torch.eye(head_dim // size), hadamard)
    exponent = size.bit_length() - 1
    stored, met = (whole * 2.0**-part for part in ((exponent + 1) // 2, exponent // 2))
    return stored.to(device, dtype), met.to(device, dtype)
