"""The products of one layer with rounded activations, beside what its weights mean."""

from __future__ import annotations

import torch

from samovar.kernels.rms_norm import rms_norm
from samovar.kernels.scaled_linear import rounded_inputs
from samovar.quant.bounds import Expected, gated, product
from samovar.quant.checks import Check, Use
from samovar.quant.scaled import ScaledProducts, ScaledWeight

EPS = 1e-6
"""Of norms in checks."""


def scaled_check(products: ScaledProducts, weight: ScaledWeight, use: Use) -> Check:
    """The product that the model makes with `weight`, which it `joins`, beside plain sums of what it means."""
    parts = 2 if use in ("silu", "gelu") else 1
    rows, inputs = len(weight.codes) // parts, weight.codes.shape[1]
    gain = torch.ones(inputs, device=weight.codes.device, dtype=products.dtype)
    has_norm = products.is_joined and use in ("normed", "silu", "gelu")

    def run(x: torch.Tensor) -> torch.Tensor:
        if not products.is_joined:
            return products.linear(x, weight.codes, weight.scale, weight.input_scale, None)
        if use == "silu" or use == "gelu":
            return products.norm_gated(x, (gain, EPS), weight, use, None)
        if use != "added":
            return products.norm(x, (gain, EPS), weight, None)
        y = x.new_zeros(len(x), rows)
        products.add(x, weight, y, None)
        return y

    def expect(x: torch.Tensor, some: slice) -> Expected:
        given = rms_norm(x, gain, EPS) if has_norm else x
        small = rounded_inputs(given, weight.codes, weight.scale, weight.input_scale)
        parts_of = [weight.rows(some.start + part * rows, some.stop - some.start) for part in range(parts)]
        found = [product(small, each, x.dtype, is_fp8=kind != "int8", inputs_vary=has_norm) for each in parts_of]
        return found[0] if parts == 1 else gated(found[0], found[1], use, x.dtype)

    kind = "fp8 blocks" if weight.scale.dim() == 2 else "int8" if weight.codes.dtype is torch.int8 else "fp8"
    op = {"added": "scaled_linear_add", "normed": "norm_scaled_linear", "plain": "scaled_linear"}
    name = op.get(use, "norm_gated_scaled_linear") if products.is_joined else "scaled_linear"
    return Check(name, kind, use, rows, inputs, run, expect)
