"""Every op's implementation for GPUs against its reference on the GPU: at its examples, and at sizes that models have.

Without a GPU the implementations for CPUs are compared, in the same ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import samovar.kernels
from samovar.kernels.op import OPS, Op, Target, cast_arguments, compare, load_ops
from samovar.kernels.sample_tokens.settings import greedy, make

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FOLDER = Path(samovar.kernels.__file__).parent
SUMS_OF_FP8 = {torch.float32: (3e-3, 1e-4)}
"""Hopper's tensor cores keep 13 bits behind the largest number of a sum of FP8 products: each of four instructions for 128
inputs loses up to 2 ** -13 of what is about 3 here, in two groups. Promotion between them is in float32 already; one
instruction alone loses as much, so that no setting makes these sums exact."""
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py") if "@op(" in path.read_text())
"""Found by their folders: collecting tests must not import kernels."""

BOUND = {torch.float32: 3e-5, torch.bfloat16: 1.5e-2, torch.float16: 2.5e-3}
"""Norm of the error, as a part of the norm of the result."""

LLAMA = {"hidden": 4096, "heads": 32, "kv_heads": 8, "dim": 128, "inner": 14336, "vocab": 128256}
QWEN = {"hidden": 1024, "heads": 16, "kv_heads": 8, "dim": 128, "inner": 3072, "vocab": 151936}
TINY = {"hidden": 256, "heads": 4, "kv_heads": 2, "dim": 64, "inner": 512, "vocab": 1003}
ROWS = {"cuda": (1, 2, 7, 32, 130, 256, 2048), "cpu": (1, 5)}
BLOCKS, BLOCK = 300, 32


def rand(*shape: int) -> torch.Tensor:
    """Normal values, in float32 on the device that torch makes tensors on."""
    return torch.randn(*shape)


def weight(rows: int, columns: int) -> torch.Tensor:
    """A matrix whose products are of order one."""
    return torch.randn(rows, columns) / columns**0.5


def slots(rows: int) -> torch.Tensor:
    """Where rows go in a cache; every fifth nowhere."""
    found = torch.randperm(BLOCKS * BLOCK)[:rows]
    found[4::5] = -1
    return found


def caches(m: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as they lie on a GPU: a block's tokens of one head together."""
    shape = (BLOCKS, m["kv_heads"], BLOCK, m["dim"])
    return rand(*shape).transpose(1, 2), rand(*shape).transpose(1, 2)


def tables(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as the op `rope` takes them, for positions up to a hundred thousand."""
    angle = torch.randint(0, 100_000, (rows, 1, 1)) * 500000.0 ** -(torch.arange(dim // 2) * 2 / dim)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def linears(m: dict[str, int]) -> Iterator[tuple[int, int]]:
    """(in, out) of a model's products."""
    yield m["hidden"], (m["heads"] + 2 * m["kv_heads"]) * m["dim"]
    yield m["heads"] * m["dim"], m["hidden"]
    yield m["hidden"], 2 * m["inner"]
    yield m["inner"], m["hidden"]


def _norm_linear(m: dict[str, int], n: int) -> Iterator[tuple[Any, ...]]:
    for columns, rows in linears(m):
        if columns == m["hidden"]:
            yield 3 * rand(n, columns), torch.rand(columns) + 0.5, 1e-5, weight(rows, columns)


def _norm_gated_linear(m: dict[str, int], n: int) -> Iterator[tuple[Any, ...]]:
    for activation in ("silu", "gelu"):
        args = 3 * rand(n, m["hidden"]), torch.rand(m["hidden"]) + 0.5, 1e-5, weight(2 * m["inner"], m["hidden"])
        yield *args, activation


def _rope_write_kv(m: dict[str, int], n: int) -> Iterator[tuple[Any, ...]]:
    for norms in ((None, None), (torch.rand(m["dim"]) + 0.5, torch.rand(m["dim"]) + 0.5)):
        qkv = rand(n, m["heads"] + 2 * m["kv_heads"], m["dim"])
        yield qkv, *tables(n, m["dim"]), *caches(m), slots(n), *norms, 1e-6, m["heads"]


def _sample_tokens(m: dict[str, int], n: int) -> Iterator[tuple[Any, ...]]:
    if n > 256:
        return
    kinds = [
        make(0.0),
        make(1.0),
        make(0.7, top_k=40),
        make(1.3, top_p=0.9),
        make(1.0, min_p=0.02),
        make(0.9, 9, 0.9, 0.01),
    ]
    table = greedy(n + 1)
    for slot in range(n):
        table[slot] = kinds[slot % len(kinds)]
        table[slot]["key"] = slot * 7919
    settings = torch.from_numpy(table.view(np.int64).reshape(n + 1, -1))
    at, last = torch.randperm(n).to(torch.int32), torch.zeros(n + 1, dtype=torch.int64)
    yield rand(n, m["vocab"]) * 3, settings, at, torch.arange(n, dtype=torch.int32), last


def _expert_products(m: dict[str, int], n: int) -> Iterator[tuple[Any, ...]]:
    """Narrow experts, as many as a rank may hold, of which each token has three; half of the first example's elsewhere."""
    count, inner = 12, m["inner"] // 8
    ids = torch.rand(n, count).argsort(-1)[:, :3].int()
    up, down = weight(count * 2 * inner, m["hidden"]), weight(count * m["hidden"], inner)
    wide = up.view(count, 2 * inner, -1), down.view(count, m["hidden"], -1)
    routing, biases = torch.rand(n, 3), (rand(count, 2 * inner), rand(count, m["hidden"]))
    yield rand(n, m["hidden"]), ids, routing, *(w[:6] for w in wide), "silu", None, None, False, 0.0, 4
    yield rand(n, m["hidden"]), ids, routing, *wide, "clamped", *biases, True, 7.0, 0, rand(n, m["hidden"])


REAL: dict[str, Callable[[dict[str, int], int], Iterator[tuple[Any, ...]]]] = {
    "rms_norm": lambda m, n: iter(
        [
            (rand(n, m["hidden"]), torch.rand(m["hidden"]), 1e-5),
            (rand(n, m["heads"], m["dim"]), torch.rand(m["dim"]), 1e-6),
        ]
    ),
    "add_rms_norm": lambda m, n: iter([(rand(n, m["hidden"]), rand(n, m["hidden"]), torch.rand(m["hidden"]), 1e-5)]),
    "silu_mul": lambda m, n: iter([(rand(n, 2 * m["inner"]),)]),
    "gelu_mul": lambda m, n: iter([(rand(n, 2 * m["inner"]),)]),
    "rope": lambda m, n: iter(
        [(rand(n, m["heads"], m["dim"]), rand(n, m["kv_heads"], m["dim"]), *tables(n, m["dim"]))]
    ),
    "write_kv": lambda m, n: iter(
        [(rand(n, m["kv_heads"], m["dim"]), rand(n, m["kv_heads"], m["dim"]), *caches(m), slots(n))]
    ),
    "rope_write_kv": _rope_write_kv,
    "linear": lambda m, n: ((rand(n, columns), weight(rows, columns)) for columns, rows in linears(m)),
    "linear_add": lambda m, n: (
        (rand(n, columns), weight(rows, columns), rand(n, rows)) for columns, rows in linears(m)
    ),
    "norm_linear": _norm_linear,
    "norm_gated_linear": _norm_gated_linear,
    "logits": lambda m, n: iter([(rand(n, m["hidden"]), weight(m["vocab"], m["hidden"]))] if n <= 256 else []),
    "sample_tokens": _sample_tokens,
    "expert_products": _expert_products,
}
"""Op -> arguments in float32 for a model and a number of rows. Ops without a row here are compared at their examples."""


def implementations(name: str, device: str, dtype: torch.dtype) -> list[tuple[Op[..., Any], Any]]:
    """(op, implementation) of every one that accepts this device."""
    load_ops(device)
    architecture = ""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        architecture = f"sm_{major}{minor}"
    op = OPS[name]
    target = Target(device, architecture, dtype)
    found = [impl for impl in op.impls.values() if impl.refusal(target) is None]
    if not found:
        pytest.skip("nothing but the reference serves this device")
    return [(op, impl) for impl in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_examples(device: str, name: str, dtype: torch.dtype) -> None:
    """What the op itself declares, within the tolerance that it declares."""
    torch.manual_seed(0)
    for op, impl in implementations(name, device, dtype):
        assert op.make_examples is not None
        for index, example in enumerate(op.make_examples()):
            with patch.dict(op.tolerance, SUMS_OF_FP8 if device == "cuda" and name.startswith("scaled_linear") else {}):
                difference = compare(op, impl.function, example, dtype, device)
            assert difference is None, f"{name} by {impl.name}, example {index}: {difference}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(REAL))
def test_real_sizes(device: str, name: str, dtype: torch.dtype) -> None:
    """Against the reference in float32 on equally rounded arguments: the norm of the error, and no element far off."""
    found = implementations(name, device, dtype)
    torch.manual_seed(1)
    models = (TINY,) if device == "cpu" else (LLAMA, QWEN) if dtype == torch.bfloat16 else (LLAMA,)
    for model in models:
        for rows in ROWS[device]:
            if dtype == torch.float32 and rows > 300:
                continue  # float32 is for checking, and slow
            with torch.device(device) if name != "sample_tokens" else torch.device("cpu"):
                examples = list(REAL[name](model, rows))
            for example in examples:
                for op, impl in found:
                    check(op, impl, example, dtype, device)


def check(op: Op[..., Any], impl: Any, example: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    """Fail with what differs."""
    shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in example]
    given = cast_arguments(example, dtype, device)
    exact = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in given]
    exact = [a.clone() if isinstance(a, torch.Tensor) else a for a in exact]
    results = outputs(op, op.reference, tuple(exact)), outputs(op, impl.function, given)
    for expected, got in zip(*results, strict=True):
        where = f"{op.name} by {impl.name} in {dtype}, {shapes}"
        assert got.shape == expected.shape, where
        if not got.is_floating_point():
            # Drawn tokens: rounding may put one in a thousand on the other side of a border.
            assert int((got != expected).sum()) <= len(got) // 100, where
            continue
        assert bool(got.isfinite().all()), where
        error = got.double() - expected.double()
        size = float(expected.double().norm()) or 1.0
        assert float(error.norm()) <= BOUND[dtype] * size, f"{where}: {float(error.norm()) / size:.3g} of the norm"
        absolute, relative = op.tolerance_of(dtype)
        far = error.abs() > 4 * (max(absolute, BOUND[dtype]) + max(relative, BOUND[dtype]) * expected.double().abs())
        assert not bool(far.any()), (
            f"{where}: {int(far.sum())} elements are far off, by up to {float(error.abs().max()):.3g}"
        )


def outputs(op: Op[..., Any], function: Callable[..., Any], given: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a call returns and writes."""
    result = function(*given)
    names = op.reference.__code__.co_varnames
    returned = list(result) if isinstance(result, tuple) else [] if result is None else [result]
    places = [place for place in map(names.index, op.mutates) if place < len(given)]  # others were left out
    return [*returned, *(given[place] for place in places)]
