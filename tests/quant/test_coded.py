"""Formats of four bits on a GPU: packed once, one op a product, and what the stored weight means. Kernels run in Triton's
interpreter."""

from __future__ import annotations

import pytest
import torch

from samovar.kernels.op import Kernels, Target
from samovar.quant import awq, gptq, mxfp4, nvfp4, packed_int
from samovar.quant.coded import CODES
from samovar.quant.scheme import Layer, Scheme
from samovar.quant.stored import Stored

pytest.importorskip("triton", reason="Triton is not installed")

INPUTS, PARTS = 128, [32, 16]
SCHEMES: dict[str, tuple[Scheme, str]] = {
    "modelopt nvfp4": (nvfp4.MODELOPT, "e2m1_16"),
    "compressed-tensors nvfp4": (nvfp4.COMPRESSED_TENSORS, "e2m1_16"),
    "mxfp4": (mxfp4.GPT_OSS, "e2m1_32"),
    "int4 of 32": (packed_int.PackedIntScheme(4, 32), "int4_32"),
    "int4 of 128": (packed_int.PackedIntScheme(4, 128), "int4_64"),
    "int4 of rows": (packed_int.PackedIntScheme(4, -1), "int4_64"),
    "int4 with zeros": (packed_int.PackedIntScheme(4, 32, is_symmetric=False), "int4_32_zero"),
    "gptq": (gptq.GPTQScheme(4, 64, g_idx=False), "int4_64_zero"),
    "awq": (awq.AWQScheme(32), "int4_32_zero"),
}


def method_of(scheme: Scheme, dtype: torch.dtype = torch.bfloat16) -> Stored:
    """On a target with kernels, but for float32."""
    return scheme.method(Layer(("a", "b"), Kernels(Target("cuda", "sm_90", dtype), "cpu")))


def allocated(method: Stored) -> dict[str, torch.Tensor]:
    """Tensors of random bits, and of scales that are numbers; some E4M3 scales are zero, some negative."""
    weights = method.allocate(method.tensors, {"in": INPUTS, "out": sum(PARTS), "part": 2}, PARTS, torch.empty)
    for name, tensor in weights.items():
        if tensor.dtype is torch.float8_e4m3fn:
            bits = torch.randint(0, 256, tensor.shape).to(torch.uint8)
            tensor.copy_(torch.where(bits & 127 == 127, 0, bits).to(torch.uint8).view(torch.float8_e4m3fn))
        elif tensor.dtype is torch.uint8 and "scale" in name:
            tensor.random_(110, 130)
        elif tensor.is_floating_point():
            tensor.uniform_(0.5, 2)
        else:
            tensor.random_(-(2**31), 2**31) if tensor.dtype is torch.int32 else tensor.random_(0, 256)
    return weights


@pytest.mark.parametrize(("scheme", "kind"), SCHEMES.values(), ids=list(SCHEMES))
def test_products_are_those_of_the_stored_weight(scheme: Scheme, kind: str) -> None:
    """Within the rounding of scales, weights and results to bfloat16; in the memory that was announced."""
    torch.manual_seed(0)
    method = method_of(scheme)
    raw = allocated(method)
    plain = method_of(scheme, torch.float32)
    plain.allocate(plain.tensors, {"in": INPUTS, "out": sum(PARTS), "part": 2}, PARTS, torch.empty)
    exact = plain.dequantize(plain.after_load({name: tensor.clone() for name, tensor in raw.items()}, PARTS))
    announced = method.resident_bytes(raw, PARTS)
    kept = method.after_load(raw, PARTS)
    assert method.kind() == kind and CODES in kept
    assert sum(tensor.nbytes for tensor in kept.values()) == announced
    x, residual = torch.randn(3, INPUTS).bfloat16(), torch.randn(3, sum(PARTS)).bfloat16()
    wanted = x.float() @ exact.t()
    near = 3 * 2.0**-9 * wanted.norm()
    assert float((method.multiply(x, kept).float() - wanted).norm()) < near
    summed = residual.clone()
    method.add_multiply(x, kept, summed)
    assert float((summed.float() - residual.float() - wanted).norm()) < near + 2.0**-9 * residual.norm()


def test_who_keeps_what_is_stored() -> None:
    """Other widths, act-order, and targets without a kernel."""
    eight = method_of(gptq.GPTQScheme(8, 64, g_idx=False))
    assert CODES not in eight.after_load(allocated(eight), PARTS) and eight.kind() is None
    ordered = method_of(gptq.GPTQScheme(4, 64))
    weights = allocated(ordered)
    weights["g_idx"].copy_((torch.arange(INPUTS) % 2).expand(weights["g_idx"].shape))
    assert CODES not in ordered.after_load(weights, PARTS)
    exact = method_of(nvfp4.MODELOPT, torch.float32)
    assert CODES not in exact.after_load(allocated(exact), PARTS)
