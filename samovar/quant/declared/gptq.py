"""GPTQ as AutoGPTQ and GPTQModel declare it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from samovar.quant.gptq import GPTQScheme
from samovar.quant.scheme import SchemeOf
from samovar.quant.settings import Settings, names_part

BITS = (2, 3, 4, 8)
HEAD = "lm_head"


def read(declared: Settings) -> SchemeOf:
    """Every linear, but for what `dynamic`, `modules_in_block_to_quantize` and `modules_to_not_convert` leave out."""
    declared.only("checkpoint_format", "gptq", "gptq_v2")
    declared.only("format", "gptq", "gptq_v2")
    version = declared.text("checkpoint_format") or declared.text("format")
    plain, only, rules = declared.names("modules_to_not_convert"), _blocks(declared), declared.parts("dynamic")
    head = declared.flag(HEAD, False)
    base = scheme(declared, adds_one=version != "gptq_v2")

    def scheme_of(name: str) -> GPTQScheme | None:
        if names_part(name, plain) or (only and not any(name.endswith(f".{entry}") for entry in only)):
            return None
        if name == HEAD and not head:
            return None
        for pattern, change in rules.items():
            if re.match(re.sub(r"^[+-]:", "", pattern), name) is not None:
                if pattern.startswith("-:"):
                    return None
                merged = Settings({**declared.values, **change.values}, change.where)
                return scheme(merged, adds_one=base.adds_one)
        return base

    return scheme_of


def scheme(declared: Settings, *, adds_one: bool, g_idx: bool = True) -> GPTQScheme:
    """The scheme of fields `bits` and `group_size`."""
    bits, group_size = declared.integer("bits"), declared.integer("group_size")
    if bits not in BITS:
        raise declared.refuse("bits", f"is not supported: only {', '.join(map(str, BITS))}")
    if group_size < 1 and group_size != -1:
        raise declared.refuse("group_size", "must be positive, or -1 for whole rows")
    order, symmetric = declared.flag("desc_act", False), declared.flag("sym", False)
    return GPTQScheme(bits, group_size, adds_one, g_idx, order, symmetric)


def _blocks(declared: Settings) -> list[str]:
    """Names inside a block of what is quantized; nothing means all."""
    value: Any = declared.values.get("modules_in_block_to_quantize") or []
    names = [name for group in value for name in (group if isinstance(group, list) else [group])]
    if isinstance(value, Mapping) or not all(isinstance(name, str) for name in names):
        raise declared.refuse("modules_in_block_to_quantize", "must be a list of lists of strings")
    return names
