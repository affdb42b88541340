"""Which keys a token sees: asked of the masks that Transformers would make, while a model is looked over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

FAR = (0, 1, 2, 3, 1000, 100_000)
"""Tokens at which a mask is asked, beside those next to the edge of a window."""


class Unsupported(Exception):
    """A model that the generic path cannot run. The text is the reason, without the model's name."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Keys that a token sees: the last `window`, or those from the last multiple of `chunk` on; None for all."""

    window: int | None = None
    chunk: int | None = None

    def __call__(self, query: int, key: int) -> bool:
        """Whether the token at `query` sees the one at `key`."""
        if key > query or (self.window is not None and query - key >= self.window):
            return False
        return self.chunk is None or query // self.chunk == key // self.chunk


@dataclass(slots=True)
class Masks:
    """The masks that were made for a pass: a tensor to recognize each by, its function, and the keys it reaches back."""

    made: list[tuple[torch.Tensor, Callable[..., Any], int | None]] = field(default_factory=list)

    def make(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        """What Transformers calls to have a mask made: [batch, 1, queries, keys] without numbers."""
        mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        self.made.append((mask, mask_function, local_size))
        return mask

    def seen(self, mask: torch.Tensor | None, window: int | None, chunk: int | None) -> Seen:
        """What a layer sees that got `mask` and was told of `window`, in a model that has a `chunk`."""
        if mask is None:
            return Seen(window)
        known = [(function, reach) for made, function, reach in self.made if made is mask]
        if not known:
            raise Unsupported("it makes an attention mask of its own")
        function, reach = known[0]
        if chunk is not None and reach == chunk and window is None:
            return Seen(chunk=chunk)
        for seen in (Seen(window), Seen(reach)):
            if agrees(function, seen):
                return seen
        raise Unsupported("its attention mask is neither causal nor that of a window")


def agrees(function: Callable[..., Any], seen: Seen) -> bool:
    """Whether a mask function of Transformers says what `seen` does, at the places that tell masks apart."""
    edge = seen.window or seen.chunk or 1
    queries = sorted({*FAR, edge - 1, edge, edge + 1, 3 * edge})
    try:
        for query in queries:
            for key in {0, 1, *(query + offset for offset in (-edge - 1, -edge, 1 - edge, -1, 0, 1, edge))}:
                if key >= 0 and bool(function(0, 0, torch.tensor(query), torch.tensor(key))) != seen(query, key):
                    return False
    except (RuntimeError, IndexError, NotImplementedError):  # it looks at tensors of the step
        return False
    return True
