"""Text -> the value of a setting: numbers with size suffixes, booleans, JSON lists and objects.

Knows no flags and no files; `config.flags` and `config.load` call it.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from samovar.config.field import Setting
from samovar.errors import ConfigError

_SUFFIXES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"([+-]?\d+(?:_\d+)*(?:\.\d+)?)\s*([A-Za-z]{0,3})", re.ASCII)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_integer(text: str) -> int:
    """`4096`, `32k` (32,000), `32K` (32,768), `1M`, `1.5GiB`, `-1`. ValueError for anything else.

    The only reader of counts and of sizes in bytes, so that `8g` means the same for every setting. Small letters count
    in thousands and capitals in 1,024s, as in vLLM; KiB, MiB, GiB and kB, MB, GB are what they say.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in _SUFFIXES:
        raise ValueError(text)
    value = Decimal(match[1].replace("_", "")) * _SUFFIXES[match[2]]
    if value != value.to_integral_value():
        raise ValueError(text)
    return int(value)


def parse_text(setting: Setting, text: str, *, source: str | None = None) -> Any:
    """The value `text` stands for. `source` names the place in messages (default: the flag). Raises `ConfigError`."""
    where = source or setting.flag
    if setting.is_optional and text.lower() in ("none", "null"):
        return None
    if setting.kind == "str":
        return text
    if setting.kind == "bool":
        return _boolean(where, text)
    if setting.kind == "int":
        try:
            return parse_integer(text)
        except ValueError:
            raise ConfigError(f"{where} must be a whole number such as 4096, 32k or 4GiB, got {text!r}") from None
    if setting.kind == "float":
        return _float(where, text)
    if setting.kind == "list[str]":
        return _strings(where, text)
    return parse_object(where, text)


def _boolean(where: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError(f"{where} must be true or false, got {text!r}")


def _float(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"{where} must be a number, got {text!r}")
    return value


def _strings(where: str, text: str) -> list[str]:
    """One string, or several written as a JSON list."""
    if not text.lstrip().startswith("["):
        return [text]
    try:
        items = json.loads(text)
    except ValueError:
        return [text]
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{where} must be a JSON list of strings, got {text!r}")
    return items


def parse_object(where: str, text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} must be a JSON object such as '{{\"a\": 1}}', got {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a JSON object, got {text!r}")
    return value


def set_dotted(target: dict[str, Any], where: str, path: list[str], text: str) -> None:
    """`--hf-overrides.rope_scaling.factor 4`: put a value (JSON if it is any, else text) under a path of keys."""
    for key in path[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{where}.{'.'.join(path)}: {key!r} already has the value {inner!r}")
        target = inner
    try:
        target[path[-1]] = json.loads(text)
    except ValueError:
        target[path[-1]] = text


def coerce(setting: Setting, value: Any, *, source: str) -> Any:
    """A value from a YAML file: text is parsed as on the command line, one string stands for a list of one."""
    if isinstance(value, str):
        return parse_text(setting, value, source=source)
    if setting.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if setting.kind == "str" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value
