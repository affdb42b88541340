"""One small weight as the tools themselves write it. Run as a script where the tools are installed to write `golden.tensors`:

python -m tests.quant.tool_weights    (compressed-tensors 0.20, bitsandbytes 0.50, auto-round 0.16, torchao 0.18)

Beside the stored tensors stands `probes`: the weight as the tool dequantizes it, times a fixed matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

OUT, IN, GROUP = 32, 64, 32
FEW = 8
"""Rows where every number takes a byte: the file stays small."""
GOLDEN = Path(__file__).parent / "golden.tensors"
Case = tuple[dict[str, torch.Tensor], torch.Tensor]


def weight(rows: int = OUT) -> torch.Tensor:
    """What every tool quantizes: bfloat16 numbers, a group of zeros, and some zeros beside large ones."""
    steps = torch.arange(OUT * IN, dtype=torch.float64)
    values = (torch.sin(steps * 1.7) * torch.cos(steps * 0.31) * 0.1).view(OUT, IN).to(torch.bfloat16).float()
    values[0, :3] = torch.tensor([0.0, 0.5, -0.5])
    values[3, 16:32] = 0
    return values[:rows]


def probes(dequantized: torch.Tensor) -> torch.Tensor:
    """Sums over the inputs that no two inputs have an equal part in: [out, 3]."""
    steps = torch.arange(IN * 3, dtype=torch.float64).view(IN, 3)
    return (dequantized.double() @ torch.cos(steps * 2.3)).float()


COMPRESSED_TENSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "ct-w4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
    "ct-w4-asym": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}),
    "ct-w3-asym": ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": GROUP, "symmetric": False}),
    "ct-w8-channel": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "ct-int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "ct-int8-asym": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "ct-fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "ct-fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "ct-fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 48]},
    ),
    "ct-nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "ct-mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "ct-mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
}
"""Name -> (format, fields of `weights`)."""


def compressed_tensors() -> dict[str, Case]:
    """Its compressors, with scales by its own rule."""
    import compressed_tensors.compressors  # noqa: F401  (registers them)
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    found: dict[str, Case] = {}
    for name, (format, fields) in COMPRESSED_TENSORS.items():
        args = QuantizationArgs(**fields)
        w = weight(FEW if args.num_bits == 8 and args.strategy != "block" else OUT)
        state = {"weight": w}
        extra = {}
        if args.strategy == "block":
            rows, columns = args.block_structure
            blocks = [[w[i : i + rows, j : j + columns] for j in range(0, IN, columns)] for i in range(0, len(w), rows)]
            state["weight_scale"] = torch.stack([torch.stack([b.abs().amax() / 448 for b in line]) for line in blocks])
        else:
            shaped = w.view(
                {"tensor": (1, -1), "channel": (len(w), 1, IN)}.get(args.strategy, (len(w), -1, args.group_size or 1))
            )
            if args.strategy == "tensor_group":
                state["weight_global_scale"] = extra["global_scale"] = torch.tensor([448 * 6 / w.abs().max().item()])
            state["weight_scale"], zero = calculate_qparams(shaped.amin(-1), shaped.amax(-1), args, **extra)
            if not args.symmetric:
                state["weight_zero_point"] = zero
        compressor, scheme = (
            BaseCompressor.get_value_from_registry(format),
            QuantizationScheme(targets=["Linear"], weights=args),
        )
        stored = compressor.compress(state, scheme)
        found[name] = (stored, compressor.decompress(dict(stored), scheme)["weight"])
    return found


def bitsandbytes() -> dict[str, Case]:
    """Its four-bit and int8 functions."""
    from bitsandbytes import functional

    found: dict[str, Case] = {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = functional.quantize_4bit(weight(), quant_type=kind, compress_statistics=nested)
            stored = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
            name = f"bnb-{kind}-nested" if nested else f"bnb-{kind}"
            found[name] = ({"weight": packed, **stored}, functional.dequantize_4bit(packed, state))
    rows, scales, _ = functional.int8_vectorwise_quant(weight(FEW).half())
    stored = {"weight": rows, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    found["bnb-int8"] = (stored, functional.int8_vectorwise_dequant(rows, scales))
    return found


def auto_round() -> dict[str, Case]:
    """Its GPTQ layers of both versions, and its AWQ layer."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    found: dict[str, Case] = {}
    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = weight()
    groups = weight().view(OUT, -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    for name, bits, module, least, fields in (
        *((f"gptq-{bits}", bits, qlinear_torch_zp, 1, {"g_idx": True}) for bits in (2, 3, 4, 8)),
        *((f"auto-round-{bits}", bits, qlinear_torch, 0, {}) for bits in (3, 4)),
    ):
        scale = ((high - low) / (2**bits - 1)).clamp(min=1e-5).half().float()
        zero = (-low / scale).round().clamp(min=least)
        layer = module.QuantLinear(bits, GROUP, IN, OUT, False, **fields)
        layer.device = "cpu"
        layer.pack(linear, scale, zero, None, device="cpu")
        found[name] = (layer.state_dict(), layer(torch.eye(IN)).t())
    scale = ((high - low) / 15).clamp(min=1e-5).half().float()
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, False, scale.t(), (-low / scale).round().t(), device="cpu")
    found["awq"] = (
        layer.state_dict(),
        dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).t(),
    )
    return found


def torchao() -> dict[str, Case]:
    """Its tensors, taken apart for safetensors as Transformers does it."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    found: dict[str, Case] = {}
    for name, config in (("torchao-int8", Int8WeightOnlyConfig()), ("torchao-fp8", Float8WeightOnlyConfig())):
        model = torch.nn.Sequential(torch.nn.Linear(IN, FEW, bias=False))
        model[0].weight.data = weight(FEW)
        quantize_(model, config)
        stored, _ = flatten_tensor_state_dict(model.state_dict())
        found[name] = ({key.removeprefix("0."): value for key, value in stored.items()}, model[0].weight.dequantize())
    return found


TOOLS: dict[str, Callable[[], dict[str, Case]]] = {
    "compressed_tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "auto_round": auto_round,
    "torchao": torchao,
}
"""Module of the tool -> what it writes."""


def flat(cases: dict[str, Case]) -> dict[str, torch.Tensor]:
    """Cases as they lie in the file."""
    found: dict[str, torch.Tensor] = {}
    for name, (stored, dequantized) in cases.items():
        found |= {f"{name}/{key}": value.detach().contiguous().clone() for key, value in stored.items()}
        found[f"{name}/probes"] = probes(dequantized.detach())
    return found


if __name__ == "__main__":
    save_file({key: value for tool in TOOLS.values() for key, value in flat(tool()).items()}, GOLDEN)
