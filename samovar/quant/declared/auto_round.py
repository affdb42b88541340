"""AutoRound, where its files are GPTQ's or AWQ's: integers of 2, 3, 4 or 8 bits."""

from __future__ import annotations

from samovar.quant.declared import awq, gptq
from samovar.quant.scheme import Scheme, SchemeOf
from samovar.quant.settings import Settings, matches

PLAIN_BITS = 16
"""From here on a layer is not quantized."""


def read(declared: Settings) -> SchemeOf:
    """Every linear in `block_name_to_quantize` (all if it is empty), changed by `extra_config`, but for the head."""
    declared.only("data_type", "int")
    if declared.integer("act_bits", otherwise=PLAIN_BITS) < PLAIN_BITS:
        raise declared.refuse("act_bits", "is not supported: activations are not rounded")
    blocks = [name for entry in declared.names("block_name_to_quantize") for name in entry.split(",")]
    changes = declared.parts("extra_config")
    base = _scheme(declared)

    def scheme_of(name: str) -> Scheme | None:
        change = next((c for pattern, c in changes.items() if matches(name, (pattern, f"re:{pattern}$"))), None)
        if change is not None:
            return _scheme(Settings({**declared.values, **change.values}, change.where))
        inside = any(name.startswith(f"{block.strip()}.") for block in blocks)
        return base if (inside or not blocks) and name != "lm_head" else None

    return scheme_of


def _scheme(declared: Settings) -> Scheme | None:
    declared.only("data_type", "int", "float")
    if declared.integer("bits") >= PLAIN_BITS or declared.text("data_type") == "float":
        return None
    packing = declared.text("packing_format", "auto_round:auto_gptq")
    if "awq" in packing:
        return awq.scheme(declared)
    if "gptq" not in packing and not packing.startswith("auto_round"):
        raise declared.refuse("packing_format", "is not supported: only those of GPTQ, AWQ and AutoRound itself")
    # Only the format that copies AutoGPTQ stores zero points less one.
    adds_one = "auto_gptq" in packing or packing.endswith(":gptq")
    return gptq.scheme(declared, adds_one=adds_one, g_idx="gptqmodel" in packing)
