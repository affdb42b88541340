"""Rows of activations rounded in Triton, after what made them: RMS norm, or a gated activation.

What comes first is rounded to the activations' dtype before it is rounded again, so that a row is the same numbers
whichever kernel norms it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.op import Target
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.quantize_rows import LEAST, Number, quantize_rows
from samovar.kernels.rms_norm.triton import normalised
from samovar.kernels.silu_mul.triton import activated
from samovar.kernels.triton_launch import launch, next_power_of_2

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

WITHOUT_FP8 = {"sm_70", "sm_72", "sm_75", "sm_80", "sm_86", "sm_87"}
"""Architectures that cannot convert to e4m3."""

SMALLEST = tl.constexpr(LEAST)


def accepts(target: Target) -> str | None:
    """Chips that know FP8."""
    return f"{target.architecture} has no FP8" if target.architecture in WITHOUT_FP8 else None


@triton.jit
def scale_of(value: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """The scales [groups, 1] of `value` [groups, size]: the largest becomes the largest number; 1 for zeros."""
    most = tl.max(tl.abs(value), 1, keep_dims=True)
    largest = tl.full(most.shape, 448.0 if NUMBER == "fp8" else 127.0, tl.float32)
    return tl.where(most > SMALLEST, tl.div_rn(most, largest), 1.0)


@triton.jit
def _on_grid(value: tl.tensor) -> tl.tensor:
    """The number of e4m3 next to `value`: Triton's interpreter neither rounds nor saturates as chips do.

    Steps are an eighth of the power of two below, at least 2 ** -9; adding 1.5 * 2 ** 23 steps leaves whole ones.
    """
    value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * 1572864.0
    return (value + shift) - shift


@triton.jit
def rounded(value: tl.tensor, scale: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """value / scale as e4m3 or int8, correctly rounded twice; `scale` broadcasts.

    The quotient is made from the reciprocal and what is left over (Markstein, 1990), as good as a division and shorter.
    """
    if INTERPRETED:  # It rounds in the middle of `fma`.
        value = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
    else:
        inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), value.shape)
        quotient = value * inverse
        value = tl.fma(tl.fma(-quotient, tl.broadcast_to(scale, value.shape), value), inverse, quotient)
    if NUMBER == "fp8":
        if INTERPRETED:
            value = _on_grid(value)
        return value.to(tl.float8e4nv)
    else:
        value = tl.minimum(tl.maximum(value, -128.0), 127.0)
        # A number near 1.5 * 2**23 has no bits below one: adding it rounds to the nearest integer, ties to even.
        return ((value + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def quantize_kernel(
    x: tl.tensor, norm_weight: tl.tensor, given: tl.tensor, codes: tl.tensor, scale: tl.tensor, row_stride: tl.tensor, eps: tl.tensor,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, NUMBER: tl.constexpr, GATE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """codes [rows, DIM] and scale [rows, DIM / GROUP] of one row, which is x's, its RMS norm, or with GATE, for rows
    of gate then up, activation(gate) * up. `norm_weight` and the static scale `given` may be None."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < DIM
    start = x + row * row_stride
    if norm_weight is not None:
        gain = tl.load(norm_weight + column, inside, 0.0).to(tl.float32)
    await_previous(OVERLAP)
    value = tl.load(start + column, inside, 0.0).to(tl.float32)
    if GATE is not None:
        up = tl.load(start + DIM + column, inside, 0.0).to(tl.float32)
    start_next(OVERLAP)
    if GATE is not None:
        value = (activated(value, GATE) * up).to(x.dtype.element_ty).to(tl.float32)
    if norm_weight is not None:
        value = normalised(value, gain, eps, DIM).to(x.dtype.element_ty).to(tl.float32)
    GROUPS: tl.constexpr = COLUMNS // GROUP
    value = tl.reshape(value, (GROUPS, GROUP))
    if given is not None:
        scales = tl.load(given).to(tl.float32) + tl.zeros((GROUPS, 1), tl.float32)
    else:
        scales = scale_of(value, NUMBER)
    number = tl.reshape(rounded(value, scales, NUMBER), (1, COLUMNS))
    tl.store(codes + row * DIM + column, number, inside)
    USED: tl.constexpr = 1 if GROUP == COLUMNS else DIM // GROUP
    group = tl.arange(0, GROUPS)[:, None]
    tl.store(scale + row * USED + group, scales, group < USED)


def quantize(
    x: torch.Tensor,
    number: Number,
    *,
    group: int = -1,
    scale: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gate: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` of x [tokens, in]; of its RMS norm, with `norm` (weight [in], eps); or of activation(gate) * up,
    with `gate` ("silu" or "gelu") and x [tokens, 2 * in]. Codes have the dtype int8 or float8_e4m3fn.

    Rows may lie apart. A `group` must divide the inputs and be a power of two.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, dim = x.shape[0], x.shape[1] // (1 if gate is None else 2)
    columns = max(next_power_of_2(dim), group, 16)
    codes = x.new_empty(tokens, dim, dtype=torch.float8_e4m3fn if number == "fp8" else torch.int8)
    scales = x.new_empty(tokens, 1 if group == -1 else dim // group, dtype=torch.float32)
    gain, eps = norm or (None, 0.0)
    warps = min(16, max(1, columns // 512))
    launch(
        quantize_kernel, (tokens,), x, gain, scale, codes, scales, x.stride(0), eps,
        DIM=dim, COLUMNS=columns, GROUP=columns if group == -1 else group, NUMBER=number, GATE=gate,
        num_warps=warps, **launch_options(),
    )  # fmt: skip
    return codes, scales


@quantize_rows.impl("triton", devices=("cuda",), accepts=accepts)
def quantize_rows_triton(
    x: torch.Tensor, number: Number, group: int = -1, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One program a row, which is read once."""
    codes, scales = quantize(x, number, group=group, scale=scale)
    return codes.view(torch.uint8) if number == "fp8" else codes, scales
