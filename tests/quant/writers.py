"""Whole quantized checkpoints, written from the formats' public descriptions with NumPy and Python integers.

A writer gets one linear's weight and gives the tensors that its tool stores, and the weight that they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Written = tuple[dict[str, Any], Array]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_HALF = np.array(
    [(code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(127)]
)
E4M3 = np.concatenate((_HALF, [np.nan], -_HALF, [np.nan]))
"""What the codes of E4M3FN mean."""


@dataclass(frozen=True)
class Writer:
    """`config` is the quantization_config; `inputs` rounds activations [tokens, in] as the format does."""

    name: str
    config: dict[str, Any]
    linear: Callable[[str, Array], Written]
    inputs: Callable[[Array], Array] | None = None
    skipped: tuple[str, ...] = ()
    """Linears (by the end of their names) that stay plain."""
    needs_shapes: bool = False


def words(codes: Array, bits: int) -> Array:
    """Rows of codes -> dense little-endian streams of 32-bit words."""
    rows = []
    for row in codes.tolist():
        number = sum(int(code) << (i * bits) for i, code in enumerate(row))
        rows.append([(number >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
    return np.array(rows, np.uint32).view(np.int32)


def fp8(values: Array) -> Array:
    """Codes of E4M3FN: the nearest, of two equally near the even one."""
    middles = (_HALF[1:] + _HALF[:-1]) / 2
    size = np.abs(values)
    low = np.searchsorted(middles, size, "left")
    tied = (low < len(middles)) & (size == middles[np.minimum(low, len(middles) - 1)]) & (low % 2 == 1)
    return ((low + tied) | (np.signbit(values) << 7)).astype(np.uint8)


def nearest(values: Array, table: Array) -> Array:
    return np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)


def as_float8(values: Array) -> torch.Tensor:
    return torch.from_numpy(values).view(torch.float8_e4m3fn)


def grouped(weight: Array, group: int, bits: int, *, symmetric: bool = False) -> tuple[Array, Array, Array]:
    """Unsigned codes [out, in], float16 scales and zero points [out, groups]."""
    parts, top = weight.reshape(len(weight), -1, group), 2**bits - 1
    if symmetric:
        scale = 2 * np.abs(parts).max(-1) / top
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        scale = (parts.max(-1) - parts.min(-1)) / top
        zero = np.rint(-parts.min(-1) / scale)
    scale = scale.astype(np.float16).astype(np.float64)
    codes = np.clip(np.rint(parts / scale[..., None]) + zero[..., None], 0, top)
    return codes.reshape(weight.shape).astype(np.int64), scale, zero.clip(0, top).astype(np.int64)


def gptq(bits: int, group: int, *, version: int = 1, order: bool = False) -> Callable[[str, Array], Written]:
    """Inputs are permuted before they are grouped where `order`; zero points of version 1 are stored less one."""

    def write(name: str, weight: Array) -> Written:
        size = weight.shape[1] if group == -1 else group
        where = np.random.default_rng(len(name)).permutation(weight.shape[1]) if order else np.arange(weight.shape[1])
        codes, scale, zero = grouped(weight[:, where], size, bits)
        back = np.argsort(where)
        g_idx = (np.arange(weight.shape[1]) // size)[back]
        meant = ((codes - zero.repeat(size, 1)) * scale.repeat(size, 1))[:, back]
        stored = (zero - (version == 1)) % 2**bits
        return {
            "qweight": words(codes[:, back], bits).T.copy(),
            "qzeros": words(stored.T, bits),
            "scales": scale.T.astype(np.float16),
            "g_idx": g_idx.astype(np.int32),
        }, meant

    return write


def awq(name: str, weight: Array) -> Written:
    codes, scale, zero = grouped(weight, 32, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: Array) -> Array:
        return words(values.reshape(-1, 8)[:, order], 4).reshape(len(values), -1)

    stored = {"qweight": packed(codes.T), "qzeros": packed(zero.T), "scales": scale.T.astype(np.float16)}
    return stored, (codes - zero.repeat(32, 1)) * scale.repeat(32, 1)


def packed_int(bits: int, group: int, *, symmetric: bool) -> Callable[[str, Array], Written]:
    def write(name: str, weight: Array) -> Written:
        codes, scale, zero = grouped(weight, group, bits, symmetric=symmetric)
        stored = {"weight_packed": words(codes, bits), "weight_scale": torch.from_numpy(scale).bfloat16()}
        scale = stored["weight_scale"].double().numpy()
        stored["weight_shape"] = np.array(weight.shape, np.int64)
        if not symmetric:
            stored["weight_zero_point"] = words(zero.T, bits).T.copy()
        return stored, (codes - zero.repeat(group, 1)) * scale.repeat(group, 1)

    return write


def int8_rows(scale_name: str, factor: float, *, is_column: bool) -> Callable[[str, Array], Written]:
    def write(name: str, weight: Array) -> Written:
        scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        codes = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
        stored = {"weight": codes, scale_name: (scale * factor) if is_column else (scale * factor)[:, 0]}
        if scale_name == "SCB":
            stored["weight_format"] = np.array(0, np.uint8)
        return stored, codes * (stored[scale_name].reshape(-1, 1).astype(np.float64) / factor)

    return write


def fp8_tensor(input_name: str | None, shape: tuple[int, ...]) -> Callable[[str, Array], Written]:
    """One scale a tensor, so that the parts of a fused layer differ; static scales of activations are 0.05."""

    def write(name: str, weight: Array) -> Written:
        scale = np.float32(np.abs(weight).max() / 448)
        codes = fp8(weight / scale)
        stored = {"weight": as_float8(codes), "weight_scale": np.full(shape, scale, np.float32)}
        if input_name is not None:
            stored[input_name] = np.full(shape, 0.05, np.float32)
        return stored, E4M3[codes] * scale

    return write


def fp8_rows(name: str, weight: Array) -> Written:
    scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
    codes = fp8(weight / scale)
    return {"weight": as_float8(codes), "weight_scale": scale}, E4M3[codes] * scale


def fp8_blocks(rows: int, columns: int, scale_name: str) -> Callable[[str, Array], Written]:
    def write(name: str, weight: Array) -> Written:
        out, width = weight.shape
        scale = np.ones((-(-out // rows), -(-width // columns)), np.float32)
        spread = np.empty_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale[i, j] = np.abs(weight[block]).max() / 448
                spread[block] = scale[i, j]
        codes = fp8(weight / spread)
        return {"weight": as_float8(codes), scale_name: scale}, E4M3[codes] * spread

    return write


def nibbles(codes: Array) -> Array:
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)


def nvfp4(dialect: str) -> Callable[[str, Array], Written]:
    def write(name: str, weight: Array) -> Written:
        # Powers of two, so that a scale and its reciprocal are both exact.
        whole = 2.0 ** np.ceil(np.log2(np.abs(weight).max() / (6 * 448)))
        scale = fp8(np.abs(weight.reshape(len(weight), -1, 16)).max(-1) / 6 / whole)
        spread = (E4M3[scale] * whole).repeat(16, 1)
        codes = nearest(weight / np.where(spread > 0, spread, 1), E2M1)
        number, given = np.array(whole, np.float32), np.array(2.0, np.float32)
        if dialect == "modelopt":
            stored = {"weight": nibbles(codes), "weight_scale_2": number, "input_scale": given}
        else:
            stored = {
                "weight_packed": nibbles(codes),
                "weight_global_scale": (1 / number).reshape(1),
                "input_global_scale": given.reshape(1),
            }
        return {**stored, "weight_scale": as_float8(scale)}, E2M1[codes] * spread

    return write


def mxfp4(weight_name: str, scale_name: str, *, in_blocks: bool = False) -> Callable[[str, Array], Written]:
    def write(name: str, weight: Array) -> Written:
        largest = np.abs(weight.reshape(len(weight), -1, 32)).max(-1)
        exponent = np.floor(np.log2(largest)) - 2
        spread = (2.0**exponent).repeat(32, 1)
        codes = nearest(np.clip(weight / spread, -6, 6), E2M1)
        packed = nibbles(codes)
        stored = {weight_name: packed.reshape(len(weight), -1, 16) if in_blocks else packed}
        return {**stored, scale_name: (exponent + 127).astype(np.uint8)}, E2M1[codes] * spread

    return write


TABLE = np.concatenate((-np.linspace(1, 0.1, 8), np.linspace(0, 1, 8))).astype(np.float32)
"""Any table will do: the checkpoint brings its own."""


def bnb4(kind: str, *, nested: bool) -> Callable[[str, Array], Written]:
    """Blocks of 64 over the flattened weight; nested scales are places in a table of their own, in blocks of 256."""

    def write(name: str, weight: Array) -> Written:
        blocks = weight.reshape(-1, 64)
        scale = np.abs(blocks).max(1).astype(np.float32).astype(np.float64)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        stored = {"weight.absmax": scale.astype(np.float32), "weight.quant_map": TABLE.copy()}
        if nested:
            offset = float(np.float32(scale.mean()))
            table = np.linspace(-1, 1, 256).astype(np.float32)
            padded = np.pad(scale - offset, (0, -len(scale) % 256)).reshape(-1, 256)
            outer = np.abs(padded).max(1).astype(np.float32)
            places = nearest(padded / np.where(outer > 0, outer, 1)[:, None], table).reshape(-1)[: len(scale)]
            scale = table[places].astype(np.float64) * outer.repeat(256)[: len(scale)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            stored |= {"weight.absmax": places, "weight.nested_absmax": outer, "weight.nested_quant_map": table}
        codes = nearest(blocks / scale[:, None], TABLE).reshape(-1)
        stored["weight"] = (codes[1::2] | (codes[::2] << 4)).astype(np.uint8)[:, None]
        described = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = described
        return stored, (TABLE[codes].astype(np.float64).reshape(-1, 64) * scale[:, None]).reshape(weight.shape)

    return write


def torchao_int8(name: str, weight: Array) -> Written:
    stored, meant = int8_rows("scale", 1.0, is_column=True)(name, weight)
    zeros = np.zeros((len(weight), 1), np.int8)
    return {"_weight_qdata": stored["weight"], "_weight_scale": stored["scale"], "_weight_zero_point": zeros}, meant


def int8_tokens(x: Array) -> Array:
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.clip(np.rint(x / scale), -128, 127).astype(np.float32) * scale


def fp8_tokens(x: Array) -> Array:
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(448)
    return E4M3[fp8(x / scale)].astype(np.float32) * scale


def fp8_static(x: Array) -> Array:
    return E4M3[fp8(x / np.float32(0.05))].astype(np.float32) * np.float32(0.05)


def fp8_parts(size: int) -> Callable[[Array], Array]:
    def rounded(x: Array) -> Array:
        return fp8_tokens(x.reshape(len(x), -1, size)).reshape(x.shape)

    return rounded


def numbers(bits: int, kind: str, strategy: str, **fields: Any) -> dict[str, Any]:
    """One description of numbers, as compressed-tensors writes it."""
    blank = {"symmetric": True, "dynamic": False, "group_size": None, "block_structure": None, "actorder": None}
    return {**blank, "num_bits": bits, "type": kind, "strategy": strategy, "observer": "minmax", **fields}


def compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
    }


INT4 = numbers(4, "int", "group", group_size=32)
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": False, "lm_head": False}
DYNAMIC = {"strategy": "token", "dynamic": True}

WRITERS = [
    Writer("gptq-4-order", {**GPTQ, "bits": 4, "group_size": 32, "desc_act": True}, gptq(4, 32, order=True)),
    Writer("gptq-4-v2", {**GPTQ, "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"}, gptq(4, 16, version=2)),
    Writer("gptq-3", {**GPTQ, "bits": 3, "group_size": 32}, gptq(3, 32)),
    Writer("gptq-2", {**GPTQ, "bits": 2, "group_size": 16}, gptq(2, 16)),
    Writer("gptq-8-rows", {**GPTQ, "bits": 8, "group_size": -1}, gptq(8, -1)),
    Writer(
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        awq,
    ),
    Writer("ct-w4", compressed("pack-quantized", INT4), packed_int(4, 32, symmetric=True)),
    Writer(
        "ct-w4-asym", compressed("pack-quantized", {**INT4, "symmetric": False}), packed_int(4, 32, symmetric=False)
    ),
    Writer(
        "ct-int8",
        compressed("int-quantized", numbers(8, "int", "channel"), numbers(8, "int", **DYNAMIC)),
        int8_rows("weight_scale", 1.0, is_column=True),
        int8_tokens,
    ),
    Writer(
        "ct-fp8-rows",
        compressed("float-quantized", numbers(8, "float", "channel"), numbers(8, "float", **DYNAMIC)),
        fp8_rows,
        fp8_tokens,
    ),
    Writer(
        "ct-fp8-static",
        compressed("float-quantized", numbers(8, "float", "tensor"), numbers(8, "float", "tensor")),
        fp8_tensor("input_scale", (1,)),
        fp8_static,
    ),
    Writer(
        "ct-fp8-block",
        compressed("float-quantized", numbers(8, "float", "block", block_structure=[48, 40])),
        fp8_blocks(48, 40, "weight_scale"),
    ),
    Writer(
        "ct-nvfp4",
        compressed(
            "nvfp4-pack-quantized",
            numbers(4, "float", "tensor_group", group_size=16),
            numbers(4, "float", "tensor_group", group_size=16, dynamic="local"),
        ),
        nvfp4("compressed-tensors"),
    ),
    Writer(
        "ct-mxfp4",
        compressed("mxfp4-pack-quantized", numbers(4, "float", "group", group_size=32)),
        mxfp4("weight_packed", "weight_scale"),
    ),
    Writer(
        "modelopt-fp8",
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        fp8_tensor("input_scale", ()),
        fp8_static,
    ),
    Writer(
        "modelopt-nvfp4",
        {
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
            "quant_method": "modelopt",
        },
        nvfp4("modelopt"),
    ),
    Writer(
        "fp8-block",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 32]},
        fp8_blocks(16, 32, "weight_scale_inv"),
        fp8_parts(32),
    ),
    Writer(
        "fp8-tensor",
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8_tensor("input_scale", ()),
        fp8_static,
    ),
    Writer(
        "mxfp4",
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.0.self_attn", "lm_head"]},
        mxfp4("weight_blocks", "weight_scales", in_blocks=True),
        skipped=tuple(f"layers.0.self_attn.{part}_proj" for part in "qkvo"),
    ),
    Writer(
        "bnb-nf4",
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        bnb4("nf4", nested=True),
        needs_shapes=True,
    ),
    Writer(
        "bnb-fp4",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        bnb4("fp4", nested=False),
        needs_shapes=True,
    ),
    Writer(
        "bnb-int8",
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
        int8_rows("SCB", 127.0, is_column=False),
    ),
    Writer(
        "auto-round",
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "packing_format": "auto_round:auto_awq",
        },
        awq,
    ),
    Writer(
        "quark-fp8",
        {
            "quant_method": "quark",
            "exclude": ["lm_head"],
            "global_quant_config": {
                "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
                "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
            },
        },
        fp8_tensor("input_scale", ()),
        fp8_static,
    ),
    Writer(
        "torchao-int8",
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
        torchao_int8,
    ),
]
BY_NAME = {writer.name: writer for writer in WRITERS}
