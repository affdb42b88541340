"""Declare, bind, load: a layer is declared with logical sizes, then given its place, then filled.

`Layer` is a leaf that owns tensors. Its attributes name the checkpoint: the path of a layer in the model is its prefix in
the file. What a layer copies from a checkpoint is a list of `Source`s, so loading can be planned before a byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from samovar.kernels.op import Kernels
from samovar.parallel.mesh import Axis
from samovar.quant.base import QuantMethod
from samovar.quant.unquantized import Unquantized


@dataclass(frozen=True, slots=True)
class Source:
    """Copy one shard of a checkpoint tensor into a view of a layer's tensor, converting the dtype.

    `axis` is the axis of the checkpoint tensor that is split (None: the whole tensor); `shard` is (which, of how many)
    equal parts along it. A tensor may be read by several sources.
    """

    name: str
    target: torch.Tensor
    axis: int | None = None
    shard: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and how a model lives on this rank. Given to every layer once, by `bind`.

    `dtype` is that of weights and activations, `cache_dtype` that of cached keys and values (None: the same);
    `max_model_len` is the longest sequence that will be served (some rope scalings depend on it; None: what the
    model was made for); `quant_for` gives the format of a layer by its path. With `ep`, whole experts of a mixture are
    split over that axis; None: every expert is split over `tp`.
    """

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    cache_dtype: torch.dtype | None = None
    tp: Axis = field(default_factory=Axis)
    ep: Axis | None = None
    max_model_len: int | None = None
    quant_for: Callable[[str], QuantMethod] | None = None
    packed_cache: str | None = None
    """An entry of `core.cache_spec.PACKED`, in place of `cache_dtype`."""
    stored_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensors of the checkpoint, as far as they are known."""

    def quant(self, path: str) -> QuantMethod:
        """The weight format of the layer at `path`."""
        return Unquantized(self.dtype, self.kernels) if self.quant_for is None else self.quant_for(path)

    def table(self, path: str) -> QuantMethod:
        """The same for an embedding or a head: plain unless the format holds those, too."""
        quant = self.quant(path)
        return quant if quant.holds_tables else Unquantized(self.dtype, self.kernels)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An unfilled tensor on this placement's device."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


class Layer(nn.Module):
    """A leaf that owns tensors. `path` and `renames` are set by `bind`."""

    is_row_wise: ClassVar[bool] = False
    """Each row of what `forward` returns depends on the same row of the tensors it is given, and on nothing else."""
    path: str = ""
    renames: Mapping[str, str] = MappingProxyType({})

    def bind(self, place: Placement) -> None:
        """Allocate this rank's tensors and choose kernels and format."""

    def stored(self, name: str) -> str:
        """What the checkpoint calls `name`, a dotted name of this model: whole parts of it exchanged by `renames`."""
        for ours, theirs in self.renames.items():
            name = f".{name}.".replace(f".{ours}.", f".{theirs}.")[1:-1]
        return name

    def sources(self) -> list[Source]:
        """The copies that fill this rank's tensors."""
        return []

    def claims(self) -> set[str]:
        """Every checkpoint name this layer reads on some rank; over all layers this must be the checkpoint."""
        return {source.name for source in self.sources()}

    def unread(self) -> set[str]:
        """Checkpoint names that may be present and are left unread on purpose, such as the copy of a tied weight."""
        return set()

    def zeros(self) -> set[str]:
        """Those of `unread` that must be nothing but zeros."""
        return set()

    def dummy(self, source: Source) -> torch.Tensor | None:
        """What a made-up checkpoint must have for `source`; None: any numbers will do."""
        return None

    def resident_bytes(self) -> int:
        """Bytes that this rank's tensors take once `after_load` is over; those of another layer do not count."""
        return sum(source.target.nbytes for source in self.sources())

    def after_load(self) -> None:
        """Repack what was loaded; called once, after every source was copied."""


def bind(model: nn.Module, place: Placement, renames: Mapping[str, str] = MappingProxyType({})) -> None:
    """Give every layer of `model` its path and its place, in declaration order.

    `renames` (our name -> the checkpoint's) defaults to the table that the model's class declares.
    """
    renames = renames or _renames_of(model, place.stored_shapes)
    for path, layer in model.named_modules():
        if isinstance(layer, Layer):
            layer.path, layer.renames = path, renames
            layer.bind(place)


def _renames_of(model: nn.Module, stored: Mapping[str, object]) -> Mapping[str, str]:
    """The table of the model's class, or the first of its others that fits the checkpoint's names, if those are known."""
    tables: list[Mapping[str, str]] = [getattr(model, "renames", {}), *getattr(model, "other_renames", ())]
    for table in tables[: 0 if len(tables) == 1 else None]:
        if f"{table.get('model', 'model')}.embed_tokens.weight" in stored:
            return table
    return tables[0]
