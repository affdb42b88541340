"""Experts of a generic model: those that Transformers holds as most do become ours, of every weight format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from samovar.layers import Experts, ExpertStorage, Placement
from samovar.models.generic.names import Stored


class GenericExperts(Experts):
    """Experts as modules of Transformers hold them; `names` are renames from ours to the checkpoint's."""

    def __init__(
        self, sizes: tuple[int, int, int], activation: str, bias: bool, storage: ExpertStorage, names: Mapping[str, str]
    ) -> None:
        super().__init__(*sizes, activation, bias=bias, storage=storage)
        self.names, self.is_bound = names, False

    def bind(self, place: Placement) -> None:
        """Allocate."""
        self.renames, self.is_bound = self.names, True
        super().bind(place)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """x [tokens, hidden], who computes them and how much it counts, each [tokens, top_k] -> [tokens, hidden]."""
        if not self.is_bound:
            return torch.empty_like(x)
        y: torch.Tensor = super().forward(x.to(self.dtype), top_k_weights.float(), top_k_index.int())
        return y.to(x.dtype)


def experts_of(path: str, module: Any, pieces: Mapping[str, list[Stored]]) -> GenericExperts | None:
    """Gated experts with an activation that we have; None for others, which stay as they are."""
    from transformers.integrations.moe import _default_apply_gate

    activation = activation_name(getattr(module, "act_fn", None))
    is_usual = (
        module.has_gate
        and not getattr(module, "has_post_expert_norm", False)
        and type(module)._apply_gate is _default_apply_gate
    )
    weight = getattr(module, "gate_up_proj", None)
    if not is_usual or activation is None or not isinstance(weight, nn.Parameter) or weight.dim() != 3:
        return None
    experts, hidden, double = weight.shape if module.is_transposed else (weight.shape[i] for i in (0, 2, 1))
    inner = double // 2
    ups, downs = pieces[f"{path}.gate_up_proj"], pieces[f"{path}.down_proj"]
    if len(ups) == len(downs) == 1:
        is_bare = not ups[0].name.endswith(".weight")
        if not (ups[0] == Stored(ups[0].name) and downs[0] == Stored(downs[0].name)):
            return None
        storage = ExpertStorage(True, is_bare, module.is_transposed, not module.is_concatenated)
        names = _stem_renames(path, {"gate_up_proj": ups[0].name, "down_proj": downs[0].name})
    else:
        if module.has_bias or not module.is_concatenated or len(ups) != 2 * experts or len(downs) != experts:
            return None
        storage = ExpertStorage()
        named = {"gate_proj": ups[0].name, "up_proj": ups[experts].name, "down_proj": downs[0].name}
        names = _stem_renames(f"{path}.0", named)
    if names is None:
        return None
    return GenericExperts((hidden, inner, experts), activation, module.has_bias, storage, names)


def _stem_renames(path: str, stored: Mapping[str, str]) -> dict[str, str] | None:
    """Renames that turn `path`.ours into the checkpoint's names; None if those have no common beginning."""
    names: dict[str, str] = {}
    stems = set()
    for ours, name in stored.items():
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        stems.add(stem)
        if last != ours:
            names[ours] = last
    if len(stems) != 1:
        return None
    (stem,) = stems
    if stem != path:
        if path.endswith(".0") and stem.endswith(".0"):
            path, stem = path[:-2], stem[:-2]
        names = {path: stem, **names}
    return names


def activation_name(function: object) -> str | None:
    """config.json's name of an activation that our kernels have."""
    from transformers.activations import GELUTanh, SiLUActivation

    if isinstance(function, (nn.SiLU, SiLUActivation)) or function is nn.functional.silu:
        return "silu"
    return "gelu_pytorch_tanh" if isinstance(function, GELUTanh) else None
