"""Scales of cached keys and values that exporters store beside attention: their names, and what is done about them."""

from __future__ import annotations

from collections.abc import Iterable

BESIDE = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "prob_output_scale")
"""In the attention module itself, or in its inner `attn` (compressed-tensors, vLLM)."""
OF_PROJECTIONS = {
    "k_proj": ("k_scale", "output_scale", "k_zero_point"),
    "v_proj": ("v_scale", "output_scale", "v_zero_point"),
    "q_proj": ("q_scale", "output_scale"),
    "qkv_proj": ("k_scale", "v_scale", "kv_scale"),
}
"""In the linears whose results are cached (ModelOpt, Quark, older tools)."""


def cache_scale_names(attention: str) -> set[str]:
    """Every name that a scale may have in a checkpoint for the attention module `attention` ("...layers.0.self_attn")."""
    names = {f"{attention}.{scale}" for scale in BESIDE} | {f"{attention}.attn.{scale}" for scale in BESIDE}
    return names | {f"{attention}.{linear}.{scale}" for linear, scales in OF_PROJECTIONS.items() for scale in scales}


def unused_line(present: Iterable[str]) -> str | None:
    """What to tell an operator about scales that are there while nothing in the cache is scaled; None if none are."""
    found = sorted(present)
    if not found:
        return None
    return (
        f"{len(found)} scales for an fp8 cache are in the checkpoint and not used, first {found[0]}: "
        "keys and values are cached as they are"
    )
