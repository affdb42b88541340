"""`fp8`: what DeepSeek, Qwen and Mistral publish, and Transformers writes; whole tensors or blocks."""

from __future__ import annotations

from samovar.quant.fp8 import FP8Scheme
from samovar.quant.inputs import Inputs
from samovar.quant.scheme import SchemeOf
from samovar.quant.settings import Settings, names_part


def read(declared: Settings) -> SchemeOf:
    """Every linear, but for what is left out by name and the head."""
    declared.only("activation_scheme", "static", "dynamic")
    declared.only("fmt", "e4m3", "float8_e4m3fn")
    declared.only("store_dtype", "float8_e4m3fn")
    is_dynamic = declared.text("activation_scheme", "dynamic") == "dynamic"
    plain = declared.names("ignored_layers", "modules_to_not_convert")
    block = declared.values.get("weight_block_size")
    names = ("input_scale", "activation_scale")
    if block is None:
        inputs = Inputs("fp8", "token" if is_dynamic else "tensor", is_dynamic)
        scheme = FP8Scheme("tensor", scale=("weight_scale", "weight_scale_inv"), inputs=inputs, input_scale=names)
    else:
        size = block_size(declared, "weight_block_size")
        if not is_dynamic:
            raise declared.refuse("activation_scheme", "does not go with weight_block_size: only 'dynamic'")
        inputs = Inputs("fp8", "group", group_size=size[1])
        scheme = FP8Scheme("block", size, scale=("weight_scale_inv", "weight_scale"), inputs=inputs, input_scale=names)
    return lambda name: None if names_part(name, plain) or name == "lm_head" else scheme


def block_size(declared: Settings, field: str) -> tuple[int, int]:
    """[rows, inputs] of a block."""
    value = declared.values.get(field)
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise declared.refuse(field, "must be two positive integers")
    return value[0], value[1]
