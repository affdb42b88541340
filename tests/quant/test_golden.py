"""Bytes that the tools wrote: every tensor has a place, and the weight is what the tool itself makes of it."""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from samovar.errors import CheckpointError
from samovar.layers import Linear
from samovar.quant.select import read, select
from samovar.quant.stored import Stored
from tests.models.paged_run import placement
from tests.quant.filling import fill
from tests.quant.tool_weights import COMPRESSED_TENSORS, GOLDEN, IN, TOOLS, flat, probes


def tensors_by_case() -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for key, value in load_file(GOLDEN).items():
        case, _, name = key.partition("/")
        found[case][name] = value
    return found


CASES = tensors_by_case()


def config_of(case: str) -> dict[str, Any]:
    """The quantization_config that the tool writes beside such a weight."""
    tool, _, rest = case.partition("-")
    if tool == "ct":
        format, fields = COMPRESSED_TENSORS[case]
        weights = {"type": "int", "symmetric": True, "dynamic": False, **fields, "scale_dtype": None}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    if tool == "bnb":
        if rest == "int8":
            return {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
        nested = rest.endswith("nested")
        fields = {"bnb_4bit_quant_type": rest[:3], "bnb_4bit_use_double_quant": nested}
        return {"quant_method": "bitsandbytes", "load_in_4bit": True, **fields}
    if tool == "torchao":
        name = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}[rest]
        return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": {}, "_version": 2}}}
    if tool == "auto":
        bits = int(case[-1])
        return {"quant_method": "auto-round", "bits": bits, "group_size": 32, "packing_format": "auto_round"}
    if tool == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return {"quant_method": "gptq", "bits": int(rest), "group_size": 32, "sym": False, "desc_act": False}


def dequantized(case: str, stored: dict[str, torch.Tensor], *, with_shapes: bool = True) -> torch.Tensor:
    """What a layer makes of stored tensors; it must read all of them."""
    rows = {"ct-fp8-block": 32}.get(case, len(stored["probes"]))
    tensors = {f"l.{name}": value for name, value in stored.items() if name != "probes"}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()} if with_shapes else None
    place = placement()
    layer = Linear(IN, rows)
    layer.path = "l"
    layer.bind(placement(quant_for=select(config_of(case), torch.float32, place.kernels, shapes=shapes)))
    numbered = {name: value.view(1) if value.dim() == 0 else value for name, value in tensors.items()}
    assert fill(layer, numbered) == set(tensors)
    assert isinstance(layer.quant, Stored)
    weight = layer.quant.dequantize(layer.weights)
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(layer(x), x @ weight.t(), atol=1e-5)
    return weight


@pytest.mark.parametrize("case", CASES)
def test_the_tools_own_bytes(case: str) -> None:
    """Where a tool computes in half precision, its result is that far off; all others agree to float32's rounding."""
    expected, found = CASES[case]["probes"], probes(dequantized(case, CASES[case]))
    half = case.startswith(("gptq", "auto-round")) or case == "ct-nvfp4"
    tolerance = 2.0**-11 if half else 2.0**-20
    assert float((found - expected).abs().max()) < tolerance * IN**0.5 * float(expected.abs().max())


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("bnb-") or case == "bnb-int8"])
def test_headers_are_not_needed(case: str) -> None:
    """Every format but those with tensors of varying length is told by config.json alone."""
    stored = CASES[case]
    assert torch.equal(dequantized(case, stored, with_shapes=False), dequantized(case, stored))


@pytest.mark.parametrize("case", CASES)
def test_a_changed_byte_is_seen(case: str) -> None:
    """The probes notice a single wrong code of every format, or the tests above would prove little."""
    stored = {name: value.clone() for name, value in CASES[case].items()}
    name = next(n for n in ("qweight", "weight_packed", "_weight_qdata", "weight") if n in stored)
    stored[name].view(torch.uint8).view(-1)[5] ^= 0x6C
    expected, found = stored["probes"], probes(dequantized(case, stored))
    assert float((found - expected).abs().max()) > 1e-3


def test_a_state_that_is_not_json() -> None:
    stored = {name: value.clone() for name, value in CASES["bnb-nf4"].items()}
    stored["weight.quant_state.bitsandbytes__nf4"].fill_(0)
    with pytest.raises(CheckpointError, match="quant_state is not JSON"):
        dequantized("bnb-nf4", stored)


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_installed_tools_still_write_this(tool: str) -> None:
    """With the tool at hand: it writes the same tensors today."""
    if find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    golden = load_file(GOLDEN)
    for key, value in flat(TOOLS[tool]()).items():
        assert golden[key].dtype == value.dtype and torch.equal(
            golden[key].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)
        ), key


def test_every_case_has_a_config() -> None:
    for case in CASES:
        assert read(config_of(case))("l") is not None
