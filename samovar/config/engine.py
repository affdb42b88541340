"""EngineConfig: the groups the engine reads, as one frozen value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from samovar.config.field import Group
from samovar.config.groups import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What `samovar serve` and `LLM` hand to an engine. Never changed; `config.resolve` returns a new one."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)


ENGINE_GROUPS: dict[str, type[Group]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
}
"""EngineConfig's fields and their groups."""


def with_settings(config: EngineConfig, **settings: Any) -> EngineConfig:
    """A copy of `config` with flat settings replaced; every rule is checked again."""
    changed: dict[str, Any] = {}
    for key, group in ENGINE_GROUPS.items():
        if mine := {name: value for name, value in settings.items() if name in group.settings}:
            changed[key] = dataclasses.replace(getattr(config, key), **mine)
    return dataclasses.replace(config, **changed)
