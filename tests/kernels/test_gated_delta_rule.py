"""The gated delta rule by chunks against its recurrence in float64: ragged lengths, any cut, and gates at their ends."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import softplus

from samovar.kernels.causal_conv import causal_conv
from samovar.kernels.gated_delta_rule import AT_ONCE, CHUNK, gated_delta_rule

BOUND = 5e-6
"""Of float32 sums over up to 64 tokens and 40 features, relative to results of size 1."""


class Sequences:
    """Operands for sequences of the given lengths, in float32, and states; some rows belong to nobody."""

    def __init__(self, lengths: list[int], heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (40, 12)) -> None:
        torch.manual_seed(len(lengths))
        tokens, (key_heads, count), (dk, dv) = sum(lengths), heads, dims
        self.lengths = lengths
        self.q, self.k = torch.randn(2, tokens, key_heads, dk)
        self.v, self.a, self.b = torch.randn(tokens, count, dv), *torch.randn(2, tokens, count)
        self.rates, self.dt_bias = -4 * torch.rand(count) - 0.01, torch.randn(count) - 2
        self.state = torch.randn(len(lengths) + 2, count, dv, dk)
        self.rows = torch.randperm(len(lengths) + 2)[: len(lengths)].int()
        self.beta_scale = 1.0

    def run(self, cuts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states, in as many steps as there are `cuts`, each with the tokens of every sequence in it."""
        state, done = self.state.clone(), [0] * len(self.lengths)
        firsts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        out = torch.full_like(self.v, torch.nan)
        for cut in cuts:
            live = [i for i, count in enumerate(cut) if count]
            at = torch.cat([torch.arange(firsts[i] + done[i], firsts[i] + done[i] + cut[i]) for i in live])
            counts = [cut[i] for i in live]
            first_rows = torch.tensor([0, *counts]).cumsum(0).int()
            q, k, v, a, b = (each[at] for each in (self.q, self.k, self.v, self.a, self.b))
            gates = (a, b, self.rates, self.dt_bias)
            rows = (first_rows, self.rows[live], counts, max(counts) == 1)
            out[at] = gated_delta_rule(q, k, v, *gates, state, *rows, self.beta_scale)
            done = [before + new for before, new in zip(done, cut, strict=True)]
        assert done == self.lengths
        return out, state

    def recurrence(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The definition, token by token, in float64."""
        q, k, v, a, b, rates, dt_bias, state = (
            each.double() for each in (self.q, self.k, self.v, self.a, self.b, self.rates, self.dt_bias, self.state)
        )
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        q, k = (each.repeat_interleave(v.shape[1] // k.shape[1], 1) for each in (q, k))
        kept, beta = (rates * softplus(a + dt_bias)).exp(), self.beta_scale * torch.sigmoid(b)
        out, token = torch.zeros_like(v), 0
        for row, count in zip(self.rows.tolist(), self.lengths, strict=True):
            memory = state[row].mT.clone()
            for _ in range(count):
                memory *= kept[token][:, None, None]
                missing = v[token] - torch.einsum("hk,hkv->hv", k[token], memory)
                memory += torch.einsum("hk,hv->hkv", k[token], beta[token][:, None] * missing)
                out[token] = torch.einsum("hk,hkv->hv", q[token], memory) * q.shape[-1] ** -0.5
                token += 1
            state[row] = memory.mT
        return out, state


def check(case: Sequences, cuts: list[list[int]], bound: float = BOUND) -> None:
    """The same as the recurrence, and untouched where nobody writes."""
    out, state = case.run(cuts)
    expected, ends = case.recurrence()
    assert float((out - expected).abs().max()) < bound * max(1.0, float(expected.abs().max()))
    assert float((state - ends).abs().max()) < bound * max(1.0, float(ends.abs().max()))
    others = [row for row in range(len(state)) if row not in case.rows.tolist()]
    assert torch.equal(state[others], case.state[others])


@pytest.mark.parametrize(
    "lengths", [[1], [2], [CHUNK], [CHUNK + 1, 1, CHUNK - 1], [3, 200, 1], [AT_ONCE * CHUNK + 70]], ids=str
)
def test_chunks_are_the_recurrence(lengths: list[int]) -> None:
    check(Sequences(lengths), [lengths])


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (1, 6)], ids=str)
@pytest.mark.parametrize("dims", [(5, 3), (7, 33)], ids=str)
def test_odd_sizes(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(Sequences([67, 1, 5], heads, dims), [[67, 1, 5]])


def test_any_cut_gives_the_same() -> None:
    """Resumed from the state at every kind of place, beside other sequences in other kinds of steps."""
    lengths = [150, 90]
    for cuts in ([[1, 0], [63, 64], [64, 1], [1, 25], [21, 0]], [[149, 1], [1, 88], [0, 1]], [[75, 45], [75, 45]]):
        check(Sequences(lengths), cuts)


def test_one_token_at_a_time() -> None:
    check(Sequences([70, 70]), [[1, 1]] * 70)


@pytest.mark.parametrize(
    ("rate", "shift"), [(-1e-6, -10.0), (-16.0, 8.0), (-300.0, 3.0)], ids=["keeps all", "forgets", "underflows"]
)
def test_decays_at_their_ends(rate: float, shift: float) -> None:
    """Nothing forgotten for hundreds of tokens; and sums of logarithms far below what float32 can raise e to."""
    case = Sequences([300, 2])
    case.rates.fill_(rate)
    case.dt_bias.fill_(shift)
    check(case, [[300, 2]], 2e-5)


def test_a_decay_of_nothing_between_decays_of_everything() -> None:
    """Differences of large sums: a token that keeps all right behind others that keep nothing."""
    case = Sequences([100])
    case.rates.fill_(-50.0)
    case.a[::2], case.a[1::2] = -30.0, 60.0
    check(case, [[100]])


@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_equal_keys(beta_scale: float) -> None:
    """The same token again and again is the worst that the triangular system can be."""
    case = Sequences([130])
    case.k[:] = case.k[:1]
    case.b.fill_(20.0)
    case.rates.fill_(-1e-4)
    case.beta_scale = beta_scale
    check(case, [[130]], 2e-4)


def test_convolutions_resume_anywhere() -> None:
    """Cut into pieces shorter and longer than what a convolution sees."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, 6), torch.randn(6, 4), torch.randn(6)
    padded = torch.cat((torch.zeros(3, 6), x)).double()
    expected = torch.stack([(padded[t : t + 4] * weight.T).sum(0) + bias for t in range(40)])
    for sizes in ([40], [1] * 40, [2, 1, 3, 4, 30], [39, 1], [1, 2, 37]):
        state, found, first = torch.zeros(3, 6, 3), [], 0
        for size in sizes:
            rows = (torch.tensor([0, size]).int(), torch.tensor([1]).int(), [size], size == 1)
            found.append(causal_conv(x[first : first + size], weight, bias, state, *rows))
            first += size
        assert float((torch.cat(found) - expected).abs().max()) < 2e-6
        assert torch.equal(state[1].T, x[-3:]) and not state[[0, 2]].any()
