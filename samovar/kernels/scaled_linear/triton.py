"""Products of rounded activations with weights of FP8 or int8 in Triton: one token, a few, and many.

One token has a kernel that also rounds it (`gemv`). More tokens are rounded by a kernel of their own and multiplied by
the tensor cores. Many of them by torch, where it has a product for their kind.

Hopper's tensor cores add FP8 products with few bits: sums over more than 128 inputs are kept in float32 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from samovar.kernels.linear.triton import adapt
from samovar.kernels.op import Target
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, fetch_to_l2, start_next
from samovar.kernels.quantize_rows.triton import WITHOUT_FP8, quantize
from samovar.kernels.scaled_linear import BLOCK, number_of, scaled_linear
from samovar.kernels.scaled_linear.gemv.triton import gemv_kernel
from samovar.kernels.scaled_linear.tiles import DotTile, GemvTile, choose_tile, fitted, fixed_tile
from samovar.kernels.silu_mul.triton import activated, gated
from samovar.kernels.triton_launch import SHARED_BYTES, cdiv, launch, next_power_of_2

MOST_JOINED = 4096
"""Most tiles of results of a product that several programs share."""
NEIGHBOURS = 16
"""Tiles of tokens whose programs are neighbours, so that the caches hold what they share."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

WITH_SCALED_MM = {"sm_90", "sm_100", "sm_103"}
"""Architectures on which torch multiplies FP8 with a scale a row as fast as the chip can."""
FAST_SUMS = True
"""Whether torch's product may add with the few bits of Hopper's tensor cores."""

_shared, _has_product = SHARED_BYTES[90], True

_counters: dict[torch.device, torch.Tensor] = {}
"""For each device int32 [MOST_JOINED], zero between kernels. Kept for good: captured graphs know the address."""


def _adapt(architecture: str) -> str | None:
    global _shared, _has_product
    if architecture in WITHOUT_FP8:
        return f"{architecture} has no FP8 units: weights become 16 bits wide for each product"
    adapt(architecture)
    _shared = SHARED_BYTES.get(int(architecture.removeprefix("sm_")), min(SHARED_BYTES.values()))
    _has_product = architecture in WITH_SCALED_MM
    return None


def accepts(target: Target) -> str | None:
    """Chips with FP8, but no rows computed alike at every batch size; adapts to the chip."""
    return "its tiles depend on the number of tokens" if target.deterministic else _adapt(target.architecture)


def accepts_fixed(target: Target) -> str | None:
    """Only where it is asked for: fixed tiles are slower."""
    return _adapt(target.architecture) if target.deterministic else "only with --deterministic"


@triton.jit
def _piece(pointers: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """What `pointers` point to, 0 where not `inside`; with EVEN all are."""
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _added(total: tl.tensor, tile: tl.tensor, part: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """total + tile part^T, times `factor` if there is one."""
    if INTERPRETED:
        tile, part = tile.to(tl.float32), part.to(tl.float32)
        sums = tl.dot(tile, tl.trans(part)).to(total.dtype)
    else:
        sums = tl.dot(tile, tl.trans(part), out_dtype=total.dtype)
    return total + (sums if factor is None else sums * factor)


@triton.jit
def _finish(
    total: tl.tensor, bias: tl.tensor, residual: tl.tensor, out: tl.tensor, rows: tl.tensor, at: tl.tensor,
    tokens: tl.tensor, N: tl.tensor,
) -> None:  # fmt: skip
    """out [tokens, N] at the rows `rows` of the weight and the tokens `at` = total, plus bias and residual if given."""
    inside = (rows < N)[:, None] & (at < tokens)[None, :]
    offsets = at.to(tl.int64)[None, :] * N + rows[:, None]
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if residual is not None:
        total += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(total: tl.tensor, scale: tl.tensor, x_scale: tl.tensor, rows: tl.tensor, at: tl.tensor, tokens: tl.tensor,
            N: tl.tensor) -> tl.tensor:  # fmt: skip
    """total [rows, at] times the scales of weight and inputs."""
    of_weight = tl.load(scale + rows, mask=rows < N, other=0.0).to(tl.float32)
    return total * of_weight[:, None] * tl.load(x_scale + at, mask=at < tokens, other=0.0)[None, :]


@triton.jit(do_not_specialize=["tokens"])
def dot_kernel(
    x: tl.tensor, x_scale: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor, residual: tl.tensor,
    out: tl.tensor, partial: tl.tensor, counters: tl.tensor, tokens: tl.tensor, N: tl.tensor, K: tl.tensor,
    GATE: tl.constexpr, BLOCK: tl.constexpr, NUMBER: tl.constexpr, EVEN_K: tl.constexpr, NEIGHBOURS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """out [tokens, N] = scaled codes x [tokens, K] weight^T, a tile of BM tokens and BN rows of the weight per program.

    As `dot_kernel` of plain weights: the weight is the left operand, rows and tokens beyond the end are computed from
    the last ones and not stored, GATE and SPLITS > 1 exclude each other, and the sums of the splits are added up in order
    by the last program of a tile. With BLOCK, whose multiple or equal BK and BN are not, x_scale is [tokens, K / BLOCK].
    """
    blocks, tiles = tl.cdiv(tokens, BM), tl.cdiv(N, BN)
    group = tl.program_id(0) // (NEIGHBOURS * tiles) * NEIGHBOURS
    width = tl.minimum(blocks - group, NEIGHBOURS)
    place = tl.program_id(0) - group * tiles
    first_token, first_row = (group + place % width) * BM, place // width * BN
    split = tl.program_id(1)
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, SPLITS)
    first_step, last_step = split * share, tl.minimum((split + 1) * share, steps)

    rows = tl.minimum(first_row + tl.arange(0, BN), N - 1) - first_row
    start = weight + first_row.to(tl.int64) * K
    start_up = start + N.to(tl.int64) * K
    places = tl.minimum(first_token + tl.arange(0, BM), tokens - 1) - first_token
    columns = tl.arange(0, BK)[None, :]
    inputs = x + first_token.to(tl.int64) * K + places[:, None] * K + columns
    at_rows = rows[:, None] * K + columns
    if OVERLAP and AHEAD > 0:
        lines = tl.minimum(first_step * BK + tl.arange(0, AHEAD // 128) * 128, K - 1)
        fetch_to_l2(start + rows[:, None] * K + lines[None, :])
    await_previous(OVERLAP)
    total = tl.zeros((BN, BM), tl.int32 if NUMBER == "int8" else tl.float32)
    total_up = total
    for step in range(first_step, last_step):
        k = step * BK
        part = _piece(inputs + k, columns < K - k, EVEN_K)
        tile = _piece(start + at_rows + k, columns < K - k, EVEN_K)
        if BLOCK > 0:
            of_inputs = tl.load(x_scale + (first_token + places) * (K // BLOCK) + k // BLOCK)[None, :]
            of_block = scale + first_row // BLOCK * (K // BLOCK) + k // BLOCK
            total = _added(total, tile, part, of_inputs * tl.load(of_block).to(tl.float32))
        else:
            total = _added(total, tile, part, None)
        if GATE is not None:
            tile_up = _piece(start_up + at_rows + k, columns < K - k, EVEN_K)
            if BLOCK > 0:
                of_block += N // BLOCK * (K // BLOCK)
                total_up = _added(total_up, tile_up, part, of_inputs * tl.load(of_block).to(tl.float32))
            else:
                total_up = _added(total_up, tile_up, part, None)
    # Not earlier: programs that only wait would take the place of those that still have to start.
    start_next(OVERLAP)

    rows = first_row + tl.arange(0, BN)
    at = first_token + tl.arange(0, BM)
    total = total.to(tl.float32)
    if BLOCK == 0:
        total = _scaled(total, scale, x_scale, rows, at, tokens, N)
    if SPLITS > 1:
        tile_id = tl.program_id(0)
        here = partial + tile_id.to(tl.int64) * (SPLITS * BM * BN)
        here += tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
        tl.store(here + split * (BM * BN), total)
        tl.debug_barrier()  # All threads' sums are written before one thread counts them as such.
        if tl.atomic_add(counters + tile_id, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counters + tile_id, 0)
            total = tl.zeros((BN, BM), tl.float32)
            for part_id in tl.static_range(SPLITS):
                total += tl.load(here + part_id * (BM * BN))
            _finish(total, bias, residual, out, rows, at, tokens, N)
    elif GATE is not None:
        total_up = total_up.to(tl.float32)
        if BLOCK == 0:
            total_up = _scaled(total_up, scale + N, x_scale, rows, at, tokens, N)
        if bias is not None:
            total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
            total_up += tl.load(bias + N + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        _finish(activated(total, GATE) * total_up, None, residual, out, rows, at, tokens, N)
    else:
        _finish(total, bias, residual, out, rows, at, tokens, N)


@dataclass(frozen=True, slots=True)
class Given:
    """What goes into a product beside activations: weight [n, k] (with `gate` [2n, k]) and scale as in `scaled_linear`;
    a static scale of the inputs; bias; a residual to add; (weight [k], eps) of an RMS norm; "silu" or "gelu"."""

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm: tuple[torch.Tensor, float] | None = None
    gate: str | None = None

    @property
    def block(self) -> int:
        """Rows and inputs that share a scale; 0 where rows have their own."""
        return 0 if self.scale.dim() == 1 else BLOCK

    @property
    def n(self) -> int:
        """Results a token."""
        return self.weight.shape[0] // (1 if self.gate is None else 2)

    @property
    def codes(self) -> torch.Tensor:
        """The weight in the type that it has."""
        return self.weight if self.weight.dtype is torch.int8 else self.weight.view(torch.float8_e4m3fn)


def multiply(
    x: torch.Tensor, given: Given, tile: GemvTile | DotTile | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out [tokens, n] = residual + gated(scaled product of norm(x [tokens, k]), rounded, + bias), as far as given.

    `out` is the residual, or a new tensor. A `GemvTile` takes one token, `None` is torch's product of FP8 with a scale a
    row. Raises `ValueError` for weights or residuals that are not contiguous, and blocks that do not go with the shapes.
    """
    if out is None:
        out = x.new_empty(x.shape[0], given.n) if given.residual is None else given.residual
    for tensor in (given.weight, given.scale, out):
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}: make it contiguous"
            )
    if given.block and (x.shape[1] % BLOCK or (given.gate is not None and given.n % BLOCK)):
        raise ValueError(f"blocks of {BLOCK} do not divide {x.shape[1]} inputs, or the {given.n} rows of a gate")
    if isinstance(tile, GemvTile):
        return _one_token(x, given, tile, out)
    group = given.block or -1
    codes, scales = quantize(x, number_of(given.weight), group=group, scale=given.input_scale, norm=given.norm)
    if tile is None:
        return _by_torch(codes, scales, given)
    return _tiled(codes, scales, given, tile, out)


def _one_token(x: torch.Tensor, given: Given, tile: GemvTile, out: torch.Tensor) -> torch.Tensor:
    k, (gain, eps) = x.shape[1], given.norm or (None, 0.0)
    words = given.weight.view(torch.int32)
    tensors = (x.contiguous(), gain, words, given.scale, given.input_scale, given.bias, given.residual, out)
    launch(
        gemv_kernel, (tile.programs if len(x) else 0,), *tensors, eps,
        N=given.n, K=k, GATE=given.gate, BLOCK=given.block, NUMBER=number_of(given.weight), BN=tile.rows,
        COLUMNS=max(next_power_of_2(k), 32), PROGRAMS=tile.programs, num_warps=tile.warps, **launch_options(),
    )  # fmt: skip
    return out


def _tiled(codes: torch.Tensor, scales: torch.Tensor, given: Given, tile: DotTile, out: torch.Tensor) -> torch.Tensor:
    (tokens, k), n = codes.shape, given.n
    if given.gate is not None and tile.splits > 1:
        raise ValueError(f"a gated product cannot be split, but the tile has {tile.splits} splits")
    tiles = cdiv(tokens, tile.tokens) * cdiv(n, tile.rows)
    partial, counters = None, None
    if tile.splits > 1:
        if tiles > MOST_JOINED:
            raise ValueError(f"a product of {tiles} tiles is large enough: it need not be split")
        partial = codes.new_empty(tiles * tile.splits * tile.tokens * tile.rows, dtype=torch.float32)
        counters = _counters_of(codes.device)
    options: dict[str, Any] = {
        "BM": tile.tokens,
        "BN": tile.rows,
        "BK": tile.depth,
        "SPLITS": tile.splits,
        "AHEAD": tile.ahead,
    }
    options |= {"GATE": given.gate, "BLOCK": given.block, "NUMBER": number_of(given.weight), "NEIGHBOURS": NEIGHBOURS}
    options |= {"EVEN_K": k % tile.depth == 0, "num_warps": tile.warps, "num_stages": tile.stages}
    options |= launch_options() if tile.ahead else {"OVERLAP": False}
    tensors = (codes, scales, given.codes, given.scale, given.bias, given.residual, out, partial, counters)
    launch(dot_kernel, (tiles, tile.splits), *tensors, tokens, n, k, **options)
    return out


def _counters_of(device: torch.device) -> torch.Tensor:
    if device not in _counters:
        _counters[device] = torch.zeros(MOST_JOINED, dtype=torch.int32, device=device)
    return _counters[device]


def _by_torch(codes: torch.Tensor, scales: torch.Tensor, given: Given) -> torch.Tensor:
    """torch's product, and what it cannot do in passes of their own."""
    if codes.is_meta:  # Shapes alone are asked for, and torch takes long to find out about them.
        y = codes.new_empty(len(codes), len(given.weight), dtype=torch.bfloat16)
    else:
        y = torch._scaled_mm(
            codes, given.codes.t(), scale_a=scales, scale_b=given.scale.float()[None, :], bias=given.bias,
            out_dtype=torch.bfloat16, use_fast_accum=FAST_SUMS,
        )  # fmt: skip
    if given.gate is not None:
        y = gated(y, given.gate)
    return y if given.residual is None else given.residual.add_(y)


def has_product(x: torch.Tensor, given: Given) -> bool:
    """Whether torch multiplies these."""
    is_kind = number_of(given.weight) == "fp8" and not given.block and x.dtype is torch.bfloat16
    return _has_product and is_kind and not (x.shape[1] % 16 or len(given.weight) % 16)


def scaled_product(x: torch.Tensor, given: Given) -> torch.Tensor:
    """`multiply` in the tile that is best for the sizes."""
    parts = 1 if given.gate is None else 2
    tile = choose_tile(x.shape[0], given.n, x.shape[1], parts, _shared, has_product=has_product(x, given))
    return multiply(x, given, tile)


def fixed_product(x: torch.Tensor, given: Given) -> torch.Tensor:
    """`multiply` with the same instructions for a row whatever is computed beside it."""
    parts = 1 if given.gate is None else 2
    return multiply(x, given, fitted(fixed_tile(parts), parts, _shared))


@scaled_linear.impl("triton", devices=("cuda",), accepts=accepts)
def scaled_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Kernels of ours for one token and a few; torch's product for many, where it has one."""
    return scaled_product(x, Given(weight, scale, input_scale, bias))


@scaled_linear.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def scaled_linear_fixed(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it."""
    return fixed_product(x, Given(weight, scale, input_scale, bias))
