"""NVIDIA ModelOpt: FP8, NVFP4 and MXFP8, one for the whole model or mixed; from config.json or hf_quant_config.json."""

from __future__ import annotations

from dataclasses import replace

from samovar.quant.fp8 import FP8Scheme
from samovar.quant.inputs import Inputs
from samovar.quant.nvfp4 import GROUP_SIZE, MODELOPT
from samovar.quant.scheme import Scheme, SchemeOf
from samovar.quant.settings import Settings, under_glob

BLOCK = FP8Scheme("block", (128, 128), inputs=Inputs("fp8", "group", group_size=128))
ALGORITHMS: dict[str, Scheme] = {
    "FP8": FP8Scheme("tensor", inputs=Inputs("fp8", "tensor", is_dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": FP8Scheme("row", inputs=Inputs("fp8", "token")),
    "FP8_PB_WO": replace(BLOCK, inputs=None),
    "FP8_BLOCK_SCALES": BLOCK,
    "NVFP4": MODELOPT,
    "W4A16_NVFP4": replace(MODELOPT, has_input_scale=False),
    "MXFP8": FP8Scheme("group", (1, 32), powers=True),
}
"""Names that `quant_algo` may have."""


def read(declared: Settings) -> SchemeOf:
    """Every linear but `exclude_modules`; MIXED_PRECISION lists every quantized one."""
    inner = declared.part("quantization") or declared
    plain = inner.names("exclude_modules", "ignore")
    if inner.text("quant_algo") == "MIXED_PRECISION":
        listed = {name: _scheme(settings) for name, settings in inner.parts("quantized_layers").items()}
        return lambda name: None if under_glob(name, plain) else listed.get(name)
    scheme = _scheme(inner)
    return lambda name: None if under_glob(name, plain) else scheme


def _scheme(declared: Settings) -> Scheme:
    declared.only("quant_algo", *ALGORITHMS)
    scheme = ALGORITHMS.get(declared.text("quant_algo"))
    if scheme is None:
        raise declared.refuse("quant_algo", "does not say how weights are stored")
    if "NVFP4" in declared.text("quant_algo") and declared.integer("group_size", otherwise=GROUP_SIZE) != GROUP_SIZE:
        raise declared.refuse("group_size", f"is not supported: NVFP4 has groups of {GROUP_SIZE}")
    return scheme
