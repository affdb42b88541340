"""AWQ as AutoAWQ declares it."""

from __future__ import annotations

from samovar.quant.awq import AWQScheme
from samovar.quant.scheme import SchemeOf
from samovar.quant.settings import Settings, names_part


def read(declared: Settings) -> SchemeOf:
    """Every linear, but for `modules_to_not_convert` and the head."""
    declared.only("version", "gemm", "GEMM")
    head, plain = declared.flag("lm_head", False), declared.names("modules_to_not_convert")
    base = scheme(declared)
    return lambda name: None if names_part(name, plain) or (name == "lm_head" and not head) else base


def scheme(declared: Settings) -> AWQScheme:
    """The scheme of fields `bits` and `group_size`, or of their older names."""
    bits, group_size = declared.integer("bits", "w_bit", otherwise=4), declared.integer("group_size", "q_group_size")
    if bits != 4:
        raise declared.refuse("bits" if declared.has("bits") else "w_bit", "is not supported: only 4")
    if group_size < 1 and group_size != -1:
        raise declared.refuse("group_size", "must be positive, or -1 for whole rows")
    return AWQScheme(group_size)
