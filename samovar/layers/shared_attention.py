"""Attention over what another layer has cached: no keys and values of its own, no memory for them."""

from __future__ import annotations

import torch

from samovar.layers.attention import Attention
from samovar.layers.batch import ForwardBatch
from samovar.layers.layer import Layer
from samovar.layers.rope import Rope


class SharedAttention(Layer):
    """Queries of this layer over the keys and values of `owner`, an earlier layer with as many heads, which has written
    those of the step already. `share` names it once the tree is made."""

    is_row_wise = True

    def share(self, owner: Attention) -> None:
        """Whose cache is read."""
        self.owner = (owner,)  # a tuple, so that it does not become a child

    def forward(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q [tokens, heads, head_dim] of this rank -> [tokens, heads * head_dim]."""
        return self.owner[0].attend(q, batch)


class QueryRope(Rope):
    """Rotates queries alone."""

    is_row_wise = True

    def forward(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:  # type: ignore[override]
        """q [tokens, heads, head_dim] -> rotated. The op turns keys, too: one head stands in for them."""
        turned, _ = self.rope(q, q[:, :1], *self.table(batch))
        return turned
