"""Products with packed weights in Triton: few tokens in one kernel that decodes on the way, many through cuBLAS.

The kernel for few tokens is that of `linear` with a decoder between its loads and its matrix instruction: rows of the
weight are the left operand, which Hopper takes from registers, and programs that share the inputs of a result leave their
sums for the last of them to add in a fixed order. More tokens are worth decoding the weight once, some rows at a time, into
a workspace of at most `WORKSPACE_BYTES`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as dense

from samovar.kernels.coded_linear import coded_linear
from samovar.kernels.coded_linear.tiles import WORKSPACE_BYTES, choose_tile, fixed_tile
from samovar.kernels.coded_weights import BRICK_ROWS, KINDS
from samovar.kernels.coded_weights.triton import (
    bricks_across,
    bricks_at,
    decode_tile,
    dequantize,
    descale,
    wide_columns,
    zeros_of,
)
from samovar.kernels.linear import triton as plain
from samovar.kernels.linear.tiles import DotTile
from samovar.kernels.op import Target
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, fetch_to_l2, start_next
from samovar.kernels.triton_launch import SHARED_BYTES, cdiv, launch

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]
"""codes, scale, row_scale and kind, as the op takes them."""

LINE_WORDS = tl.constexpr(32)
"""Words of 32 bits in a line of the L2 cache."""

WARPGROUP_TOKENS = 16
"""The fewest tokens for which Triton takes Hopper's instruction for groups of warps, which reads activations itself."""
WITH_WARPGROUPS = range(90, 120)

SETTLES = True
"""Whether the decoder waits for the product that reads its registers; without, results are wrong: see `_settled`."""

_architecture, _shared = 90, SHARED_BYTES[90]


def _refusal(target: Target) -> str | None:
    global _architecture, _shared
    number = int(target.architecture.removeprefix("sm_"))
    if number < 80:
        return "needs bfloat16 arithmetic, from sm_80 on"
    if target.dtype not in (torch.bfloat16, torch.float16):
        return "its weights have 16 bits: activations must, too"
    _architecture, _shared = number, SHARED_BYTES.get(number, min(SHARED_BYTES.values()))
    return None


def accepts(target: Target) -> str | None:
    """Chips with bfloat16, no rows computed alike at every batch size; adapts to the chip's memory."""
    return "its tiles depend on the number of tokens" if target.deterministic else _refusal(target)


def accepts_fixed(target: Target) -> str | None:
    """Only where it is asked for: fixed tiles are slower."""
    return _refusal(target) if target.deterministic else "only with --deterministic"


@triton.jit
def _inputs(pointers: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """What `pointers` point to, 0 where not `inside`; with EVEN all are."""
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _settled(total: tl.tensor) -> tl.tensor:
    """`total`, once the tensor cores have written it.

    Hopper's instruction reads weights out of registers while the program goes on. Triton (3.6 to 3.9) lets it do so into
    the next step of a loop, whose decoder writes those registers again: with slow products, those of many tokens, wrong
    sums. What uses a sum within the loop makes Triton wait; an assignment is no instruction in the end.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_product(
    total: tl.tensor,
    part: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    KIND: tl.constexpr,
    KT: tl.constexpr,
    NT: tl.constexpr,
    WIDE: tl.constexpr,
    SETTLES: tl.constexpr,
) -> tl.tensor:
    """total [16 NT, tokens] + weights times part [tokens, inputs of KT bricks] transposed."""
    tile = decode_tile(words, scales, zeros, KIND, KT, NT, WIDE)
    if plain.INTERPRETED:
        return tl.dot(tile.to(tl.float32), tl.trans(part.to(tl.float32)), total, input_precision="ieee")
    else:
        total = tl.dot(tile.to(part.dtype), tl.trans(part), total)
        if WIDE or not SETTLES:
            return total
        else:
            return _settled(total)


@triton.jit
def scaled(
    total: tl.tensor, row_scale: tl.tensor, bias: tl.tensor, rows: tl.tensor, N: tl.tensor, DESCALE: tl.constexpr
) -> tl.tensor:
    """total [rows, tokens] times the rows' scales, plus bias."""
    factor = tl.load(row_scale + rows, mask=rows < N, other=0.0).to(tl.float32) * DESCALE
    total *= factor[:, None]
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def _finish(
    total: tl.tensor,
    total_up: tl.tensor,
    row_scale: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    at: tl.tensor,
    tokens: tl.tensor,
    N: tl.tensor,
    DESCALE: tl.constexpr,
    GATE: tl.constexpr,
) -> None:
    """out [tokens, N] at `rows` and the tokens `at`, from sums of products [rows, tokens]."""
    total = scaled(total, row_scale, bias, rows, N, DESCALE)
    if GATE is not None:
        bias_up = None if bias is None else bias + N
        total_up = scaled(total_up, row_scale + N, bias_up, rows, N, DESCALE)
        total = plain._activate(total, GATE) * total_up
    plain._finish(total, None, residual, out, rows, at, tokens, N)


@triton.jit(do_not_specialize=["tokens"])
def coded_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    row_scale: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    counters: tl.tensor,
    tokens: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    NB: tl.tensor,
    KB: tl.tensor,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    DESCALE: tl.constexpr,
    GATE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    NT: tl.constexpr,
    KT: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDE: tl.constexpr,
    SETTLES: tl.constexpr,
    BRICK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [tokens, N] = x [tokens, K] weight^T, a tile of BM tokens and 16 NT rows of the weight per program.

    See `samovar.kernels.linear.triton.dot_kernel` for GATE (N must be a multiple of 16 then), SPLITS and OVERLAP;
    `partial` is [tiles, gate and up, SPLITS, BM, BN], so that a gated product can be split here. The first AHEAD bricks
    of every row of bricks are asked for before the kernel ahead has ended. Bricks beyond the last are replaced by the
    last, and multiplied with zeros.
    """
    BN: tl.constexpr = 16 * NT
    BK: tl.constexpr = BRICK * KT
    blocks = tl.cdiv(tokens, BM)
    first_token = tl.program_id(0) % blocks * BM
    tile_of_rows = tl.program_id(0) // blocks
    first_brick = tile_of_rows * NT
    split = tl.program_id(1)
    steps = tl.cdiv(KB, KT)
    if SPLITS > 1:
        share = tl.cdiv(steps, SPLITS)
        first_step, last_step = split * share, tl.minimum((split + 1) * share, steps)
    else:
        first_step, last_step = 0, steps

    at_codes = bricks_at(codes, first_brick, NB, KB, KT, NT, 128, 128)
    at_scale = bricks_at(scale, first_brick, NB, KB, KT, NT, 16, 16 * WORDS)
    at_codes_up = bricks_at(codes, N // 16 + first_brick, NB, KB, KT, NT, 128, 128)
    at_scale_up = bricks_at(scale, N // 16 + first_brick, NB, KB, KT, NT, 16, 16 * WORDS)
    places = tl.minimum(first_token + tl.arange(0, BM), tokens - 1)
    if WIDE:
        columns = wide_columns(BK)
    else:
        columns = tl.arange(0, BK)[None, :]
    inputs = x + places.to(tl.int64)[:, None] * K + columns
    if OVERLAP and AHEAD > 0:
        behind = tl.minimum(first_step * KT + tl.arange(0, AHEAD)[:, None, None], KB - 1)
        bricks = tl.minimum(first_brick + tl.arange(0, NT), NB - 1).to(tl.int64)[None, :, None] * KB + behind
        fetch_to_l2(codes + bricks * 128 + tl.arange(0, 4)[None, None, :] * LINE_WORDS)
        fetch_to_l2(scale + bricks * (16 * WORDS))
    await_previous(OVERLAP)
    total = tl.zeros((BN, BM), tl.float32)
    total_up = total
    for step in range(first_step, last_step):
        k = step * KT
        if not EVEN_K:
            # The last tile begins earlier, and what was multiplied before is multiplied with zeros.
            k = tl.minimum(k, KB - KT)
        inside = (columns < K - k * BRICK) & (columns >= (step * KT - k) * BRICK)
        part = _inputs(inputs + k * BRICK, inside, EVEN_K)
        words, scales = tl.load(at_codes + k * 128), tl.load(at_scale + k * (16 * WORDS))
        zeros = zeros_of(at_scale + k * (16 * WORDS), scales, WORDS)
        total = add_product(total, part, words, scales, zeros, KIND, KT, NT, WIDE, SETTLES)
        if GATE is not None:
            words, scales = tl.load(at_codes_up + k * 128), tl.load(at_scale_up + k * (16 * WORDS))
            zeros = zeros_of(at_scale_up + k * (16 * WORDS), scales, WORDS)
            total_up = add_product(total_up, part, words, scales, zeros, KIND, KT, NT, WIDE, SETTLES)
    # Not earlier: programs that only wait would take the place of those that still have to start.
    start_next(OVERLAP)

    rows = first_brick * 16 + tl.arange(0, BN)
    at = first_token + tl.arange(0, BM)
    if SPLITS > 1:
        PARTS: tl.constexpr = 1 if GATE is None else 2
        tile_id = tl.program_id(0)
        here = partial + tile_id.to(tl.int64) * (PARTS * SPLITS * BM * BN)
        here += tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
        tl.store(here + split * (BM * BN), total)
        if GATE is not None:
            tl.store(here + (SPLITS + split) * (BM * BN), total_up)
        tl.debug_barrier()  # All threads' sums are written before one thread counts them as such.
        if tl.atomic_add(counters + tile_id, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counters + tile_id, 0)
            total = tl.zeros((BN, BM), tl.float32)
            for part_id in tl.static_range(SPLITS):
                total += tl.load(here + part_id * (BM * BN))
            if GATE is not None:
                total_up = tl.zeros((BN, BM), tl.float32)
                for part_id in tl.static_range(SPLITS):
                    total_up += tl.load(here + (SPLITS + part_id) * (BM * BN))
            _finish(total, total_up, row_scale, bias, residual, out, rows, at, tokens, N, DESCALE, GATE)
    else:
        _finish(total, total_up, row_scale, bias, residual, out, rows, at, tokens, N, DESCALE, GATE)


def shared_memory() -> int:
    """Bytes that one program may use on this chip."""
    return _shared


def is_wide(tile: DotTile) -> bool:
    """Whether the matrix instruction for `tile` has both operands in registers; see `wide_columns`."""
    return _architecture not in WITH_WARPGROUPS or tile.tokens < WARPGROUP_TOKENS or tile.rows < 64


def multiply(
    tile: DotTile,
    x: torch.Tensor,
    weight: Packed,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gate: str | None = None,
) -> torch.Tensor:
    """out [tokens, n] = residual + gated(x [tokens, k] weight^T + bias), as far as given; returns `out`.

    The weight has n rows, with `gate` ("silu" or "gelu") 2n, and n is a multiple of 16 then; `out` may be `residual`, and
    is contiguous. Raises `ValueError` for what the kernel cannot do.
    """
    if not out.is_contiguous():
        raise ValueError(f"a result of shape {tuple(out.shape)} has strides {out.stride()}: make it contiguous")
    codes, scale, row_scale, kind = weight
    (tokens, k), n = x.shape, out.shape[1]
    x, (row_bricks, input_bricks) = x.contiguous(), codes.shape[:2]
    if gate is not None and n % BRICK_ROWS:
        raise ValueError(f"a gated product of {n} rows cuts a brick of {BRICK_ROWS}: multiply first, then gate")
    tiles = cdiv(tokens, tile.tokens) * cdiv(n, tile.rows)
    partial, counters = None, None
    if tile.splits > 1:
        if tiles > plain.MOST_JOINED:
            raise ValueError(f"a product of {tiles} tiles is large enough: it need not be split")
        sums = tiles * tile.splits * tile.tokens * tile.rows * (1 if gate is None else 2)
        partial = x.new_empty(sums, dtype=torch.float32)
        counters = plain._counters_of(x.device)
    depth = min(bricks_across(tile.depth, kind), 1 << (input_bricks.bit_length() - 1))
    brick = KINDS[kind].brick
    options = {"BRICK": brick, "KIND": kind, "WORDS": KINDS[kind].words, "DESCALE": descale(kind), "GATE": gate}
    options |= {"EVEN_K": k % (brick * depth) == 0, "BM": tile.tokens, "NT": tile.rows // BRICK_ROWS, "KT": depth}
    options |= {"WIDE": is_wide(tile), "SETTLES": SETTLES}
    options |= {
        "SPLITS": tile.splits,
        "AHEAD": tile.ahead * 64 // brick,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    options |= launch_options() if tile.ahead else {"OVERLAP": False}
    tensors = (x, codes, scale, row_scale, bias, residual, out, partial, counters)
    sizes = (tokens, n, k, row_bricks, input_bricks)
    launch(coded_kernel, (tiles, tile.splits), *tensors, *sizes, **options)
    return out


def multiply_decoded(
    x: torch.Tensor,
    weight: Packed,
    out: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    adds: bool = False,
    most_bytes: int = WORKSPACE_BYTES,
) -> torch.Tensor:
    """x [tokens, k] weight^T + bias through cuBLAS, into `out` [tokens, n] if given, `adds` to it; returns the result.

    At most `most_bytes` of the weight exist as numbers at once.
    """
    codes, scale, row_scale, kind = weight
    rows, inputs = len(row_scale), x.shape[1]
    step = max(most_bytes // (inputs * x.element_size()) // 128 * 128, 128)
    if step >= rows and not adds:
        return dense(x, dequantize(codes, scale, row_scale, kind, x.new_empty(rows, inputs)), bias)
    out = x.new_empty(x.shape[0], rows) if out is None else out
    space = x.new_empty(min(step, rows), inputs)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part = dequantize(codes, scale, row_scale, kind, space[:count], first)
        out[:, first : first + count].addmm_(x, part.t(), beta=1 if adds else 0)
    if bias is not None:
        out += bias
    return out


def multiply_fixed(
    x: torch.Tensor,
    weight: Packed,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [tokens, n] = residual + x weight^T + bias with the one tile of deterministic mode; returns `out`."""
    return multiply(fixed_tile(), x, weight, out, bias=bias, residual=residual)


def tile_of(x: torch.Tensor, rows: int, kind: str, parts: int = 1) -> DotTile | None:
    """How to multiply `x` [tokens, k] with a packed weight of `parts` times `rows` rows; None leaves it to cuBLAS."""
    return choose_tile(x.shape[0], rows, x.shape[1], parts, _shared, kind)


@coded_linear.impl("triton", devices=("cuda",), accepts=accepts)
def coded_linear_triton(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One kernel for few tokens; decoded rows and cuBLAS for many."""
    tile = tile_of(x, row_scale.shape[0], kind)
    weight = codes, scale, row_scale, kind
    if tile is None:
        return multiply_decoded(x, weight, None, bias)
    return multiply(tile, x, weight, x.new_empty(x.shape[0], row_scale.shape[0]), bias=bias)


@coded_linear.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def coded_linear_fixed(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it."""
    out = x.new_empty(x.shape[0], row_scale.shape[0])
    return multiply_fixed(x, (codes, scale, row_scale, kind), out, bias)
