"""Sampling in two Triton kernels, without a sort and without a decision on the host.

The first kernel reads all logits once, many programs a row, and notes for every block of 128 its largest logit and its
sum of weights. The second, one program a row, works on those notes, a few kilobytes, and reads only blocks that they do
not settle: one block for a greedy row or a plain draw, about k for top-k, those of the nucleus for top-p.

Top-k and top-p are one question: the largest threshold at which what is kept measures at least so much, in tokens or in
mass. The notes bound it from below: at a threshold t at least one token of every block that reaches t is kept, and the
127 others of a block that fall short of t weigh less than 127 exp(t). Then bisection between the smallest and the largest
score still in question finds it exactly, in registers; if too many scores are in question (a flat distribution), passes
over their blocks halve the range first. Nothing depends on the other rows, or on how many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.sample_tokens import sample_tokens
from samovar.kernels.sample_tokens.settings import COLUMNS
from samovar.kernels.sample_tokens.truncation import BLOCK
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2

CHUNK = 16
"""Blocks that a program of the first kernel reads."""
CHUNK_WARPS = 4
GROUP = 64
"""Blocks that the second kernel reads at a time; as many scores as fit into them are searched in registers."""
WARPS = 16

_SIZE = tl.constexpr(BLOCK)
_SETTINGS = tl.constexpr(COLUMNS)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_BISECTIONS = tl.constexpr(12)
_SLACK = tl.constexpr(1.00001)
"""A bound by mass must hold in spite of rounding."""


@triton.jit(do_not_specialize_on_alignment=["slots"])
def summarize_kernel(
    logits: tl.tensor, settings: tl.tensor, slots: tl.tensor, notes: tl.tensor,
    stride: tl.tensor, vocab: tl.tensor, NOTES: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """notes[row, block] = largest logit (+inf if one is NaN); notes[row, BLOCKS + block] = sum of exp(score - its own)."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = block[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    highest = tl.max(x, 1)
    mine = notes + row * NOTES + block
    tl.store(mine, highest)
    scale = tl.load(settings + tl.load(slots + row).to(tl.int64) * _SETTINGS).to(tl.float64, bitcast=True)
    if scale > 0:
        factor = scale.to(tl.float32)
        base = tl.where((highest > float("-inf")) & (highest < float("inf")), highest, 0.0) * factor
        weights = tl.exp(tl.where(x < float("inf"), x * factor - base[:, None], float("-inf")))
        tl.store(mine + BLOCKS, tl.sum(weights, 1))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def sample_kernel(
    logits: tl.tensor, settings: tl.tensor, slots: tl.tensor, positions: tl.tensor, last_sampled: tl.tensor,
    token_ids: tl.tensor, notes: tl.tensor, lists: tl.tensor, stride: tl.tensor, vocab: tl.tensor,
    NOTES: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """One token of a row."""
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * stride
    mine = notes + row * NOTES
    slot = tl.load(slots + row).to(tl.int64)
    numbers = settings + slot * _SETTINGS
    scale = tl.load(numbers).to(tl.float64, bitcast=True).to(tl.float32)
    blocks = tl.arange(0, BLOCKS)
    maxima = tl.load(mine + blocks, mask=blocks < tl.cdiv(vocab, _SIZE), other=float("-inf"))
    highest = tl.max(maxima, 0)
    token = tl.full((), -1, tl.int32)
    if (highest > float("-inf")) & (highest < float("inf")):
        if scale > 0:
            uniform = _uniform(tl.load(numbers + 4), tl.load(positions + row))
            token = _draw(values, mine, lists + row * BLOCKS, numbers, scale, maxima, uniform, vocab, BLOCKS, GROUP)
        else:
            first = tl.min(tl.where(maxima == highest, blocks, BLOCKS), 0)
            ids = first * _SIZE + tl.arange(0, _SIZE)
            x = tl.load(values + ids, mask=ids < vocab, other=float("-inf"))
            token = tl.min(tl.where(x == highest, ids, 2147483647), 0)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(last_sampled + slot, tl.maximum(token, 0).to(tl.int64))


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser; see `random_numbers`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(key: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The number of `random_numbers.uniforms`, float64."""
    stream = _mix(key.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    bits = _mix(stream + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    return (bits >> 12).to(tl.int64).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _draw(
    values: tl.tensor, notes: tl.tensor, listed: tl.tensor, numbers: tl.tensor, scale: tl.tensor, maxima: tl.tensor,
    uniform: tl.tensor, vocab: tl.tensor, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Truncate, then invert the cumulative distribution: first over blocks, then inside one."""
    margin = tl.load(numbers + 1).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(numbers + 2).to(tl.float64, bitcast=True)
    top_k = tl.load(numbers + 3)
    blocks = tl.arange(0, BLOCKS)
    tops = maxima * scale
    top = tl.max(tops, 0)
    sums = tl.load(notes + BLOCKS + blocks, mask=blocks < tl.cdiv(vocab, _SIZE), other=0.0)
    masses = sums * tl.exp(tops - top)
    floor = top + margin
    # First in tokens, then in mass of what that left.
    for stage in range(2):
        by_mass = stage == 1
        is_asked = tl.where(by_mass, top_p < 1, top_k > 0)
        if is_asked:
            share = (tl.sum(masses.to(tl.float64), 0) * top_p).to(tl.float32)
            wanted = tl.where(by_mass, share, top_k.to(tl.float32))
            bound = _bound(tops, masses, top, floor, wanted, by_mass)
            floor = _threshold(values, notes, listed, tops, scale, top, bound, wanted, by_mass, vocab, BLOCKS, GROUP)
        if is_asked | ((stage == 0) & (floor > float("-inf"))):
            masses = _masses(values, notes, listed, tops, scale, top, floor, vocab, BLOCKS, GROUP)

    totals = tl.cumsum(masses.to(tl.float64), 0)
    point = uniform * tl.max(totals, 0)
    # Rounding can put a point past the last weight: that one is meant.
    last = tl.max(tl.where(masses > 0, blocks, 0), 0)
    block = tl.minimum(tl.sum((totals <= point).to(tl.int32), 0), last)
    point -= tl.max(tl.where(blocks < block, totals, 0.0), 0)
    inside = tl.arange(0, _SIZE)
    ids = block * _SIZE + inside
    x = tl.load(values + ids, mask=ids < vocab, other=float("-inf")) * scale
    weights = tl.where(x >= floor, tl.exp(x - top), 0.0)
    passed = tl.sum((tl.cumsum(weights.to(tl.float64), 0) <= point).to(tl.int32), 0)
    return block * _SIZE + tl.minimum(passed, tl.max(tl.where(weights > 0, inside, 0), 0))


@triton.jit
def _bound(
    tops: tl.tensor, masses: tl.tensor, top: tl.tensor, floor: tl.tensor, wanted: tl.tensor, by_mass: tl.tensor
) -> tl.tensor:  # fmt: skip
    """A threshold, at least `floor`, at which what is kept surely measures `wanted`; `floor` if the notes name none."""
    weights = tl.where(by_mass, tl.exp(tops - top), 1.0)
    others = tl.where(by_mass, masses, float("-inf"))
    wanted *= tl.where(by_mass, _SLACK, 1.0)
    low = tl.where(by_mass, top - 40.0, tl.min(tl.where(tops > float("-inf"), tops, top), 0))
    high = top
    bound = floor
    if _least(tops, weights, others, top, low) >= wanted:
        for _ in range(_BISECTIONS):
            middle = 0.5 * low + 0.5 * high
            if _least(tops, weights, others, top, middle) >= wanted:
                low = middle
            else:
                high = middle
        bound = tl.maximum(floor, low)
    return bound


@triton.jit
def _least(tops: tl.tensor, weights: tl.tensor, others: tl.tensor, top: tl.tensor, at: tl.tensor) -> tl.tensor:
    """What the scores from `at` upwards measure at least."""
    least = tl.maximum(weights, others - (_SIZE - 1) * tl.exp(at - top))
    return tl.sum(tl.where(tops >= at, least, 0.0), 0)


@triton.jit
def _select(tops: tl.tensor, listed: tl.tensor, low: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """List the blocks that reach `low`, in order; returns how many."""
    is_chosen = tops >= low
    ranks = tl.cumsum(is_chosen.to(tl.int32), 0)
    tl.debug_barrier()  # Whoever still reads the list before this one is done.
    tl.store(listed + ranks - 1, tl.arange(0, BLOCKS), mask=is_chosen)
    tl.debug_barrier()
    return tl.sum(is_chosen.to(tl.int32), 0)


@triton.jit
def _scores(
    values: tl.tensor, listed: tl.tensor, first: tl.tensor, count: tl.tensor, scale: tl.tensor, vocab: tl.tensor,
    GROUP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scores [GROUP, 128] of listed blocks from the `first` on; -inf where there are none."""
    index = first + tl.arange(0, GROUP)
    block = tl.load(listed + index, mask=index < count, other=0)
    ids = block[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    return tl.load(values + ids, mask=(index < count)[:, None] & (ids < vocab), other=float("-inf")) * scale


@triton.jit
def _masses(
    values: tl.tensor, notes: tl.tensor, listed: tl.tensor, tops: tl.tensor, scale: tl.tensor, top: tl.tensor,
    floor: tl.tensor, vocab: tl.tensor, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums of weights of scores from `floor` upwards [BLOCKS]; they replace the sums in the notes."""
    count = _select(tops, listed, floor, BLOCKS)
    for first in range(0, count, GROUP):
        x = _scores(values, listed, first, count, scale, vocab, GROUP)
        index = first + tl.arange(0, GROUP)
        block = tl.load(listed + index, mask=index < count, other=0)
        kept = tl.where(x >= floor, tl.exp(x - top), 0.0)
        tl.store(notes + BLOCKS + block, tl.sum(kept, 1), mask=index < count)
    tl.debug_barrier()
    is_chosen = tops >= floor
    return tl.load(notes + BLOCKS + tl.arange(0, BLOCKS), mask=is_chosen, other=0.0)


@triton.jit
def _middle(smallest: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """A number that parts the two: above `smallest`, not above `largest`."""
    middle = 0.5 * smallest + 0.5 * largest
    return tl.minimum(tl.where(middle > smallest, middle, largest), largest)


@triton.jit
def _threshold(
    values: tl.tensor, notes: tl.tensor, listed: tl.tensor, tops: tl.tensor, scale: tl.tensor, top: tl.tensor,
    low: tl.tensor, wanted: tl.tensor, by_mass: tl.tensor, vocab: tl.tensor, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The largest score, not under `low`, at which what is kept measures `wanted`; the smallest one if none does.

    In question are the scores from `smallest` to `largest`; those above measure `above`.
    """
    low = tl.maximum(low, _LOWEST)
    count = _select(tops, listed, low, BLOCKS)
    population = count * _SIZE
    smallest = low
    largest = top
    above = 0.0
    if (population > GROUP * _SIZE) & (low == _LOWEST):
        lowest = tl.full((GROUP, _SIZE), float("inf"), tl.float32)
        for first in range(0, count, GROUP):
            x = _scores(values, listed, first, count, scale, vocab, GROUP)
            lowest = tl.minimum(lowest, tl.where(x >= low, x, float("inf")))
        smallest = tl.min(lowest)
    while (population > GROUP * _SIZE) & (smallest < largest):
        middle = _middle(smallest, largest)
        mass = tl.zeros((GROUP, _SIZE), tl.float32)
        numbers = tl.zeros((GROUP, _SIZE), tl.int32)  # of upper ones, times 2^16, and of lower ones
        lowest = tl.full((GROUP, _SIZE), float("inf"), tl.float32)
        highest = tl.full((GROUP, _SIZE), float("-inf"), tl.float32)
        for first in range(0, count, GROUP):
            x = _scores(values, listed, first, count, scale, vocab, GROUP)
            is_upper = (x >= middle) & (x <= largest)
            is_lower = (x >= smallest) & (x < middle)
            mass += tl.where(is_upper, tl.exp(x - top), 0.0)
            numbers += tl.where(is_upper, 65536, is_lower.to(tl.int32))
            lowest = tl.minimum(lowest, tl.where(is_upper, x, float("inf")))
            highest = tl.maximum(highest, tl.where(is_lower, x, float("-inf")))
        num_upper = tl.sum(numbers >> 16)
        measure = tl.where(by_mass, tl.sum(mass), num_upper.to(tl.float32))
        if above + measure >= wanted:
            population = num_upper
            smallest = tl.min(lowest)
        else:
            above += measure
            population = tl.sum(numbers & 65535)
            largest = tl.max(highest)
    if smallest < largest:
        if count > GROUP:
            x = _gather(values, notes + 2 * BLOCKS, listed, count, scale, smallest, largest, vocab, GROUP)
        else:
            x = _scores(values, listed, 0, count, scale, vocab, GROUP)
            x = tl.where(x >= low, x, float("-inf"))
        smallest = _settle(x, top, above, wanted, by_mass)
    return smallest


@triton.jit
def _gather(
    values: tl.tensor, gathered: tl.tensor, listed: tl.tensor, count: tl.tensor, scale: tl.tensor,
    smallest: tl.tensor, largest: tl.tensor, vocab: tl.tensor, GROUP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The scores from `smallest` to `largest`, known to be few, side by side in one tile; -inf elsewhere."""
    tl.debug_barrier()
    end = tl.full((), 0, tl.int32)
    for first in range(0, count, GROUP):
        x = _scores(values, listed, first, count, scale, vocab, GROUP)
        is_in = (x >= smallest) & (x <= largest)
        ranks = tl.cumsum(is_in.to(tl.int32), 1)
        sums = tl.sum(is_in.to(tl.int32), 1)
        before = end + tl.cumsum(sums, 0) - sums
        tl.store(gathered + before[:, None] + ranks - 1, x, mask=is_in)
        end += tl.sum(sums, 0)
    tl.debug_barrier()
    index = tl.arange(0, GROUP)[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    return tl.load(gathered + index, mask=index < end, other=float("-inf"))


@triton.jit
def _settle(x: tl.tensor, top: tl.tensor, above: tl.tensor, wanted: tl.tensor, by_mass: tl.tensor) -> tl.tensor:
    """`_threshold` among the scores in a tile, of which -inf are none."""
    weights = tl.where(by_mass, tl.exp(x - top), 1.0)
    smallest = tl.min(tl.where(x > float("-inf"), x, float("inf")))
    largest = tl.max(x)
    while smallest < largest:
        middle = _middle(smallest, largest)
        is_upper = (x >= middle) & (x <= largest)
        measure = tl.sum(tl.where(is_upper, weights, 0.0))
        if above + measure >= wanted:
            smallest = tl.min(tl.where(is_upper, x, float("inf")))
            if above + measure == wanted:  # As many tokens as wanted: nothing is left to part.
                largest = smallest
        else:
            above += measure
            largest = tl.max(tl.where((x >= smallest) & (x < middle), x, float("-inf")))
    return smallest


@sample_tokens.impl("triton", devices=("cuda",))
def sample_tokens_triton(
    logits: torch.Tensor,
    settings: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    last_sampled: torch.Tensor,
) -> torch.Tensor:
    """Two kernels; logits may have any row stride."""
    logits = logits.float()
    rows, vocab = logits.shape
    num_blocks = cdiv(vocab, BLOCK)
    width = max(next_power_of_2(num_blocks), CHUNK)
    notes = logits.new_empty((rows, 2 * width + GROUP * BLOCK))
    lists = slots.new_empty((rows, width))
    token_ids = last_sampled.new_empty(rows)
    sizes = {"NOTES": notes.shape[1], "BLOCKS": width}
    launch(
        summarize_kernel, (cdiv(num_blocks, CHUNK), rows),
        logits, settings, slots, notes, logits.stride(0), vocab, **sizes, CHUNK=CHUNK, num_warps=CHUNK_WARPS,
    )  # fmt: skip
    launch(
        sample_kernel, (rows,),
        logits, settings, slots, positions, last_sampled, token_ids, notes, lists, logits.stride(0), vocab,
        **sizes, GROUP=GROUP, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return token_ids
