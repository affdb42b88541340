"""Rope whose frequencies depend on the length: they are fixed for the longest sequence that is served.

Transformers chooses them by the longest sequence of a batch. Then what a sequence is told would depend on who else is in
the batch, and cached keys would be turned by other angles than new ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

DEPENDS_ON_LENGTH = ("dynamic", "longrope")
FIXED = "fixed"
"""What the kind of a rope is called then: Transformers does nothing at a name it does not know."""


def depends_on_length(module: nn.Module) -> bool:
    """Whether `module` is a rope of such a kind."""
    kinds: Any = getattr(module, "rope_type", None)
    found = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind in DEPENDS_ON_LENGTH for kind in found)


def fixed(kinds: Any) -> Any:
    """What `rope_type` has to be for Transformers to leave the frequencies of a rope of `kinds` alone."""
    if isinstance(kinds, dict):
        return {layer_type: fixed(kind) for layer_type, kind in kinds.items()}
    return FIXED if kinds in DEPENDS_ON_LENGTH else kinds


def fix_frequencies(module: Any, kinds: Any, max_model_len: int | None, device: torch.device) -> None:
    """Set the frequencies of a rope of `kinds`."""
    if not isinstance(kinds, dict):
        return _fix(module, kinds, None, max_model_len, device)
    for layer_type, kind in kinds.items():
        if kind in DEPENDS_ON_LENGTH:
            _fix(module, kind, layer_type, max_model_len, device)


def _fix(module: Any, kind: str, layer_type: str | None, max_model_len: int | None, device: torch.device) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix, which = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
    made, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=max_model_len, **which)
    getattr(module, f"{prefix}inv_freq").copy_(made)
    setattr(module, f"{prefix}attention_scaling", scaling)
