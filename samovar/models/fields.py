"""Checked reading of single fields of a config.json: a value of the wrong kind is an error that names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from samovar.errors import CheckpointError
from samovar.layers.rope import RopeParameters

LARGEST = {"num_hidden_layers": 10_000, "num_attention_heads": 65_536, "head_dim": 65_536}
LARGEST_SIZE = 2**28
"""What a field may hold, by name and for all others: a file that claims more is damaged, and believing it would
allocate gigabytes before its shapes are compared with the checkpoint."""
LARGEST_NUMBER = 1e18
"""The same for fractions, rope_theta among them."""


def section(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object inside config.json; empty if it is missing or null."""
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, got {value!r}")
    return dict(value or {})


def text_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model of one that sees or hears, which is nested or has been laid flat already."""
    inner = section(raw, "text_config")
    return {**{name: value for name, value in raw.items() if name != "text_config"}, **inner}


def positive(raw: Mapping[str, Any], name: str, default: int) -> int:
    """A positive integer that may be missing or null."""
    return default if raw.get(name) is None else integer(raw, name)


def num_layers(raw: Mapping[str, Any]) -> int:
    """Checked `num_hidden_layers`, for families that make lists of that length before the config exists."""
    return integer(raw, "num_hidden_layers")


def integer(values: Mapping[str, Any], name: str) -> int:
    """A required positive integer."""
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json: {name} must be a positive integer, got {value!r}")
    if value > (most := LARGEST.get(name, LARGEST_SIZE)):
        raise CheckpointError(f"config.json: {name} must be at most {most}, got {value}")
    return value


def check_type(name: str, annotation: str, values: dict[str, Any]) -> None:
    """Refuse a field of another type; whole numbers where fractions are expected are fine. Lists become tuples."""
    if name not in values:
        return
    wanted = annotation.removesuffix(" | None")
    if wanted.startswith("tuple["):
        if not isinstance(values[name], (list, tuple)):
            raise CheckpointError(f"config.json: {name} must be a list, got {values[name]!r}")
        values[name] = tuple(values[name])
    if wanted == "int":
        integer(values, name)
    elif wanted in ("float", "bool", "str"):
        kinds: dict[str, tuple[type, ...]] = {"float": (int, float), "bool": (bool,), "str": (str,)}
        value: Any = values[name]
        is_wrong = not isinstance(value, kinds[wanted])
        if is_wrong or (wanted == "float" and (isinstance(value, bool) or not 0 < value <= LARGEST_NUMBER)):
            words = "positive number" if wanted == "float" else wanted
            raise CheckpointError(f"config.json: {name} must be a {words}, got {value!r}")


def rope_parameters(values: Mapping[str, Any], kind: str) -> RopeParameters:
    """Rope parameters of one layer type, from `rope_parameters` (by type or not) or the older `rope_scaling`."""
    given = section(values, "rope_parameters") or section(values, "rope_scaling")
    if kind in given or (given and all(isinstance(value, Mapping) for value in given.values())):
        given = section(given, kind)
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("rope_type", given.get("type", "default"))
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if name in values:
            given.setdefault(name, values[name])
    given["max_position_embeddings"] = integer(values, "max_position_embeddings")
    known = {}
    for field in dataclasses.fields(RopeParameters):
        if field.name in given:
            known[field.name] = _rope_value(field.name, given[field.name], is_list=field.default == ())
    return RopeParameters(**known)


def _rope_value(name: str, value: Any, *, is_list: bool) -> Any:
    """Numbers are numbers and lists of numbers are tuples, or the file is refused."""
    if is_list and isinstance(value, (list, tuple)) and all(isinstance(entry, (int, float)) for entry in value):
        return tuple(value)
    wanted = str if name == "rope_type" else bool if name == "truncate" else (int, float)
    if (
        is_list
        or not isinstance(value, wanted)
        or (isinstance(value, (int, float)) and name != "truncate" and not 0 < value <= LARGEST_NUMBER)
    ):
        raise CheckpointError(f"config.json: rope_parameters has {name} = {value!r}, which is not possible")
    return value
