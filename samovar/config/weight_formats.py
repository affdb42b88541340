"""What `--quantization` may say: the checkpoint's own format, or one that plain linears are brought into at load time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samovar.config.description import ModelDescription

AT_LOAD = ("fp8", "int8", "int4", "nvfp4", "mxfp4")
"""Formats that plain linears can be brought into while they are loaded."""
SPELLINGS = {
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "gpt_oss_mxfp4": "mxfp4",
    "intel/auto_round": "auto_round",
}
"""Further names of a format, as checkpoints or other engines spell them."""


def stored_config(config: Mapping[str, Any]) -> Mapping[str, Any] | str | None:
    """What config.json says about how weights are quantized; None: they are plain."""
    return config.get("quantization_config") or config.get("compression_config") or None


def stored_name(description: ModelDescription) -> str | None:
    """The name of the checkpoint's own format; None: its weights are plain."""
    if description.format == "gguf":
        return "gguf"
    stored = stored_config(description.config)
    if stored is None or isinstance(stored, str):
        return stored
    return str(stored.get("quant_method") or stored.get("fmt") or "unnamed")


def at_load(asked: str | None, description: ModelDescription) -> str | None:
    """The format that linears which are plain in the checkpoint become; None: they stay so."""
    if asked is None or asked not in AT_LOAD or names(asked, stored_name(description)):
        return None
    return asked


def names(asked: str, stored: str | None) -> bool:
    """Whether both are names of one format."""
    return stored is not None and _spelled(asked) == _spelled(stored)


def _spelled(name: str) -> str:
    plain = name.lower().replace("-", "_")
    return SPELLINGS.get(plain, plain)
