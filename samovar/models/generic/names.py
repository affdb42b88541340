"""Names: which tensors of a checkpoint hold a tensor of Transformers' model, and which part of it each is.

Transformers joins some tensors while it loads (experts, gate and up), and knows how to take them apart again. That is
done here with numbered stand-ins, which tell where every number came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samovar.models.generic.masks import Unsupported

PARTS = 12
"""Length of a stand-in's axis: divisible by every number of tensors that are joined along one."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint tensor that is a part of a model's tensor: of each axis, twelfths or entries `first` to `end` of
    `count`; all of it without `ranges`. `transposed`: the last two axes are exchanged; `index`: the first one is gone."""

    name: str
    ranges: tuple[tuple[int, int, int], ...] = ()
    transposed: bool = False
    has_index: bool = False


def view_of(piece: Stored, target: torch.Tensor) -> torch.Tensor:
    """The part of `target` that `piece` fills, as the checkpoint has it."""
    for axis, (first, end, count) in enumerate(piece.ranges):
        size = target.shape[axis]
        target = target.narrow(axis, first * size // count, (end - first) * size // count)
    if piece.has_index:
        target = target[0]
    return target.transpose(-1, -2) if piece.transposed else target


def stored_pieces(model: Any) -> dict[str, list[Stored]]:
    """Every key of the model's state dict -> the checkpoint tensors that it is made of, in order."""
    from transformers.core_model_loading import revert_weight_conversion

    keys = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    numbered: dict[str, torch.Tensor] = {}
    first = 0
    begins: list[tuple[int, str]] = []
    for key, shape in keys.items():
        small = _small(shape)
        count = torch.Size(small).numel()
        numbered[key] = torch.arange(first, first + count).view(small)
        begins.append((first, key))
        first += count
    found: dict[str, list[Stored]] = {key: [] for key in keys}
    for name, part in revert_weight_conversion(model, dict(numbered)).items():
        key = _origin(name, part, begins)
        found[key].append(_placed(name, part, numbered[key]))
    if left := [key for key, pieces in found.items() if not pieces and torch.Size(keys[key]).numel()]:
        raise Unsupported(f"Transformers does not say what a checkpoint calls {left[0]}")
    return found


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a stand-in: experts are kept, the axes of each matrix have `PARTS` entries."""
    return (*shape[:-2], *(PARTS for _ in shape[-2:]))


def _origin(name: str, part: torch.Tensor, begins: list[tuple[int, str]]) -> str:
    """Whose numbers a part holds."""
    from bisect import bisect_right

    low, high = int(part.min()), int(part.max())
    at = bisect_right(begins, low, key=lambda entry: entry[0]) - 1
    if at + 1 < len(begins) and high >= begins[at + 1][0]:
        raise Unsupported(f"{name} of the checkpoint is spread over several tensors of the model")
    return begins[at][1]


def _placed(name: str, part: torch.Tensor, whole: torch.Tensor) -> Stored:
    """Where in `whole` the numbers of `part` are."""
    if part.shape == whole.shape and torch.equal(part, whole):
        return Stored(name)
    places = torch.unravel_index(part.flatten() - whole.flatten()[0], whole.shape)
    ranges = tuple((int(at.min()), int(at.max()) + 1, size) for at, size in zip(places, whole.shape, strict=True))
    for transposed in (False, True):
        for has_index in (False, True):
            piece = Stored(name, ranges, transposed, has_index)
            if has_index and ranges[0][1] - ranges[0][0] != 1:
                continue
            view = view_of(piece, whole)
            if view.shape == part.shape and torch.equal(view, part):
                return piece
    raise Unsupported(f"{name} of the checkpoint is in another order than the model's tensor")


def renamed(pieces: Mapping[str, list[Stored]], key: str) -> str | None:
    """The checkpoint's name of a tensor that is stored as it is, else None."""
    found = pieces[key]
    return found[0].name if len(found) == 1 and found[0] == Stored(found[0].name) else None
