"""Experts of families whose checkpoints come in two forms, which only their tensors tell apart."""

from __future__ import annotations

from samovar.layers.layer import Placement
from samovar.layers.moe import EACH, Experts, ExpertStorage


class FoundExperts(Experts):
    """Experts in one tensor for all of them, under names without ".weight", where the checkpoint has that; else one by one."""

    def bind(self, place: Placement) -> None:
        """Look for the tensor, then as `Experts`."""
        is_stacked = self.stored(f"{self.path}.gate_up_proj") in place.stored_shapes
        self.storage = ExpertStorage(stacked=True, bare=True) if is_stacked else EACH
        super().bind(place)
