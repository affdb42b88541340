"""Formats of four bits on a GPU: packed once, one op a product, and what the stored weight means. Kernels run in Triton's
interpreter."""

from __future__ import annotations

import pytest
import torch

from samovar.kernels.op import Kernels, Target
from samovar.quant import awq, fp8, gptq, mxfp4, nvfp4, packed_int, whole_int
from samovar.quant.coding import CODES, ORDER
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
    "gptq of 2 bits": (gptq.GPTQScheme(2, 32, g_idx=False), "int4_32_zero"),
    "int3": (packed_int.PackedIntScheme(3, 32), "int4_32"),
    "int8 of 16": (packed_int.PackedIntScheme(8, 16), "int8_16"),
    "int8 of rows": (whole_int.IntScheme("column"), "int8_16"),
    "int8 of groups": (whole_int.IntScheme("group", 32), "int8_16"),
    "fp8 of rows": (fp8.FP8Scheme("column"), "e4m3_16"),
    "fp8 of blocks": (fp8.FP8Scheme("block", (16, 64)), "e4m3_16"),
    "mxfp8": (fp8.FP8Scheme("group", (1, 32), powers=True), "e4m3_16"),
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
        elif tensor.dtype is torch.int8:
            tensor.random_(-128, 128)
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


def ordered(bits: int, groups: torch.Tensor) -> tuple[Stored, dict[str, torch.Tensor], torch.Tensor]:
    """(method, loaded weights, what they mean) of GPTQ with act-order."""
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        method = method_of(gptq.GPTQScheme(bits, 32, has_order=True), dtype)
        weights = allocated(method)
        weights["g_idx"].copy_(groups.expand(weights["g_idx"].shape))
        if bits == 8:
            weights["qzeros"].fill_(0x7F7F7F7F)
        made.append((method, method.after_load(weights, PARTS)))
    (exact, stored), (method, kept) = made
    assert isinstance(exact, gptq.GPTQ)
    return method, kept, exact.dequantize(stored)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_act_order(bits: int) -> None:
    """Inputs are brought together by group, in front of every product."""
    groups = (torch.arange(INPUTS) // 32)[torch.randperm(INPUTS)]
    method, kept, exact = ordered(bits, groups)
    assert CODES in kept and ORDER in kept
    x, residual = torch.randn(3, INPUTS).bfloat16(), torch.zeros(3, sum(PARTS)).bfloat16()
    wanted = x.float() @ exact.t()
    assert float((method.multiply(x, kept).float() - wanted).norm()) < 3 * 2.0**-9 * wanted.norm()
    method.add_multiply(x, kept, residual)
    assert torch.allclose(residual, method.multiply(x, kept))
    small = torch.full((INPUTS,), 2.0**-10).bfloat16()
    gated = method.norm_gated_multiply(x, small, 1e-6, kept, "silu")
    both = method.norm_multiply(x, small, 1e-6, kept).float()
    opened = torch.nn.functional.silu(both[:, :24]) * both[:, 24:]
    assert float((gated.float() - opened).norm()) < 2e-2 * opened.norm()


def test_who_keeps_what_is_stored() -> None:
    """Integers that fit no byte, groups of several sizes, and targets without a kernel."""
    eight = method_of(gptq.GPTQScheme(8, 64, g_idx=False))
    weights = allocated(eight)
    weights["qzeros"].zero_()
    assert CODES not in eight.after_load(weights, PARTS) and eight.kind() == "int8_16"
    uneven = torch.where(torch.arange(INPUTS) < 3, 1, 0)
    assert CODES not in ordered(4, uneven)[1]
    exact = method_of(nvfp4.MODELOPT, torch.float32)
    assert CODES not in exact.after_load(allocated(exact), PARTS)
