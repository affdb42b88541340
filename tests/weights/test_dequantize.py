"""Every GGML block format against the `gguf` package, bit for bit, on random blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from samovar.config.gguf_types import GGML_TYPES
from samovar.errors import CheckpointError
from samovar.weights.dequantize import DEQUANTIZERS, dequantize

IMPLEMENTED = {kind for kind in gguf.GGML_QUANT_SIZES if kind in gguf.quants._type_traits}
OWN = [name for name in DEQUANTIZERS if name not in ("F32", "F16", "F64")]


def test_the_type_table_is_the_packages() -> None:
    ours = {number: (kind.name, kind.block_size, kind.block_bytes) for number, kind in GGML_TYPES.items()}
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: ours[number] for number in theirs} == theirs


@pytest.mark.parametrize("kind", sorted(IMPLEMENTED), ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_blocks(kind: gguf.GGMLQuantizationType) -> None:
    count = 512 if kind.name in OWN else 32
    blocks = np.random.default_rng(int(kind)).integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    expected = gguf.quants.dequantize(blocks, kind)
    got = dequantize(kind.name, torch.from_numpy(blocks.copy())).numpy()
    assert got.dtype == np.float32
    assert np.array_equal(got, expected, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16), ("F64", np.float64)])
def test_plain_floats(name: str, dtype: type) -> None:
    values = np.random.default_rng(1).standard_normal((33, 1)).astype(dtype)
    raw = torch.from_numpy(values.view(np.uint8).reshape(33, -1).copy())
    assert np.array_equal(dequantize(name, raw).numpy(), values.astype(np.float32))


def test_a_type_nobody_can_read_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="Q8_K"):
        dequantize("Q8_K", torch.zeros(1, 292, dtype=torch.uint8))
