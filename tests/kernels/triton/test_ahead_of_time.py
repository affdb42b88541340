"""Every Triton kernel compiles for every architecture that is promised, without such a GPU, and fits into its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samovar.kernels.op import load_ops
from samovar.kernels.triton_launch import SHARED_BYTES
from tests.kernels.triton.processes import in_process

ARCHITECTURES = ("sm_70", "sm_80", "sm_90", "sm_120", "sm_121")


def compiled(architectures: str, dtypes: str, cache: Path, amount: str = "all") -> list[dict[str, Any]]:
    """One row per kernel."""
    printed = in_process("tests.kernels.triton.compile_ops", architectures, dtypes, amount, cache=cache)
    return [json.loads(line) for line in printed.splitlines()]


def check(rows: list[dict[str, Any]]) -> None:
    """No errors, shared memory within the architecture's, and no product whose operand is written while it is read."""
    assert not [row for row in rows if row["error"]], "\n".join(str(row) for row in rows if row["error"])
    limits = {f"sm_{number}": size for number, size in SHARED_BYTES.items()}
    too_big = [row for row in rows if row["shared"] > limits[row["arch"]]]
    assert not too_big, "\n".join(map(str, too_big))
    hasty = [row for row in rows if row["overwritten"]]
    assert not hasty, "\n".join(map(str, hasty))


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """The architecture that figures are promised for; every op with a Triton implementation is there."""
    rows = compiled("sm_90", "bfloat16", tmp_path, "few")
    check(rows)
    wanted = {op.name for op in load_ops("cuda").values() if any(name.startswith("triton") for name in op.impls)}
    assert wanted <= {row["owner"].partition(".")[0] for row in rows}
    assert any(row["owner"].startswith("attention") for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str, tmp_path: Path) -> None:
    """All dtypes that the architecture has."""
    check(compiled(architecture, "bfloat16,float16,float32", tmp_path))
