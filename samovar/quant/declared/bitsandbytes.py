"""bitsandbytes: four bits from tables, or int8 rows."""

from __future__ import annotations

from samovar.quant.bnb4 import BnbScheme
from samovar.quant.scheme import Scheme, SchemeOf
from samovar.quant.settings import Settings, names_part
from samovar.quant.whole_int import IntScheme

INT8 = IntScheme("row", scale="SCB", divisor=127.0, unused=("weight_format",))


def read(declared: Settings) -> SchemeOf:
    """Every linear, but for `llm_int8_skip_modules` and the head. Outliers of activations are not treated apart."""
    plain = declared.names("llm_int8_skip_modules")
    scheme: Scheme
    if declared.flag("load_in_8bit", False) or declared.flag("_load_in_8bit", False):
        scheme = INT8
    elif declared.flag("load_in_4bit", False) or declared.flag("_load_in_4bit", False):
        declared.only("bnb_4bit_quant_type", "nf4", "fp4")
        declared.only("bnb_4bit_quant_storage", "uint8")
        scheme = BnbScheme(
            declared.text("bnb_4bit_quant_type", "fp4"), declared.flag("bnb_4bit_use_double_quant", False)
        )
    else:
        raise declared.refuse("load_in_4bit", "and load_in_8bit are both unset")
    return lambda name: None if names_part(name, plain) or name == "lm_head" else scheme
