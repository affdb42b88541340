"""The scans of Mamba2 and Mamba against their recurrence in float64: chunks, single tokens, and states across calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from samovar.kernels.op import Op
from samovar.kernels.selective_scan import selective_scan
from samovar.kernels.state_space_scan import CHUNK, state_space_scan

OPS: list[Op[..., torch.Tensor]] = [state_space_scan, selective_scan]
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def recurrence(
    op: Op[..., Any], x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *rest: Any
) -> Any:
    """(y, state) by one token after the other, in float64."""
    x, dt, b, c, *rest = (each.double() if is_float(each) else each for each in (x, dt, b, c, *rest))
    if op is state_space_scan:
        rates, bias, skip, state, _, rows, counts, _, *limit = rest
        rates, skip = rates[:, None, None], skip[:, None]
        step = softplus(dt + bias).clamp(*(limit[0] if limit else (0.0, float("inf"))))[:, :, None, None]
        b, c = (each.repeat_interleave(x.shape[1] // each.shape[1], 1)[:, :, None] for each in (b, c))
    else:
        rates, skip, state, _, rows, counts, _ = rest
        step, b, c = softplus(dt)[..., None], b[:, None], c[:, None]
    state, y, at = state.clone(), torch.empty_like(x), 0
    for row, count in zip(rows.tolist(), counts, strict=True):
        for token in range(at, at + count):
            added = step[token] * x[token, ..., None] * b[token]
            state[row] = state[row] * (step[token] * rates).exp() + added
            y[token] = (state[row] * c[token]).sum(-1) + skip * x[token]
        at += count
    return y, state


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def fresh(arguments: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    return [a.to(dtype, copy=True) if is_float(a) else a for a in arguments]


def state_of(op: Op[..., Any]) -> int:
    return op.reference.__code__.co_varnames.index("state")


@pytest.mark.parametrize("op", OPS, ids=lambda op: str(op.name))
def test_chunks_are_the_recurrence(op: Op[..., torch.Tensor]) -> None:
    """To the last digits in float64: the dual form is the same mathematics; in float32 within what sums of N terms
    of this size may lose."""
    assert op.make_examples is not None
    for example in op.make_examples():
        for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 64 * EPS)):
            given = fresh(example, dtype)
            expected, after = recurrence(op, *given)
            y = op(*given)
            assert float((y - expected).abs().max()) < allowed * float(expected.abs().max())
            assert float((given[state_of(op)] - after).abs().max()) < allowed * float(after.abs().max())


@pytest.mark.parametrize("op", OPS, ids=lambda op: str(op.name))
def test_any_cut_of_a_sequence_gives_the_same(op: Op[..., torch.Tensor]) -> None:
    """A sequence of two chunks and a half, all at once, in pieces, and token by token; other rows stay as they are."""
    total = 2 * CHUNK + CHUNK // 2
    make = {state_space_scan: state_space_arguments, selective_scan: selective_arguments}[op]
    inputs, constants, state = make(total)
    whole, results = state.clone(), []
    expected = call(op, inputs, constants, whole, [total])
    for cuts in (
        [1, CHUNK, total - CHUNK - 1],
        [CHUNK] * 2 + [CHUNK // 2],
        [1] * total,
        [CHUNK + 1, 1, total - CHUNK - 2],
    ):
        mine, at = state.clone(), 0
        for count in cuts:
            piece = tuple(each[at : at + count] for each in inputs)
            results.append(call(op, piece, constants, mine, [count]))
            at += count
        y = torch.cat(results)
        results.clear()
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=1e-4)
        assert torch.equal(mine[[0, 2]], state[[0, 2]])


def state_space_arguments(tokens: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]:
    inputs = torch.randn(tokens, 4, 8), torch.randn(tokens, 4), *torch.randn(2, tokens, 2, 16)
    return inputs, (-torch.rand(4) * 3, torch.randn(4), torch.randn(4)), torch.randn(3, 4, 8, 16)


def selective_arguments(tokens: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]:
    inputs = *torch.randn(2, tokens, 24), *torch.randn(2, tokens, 8)
    return inputs, (-torch.rand(24, 8) * 3, torch.randn(24)), torch.randn(3, 24, 8)


def call(
    op: Callable[..., torch.Tensor], inputs: Any, constants: Any, state: torch.Tensor, counts: list[int]
) -> torch.Tensor:
    first_rows = torch.tensor([0, *counts]).cumsum(0).int()
    single = all(count == 1 for count in counts)
    return op(*inputs, *constants, state, first_rows, torch.tensor([1], dtype=torch.int32), counts, single)


def test_fast_decay_does_not_overflow() -> None:
    """Sums of logarithms reach thousands within a chunk: only their differences may be raised."""
    inputs, (_, bias, skip), state = state_space_arguments(CHUNK)
    constants = torch.full((4,), -60.0), bias + 3, skip
    given = [*inputs, *constants, state.clone(), torch.tensor([0, CHUNK]), torch.tensor([1]), [CHUNK], False]
    expected, after = recurrence(state_space_scan, *given)
    y = state_space_scan(*given)
    assert bool(y.isfinite().all())
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(given[7].double(), after, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("op", OPS, ids=lambda op: str(op.name))
def test_a_bfloat16_sequence_keeps_a_float32_state(op: Op[..., torch.Tensor]) -> None:
    inputs, constants, state = {state_space_scan: state_space_arguments, selective_scan: selective_arguments}[op](40)
    rounded = tuple(each.bfloat16() for each in inputs)
    expected, found = state.clone(), state.clone()
    exact = call(op, tuple(each.float() for each in rounded), constants, expected, [40])
    y = call(op, rounded, constants, found, [40])
    assert y.dtype == torch.bfloat16 and torch.equal(found, expected)
    assert torch.equal(y, exact.bfloat16())
