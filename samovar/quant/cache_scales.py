"""Scales of cached keys and values that exporters store beside attention: their names, and what is done about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from samovar.errors import CheckpointError

BESIDE = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "prob_output_scale")
"""In the attention module itself, or in its inner `attn` (compressed-tensors, vLLM)."""
OF_PROJECTIONS = {
    "k_proj": ("k_scale", "output_scale", "k_zero_point"),
    "v_proj": ("v_scale", "output_scale", "v_zero_point"),
    "q_proj": ("q_scale", "output_scale"),
    "qkv_proj": ("k_scale", "v_scale", "kv_scale"),
}
"""In the linears whose results are cached (ModelOpt, Quark, older tools)."""
PAIRS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
    ("attn.kv_scale", "attn.kv_scale"),
    ("qkv_proj.kv_scale", "qkv_proj.kv_scale"),
)
"""Below the attention module: what keys, and values, are divided by before they are rounded to 8-bit floats."""


def scale_pair(attention: str, kv_heads: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
    """The scales of keys and of values among the checkpoint's tensors, if `attention` has them: numbers, or one for each
    of `kv_heads`. Raises `CheckpointError` for other shapes."""
    for pair in PAIRS:
        keys, values = (f"{attention}.{name}" for name in pair)
        if keys in shapes and values in shapes:
            for name in (keys, values):
                size = 1
                for length in shapes[name]:
                    size *= length
                if size not in (1, kv_heads) or (size > 1 and shapes[name][0] != kv_heads):
                    raise CheckpointError(
                        f"{name} has the shape {shapes[name]}: a scale of the cache is one number, or one for each of the "
                        f"{kv_heads} heads; use another --kv-cache-dtype than fp8"
                    )
            return keys, values
    return None


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
