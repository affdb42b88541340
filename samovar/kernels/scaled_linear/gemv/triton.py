"""The scaled product of one token in Triton.

A program rounds the input itself, after norming it if asked to, keeps it in registers and multiplies one row of the
weight after the other on the CUDA cores, while the next rows are under way.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.quantize_rows.triton import rounded, scale_of
from samovar.kernels.rms_norm.triton import normalised
from samovar.kernels.silu_mul.triton import activated

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _whole_rows(weight: tl.tensor, first: tl.tensor, N: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr,
                COLUMNS: tl.constexpr) -> tl.tensor:  # fmt: skip
    """[BN, COLUMNS] words of four weights, of the rows from `first` on; 0 beyond the last. They are read once."""
    rows, columns = first + tl.arange(0, BN)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = weight + rows.to(tl.int64) * WORDS + columns
    return tl.load(at, mask=(rows < N) & (columns < WORDS), other=0, eviction_policy="evict_first")


@triton.jit
def _byte(words: tl.tensor, INDEX: tl.constexpr, NUMBER: tl.constexpr) -> tl.tensor:
    """What one byte of each word stands for, float32."""
    byte = (words >> (8 * INDEX)).to(tl.int8)
    return byte.to(tl.float32) if NUMBER == "int8" else byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _four_floats(words: tl.tensor) -> Any:
    """The four numbers of e4m3 in each word, float32."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, a, b, c, d;
        .reg .b32 ab, cd;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 ab, low;
        cvt.rn.f16x2.e4m3x2 cd, high;
        mov.b32 {a, b}, ab;
        mov.b32 {c, d}, cd;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d;
        }""",
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _products(words: tl.tensor, inputs: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """Sums of four products each: words of weights [BN, COLUMNS] times four inputs [1, COLUMNS] each, which for int8 are a
    word as well (int32), and for FP8 four numbers (float32)."""
    if NUMBER == "int8":
        given = tl.broadcast_to(inputs, words.shape)
        if INTERPRETED:
            total = _byte(words, 0, NUMBER) * _byte(given, 0, NUMBER) + _byte(words, 1, NUMBER) * _byte(
                given, 1, NUMBER
            )
            total += _byte(words, 2, NUMBER) * _byte(given, 2, NUMBER) + _byte(words, 3, NUMBER) * _byte(
                given, 3, NUMBER
            )
            return total.to(tl.int32)
        else:
            return tl.inline_asm_elementwise(
                "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [words, given], dtype=tl.int32, is_pure=True, pack=1
            )
    else:
        if INTERPRETED:
            a, b, c, d = (
                _byte(words, 0, NUMBER),
                _byte(words, 1, NUMBER),
                _byte(words, 2, NUMBER),
                _byte(words, 3, NUMBER),
            )
        else:
            a, b, c, d = _four_floats(words)
        return a * inputs[0] + b * inputs[1] + c * inputs[2] + d * inputs[3]


@triton.jit
def _row_sums(words: tl.tensor, inputs: tl.tensor, input_scale: tl.tensor, scale: tl.tensor, first: tl.tensor,
              N: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, NUMBER: tl.constexpr, BN: tl.constexpr,
              COLUMNS: tl.constexpr) -> tl.tensor:  # fmt: skip
    """[BN] scaled sums of words times inputs."""
    products = _products(words, inputs, NUMBER)
    if BLOCK == 0:
        rows = first + tl.arange(0, BN)
        of_rows = tl.load(scale + rows, rows < N, 0.0).to(tl.float32)
        return tl.sum(products, 1).to(tl.float32) * of_rows * tl.sum(input_scale)
    else:
        WIDTH: tl.constexpr = COLUMNS * 4 // BLOCK
        sums = tl.sum(tl.reshape(products, (BN, WIDTH, BLOCK // 4)), 2).to(tl.float32)
        rows, groups = first + tl.arange(0, BN)[:, None], tl.arange(0, WIDTH)[None, :]
        of_blocks = tl.load(scale + rows // BLOCK * GROUPS + groups, (rows < N) & (groups < GROUPS), 0.0)
        return tl.sum(sums * tl.reshape(input_scale, (1, WIDTH)) * of_blocks.to(tl.float32), 1)


@triton.jit
def _inputs(
    x: tl.tensor, norm_weight: tl.tensor, given: tl.tensor, eps: tl.tensor, K: tl.constexpr, GROUP: tl.constexpr,
    NUMBER: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(x [K] or its norm, rounded, as `_products` takes it; its scales [COLUMNS / GROUP, 1]), once x is there."""
    column = tl.arange(0, COLUMNS)[None, :]
    if norm_weight is not None:
        gain = tl.load(norm_weight + column, column < K, 0.0).to(tl.float32)
    await_previous(OVERLAP)
    value = tl.load(x + column, column < K, 0.0, eviction_policy="evict_last").to(tl.float32)
    if norm_weight is not None:
        value = normalised(value, gain, eps, K).to(x.dtype.element_ty).to(tl.float32)
    value = tl.reshape(value, (COLUMNS // GROUP, GROUP))
    if given is not None:
        scales = tl.load(given).to(tl.float32) + tl.zeros((COLUMNS // GROUP, 1), tl.float32)
    else:
        scales = scale_of(value, NUMBER)
    codes = tl.reshape(rounded(value, scales, NUMBER), (1, COLUMNS // 4, 2, 2))
    even, odd = tl.split(codes)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    if NUMBER == "int8":
        word = (a.to(tl.int32) & 255) | ((b.to(tl.int32) & 255) << 8)
        return word | ((c.to(tl.int32) & 255) << 16) | (d.to(tl.int32) << 24), scales
    else:
        return (a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)), scales


@triton.jit
def gemv_kernel(
    x: tl.tensor, norm_weight: tl.tensor, weight: tl.tensor, scale: tl.tensor, given: tl.tensor, bias: tl.tensor,
    residual: tl.tensor, out: tl.tensor, eps: tl.tensor,
    N: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr, NUMBER: tl.constexpr,
    BN: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """out [N] = scaled weight [N, K / 4], in words, x [K], rounded: each program takes every PROGRAMS-th BN rows.

    norm_weight, the static scale `given`, bias and residual may be None. With GATE, weight has 2N rows, gate before up.
    BLOCK is 0 for a scale a row. The next rows are fetched before the present ones are multiplied, the very first before
    the input is there. Words, because bytes would be unpacked at once, and wait for their load there.
    """
    WORDS: tl.constexpr = K // 4
    WIDTH: tl.constexpr = COLUMNS // 4
    GROUPS: tl.constexpr = 1 if BLOCK == 0 else K // BLOCK
    weight_up = weight + tl.cast(N, tl.int64) * WORDS
    scale_up = scale + (N if BLOCK == 0 else N // BLOCK * GROUPS)
    words = _whole_rows(weight, tl.program_id(0) * BN, N, WORDS, BN, WIDTH)
    if GATE is not None:
        words_up = _whole_rows(weight_up, tl.program_id(0) * BN, N, WORDS, BN, WIDTH)
    inputs, input_scale = _inputs(
        x, norm_weight, given, eps, K, COLUMNS if BLOCK == 0 else BLOCK, NUMBER, COLUMNS, OVERLAP
    )
    for first in range(tl.program_id(0) * BN, N, PROGRAMS * BN):
        following = _whole_rows(weight, first + PROGRAMS * BN, N, WORDS, BN, WIDTH)
        if GATE is not None:
            following_up = _whole_rows(weight_up, first + PROGRAMS * BN, N, WORDS, BN, WIDTH)
        tl.debug_barrier()  # Else the assembler moves the loads down behind the products, to save registers.
        rows = first + tl.arange(0, BN)
        inside = rows < N
        y = _row_sums(words, inputs, input_scale, scale, first, N, GROUPS, BLOCK, NUMBER, BN, WIDTH)
        if bias is not None:
            y += tl.load(bias + rows, inside, 0.0).to(tl.float32)
        if GATE is not None:
            up = _row_sums(words_up, inputs, input_scale, scale_up, first, N, GROUPS, BLOCK, NUMBER, BN, WIDTH)
            if bias is not None:
                up += tl.load(bias + N + rows, inside, 0.0).to(tl.float32)
            y = activated(y, GATE) * up
            words_up = following_up
        if residual is not None:
            y += tl.load(residual + rows, inside, 0.0).to(tl.float32)
        tl.store(out + rows, y.to(out.dtype.element_ty), inside)
        words = following
    # Not earlier: programs that only wait would take the place of those that still have to start.
    start_next(OVERLAP)
