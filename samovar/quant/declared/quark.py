"""AMD Quark, where it writes FP8 tensors, int8 tensors or rows, or MXFP4."""

from __future__ import annotations

from samovar.quant.fp8 import FP8Scheme
from samovar.quant.inputs import Inputs
from samovar.quant.mxfp4 import QUARK
from samovar.quant.scheme import Scheme, SchemeOf
from samovar.quant.settings import Settings, under_glob
from samovar.quant.whole_int import IntScheme


def read(declared: Settings) -> SchemeOf:
    """`layer_quant_config` by name, all others as `global_quant_config` says, but for `exclude`."""
    if declared.has("layer_type_quant_config"):
        raise declared.refuse("layer_type_quant_config", "is not supported: only layer_quant_config")
    whole = declared.part("global_quant_config")
    base = None if whole is None else _scheme(whole)
    layers = {name: _scheme(settings) for name, settings in declared.parts("layer_quant_config").items()}
    plain = declared.names("exclude")

    def scheme_of(name: str) -> Scheme | None:
        if under_glob(name, plain):
            return None
        return next((scheme for pattern, scheme in layers.items() if under_glob(name, (pattern,))), base)

    return scheme_of


def _scheme(declared: Settings) -> Scheme:
    weight = declared.part("weight")
    if weight is None:
        raise declared.refuse("weight", "must say how weights are stored")
    weight.only("dtype", "fp8_e4m3", "int8", "fp4")
    weight.only("qscheme", "per_tensor", "per_channel", "per_group")
    kind, per = weight.text("dtype"), weight.text("qscheme")
    if kind == "fp4":
        weight.only("scale_format", "e8m0")
        if per != "per_group" or weight.integer("group_size") != 32:
            raise weight.refuse("group_size", "is not supported: fp4 has groups of 32")
        return QUARK
    if per == "per_group":
        raise weight.refuse("qscheme", f"is not supported with dtype {kind!r}")
    given = declared.part("input_tensors")
    if kind == "int8":
        if not weight.flag("symmetric", True):
            raise weight.refuse("symmetric", "is not supported: only true")
        return IntScheme("tensor" if per == "per_tensor" else "row", inputs=_inputs(given, "int8"))
    return FP8Scheme("tensor" if per == "per_tensor" else "row", inputs=_inputs(given, "fp8_e4m3"))


def _inputs(declared: Settings | None, kind: str) -> Inputs | None:
    if declared is None:
        return None
    declared.only("dtype", kind)
    declared.only("qscheme", "per_tensor", "per_channel", "per_token")
    if not declared.flag("symmetric", True):
        raise declared.refuse("symmetric", "is not supported: only true")
    is_dynamic = declared.flag("is_dynamic", False)
    per = "tensor" if declared.text("qscheme", "per_tensor") == "per_tensor" else "token"
    if not is_dynamic and per == "token":
        raise declared.refuse("qscheme", "needs is_dynamic")
    return Inputs("int8" if kind == "int8" else "fp8", "tensor" if per == "tensor" else "token", is_dynamic)
