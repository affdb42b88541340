"""compressed-tensors: groups of targets, each with the numbers of its weights and activations; what llm-compressor writes."""

from __future__ import annotations

from dataclasses import replace

from samovar.quant.declared.fp8 import block_size
from samovar.quant.fp8 import FP8Scheme
from samovar.quant.inputs import Inputs
from samovar.quant.mxfp4 import COMPRESSED_TENSORS as MXFP4
from samovar.quant.nvfp4 import COMPRESSED_TENSORS as NVFP4
from samovar.quant.packed_int import PackedIntScheme
from samovar.quant.scheme import Scheme, SchemeOf
from samovar.quant.settings import Settings, matches
from samovar.quant.whole_int import IntScheme

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "dense", "mixed-precision",
)  # fmt: skip
LINEAR = "Linear"


def read(declared: Settings) -> SchemeOf:
    """A linear belongs to the group that names it, else to the one of all linears, unless `ignore` names it."""
    declared.only("format", *FORMATS)
    for field in ("transform_config", "sparsity_config"):
        part = declared.part(field)
        if part is not None and part.text("format") != "dense":
            raise declared.refuse(field, "is not supported")
    groups = [
        (settings.names("targets"), _scheme(settings, settings.text("format") or declared.text("format")))
        for settings in declared.parts("config_groups").values()
    ]
    plain = declared.names("ignore")

    def scheme_of(name: str) -> Scheme | None:
        if matches(name, plain) or LINEAR in plain:
            return None
        named = next((scheme for targets, scheme in groups if matches(name, targets)), None)
        return named or next((scheme for targets, scheme in groups if LINEAR in targets), None)

    return scheme_of


def _scheme(group: Settings, format: str) -> Scheme | None:
    group.only("format", *FORMATS)
    if group.has("output_activations"):
        raise group.refuse("output_activations", "is not supported")
    weights = group.part("weights")
    if weights is None or format == "dense":
        return None
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    per = weights.text("strategy") or _strategy(weights)
    symmetric, group_size = weights.flag("symmetric", True), _group_size(weights, per)
    if kind == "float" and not symmetric:
        raise weights.refuse("symmetric", "is not supported for floats: only true")
    if kind == "float" and bits == 4:
        nvfp4 = replace(NVFP4, has_input_scale=group.has("input_activations"))
        by_group: dict[tuple[str, int], Scheme] = {("tensor_group", 16): nvfp4, ("group", 32): MXFP4}
        if (per, group_size) not in by_group:
            raise weights.refuse("group_size", f"is not supported for four-bit floats with strategy {per!r}")
        return by_group[per, group_size]
    inputs = _inputs(group.part("input_activations"))
    if kind == "float" and bits == 8:
        if per == "group":
            powers = format == "mxfp8-quantized"
            return FP8Scheme("group", (1, group_size), powers=powers, inputs=None if powers else inputs)
        if per == "block":
            return FP8Scheme("block", block_size(weights, "block_structure"), inputs=inputs)
        return FP8Scheme("tensor" if per == "tensor" else "column", inputs=inputs)
    if kind == "int" and format == "pack-quantized" and per in ("group", "channel"):
        has_order = weights.values.get("actorder") in ("group", "dynamic", True)
        return PackedIntScheme(bits, group_size, symmetric, has_order, inputs)
    if kind == "int" and bits == 8 and per in ("tensor", "channel", "group"):
        zero = None if symmetric else "weight_zero_point"
        name = {"tensor": "tensor", "channel": "column"}.get(per, "group")
        return IntScheme(name, group_size, zero=zero, inputs=inputs)  # type: ignore[arg-type]
    raise weights.refuse("num_bits", f"is not supported with type {kind!r}, strategy {per!r} and format {format!r}")


def _strategy(weights: Settings) -> str:
    size = weights.values.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _group_size(weights: Settings, per: str) -> int:
    weights.only("strategy", "tensor", "channel", "group", "block", "tensor_group")
    if per not in ("group", "tensor_group"):
        return -1
    if (size := weights.integer("group_size")) < 1:
        raise weights.refuse("group_size", "must be positive")
    return size


def _inputs(given: Settings | None) -> Inputs | None:
    """Rounding of activations; None for sixteen bits."""
    if given is None or given.integer("num_bits", otherwise=16) == 16:
        return None
    given.only("num_bits", 8)
    given.only("type", "int", "float")
    given.only("dynamic", True, False)
    given.only("strategy", "tensor", "token", "group")
    kind, per = given.text("type", "int"), given.text("strategy", "tensor")
    group_size = given.integer("group_size") if per == "group" else -1
    strategy = {"tensor": "tensor", "token": "token"}.get(per, "group")
    return Inputs(
        "int8" if kind == "int" else "fp8",
        strategy,  # type: ignore[arg-type]
        given.flag("dynamic", False),
        given.flag("symmetric", True),
        group_size,
    )
