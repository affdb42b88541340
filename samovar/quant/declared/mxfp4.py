"""`mxfp4`: what gpt-oss publishes."""

from __future__ import annotations

from samovar.quant.mxfp4 import GPT_OSS
from samovar.quant.scheme import SchemeOf
from samovar.quant.settings import Settings, names_part


def read(declared: Settings) -> SchemeOf:
    """Every linear, but for what is left out by name and the head."""
    plain = declared.names("modules_to_not_convert")
    return lambda name: None if names_part(name, plain) or name == "lm_head" else GPT_OSS
