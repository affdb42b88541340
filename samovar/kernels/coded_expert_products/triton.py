"""Packed experts in Triton: pairs are grouped as for plain weights, bricks are decoded as for one packed weight.

A program takes up to BM pairs of one expert and 16 NT rows of its weight. Few tokens look for their expert themselves,
many are sorted first, so that each expert's bricks are decoded once for every BM of its tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from samovar.kernels.coded_expert_products import coded_expert_products, down_inputs, parts_of
from samovar.kernels.coded_expert_products.tiles import Plan, fixed_plan, plan
from samovar.kernels.coded_linear import triton as coded
from samovar.kernels.coded_weights import BRICK_ROWS, KINDS
from samovar.kernels.coded_weights.triton import bricks_across, bricks_at, descale, wide_columns, zeros_of
from samovar.kernels.expert_products import Gate
from samovar.kernels.expert_products.grouping.triton import Grouping, gate_value, pairs_of
from samovar.kernels.linear.tiles import DotTile
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2


@triton.jit
def _bricks(
    codes: tl.tensor, scale: tl.tensor, brick: tl.tensor, row: tl.tensor, NB: tl.constexpr, KB: tl.constexpr,
    KT: tl.constexpr, NT: tl.constexpr, WORDS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Pointers to codes and scales of NT rows of bricks from `row` on, of the NB from `brick` on."""
    place = brick.to(tl.int64) * KB
    at_codes = bricks_at(codes + place * 128, row, NB, KB, KT, NT, 128, 128)
    return at_codes, bricks_at(scale + place * (16 * WORDS), row, NB, KB, KT, NT, 16, 16 * WORDS)


@triton.jit(do_not_specialize=["tokens"])
def coded_block_kernel(
    x: tl.tensor, codes: tl.tensor, scale: tl.tensor, row_scale: tl.tensor, bias: tl.tensor, out: tl.tensor,
    ids: tl.tensor, order: tl.tensor, owners: tl.tensor, tokens: tl.tensor, limit: tl.tensor, first: tl.tensor,
    TOP_K: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KB: tl.constexpr,
    GATE: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr,
    DESCALE: tl.constexpr, BRICK: tl.constexpr, BM: tl.constexpr, NT: tl.constexpr, KT: tl.constexpr,
    WIDE: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """out [pairs, N] = (gated) product with the packed weight [N, K], gated [2N, K], of each pair's expert.

    See `block_kernel` of `expert_products` for pairs, `order` and `owners`, and `coded_kernel` of `coded_linear` for
    bricks; N is a multiple of 16.
    """
    BN: tl.constexpr = 16 * NT
    NB: tl.constexpr = N // 16
    EVEN_K: tl.constexpr = K % (BRICK * KT) == 0
    await_previous(OVERLAP)
    if order is not None:
        expert = tl.load(owners + tl.program_id(1))
        pair = tl.load(order + tl.program_id(1) * BM + tl.arange(0, BM))
    else:
        expert = tl.program_id(1)
        pair = pairs_of(ids, expert + first, tokens, TOP_K, BM, SLOTS)
    is_pair = pair >= 0
    if (expert >= 0) & (tl.max(pair, 0) >= 0):
        row = tl.program_id(0) * NT
        brick = expert * (PARTS * NB)
        at_codes, at_scale = _bricks(codes, scale, brick, row, NB, KB, KT, NT, WORDS)
        at_codes_up, at_scale_up = _bricks(codes, scale, brick + NB, row, NB, KB, KT, NT, WORDS)
        if WIDE:
            columns = wide_columns(BRICK * KT)
        else:
            columns = tl.arange(0, BRICK * KT)[None, :]
        places = tl.maximum(pair, 0) // PAIRS_PER_ROW
        inputs = x + places.to(tl.int64)[:, None] * K + columns
        total = tl.zeros((BN, BM), tl.float32)
        total_up = total
        for step in range(0, KB, KT):
            k = step
            if not EVEN_K:
                # The last tile begins earlier, and what was multiplied before is multiplied with zeros.
                k = tl.minimum(k, KB - KT)
            inside = is_pair[:, None] & (columns < K - k * BRICK) & (columns >= (step - k) * BRICK)
            part = tl.load(inputs + k * BRICK, mask=inside, other=0.0)
            words, scales = tl.load(at_codes + k * 128), tl.load(at_scale + k * (16 * WORDS))
            zeros = zeros_of(at_scale + k * (16 * WORDS), scales, WORDS)
            total = coded.add_product(total, part, words, scales, zeros, KIND, KT, NT, WIDE, True)
            if PARTS == 2:
                words, scales = tl.load(at_codes_up + k * 128), tl.load(at_scale_up + k * (16 * WORDS))
                zeros = zeros_of(at_scale_up + k * (16 * WORDS), scales, WORDS)
                total_up = coded.add_product(total_up, part, words, scales, zeros, KIND, KT, NT, WIDE, True)
        rows = row * 16 + tl.arange(0, BN)
        own = expert * (PARTS * N)
        own_bias = None if bias is None else bias + own
        total = coded.scaled(total, row_scale + own, own_bias, rows, N, DESCALE)
        if GATE is not None:
            if PARTS == 2:
                up_bias = None if bias is None else bias + own + N
                total_up = coded.scaled(total_up, row_scale + own + N, up_bias, rows, N, DESCALE)
            total = gate_value(total, total_up, limit, GATE)
        places_out = tl.maximum(pair, 0).to(tl.int64)[None, :] * N + rows[:, None]
        tl.store(out + places_out, total.to(out.dtype.element_ty), mask=is_pair[None, :] & (rows < N)[:, None])
    start_next(OVERLAP)


def product(
    call: Grouping,
    tile: DotTile,
    x: torch.Tensor,
    weight: coded.Packed,
    bias: torch.Tensor | None,
    gate: tuple[Gate, float] | None,
) -> torch.Tensor:
    """x by token or by pair -> [pairs, n]; codes [experts, row bricks, input bricks, 128]; `gate` is (activation, limit)."""
    codes, scale, row_scale, kind = weight
    activation, limit = gate or (None, 0.0)
    parts, made, input_bricks = parts_of(activation), KINDS[kind], codes.shape[2]
    n, k = row_scale.shape[1] // parts, x.shape[1]
    if n % BRICK_ROWS:
        raise ValueError(f"experts of {n} rows cut a brick of {BRICK_ROWS}")
    out = x.new_empty(call.tokens * call.top_k, n)
    depth = min(bricks_across(tile.depth, kind), 1 << (input_bricks.bit_length() - 1))
    options: dict[str, Any] = {"TOP_K": call.top_k, "PAIRS_PER_ROW": 1 if gate is None else call.top_k, "N": n, "K": k}
    options |= {"KB": input_bricks, "GATE": activation, "PARTS": parts, "SLOTS": next_power_of_2(call.top_k)}
    options |= {"KIND": kind, "WORDS": made.words, "DESCALE": descale(kind), "BRICK": made.brick, "BM": tile.tokens}
    options |= {"NT": tile.rows // BRICK_ROWS, "KT": depth, "WIDE": coded.is_wide(tile)}
    options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    tensors = (x, codes, scale, row_scale, bias, out, call.ids, call.order, call.owners)
    grid = (cdiv(n, tile.rows), call.blocks if call.tokens else 0)
    launch(coded_block_kernel, grid, *tensors, call.tokens, limit, call.first, **options, **launch_options())
    return out


def multiply(
    how: Plan,
    call: Grouping,
    gate_up: coded.Packed,
    down: coded.Packed,
    gate: tuple[Gate, float],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """`coded_expert_products` by a plan."""
    assert down[0].shape[2] * KINDS[down[3]].brick >= down_inputs(gate_up[2], gate[0])
    if how.is_sorted:
        call.sort(how.gate_up.tokens)
    h = product(call, how.gate_up, call.x, gate_up, biases[0], gate)
    return call.sum(product(call, how.down, h, down, biases[1], None))


@coded_expert_products.impl("triton", devices=("cuda",), accepts=coded.accepts)
def coded_expert_products_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_row_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_row_scale: torch.Tensor,
    kind: str,
    activation: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float = 0.0,
    first: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tiles by the number of tokens, see `tiles`."""
    call = Grouping(x, ids, weights, len(down), first, residual)
    how = plan(len(x), ids.shape[1], len(down), kind=kind, shared=coded.shared_memory())
    packed = (gate_up, gate_up_scale, gate_up_row_scale, kind), (down, down_scale, down_row_scale, kind)
    return multiply(how, call, *packed, (activation, limit), (gate_up_bias, down_bias))


@coded_expert_products.impl("triton_fixed", devices=("cuda",), accepts=coded.accepts_fixed)
def coded_expert_products_fixed(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_row_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_row_scale: torch.Tensor,
    kind: str,
    activation: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float = 0.0,
    first: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it."""
    call = Grouping(x, ids, weights, len(down), first, residual)
    how = fixed_plan(kind=kind, shared=coded.shared_memory())
    packed = (gate_up, gate_up_scale, gate_up_row_scale, kind), (down, down_scale, down_row_scale, kind)
    return multiply(how, call, *packed, (activation, limit), (gate_up_bias, down_bias))
