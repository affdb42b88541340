"""Kernels of gated delta nets in Triton: against their references, with every kind of tile, and beside poison."""

from __future__ import annotations

import pytest
import torch

from samovar.kernels.causal_conv import causal_conv
from samovar.kernels.causal_conv.triton import ConvTile, conv
from samovar.kernels.gated_delta_rule import gated_delta_rule
from samovar.kernels.gated_delta_rule import triton as rule
from samovar.kernels.gated_delta_rule.tiles import NARROW, WIDE, PassTile, StepTile, pass_tile
from samovar.kernels.gated_rms_norm import gated_rms_norm
from samovar.kernels.gated_rms_norm.triton import gated_rms_norm_triton
from samovar.kernels.op import OPS, Target, compare, load_ops
from samovar.kernels.ragged import most_tiles
from samovar.kernels.triton_launch import SHARED_BYTES

load_ops("cuda")
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["causal_conv", "gated_delta_rule", "gated_rms_norm", "sigmoid_mul"])
def test_each_op_matches_its_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.make_examples is not None
    for example in op.make_examples():
        assert compare(op, op.impls["triton"].function, example, dtype, "cpu") is None


def rows_of(new_tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """first_rows, state_rows; rows 0 and the last belong to nobody."""
    first_rows = torch.tensor([0, *new_tokens]).cumsum(0).int()
    return first_rows, (torch.randperm(len(new_tokens)) + 1).int()


class Layer:
    """Operands that are views of wider rows, as a layer has them; all around is NaN."""

    def __init__(self, new_tokens: list[int], key_heads: int, heads: int, dk: int, dv: int) -> None:
        tokens, count = sum(new_tokens), len(new_tokens)
        self.new_tokens, self.rows = new_tokens, rows_of(new_tokens)
        widths = [key_heads * dk, key_heads * dk, heads * dv, heads, heads]
        wide = torch.full((tokens + 2, sum(widths) + 7), torch.nan)
        wide[1:-1, 3:-4] = torch.randn(tokens, sum(widths))
        parts = wide[1:-1, 3:-4].split(widths, 1)  # type: ignore[no-untyped-call]
        self.q, self.k, self.v = (p.view(tokens, -1, d) for p, d in zip(parts, (dk, dk, dv), strict=False))
        self.gates = (parts[3], parts[4], -2 * torch.rand(heads), torch.randn(heads) - 1)
        self.state = torch.full((count + 2, heads, dv, dk), torch.nan)
        self.state[1:-1] = torch.randn(count, heads, dv, dk)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Results and states of the reference."""
        state, single = self.state.clone(), max(self.new_tokens) == 1
        operands = (self.q, self.k, self.v, *self.gates)
        return gated_delta_rule(*operands, state, *self.rows, self.new_tokens, single), state

    def check(self, out: torch.Tensor, state: torch.Tensor) -> None:
        """The same, and NaN where it was."""
        expected, ends = self.expected()
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(state, ends, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("tile", [StepTile(8, 1), StepTile(16, 4), StepTile(64, 4)], ids=str)
def test_every_tile_of_a_step(tile: StepTile) -> None:
    case = Layer([1] * 4, 2, 4, 24, 20)
    state, out = case.state.clone(), torch.full_like(case.v, torch.nan)
    rule.step(tile, case.q, case.k, case.v, case.gates, state, case.rows, out, True, 1.0)
    case.check(out, state)


@pytest.mark.parametrize("tile", [WIDE, NARROW, PassTile(16, 4, 1)], ids=str)
def test_every_tile_of_a_pass(tile: PassTile) -> None:
    """Whole chunks, one token more and less, and a pair of tokens."""
    case = Layer([64, 65, 2, 127], 1, 2, 24, 40)
    state, out = case.state.clone(), torch.full_like(case.v, torch.nan)
    rule.chunks(tile, case.q, case.k, case.v, case.gates, state, case.rows, out, 1.0)
    case.check(out, state)


def test_single_tokens_beside_chunks() -> None:
    """Each kernel leaves the other's sequences alone."""
    for new_tokens in ([1, 70, 1, 1, 3], [66, 1], [1, 2]):
        case = Layer(new_tokens, 2, 2, 16, 16)
        state = case.state.clone()
        operands = (case.q, case.k, case.v, *case.gates)
        out = rule.gated_delta_rule_triton(*operands, state, *case.rows, new_tokens, False)
        case.check(out, state)


def test_more_sequences_than_one_look_finds() -> None:
    new_tokens = [2, 1, 3] * 50
    x, weight, state = torch.randn(300, 3), torch.randn(3, 2), torch.randn(152, 3, 1)
    rows, ends = rows_of(new_tokens), state.clone()
    expected = causal_conv(x, weight, None, ends, *rows, new_tokens, False)
    torch.testing.assert_close(conv(ConvTile(32, 16, 4), x, weight, None, state, rows, False, None), expected)
    torch.testing.assert_close(state, ends)


def test_equal_keys_and_decays_at_their_ends() -> None:
    """What is hardest to invert; and exponents far below what float32 can raise e to."""
    case = Layer([100, 64], 1, 2, 16, 16)
    case.k[:100] = case.k[:1]
    case.gates[1][:100] = 20.0
    case.gates[2][:] = torch.tensor([-1e-4, -300.0])
    state = case.state.clone()
    operands = (case.q, case.k, case.v, *case.gates)
    out = rule.gated_delta_rule_triton(*operands, state, *case.rows, [100, 64], False)
    expected, ends = case.expected()
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(state, ends, atol=2e-4, rtol=2e-4, equal_nan=True)


def test_tiles_are_numbered_without_gaps_of_work() -> None:
    """Every sequence has as many numbers as it has tiles, and they follow one another."""
    for new_tokens in ([1], [64, 1, 65], [63, 63, 63, 2], [0, 5, 0, 130]):
        firsts, end = [sum(new_tokens[:i]) for i in range(len(new_tokens))], 0
        for i, (first, count) in enumerate(zip(firsts, new_tokens, strict=True)):
            begin = first // 64 + i
            assert begin >= end
            end = begin + -(-count // 64)
        assert end <= most_tiles(sum(new_tokens), len(new_tokens), 64)


@pytest.mark.parametrize("tile", [ConvTile(1, 32, 1), ConvTile(16, 64, 2), ConvTile(64, 16, 4)], ids=str)
@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_every_tile_of_a_convolution(tile: ConvTile, width: int) -> None:
    """Sequences shorter than what is seen, and tiles that begin in the middle of one."""
    for new_tokens in ([1, 1, 1], [70, 1, 2, 5]):
        count, channels = len(new_tokens), 37
        wide = torch.full((sum(new_tokens) + 2, channels + 3), torch.nan)
        x = wide[1:-1, 1 : channels + 1]
        x[:] = torch.randn(x.shape)
        weight, state = torch.randn(channels, width), torch.full((count + 2, channels, width - 1), torch.nan)
        state[1:-1] = torch.randn(count, channels, width - 1)
        rows, single, ends = rows_of(new_tokens), max(new_tokens) == 1, state.clone()
        expected = causal_conv(x, weight, None, ends, *rows, new_tokens, single, "silu")
        if tile.tokens > 1 or single:
            out = conv(tile, x, weight, None, state, rows, single, "silu")
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(state, ends, equal_nan=True)


def test_gates_may_lie_apart() -> None:
    wide = torch.full((5, 100), torch.nan)
    gate = wide[:, 20:84]
    gate[:] = torch.randn(5, 64)
    x, weight = torch.randn(5, 64), torch.randn(16)
    expected = gated_rms_norm(x, gate, weight, 1e-6, 16, True)
    torch.testing.assert_close(gated_rms_norm_triton(x, gate, weight, 1e-6, 16, True), expected, atol=1e-5, rtol=1e-5)


def test_chips_and_their_tiles() -> None:
    """No tile for chips without matrix instructions; narrow ones where shared memory is small, or numbers are wide."""
    assert "sm_75" in str(rule.accepts(Target("cuda", "sm_70", torch.float16)))
    for architecture in (80, 90, 120):
        assert rule.accepts(Target("cuda", f"sm_{architecture}", torch.bfloat16)) is None
        assert rule._shared == SHARED_BYTES[architecture]
    rule.accepts(Target("cuda", "sm_90", torch.bfloat16))
    assert pass_tile(SHARED_BYTES[90], 2) == WIDE
    assert pass_tile(SHARED_BYTES[120], 2) == pass_tile(SHARED_BYTES[90], 4) == NARROW
