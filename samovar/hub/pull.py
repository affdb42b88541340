"""`samovar pull`: fetch a model now, so that serving it later needs no network."""

from __future__ import annotations

from pathlib import Path

from samovar.config.checkpoint import describe
from samovar.config.description import ModelDescription
from samovar.config.groups import ModelConfig
from samovar.errors import ConfigError
from samovar.hub.download import Progress
from samovar.hub.locate import locate


def pull(model_config: ModelConfig, *, progress: Progress | None = None) -> tuple[Path, ModelDescription]:
    """Fetch `model_config.model` and read its headers, which proves that every file is here and whole in size."""
    if model_config.offline:
        raise ConfigError("--offline forbids to pull a model; leave it out")
    path = locate(model_config, progress=progress)
    return path, describe(path, model_config)
