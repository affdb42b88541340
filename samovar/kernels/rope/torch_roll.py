"""Three torch calls per tensor: swapping the halves of a head is a roll."""

from __future__ import annotations

import torch

from samovar.kernels.rope import rope


@rope.impl("torch_roll", devices=("cpu",))
def rope_torch_roll(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x * cos + roll(x) * sin in x's own dtype."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = cos.shape[-1]
    if rotary == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(rotary // 2, -1), sin)
    turned = x[..., :rotary]
    turned = torch.addcmul(turned * cos, turned.roll(rotary // 2, -1), sin)
    return torch.cat((turned, x[..., rotary:]), dim=-1)
