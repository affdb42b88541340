"""Latent attention on NVIDIA GPUs: what is launched for a step of `TritonAttention`, and in which tiles.

Decoding sequences, and chunks that are short beside their history, are absorbed: a product with the expansion before, one
after. For other chunks keys and values of all heads are made, of some sequences at once or of a long one in passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from samovar.attention.base import AttentionCall, LayerCache
from samovar.attention.latent import expands
from samovar.core.cache_spec import LatentDims
from samovar.hardware.latent_memory import LATENT_PARTS, LATENT_QUERIES, LATENT_ROWS, made_at_once
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2

if TYPE_CHECKING:
    from samovar.attention.triton import TritonPlan

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
"""In how many parts the rows of one sequence may be read."""
MIN_PART = 64
"""Rows that a part should have at least."""
MOST_SEQS = 1024
"""Sequences whose keys are made at once."""
GATHER_ROWS = 32
"""Rows of the cache that one program gathers."""


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """Rows of a tile (a head of a token each) and keys, warps of a program, tiles under way at once."""

    rows: int
    keys: int
    warps: int
    stages: int


ABSORBED = {
    "few": LatentTiles(16, 64, 8, 2),
    "some": LatentTiles(32, 64, 8, 2),
    "many": LatentTiles(64, 32, 8, 2),
    "small": LatentTiles(16, 16, 4, 2),
    "exact": LatentTiles(16, 16, 4, 1),
}
"""By the heads that share rows: up to 16, up to 32, more; on GPUs with little shared memory; in float32."""
MADE = {
    "large": LatentTiles(128, 64, 8, 2),
    "small": LatentTiles(64, 32, 4, 2),
    "exact": LatentTiles(16, 16, 4, 1),
}
"""Tiles of chunks whose keys and values were made."""


@dataclass(frozen=True, slots=True)
class Part:
    """The sequences first .. stop, whose rows of the step are row .. row + count. `keys` None: absorbed. Otherwise keys and
    values are made of all, or of one sequence `keys` at a time."""

    first: int
    stop: int
    row: int
    count: int
    keys: int | None = None


def parts_of(plan: TritonPlan, dims: LatentDims, heads: int, itemsize: int) -> Iterator[Part]:
    """Everything after the decoding sequences, in order, in parts that fit into the planned memory."""
    new_tokens, totals = plan.spans.new_tokens, plan.spans.total_tokens
    most = made_at_once(dims, heads, itemsize)
    first, row = plan.num_decodes, plan.num_decodes
    while first < len(new_tokens):
        makes = expands(new_tokens[first], totals[first], dims)
        stop, count, keys = first + 1, new_tokens[first], totals[first]
        while stop < len(new_tokens) and expands(new_tokens[stop], totals[stop], dims) == makes:
            is_full = keys + totals[stop] > most if makes else count + new_tokens[stop] > LATENT_QUERIES
            if is_full or stop - first == MOST_SEQS:
                break
            count, keys, stop = count + new_tokens[stop], keys + totals[stop], stop + 1
        yield Part(first, stop, row, count, min(keys, most) if makes else None)
        first, row = stop, row + count


def splits_of(totals: Sequence[int], tiles: int, processors: int) -> int:
    """In how many parts keys are read, so that no program reads much more than its share; `tiles` of each sequence."""
    if not totals:
        return 1
    longest = max(totals)
    fair = max(MIN_PART, sum(totals) * tiles * 5 // (processors * 4))
    for splits in SPLITS:
        if longest <= fair * splits or 2 * splits * len(totals) * tiles > LATENT_PARTS:
            return splits
    return SPLITS[-1]


def absorbed_tiles(shared: int, *, is_small: bool, is_exact: bool) -> LatentTiles:
    """Where `shared` heads read the same rows. `is_exact`: without tensor cores, or
    in float32."""
    if is_exact or is_small:
        return ABSORBED["exact" if is_exact else "small"]
    return ABSORBED["few" if shared <= 16 else "some" if shared <= 32 else "many"]


def decode_splits(totals: Sequence[int], heads: int, processors: int, *, is_small: bool, is_exact: bool) -> int:
    """Parts of a decode step."""
    tiles = absorbed_tiles(heads, is_small=is_small, is_exact=is_exact)
    return splits_of(totals, cdiv(heads, tiles.rows), processors)


def attend_latent(q: torch.Tensor, cache: LayerCache, plan: TritonPlan, call: AttentionCall) -> torch.Tensor:
    """See `AttentionBackend.run`."""
    dims = call.latent
    assert dims is not None, "the layer is not a latent one"
    q, heads = q.contiguous(), q.shape[1]
    out = q.new_empty((len(q), heads, dims.value))
    if plan.num_decodes:
        absorb(out, q, cache, plan, call, Part(0, plan.num_decodes, 0, plan.num_decodes))
    for part in parts_of(plan, dims, heads, q.itemsize):
        if part.keys is None:
            absorb(out, q, cache, plan, call, part)
        else:
            make(out, q, cache, plan, call, part)
    return out


def absorb(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: LayerCache,
    plan: TritonPlan,
    call: AttentionCall,
    part: Part,
    tiles: LatentTiles | None = None,
    splits: int | None = None,
) -> None:
    """The rows of one part, into those of `out`; tiles and splits are chosen unless given."""
    from samovar.attention.triton_latent import attend_rows, join_rows

    (rows, expansion), dims, heads = cache, call.latent, q.shape[1]
    assert dims is not None
    is_exact, is_one = _is_exact(q, rows), part.count == part.stop - part.first
    count, mine, on_device = part.count, slice(part.row, part.row + part.count), plan.tensors
    seqs = part.stop - part.first
    shared = heads if is_one else LATENT_ROWS  # one kind of tiles for all chunks: each is compiled
    tiles = tiles or absorbed_tiles(shared, is_small=plan.is_small, is_exact=is_exact or plan.is_scalar)
    plain, turned = q[mine, :, : dims.nope], q[mine, :, dims.nope :]
    latent, found = q.new_empty((2, heads, count, dims.rank))
    torch.bmm(plain.transpose(0, 1), expansion[:, : dims.nope], out=latent)
    programs = seqs * cdiv(heads, tiles.rows) if is_one else count * heads // tiles.rows + seqs
    if splits is None:
        totals = plan.spans.total_tokens[part.first : part.stop]
        splits = splits_of(totals, max(1, programs // seqs), plan.processors)
    parts = torch.empty((splits if splits > 1 else 0, heads, count, dims.rank), dtype=torch.float32, device=q.device)
    norms = torch.empty((*parts.shape[:3], 2), dtype=torch.float32, device=q.device)
    sizes = {"RANK": dims.rank, "RANK_BLOCK": _padded(dims.rank)}
    launch(
        attend_rows,
        (programs, splits),
        *(found, parts, norms, latent, turned, rows),
        *(on_device.first_rows, on_device.totals, on_device.table_rows, on_device.tables, on_device.tables.stride(0)),
        *(part.first, part.stop, splits, count, turned.stride(0), turned.stride(1), call.scale),
        HEADS=heads,
        **sizes,
        ROPE=dims.rope,
        PAGE=rows.shape[1],
        IS_ONE=is_one,
        IS_SPLIT=splits > 1,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        ROPE_BLOCK=_padded(dims.rope),
        COMPUTE=_compute(q, is_exact),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        most = {"AT_ONCE": 8, "MOST_SPLITS": SPLITS[-1]}
        launch(join_rows, (heads * count,), found, parts, norms, splits, heads * count, **sizes, **most, num_warps=4)
    torch.bmm(found, expansion[:, dims.nope :].transpose(1, 2), out=out[mine].transpose(0, 1))


def make(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: LayerCache,
    plan: TritonPlan,
    call: AttentionCall,
    part: Part,
    tiles: LatentTiles | None = None,
) -> None:
    """The same by making keys and values: of all sequences at once, or of one in passes."""
    from samovar.attention.triton_latent import attend_made, gather_rows

    (rows, expansion), dims, heads, on_device = cache, call.latent, q.shape[1], plan.tensors
    assert dims is not None and part.keys is not None
    is_exact, seqs = _is_exact(q, rows), part.stop - part.first
    tiles = tiles or MADE["exact" if is_exact or plan.is_scalar else "small" if plan.is_small else "large"]
    totals = plan.spans.total_tokens[part.first : part.stop]
    longest = max(totals)
    size = longest if seqs > 1 else min(part.keys, longest)
    is_whole = size == longest
    kept = None if is_whole else q.new_empty(out.shape, dtype=torch.float32)
    norms = None if is_whole else q.new_empty((*out.shape[:2], 2), dtype=torch.float32)
    joint = expansion.flatten(0, 1)
    gathered = q.new_empty((sum(totals) if seqs > 1 else size, dims.row))
    for begin in range(0, longest, size):
        launch(
            gather_rows,
            (cdiv(size, GATHER_ROWS), seqs),
            *(gathered, rows, on_device.totals, on_device.table_rows, on_device.tables, on_device.tables.stride(0)),
            *(part.first, begin, size),
            WIDTH=dims.row,
            PAGE=rows.shape[1],
            BLOCK=GATHER_ROWS,
            WIDTH_BLOCK=_padded(dims.row),
            num_warps=4,
        )
        made = torch.nn.functional.linear(gathered[:, : dims.rank], joint)
        launch(
            attend_made,
            (heads, part.count // tiles.rows + seqs),
            *(out, kept, norms, q, made, gathered, on_device.first_rows, on_device.totals),
            *(part.first, part.stop, begin, size, call.scale),
            HEADS=heads,
            RANK=dims.rank,
            ROPE=dims.rope,
            NOPE=dims.nope,
            VALUE=dims.value,
            IS_FIRST=begin == 0,
            IS_LAST=begin + size >= longest,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            ROPE_BLOCK=_padded(dims.rope),
            NOPE_BLOCK=_padded(dims.nope),
            VALUE_BLOCK=_padded(dims.value),
            COMPUTE=_compute(q, is_exact),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


def _is_exact(q: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether tiles are multiplied in float32: in 16 bits only if q and cache are of one dtype."""
    return q.itemsize == 4 or q.dtype != rows.dtype


def _compute(q: torch.Tensor, is_exact: bool) -> Any:
    import triton.language as tl

    return tl.float32 if is_exact else tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16


def _padded(size: int) -> int:
    """The next power of two, at least 16."""
    return max(16, next_power_of_2(size))
