"""Fields of config.json that describe Mamba2's mixer, under the names that families give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samovar.errors import CheckpointError
from samovar.layers.state_space import StateSpaceSizes
from samovar.models.fields import integer

BAMBA_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
"""What files of Bamba, Granite 4 and Falcon-H1 may leave out."""


def step_limit(raw: Mapping[str, Any]) -> tuple[float, float]:
    """Bounds of a step, of which the upper may be written as an object that says Infinity."""
    given = raw.get("time_step_limit")
    if given is None:
        return 0.0, float("inf")
    bounds: list[Any] = [each.get("__float__") if isinstance(each, Mapping) else each for each in given]
    if len(bounds) != 2 or not all(isinstance(each, (int, float)) or each == "Infinity" for each in bounds):
        raise CheckpointError(f"config.json: time_step_limit must be two numbers, got {given!r}")
    return float(bounds[0]), float(bounds[1])


def bamba_sizes(raw: Mapping[str, Any]) -> StateSpaceSizes:
    """A mixer by Bamba's names; `mamba_d_ssm` is Falcon's for the channels of all heads."""
    heads = integer(raw, "mamba_n_heads")
    has_own = raw.get("mamba_d_ssm") is not None
    inner = integer(raw, "mamba_d_ssm") if has_own else integer(raw, "mamba_expand") * integer(raw, "hidden_size")
    dim = inner // heads if raw["mamba_d_head"] in ("auto", None) else integer(raw, "mamba_d_head")
    if heads * dim != inner:
        raise CheckpointError(f"config.json: mamba_n_heads {heads} * mamba_d_head {dim} is not {inner}")
    return StateSpaceSizes(
        heads=heads,
        head_dim=dim,
        groups=integer(raw, "mamba_n_groups"),
        state=integer(raw, "mamba_d_state"),
        conv_width=integer(raw, "mamba_d_conv"),
        has_conv_bias=bool(raw["mamba_conv_bias"]),
        has_bias=bool(raw["mamba_proj_bias"]),
        step_limit=step_limit(raw),
    )


def mamba2_sizes(raw: Mapping[str, Any], heads: str, head_dim: str, state: str) -> StateSpaceSizes:
    """A mixer by Mamba2's names, three of which Nemotron-H changed."""
    return StateSpaceSizes(
        heads=integer(raw, heads),
        head_dim=integer(raw, head_dim),
        groups=integer(raw, "n_groups"),
        state=integer(raw, state),
        conv_width=integer(raw, "conv_kernel"),
        has_conv_bias=bool(raw["use_conv_bias"]),
        has_bias=bool(raw["use_bias"]),
        step_limit=step_limit(raw),
    )
