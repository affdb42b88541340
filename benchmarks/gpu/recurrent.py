"""Gated delta net on a GPU: correct at real sizes against a recurrence in float64, then the parts of a layer, and tiles.

PYTHONPATH=. python3 benchmarks/gpu/recurrent.py [check] [decode] [prefill] [tiles], all by default. The shape is
Qwen3.5-27B's. Times are medians of graph replays over several layers' states, so that states come from memory.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import torch
from torch.nn.functional import softplus

from benchmarks.gpu.linear import attempt, prepare
from samovar.kernels import overlap
from samovar.kernels.causal_conv import causal_conv
from samovar.kernels.causal_conv.triton import CHUNK as CONV
from samovar.kernels.causal_conv.triton import SINGLE, ConvTile, causal_conv_triton
from samovar.kernels.causal_conv.triton import conv as conv_in
from samovar.kernels.gated_delta_rule import CHUNK, unit
from samovar.kernels.gated_delta_rule import triton as rule
from samovar.kernels.gated_delta_rule.tiles import STEP, PassTile, StepTile, pass_tile
from samovar.kernels.gated_rms_norm import gated_rms_norm
from samovar.kernels.gated_rms_norm.triton import gated_rms_norm_triton
from samovar.kernels.ragged import most_tiles

KEY_HEADS, HEADS, DIM, WIDTH = 16, 48, 128, 4
KEYS, VALUES = KEY_HEADS * DIM, HEADS * DIM
CHANNELS = 2 * KEYS + VALUES
PROJECTED = CHANNELS + VALUES + 2 * HEADS
STATE_BYTES = HEADS * DIM * DIM * 4
STEP_TILES = (StepTile(8, 1), StepTile(8, 2), StepTile(16, 1), StepTile(16, 2), StepTile(16, 4), StepTile(32, 2),
              StepTile(32, 4), StepTile(32, 8), StepTile(64, 4), StepTile(64, 8))  # fmt: skip
PASS_TILES = (PassTile(32, 4, 2), PassTile(32, 4, 3), PassTile(64, 4, 2), PassTile(64, 4, 3), PassTile(64, 8, 3))
CONV_TILES = (ConvTile(16, 256, 4), ConvTile(16, 512, 4), ConvTile(32, 128, 4), ConvTile(32, 256, 4), ConvTile(32, 256, 8),
              ConvTile(64, 128, 4), ConvTile(64, 128, 8), ConvTile(64, 64, 4), ConvTile(128, 64, 4))  # fmt: skip
SINGLE_TILES = (ConvTile(1, 64, 1), ConvTile(1, 128, 1), ConvTile(1, 128, 2), ConvTile(1, 256, 2), ConvTile(1, 512, 4))
DECODES = (1, 4, 16, 64)
PREFILLS = ((2048,), (8192,), (32768,), (512,) * 16, (1,) * 32 + (2048,))


class Layer:
    """One layer's constants, what it projected for a step, and states for it."""

    def __init__(self, new_tokens: tuple[int, ...], layers: int = 1) -> None:
        tokens, count = sum(new_tokens), len(new_tokens)
        self.new_tokens, self.all_single = new_tokens, max(new_tokens) == 1
        self.projected = torch.randn(tokens, PROJECTED, device="cuda", dtype=torch.bfloat16)
        self.filters = torch.randn(CHANNELS, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.5
        self.rates = -torch.rand(HEADS, device="cuda") * 16
        self.dt_bias = torch.randn(HEADS, device="cuda") - 4
        self.weight = torch.rand(DIM, device="cuda", dtype=torch.bfloat16) + 0.5
        self.states = [torch.randn(count + 1, HEADS, DIM, DIM, device="cuda") * 0.3 for _ in range(layers)]
        self.past = torch.randn(count + 1, CHANNELS, WIDTH - 1, device="cuda", dtype=torch.bfloat16)
        first_rows = torch.tensor([0, *new_tokens], device="cuda").cumsum(0).int()
        self.rows = first_rows, torch.randperm(count, device="cuda").int()
        self.conved = torch.randn(tokens, CHANNELS, device="cuda", dtype=torch.bfloat16)

    @property
    def sequences(self) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], bool]:
        """What ops take."""
        return *self.rows, self.new_tokens, self.all_single

    def operands(self, mixed: torch.Tensor) -> tuple[Any, ...]:
        """q, k, v, a, b, rates, dt_bias."""
        q, k, v = (each.view(len(mixed), -1, DIM) for each in torch.split(mixed, [KEYS, KEYS, VALUES], 1))
        b, a = torch.split(self.projected[:, CHANNELS + VALUES :], HEADS, 1)
        return q, k, v, a, b, self.rates, self.dt_bias

    def conv(self) -> torch.Tensor:
        """The op."""
        return causal_conv_triton(self.projected[:, :CHANNELS], self.filters, None, self.past, *self.sequences, "silu")

    def delta(self, state: torch.Tensor) -> torch.Tensor:
        """The op."""
        return rule.gated_delta_rule_triton(*[*self.operands(self.conved), state, *self.sequences])

    def norm(self) -> torch.Tensor:
        """The op."""
        y, gate = self.conved[:, -VALUES:], self.projected[:, CHANNELS : CHANNELS + VALUES]
        return gated_rms_norm_triton(y, gate, self.weight, 1e-6, DIM, True)

    def convs(self) -> None:
        """One for every state."""
        for _ in self.states:
            self.conv()

    def deltas(self) -> None:
        """One for every state."""
        for state in self.states:
            self.delta(state)

    def norms(self) -> None:
        """One for every state."""
        for _ in self.states:
            self.norm()

    def whole(self) -> None:
        """All of them, for every state."""
        for state in self.states:
            y = rule.gated_delta_rule_triton(*[*self.operands(self.conv()), state, *self.sequences]).flatten(1)
            gate = self.projected[:, CHANNELS : CHANNELS + VALUES]
            gated_rms_norm_triton(y, gate, self.weight, 1e-6, DIM, True)


def recurrence(layer: Layer, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states in float64, token by token, all sequences side by side."""
    q, k, v, a, b, rates, dt_bias = (each.double() for each in layer.operands(layer.conved))
    q, k = (unit(each).repeat_interleave(HEADS // KEY_HEADS, 1) for each in (q, k))
    kept, beta = (rates * softplus(a + dt_bias)).exp(), torch.sigmoid(b)
    first, rows = (each.tolist() for each in layer.rows)
    state, out = state.double(), torch.zeros_like(v)
    for step in range(max(layer.new_tokens)):
        live = [i for i, count in enumerate(layer.new_tokens) if count > step]
        at, mine = [first[i] + step for i in live], [rows[i] for i in live]
        memory = state[mine] * kept[at][:, :, None, None]
        added = beta[at][..., None] * (v[at] - (memory @ k[at][..., None])[..., 0])
        memory += added[..., None] * k[at][:, :, None]
        out[at] = (memory @ q[at][..., None])[..., 0] * DIM**-0.5
        state[mine] = memory
    return out, state


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def check() -> None:
    """Every op at real sizes; one piece against many; and the same bits at every run."""
    for new_tokens in ((1,), (1,) * 5, (700, 1, 64, 65, 3, 1), (63, 129), (2,) * 130):
        layer = Layer(new_tokens)
        rows = layer.sequences
        past = layer.past.float()
        plain = causal_conv(layer.projected[:, :CHANNELS].float(), layer.filters.float(), None, past, *rows, "silu")
        conv = max(error(layer.conv(), plain), error(layer.past[:-1], past[:-1]))
        gate = layer.projected[:, CHANNELS : CHANNELS + VALUES].float()
        plain = gated_rms_norm(layer.conved[:, -VALUES:].float(), gate, layer.weight.float(), 1e-6, DIM, True)
        norm = error(layer.norm(), plain)
        expected, ends = recurrence(layer, layer.states[0])
        state = layer.states[0].clone()
        got, again = layer.delta(state), layer.states[0].clone()
        same = torch.equal(got, layer.delta(again)) and torch.equal(state, again)
        spare = torch.equal(state[-1], layer.states[0][-1])
        errors = error(got, expected), error(state, ends)
        wrong = "" if max(conv, norm) < 5e-3 and max(errors) < 2e-2 and same and spare else "  WRONG"
        print(
            f"{str(new_tokens)[:40]:42} conv {conv:.1e} norm {norm:.1e} outputs {errors[0]:.1e} states {errors[1]:.1e} "
            f"same bits again: {same} others untouched: {spare}{wrong}"
        )


def decode() -> None:
    """us of each kernel of a layer for steps of one token each."""
    cases = {batch: Layer((1,) * batch, max(1, 32 // batch)) for batch in DECODES}
    prepare([case.whole for case in cases.values()])
    print(f"{'batch':>7}{'conv':>8}{'rule':>8}{'norm':>8}{'all':>8}  us; GB/s of the rule")
    for batch, case in cases.items():
        count = len(case.states)
        parts = (case.convs, case.deltas, case.norms, case.whole)
        conv, delta, norm, whole = (attempt(each) / count for each in parts)
        cells = "".join(f"{each * 1e6:8.1f}" for each in (conv, delta, norm, whole))
        print(f"{batch:7}{cells}  {2 * batch * STATE_BYTES / delta / 1e9:6.0f}", flush=True)


def prefill() -> None:
    """us of each kernel of a layer for chunks of prompts; TFLOP/s are those of the recurrence by chunks."""
    cases = [Layer(new_tokens) for new_tokens in PREFILLS]
    prepare([case.whole for case in cases])
    print(f"{'tokens':>24}{'conv':>8}{'rule':>8}{'norm':>8}{'all':>8}  us; TFLOP/s of the rule; GB/s of the conv")
    for case in cases:
        tokens = sum(case.new_tokens)
        conv, norm = attempt(case.conv), attempt(case.norm)
        delta, whole = attempt(partial(case.delta, case.states[0])), attempt(case.whole)
        work = tokens * HEADS * (3 * 2 * DIM * DIM + 2 * 2 * CHUNK * DIM + 2 * 2 * CHUNK * DIM + 4 * 2 * CHUNK * CHUNK)
        cells = "".join(f"{each * 1e6:8.0f}" for each in (conv, delta, norm, whole))
        label = f"{len(case.new_tokens)} of up to {max(case.new_tokens)}"
        print(f"{label:>24}{cells}  {work / delta / 1e12:6.0f}{4 * tokens * CHANNELS / conv / 1e9:8.0f}", flush=True)


def tiles() -> None:
    """Every tile of the step, and of the pass over chunks; the rest of what chunks take by itself."""
    print("step: " + "  ".join(f"{batch}" for batch in DECODES))
    steps = {batch: Layer((1,) * batch, max(1, 32 // batch)) for batch in DECODES}
    passes = [Layer(new_tokens) for new_tokens in PREFILLS[:4]]
    runs = [partial(step, case, tile) for tile in STEP_TILES for case in steps.values()]
    runs += [partial(conv, case, tile) for tile in SINGLE_TILES for case in steps.values()]
    runs += [partial(conv, case, tile) for tile in CONV_TILES for case in passes]
    prepare([*runs, *(partial(chunks, case, tile) for tile in PASS_TILES for case in passes)])
    for tile in STEP_TILES:
        times = [attempt(partial(step, case, tile)) / len(case.states) for case in steps.values()]
        print(
            f"{tile!s:40}" + "".join(f"{each * 1e6:8.1f}" for each in times), "<-" if tile == STEP else "", flush=True
        )
    for single in SINGLE_TILES:
        times = [attempt(partial(conv, case, single)) for case in steps.values()]
        line = "".join(f"{each * 1e6:8.1f}" for each in times)
        print(f"{single!s:44}{line}", "<-" if single == SINGLE else "", flush=True)
    print("chunks: " + "  ".join(f"{len(case.new_tokens)} of {max(case.new_tokens)}" for case in passes))
    for width in PASS_TILES:
        times = [attempt(partial(chunks, case, width)) for case in passes]
        line = "".join(f"{each * 1e6:8.0f}" for each in times)
        print(f"{width!s:44}{line}", "<-" if width == pass_tile(rule._shared, 2) else "", flush=True)
    for many in CONV_TILES:
        times = [attempt(partial(conv, case, many)) for case in passes]
        line = "".join(f"{each * 1e6:8.0f}" for each in times)
        print(f"{many!s:44}{line}", "<-" if many == CONV else "", flush=True)
    times = [attempt(partial(prepared, case)) for case in passes]
    print(f"{'prepare alone':44}" + "".join(f"{each * 1e6:8.0f}" for each in times), flush=True)


def conv(case: Layer, tile: ConvTile) -> None:
    """One convolution."""
    x = case.projected[:, :CHANNELS]
    conv_in(tile, x, case.filters, None, case.past, case.rows, case.all_single, "silu")


def step(case: Layer, tile: StepTile) -> None:
    """One token of every sequence in all layers."""
    q, k, v, *gates = case.operands(case.conved)
    for state in case.states:
        rule.step(tile, q, k, v, tuple(gates), state, case.rows, v.new_empty(v.shape), True, 1.0)


def chunks(case: Layer, tile: PassTile) -> None:
    """All chunks of one layer."""
    q, k, v, *gates = case.operands(case.conved)
    rule.chunks(tile, q, k, v, tuple(gates), case.states[0], case.rows, v.new_empty(v.shape), 1.0)


def prepared(case: Layer) -> None:
    """What chunks need before the pass."""
    q, k, v, *gates = case.operands(case.conved)
    number = most_tiles(len(q), len(case.new_tokens), CHUNK)
    rule.prepare_chunks(q, k, v.shape[1], tuple(gates), case.rows, number, 1.0)


def main() -> None:
    """Run what the command line names."""
    began = time.perf_counter()
    torch.manual_seed(0)
    overlap.adapt("sm_{}{}".format(*torch.cuda.get_device_capability()))
    print(torch.cuda.get_device_name(), torch.__version__)
    for part in (check, decode, prefill, tiles):
        if not sys.argv[1:] or part.__name__ in sys.argv[1:]:
            part()
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
