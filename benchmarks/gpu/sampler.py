"""Times the op `sample_tokens` by settings, rows and vocabulary, and compares it with its reference at real sizes.

    PYTHONPATH=. python3 benchmarks/gpu/sampler.py [--quick]

Microseconds per call (two kernels) inside a CUDA graph. The logits of up to 64 rows lie in the L2 cache, as those that a
step has just computed do. "floor" is the time to read the logits once at 4.3 TB/s. "sharp" logits are normal numbers times
4: nuclei of tens to thousands of tokens; "flat" ones are not multiplied: nuclei of tens of thousands, the search's worst
case. torch: argmax, and the usual sorted way to top-k and top-p. The last table tries other tiles than those in use,
which are marked with a star; --quick leaves it out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from samovar.kernels.sample_tokens import sample_tokens, triton
from samovar.kernels.sample_tokens.settings import greedy, make

COPY_BYTES_PER_SECOND = 4.3e12
VOCABULARIES = (128256, 151936)
ROWS = (1, 8, 64, 256)
CALLS, REPLAYS = 10, 9

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("sharp", {"temperature": 0.0}),
    "temp": ("sharp", {"temperature": 1.0}),
    "k20 p.95": ("sharp", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    "k20 flat": ("flat", {"temperature": 1.0, "top_k": 20, "top_p": 0.95}),
    "k200": ("sharp", {"temperature": 1.0, "top_k": 200}),
    "k9999": ("sharp", {"temperature": 1.0, "top_k": 9999}),
    "p.9": ("sharp", {"temperature": 1.0, "top_p": 0.9}),
    "p.9 flat": ("flat", {"temperature": 1.0, "top_p": 0.9}),
    "min_p": ("sharp", {"temperature": 1.0, "min_p": 0.05}),
}


class Case(NamedTuple):
    """Arguments of the op."""

    logits: torch.Tensor
    settings: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    last_sampled: torch.Tensor


def case(rows: int, vocab: int, kinds: list[dict[str, Any]], factor: float) -> Case:
    """Row i samples as `kinds[i]` says, beginning again at the end of the list."""
    table = greedy(rows + 1)
    for slot in range(rows):
        table[slot] = make(**kinds[slot % len(kinds)], key=slot * 7919)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    return Case(
        torch.randn(rows, vocab, device="cuda") * factor,
        torch.from_numpy(table.view(np.int64).reshape(rows + 1, -1)).cuda(),
        slots,
        slots + 100,
        torch.zeros(rows + 1, dtype=torch.int64, device="cuda"),
    )


def microseconds(function: Callable[[], Any]) -> float:
    """Median time of one call among `CALLS` in a graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def sorted_way(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Top-k and top-p by a sort of the whole row."""
    values, ids = (logits.topk(top_k) if top_k else logits.sort(dim=-1, descending=True))[:2]
    p = values.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    noise = torch.empty_like(p).exponential_()
    return ids.gather(1, (p / noise).argmax(-1, keepdim=True))


def check() -> bool:
    """Compare tokens with the reference's, every setting in one batch; False if more than rounding explains differ.

    The reference adds up in another order: a random number that falls between two sums gives a neighbouring token.
    """
    good = True
    kinds = [kind for _, kind in SETTINGS.values()]
    for vocab in VOCABULARIES:
        for name, factor in (("sharp", 4.0), ("flat", 1.0), ("tied", 0.0)):
            made = case(81, vocab, kinds, factor or 2.0)
            logits = made.logits if factor else made.logits.bfloat16().float()
            logits[80, 5] = torch.nan
            made = made._replace(logits=logits)
            got, expected = triton.sample_tokens_triton(*made), sample_tokens(*made)
            again = triton.sample_tokens_triton(
                *(tensor[37:38] if i in (0, 2, 3) else tensor for i, tensor in enumerate(made))
            )
            differing = (got != expected).nonzero().squeeze(1).tolist()
            good &= len(differing) <= 1 and int(got[80]) == -1 and int(again) == int(got[37])
            greedy_rows = [row for row in differing if row % len(kinds) == 0]
            good &= not greedy_rows
            alone = "the same alone" if int(again) == int(got[37]) else "ANOTHER ALONE"
            print(f"{vocab} {name}: {len(differing)} of 81 differ from the reference {differing}; row 37 {alone}")
    return good


def table() -> None:
    """Every setting, rows and vocabulary."""
    print(
        "\nus per call" + " " * 9 + "floor " + " ".join(f"{name:>8}" for name in SETTINGS) + "  torch: argmax, k20, p.9"
    )
    for vocab in VOCABULARIES:
        for rows in ROWS:
            cells = []
            for kind, setting in SETTINGS.values():
                made = case(rows, vocab, [setting], 4.0 if kind == "sharp" else 1.0)
                cells.append(microseconds(partial(triton.sample_tokens_triton, *made)))
            logits = made.logits
            floor = logits.nbytes / COPY_BYTES_PER_SECOND * 1e6
            torch_ways = (
                partial(logits.argmax, -1),
                partial(sorted_way, logits, 20, 0.95),
                partial(sorted_way, logits, 0, 0.9),
            )
            others = [microseconds(way) for way in torch_ways]
            line = " ".join(f"{cell:8.1f}" for cell in cells)
            print(f"{vocab} x {rows:<6}  {floor:7.1f} {line}  " + " ".join(f"{cell:8.0f}" for cell in others))


@contextmanager
def tiles(**values: int) -> Iterator[None]:
    """The implementation with other constants."""
    before = {name: getattr(triton, name) for name in values}
    for name, value in values.items():
        setattr(triton, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(triton, name, value)


def other_tiles() -> None:
    """Blocks and warps of both kernels, at 1 and 64 rows."""
    names = ("greedy", "k20 p.95", "p.9", "p.9 flat")
    print(
        "\nCHUNK warps  GROUP warps  "
        + " ".join(f"{name + ' x ' + str(rows):>13}" for name in names for rows in (1, 64))
    )
    made = {
        (name, rows): case(rows, VOCABULARIES[1], [SETTINGS[name][1]], 4.0 if SETTINGS[name][0] == "sharp" else 1.0)
        for name in names
        for rows in (1, 64)
    }
    used = (triton.CHUNK, triton.CHUNK_WARPS, triton.GROUP, triton.WARPS)
    for tile in (
        used,
        (8, 2, *used[2:]),
        (16, 8, *used[2:]),
        (32, 8, *used[2:]),
        (*used[:2], 32, 8),
        (*used[:2], 64, 32),
    ):
        with tiles(**dict(zip(("CHUNK", "CHUNK_WARPS", "GROUP", "WARPS"), tile, strict=True))):
            cells = [microseconds(partial(triton.sample_tokens_triton, *m)) for m in made.values()]
        star = "*" if tile == used else " "
        print(
            f"{tile[0]:>4}{tile[1]:>6}{tile[2]:>7}{tile[3]:>6} {star}  " + " ".join(f"{cell:13.1f}" for cell in cells)
        )


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="leave out the table of other tiles")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    with torch.inference_mode():
        good = check()
        table()
        if not quick:
            other_tiles()
    if not good:
        sys.exit("tokens differ from the reference by more than rounding explains")


if __name__ == "__main__":
    main()
