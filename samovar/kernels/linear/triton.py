"""Products with a weight in Triton: one token (memory-bound, on the CUDA cores), a few tokens (tensor cores), more (cuBLAS).

What follows a product in a decoder, gated activation, bias and residual, is done before its results leave the chip. For
one token the norm ahead of it is not written out either: with y = W(g * x) * r and r = 1 / rms(x), the sum of squares is
gathered in the loop that multiplies, and r applied at the end.

On Hopper and later the kernel for one token may start before the kernel ahead of it has ended (programmatic dependent
launch): it fetches its first weights, which nobody writes while a model runs, and only then waits for its input. So may
the tiled kernel for few tokens, which asks for its weights to come to the L2 cache; for more tokens it starts in turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear as dense

from samovar.kernels.linear import linear
from samovar.kernels.linear.tiles import DotTile, GemvTile, choose_tile, fixed_tile
from samovar.kernels.op import Target
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, fetch_to_l2, start_next
from samovar.kernels.triton_launch import SHARED_BYTES, cdiv, launch

MOST_JOINED = 4096
"""Most tiles of results of a product that several programs share."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies matrices of bfloat16 as if they were integers: it gets float32."""

WITHOUT_DOT = {"sm_70", "sm_72"}
"""Architectures whose matrix instructions Triton does not use: there cuBLAS multiplies more than one token."""

_has_dot, _shared = True, SHARED_BYTES[90]

_counters: dict[torch.device, torch.Tensor] = {}
"""For each device int32 [MOST_JOINED], zero between kernels. Kept for good: captured graphs know the address."""


def adapt(architecture: str) -> None:
    """Take note of what the chip can do: one process drives one kind of chip, and a choice is made before a launch."""
    global _has_dot, _shared
    _has_dot = architecture not in WITHOUT_DOT
    # An unknown chip is taken for one with as little as any has.
    _shared = SHARED_BYTES.get(int(architecture.removeprefix("sm_")), min(SHARED_BYTES.values()))


def accepts(target: Target) -> str | None:
    """Every architecture, but no rows computed alike at every batch size; adapts to the chip."""
    if target.deterministic:
        return "its tiles depend on the number of tokens"
    adapt(target.architecture)
    return None


def accepts_fixed(target: Target) -> str | None:
    """Only where it is asked for: fixed tiles are slower."""
    if not target.deterministic:
        return "only with --deterministic"
    adapt(target.architecture)
    return None


@triton.jit
def _activate(gate: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """silu, or the tanh approximation of gelu: x * sigmoid(2u) = x / 2 * (1 + tanh(u))."""
    if KIND == "silu":
        return gate * tl.sigmoid(gate)
    else:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))


@triton.jit
def _weight_tile(
    start: tl.tensor,
    rows_left: tl.tensor,
    k: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """[BN, BK] weights from `start` on. They are read once: nothing else should leave the caches for them."""
    rows, columns = tl.arange(0, BN)[:, None], k + tl.arange(0, BK)[None, :]
    if N % BN == 0 and K % BK == 0:
        return tl.load(start + rows * K + columns, eviction_policy="evict_first")
    else:
        inside = (rows < rows_left) & (columns < K)
        return tl.load(start + rows * K + columns, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _input(x: tl.tensor, k: tl.tensor, K: tl.constexpr, BK: tl.constexpr) -> tl.tensor:
    """[1, BK] float32 of a vector of length K."""
    columns = k + tl.arange(0, BK)[None, :]
    if K % BK == 0:
        return tl.load(x + columns, eviction_policy="evict_last").to(tl.float32)
    else:
        return tl.load(x + columns, mask=columns < K, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def gemv_kernel(
    x: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [N] = weight [N, K] x [K]: one program owns BN results, so that adding to `residual` in place has no race.

    norm_weight, bias and residual may be None. With GATE, weight is [2N, K], gate rows before up rows. The next tile of
    weights is fetched before the present one is multiplied, the very first before the input is there.
    """
    first = tl.program_id(0) * BN
    start = weight + first.to(tl.int64) * K
    start_up = start + tl.cast(N, tl.int64) * K
    tile = _weight_tile(start, N - first, 0, N, K, BN, BK)
    if GATE is not None:
        tile_up = _weight_tile(start_up, N - first, 0, N, K, BN, BK)
    await_previous(OVERLAP)
    total = tl.zeros((BN, BK), tl.float32)
    total_up = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((1, BK), tl.float32)
    for k in range(BK, K, BK):
        following = _weight_tile(start, N - first, k, N, K, BN, BK)
        if GATE is not None:
            following_up = _weight_tile(start_up, N - first, k, N, K, BN, BK)
        part = _input(x, k - BK, K, BK)
        if norm_weight is not None:
            squares += part * part
            part *= _input(norm_weight, k - BK, K, BK)
        total += tile.to(tl.float32) * part
        tile = following
        if GATE is not None:
            total_up += tile_up.to(tl.float32) * part
            tile_up = following_up
    LAST: tl.constexpr = (K - 1) // BK * BK
    part = _input(x, LAST, K, BK)
    if norm_weight is not None:
        squares += part * part
        part *= _input(norm_weight, LAST, K, BK)
    total += tile.to(tl.float32) * part
    if GATE is not None:
        total_up += tile_up.to(tl.float32) * part
    # Not earlier: programs that only wait would take the place of those that still have to start.
    start_next(OVERLAP)

    rows = first + tl.arange(0, BN)
    inside = rows < N
    y = tl.sum(total, 1)
    if norm_weight is not None:
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
        y *= scale
    if bias is not None:
        y += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if GATE is not None:
        up = tl.sum(total_up, 1)
        if norm_weight is not None:
            up *= scale
        if bias is not None:
            up += tl.load(bias + N + rows, mask=inside, other=0.0).to(tl.float32)
        y = _activate(y, GATE) * up
    if residual is not None:
        y += tl.load(residual + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _piece(pointers: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """What `pointers` point to, 0 where not `inside`; with EVEN all are."""
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _dot(tile: tl.tensor, part: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + tile part^T."""
    if INTERPRETED:
        tile, part = tile.to(tl.float32), part.to(tl.float32)
    return tl.dot(tile, tl.trans(part), total, input_precision="ieee")


@triton.jit
def _finish(
    total: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    at: tl.tensor,
    tokens: tl.tensor,
    N: tl.tensor,
) -> None:
    """out [tokens, N] at the rows `rows` of the weight and the tokens `at` = total, plus bias and residual if given."""
    inside = (rows < N)[:, None] & (at < tokens)[None, :]
    offsets = at.to(tl.int64)[None, :] * N + rows[:, None]
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if residual is not None:
        total += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def dot_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    counters: tl.tensor,
    tokens: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    GATE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [tokens, N] = x [tokens, K] weight^T, a tile of BM tokens and BN rows of the weight per program.

    The weight is the left operand: its rows fill the 64 rows of Hopper's matrix instruction, so that few tokens waste
    nothing. Programs of the same rows are neighbours and read them from the cache. Rows and tokens beyond the end are
    computed from the last ones and not stored.

    With GATE, weight is [2N, K], gate rows before up rows. With SPLITS > 1, which excludes GATE, programs along the
    second axis of the grid share K: they leave their sums in `partial` [tiles, SPLITS, BM, BN], and the last of a tile,
    by its counter, adds them up, from the first split on. The first AHEAD columns of a program's weights are asked for
    before the kernel ahead has ended.
    """
    blocks = tl.cdiv(tokens, BM)
    first_token = tl.program_id(0) % blocks * BM
    first_row = tl.program_id(0) // blocks * BN
    split = tl.program_id(1)
    steps = tl.cdiv(K, BK)
    if SPLITS > 1:
        share = tl.cdiv(steps, SPLITS)
        first_step, last_step = split * share, tl.minimum((split + 1) * share, steps)
    else:
        first_step, last_step = 0, steps

    rows = tl.minimum(first_row + tl.arange(0, BN), N - 1) - first_row
    start = weight + first_row.to(tl.int64) * K
    start_up = start + tl.cast(N, tl.int64) * K
    places = tl.minimum(first_token + tl.arange(0, BM), tokens - 1) - first_token
    columns = tl.arange(0, BK)[None, :]
    inputs = x + first_token.to(tl.int64) * K + places[:, None] * K + columns
    at_rows = rows[:, None] * K + columns
    if OVERLAP and AHEAD > 0:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        lines = tl.minimum(first_step * BK + tl.arange(0, AHEAD // LINE) * LINE, K - 1)
        fetch_to_l2(start + rows[:, None] * K + lines[None, :])
    await_previous(OVERLAP)
    total = tl.zeros((BN, BM), tl.float32)
    total_up = total
    for step in range(first_step, last_step):
        k = step * BK
        part = _piece(inputs + k, columns < K - k, EVEN_K)
        tile = _piece(start + at_rows + k, columns < K - k, EVEN_K)
        total = _dot(tile, part, total)
        if GATE is not None:
            tile_up = _piece(start_up + at_rows + k, columns < K - k, EVEN_K)
            total_up = _dot(tile_up, part, total_up)
    # Not earlier: programs that only wait would take the place of those that still have to start.
    start_next(OVERLAP)

    rows = first_row + tl.arange(0, BN)
    at = first_token + tl.arange(0, BM)
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
    else:
        if GATE is not None:
            if bias is not None:
                total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
                total_up += tl.load(bias + N + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
            total = _activate(total, GATE) * total_up
            _finish(total, None, residual, out, rows, at, tokens, N)
        else:
            _finish(total, bias, residual, out, rows, at, tokens, N)


def multiply(
    tile: GemvTile | DotTile,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gate: str | None = None,
) -> torch.Tensor:
    """out [tokens, n] = residual + gated(norm(x [tokens, k]) weight^T + bias), as far as given; returns `out`.

    weight [n, k], with `gate` ("silu" or "gelu") [2n, k]; `norm` is (weight [k], eps); `out` may be `residual`. All are
    contiguous. A `GemvTile` takes one token. Raises `ValueError` for a weight or result that is not contiguous, and for a
    `DotTile` with a norm, or with a gate and splits.
    """
    for tensor in (weight, out):
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}: make it contiguous"
            )
    (tokens, k), n = x.shape, out.shape[1]
    x, (gain, eps) = x.contiguous(), norm or (None, 0.0)
    if isinstance(tile, GemvTile):
        options = {"GATE": gate, "N": n, "K": k, "BN": tile.rows, "BK": tile.columns, "num_warps": tile.warps}
        programs = -(-n // tile.rows) if tokens else 0
        launch(gemv_kernel, (programs,), x, gain, weight, bias, residual, out, eps, **options, **launch_options())
        return out
    if gain is not None:
        raise ValueError("only a GemvTile norms its input: give the tiled kernel a normed one")
    if gate is not None and tile.splits > 1:
        raise ValueError(f"a gated product cannot be split, but the tile has {tile.splits} splits")
    tiles = cdiv(tokens, tile.tokens) * cdiv(n, tile.rows)
    partial, counters = None, None
    if tile.splits > 1:
        if tiles > MOST_JOINED:
            raise ValueError(f"a product of {tiles} tiles is large enough: it need not be split")
        partial = x.new_empty(tiles * tile.splits * tile.tokens * tile.rows, dtype=torch.float32)
        counters = _counters_of(x.device)
    options = {"BM": tile.tokens, "BN": tile.rows, "BK": tile.depth, "SPLITS": tile.splits, "AHEAD": tile.ahead}
    options |= {"GATE": gate, "EVEN_K": k % tile.depth == 0, "num_warps": tile.warps, "num_stages": tile.stages}
    options |= launch_options() if tile.ahead else {"OVERLAP": False}
    tensors = (x, weight, bias, residual, out, partial, counters)
    launch(dot_kernel, (tiles, tile.splits), *tensors, tokens, n, k, **options)
    return out


def _counters_of(device: torch.device) -> torch.Tensor:
    if device not in _counters:
        _counters[device] = torch.zeros(MOST_JOINED, dtype=torch.int32, device=device)
    return _counters[device]


def tile_of(x: torch.Tensor, rows: int, parts: int = 1) -> GemvTile | DotTile | None:
    """How to multiply `x` [tokens, k] with a weight of `parts` times `rows` rows; None leaves it to cuBLAS."""
    if x.shape[0] > 1 and not _has_dot:
        return None
    return choose_tile(x.shape[0], rows, x.shape[1], parts, x.element_size(), _shared)


@linear.impl("triton", devices=("cuda",), accepts=accepts)
def linear_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A kernel of ours for few tokens, cuBLAS for many."""
    tile = tile_of(x, weight.shape[0])
    if tile is None:
        return dense(x, weight, bias)
    return multiply(tile, x, weight, x.new_empty(x.shape[0], weight.shape[0]), bias=bias)


@linear.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def linear_fixed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it."""
    return multiply(fixed_tile(x.element_size()), x, weight, x.new_empty(x.shape[0], weight.shape[0]), bias=bias)
