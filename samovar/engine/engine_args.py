"""EngineArgs: any engine flag as a keyword argument -> `EngineConfig`. Refuses what it does not know."""

from __future__ import annotations

from typing import Any

from samovar.config.engine import ENGINE_GROUPS, EngineConfig
from samovar.config.foreign import REASONS, unknown_setting
from samovar.config.parse import coerce
from samovar.errors import ConfigError

_SETTINGS = {name: setting for group in ENGINE_GROUPS.values() for name, setting in group.settings.items()}


class EngineArgs:
    """Engine flags by name, as on the command line: `EngineArgs("smollm2", max_num_seqs=8, max_model_len="32k")`.

    Raises `ConfigError` for a value out of range or a flag that only other engines have, `TypeError` for an unknown
    name.
    """

    def __init__(self, model: str, **flags: Any) -> None:
        self.config = engine_config({"model": model, **flags})
        """The configuration these flags make."""


def engine_config(flags: dict[str, Any]) -> EngineConfig:
    """Flags by name -> a checked configuration. None means "the default"."""
    values: dict[str, dict[str, Any]] = {group: {} for group in ENGINE_GROUPS}
    for name, value in flags.items():
        if name not in _SETTINGS:
            _refuse(name, value)
        elif value is not None:
            setting = _SETTINGS[name]
            group = next(key for key, kind in ENGINE_GROUPS.items() if kind is setting.group)
            values[group][name] = coerce(setting, value, source=name)
    made: dict[str, Any] = {key: kind(**values[key]) for key, kind in ENGINE_GROUPS.items()}
    return EngineConfig(**made)


def _refuse(name: str, value: Any) -> None:
    """Complain about a name that is no setting, unless its value asks for nothing."""
    if name not in REASONS:
        raise TypeError(unknown_setting(name, sorted(_SETTINGS), spell=str))
    if value not in (None, False, "", 0, "auto", [], {}):
        raise ConfigError(unknown_setting(name, (), spell=lambda _: f"{name}={value!r}"))
