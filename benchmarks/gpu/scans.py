"""The scans of Mamba2 and Mamba on a GPU: correct at real sizes against float64, then microseconds of a layer, by tile.

PYTHONPATH=. python3 benchmarks/gpu/scans.py [check] [check_tiles] [decode] [prefill], all by default. Times are medians of graph replays,
decoding over several layers' states, so that states come from memory.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch

from benchmarks.gpu.linear import attempt, prepare
from samovar.kernels import overlap
from samovar.kernels.selective_scan import selective_scan
from samovar.kernels.selective_scan.triton import selective_scan_triton
from samovar.kernels.state_space_scan import state_space_scan
from samovar.kernels.state_space_scan.tiles import CHUNKS, ScanTile
from samovar.kernels.state_space_scan.triton import scan_in, state_space_scan_triton

MODELS = {
    "nemotron-h-8b": (128, 64, 8, 128),
    "granite-4-tiny": (48, 64, 1, 128),
    "falcon-h1-34b": (32, 128, 2, 256),
}
"""Heads, head_dim, groups, N."""
CHANNELS, SIZE = 8192, 16
"""Falcon-Mamba-7B."""
MORE = (ScanTile(64, 32, 4), ScanTile(64, 32, 8), ScanTile(64, 64, 4), ScanTile(64, 64, 8), ScanTile(32, 64, 4),
        ScanTile(32, 64, 8), ScanTile(16, 64, 4), ScanTile(32, 32, 8), ScanTile(32, 32, 4, 2))  # fmt: skip
SINGLE_TILES = (ScanTile(8, 1, 1), ScanTile(8, 1, 4), ScanTile(16, 1, 2), ScanTile(16, 1, 4), ScanTile(32, 1, 4),
                ScanTile(32, 1, 8), ScanTile(64, 1, 8))  # fmt: skip
DECODES = (1, 4, 16, 64)
PREFILLS = ((2048,), (8192,), (512,) * 16, (1,) * 32 + (2048,))


class Scan:
    """Arguments of one layer of Mamba2 whose inputs are parts of projections, and several states."""

    def __init__(self, model: str, new_tokens: tuple[int, ...], layers: int = 1) -> None:
        heads, dim, groups, n = MODELS[model]
        tokens, count, inner, shared = sum(new_tokens), len(new_tokens), heads * dim, groups * n
        convolved = torch.randn(tokens, inner + 2 * shared, device="cuda", dtype=torch.bfloat16)
        x, b, c = convolved.split([inner, shared, shared], 1)
        dt = torch.randn(tokens, heads + 64, device="cuda", dtype=torch.bfloat16)[:, 32:-32]
        self.inputs = x.view(tokens, heads, dim), dt, b.view(tokens, groups, n) / 8, c.view(tokens, groups, n) / 8
        self.constants = -16 * torch.rand(heads, device="cuda"), torch.randn(heads, device="cuda") - 4
        self.skip = torch.randn(heads, device="cuda")
        self.states = [torch.randn(count + 1, heads, dim, n, device="cuda") for _ in range(layers)]
        self.rows = sequences(new_tokens)

    def operands(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The first eight arguments."""
        return *self.inputs, *self.constants, self.skip, state

    def run(self, tile: ScanTile) -> None:
        """Every state once."""
        for state in self.states:
            scan_in(tile, self.operands(state), self.rows[0], self.rows[1], self.rows[3])


def sequences(new_tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], bool]:
    """What ops take."""
    first_rows = torch.tensor([0, *new_tokens], device="cuda").cumsum(0).int()
    return first_rows, torch.randperm(len(new_tokens), device="cuda").int(), new_tokens, max(new_tokens) == 1


def compared(name: str, got: torch.Tensor, expected: torch.Tensor) -> str:
    """Relative error in the Euclidean norm, of numbers that were rounded to 8 bits on the way."""
    error = float((got.double() - expected).norm() / expected.norm())
    return f"{name} {error:.1e} {'ok' if error < 8e-3 else 'WRONG'}"


def check() -> None:
    """Both ops at real sizes; and the same bits at every run."""
    for new_tokens in ((1,), (1,) * 5, (700, 1, 64, 65, 3), (2,) * 40):
        for model in MODELS:
            case = Scan(model, new_tokens)
            state, exact = case.states[0].clone(), case.states[0].double()
            y = state_space_scan_triton(*case.operands(state), *case.rows)
            again = state_space_scan_triton(*case.operands(case.states[0].clone()), *case.rows)
            wide = (*(each.double() for each in (*case.inputs, *case.constants, case.skip)), exact)
            expected = state_space_scan(*wide, *case.rows)
            words = compared("y", y, expected), compared("state", state, exact)
            print(
                f"{model:16}{str(new_tokens)[:28]:30}", *words, "" if torch.equal(y, again) else "DIFFERS", flush=True
            )
        tokens, count = sum(new_tokens), len(new_tokens)
        x, dt = torch.randn(2, tokens, CHANNELS, device="cuda", dtype=torch.bfloat16)
        b, c = torch.randn(2, tokens, SIZE, device="cuda", dtype=torch.bfloat16)
        rates, skip = -16 * torch.rand(CHANNELS, SIZE, device="cuda"), torch.randn(CHANNELS, device="cuda")
        state, rows = torch.randn(count + 1, CHANNELS, SIZE, device="cuda"), sequences(new_tokens)
        exact = state.double()
        expected = selective_scan(*(each.double() for each in (x, dt, b, c, rates, skip)), exact, *rows)
        y = selective_scan_triton(x, dt, b, c, rates, skip, state, *rows)
        words = compared("y", y, expected), compared("state", state, exact)
        print(f"{'falcon-mamba-7b':16}{str(new_tokens)[:28]:30}", *words, flush=True)


def check_tiles() -> None:
    """Every tile on sequences of many chunks, ten times each: products for groups of warps went wrong now and then."""
    for model in MODELS:
        case = Scan(model, (700, 1, 64, 65, 3))
        exact = case.states[0].double()
        wide = (*(each.double() for each in (*case.inputs, *case.constants, case.skip)), exact)
        expected = state_space_scan(*wide, *case.rows)
        for tile in (*CHUNKS, *MORE):
            errors = []
            for _ in range(10):
                y = scan_in(tile, case.operands(case.states[0].clone()), case.rows[0], case.rows[1], False)
                errors.append(float((y.double() - expected).norm() / expected.norm()))
            print(
                f"{model:16}{tile!s:60} worst of ten {max(errors):.1e} {'ok' if max(errors) < 8e-3 else 'WRONG'}",
                flush=True,
            )


def table(cases: list[tuple[str, Scan]], tiles: tuple[ScanTile, ...]) -> None:
    """Microseconds of a layer."""
    prepare([partial(case.run, tile) for _, case in cases for tile in tiles])
    print(f"{'us of a layer':60}" + "".join(f"{name:>24}" for name, _ in cases))
    for tile in tiles:
        times = [attempt(partial(case.run, tile)) / len(case.states) for _, case in cases]
        print(f"{tile!s:60}" + "".join(f"{each * 1e6:24.1f}" for each in times), flush=True)


def decode() -> None:
    """One token of every sequence; what reading and writing the states takes at 4.0 TB/s is in the last line."""
    for model, (heads, dim, _, n) in MODELS.items():
        table([(f"{model} {count}", Scan(model, (1,) * count, 8)) for count in DECODES], SINGLE_TILES)
        print(f"{'memory':60}" + "".join(f"{count * heads * dim * n * 8 / 4e6:24.1f}" for count in DECODES))


def prefill() -> None:
    """Chunks, and Mamba's scan of 2048 tokens."""
    for model in MODELS:
        cases = [(f"{model[:9]} {max(counts)}x{len(counts)}", Scan(model, counts)) for counts in PREFILLS]
        table(cases, (*CHUNKS, *MORE))
    x, dt = torch.randn(2, 2048, CHANNELS, device="cuda", dtype=torch.bfloat16)
    b, c = torch.randn(2, 2048, SIZE, device="cuda", dtype=torch.bfloat16)
    rates, skip = -16 * torch.rand(CHANNELS, SIZE, device="cuda"), torch.randn(CHANNELS, device="cuda")
    state = torch.randn(1, CHANNELS, SIZE, device="cuda")
    run = partial(selective_scan_triton, x, dt, b, c, rates, skip, state, *sequences((2048,)))
    print(f"falcon-mamba-7b, 2048 tokens: {attempt(run) * 1e6:.0f} us")  # type: ignore[arg-type]


def main() -> None:
    """Run what the command line names."""
    began = time.perf_counter()
    torch.manual_seed(0)
    overlap.adapt("sm_{}{}".format(*torch.cuda.get_device_capability()))
    print(torch.cuda.get_device_name(), torch.__version__)
    for part in (check, check_tiles, decode, prefill):
        if not sys.argv[1:] or part.__name__ in sys.argv[1:]:
            part()
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
