"""TorchAO, where it writes rows of int8 or FP8 with one scale each."""

from __future__ import annotations

from samovar.quant.fp8 import FP8Scheme
from samovar.quant.inputs import Inputs
from samovar.quant.scheme import Scheme, SchemeOf
from samovar.quant.settings import Settings, names_part
from samovar.quant.whole_int import IntScheme

_INT8 = IntScheme("column", weight="_weight_qdata", scale="_weight_scale", zero="_weight_zero_point")
_FP8 = FP8Scheme("column", weight="_weight_qdata", scale=("_weight_scale",))
SCHEMES: dict[str, Scheme] = {
    "Int8WeightOnlyConfig": _INT8,
    "Int8DynamicActivationInt8WeightConfig": IntScheme(
        "column", weight=_INT8.weight, scale=_INT8.scale, zero=_INT8.zero, inputs=Inputs("int8")
    ),
    "Float8WeightOnlyConfig": _FP8,
}
"""What `quant_type.default._type` may be."""


def read(declared: Settings) -> SchemeOf:
    """Every linear, but for `modules_to_not_convert` and the head."""
    kinds = declared.part("quant_type")
    default = None if kinds is None else kinds.part("default")
    if kinds is None or default is None or set(kinds.values) != {"default"}:
        raise declared.refuse("quant_type", "is not supported: only an object with the field 'default'")
    default.only("_type", *SCHEMES)
    data = default.part("_data")
    if data is not None:
        data.only("group_size", None)
    scheme, plain = SCHEMES.get(default.text("_type")), declared.names("modules_to_not_convert")
    if scheme is None:
        raise default.refuse("_type", f"is not supported: only {', '.join(SCHEMES)}")
    return lambda name: None if names_part(name, plain) or name == "lm_head" else scheme
